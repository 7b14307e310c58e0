from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from phalanx.elastic import timer
from phalanx.elastic.timer.local_timer import MultiprocessingRequestQueue


@pytest.fixture
def queue() -> Iterator[Any]:
    queue = multiprocessing.get_context("spawn").Queue()
    yield queue
    queue.close()
    queue.join_thread()


def _request(pid: int, scope: str, seconds: float) -> timer.TimerRequest:
    return timer.TimerRequest(pid, scope, time.time() + seconds)


def _put(queue: Any, *requests: Any) -> None:
    for request in requests:
        queue.put(request)
    while queue.qsize() < len(requests) or not queue._reader.poll(1):
        pass


def _rounds(server: timer.LocalTimerServer, n: int) -> None:
    for _ in range(n):
        server._run_watchdog()


def test_queue_gives_what_there_is(queue: Any) -> None:
    requests = MultiprocessingRequestQueue(queue)
    assert requests.get(1, timeout=0.01) == []
    request = _request(1, "s", 0)
    _put(queue, request)
    assert requests.get(2, timeout=0.05) == [request]


def test_expired_timer_ends_the_worker_and_drops_its_timers(queue: Any) -> None:
    server = timer.LocalTimerServer(queue, 0.05)
    with mock.patch("os.kill") as kill:
        _put(queue, _request(-3, "valid", 60), _request(-3, "expired", -60))
        _rounds(server, 2)
        kill.assert_called_once_with(-3, signal.SIGKILL)
    assert server._timers == {}


def test_release_and_vacuous_release(queue: Any) -> None:
    server = timer.LocalTimerServer(queue, 0.05)
    with mock.patch("os.kill") as kill:
        _put(
            queue,
            _request(-3, "a", 60),
            timer.TimerRequest(-3, "a", -1),
            timer.TimerRequest(-3, "b", -1),
        )
        _rounds(server, 3)
        kill.assert_not_called()
    assert server._timers == {}


def test_what_is_no_request_is_dropped(queue: Any) -> None:
    server = timer.LocalTimerServer(queue, 0.05)
    _put(queue, "junk", timer.TimerRequest([], "unhashable", 5), _request(-3, "a", 60))
    _rounds(server, 3)
    assert list(server._timers) == [(-3, "a")]


def test_own_process_is_never_killed(queue: Any) -> None:
    server = timer.LocalTimerServer(queue, 0.05)
    with mock.patch("os.kill") as kill:
        for pid in (0, -1, os.getpid(), -os.getpgrp()):
            assert server._reap_worker(pid)
        kill.assert_not_called()


@pytest.mark.process
def test_deadline_is_met_exactly_and_stop_is_prompt(queue: Any, python: Any) -> None:
    worker = python("input()")
    server = timer.LocalTimerServer(queue, max_interval=60)
    server.start()
    queue.put(_request(worker.pid, "s", 0.2))
    assert worker.wait(timeout=20) == -signal.SIGKILL
    thread = server._watchdog_thread
    assert thread is not None
    server.start()  # runs already: not a second thread
    assert server._watchdog_thread is thread
    start = time.monotonic()
    server.stop()
    assert not thread.is_alive()
    assert time.monotonic() - start < 30


def _work(queue: Any) -> None:
    timer.configure(timer.LocalTimerClient(queue))
    with timer.expires(after=60):
        pass
    with timer.expires(after=0.05):
        time.sleep(60)


@pytest.mark.process
def test_client_in_a_child(queue: Any) -> None:
    server = timer.LocalTimerServer(queue, max_interval=60)
    server.start()
    try:
        child = multiprocessing.get_context("fork").Process(target=_work, args=(queue,))
        child.start()
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
    finally:
        server.stop()
