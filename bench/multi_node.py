"""Three hosts as network namespaces, one job on them, and everything that can befall a host.

    python bench/multi_node.py [--rounds 2] [--only SCENE]

``phalanx run --nnodes 2:3`` with gloo and DDP on each. One after the other, twice: an agent is
killed, its link is cut, it is stopped (SIGSTOP), it is told to go (SIGTERM); each time the others
go on with two hosts, and with three when it is back. Then the whole host with coordinator, rank 0
and the workers' store dies. After that, each in a job of its own:

* ``separate``: ``phalanx coordinator`` on a host of its own is killed, started again, cut off and
  stopped, and no worker stops;
* ``spare``: ``--nnodes 2 --spares 1`` with a session, and an agent too many: a spare takes the dead
  node's ranks, the survivor keeps its process, the losses are those of a run without a fault;
* ``fails``: one node fails for good, and all agents end, naming it;
* ``torchrun``: stock torchrun with our rendezvous goes on without a host that is killed.

Needs root. Writes bench/results/multi_node.json. Exit status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "many_nodes"))
import hosts
from cluster import DDP, PORT, Agent, Cluster, Step

SESSION = Path(hosts.__file__).parent / "session.py"
CONF = "last_call_timeout=20,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
OPTIONS = f"--nnodes 2:3 --rdzv-id job --shutdown-timeout 5 --rdzv-conf {CONF}"
TOLERATED = 3.0  # seconds from a failure for good to the last agent's end: what is aimed at


class Show:
    """The job, and what was seen of it."""

    def __init__(self, folder: Path, count: int, rows: dict[str, harness.Row]) -> None:
        self.cluster = Cluster(count, folder)
        self.agents: dict[int, Agent] = {}
        self._rows = rows

    def start(self, number: int, options: str = OPTIONS, *program: Any) -> None:
        self.agents[number] = self.cluster.start(number, options, *program)

    def sample(self, what: str, seconds: float, target: str = "") -> None:
        row = self._rows.setdefault(what, harness.Row(what, "s", target=target))
        row.ours.append(round(seconds, 3))

    def ranks(self, first: Step) -> dict[str, int]:
        """Which host has which rank in the attempt of that step."""
        self.cluster.until(
            lambda: (
                len({s.rank for s in self.cluster.steps() if s.attempt == first.attempt})
                == first.world
            ),
            "all ranks make steps",
        )
        return {s.host: s.rank for s in self.cluster.steps() if s.attempt == first.attempt}

    def event(self, name: str, world: int, do: Callable[[], Any]) -> dict[str, int]:
        """Do something, and wait for the first step of a world of that size."""
        before = self.ranks(self.cluster.steps()[-1])
        at = time.monotonic()
        do()
        step = self.cluster.trains(world, after=at)
        after = self.ranks(step)
        moved = [h for h in before.keys() & after.keys() if before[h] != after[h]]
        possible = sum(r >= world for h, r in before.items() if h in after)
        where = ", ".join(f"{h}={r}" for h, r in sorted(after.items()))
        old = [s.at for s in self.cluster.steps() if s.attempt != step.attempt and s.at < step.at]
        self.sample(f"{name.strip()}: to the first step", step.at - at)
        self.sample(f"{name.strip()}: without a step", step.at - max(old))
        print(
            f"{name:<42}{step.at - at:6.2f} s to the first step with a world of {world}, "
            f"{step.at - max(old):5.2f} s without a step (attempt {step.attempt}: {where})",
            flush=True,
        )
        assert sorted(after.values()) == list(range(world)), after
        assert len(moved) <= possible, f"ranks moved without need: {before} to {after}"
        return after

    def finish(self) -> None:
        self.cluster.finish()
        for agent in self.agents.values():
            status = agent.wait()
            assert status == 0, f"{agent.name} exited {status}:\n{agent.err[-3000:]}"


def gone(show: Show, number: int, status: int) -> None:
    """The agent of that host has ended by itself with that status, and nothing is left there."""
    assert show.agents[number].wait(30) == status
    show.cluster.until(lambda: not show.cluster.hosts[number].pids(), "the host is empty", 30)


def befall(show: Show, number: int) -> None:
    """All that can happen to one host, and it comes back each time."""
    host = show.cluster.hosts[number]

    def send(signum: int) -> Callable[[], None]:
        return lambda: show.agents[number].signal(signum)

    def again() -> None:
        show.start(number)

    show.event("agent killed (SIGKILL)", 2, send(signal.SIGKILL))
    gone(show, number, -signal.SIGKILL)
    show.event("  killed, and started again", 3, again)
    show.event("link cut", 2, host.cut)
    show.event("  cut, and mended", 3, host.mend)
    show.event("agent stopped (SIGSTOP)", 2, send(signal.SIGSTOP))
    show.event("  stopped, and continued", 3, send(signal.SIGCONT))
    show.event("agent told to go (SIGTERM)", 2, send(signal.SIGTERM))
    gone(show, number, 128 + signal.SIGTERM)
    show.event("  gone, and started again", 3, again)


def elastic(show: Show, rounds: int) -> None:
    for number in range(3):
        show.start(number)
    first = show.cluster.trains(3)
    print(f"{'start':<42}world of 3: {show.ranks(first)}", flush=True)
    for turn in range(rounds):
        befall(show, 1 + turn % 2)
    del show.agents[0]
    show.event("host of coordinator, rank 0 and store dies", 2, show.cluster.hosts[0].kill)
    show.finish()


def separate(show: Show, rounds: int) -> None:
    """The coordinator is a process of its own, on the last host: no worker stops for it."""
    host = show.cluster.hosts[3]
    listen = f"{host.address}:{PORT}"
    state = show.cluster.folder / "state"
    command = [sys.executable, "-m", "phalanx", "coordinator", "--listen", listen]
    command += ["--silence", "3", "--state-dir", str(state)]

    def begin() -> subprocess.Popen[str]:
        log = (show.cluster.folder / "coordinator.err").open("ab")
        return host.start(command, stdout=log, stderr=log)

    coordinator = begin()
    for number in range(3):
        show.start(number, f"{OPTIONS},is_host=0 --rdzv-backend c10d --rdzv-endpoint {listen}")
    first = show.cluster.trains(3)
    show.ranks(first)
    pids = {s.pid for s in show.cluster.steps()}

    def calm(name: str, seconds: float) -> None:
        """All ranks make steps for that long, in the processes that they have."""
        begun = time.monotonic()
        show.cluster.until(
            lambda: any(s.at > begun + seconds for s in show.cluster.steps()), "steps go on"
        )
        seen = [s for s in show.cluster.steps() if s.at > begun]
        assert {s.pid for s in seen} == pids, f"{name}: other processes than before"
        gaps = [b.at - a.at for a, b in itertools.pairwise(sorted(seen, key=lambda s: s.at))]
        print(f"{name:<42}{len(seen)} steps, at most {max(gaps):.2f} s apart", flush=True)
        show.sample(f"{name.strip()}: longest between two steps", max(gaps))

    for _ in range(rounds):
        coordinator.kill()
        calm("phalanx coordinator killed", 4)
        coordinator.wait(10)
        coordinator = begin()
        calm("  killed, and started again", 4)
        host.cut()
        calm("phalanx coordinator cut off", 5)
        host.mend()
        calm("  cut off, and mended", 4)
        coordinator.send_signal(signal.SIGSTOP)
        calm("phalanx coordinator stopped (SIGSTOP)", 5)
        coordinator.send_signal(signal.SIGCONT)
        calm("  stopped, and continued", 4)
    show.event(
        "agent killed, separate coordinator", 2, lambda: show.agents[2].signal(signal.SIGKILL)
    )
    del show.agents[2]
    show.finish()


STEPS = 800


def losses(cluster: Cluster) -> dict[tuple[int, int], set[str]]:
    """Of each rank and step, as often as it was done."""
    found: dict[tuple[int, int], set[str]] = {}
    for s in cluster.steps():
        found.setdefault((s.rank, s.step), set()).add(s.loss)
    return found


@functools.cache
def undisturbed() -> dict[tuple[int, int], set[str]]:
    """The losses of a run of two ranks that nothing happens to."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-nodes-"))
    with Cluster(1, folder) as cluster:
        words = "--nproc-per-node 2 --rdzv-endpoint 127.0.0.1:0"
        status = cluster.start(0, words, SESSION, (str(STEPS), "0")).wait()
        assert status == 0, cluster.agents[0].err
        found = losses(cluster)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def spare(show: Show, coordinator: bool) -> None:
    """Two train with a session, one is spare, one too many; a host that trains dies."""
    cluster = show.cluster
    slow = cluster.folder / "slow"
    slow.touch()
    options = f"--nnodes 2 --spares 1 --rdzv-id job --shutdown-timeout 5 --rdzv-conf {CONF}"
    for number in range(3):
        show.start(number, options, SESSION, (str(STEPS), "0"))
    cluster.until(
        lambda: all(a.events("membership") or a.events("parked") for a in show.agents.values()),
        "two have seats and one waits",
    )
    show.start(3, options, SESSION, (str(STEPS), "0"))
    cluster.until(lambda: show.agents[3].events("parked"), "one more than there is room for waits")
    cluster.until(lambda: sum(s.step == 5 for s in cluster.steps()) >= 2, "step 5")
    before = {s.rank: s for s in cluster.steps()}
    first = "host0" if coordinator else next(s.host for s in before.values() if s.host != "host0")
    rank = next((r for r, s in before.items() if s.host == first), None)
    assert rank is not None, f"{first} has no seat: {sorted(s.host for s in before.values())}"
    number = int(first.removeprefix("host"))
    waits = {a.host.name for a in show.agents.values()} - {s.host for s in before.values()}
    at = time.monotonic()
    cluster.hosts[number].kill()
    del show.agents[number]
    step = cluster.until(
        lambda: next((s for s in cluster.steps() if s.rank == rank and s.host != first), None),
        "the rank makes steps again",
    )
    name = f"spare takes a dead host's rank{' (coordinator)' if coordinator else ''}"
    stays = before[1 - rank]
    kept = step.attempt == stays.attempt
    slow.unlink()
    for agent in show.agents.values():
        status = agent.wait()
        assert status == 0, f"{agent.name} exited {status}:\n{agent.err[-3000:]}"
    mine = {s.pid for s in cluster.steps() if s.rank == stays.rank}
    assert step.host in waits, f"rank {rank} went to {step.host}, who waited was {waits}"
    assert kept == (mine == {stays.pid}), f"processes of the rank that stays: {mine}"
    assert kept or coordinator, "all workers were started again"
    wrong = {k: v for k, v in losses(cluster).items() if v != undisturbed()[k]}
    assert not wrong, f"other losses than undisturbed: {wrong}"
    show.sample(f"{name}: to its first step", step.at - at)
    print(
        f"{name:<42}{step.at - at:6.2f} s to its first step, on {step.host}; the other "
        f"{'keeps its process' if kept else 'is started again'}; losses bit for bit; the agent "
        "too many waited, and ended with 0",
        flush=True,
    )


