"""The file timer's two ends with real pipes, processes and signals."""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.elastic import timer
from phalanx.elastic.timer import file_based_local_timer as module

Request = timer.FileTimerRequest

WORKER = """
import sys, time
from phalanx.elastic import timer
client = timer.FileTimerClient(sys.argv[1])
with timer.expires(after=float(sys.argv[2]), client=client):
    print("armed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "timer")


@pytest.fixture
def make(path: str) -> Iterator[Callable[..., timer.FileTimerServer]]:
    made: list[timer.FileTimerServer] = []

    def make(max_interval: float = 0.02, **options: Any) -> timer.FileTimerServer:
        server = timer.FileTimerServer(path, "run", max_interval, **options)
        made.append(server)
        return server

    yield make
    for server in made:
        thread = server._watchdog_thread
        server.stop()
        assert thread is None or not thread.is_alive()
    assert not os.path.exists(path)


def send(path: str, *requests: Request) -> None:
    for request in requests:
        timer.FileTimerClient(path)._send_request(request)


def later(pid: int, scope: str, signum: int = 9) -> Request:
    return Request(pid, scope, time.time() + 60, signum)


def expired(pid: int, scope: str, signum: int = 9) -> Request:
    return Request(pid, scope, time.time() - 60, signum)


class Events(queue.Queue[tuple[str, Any]]):
    def __call__(self, name: str, request: Any) -> None:
        self.put((name, request))

    def next(self) -> tuple[str, Any]:
        return self.get(timeout=10)


# -- expiry ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_hung_worker_is_killed_and_the_server_is_not(make: Any, path: str, python: Any) -> None:
    events = Events()
    server = make(max_interval=30, log_event=events)
    server.start()
    worker = python(WORKER, path, 0.3)
    assert worker.stdout.readline() == "armed\n"
    # The server's other duties come every 30 s; the deadline is met nevertheless.
    assert worker.wait(timeout=20) == -signal.SIGKILL
    assert events.next() == ("watchdog started", None)
    name, request = events.next()
    assert name == "timer expired"
    assert (request.worker_pid, request.signal) == (worker.pid, signal.SIGKILL)
    assert request.scope_id.startswith("<string>#")
    assert events.next() == ("kill worker process", request)
    server.stop()
    assert events.next() == ("watchdog stopped", None)


@pytest.mark.process
def test_worker_in_time_lives(make: Any, path: str, python: Any) -> None:
    make().start()
    worker = python(WORKER, path, 60)
    assert worker.stdout.readline() == "armed\n"
    assert worker.communicate(timeout=20) == ("", None)
    assert worker.returncode == 0


def test_one_kill_for_all_timers_of_a_pid(make: Any, path: str) -> None:
    server = make(0.2)
    with mock.patch("os.kill") as kill:
        send(path, expired(-3, "a"), later(-3, "b"))
        server.start()
        server.run_once()
        kill.assert_called_once_with(-3, signal.SIGKILL)
    assert server._timers == {}


def test_the_earliest_timer_with_a_signal_decides(make: Any, path: str) -> None:
    events = Events()
    server = make(0.2, log_event=events)
    first, second, third = (Request(-3, n, time.time() - 60 + i, s) for i, (n, s) in
                            enumerate([("a", 0), ("b", 15), ("c", 9)]))  # fmt: skip
    with mock.patch("os.kill") as kill:
        send(path, third, second, first)
        server.start()
        server.run_once()
        kill.assert_called_once_with(-3, 15)
    assert [events.next() for _ in range(4)] == [
        ("watchdog started", None),
        ("timer expired", first),
        ("timer expired", second),
        ("kill worker process", second),
    ]


def test_without_a_signal_it_is_only_told(make: Any, path: str) -> None:
    events = Events()
    server = make(0.2, log_event=events)
    with mock.patch.object(timer.FileTimerServer, "_reap_worker") as reap:
        send(path, expired(-3, "a", 0), expired(-3, "b", -5))
        server.start()
        server.run_once()
        reap.assert_not_called()
    assert {events.next()[0] for _ in range(3)} == {"watchdog started", "timer expired"}
    assert server._timers == {}


def test_release_and_vacuous_release(make: Any, path: str) -> None:
    server = make(0.2)
    with mock.patch("os.kill") as kill:
        send(path, later(-3, "a"), Request(-3, "a", -1), Request(-3, "b", -1))
        server.start()
        server.run_once()
        kill.assert_not_called()
    assert server._timers == {}
    assert server._request_count == 3


def test_valid_timers_stay(make: Any, path: str) -> None:
    server = make()
    wanted = {(pid, scope) for pid in (-3, -2) for scope in ("a", "b")}
    with (
        mock.patch("os.kill") as kill,
        mock.patch.object(timer.FileTimerServer, "is_process_running", return_value=True),
    ):
        send(path, *(later(*key) for key in sorted(wanted)))
        server.start()
        server.run_once()
        kill.assert_not_called()
    assert set(server._timers) == wanted


@pytest.mark.process
def test_worker_that_ended_before_release(make: Any, path: str, python: Any, wait_for: Any) -> None:
    server = make(0.01)
    worker = python("")
    worker.wait(20)
    with mock.patch.object(timer.FileTimerServer, "_reap_worker") as reap:
        send(path, later(worker.pid, "s"))
        server.start()
        wait_for(lambda: server._request_count == 1 and not server._timers)
        reap.assert_not_called()


@pytest.mark.process
def test_the_class_tells_who_is_alive(make: Any, path: str, python: Any, wait_for: Any) -> None:
    server = make(0.01)
    worker = python("")
    worker.wait(20)
    with (
        mock.patch.object(timer.FileTimerServer, "_reap_worker") as reap,
        mock.patch.object(timer.FileTimerServer, "is_process_running", return_value=True),
    ):
        send(path, Request(worker.pid, "s", time.time() + 0.1, 9))
        server.start()
        wait_for(lambda: server._request_count == 1 and not server._timers)
        reap.assert_called_once_with(worker.pid, 9)


def test_clock_steps_move_no_deadline(make: Any) -> None:
    server = make()
    server.register_timers([later(-3, "a"), Request(-3, "b", time.time() + 0.001, 9)])
    threading.Event().wait(0.01)
    for step in (-3600, 3600):
        with mock.patch.object(module.time, "time", return_value=time.time() + step):
            found = server.get_expired_timers(module.time.time())
        assert [r.scope_id for r in found[-3]] == ["b"]


def test_reused_pid_is_not_killed(make: Any) -> None:
    server = make()
    events = Events()
    server._log_event = events
    server.register_timers([expired(os.getppid(), "s")])
    key = (os.getppid(), "s")
    server._armed[key] = server._armed[key]._replace(started="12345")
    with mock.patch("os.kill") as kill:
        server._expire(key[0], [server._timers[key]])
        kill.assert_not_called()


def test_debug_hook_is_looked_up_in_the_module(make: Any, path: str) -> None:
    server = make()
    with mock.patch("os.kill"), mock.patch.object(module, "log_debug_info_for_expired_timers") as m:
        server.start()
        request = expired(-3, "a")
        send(path, request)
        server.run_once()
    assert mock.call("run", {-3: [request.to_json()]}) in m.call_args_list


# -- who may be signalled -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pid", [0, -1, os.getpid(), -os.getpgrp()], ids=["0", "-1", "itself", "its group"]
)
def test_nobody_makes_the_server_end_itself(make: Any, path: str, pid: int) -> None:
    server = make()
    with mock.patch("os.kill") as kill:
        server.start()
        send(path, expired(pid, "s"))
        server.run_once()
        assert [call for call in kill.call_args_list if call.args[1] != 0] == []
    assert server._timers == {}


def test_only_allowed_pids(make: Any, path: str) -> None:
    def allowed(pid: int) -> bool:
        if pid == -9:
            raise OSError("cannot tell")
        return pid == -3

    server = make(allowed_pids=allowed)
    with mock.patch("os.kill") as kill:
        send(path, expired(-2, "s"), expired(-9, "s"), Request(-2, "s", -1), expired(-3, "s"))
        server.start()
        server.run_once()
        assert kill.call_args_list == [mock.call(-3, signal.SIGKILL)]
    assert server.dropped_lines == 2


def test_number_of_timers_is_bounded(make: Any) -> None:
    server = make()
    with mock.patch.object(module, "TIMER_LIMIT", 3):
        server.register_timers([later(-3, str(i)) for i in range(5)] + [later(-3, "0")])
    assert len(server._timers) == 3
    assert server.dropped_lines == 2


@pytest.mark.process
def test_hook_instead_of_kill(make: Any, path: str, python: Any) -> None:
    calls: queue.Queue[tuple[int, list[Request]]] = queue.Queue()
    events = Events()
    server = make(log_event=events, on_expired=lambda pid, requests: calls.put((pid, requests)))
    worker = python("input()")
    late, early = (Request(worker.pid, n, time.time() + d, 9) for n, d in (("l", -1), ("e", -2)))
    send(path, late, early, expired(-3, "told only", 0))
    server.start()
    assert calls.get(timeout=10) == (worker.pid, [early, late])
    server.run_once()
    assert calls.empty()
    assert worker.poll() is None
    assert ("kill worker process", early) in list(events.queue)
    assert server._timers == {}


@pytest.mark.process
@pytest.mark.parametrize("hook", [mock.Mock(side_effect=RuntimeError), lambda pid, rs: False])
def test_hook_that_does_not_take_it(make: Any, path: str, python: Any, hook: Any) -> None:
    make(on_expired=hook).start()
    worker = python(WORKER, path, 0.05)
    assert worker.wait(timeout=20) == -signal.SIGKILL


def test_failing_listener_changes_nothing(make: Any, path: str) -> None:
    server = make(log_event=mock.Mock(side_effect=RuntimeError))
    with mock.patch("os.kill") as kill:
        server.start()
        send(path, expired(-3, "s"))
        server.run_once()
        kill.assert_called_once_with(-3, signal.SIGKILL)


# -- writers that behave badly --------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("said", [b"", b'{"version": 1, "pid": ', b"x" * 50000])
def test_writer_that_keeps_the_pipe_open(make: Any, path: str, python: Any, said: bytes) -> None:
    server = make()
    server.start()
    idle = os.open(path, os.O_WRONLY)
    try:
        os.write(idle, said)
        worker = python(WORKER, path, 0.1)
        assert worker.wait(timeout=20) == -signal.SIGKILL
    finally:
        os.close(idle)


@pytest.mark.process
def test_garbage_all_the_time(make: Any, path: str, python: Any) -> None:
    server = make()
    server.start()
    stop = threading.Event()

    def flood() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        while not stop.is_set():
            try:
                os.write(fd, b'{"pid": "\xff"}\n' * 100 + b"{" * 500)
            except BlockingIOError:
                select.select([], [fd], [], 0.1)
        os.close(fd)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        worker = python(WORKER, path, 0.1)
        assert worker.wait(timeout=30) == -signal.SIGKILL
    finally:
        stop.set()
        thread.join()
    assert server.dropped_lines > 100


def test_bad_lines_are_logged_once(
    make: Any, path: str, caplog: pytest.LogCaptureFixture, wait_for: Any
) -> None:
    server = make(0.01)
    server.start()
    with caplog.at_level(logging.WARNING), open(path, "wb", buffering=0) as f:
        for i in range(20):
            f.write(b"nonsense\n" + later(-3, "s").to_json().encode() + b"\n")
            wait_for(lambda i=i: server._request_count == i + 1)
    assert server.dropped_lines == 20
    said = [r.getMessage() for r in caplog.records if "bad timer lines" in r.getMessage()]
    assert len(said) == 1
    assert "nonsense" in said[0]


@pytest.mark.process
def test_many_clients(make: Any, path: str, python: Any) -> None:
    code = """
