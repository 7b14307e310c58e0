"""Timers whose requests travel through a multiprocessing queue.

Only for workers that the server's process started itself: such a queue carries pickles.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from queue import Empty
from typing import Any

from phalanx.elastic.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """The client of ``LocalTimerServer``; a worker is known by its pid."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """A ``RequestQueue`` on a ``multiprocessing.Queue``."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        # Lets stop() end a wait at once. Queues without a pipe (those of a manager) have no
        # such way in; their waits are bounded by the timeout alone.
        self._reader = getattr(mp_queue, "_reader", None)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if self._reader else -1

    def __del__(self) -> None:
        wake, self._wake = getattr(self, "_wake", -1), -1
        if wake >= 0:
            os.close(wake)

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def interrupt(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        end = time.monotonic() + timeout
        while len(requests) < size:
            left = max(0.0, end - time.monotonic())
            try:
                if self._reader is None:
                    requests.append(self._mp_queue.get(timeout=left))
                elif self._readable(left):
                    # Another reader of the queue may have been quicker: still bounded.
                    left = max(0.0, end - time.monotonic())
                    requests.append(self._mp_queue.get(timeout=left))
                else:
                    break
            except Empty:
                break
        return requests

    def _readable(self, timeout: float) -> bool:
        from multiprocessing.connection import wait

        assert self._reader is not None
        ready = wait([self._reader, self._wake], timeout)
        if self._wake in ready:
            os.eventfd_read(self._wake)
            return False
        return bool(ready)


class LocalTimerServer(TimerServer):
    """Ends workers by SIGKILL when a timer that came through ``mp_queue`` runs out.

    ``max_interval`` (seconds) bounds a single wait; a deadline ends the wait exactly.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            try:
                key = (request.worker_id, request.scope_id)
                if request.expiration_time < 0:
                    self._timers.pop(key, None)
                else:
                    self._timers[key] = request
            except (AttributeError, TypeError):
                logger.warning("dropped from the timer queue, not a request: %.200r", request)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        expired: dict[Any, list[TimerRequest]] = {}
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _seconds_to_next_deadline(self) -> float | None:
        if not self._timers:
            return None
        return min(r.expiration_time for r in self._timers.values()) - time.time()

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id in (0, -1, os.getpid(), -os.getpgrp()):
            logger.error("timer of pid %s dropped: that would end the server itself", worker_id)
            return True
        try:
            os.kill(worker_id, signal.SIGKILL)
        except ProcessLookupError:
            logger.info("pid %s has ended already", worker_id)
        except Exception:
            logger.exception("pid %s cannot be killed", worker_id)
            return False
        return True
