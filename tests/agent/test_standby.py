"""``--standby``: replacements that are built before anything has happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent import standbys
from phalanx.agent.standbys import NOBODY, Standbys, fixed_differences
from phalanx.process.channel import Message

SPEAKS = """
def hello(any_rank=True):
    phalanx.progress(generation)
    end.send("hello", generation=generation, rank=RANK, capabilities=[], waiting=JOIN,
             any_rank=any_rank)
def seat(message):
    if message.type == "take":
        os.environ.update(message.fields["environment"])
        for name, fd in zip(message.fields["streams"], message.fds):
            os.dup2(fd, {"stdout": 1, "stderr": 2}[name])
            os.close(fd)
        print("sits on", os.environ["RANK"], os.environ["LOCAL_RANK"], flush=True)
"""

TWO_RANKS = """
print("built", os.getpid(), flush=True)
hello()
say("standby" if JOIN else "up", RANK, os.getpid())
if RANK == 0 and not JOIN:
    wait_for("go")
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    message = hear()
    seat(message)
    if follow(message):
        say("good", os.environ["RANK"], os.getpid())
        break
wait_for("end")
"""


@pytest.fixture
def speaker(member):
    def start(options: str, body: str, **more: Any):
        return member(options, SPEAKS + body, **more)

    return start


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def ready(run, count: int = 1) -> list[int]:
    """Pids of those that were ready, when there are that many."""
    run.until(lambda: len(run.events("standby_ready")) >= count)
    return [e["data"]["pid"] for e in run.events("standby_ready")]


@pytest.mark.process
@pytest.mark.parametrize("warm", ["", "--no-warm "])
def test_a_standby_takes_the_rank_that_falls(speaker, tmp_path, warm) -> None:
    logs = tmp_path / "logs"
    options = f"{warm}--nproc-per-node 2 --max-restarts 0 --standby 1 -r 3 --log-dir {logs}"
    run = speaker(options, TWO_RANKS)
    (pid,) = ready(run)
    (run.folder / "go").touch()
    run.until(lambda: run.events("recovered"))
    assert f"good 0 {pid}" in run.said(), run.said()
    _, another = ready(run, 2)  # while training goes on
    assert alive(another)
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert "rank 0 replaced by a standby, training again after" in run.err
    assert not alive(another)
    (replaced,) = run.events("worker_replaced")
    assert replaced["data"]["standby"] is True and replaced["data"]["pid"] == pid
    (text,) = [p.read_text() for p in logs.glob("*/attempt_0/0/stdout.log")]
    assert text.endswith(f"built {pid}\nsits on 0 0\n"), text
    (text,) = [p.read_text() for p in logs.glob("*/attempt_0/1/stdout.log")]
    assert str(pid) not in text and str(another) not in text


@pytest.mark.process
def test_what_a_seated_standby_dies_of_is_its_ranks(speaker) -> None:
    run = speaker(
        "--nproc-per-node 2 --max-restarts 0 --standby 1",
        TWO_RANKS.replace(
            'wait_for("end")',
            'if JOIN: raise ValueError("of the seat")\nwait_for("end")',
        ),
    )
    ready(run)
    (run.folder / "go").touch()
    assert run.wait() == 1, run.err
    assert "rank 0 (local rank 0" in run.err and "raised ValueError: of the seat" in run.err


@pytest.mark.process
def test_a_standby_that_dies_is_no_fault_and_is_given_up_in_the_end(speaker) -> None:
    run = speaker(
        "--nproc-per-node 2 --max-restarts 0 --standby 1",
        """
