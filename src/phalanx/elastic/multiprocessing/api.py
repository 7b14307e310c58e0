"""Process contexts: a group of workers that is started, waited for and stopped as one.

The names of ``torch.distributed.elastic.multiprocessing.api``. The two kinds of context
live in modules of their own.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from phalanx.elastic.multiprocessing.errors import ProcessFailure, record
from phalanx.elastic.multiprocessing.logs_specs import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    Std,
    to_map,
)
from phalanx.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout
from phalanx.elastic.multiprocessing.tail_log import TailLog
from phalanx.process import errorfile
from phalanx.process.logs import tail_of_file

if TYPE_CHECKING:
    import socket

    from phalanx.elastic.multiprocessing.multiprocess_context import MultiprocessContext
    from phalanx.elastic.multiprocessing.subprocess_context import SubprocessContext
    from phalanx.process.store_process import StoreProcess

IS_WINDOWS = sys.platform == "win32"
IS_MACOS = sys.platform == "darwin"

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

logger = logging.getLogger(__name__)

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "handled_signals",
    "to_map",
]


# ------------------------------------------------------------------ signals to the agent


class SignalException(Exception):
    """A signal that should end the agent has arrived: ``sigval``. Do not swallow it."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class _Interruptions:
    """What the handler has to know. Used by the main thread only."""

    def __init__(self) -> None:
        self.depth = 0  # sections in which the handler raises nothing
        self.wakers: list[Callable[[], None]] = []
        self.pending: list[int] = []
        self.raised = 0  # since workers were last started
        self.previous: dict[int, Any] = {}
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def count(self) -> int:
        return self.raised + len(self.pending)


_interruptions = _Interruptions()


def _terminate_process_handler(signum: int, frame: FrameType | None) -> None:
    """Raises SignalException; within `_undisturbed` it is raised at the end of that."""
    if _interruptions.depth:
        _interruptions.pending.append(signum)
        for wake in _interruptions.wakers:
            wake()
        return
    _interruptions.raised += 1
    _raise_signal(signum)


def _raise_signal(signum: int) -> None:
    raise SignalException(
        f"Process {os.getpid()} got signal: {int(signum)}", sigval=signal.Signals(signum)
    )


