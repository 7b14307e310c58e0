"""``SubprocessHandler``: one program as a ``subprocess.Popen``."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import IO, Any

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """Starts ``entrypoint`` with ``args`` as text, in a session of its own: ``proc``.

    ``env`` is added to this process's environment; ``stdout``, ``stderr``: files to write
    to, empty for this process's own streams. For code that uses PyTorch's class by itself;
    `SubprocessContext` does not need it.
    """

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any = None,
    ) -> None:
        command: tuple[str, ...] = (entrypoint, *(str(arg) for arg in args))
        if numa_options is not None:
            from phalanx.process import numa

            command = numa.command(command, numa_options, local_rank_id)
        self.local_rank_id = local_rank_id
        self._files: list[IO[str]] = []
        try:
            self.proc = self._popen(
                command, {**os.environ, **env}, stdout=self._open(stdout), stderr=self._open(stderr)
            )
        finally:
            for file in self._files:  # the process has its own copies
                file.close()

    def _open(self, path: str | None) -> IO[str] | None:
        if not path:
            return None
        self._files.append(open(path, "w"))
        return self._files[-1]

    def _popen(
        self, args: tuple[str, ...], env: dict[str, str], **streams: IO[str] | None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(args, env=env, start_new_session=True, **streams)  # type: ignore[call-overload,no-any-return]

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send ``death_sig`` (default SIGTERM) to the program's process group."""
        try:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        except ProcessLookupError:
            pass
