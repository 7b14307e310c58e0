"""MultiprocessContext: functions as workers, with real processes."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, RunProcsResult, Std, start_processes
from phalanx.elastic.multiprocessing.api import _wrap
from phalanx.elastic.multiprocessing.multiprocess_context import MultiprocessContext
from phalanx.process import tree

pytestmark = pytest.mark.process

LIMIT = 30.0
METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture
def functions(monkeypatch):
    """The module of entrypoints, under a name that a spawned process can import."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    # A spawned process imports the main module again; pytest is slow to import.
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    return importlib.import_module("function_entrypoints")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child but Python's own helpers, no descriptor, no thread stays."""
    gc.collect()
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    children = set(tree.children(os.getpid()))
    yield
    for pid in set(tree.children(os.getpid())) - children:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"resource_tracker" in command or b"forkserver" in command, command
    assert set(threading.enumerate()) <= threads  # an earlier test's may have been ending
    helpers = 3  # descriptors that multiprocessing keeps for those
    assert len(set(os.listdir("/proc/self/fd")) - before) <= helpers


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contexts: list[MultiprocessContext] = []

    def start(self, fn, args=(), workers=1, method="fork", logs=None, **more):
        logs = logs or DefaultLogsSpecs(str(self.folder / "logs"))
        context = start_processes(
            "trainer",
            fn,
            args if isinstance(args, dict) else dict.fromkeys(range(workers), args),
            {rank: {"RANK": str(rank)} for rank in range(workers)},
            logs,
            start_method=method,
            **more,
        )
        assert isinstance(context, MultiprocessContext)
        self.contexts.append(context)
        return context

    def result(self, *args, **more) -> RunProcsResult:
        result = self.start(*args, **more).wait(LIMIT)
        assert result is not None
        return result


@pytest.fixture
def scene(tmp_path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for context in scene.contexts:
        context.close(signal.SIGKILL, 0)


def gone(pid: int) -> bool:
    entry = tree.stat(pid)
    return entry is None or entry.zombie


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("method", METHODS)
def test_values_and_output(scene, functions, method):
    logs = DefaultLogsSpecs(str(scene.folder), redirects={0: Std.ALL, 1: Std.ERR})
    context = scene.start(functions.double, {0: ("a",), 1: (7,)}, 2, method, logs)
    pids = context.pids()
    result = context.wait(LIMIT)
    assert result is not None
    assert result.return_values == {0: "aa", 1: 14}
    assert Path(result.stdouts[0]).read_text() == "stdout of 0\n"
    assert result.stdouts[1] == ""
    assert [Path(result.stderrs[r]).read_text() for r in (0, 1)] == [
        "stderr of 0\n",
        "stderr of 1\n",
    ]
    assert all(gone(pid) for pid in pids.values())
    assert context.wait(0) is result
    with pytest.raises(ValueError, match="already"):
        context.start()


def test_large_values_and_none(scene, functions):
    result = scene.result(functions.large, (200_000,), 2)
    assert [len(value) for value in result.return_values.values()] == [200_000] * 2
    assert scene.result(functions.nothing, (), 2).return_values == {0: None, 1: None}


@pytest.mark.parametrize("method", METHODS)
def test_variables_are_there_before_the_users_modules_are_imported(scene, functions, method):
    sys.modules.pop("function_entrypoints")
    logs = DefaultLogsSpecs(str(scene.folder))
    envs = {0: {"SEEN_AT_IMPORT": "yes", "NOT": None}}
    args: dict = {0: ()}
    fn = importlib.import_module("function_entrypoints").seen_at_import
    context = start_processes("t", fn, args, envs, logs, start_method=method)  # type: ignore[arg-type]
    result = context.wait(LIMIT)
    assert result is not None
    # A forked process has imported everything with the agent's variables.
    assert result.return_values == {0: None if method == "fork" else "yes"}


def test_an_outer_workers_channel_is_not_the_inner_ones(scene, functions, monkeypatch):
    monkeypatch.setenv("PHALANX_CHANNEL_FD", "77")
    monkeypatch.setenv("PHALANX_PROGRESS_FD", "78")
    [seen] = scene.result(functions.variables).return_values.values()
    assert sorted(seen) == ["PHALANX_WORKER", "RANK"]


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_raises(scene, functions, method):
    logs = DefaultLogsSpecs(str(scene.folder), redirects=Std.ERR)
    context = scene.start(functions.fail_on_rank, (0,), 2, method, logs)
    result = context.wait(LIMIT)
    assert result is not None and not result.return_values
    [(rank, failure)] = result.failures.items()  # those we stop are not reported for functions
    assert rank == 0 and failure.exitcode == 1 and failure.pid == context.pids()[0]
    assert Path(failure.error_file).parts[-3:] == ("attempt_0", "0", "error.json")
    message = json.loads(Path(failure.error_file).read_text())["message"]
    assert message["message"] == "RuntimeError: oh no"
    assert "fail_on_rank" in message["extraInfo"]["py_callstack"]
    assert failure.stderr_tail[-1] == "RuntimeError: oh no"  # in the redirected file too
    assert all(gone(pid) for pid in context.pids().values())


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("leave", (138,), 138),
        ("sys_exit", (3,), 3),
        ("sys_exit", ("text",), 1),
        ("crash", (), -11),
        ("signal_myself", (9,), -9),
        ("signal_myself", (15,), -15),  # not the agent's handler, which would raise
        ("signal_myself", (2,), -2),
    ],
)
def test_exit_codes(scene, functions, name, args, code):
    result = scene.result(getattr(functions, name), args)
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: code}
    assert result.failures[0].error_file == "<N/A>"
    assert not result.failures[0].stopped_by_agent