@contextlib.contextmanager
def _undisturbed(wake: Callable[[], None]) -> Iterator[None]:
    """A signal neither tears the body apart nor is lost; ``wake`` has it stop waiting.

    Raised afterwards is only the first: whoever has got that one is stopping already.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _interruptions
    state.wakers.append(wake)
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1
        state.wakers.remove(wake)
        if state.depth == 0 and state.pending:
            pending, state.pending = state.pending, []
            first = state.raised == 0
            state.raised += len(pending)
            if first:
                _raise_signal(pending[0])


def _take_signals(holder: object) -> None:
    """Install the handler for the signals of the environment, until `_give_signals_back`."""
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            # PyTorch's words: its tests know them. A signal that ends this process then gives
            # the workers no time to save; they are ended all the same.
            "Failed to register signal handlers since torchelastic is running on a child thread. "
            "This could lead to orphaned worker processes if the torchrun is terminated."
        )
        return
    state = _interruptions
    if not len(state.holders):
        state.previous.clear()
    state.holders.add(holder)
    state.raised = 0
    for name in os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS).split(","):
        name = name.strip()
        try:
            if not name.startswith("SIG") or name.startswith("SIG_"):
                raise AttributeError(f"there is no signal {name!r}")
            number = getattr(signal, name)
            if number in (signal.SIGKILL, signal.SIGSTOP):
                logger.warning(
                    "%s cannot be caught by any process: leave it out of %s",
                    name,
                    SIGNALS_VARIABLE,
                )
                continue
            before = signal.getsignal(number)
            if name == "SIGHUP" and before is signal.SIG_IGN:
                logger.info("SIGHUP stays ignored, as nohup wants it")
                continue
            signal.signal(number, _terminate_process_handler)
            if before is not _terminate_process_handler:
                state.previous.setdefault(int(number), before)
            logger.info("Registered signal handler for %s", name)
        except (AttributeError, ValueError, TypeError, OSError) as error:
            logger.warning("%r in %s is not handled: %s", name, SIGNALS_VARIABLE, error)
        except RuntimeError as error:
            if IS_WINDOWS:
                logger.info("%s is no signal that Windows has; left out", name)
            else:
                logger.warning("%r in %s is not handled: %s", name, SIGNALS_VARIABLE, error)


def _give_signals_back(holder: object) -> None:
    """The last holder puts back what was there; off the main thread nothing happens."""
    state = _interruptions
    if threading.current_thread() is not threading.main_thread() or holder not in state.holders:
        return
    state.holders.discard(holder)
    if len(state.holders):
        return
    previous, state.previous = state.previous, {}
    for number, handler in previous.items():
        if signal.getsignal(number) is _terminate_process_handler:
            # None: a handler that is not Python's; there is no way back to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def handled_signals() -> Iterator[None]:
    """For launchers: the signals are handled all through the body, not only while workers run.

    Contexts within take part instead of restoring the handlers themselves. Ours.
    """

    class Holder:
        pass

    holder = Holder()
    _take_signals(holder)
    try:
        yield
    finally:
        _give_signals_back(holder)


# ------------------------------------------------------------------ small helpers


def _validate_full_rank(d: Mapping[int, Any], nprocs: int, what: str) -> None:
    expected, actual = set(range(nprocs)), set(d)
    if actual != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}"
        )


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], Any]) -> Any:
    """``redirect_fn(std_rd)``; a context that does nothing for an empty path."""
    if IS_WINDOWS or IS_MACOS or not std_rd:
        return contextlib.nullcontext()
    return redirect_fn(std_rd)


def _wrap(
    local_rank: int,
    fn: Callable[..., Any],
    args: Mapping[int, tuple[Any, ...]],
    envs: Mapping[int, Mapping[str, str]],
    stdout_redirects: Mapping[int, str],
    stderr_redirects: Mapping[int, str],
    ret_vals: Mapping[int, Any],
    queue_finished_reading_event: Any,
    numa_options: Any = None,
) -> None:
    """What a function worker does; everything is by local rank.

    The value goes to ``ret_vals[local_rank].put``, then it waits for the event.
    """
    os.environ.update({k: v for k, v in envs[local_rank].items() if v is not None})

    def call(*arguments: Any) -> Any:
        if numa_options is not None:
            from phalanx.process import numa

            numa.bind_this_process(numa_options, local_rank)
        return fn(*arguments)

    with (
        get_std_cm(stdout_redirects[local_rank], redirect_stdout),
        get_std_cm(stderr_redirects[local_rank], redirect_stderr),
    ):
        try:
            value = record(call)(*args[local_rank])
        except Exception:
            traceback.print_exc()  # while stderr is still the redirected one
            raise
    ret_vals[local_rank].put(value)
    queue_finished_reading_event.wait()


def wall_ns(monotonic_ns: int) -> int:
    """Nanoseconds since the epoch of a moment of CLOCK_MONOTONIC, as clocks stand now."""
    return time.time_ns() - time.monotonic_ns() + monotonic_ns


# ------------------------------------------------------------------ contexts


@dataclass
class RunProcsResult:
    """How a group ended, all by local rank.

    ``return_values``: of functions; None each for programs. ``stdouts``, ``stderrs``:
    paths, empty where a stream was not redirected.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether any worker failed."""
        return len(self.failures) > 0


class PContext(abc.ABC):
    """``nprocs`` copies of ``entrypoint`` as processes; ``args`` and ``envs`` by local rank.

    Subclasses provide `_start`, `_poll`, `_close` and `pids`. PyTorch's constructor; ours,
    by keyword:

    * ``shutdown_timeout``: seconds that workers get to stop by themselves, on every path
      (unless `close` is told otherwise);
    * ``handle_signals`` False: the caller handles signals itself, and says by ``hurry``
      (asked during a stop) that the grace is over.
    """

    shutdown_timeout: float = 30.0
    handle_signals: bool = True

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        shutdown_timeout: float = 30.0,
        handle_signals: bool = True,
        hurry: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self.shutdown_timeout = shutdown_timeout
        self.handle_signals = handle_signals
        self._hurry_asked = hurry
        self._old_error_files: dict[int, tuple[int, ...] | None] = {}
        self._wake_fd = -1

        self._logs_specs = logs_specs  # a temporary folder of its goes with it, and not before us
        dest = logs_specs.reify(envs)
        _validate_full_rank(dest.stdouts, self.nprocs, "stdouts")
        _validate_full_rank(dest.stderrs, self.nprocs, "stderrs")
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        self.filtered_stdout: TextIO | None = None
        self.filtered_stderr: TextIO | None = None

        self._tail_logs = [
            TailLog(name, dest.tee_stdouts, sys.stdout, log_line_prefixes),
            TailLog(name, dest.tee_stderrs, sys.stderr, log_line_prefixes),
        ]

        def tail_matches(files: dict[int, str], path: str, words: list[str]) -> TextIO:
            file = open(path, "w", errors="replace", buffering=1)
            self._tail_logs.append(
                TailLog(
                    name,
                    files,
                    file,
                    log_line_prefixes,
                    log_line_filter=lambda line: any(word in line for word in words),
                )
            )
            return file

        if duplicate_stdout_filters:
            self.filtered_stdout = tail_matches(
                dest.tee_stdouts, dest.filtered_stdout, duplicate_stdout_filters
            )
        if duplicate_stderr_filters:
            self.filtered_stderr = tail_matches(
                dest.tee_stderrs, dest.filtered_stderr, duplicate_stderr_filters
            )

    # -- for users

    def start(self) -> None:
        """Start the processes. On the main thread signals are handled from here on.

        Those of ``TORCHELASTIC_SIGNALS_TO_HANDLE``, until `close`: they become
        SignalException. Raises what starting a process raises; call `close` then.
        """
        if self.handle_signals:
            _take_signals(self)
        with _undisturbed(self._wake):
            self._note_old_error_files()
            self._start()
        for tail_log in self._tail_logs:
            tail_log.start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result once all have ended or one has failed; None after ``timeout`` seconds.

        0: just look; negative: no limit. Returns as soon as all have ended. When a worker has
        failed the others have ``period`` seconds to end by themselves; then they are stopped.
        Raises SignalException.
        """
        end = None if timeout < 0 else time.monotonic() + timeout
        while True:
            with _undisturbed(self._wake):
                result = self._poll()
            if result is not None:
                return result
            left = max(period, 0.001)
            if end is not None:
                left = min(left, end - time.monotonic())
                if left <= 0:
                    return None
            with _undisturbed(self._wake):
                if self._wait_event(left):
                    patience = time.monotonic() + period
                    self._settle(patience if end is None else min(patience, end))

    def _settle(self, end: float) -> None:
        """Until ``end`` (monotonic) let workers end by themselves after one has failed."""
        return

    def wait_event(self, timeout: float) -> bool:
        """Wait until something happened to a worker; False: not within ``timeout`` seconds.

        True also when woken by a signal or `wake`. Ours. Raises SignalException.
        """
        with _undisturbed(self._wake):
            return self._wait_event(timeout)

    def wake(self) -> None:
        """From any thread: `wait_event` returns. Ours."""
        self._wake()

    def start_store(self, listener: socket.socket, eager: bool = False) -> StoreProcess:
        """Serve the workers' store on ``listener`` until `close`. Ours.

        In a process of its own, started at the first connection or at once if ``eager``.
        ``listener`` is bound, listens, and stays the caller's.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot serve a store")

    @abc.abstractmethod
    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""

    def close(self, death_sig: signal.Signals | None = None, timeout: float | None = None) -> None:
        """Stop what still runs with ``death_sig`` (default SIGTERM) and free everything.

        What has not ended ``timeout`` seconds later (default: ``shutdown_timeout``) is
        killed. A second signal to this process ends the wait; none leaves workers behind.
        May be called again.
        """
        with _undisturbed(self._wake):
            try:
                self._close(
                    death_sig=death_sig or signal.SIGTERM,
                    timeout=self.shutdown_timeout if timeout is None else timeout,  # type: ignore[arg-type]
                )
            finally:
                for tail_log in self._tail_logs:
                    tail_log.stop()
                for file in (self.filtered_stdout, self.filtered_stderr):
                    if file is not None:
                        file.close()
                wake_fd, self._wake_fd = self._wake_fd, -1
                if wake_fd >= 0:
                    os.close(wake_fd)
                _give_signals_back(self)

    # -- for subclasses

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """The result if all have ended or one has failed, else None. Does not wait."""

    @abc.abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Stop the processes and free what belongs to them."""

    def _wait_event(self, timeout: float) -> bool:
        """`wait_event` for a context that is told nothing: it waits for `_wake` only."""
        if self._wake_fd < 0:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1000):
            return False
        os.eventfd_read(self._wake_fd)
        return True

    def _wake(self) -> None:
        """Have `_wait_event` return; from any thread or signal handler."""
        with contextlib.suppress(OSError, ValueError):  # there is none, or it was just closed
            os.eventfd_write(self._wake_fd, 1)

    def _hurry(self) -> bool:
        """Whether the grace of a stop is over."""
        return _interruptions.count >= 2 or (self._hurry_asked is not None and self._hurry_asked())

    def _failure(
        self,
        local_rank: int,
        pid: int,
        exitcode: int,
        dead_ns: int,
        *,
        signalled_ns: int | None = None,
        explanation: str | None = None,
    ) -> ProcessFailure:
        """A worker's failure with all that is known of it; times are CLOCK_MONOTONIC."""
        found = ProcessFailure(
            local_rank=local_rank,
            pid=pid,
            exitcode=exitcode,
            error_file=self._error_file(local_rank),
            observed_ns=wall_ns(dead_ns),
            stderr_tail=tuple(self._stderr_tail(local_rank)),
            log_files=tuple(
                path
                for path in dict.fromkeys((self.stdouts[local_rank], self.stderrs[local_rank]))
                if path and path != os.devnull
            ),
            explanation=explanation,
        )
        if signalled_ns is not None and signalled_ns <= dead_ns:
            # It had failed before we stopped it if its error file is older than our signal.
            failed_before = found.error_file != "<N/A>" and found.timestamp_ns < wall_ns(
                signalled_ns
            )
            found.stopped_by_agent = not failed_before
        return found

    def _note_old_error_files(self) -> None:
        # Destinations of a user's own making may be the same for every attempt.
        self._old_error_files = {
            rank: errorfile.identity(path) for rank, path in self.error_files.items()
        }

    def _error_file(self, local_rank: int) -> str:
        path = self.error_files.get(local_rank, "")
        old = self._old_error_files.get(local_rank)
        return "" if old is not None and errorfile.identity(path) == old else path

    def _stderr_tail(self, local_rank: int) -> list[str]:
        path = self.stderrs[local_rank]
        return tail_of_file(path) if path else []


def __getattr__(name: str) -> Any:
    # The two contexts import this module, and are not needed by everyone who does.
    if name == "MultiprocessContext":
        from phalanx.elastic.multiprocessing.multiprocess_context import MultiprocessContext

        return MultiprocessContext
    if name == "SubprocessContext":
        from phalanx.elastic.multiprocessing.subprocess_context import SubprocessContext

        return SubprocessContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