def fails(show: Show) -> None:
    """A worker of one node raises, and no restart is left."""
    for number in range(3):
        show.start(number, OPTIONS + " --max-restarts 0")
    ranks = show.ranks(show.cluster.trains(3))
    culprit = "host1"
    part = show.cluster.folder / "fail.new"
    part.write_text(culprit)
    part.rename(show.cluster.folder / "fail")
    ends: dict[str, float] = {}

    def ended() -> bool:
        for agent in show.agents.values():
            if agent.name not in ends and agent.process.poll() is not None:
                ends[agent.name] = time.monotonic()
        return len(ends) == len(show.agents)

    show.cluster.until(ended, "all agents have ended")
    said = [line.split() for line in (show.cluster.folder / "said").read_text().splitlines()]
    at = next(float(words[2]) for words in said if words[0] == "failed")
    took = max(ends.values()) - at
    for agent in show.agents.values():
        where = f"{agent.name} exited {agent.process.returncode}:\n{agent.err[-3000:]}"
        assert agent.process.returncode == 1, where
        named = [f"rank {ranks[culprit]}", culprit, "this host is broken"]
        assert all(word in agent.err for word in named), f"does not name {named}: {where}"
    show.cluster.until(lambda: not show.cluster.hosts.left(), "nothing is left", 30)
    name = "one node fails for good"
    show.sample(f"{name}: to the last agent's end", took, target=f"{TOLERATED:g} s")
    print(f"{name:<42}{took:6.2f} s to the last agent's end; all name {culprit}", flush=True)