@pytest.mark.parametrize("name", ["leave", "sys_exit"])
def test_exit_0_without_a_value_is_none_at_once(scene, functions, name):
    result = scene.result(getattr(functions, name), (0,), 2)
    assert result.return_values == {0: None, 1: None}


def test_values_that_cannot_be_passed_on_are_failures(scene, functions):
    failure = scene.result(functions.unpicklable).failures[0]
    assert failure.exitcode == 1
    assert re.search("pickle|Can't get local object", failure.message["message"])
    failure = scene.result(functions.unreadable).failures[0]
    assert failure.explanation is not None and "unpickled" in failure.explanation


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_that_cannot_be_sent(scene, method):
    def local():
        pass

    for fn in (local, lambda: None):
        with pytest.raises(pickle.PicklingError, match="top level of an importable module"):
            scene.start(fn, method=method)
    # Nor one argument of the second rank: the first, which runs, is taken back.
    with pytest.raises(pickle.PicklingError):
        scene.start(time.sleep, {0: (600,), 1: (lambda: None,)}, 2, method)


def test_fork_needs_no_pickling(scene):
    assert scene.result(lambda: 5).return_values == {0: 5}


# ------------------------------------------------------------------ life


def test_a_worker_is_a_process_of_its_own(scene, functions, monkeypatch):
    def handler(signum, frame):
        raise AssertionError("the agent's handler ran in a worker")

    old = [signal.signal(n, handler) for n in (signal.SIGUSR1, signal.SIGHUP)]
    try:
        result = scene.result(functions.handlers)
    finally:
        for number, before in zip((signal.SIGUSR1, signal.SIGHUP), old, strict=True):
            signal.signal(number, before)
    assert result.return_values[0] == ([True] * 4, 0)
    pid, session, group = scene.result(functions.session).return_values[0]
    assert pid == session == group


def test_a_worker_can_be_an_agent_itself(scene, functions):
    result = scene.result(functions.agent_within, (str(scene.folder / "inner"),))
    assert result.return_values == {0: "SIGTERM"}


def test_waiting_and_waking(scene):
    context = scene.start(time.sleep, (600,))
    assert context.wait(0) is None
    assert context.wait_event(0.01) is False
    timer = threading.Timer(0.05, context.wake)
    timer.start()
    assert context.wait_event(LIMIT) is True
    timer.join()
    os.kill(context.pids()[0], signal.SIGKILL)
    assert context.wait_event(LIMIT) is True
    result = context.wait(0)
    assert result is not None and result.failures[0].exitcode == -9
    assert not result.failures[0].stopped_by_agent


def wait_for(path: Path) -> list[int]:
    """The pids that a worker has written to the named pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert select.select([fd], [], [], LIMIT)[0]
        return [int(pid) for pid in os.read(fd, 1000).split()]
    finally:
        os.close(fd)


@pytest.mark.parametrize("method", METHODS)
def test_stubborn_worker_and_its_children(scene, functions, method, tmp_path):
    os.mkfifo(tmp_path / "pids")
    context = scene.start(
        functions.stubborn, (str(tmp_path / "pids"),), 1, method, shutdown_timeout=0.2
    )
    pids = wait_for(tmp_path / "pids")
    started = time.monotonic()
    context.close()
    assert time.monotonic() - started < LIMIT / 2
    assert all(gone(pid) for pid in pids)
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode == -9 and result.failures[0].stopped_by_agent


@pytest.mark.parametrize("code", [0, 3])
def test_children_left_by_a_worker_that_ended(scene, functions, tmp_path, code):
    os.mkfifo(tmp_path / "pids")
    context = scene.start(functions.leave_children, (str(tmp_path / "pids"), code))
    pids = wait_for(tmp_path / "pids")
    result = context.wait(LIMIT)
    assert result is not None and result.is_failed() == bool(code)
    assert all(gone(pid) for pid in pids)


def test_workers_outlive_the_thread_that_started_them(scene, caplog):
    # The kernel's parent-death signal belongs to the thread.
    started: list[MultiprocessContext] = []
    thread = threading.Thread(target=lambda: started.append(scene.start(time.sleep, (600,))))
    thread.start()
    thread.join()
    [context] = started
    assert context.wait_event(0.2) is False
    assert context.wait(0) is None
    context.close()


def test_wrap_in_this_process(tmp_path, monkeypatch, functions):
    """The function that PyTorch's tests call by name."""
    monkeypatch.delenv("RANK", raising=False)
    put, waited = [], []

    class Queue:
        def put(self, value):
            put.append(value)

    class Event:
        def wait(self):
            waited.append(True)

    out = str(tmp_path / "out")
    _wrap(
        0,
        functions.double,
        {0: (2,)},
        {0: {"RANK": "0"}},
        {0: out},
        {0: ""},
        {0: Queue()},
        Event(),
        None,
    )
    assert (put, waited) == ([4], [True])
    assert Path(out).read_text() == "stdout of 0\n"
