"""Signals to the agent: handlers, when they raise, and that nobody is orphaned."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    api,
)
from phalanx.process import tree

LIMIT = 20.0
ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Fake(PContext):
    """No processes: what its methods do is the test's to say."""

    def __init__(self, folder, **more):
        super().__init__("f", "x", {0: ()}, {0: {}}, DefaultLogsSpecs(str(folder)), **more)
        self.closing = lambda: None
        self.polling = lambda: None

    def _start(self):
        pass

    def _poll(self):
        return self.polling()

    def _close(self, death_sig, timeout=30):
        self.closing()

    def pids(self):
        return {}


@pytest.fixture(autouse=True)
def handlers_as_before(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv(api.SIGNALS_VARIABLE, raising=False)
    before = {n: signal.getsignal(n) for n in (*ALL, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    after = {n: signal.getsignal(n) for n in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before
    assert not api._interruptions.depth and not api._interruptions.pending


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(LIMIT)  # the handler runs before


def handled() -> set[str]:
    numbers = (*ALL, signal.SIGUSR1, signal.SIGUSR2)
    ours = api._terminate_process_handler
    return {n.name for n in numbers if signal.getsignal(n) is ours}


# ------------------------------------------------------------------ which


@pytest.mark.parametrize(
    ("names", "expected", "warned"),
    [
        (None, {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}, None),
        (" SIGTERM , SIGUSR1", {"SIGTERM", "SIGUSR1"}, None),
        ("SIGTERM,SIGNONSENSE", {"SIGTERM"}, "SIGNONSENSE"),
        ("SIGTERM,SIGKILL", {"SIGTERM"}, "SIGKILL cannot be caught"),
        ("SIG_IGN,signal,SIGUSR2", {"SIGUSR2"}, "SIG_IGN"),
        ("", set(), "''"),
    ],
)
def test_which_signals(tmp_path, monkeypatch, caplog, names, expected, warned):
    if names is not None:
        monkeypatch.setenv(api.SIGNALS_VARIABLE, names)
    context = Fake(tmp_path)
    context.start()
    assert handled() == expected
    context.close()
    assert handled() == set()
    if warned is None:
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    else:
        assert warned in caplog.text


def test_an_ignored_sighup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        context = Fake(tmp_path)
        context.start()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert "SIGTERM" in handled()
        context.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_last_of_several_contexts_puts_handlers_back(tmp_path):
    one, two = Fake(tmp_path), Fake(tmp_path)
    with api.handled_signals():
        one.start()
        two.start()
        one.close()
        two.close()
        assert "SIGTERM" in handled()
    assert handled() == set()


def test_a_handler_that_somebody_put_there_meanwhile_stays(tmp_path):
    def theirs(signum, frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    context = Fake(tmp_path)
    context.start()
    signal.signal(signal.SIGTERM, theirs)
    context.close()
    assert signal.getsignal(signal.SIGTERM) is theirs
    signal.signal(signal.SIGTERM, before)


def test_off_the_main_thread_there_is_only_a_warning(tmp_path, caplog):
    context = Fake(tmp_path)
    thread = threading.Thread(target=context.start)
    thread.start()
    thread.join()
    assert handled() == set()
    assert "on a child thread" in caplog.text
    context.close()


def test_a_caller_that_handles_signals_itself(tmp_path):
    context = Fake(tmp_path, handle_signals=False)
    context.start()
    assert handled() == set()
    context.close()


# ------------------------------------------------------------------ when


def test_the_handler_by_itself():
    with pytest.raises(SignalException, match=rf"Process {os.getpid()} got signal: 15") as caught:
        api._terminate_process_handler(signal.SIGTERM, None)
    assert caught.value.sigval is signal.SIGTERM
    api._interruptions.raised = 0


def test_a_wait_is_left_at_once(tmp_path):
    context = Fake(tmp_path)
    context.start()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(SignalException) as caught:
        context.wait(LIMIT, period=LIMIT)
    assert caught.value.sigval is signal.SIGINT
    assert time.monotonic() - started < LIMIT / 2
    timer.join()
    context.close()


def test_a_look_is_finished_first(tmp_path):
    context = Fake(tmp_path)
    done = []

    def poll():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.getsignal(signal.SIGTERM)  # the handler runs by now
        done.append(True)
        return RunProcsResult()

    context.polling = poll
    context.start()
    with pytest.raises(SignalException):
        context.wait(0)
    assert done == [True]
    context.close()


def test_elsewhere_it_is_raised_at_once(tmp_path):
    context = Fake(tmp_path)
    context.start()
    with pytest.raises(SignalException):
        signal_myself(signal.SIGQUIT)
    context.close()


def test_a_first_signal_during_a_stop_is_raised_afterwards(tmp_path):
    context = Fake(tmp_path)
    hurried = []

    def close():
        os.kill(os.getpid(), signal.SIGTERM)
        hurried.append(context._hurry())

    context.closing = close
    context.start()
    with pytest.raises(SignalException):
        context.close()
    assert hurried == [False]  # the stop has its grace
    assert handled() == set()


def test_a_second_signal_hurries_a_third_does_no_more(tmp_path):
    context = Fake(tmp_path)
    hurried = []

    def close():
        hurried.append(context._hurry())
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            hurried.append(context._hurry())

    context.closing = close
    context.start()
    with pytest.raises(SignalException):
        signal_myself(signal.SIGTERM)
    context.close()  # raises nothing: its caller is stopping already
    assert hurried == [False, True, True]


def test_a_failing_stop_does_not_lose_the_signal_or_the_handlers(tmp_path):
    context = Fake(tmp_path)

    def close():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("the stop failed")

    context.closing = close
    context.start()
    with pytest.raises(SignalException) as caught:
        context.close()
    assert isinstance(caught.value.__context__, RuntimeError)
    assert handled() == set()


# ------------------------------------------------------------------ for real

AGENT = """
import os, signal, sys, time
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.system("sleep 600 &")
    ready()
    time.sleep(600)

def ready():
    os.write(1, b"ready\\n")  # one piece, whatever others write

SHELL = {
    "polite": 'for s in TERM INT HUP QUIT; do trap "echo got $s; exit 0" $s; done; %s',
    "stubborn": 'trap "" TERM; sleep 600 & %s',
}
kind, grace = sys.argv[1], float(sys.argv[2])
loop = "echo ready; while :; do sleep 0.05; done"
if kind in SHELL:
    entry, args = "/bin/sh", ("-c", SHELL[kind] % loop)
else:
    entry, args = work, ()
context = start_processes(
    "t", entry, {0: args, 1: args}, {0: {}, 1: {}}, DefaultLogsSpecs(os.devnull),
    start_method="fork", shutdown_timeout=grace,
)
try:
    ready()
    context.wait()
except SignalException as error:
    context.close(error.sigval)
    print("closed", int(error.sigval), flush=True)
    raise
"""


class Agent:
    def __init__(self, folder: Path, kind: str, grace: float) -> None:
        (folder / "agent.py").write_text(AGENT)
        command = [sys.executable, str(folder / "agent.py"), kind, str(grace)]
        with open(folder / "err", "w") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.everybody: set[int] = set()

    def ready(self) -> None:
        for _ in range(3):
            assert self.out.readline() == "ready\n"
        self.everybody = {entry.pid for entry in tree.descendants(self.process.pid)}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> list[str]:
        """What it said. Asserts that nothing of it is left."""
        self.process.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while left := [pid for pid in self.everybody if not gone(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)  # they are not our children: nothing tells
        return self.out.read().splitlines()

    def close(self) -> None:
        for pid in (self.process.pid, *self.everybody):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(LIMIT)
        self.out.close()


def gone(pid: int) -> bool:
    entry = tree.stat(pid)
    return entry is None or entry.zombie


@pytest.fixture
def agent(tmp_path):
    agents: list[Agent] = []

    def start(kind: str, grace: float = 30) -> Agent:
        agents.append(Agent(tmp_path, kind, grace))
        agents[-1].ready()
        return agents[-1]

    yield start
    for one in agents:
        one.close()


@pytest.mark.process
@pytest.mark.parametrize("number", ALL)
def test_the_workers_get_the_same_signal(agent, number):
    one = agent("polite")
    one.signal(number)
    said = one.end()
    assert sorted(said) == sorted([f"got {number.name[3:]}"] * 2 + [f"closed {int(number)}"])


@pytest.mark.process
@pytest.mark.parametrize("kind", ["stubborn", "function"])
def test_three_signals_and_workers_that_ignore_them(agent, kind):
    one = agent(kind, grace=600)
    started = time.monotonic()
    for _ in range(3):
        one.signal(signal.SIGTERM)
        time.sleep(0.1)  # one pending signal would swallow the next
    assert one.end() == ["closed 15"]
    assert time.monotonic() - started < LIMIT


@pytest.mark.process
@pytest.mark.parametrize("kind", ["stubborn", "function"])
def test_an_agent_that_is_killed_leaves_nobody(agent, kind):
    one = agent(kind)
    one.signal(signal.SIGKILL)
    one.end()


@pytest.mark.process
def test_an_unhandled_signal_leaves_nobody(agent):
    one = agent("stubborn")
    one.signal(signal.SIGUSR1)
    one.end()
    assert one.process.returncode == -signal.SIGUSR1