def torchrun(show: Show, victim: int) -> None:
    """Stock torchrun's agents with ``--rdzv-backend phalanx``; a host is killed."""
    made = show.cluster
    words = ["--nnodes", "2:3", "--rdzv-backend", "phalanx", "--rdzv-id", "job"]
    words += ["--rdzv-endpoint", f"{made.hosts[0].address}:{PORT}", "--max-restarts", "3"]
    words += ["--rdzv-conf", CONF, str(DDP)]
    for number in range(3):
        agent = Agent(made.hosts[number], number, made.folder, words, torchrun=True)
        made.agents.append(agent)
        show.agents[number] = agent
    made.trains(3)
    at = time.monotonic()
    made.hosts[victim].kill()
    del show.agents[victim]
    step = made.trains(2, after=at)
    name = f"torchrun, host{victim} killed"
    show.sample(f"{name}: to the first step", step.at - at)
    print(f"{name:<42}{step.at - at:6.2f} s to the first step with a world of 2", flush=True)
    show.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    scenes: list[tuple[str, int, Callable[[Show, int], None]]] = [
        ("elastic", 3, elastic),
        ("separate", 4, separate),
        ("spare", 4, lambda show, _: spare(show, coordinator=False)),
        ("spare", 4, lambda show, _: spare(show, coordinator=True)),
        ("fails", 3, lambda show, _: fails(show)),
        ("fails", 3, lambda show, _: fails(show)),
        ("torchrun", 3, lambda show, _: torchrun(show, 2)),
        ("torchrun", 3, lambda show, _: torchrun(show, 0)),
    ]
    parser.add_argument("--only", choices=sorted({name for name, _, _ in scenes}))
    given = parser.parse_args()
    if reason := hosts.why_not():
        print(f"multi-node: not run: {reason}")
        return 0
    began = time.monotonic()
    rows: dict[str, harness.Row] = {}
    for name, count, scene in scenes:
        if given.only not in (None, name):
            continue
        folder = Path(tempfile.mkdtemp(prefix="phalanx-nodes-"))
        show = Show(folder, count, rows)
        try:
            scene(show, given.rounds)
        except AssertionError as error:
            print(f"multi-node: FAILED: {error}\n(what was written: {folder})")
            return 1
        finally:
            show.cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    if given.only is None:
        harness.table("multi_node", "(none)", list(rows.values()), {"rounds": given.rounds})
    print(f"multi-node: all as it should be, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
