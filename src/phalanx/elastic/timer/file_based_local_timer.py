"""Timers whose requests travel through a named pipe, one JSON object per line.

The pipe is open to every process of the user, so the server trusts nothing that comes out of
it: what it reads is bounded, a writer that says nothing, half a line or nonsense delays and
harms nobody, and complete requests on either side of the nonsense count. Wire and names are
those of ``torch.distributed.elastic.timer.file_based_local_timer``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import selectors
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from phalanx.elastic.timer.api import TimerClient, TimerRequest
from phalanx.elastic.timer.debug_info_logging import log_debug_info_for_expired_timers
from phalanx.process import pause

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = logging.getLogger(__name__)

#: Longest line the server looks at, in bytes; a client's is 4096 at most, PyTorch's 4097.
LINE_LIMIT = 8192
#: Most timers a server holds; more are refused.
TIMER_LIMIT = 10_000
#: How long a client tries to reach a server that is not there or does not read, in seconds.
CLIENT_PATIENCE = 1.0

_BATCH_LIMIT = 1000  # requests registered at a time
_TRIES = 64  # places in a bad line where a request is looked for
_SETTLE = 0.05  # seconds to wait for more after a request that arrives expired already
_COMPLAINT_INTERVAL = 10.0  # seconds between two log lines about malformed input


class FileTimerRequest(TimerRequest):
    """A ``TimerRequest`` with the signal that ends the worker (0 or less: only log)."""

    __slots__ = ["signal", "version"]

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        super().__init__(worker_id=worker_pid, scope_id=scope_id, expiration_time=expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FileTimerRequest)
            and super().__eq__(other)
            and self.version == other.version
            and self.signal == other.signal
        )

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> str:
        """The request as it goes over the wire, without the newline."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


