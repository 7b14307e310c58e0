"""Clients, servers and the ``expires`` block, independent of how requests travel."""

from __future__ import annotations

import abc
import logging
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = [
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

logger = logging.getLogger(__name__)


class TimerRequest:
    """Arms or releases one timer of one worker.

    ``expiration_time`` is in Unix seconds; a negative one releases the timer.
    """

    __slots__ = ["expiration_time", "scope_id", "worker_id"]

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TimerRequest)
            and self.worker_id == other.worker_id
            and self.scope_id == other.scope_id
            and self.expiration_time == other.expiration_time
        )

    # Mutable, compared by value: as PyTorch's, not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(worker_id={self.worker_id!r}, scope_id={self.scope_id!r}, "
            f"expiration_time={self.expiration_time!r})"
        )


class TimerClient(abc.ABC):
    """The worker's end: tells the server about timers."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm the timer ``scope_id`` to run out at ``expiration_time`` (Unix seconds).

        A timer of that name that is armed already gets the new deadline.
        """

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Disarm the timer ``scope_id``; nothing happens if it is not armed."""


class RequestQueue(abc.ABC):
    """Where a ``TimerServer`` gets its requests from."""

    @abc.abstractmethod
    def size(self) -> int:
        """How many requests wait now; only ``get`` makes it smaller."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to ``size`` requests; blocks for at most ``timeout`` seconds."""

    def interrupt(self) -> None:  # noqa: B027 - a queue may have no way to do it
        """Make a ``get`` that blocks in another thread return soon, where that is possible."""


class TimerServer(abc.ABC):
    """Watches timers in a thread of its own and ends the workers whose timers ran out.

    ``max_interval`` (seconds) bounds how long the thread waits for requests at a time.
    """

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._retrying = False

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take requests in: arm, re-arm or (negative expiration time) release."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Per worker, the timers whose expiration time is ``deadline`` or earlier."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End the worker; False: it did not work, try again. An exception counts as True."""

    def _seconds_to_next_deadline(self) -> float | None:
        """Seconds until the next armed timer runs out; None: not known or none armed."""
        return None

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("ending worker %s failed; its timers are dropped", worker_id)
            return True

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                logger.exception("the watchdog goes on after an error")

    def _run_watchdog(self) -> None:
        batch_size = max(1, self._request_queue.size())
        wait = self._max_interval
        # A worker that could not be ended is tried again after max_interval, not at once.
        next_deadline = None if self._retrying else self._seconds_to_next_deadline()
        self._retrying = False
        if next_deadline is not None:
            wait = max(0.0, min(wait, next_deadline))
        self.register_timers(self._request_queue.get(batch_size, wait))
        reaped: set[Any] = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            scopes = self._get_scopes(expired)
            logger.warning("ending worker %s: timers ran out: %s", worker_id, scopes)
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                logger.error("worker %s could not be ended; trying again", worker_id)
                self._retrying = True
        self.clear_timers(reaped)

    def _get_scopes(self, timer_requests: Iterable[TimerRequest]) -> Sequence[str]:
        return [r.scope_id for r in timer_requests]

    def start(self) -> None:
        """Start the thread; nothing happens if it runs already."""
        if self._watchdog_thread is not None and self._watchdog_thread.is_alive():
            return
        self._stop_signaled = False
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name="timer-watchdog", daemon=self._daemon
        )
        self._watchdog_thread.start()
        logger.info("%s started, max_interval=%s s", type(self).__name__, self._max_interval)

    def stop(self) -> None:
        """End the thread; waits for it for at most ``max_interval`` (and at least 1 s)."""
        self._stop_signaled = True
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._request_queue.interrupt()
        thread.join(max(1.0, self._max_interval))
        if thread.is_alive():
            logger.warning("the watchdog thread is busy; it will end on its own")
        logger.info("%s stopped", type(self).__name__)


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that ``expires`` uses when none is given; None: unset it."""
    global _timer_client
    _timer_client = timer_client
    logger.info("timer client: %s", type(timer_client).__name__)


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> AbstractContextManager[None]:
    """A block (or decorated function) that must end within ``after`` seconds.

    The timer is armed on entry and released when the block is left in whatever way. If it
    runs out first the server ends this worker, as soon as it sees that.

    ``scope`` names the timer; the default is the caller's ``file#line``, so two different
    blocks never share a timer, while recursion through one and the same block re-arms its
    one timer: then only the innermost deadline counts.

    Raises RuntimeError on entry if there is neither a ``client`` nor a configured one, and
    whatever the client raises.
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _armed(after, scope, client)


@contextmanager
def _armed(after: float, scope: str, client: TimerClient | None) -> Generator[None, None, None]:
    if client is None:
        client = _timer_client
    if client is None:
        raise RuntimeError(
            "no timer client: call timer.configure(client) first, or pass client= to expires()"
        )
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
