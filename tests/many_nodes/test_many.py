"""A job on several hosts: real agents, real signals, a network namespace for each host."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

SLOW = pytest.mark.skipif(
    os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: set PHALANX_SLOW_TESTS=1"
)
SESSION = Path(__file__).parent / "session.py"
CONF = "--rdzv-conf last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
JOB = f"--rdzv-id job --shutdown-timeout 5 {CONF}"

HEAD = """
import os, sys, time
OUT = os.environ["TEST_OUT"]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
HOST = os.uname().nodename
def wait_for(name, limit=80):
    end = time.monotonic() + limit
    while not os.path.exists(OUT + "/" + name):
        if time.monotonic() > end: sys.exit(99)
        time.sleep(0.01)
fd = os.open(OUT + "/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, f"1 {RANK} {WORLD} {ATTEMPT} 0 {os.getpid()} {HOST} {time.monotonic()} 0\\n".encode())
"""
WAITS = "wait_for('enough')"


@pytest.fixture
def program(tmp_path: Path):
    """``program("source")``: a script that has told of itself (a line of cluster.Step)."""

    def write(source: str = WAITS) -> Path:
        path = tmp_path / "program.py"
        path.write_text(HEAD + source)
        return path

    return write


def who(made: Any, attempt: int) -> dict[str, tuple[int, int]]:
    """Host to (rank, world) in an attempt."""
    return {s.host: (s.rank, s.world) for s in made.steps() if s.attempt == attempt}


@pytest.mark.torch
def test_an_agent_is_killed_or_cut_off_and_the_others_go_on_until_it_is_back(cluster) -> None:
    made = cluster(3)
    agents = [made.start(n, f"--nnodes 2:3 {JOB}") for n in range(3)]
    first = made.trains(3)
    made.until(lambda: len(who(made, 0)) == 3)
    before = {host: rank for host, (rank, _) in who(made, 0).items()}
    killed = next(a for a in agents if before[a.host.name] == 2)
    at = time.monotonic()
    killed.signal(signal.SIGKILL)
    step = made.trains(2, after=at)
    assert step.attempt == first.attempt + 1
    made.until(lambda: len(who(made, step.attempt)) == 2)
    after = {host: rank for host, (rank, _) in who(made, step.attempt).items()}
    assert after == {host: rank for host, rank in before.items() if rank != 2}
    made.until(lambda: not killed.host.pids(), "nothing is left of the killed agent's workers")
    at = time.monotonic()
    again = made.start(killed.host.number, f"--nnodes 2:3 {JOB}")
    step = made.trains(3, after=at)
    made.until(lambda: len(who(made, step.attempt)) == 3)
    assert {host: rank for host, (rank, _) in who(made, step.attempt).items()} == before
    at = time.monotonic()
    killed.host.cut()
    made.trains(2, after=at)
    at, last = time.monotonic(), step.attempt
    killed.host.mend()
    step = made.trains(3, after=at)
    made.finish()
    assert [a.wait() for a in [*agents, again] if a is not killed] == [0, 0, 0]
    # what it did while it was cut off is of the attempt before, and was stopped
    seen = {s.attempt for s in made.steps() if s.host == killed.host.name}
    assert seen == {0, last, step.attempt}


def test_a_node_that_is_told_to_go_says_so_and_the_others_do_not_wait(cluster, program) -> None:
    made = cluster(2)
    script = program()
    host, other = (made.start(n, f"--nnodes 1:2 {JOB}", script) for n in range(2))
    made.trains(2)
    at = time.monotonic()
    other.signal(signal.SIGTERM)
    step = made.trains(1, after=at)
    assert other.wait() == 128 + signal.SIGTERM
    assert "SIGTERM" in host.err
    assert step.attempt == 1
    made.finish()
    assert host.wait() == 0


def test_one_failure_for_good_ends_all_agents_and_names_the_culprit(cluster, program) -> None:
    made = cluster(2)
    script = program("wait_for('enough') if RANK == 0 else (wait_for('go'), sys.exit(7))")
    agents = [made.start(n, f"--nnodes 2 --max-restarts 0 {JOB}", script) for n in range(2)]
    made.until(lambda: len(who(made, 0)) == 2)
    culprit = next(host for host, (rank, _) in who(made, 0).items() if rank == 1)
    (made.folder / "go").touch()
    assert [a.wait() for a in agents] == [7, 7]
    for agent in agents:
        assert "rank 1" in agent.err and culprit in agent.err and "code 7" in agent.err


def test_the_restart_count_is_the_same_everywhere(cluster, program) -> None:
    made = cluster(2)
    script = program("if ATTEMPT == 0 and RANK == 1: sys.exit(7)\nwait_for('enough')")
    agents = [made.start(n, f"--nnodes 2 --max-restarts 1 {JOB}", script) for n in range(2)]
    made.until(lambda: len(who(made, 1)) == 2, "both start again")
    made.finish()
    assert [a.wait() for a in agents] == [0, 0]
    assert {s.attempt for s in made.steps()} == {0, 1}


def test_a_surplus_agent_waits_and_takes_the_place_of_a_lost_one(cluster, program) -> None:
    made = cluster(3)
    script = program()
    host, second = (made.start(n, f"--nnodes 2 --spares 1 {JOB}", script) for n in range(2))
    made.trains(2)
    spare = made.start(2, f"--nnodes 2 --spares 1 {JOB}", script)
    made.until(lambda: "waiting" in spare.err)
    at = time.monotonic()
    made.hosts[1].kill()
    made.trains(2, after=at)
    made.until(lambda: len(who(made, 1)) == 2)
    assert who(made, 1)["host2"] == who(made, 0)["host1"]
    assert who(made, 1)["host0"] == who(made, 0)["host0"]
    made.finish()
    assert [host.wait(), spare.wait()] == [0, 0]
    assert second.wait() == -signal.SIGKILL


def test_a_spare_that_was_not_needed_ends_with_the_job(cluster, program) -> None:
    made = cluster(2)
    script = program()
    host = made.start(0, f"--nnodes 1 --spares 1 {JOB}", script)
    made.trains(1)
    spare = made.start(1, f"--nnodes 1 --spares 1 {JOB}", script)
    made.until(lambda: "waiting" in spare.err)
    made.finish()
    assert [host.wait(), spare.wait()] == [0, 0]


def test_an_agent_that_waits_says_for_what_and_ctrl_c_ends_it_at_once(cluster, program) -> None:
    made = cluster(2)
    alone = made.start(1, f"--nnodes 2 {JOB}", program())
    made.until(lambda: "waiting for 10.77.0.1:29400" in alone.err)
    alone.signal(signal.SIGINT)
    assert alone.wait() == 128 + signal.SIGINT
    host = made.start(0, f"--nnodes 2 {JOB}", program())
    made.until(lambda: "1 of at least 2" in host.err)
    host.signal(signal.SIGINT)
    assert host.wait() == 128 + signal.SIGINT


def test_torchruns_static_command_line_and_ranks(cluster, program) -> None:
    made = cluster(2)
    script = program("assert os.environ['MASTER_PORT'] == '1234'\n" + WAITS)
    words = "--nnodes=2 --master_addr=10.77.0.1 --master_port=1234"
    other = made.start(1, f"{words} --node_rank=1 {JOB}", script)
    host = made.start(0, f"{words} --node_rank=0 {JOB}", script)
    made.until(lambda: len(who(made, 0)) == 2)
    assert who(made, 0) == {"host0": (0, 2), "host1": (1, 2)}
    same = made.start(1, f"{words} --node_rank=1 {JOB}", script)
    assert same.wait() != 0
    assert "--node-rank 1" in same.err
    made.finish()
    assert [host.wait(), other.wait()] == [0, 0]


@pytest.mark.torch
def test_who_stops_for_a_newcomer_finishes_a_step_and_goes_on_after_it(
    cluster, monkeypatch
) -> None:
    made = cluster(2)
    monkeypatch.setenv("TEST_KEPT", str(made.folder / "kept"))
    words = f"--nnodes 1:2 {JOB.replace('last_call_timeout=60', 'last_call_timeout=1')}"
    first = made.start(0, words, SESSION, ["100000", "0.05", "-1"])
    made.until(lambda: len(made.steps()) > 25, "it trains, and has told its pace")
    second = made.start(1, words, SESSION, ["100000", "0.05", "-1"])
    step = made.trains(2)
    (stop,) = (event["data"] for event in first.events("stop"))
    assert stop["reason"] == "more nodes are there" and stop["at"] is not None
    before = [s.step for s in made.steps() if s.attempt == 0]
    # to that one at least: a machine that is very busy may pass on the word too late for it
    assert stop["at"] in before
    assert before == list(range(len(before)))
    assert (step.step, step.attempt) == (len(before), 1)  # none is lost, none is done again
    for agent in (second, first):
        agent.signal(signal.SIGTERM)
    for agent in (second, first):
        agent.wait()


@pytest.mark.torch
@pytest.mark.parametrize(
    "coordinates",
    [False, pytest.param(True, marks=SLOW)],
    ids=["a-member", "the-coordinator"],
)
def test_a_spare_takes_the_ranks_and_the_survivors_keep_their_processes(
    cluster, monkeypatch, coordinates: bool
) -> None:
    made = cluster(3)
    monkeypatch.setenv("TEST_KEPT", str(made.folder / "kept"))
    words = f"--nnodes 2 --spares 1 {JOB}"
    (made.folder / "hold").touch()
    agents = [made.start(n, words, SESSION, ["40"]) for n in range(2)]
    made.until(lambda: sum(s.step == 10 for s in made.steps()) == 2)
    before = {s.rank: s for s in made.steps()}
    # last: who is slow to start could be the coordinator, and then the spare
    spare = made.start(2, words, SESSION, ["40"])
    agents.append(spare)
    made.until(lambda: "waiting: this" in spare.err or "waiting: all" in spare.err)
    gone = next(rank for rank, s in before.items() if (s.host == "host0") is coordinates)
    stays = 1 - gone
    lost = next(n for n, a in enumerate(agents) if a.host.name == before[gone].host)
    made.hosts[lost].kill()
    (made.folder / "hold").unlink()
    assert [a.wait() for n, a in enumerate(agents) if n != lost] == [0, 0]
    steps = made.steps()
    assert {s.attempt for s in steps} == {0}
    assert {s.pid for s in steps if s.rank == stays} == {before[stays].pid}
    assert {s.host for s in steps if s.rank == gone} == {before[gone].host, spare.host.name}
    # each was asked for before it got its name
    kept = {p.name: json.loads((p / "commit.json").read_text()) for p in made.folder.glob("kept/*")}
    assert {name: mark["generation"] for name, mark in kept.items()} == {
        "step-0000000029": 2,
        "step-0000000039": 2,
    }
    losses: dict[tuple[int, int], set[str]] = {}
    for s in steps:
        losses.setdefault((s.rank, s.step), set()).add(s.loss)
    assert set(losses) == {(rank, step) for rank in (0, 1) for step in range(40)}
    # a run of the same program that lost nobody
    (made.folder / "said").rename(made.folder / "said.disturbed")
    monkeypatch.delenv("TEST_KEPT")
    calm = made.start(0, "--nproc-per-node 2", SESSION, ["40", "0"])
    assert calm.wait() == 0
    assert len(made.steps()) == 80
    for s in made.steps():
        assert losses[s.rank, s.step] == {s.loss}


@pytest.mark.torch
@SLOW
def test_the_coordinators_host_is_cut_off_and_a_spare_takes_its_ranks(cluster) -> None:
    made = cluster(4)
    (made.folder / "hold").touch()
    words = f"--nnodes 3 --spares 1 --isolation-timeout 5 {JOB}"
    agents = [made.start(n, words, SESSION, ["30"]) for n in range(3)]
    made.until(lambda: len({s.rank for s in made.steps()}) == 3)
    agents.append(made.start(3, words, SESSION, ["30"]))  # later, so that it is the spare
    made.until(lambda: sum(s.step == 10 for s in made.steps()) == 3)
    before = {s.host: s for s in made.steps()}
    (spare,) = (a for a in agents if a.host.name not in before)
    made.until(lambda: "waiting: this" in spare.err or "waiting: all" in spare.err)
    made.hosts[0].cut()
    (made.folder / "hold").unlink()
    rest = [a for a in agents if a.host.name != "host0"]
    assert [a.wait() for a in rest] == [0, 0, 0]
    after = [s for s in made.steps() if s.host != "host0"]
    assert {s.attempt for s in after} == {0}  # nobody has started again
    for host in set(before) - {"host0"}:
        assert {s.pid for s in after if s.host == host} == {before[host].pid}
    assert {s.rank for s in after if s.host == spare.host.name} == {before["host0"].rank}
