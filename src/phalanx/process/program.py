"""What a worker runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """The user's program, said twice: as a command and, for Python, as what the command runs.

    ``argv`` is the complete command of a fresh start. ``script`` (a path) or ``module``
    (a dotted name, as for ``python -m``) with ``args`` say the same thing for a warm
    start, in which a process that already runs Python becomes the program.
    """

    argv: tuple[str, ...]
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("a program needs a command: argv is empty")
        if self.script is not None and self.module is not None:
            raise ValueError("a program is a script or a module, not both")

    @property
    def warmable(self) -> bool:
        """Whether a warm process can become this program."""
        return self.script is not None or self.module is not None
