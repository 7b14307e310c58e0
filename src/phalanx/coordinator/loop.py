"""One thread with an asyncio loop, for all of gRPC in a process, and how to hear from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


_lock = threading.Lock()
_users = 0
_thread: LoopThread | None = None


def acquire() -> LoopThread:
    """The loop of this process, started by the first who asks. grpc.aio wants no more than one:
    with two its calls can hang."""
    global _users, _thread
    with _lock:
        _users += 1
        if _thread is None:
            _thread = LoopThread()
        return _thread


def release() -> None:
    """Give back what :func:`acquire` gave; the last one ends the thread."""
    global _users, _thread
    with _lock:
        _users -= 1
        thread, last = _thread, _users == 0
        if last:
            _thread = None
    if last and thread is not None:
        thread.close()


class LoopThread:
    """A daemon thread that runs an asyncio loop until :meth:`close`."""

    def __init__(self, name: str = "phalanx-coordinator") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending, timeout=2.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine there; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine there and waits for it. Raises what it raises, or TimeoutError."""
        return self.submit(work).result(timeout)

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Calls something there; from any thread. Nothing happens once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args)

    def close(self, timeout: float = 5.0) -> None:
        """Cancels what still runs there and joins the thread."""
        if self._thread.is_alive():
            self.soon(self.loop.stop)
            self._thread.join(timeout)


class Inbox:
    """Values from another thread for one that waits in a selector: ``fd`` is readable when any
    are there."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def put(self, value: Any) -> None:
        """From any thread; after :meth:`close` it is dropped."""
        with self._lock:
            if self.fd < 0:
                return
            self._values.append(value)
            if len(self._values) == 1:
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[Any]:
        """All that is there, in order; the descriptor is not readable until there is more."""
        with self._lock:
            if self.fd < 0:
                return []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            values = list(self._values)
            self._values.clear()
        return values

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
