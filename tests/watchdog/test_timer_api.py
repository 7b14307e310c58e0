from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest

from phalanx.elastic import timer
from phalanx.elastic.timer.api import RequestQueue


class Recorder(timer.TimerClient):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id))

    @property
    def armed(self) -> list[str]:
        return [call[1] for call in self.calls if call[0] == "acquire"]


@pytest.fixture
def client():
    client = Recorder()
    timer.configure(client)
    yield client
    timer.configure(None)


def test_acquires_and_releases(client: Recorder) -> None:
    before = time.time()
    with timer.expires(after=5, scope="x"):
        assert client.calls == [("acquire", "x", pytest.approx(before + 5, abs=1))]
    assert client.calls[1:] == [("release", "x")]


def test_exception_passes_and_releases(client: Recorder) -> None:
    with pytest.raises(KeyError, match="mine"), timer.expires(after=5, scope="x"):
        raise KeyError("mine")
    assert client.calls[-1] == ("release", "x")


def test_no_client_is_an_error_on_entry() -> None:
    timer.configure(None)
    block = timer.expires(after=1)
    with pytest.raises(RuntimeError, match="configure"), block:
        pytest.fail("must not get here")


def test_given_client_is_preferred(client: Recorder) -> None:
    other = Recorder()
    with timer.expires(after=1, client=other):
        pass
    assert len(other.calls) == 2
    assert client.calls == []


def test_default_scope_is_the_callers_line(client: Recorder) -> None:
    with timer.expires(after=1), timer.expires(after=1):
        pass
    with timer.expires(after=1):
        pass
    scopes = client.armed
    assert all(scope.startswith(f"{__file__}#") for scope in scopes)
    assert scopes[0] == scopes[1] != scopes[2]


def test_recursion_through_one_block_rearms_its_timer(client: Recorder) -> None:
    def recurse(n: int) -> None:
        if n:
            with timer.expires(after=n):
                recurse(n - 1)

    recurse(3)
    assert len(client.armed) == 3
    assert len(set(client.armed)) == 1


def test_as_decorator(client: Recorder) -> None:
    @timer.expires(after=1)
    def work() -> int:
        return 3

    assert work() + work() == 6
    assert [call[0] for call in client.calls] == ["acquire", "release"] * 2


def test_requests_compare_by_value() -> None:
    assert timer.TimerRequest(1, "a", 2) == timer.TimerRequest(1, "a", 2)
    assert timer.TimerRequest(1, "a", 2) != timer.TimerRequest(1, "a", 3)
    assert timer.TimerRequest(1, "a", 2) != "a"
    assert timer.FileTimerRequest(1, "a", 2, 9) == timer.FileTimerRequest(1, "a", 2, 9)
    assert timer.FileTimerRequest(1, "a", 2, 9) != timer.FileTimerRequest(1, "a", 2, 8)
    assert timer.FileTimerRequest(1, "a", 2, 9) != timer.TimerRequest(1, "a", 2)


class ThreeWorkers(timer.TimerServer):
    """Worker 1: ending it raises; 2: works; 3: does not work."""

    def __init__(self, queue: RequestQueue) -> None:
        super().__init__(queue, 1)
        self.registered: list[Any] = []
        self.cleared: set[Any] = set()

    def register_timers(self, timer_requests: list[timer.TimerRequest]) -> None:
        self.registered += timer_requests

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.cleared |= worker_ids

    def get_expired_timers(self, deadline: float) -> dict[Any, list[timer.TimerRequest]]:
        return {i: [timer.TimerRequest(i, "s", 0)] for i in (1, 2, 3)}

    def _reap_worker(self, worker_id: Any) -> bool:
        if worker_id == 1:
            raise RuntimeError
        return bool(worker_id == 2)


def test_server_round() -> None:
    queue = mock.Mock(spec=RequestQueue)
    queue.size.return_value = 2
    queue.get.return_value = requests = [timer.TimerRequest(1, "t", 0)]
    server = ThreeWorkers(queue)
    server._run_watchdog()
    queue.get.assert_called_once_with(2, 1)
    assert server.registered == requests
    assert server.cleared == {1, 2}


def test_light_import(python: Any) -> None:
    code = """
import sys
import phalanx.elastic.timer
print([m for m in ("http", "multiprocessing", "torch", "ctypes", "socket") if m in sys.modules])
"""
    assert python(code).communicate(timeout=20)[0] == "[]\n"


def test_no_thread_without_start() -> None:
    before = set(threading.enumerate())
    ThreeWorkers(mock.Mock(spec=RequestQueue)).stop()
    assert set(threading.enumerate()) <= before
