"""Follows workers' log files and copies their lines to the console.

The names of ``torch.distributed.elastic.multiprocessing.tail_log``. One thread follows all
files of a `TailLog`; the kernel tells it of new bytes (inotify), so a line appears as soon
as it is written. Where the kernel does not (its limit of watches is reached, the file is
written by another host), files are looked at every ``interval_sec`` seconds.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from phalanx.process.logs import LineCutter, line_text

__all__ = ["TailLog", "tail_logfile"]

logger = logging.getLogger(__name__)

_CHUNK = 64 * 1024
_STOP_LIMIT = 10.0  # seconds that a destination may take to accept the last lines


def _every_line(line: str) -> bool:
    return True


_IN_MODIFY = 0x002
_IN_MOVED_TO = 0x080
_IN_CREATE = 0x100


class _Watcher:
    """Tells when one of several files may have grown or come into being."""

    def __init__(self) -> None:
        import ctypes

        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._inotify: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify >= 0:
            self._poll.register(self._inotify, select.POLLIN)

    def watch_file(self, fd: int) -> None:
        """Watch the open file ``fd``."""
        self._add(f"/proc/self/fd/{fd}", _IN_MODIFY)

    def watch_directory(self, path: str) -> None:
        """Watch for files that appear in the directory."""
        self._add(path, _IN_CREATE | _IN_MOVED_TO)

    def _add(self, path: str, mask: int) -> None:
        if self._inotify >= 0:  # a failure leaves the look every interval
            self._libc.inotify_add_watch(self._inotify, os.fsencode(path), mask)

    def wait(self, timeout: float) -> None:
        """Return when something happened, when woken, or after ``timeout`` seconds."""
        for fd, _ in self._poll.poll(max(0.0, timeout) * 1000):
            try:
                os.read(fd, 65536)
            except BlockingIOError:
                pass

    def wake(self) -> None:
        """From any thread: `wait` returns."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        os.close(self._wake)
        if self._inotify >= 0:
            os.close(self._inotify)


class _Follower:
    """One file: reads what is new and writes it line by line to ``dst``."""

    def __init__(
        self,
        header: str,
        path: str,
        dst: TextIO,
        line_filter: Callable[[str], bool] | None,
    ) -> None:
        self.header = header
        self.path = path
        self._dst = dst
        self._filter = None if line_filter is _every_line else line_filter
        self._fd = -1
        self._cutter = LineCutter()

    def open(self, watcher: _Watcher) -> bool:
        """Open the file if it is there by now; False if it is not. Raises OSError."""
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return False
            watcher.watch_file(self._fd)
        return True

    def copy(self) -> None:
        """Copy what has been written up to now. Raises OSError, and what ``dst`` raises."""
        status = os.fstat(self._fd)
        here = os.lseek(self._fd, 0, os.SEEK_CUR)
        if status.st_size < here:  # emptied under our feet: what follows is new
            here = os.lseek(self._fd, 0, os.SEEK_SET)
        # Up to the size of now: a writer that never pauses must not keep us here.
        left = max(status.st_size - here, 0)
        while True:
            data = os.read(self._fd, min(_CHUNK, left) or 1)
            self._take(data)
            left -= len(data)
            if not data or left <= 0:
                return

    def finish(self) -> None:
        """Copy the rest, also a last line without an end, and close the file."""
        if self._fd < 0:
            return
        try:
            self.copy()
            rest = self._cutter.flush()
            if rest:
                self._write(self._shown(rest))
        finally:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, data: bytes) -> None:
        whole = self._cutter.feed_whole(data) if self._filter is None else None
        if whole is None:
            self._write("".join(map(self._shown, self._cutter.feed(data))))
        elif whole:
            text = whole[:-1].decode("utf-8", "replace").replace("\n", f"\n{self.header}")
            self._write(f"{self.header}{text}\n")

    def _shown(self, line: bytes) -> str:
        """What of a line is to be shown, prefix and end included; nothing if it is not wanted."""
        text = line_text(line) + "\n"
        return self.header + text if self._filter is None or self._filter(text) else ""

    def _write(self, text: str) -> None:
        if not text:
            return
        try:
            self._dst.write(text)
        except UnicodeEncodeError:  # a console that is not UTF-8
            encoding = getattr(self._dst, "encoding", None) or "ascii"
            self._dst.write(text.encode(encoding, "backslashreplace").decode(encoding))
        flush = getattr(self._dst, "flush", None)
        if flush is not None:
            flush()


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy the lines of ``file`` to ``dst``, each after ``header``, until ``finished`` is set.

    Waits for the file to appear. ``log_line_filter`` None: all lines. Raises OSError.
    """
    watcher = _Watcher()
    follower = _Follower(header, file, dst, log_line_filter)
    try:
        watcher.watch_directory(os.path.dirname(os.path.abspath(file)))
        while not finished.is_set():
            if follower.open(watcher):
                follower.copy()
            watcher.wait(interval_sec)
        if follower.open(watcher):
            follower.finish()
    finally:
        follower.close()
        watcher.close()


class _Threads:
    """Whether what follows was told to end; PyTorch's name and place for it."""

    _shutdown = False


class TailLog:
    """Follows ``log_files`` (path by local rank) from `start` to `stop`.

    Before each line stands ``log_line_prefixes[rank]``, by default ``[{name}{rank}]:``.
    A file may appear later. What goes wrong with one file is logged and ends only that one.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = _every_line,
    ) -> None:
        self._name = name
        self._dst = dst
        self._log_files = log_files
        self._interval_sec = interval_sec
        prefixes = log_line_prefixes or {}
        self._followers = {
            rank: _Follower(prefixes.get(rank, f"[{name}{rank}]:"), path, dst, log_line_filter)
            for rank, path in log_files.items()
            if path != os.devnull
        }
        self._watcher: _Watcher | None = None
        self._thread: threading.Thread | None = None
        self._threadpool = _Threads() if log_files else None
        self._finished = False
        self._stopped = False

    def start(self) -> TailLog:
        """Start following; returns itself. A second call does nothing."""
        if self._followers and self._dst is not None and self._thread is None and not self._stopped:
            self._watcher = _Watcher()
            self._thread = threading.Thread(
                target=self._run, args=(self._watcher,), name=f"TailLog_{self._name}", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Copy what is in the files by now, then end. Waits for that, but not for ever."""
        if self._thread is not None and self._watcher is not None and not self._stopped:
            self._finished = True
            self._watcher.wake()
            self._thread.join(_STOP_LIMIT)
            if self._thread.is_alive():
                logger.warning(
                    "the last lines of %s are not shown: the console takes none", self._name
                )
            else:
                self._watcher.close()
        if self._threadpool is not None:
            self._threadpool._shutdown = True
        self._stopped = True

    def stopped(self) -> bool:
        """Whether `stop` has been called and has returned."""
        return self._stopped

    def _run(self, watcher: _Watcher) -> None:
        followers = dict(self._followers)
        for path in {os.path.dirname(os.path.abspath(f.path)) for f in followers.values()}:
            watcher.watch_directory(path)

        def each(action: Callable[[_Follower], None]) -> None:
            for rank, follower in list(followers.items()):
                try:
                    if follower.open(watcher):
                        action(follower)
                except Exception as error:
                    logger.exception(
                        "%s of rank %s is not followed any more: %s: %s",
                        follower.path,
                        rank,
                        type(error).__name__,
                        error,
                    )
                    follower.close()
                    del followers[rank]

        while not self._finished:
            each(_Follower.copy)
            watcher.wait(self._interval_sec)
        each(_Follower.finish)
