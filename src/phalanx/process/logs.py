"""What workers write: cut into lines, shown on the console, remembered for the report.

`OutputRelay` stands between the workers and the console. Each worker gets a pipe; one
thread copies whole lines, with a prefix if there is to be one, and remembers each worker's
last lines, which are what explains most deaths. A console that does not keep up costs
lines on the console (it is said how many), not the workers' time.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import logging
import os
import re
import select
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

TAIL_LINES = 30
TAIL_BYTES = 32 * 1024
_LONGEST_LINE = 64 * 1024  # cut into pieces above; memory per stream stays bounded
_CHUNK = 64 * 1024
_PIPE_BYTES = 256 * 1024
_QUEUE_BYTES = 1024 * 1024  # waiting for the console, per console
_PATIENCE = 1.0  # seconds that workers may wait for a stuck console before lines are dropped
_IDLE = 0.1  # seconds after which an unfinished line is shown as it is
_F_SETPIPE_SZ = 1031

# A return at the very end may be the first half of "\r\n": it is not an end yet.
_LINE_END = re.compile(rb"\n|\r\n|\r(?!\Z)")


# ------------------------------------------------------------------ lines


class LineCutter:
    """Cuts bytes into lines; what is not finished yet waits. A pure object.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars), which it keeps. One that
    is longer than ``longest`` bytes comes out in pieces, the first ones without an end; no
    piece ends inside a UTF-8 character.
    """

    def __init__(self, longest: int = _LONGEST_LINE) -> None:
        if longest < 4:
            raise ValueError("a line must have room for one character of four bytes")
        self._longest = longest
        self._rest = b""

    @property
    def pending(self) -> bytes:
        """The beginning of a line whose end has not come."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` finishes."""
        if not data:
            return []
        data = self._rest + data
        lines = []
        start = 0
        for end in _LINE_END.finditer(data):
            lines.append(data[start : end.end()])
            start = end.end()
        *pieces, self._rest = self._pieces(data[start:]) or [b""]
        return [piece for line in lines for piece in self._pieces(line)] + pieces

    def feed_whole(self, data: bytes) -> bytes | None:
        """`feed` for plain lines, much faster: all that ``data`` finishes, in one piece.

        None, and nothing is taken, if that needs a closer look: returns, overlong lines.
        """
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > self._longest or b"\r" in data:
            return None
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """The unfinished line, which is over with this; b"" if there is none."""
        rest, self._rest = self._rest, b""
        return rest

    def _pieces(self, line: bytes) -> list[bytes]:
        if len(line) <= self._longest:
            return [line] if line else []
        pieces = []
        start = 0
        while len(line) - start > self._longest:
            end = start + self._longest
            back = end
            while back > end - 3 and line[back] & 0xC0 == 0x80:
                back -= 1
            if line[back] & 0xC0 == 0xC0:
                end = back
            pieces.append(line[start:end])
            start = end
        pieces.append(line[start:])
        return pieces


def line_text(line: bytes) -> str:
    """A line without its end, as text; bytes that are not UTF-8 become U+FFFD."""
    return line.rstrip(b"\r\n").decode("utf-8", "replace")