class FileTimerClient(TimerClient):
    """The client of ``FileTimerServer``; a worker is known by its pid.

    ``file_path`` is the server's named pipe; ``signal`` what the worker shall be ended with
    (0 or less: the expiry is only logged).
    """

    def __init__(self, file_path: str, signal: int = signal.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See ``TimerClient.acquire``.

        Raises BrokenPipeError if no server takes the request within about a second, and
        RuntimeError if the request is longer than a pipe takes in one piece.
        """
        self._send_request(
            FileTimerRequest(os.getpid(), scope_id, expiration_time, int(self.signal))
        )

    def release(self, scope_id: str) -> None:
        """See ``TimerClient.release``. Raises as ``acquire``."""
        self._send_request(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send_request(self, request: FileTimerRequest) -> None:
        line = (request.to_json() + "\n").encode()
        if len(line) > select.PIPE_BUF:
            # Longer ones could be torn apart by other writers.
            raise RuntimeError(
                f"timer request of {len(line)} bytes, at most {select.PIPE_BUF} are possible: "
                f"use a shorter scope than {request.scope_id[:80]!r}..."
            )
        end = time.monotonic() + CLIENT_PATIENCE
        pause = 0.01
        while True:
            try:
                self._write_line(line, end)
                return
            except OSError as e:
                left = end - time.monotonic()
                if left <= 0:
                    raise BrokenPipeError(
                        f"no timer server takes requests at {self._file_path!r}: {e.strerror or e}"
                    ) from e
                time.sleep(min(pause, left))
                pause = min(pause * 2, 0.1)

    def _write_line(self, line: bytes, end: float) -> None:
        # Non-blocking: a pipe without a server is an error here, not a wait without end.
        fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                raise OSError("not a named pipe")
            while True:
                try:
                    os.write(fd, line)  # whole or not at all: it is at most PIPE_BUF long
                    return
                except BlockingIOError:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise
                    poll = select.poll()
                    poll.register(fd, select.POLLOUT)
                    poll.poll(left * 1000)
        finally:
            os.close(fd)


def parse_request(value: object) -> FileTimerRequest:
    """The request that a decoded JSON value says; ValueError names what is wrong with it."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    for key in ("pid", "scope_id", "expiration_time", "signal"):
        if key not in value:
            raise ValueError(f"{key} is missing")
    pid, scope, when, signum = (
        value["pid"],
        value["scope_id"],
        value["expiration_time"],
        value["signal"],
    )
    if type(pid) is not int or abs(pid) >= 2**31:
        raise ValueError("pid is not a process id")
    if not isinstance(scope, str):
        raise ValueError("scope_id is not a string")
    if type(when) not in (int, float) or when != when:
        raise ValueError("expiration_time is not a number")
    if type(signum) is not int or signum > signal.NSIG:
        raise ValueError("signal is not a signal number")
    try:
        float(when)
    except OverflowError:
        raise ValueError("expiration_time is out of range") from None
    return FileTimerRequest(pid, scope, when, signum)


class LineReader:
    """Bytes in, requests out; pure. Counts what is not a request in ``dropped``.

    Lines of several writers may run into each other (a writer that never ended its line, then
    another's whole line): every complete request within a bad line is found. ``why`` says
    what was wrong with the last thing dropped.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._rest = b""
        self.dropped = 0
        self.why = ""

    def feed(self, data: bytes) -> list[FileTimerRequest]:
        *lines, rest = (self._rest + data).split(b"\n")
        requests: list[FileTimerRequest] = []
        for line in lines:
            requests += self._requests_in(line)
        # Too long for a line. Its end is kept, for a request may follow the nonsense in it.
        self._rest = rest[-self._limit :]
        return requests

    def _requests_in(self, line: bytes) -> list[FileTimerRequest]:
        if not line.strip():
            return []
        line = line[-self._limit :]
        try:
            return [parse_request(json.loads(line.decode()))]
        except (ValueError, RecursionError) as e:
            self.dropped += 1
            self.why = f"{e}: {line[:200]!r}"
        # A quote is never bare inside a JSON string: where this stands, a request may begin.
        text, requests, end = line.decode("utf-8", "replace"), [], 0
        starts = [i for i in range(len(text)) if text.startswith('{"', i)]
        for start in starts[-_TRIES:]:
            if start < end:
                continue
            try:
                value, after = json.JSONDecoder().raw_decode(text, start)
                requests.append(parse_request(value))
                end = after
            except (ValueError, RecursionError):
                pass
        return requests


class _Armed(NamedTuple):
    """What the server knows of a timer beyond its request."""

    due: float  # seconds of `pause.now`: neither a step of the wall clock nor Ctrl-Z counts
    started: str | None  # start time of the process, to tell it from a later one of that pid


class FileTimerServer:
    """Ends workers whose timers ran out; they tell it about their timers by a named pipe.

    ``file_path``: where to make the pipe (mode 0600; an old file there is removed). It takes
    requests from the moment this returns. ``max_interval``: seconds between two looks at which
    processes still exist, and two updates of the progress time; a deadline is met exactly,
    whatever it is. ``log_event(name, request)`` is told "watchdog started", "timer expired",
    "kill worker process", "watchdog stopped".

    Beyond PyTorch's:

    ``allowed_pids(pid)``: only timers of pids for which it is true are taken.

    ``on_expired(pid, requests)``: called in the watchdog's thread in place of sending the
    signal, with the expired timers in the order of their deadlines, and only if one of them
    asks for a signal; whoever takes it over must end the worker. While it runs no other
    timer runs out. If it raises, or returns False (the pid is none of its workers, a child
    of one maybe), the server sends the signal itself.

    The server never signals its own process or process group, or all processes at once.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        allowed_pids: Callable[[int], bool] | None = None,
        on_expired: Callable[[int, list[FileTimerRequest]], object] | None = None,
    ) -> None:
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event if log_event is not None else lambda name, request: None
        self._allowed_pids = allowed_pids
        self._on_expired = on_expired

        self._timers: dict[tuple[int, str], FileTimerRequest] = {}
        self._armed: dict[tuple[int, str], _Armed] = {}
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._run_once = False
        self._is_client_started = False
        self._request_count = 0
        self._last_progress_time = int(time.time())

        self._lines = LineReader()
        self._refused = 0
        self._complained = (-math.inf, 0)  # when, and how much was dropped by then
        self._closing = threading.Lock()

        if os.path.lexists(file_path):
            os.remove(file_path)
        os.mkfifo(file_path, 0o600)
        made = os.stat(file_path)
        self._identity = (made.st_dev, made.st_ino)
        # Open from the start, and for writing too: clients may come before the thread runs,
        # and the last writer's leaving is no end of file.
        self._fd = os.open(file_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if hasattr(self, "_wake") and self._watchdog_thread is None:
            self._close()

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the watchdog thread; nothing happens if it runs already.

        Raises RuntimeError after ``stop`` or ``run_once``: the pipe is gone then.
        """
        if self._watchdog_thread is not None:
            return
        if self._fd < 0:
            raise RuntimeError("this timer server was stopped: make a new one")
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name="timer-watchdog", daemon=self._daemon
        )
        self._watchdog_thread.start()
        logger.info(
            "timer server started at %s, max_interval=%s s", self._file_path, self._max_interval
        )
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End the thread, remove the pipe; may be called again and from any thread."""
        self._stop_signaled = True
        self._end_thread()
        self._tell("watchdog stopped", None)

    def run_once(self) -> None:
        """For tests: deal with what has been written by now, then end and remove the pipe."""
        self._run_once = True
        self._end_thread()

    def _end_thread(self) -> None:
        with self._closing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is None:
            self._close()
        elif thread is not threading.current_thread():
            # It ends at once, unless a callback keeps it; then it ends when that returns.
            thread.join(max(1.0, self._max_interval))
            if thread.is_alive():
                logger.warning("the timer server's thread is busy; it will end on its own")
        self._remove_pipe()

    def _remove_pipe(self) -> None:
        try:
            found = os.stat(self._file_path)
            # Not if another server has made its own there since.
            if (found.st_dev, found.st_ino) == self._identity:
                os.remove(self._file_path)
        except OSError:
            pass

    def _close(self) -> None:
        with self._closing:
            for fd in (self._fd, self._wake):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._wake = -1

    # -- the loop -----------------------------------------------------------------------------

    def _watchdog_loop(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                selector.register(self._wake, selectors.EVENT_READ)
                if not (self._stop_signaled or self._run_once):
                    # Nothing to watch before the first word of a client.
                    selector.select()
                while not self._stop_signaled:
                    last = self._run_once
                    try:
                        self._run_watchdog(selector)
                        self._last_progress_time = int(time.time())
                    except Exception:
                        logger.exception("the timer server goes on after an error")
                    if last:
                        break
        finally:
            self._close()

    def _run_watchdog(self, selector: selectors.BaseSelector) -> None:
        """One round: requests of up to ``max_interval``, then what has expired."""
        self.register_timers(self._get_requests(selector, self._max_interval))
        self._complain()
        with pause.lock:  # one that is over only because we were stopped is not
            all_expired = self.get_expired_timers(time.time())
        log_debug_info_for_expired_timers(
            self._run_id, {pid: [r.to_json() for r in rs] for pid, rs in all_expired.items()}
        )
        for pid, expired in all_expired.items():
            self._expire(pid, expired)
        self.clear_timers(set(all_expired))

    def _expire(self, pid: int, expired: list[FileTimerRequest]) -> None:
        expired.sort(key=lambda r: r.expiration_time)
        fatal = None
        for request in expired:
            self._tell("timer expired", request)
            if request.signal > 0:
                fatal = request
                break
        scopes = self._get_scopes(expired)
        if fatal is None:
            logger.warning("pid %s: timers ran out, no signal asked for: %s", pid, scopes)
            return
        if any(self._is_another_process(r) for r in expired):
            logger.info("pid %s has ended, another process has its number now", pid)
            return
        logger.warning("pid %s: timers ran out: %s", pid, scopes)
        if self._on_expired is not None:
            try:
                taken = self._on_expired(pid, expired) is not False
            except Exception:
                logger.exception("on_expired failed; ending pid %s directly", pid)
                taken = False
            if taken:
                self._tell("kill worker process", fatal)
                return
        if self._reap_worker(pid, fatal.signal):
            logger.info("pid %s: sent signal %s", pid, fatal.signal)
            self._tell("kill worker process", fatal)

    def _get_requests(
        self, selector: selectors.BaseSelector, max_interval: float
    ) -> list[FileTimerRequest]:
        """Requests that come until ``max_interval`` is over or a timer runs out."""
        requests: list[FileTimerRequest] = []
        now = time.monotonic()
        end = now + max_interval
        for armed in self._armed.values():
            end = min(end, now + armed.due - pause.at(now))
        while not self._stop_signaled:
            ready = selector.select(0 if self._run_once else max(0.0, end - now))
            now = time.monotonic()
            data = b""
            for key, _ in ready:
                if key.fd == self._fd:
                    data = self._read()
                else:
                    os.eventfd_read(self._wake)
            for request in self._lines.feed(data) if data else ():
                requests.append(request)
                if request.expiration_time >= 0:
                    wait = request.expiration_time - time.time()
                    end = min(end, now + max(wait, _SETTLE))
            if len(requests) >= _BATCH_LIMIT or (self._run_once and not data) or now >= end:
                break
        return requests

    def _read(self) -> bytes:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return b""
        self._is_client_started = self._is_client_started or bool(data)
        return data

    def _complain(self) -> None:
        """One log line about bad input at once, then at most one per interval."""
        now, dropped = time.monotonic(), self._lines.dropped + self._refused
        when, counted = self._complained
        if dropped > counted and now - when >= _COMPLAINT_INTERVAL:
            self._complained = (now, dropped)
            logger.warning("dropped %d bad timer lines, %s", dropped - counted, self._lines.why)

    # -- timers -------------------------------------------------------------------------------

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Take requests in: arm, re-arm or (negative expiration time) release."""
        steady, wall = time.monotonic(), time.time()
        for request in timer_requests:
            self._request_count += 1
            pid = request.worker_pid
            key = (pid, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
                self._armed.pop(key, None)
            elif not self._is_allowed(pid):
                self._refuse(f"pid {pid} is no worker of this agent")
            elif key not in self._timers and len(self._timers) >= TIMER_LIMIT:
                self._refuse(f"more than {TIMER_LIMIT} timers")
            else:
                self._timers[key] = request
                due = pause.at(steady) + request.expiration_time - wall
                self._armed[key] = _Armed(due, _start_time(pid))

    def _is_allowed(self, pid: int) -> bool:
        try:
            return self._allowed_pids is None or bool(self._allowed_pids(pid))
        except Exception:
            logger.exception("allowed_pids failed; a timer of pid %s is refused", pid)
            return False

    def _refuse(self, why: str) -> None:
        self._refused += 1
        self._lines.why = why

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget the timers of these pids and of all that exist no more."""
        gone = set(worker_pids)
        for pid in {pid for pid, _ in self._timers} - gone:
            if not FileTimerServer.is_process_running(pid):
                gone.add(pid)
        for key in [key for key in self._timers if key[0] in gone]:
            del self._timers[key]
            self._armed.pop(key, None)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """Per pid, the timers that have run out at ``deadline`` (Unix seconds by now's clock)."""
        steady = deadline - time.time() + pause.now()
        expired: dict[int, list[FileTimerRequest]] = {}
        for key, request in self._timers.items():
            armed = self._armed.get(key)
            if armed is None:
                over = request.expiration_time <= deadline
            else:
                over = armed.due <= steady
            if over:
                expired.setdefault(request.worker_pid, []).append(request)
        return expired

    def get_last_progress_time(self) -> int:
        """When the loop last completed a round, Unix seconds; now while no client ever came."""
        return self._last_progress_time if self._is_client_started else int(time.time())

    @property
    def dropped_lines(self) -> int:
        """How many lines were no request, or one that was refused."""
        return self._lines.dropped + self._refused

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether the process (or group, if negative) exists and may be signalled."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def _is_another_process(self, request: FileTimerRequest) -> bool:
        armed = self._armed.get((request.worker_pid, request.scope_id))
        if armed is None or armed.started is None:
            return False
        started = _start_time(request.worker_pid)
        return started is not None and started != armed.started

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send the signal; true also if there is no such process any more."""
        if worker_pid in (0, -1, os.getpid(), -os.getpgrp()):
            logger.error("pid %s is not signalled: it means the server itself", worker_pid)
            return False
        try:
            os.kill(worker_pid, signal)
        except ProcessLookupError:
            logger.info("pid %s has ended already", worker_pid)
        except Exception:
            logger.exception("pid %s cannot be sent signal %s", worker_pid, signal)
            return False
        return True

    def _get_scopes(self, timer_requests: Iterable[FileTimerRequest]) -> list[str]:
        return [r.scope_id for r in timer_requests]

    def _tell(self, name: str, request: FileTimerRequest | None) -> None:
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("the listener for %r failed", name)


def _start_time(pid: int) -> str | None:
    """Field 22 of ``/proc/<pid>/stat``; None: no such process."""
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The second field, a name in parentheses, may hold anything.
            return f.read(4096).rpartition(b")")[2].split()[19].decode("ascii", "replace")
    except (OSError, IndexError):
        return None
