"""The few lines that ``phalanx run`` writes for a person, to stderr."""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import TextIO

_PATIENCE = 1.0  # seconds that a stuck stream may hold the agent up, once


class Console:
    """Lines with ``phalanx:`` in front; coloured on a terminal, plain otherwise.

    A stream that cannot be written to any more (closed pipe, full disk) is given up
    silently, and one that takes nothing (a stopped terminal, a reader that does not read)
    costs lines: what a person would read must not harm training.
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
        self._lost = 0  # lines, since the stream took the last one
        self._fd = _unblocking(self.stream)

    def _write(self, text: str, paint: str = "") -> None:
        head = "phalanx:"
        if self.colour:
            head = f"\x1b[36m{head}\x1b[0m"
            if paint:
                text = f"\x1b[{paint}m{text}\x1b[0m"
        self._put(f"{head} {text}\n")

    def _put(self, text: str) -> None:
        try:
            if self._fd is None:
                self.stream.write(text)
                self.stream.flush()
                return
            self.stream.flush()  # whoever else writes there has its turn first
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            left = self._missed().encode() + text.encode(encoding, "backslashreplace")
            while left and self._takes_more():
                left = left[os.write(self._fd, left) :]
            if left:
                self._lost += text.count("\n")
        except BlockingIOError:
            self._lost += text.count("\n")
        except (OSError, ValueError, AttributeError):
            pass

    def _takes_more(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)  # type: ignore[arg-type]
        return bool(poll.poll(0 if self._lost else _PATIENCE * 1000))

    def _missed(self) -> str:
        """What to say first when the stream takes lines again."""
        if not self._lost or not self._takes_more():
            return ""
        lost, self._lost = self._lost, 0
        return f"[phalanx: {lost} lines of its own not shown: the console was too slow]\n"

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
        self._put("".join(f"phalanx: {line}\n" for line in lines))


def _unblocking(stream: TextIO | None) -> int | None:
    """A descriptor for the pipe or terminal behind ``stream`` whose writes never block.

    None: it is neither. The file is opened once more, because O_NONBLOCK belongs to the open
    file, which we share with whoever started us.
    """
    try:
        number = stream.fileno()  # type: ignore[union-attr]
        kind = os.fstat(number).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
            return None
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        return os.open(f"/proc/self/fd/{number}", flags)
    except (OSError, ValueError, AttributeError):
        return None


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
