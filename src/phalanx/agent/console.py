"""The few lines that ``phalanx run`` writes for a person, to stderr."""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
import threading
import traceback
from typing import TextIO

_PATIENCE = 1.0  # seconds that a stuck stream may hold its writer up, once
_WAITING = 128 * 1024  # bytes that wait for a stuck stream before it does


class Patient(io.TextIOBase):
    """A text stream on a pipe, terminal or socket on which no write waits for long.

    What one that takes nothing (a stopped terminal, a reader that does not read) does not
    take is kept for later; what is too much for that is dropped, and it is said how much.
    One that is broken raises OSError as usual.
    """

    def __init__(self, stream: TextIO) -> None:
        """Raises OSError or ValueError when there is no descriptor behind ``stream``."""
        self._stream = stream
        self._lock = threading.Lock()
        self._waiting = b""
        self._lost = 0  # lines behind those
        number = stream.fileno()
        # O_NONBLOCK belongs to the open file, which we share with whoever started us: so the
        # file is opened once more. A socket cannot be; what it polls writable it takes.
        self._fd = number
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            self._fd = os.open(f"/proc/self/fd/{number}", flags)

    @classmethod
    def over(cls, stream: TextIO | None) -> TextIO | None:
        """``stream`` made patient, where that is possible and makes a difference."""
        try:
            kind = os.fstat(stream.fileno()).st_mode  # type: ignore[union-attr]
            if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISSOCK(kind):
                return cls(stream)  # type: ignore[arg-type,return-value]
        except (OSError, ValueError, AttributeError):
            pass
        return stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        with self._lock:
            self._push(0)
            if len(self._waiting) > _WAITING and not self._lost:
                self._push(_PATIENCE)
            if len(self._waiting) > _WAITING:
                self._lost += data.count(b"\n") or 1
                return len(text)
            if self._lost:
                note = f"[phalanx: {self._lost} lines not shown: the console was too slow]\n"
                self._waiting += note.encode()
                self._lost = 0
            self._waiting += data
            self._push(0)
        return len(text)

    def flush(self) -> None:
        """Write what waits, as far as it goes out at once."""
        if self._waiting:
            with self._lock:
                self._push(0)

    def drain(self) -> None:
        """The last flush: waits a moment."""
        with self._lock:
            self._push(_PATIENCE)

    def _push(self, patience: float) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            while self._waiting and poll.poll(patience * 1000):
                count = os.write(self._fd, self._waiting[: select.PIPE_BUF])
                self._waiting = self._waiting[count:]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting = b""
            raise

    def close(self) -> None:
        if self._fd >= 0 and self._fd != self._stream.fileno():
            os.close(self._fd)
        self._fd = -1
        super().close()


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
        self._put(f"{head} {text}\n")

    def _put(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError, AttributeError):
            pass

    def catch_up(self) -> None:
        """Show what the stream has not taken yet, if it takes it now."""
        try:
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
        self._put("".join(f"phalanx: {line}\n" for line in lines))


class ConsoleHandler(logging.Handler):
    """What our loggers say, as lines of the console; a traceback only of a defect."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises."""
        try:
            self._console.warn(record.getMessage())
            error = record.exc_info[1] if record.exc_info else None
            if error is not None and not isinstance(error, OSError):
                self._console.quote("".join(traceback.format_exception(error)).splitlines())
        except Exception:
            self.handleError(record)


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