class Tail:
    """The last lines of a stream, bounded in number and in bytes."""

    def __init__(self, lines: int = TAIL_LINES, size: int = TAIL_BYTES) -> None:
        self._most_lines = lines
        self._most_bytes = size
        self._longest = max(80, size // 8)
        self._lines: collections.deque[bytes] = collections.deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Remember ``line`` (with its end). One that returned to column 0 is overwritten."""
        if self._lines and self._lines[-1].endswith(b"\r"):
            self._bytes -= len(self._lines.pop())
        if len(line) > self._longest:
            end = line[-1:] if line[-1:] in (b"\n", b"\r") else b""
            line = line[: self._longest] + b"..." + end
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > self._most_lines or self._bytes > self._most_bytes:
            self._bytes -= len(self._lines.popleft())

    def lines(self, unfinished: bytes = b"") -> list[str]:
        """Oldest first, without line ends; ``unfinished`` is what has no end yet."""
        kept = [line_text(line) for line in self._lines]
        if unfinished:
            kept.append(line_text(unfinished[: self._longest]))
        return kept[-self._most_lines :]


def tail_of_file(
    path: str | os.PathLike[str], lines: int = TAIL_LINES, size: int = TAIL_BYTES
) -> list[str]:
    """The last lines of a file; [] if it cannot be read. Reads ``size`` bytes at most."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return []
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return []
        start = max(0, status.st_size - size)
        data = os.pread(fd, size, start)
    except OSError:
        return []
    finally:
        os.close(fd)
    if start:
        head, newline, rest = data.partition(b"\n")
        data = rest if newline else head
    cutter, tail = LineCutter(), Tail(lines, size)
    for line in cutter.feed(data):
        tail.add(line)
    return tail.lines(cutter.flush())


# ------------------------------------------------------------------ names


def free_suffix(paths: Iterable[str]) -> str:
    """The empty string if none of ``paths`` exists, else the first of ".1", ".2", ... that is free.

    So that a later incarnation never writes over what an earlier one left.
    """
    wanted = list(paths)
    number = 0
    while True:
        suffix = f".{number}" if number else ""
        if not any(os.path.lexists(path + suffix) for path in wanted):
            return suffix
        number += 1


def render_prefix(template: str, values: Mapping[str, object]) -> str:
    """``template`` with ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${host}``,
    ``${attempt}`` filled in; ``${time}`` is filled in per line, unknown names stay."""
    import string

    return string.Template(template).safe_substitute(values)


# ------------------------------------------------------------------ the console


@dataclass(eq=False)
class _Console:
    """A descriptor that is written to without blocking, and what waits for it."""

    fd: int
    nonblocking: bool
    queue: collections.deque[bytes] = field(default_factory=collections.deque)
    size: int = 0
    armed: bool = False  # registered with the thread's epoll
    full_since: float | None = None
    dropping: bool = False
    dropped: int = 0
    broken: bool = False
    mid_line: _Source | None = None  # who has written the beginning of a line

    @classmethod
    def open(cls, fd: int) -> _Console:
        # O_NONBLOCK belongs to the open file, which we share with whoever started us: so a
        # pipe or a terminal is opened once more. Regular files never block.
        kind = os.fstat(fd).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            try:
                return cls(os.open(f"/proc/self/fd/{fd}", flags), nonblocking=True)
            except OSError:
                pass
        return cls(os.dup(fd), nonblocking=stat.S_ISREG(kind))

    def put(self, data: bytes) -> None:
        if not self.broken:
            self.queue.append(data)
            self.size += len(data)

    def write(self) -> None:
        """Write what goes out at once."""
        while self.queue:
            chunk = self._next()
            # Where writing may block, this much does not once the descriptor polls writable.
            most = len(chunk) if self.nonblocking else select.PIPE_BUF
            try:
                if not self.nonblocking and not _writable(self.fd, 0):
                    return
                count = os.write(self.fd, chunk[:most])
            except BlockingIOError:
                return
            except OSError as error:  # its reader is gone, the disk is full
                logger.warning("the workers' output is not shown any more: %s", error)
                self.broken = True
                self.queue.clear()
                self.size = 0
                return
            self.size -= count
            if count == len(chunk):
                self.queue.popleft()
            else:
                self.queue[0] = chunk[count:]

    def _next(self) -> bytes:
        """The next piece; small ones are joined first."""
        if len(self.queue) > 1 and len(self.queue[0]) < 4096:
            parts: list[bytes] = []
            size = 0
            while self.queue and size < _CHUNK:
                parts.append(self.queue.popleft())
                size += len(parts[-1])
            self.queue.appendleft(b"".join(parts))
        return self.queue[0]


def _writable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout * 1000))


@dataclass(eq=False)
class _Source:
    """One stream of one worker."""

    local_rank: int
    fd: int
    console: _Console | None  # None: remembered only
    prefix: str
    tail: Tail
    cutter: LineCutter = field(default_factory=LineCutter)
    shown: int = 0  # bytes of the unfinished line that are on the console already
    grew_at: float = 0.0  # when the unfinished line last grew; 0: there is nothing to show
    paused: bool = False


