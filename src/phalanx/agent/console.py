"""The few lines that ``phalanx run`` writes for a person, to stderr."""

from __future__ import annotations

import os
import sys
from typing import TextIO


class Console:
    """Lines with ``phalanx:`` in front; coloured on a terminal, plain otherwise.

    A stream that cannot be written to any more (closed pipe, full disk) is given up
    silently: what a person would read must not harm training.
    """

    def __init__(self, stream: TextIO | None = None, colour: bool | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        if colour is None:
            colour = (
                self.stream is not None
                and self.stream.isatty()
                and "NO_COLOR" not in os.environ
                and os.environ.get("TERM") != "dumb"
            )
        self.colour = colour

    def _write(self, text: str, paint: str = "") -> None:
        head = "phalanx:"
        if self.colour:
            head = f"\x1b[36m{head}\x1b[0m"
            if paint:
                text = f"\x1b[{paint}m{text}\x1b[0m"
        try:
            self.stream.write(f"{head} {text}\n")
            self.stream.flush()
        except (OSError, ValueError, AttributeError):
            pass

    def say(self, text: str) -> None:
        """Something happened as it should."""
        self._write(text)

    def good(self, text: str) -> None:
        """A recovery, or the end."""
        self._write(text, "32")

    def warn(self, text: str) -> None:
        """Something to know; the job goes on."""
        self._write(text, "33")

    def fail(self, text: str) -> None:
        """A failure."""
        self._write(text, "1;31")

    def quote(self, lines: list[str]) -> None:
        """Lines of a worker's own output."""
        try:
            for line in lines:
                self.stream.write(f"phalanx: {line}\n")
            self.stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def seconds(value: float) -> str:
    """``3 ms``, ``0.21 s``, ``14.2 s``, ``3 min 05 s``."""
    if value < 0.1:
        return f"{value * 1e3:.0f} ms" if value >= 0.0095 else f"{value * 1e3:.1f} ms"
    if value < 1:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