import sys
from phalanx.elastic import timer
timer.configure(timer.FileTimerClient(sys.argv[1]))
def nest(n):
    if n:
        with timer.expires(after=100):
            nest(n - 1)
nest(25)
"""
    server = make()
    server.start()
    workers = [python(code, path) for _ in range(4)]
    assert [worker.wait(30) for worker in workers] == [0] * 4
    server.run_once()
    assert server._request_count == 2 * 4 * 25
    assert server._timers == {}


# -- life of the server ---------------------------------------------------------------------------


def test_pipe_is_private_and_replaces_an_old_file(path: str, make: Any) -> None:
    Path(path).write_text("old")
    old = os.umask(0)
    try:
        make()
    finally:
        os.umask(old)
    mode = os.stat(path).st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_client_may_come_before_the_thread(make: Any, path: str) -> None:
    server = make()
    send(path, later(os.getpid(), "s"))
    server.start()
    server.run_once()
    assert list(server._timers) == [(os.getpid(), "s")]


def test_stop_without_any_client_ends_the_thread(make: Any) -> None:
    server = make(max_interval=30)
    server.start()
    thread = server._watchdog_thread
    start = time.monotonic()
    server.stop()
    assert not thread.is_alive()
    assert time.monotonic() - start < 15
    server.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        server.start()


def test_stop_from_a_callback_and_descriptors_are_closed(make: Any, path: str) -> None:
    def descriptors() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{fd}")}  # fmt: skip

    stopped = threading.Event()

    def stop(pid: int, requests: object) -> None:
        server.stop()
        stopped.set()

    server = make(on_expired=stop)
    assert path in descriptors()
    server.start()
    thread = server._watchdog_thread
    send(path, expired(-3, "s"))
    assert stopped.wait(10)
    thread.join(10)
    assert not thread.is_alive()
    assert not any(path in name for name in descriptors())


def test_stop_leaves_anothers_pipe_alone(make: Any, path: str) -> None:
    first = make()
    second = make()
    first.stop()
    assert os.path.exists(path)
    second.start()
    send(path, later(os.getpid(), "s"))
    second.run_once()
    assert second._request_count == 1


def test_rounds_and_progress_time(make: Any, path: str, wait_for: Any) -> None:
    server = make(0.01)
    server._last_progress_time = 5
    assert server.get_last_progress_time() >= int(time.time()) - 1  # no client yet: now
    server._run_watchdog = mock.Mock(wraps=server._run_watchdog)
    server.start()
    threading.Event().wait(0.05)
    assert server._run_watchdog.call_count == 0
    start = time.monotonic()
    send(path, later(-3, "s"))
    wait_for(lambda: server._run_watchdog.call_count >= 3)
    server.stop()
    assert server._run_watchdog.call_count <= (time.monotonic() - start) / 0.01 + 2
    server._last_progress_time = 5
    assert server.get_last_progress_time() == 5


# -- the client -----------------------------------------------------------------------------------


def fill(pipe: int) -> None:
    while select.select([], [pipe], [], 0)[1]:
        os.write(pipe, b"x" * 4096)


def test_line_is_exact(path: str) -> None:
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        client = timer.FileTimerClient(path, signal.SIGTERM)
        client.acquire("sc\n\u00e9", 1795976331.5)
        client.release("sc")
        assert os.read(fd, 4096).decode() == (
            f'{{"version": 1, "pid": {os.getpid()}, "scope_id": "sc\\n\\u00e9", '
            '"expiration_time": 1795976331.5, "signal": 15}\n'
            f'{{"version": 1, "pid": {os.getpid()}, "scope_id": "sc", '
            '"expiration_time": -1, "signal": 0}\n'
        )
    finally:
        os.close(fd)


@pytest.fixture
def impatient() -> Iterator[None]:
    with mock.patch.object(module, "CLIENT_PATIENCE", 0.05):
        yield


@pytest.mark.usefixtures("impatient")
def test_no_server(path: str) -> None:
    client = timer.FileTimerClient(path)
    with pytest.raises(BrokenPipeError, match="no timer server") as caught:
        client.acquire("s", 1)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    os.mkfifo(path)
    with pytest.raises(BrokenPipeError) as caught:
        client.release("s")
    assert "No such device" in str(caught.value.__cause__)
    os.remove(path)
    Path(path).write_text("")
    with pytest.raises(BrokenPipeError, match="not a named pipe"):
        client.acquire("s", 1)
    assert Path(path).read_text() == ""


@pytest.mark.usefixtures("impatient")
def test_server_that_does_not_read(path: str) -> None:
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        fill(fd)
        with pytest.raises(BrokenPipeError, match="no timer server"):
            timer.FileTimerClient(path).acquire("s", 1)
    finally:
        os.close(fd)


def test_full_pipe_that_is_read_later(path: str) -> None:
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        fill(fd)
        thread = threading.Thread(target=timer.FileTimerClient(path).acquire, args=("s", 1))
        thread.start()
        os.read(fd, 65536)
        thread.join(10)
        assert b'"scope_id": "s"' in os.read(fd, 65536)
    finally:
        os.close(fd)


def test_server_that_comes_later(path: str) -> None:
    thread = threading.Thread(target=timer.FileTimerClient(path).acquire, args=("s", 1))
    thread.start()
    server = timer.FileTimerServer(path, "run")
    try:
        thread.join(10)
        assert select.select([server._fd], [], [], 5)[0]
    finally:
        server.stop()


def test_too_long_a_request(path: str) -> None:
    with pytest.raises(RuntimeError, match="shorter scope"):
        timer.FileTimerClient(path).acquire("s" * 4096, 1)