class OutputRelay:
    """See the module. All methods may be called from any thread."""

    def __init__(self, *, lines: int = TAIL_LINES, size: int = TAIL_BYTES) -> None:
        """``lines`` and ``size`` (bytes) bound what is remembered of each stream."""
        self._lines, self._size = lines, size
        self._lock = threading.Lock()
        self._sources: dict[int, _Source] = {}
        self._consoles: dict[tuple[int, ...], _Console] = {}
        self._tails: dict[tuple[int, str], _Source] = {}
        self._orders: collections.deque[tuple[int, threading.Event]] = collections.deque()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # set: closing
        self._released = False

    def attach(
        self,
        local_rank: int,
        stream: str = "stderr",
        *,
        console: int | None = None,
        prefix: str = "",
        show: bool = True,
    ) -> int:
        """A new pipe for one stream of one worker: returns the end that the worker gets.

        The caller closes it as soon as the worker has been started. ``console`` is the
        descriptor to copy to (default: 1 for "stdout", 2 for "stderr"); ``show`` False
        only remembers. ``prefix`` stands before each line, `render_prefix` makes one.
        Raises OSError, ValueError for another stream, RuntimeError when closed.
        """
        if stream not in ("stdout", "stderr"):
            raise ValueError(f"a stream is stdout or stderr, not {stream!r}")
        with self._lock:
            if self._deadline is not None:
                raise RuntimeError("the relay is closed")
            target = None
            if show:
                number = (1 if stream == "stdout" else 2) if console is None else console
                target = self._console(number)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            try:
                fcntl.fcntl(writer, _F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:  # over this user's limit: the default will do
                pass
            source = _Source(local_rank, reader, target, prefix, Tail(self._lines, self._size))
            self._sources[reader] = source
            self._tails[local_rank, stream] = source
            self._epoll.register(reader, select.EPOLLIN)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="phalanx-output-relay", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    self._drop(source)
                    os.close(writer)
                    raise OSError(errno.EAGAIN, f"{error} (see ulimit -u)") from None
                self._thread = thread
        return writer

    def drain(self, local_rank: int, timeout: float = 0.5) -> None:
        """After the worker's death: take what it wrote last. Waits ``timeout`` s at most.

        The pipes stay open for children of the worker that still hold them.
        """
        done = threading.Event()
        with self._lock:
            if self._thread is None or self._released:
                return
            self._orders.append((local_rank, done))
            os.eventfd_write(self._wake, 1)
        done.wait(timeout)

    def tail(self, local_rank: int, stream: str = "stderr") -> list[str]:
        """The last lines of the stream's latest pipe, oldest first; [] if there was none."""
        with self._lock:
            source = self._tails.get((local_rank, stream))
            return source.tail.lines(source.cutter.pending) if source else []

    def close(self, timeout: float = 2.0) -> None:
        """Take what is in the pipes, show it, close everything; ``timeout`` s at most."""
        with self._lock:
            if self._deadline is not None:
                return
            self._deadline = time.monotonic() + timeout
            if self._thread is None:
                self._release()
                return
            os.eventfd_write(self._wake, 1)
        self._thread.join(timeout + 1.0)
        if self._thread.is_alive():
            logger.warning("the relay of the workers' output is stuck; its last lines are lost")

    # -- the thread; everything below has the lock

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._deadline is not None:
                        break
                    wait = self._idle()
                ready = {fd for fd, _ in self._epoll.poll(wait)}
                with self._lock:
                    self._turn(ready, time.monotonic())
            with self._lock:
                self._last_turn(self._deadline)
        except Exception:
            logger.exception("the relay of the workers' output has failed")
        finally:
            with self._lock:
                self._release()

    def _idle(self) -> float | None:
        """How long nothing needs doing that no descriptor tells of, in seconds."""
        now = time.monotonic()
        waits = [s.grew_at + _IDLE - now for s in self._sources.values() if s.grew_at]
        waits += [
            console.full_since + _PATIENCE - now
            for console in self._consoles.values()
            if console.full_since is not None and not console.dropping
        ]
        return max(0.0, min(waits)) if waits else None

    def _turn(self, ready: set[int], now: float) -> None:
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready:
            source = self._sources.get(fd)
            if source is not None:
                self._read(source, _CHUNK)
        while self._orders:
            local_rank, done = self._orders.popleft()
            for source in [s for s in self._sources.values() if s.local_rank == local_rank]:
                self._read(source, 4 * _PIPE_BYTES)
                self._end_line(source)
            done.set()
        for source in self._sources.values():
            if source.grew_at and now - source.grew_at >= _IDLE:
                self._show_unfinished(source)
        for console in self._consoles.values():
            console.write()
            self._balance(console, now)

    def _last_turn(self, deadline: float) -> None:
        self._turn(set(), time.monotonic())
        for source in list(self._sources.values()):
            self._read(source, 4 * _PIPE_BYTES)
            self._end_line(source)
        for console in self._consoles.values():
            console.write()
            while console.queue:
                left = deadline - time.monotonic()
                if left <= 0 or not _writable(console.fd, left):
                    break
                console.write()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        for source in list(self._sources.values()):
            self._drop(source)
        for console in self._consoles.values():
            os.close(console.fd)
        while self._orders:
            self._orders.popleft()[1].set()
        self._epoll.close()
        os.close(self._wake)

    def _console(self, fd: int) -> _Console:
        status = os.fstat(fd)
        # stdout and stderr are often one and the same terminal or pipe: one queue then.
        shared = stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode)
        key = (status.st_dev, status.st_ino) if shared else (fd,)
        console = self._consoles.get(key)
        if console is None:
            console = self._consoles[key] = _Console.open(fd)
        return console

    def _read(self, source: _Source, limit: int) -> None:
        while limit > 0:
            try:
                data = os.read(source.fd, min(limit, _CHUNK))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end_line(source)
                self._drop(source)
                return
            limit -= len(data)
            for line in source.cutter.feed(data):
                self._take(source, line)
            source.grew_at = time.monotonic() if source.cutter.pending else 0.0

    def _drop(self, source: _Source) -> None:
        if self._sources.pop(source.fd, None) is not None:
            if not source.paused:
                self._epoll.unregister(source.fd)
            os.close(source.fd)
            if source.console is not None and source.console.mid_line is source:
                source.console.mid_line = None

    def _end_line(self, source: _Source) -> None:
        rest = source.cutter.flush()
        source.grew_at = 0.0
        if rest:
            self._take(source, rest + b"\n")

    def _take(self, source: _Source, line: bytes) -> None:
        source.tail.add(line)
        shown, source.shown = source.shown, 0
        self._show(source, line[shown:])

    def _show_unfinished(self, source: _Source) -> None:
        source.grew_at = 0.0
        pending = source.cutter.pending
        if len(pending) > source.shown:
            self._show(source, pending[source.shown :])
            source.shown = len(pending)

    def _show(self, source: _Source, data: bytes) -> None:
        console = source.console
        if console is None or console.broken:
            return
        if console.dropping:
            console.dropped += data.endswith((b"\n", b"\r"))
            return
        if source.prefix:
            # Behind a prefix every update of a progress bar is a line of its own.
            data = data.rstrip(b"\r\n") + b"\n" if data.endswith((b"\n", b"\r")) else data
        if console.mid_line is not source:
            if console.mid_line is not None:
                console.put(b"\n")
            if source.prefix:
                data = _stamped(source.prefix) + data
        console.put(data)
        console.mid_line = None if data.endswith(b"\n") else source

    def _balance(self, console: _Console, now: float) -> None:
        """Hold the workers up for a moment when the console does not keep up, then drop."""
        full = console.size > _QUEUE_BYTES
        if full and console.full_since is None:
            console.full_since = now
        elif console.full_since is not None and console.size <= _QUEUE_BYTES // 2:
            console.full_since = None
            console.dropping = False
            if console.dropped:
                start = b"\n" if console.mid_line is not None else b""
                text = f"[phalanx: {console.dropped} lines not shown: the console was too slow]\n"
                console.put(start + text.encode())
                console.dropped, console.mid_line = 0, None
        elif console.full_since is not None and now - console.full_since >= _PATIENCE:
            console.dropping = True
        pause = console.full_since is not None and not console.dropping
        for source in self._sources.values():
            if source.console is console and source.paused != pause:
                source.paused = pause
                if pause:
                    self._epoll.unregister(source.fd)
                else:
                    self._epoll.register(source.fd, select.EPOLLIN)
        if console.armed != bool(console.queue):
            try:
                if console.queue:
                    self._epoll.register(console.fd, select.EPOLLOUT)
                else:
                    self._epoll.unregister(console.fd)
                console.armed = bool(console.queue)
            except OSError:  # a regular file: nothing is ever left in its queue
                pass


def _stamped(prefix: str) -> bytes:
    if "${time}" in prefix:
        import datetime

        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        prefix = prefix.replace("${time}", now)
    return prefix.encode("utf-8", "replace")