if JOIN: raise ValueError("not here")
hello()
say("up", RANK)
wait_for("end")
""",
    )
    run.until(lambda: run.events("no_standby"))
    assert len(run.events("standby_died")) == standbys.DEATHS
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert "no standby is kept any more: 3 in a row died" in run.err
    assert "raised ValueError: not here" in run.err
    assert not run.events("episode_began")


@pytest.mark.process
def test_ranks_that_are_not_alike_have_no_standby(speaker) -> None:
    run = speaker(
        "--nproc-per-node 2 --standby 1",
        'hello(any_rank=False)\nsay("up", JOIN)\nwait_for("end")\n',
    )
    run.until(lambda: run.events("no_standby"))
    run.until(lambda: len(run.said()) == 2)
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert "no standby is kept any more: not every process can be any rank" in run.err
    assert run.said() == ["up False"] * 2
    assert not run.events("standby_started")


@pytest.mark.process
def test_arguments_with_the_local_rank_have_no_standby(speaker) -> None:
    run = speaker("--nproc-per-node 2 --standby 1", "hello()\n", args=["${local_rank}"])
    assert run.wait() == 0, run.err
    assert "no standby is kept any more: the ranks differ in their command lines" in run.err


@pytest.mark.process
def test_a_restart_of_the_group_has_a_standby_of_its_own(speaker) -> None:
    run = speaker(
        "--nproc-per-node 2 --max-restarts 1 --standby 1",
        """
hello()
say("up", RANK, ATTEMPT, JOIN)
if RANK == 0 and not ATTEMPT and not JOIN:
    wait_for("go")
    end.send("fault", generation=1, kind="lost-state", text="x", step=1)
while JOIN: hear()
wait_for("end")
""",
    )
    (first,) = ready(run)
    (run.folder / "go").touch()
    _, second = ready(run, 2)
    assert not alive(first) and alive(second)
    run.until(lambda: "up 1 1 True" in run.said())
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert not alive(second)
    assert len(run.events("standby_died")) == 0


@pytest.mark.process
def test_a_standby_goes_with_the_agent(speaker) -> None:
    run = speaker("--nproc-per-node 1 --standby 2", 'hello()\nwait_for("end")\n')
    pids = ready(run, 2)
    assert len(set(pids)) == 2
    run.signal(signal.SIGKILL)
    run.process.communicate(timeout=60)
    end = os.times().elapsed + 60
    while any(map(alive, pids)):
        assert os.times().elapsed < end, "a standby outlives its agent"


class Worker:
    def __init__(self, number: int, local_rank: int = NOBODY) -> None:
        self.id = self.pid = number
        self.local_rank = local_rank
        self.alive = True


class Ears:
    """A console and an events record."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, text: str) -> None:
        self.heard.append(text)

    warn = say

    def record(self, kind: str, **data: Any) -> None:
        pass


def test_a_program_without_a_session_has_none_and_is_told_so_once(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(standbys.pause, "now", lambda: now)
    ears: Any = Ears()
    started: list[int] = []
    kept = Standbys(1, lambda slot: started.append(slot), ears, ears, ears)  # type: ignore[arg-type,func-returns-value]
    workers: Any = [Worker(1, 0), Worker(2, 1)]
    kept.begin("")
    assert kept.due() == now + standbys.SILENCE_SECONDS
    assert kept.tick(now, workers) is False
    for _ in range(2):
        kept.tick(now + standbys.SILENCE_SECONDS, workers)
    assert len(ears.heard) == 1 and "phalanx.training" in ears.heard[0]
    assert kept.due() is None
    hello = Message("hello", {"any_rank": True})
    assert kept.on_message(workers[0], hello) is False
    kept.tick(now, workers)
    assert not started, "the other rank is not in its loop yet"
    kept.on_message(workers[1], hello)
    kept.tick(now, workers)
    assert started == [0]


@pytest.mark.parametrize(
    ("envs", "commands", "what"),
    [
        ({0: {"RANK": "0"}, 1: {"RANK": "1"}}, {0: ("x",), 1: ("x",)}, ""),
        ({0: {"A": "0"}, 1: {"A": "1"}}, {0: ("x",), 1: ("x",)}, "A"),
        ({0: {}, 1: {"A": "1"}}, {0: ("x",), 1: ("x",)}, "A"),
        ({0: {}, 1: {}}, {0: ("x", "0"), 1: ("x", "1")}, "their command lines"),
        ({}, {}, ""),
    ],
)
def test_what_ranks_differ_in(envs, commands, what) -> None:
    assert fixed_differences(envs, commands) == what
