"""Three hosts as network namespaces, one DDP job on them, and everything that can befall a host.

    python bench/multi_node.py [--rounds 2]

``phalanx run --nnodes 2:3`` with gloo on each. One after the other: an agent is killed, its link
is cut, it is stopped (SIGSTOP), it is told to go (SIGTERM); each time the others go on with two
hosts, and with three when it is back. Then the whole host with coordinator, rank 0 and the
workers' store dies. Then the same job with ``phalanx coordinator`` on a host of its own, which
is restarted and cut off while no worker stops. Needs root. Exit status 1 if anything is not as it
should be.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "many_nodes"))
import hosts
from cluster import PORT, Agent, Cluster, Step

CONF = "last_call_timeout=20,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
OPTIONS = f"--nnodes 2:3 --rdzv-id job --shutdown-timeout 5 --rdzv-conf {CONF}"
TARGETS = "kill", "cut", "stop", "terminate"


class Show:
    """The job, and what was seen of it."""

    def __init__(self, folder: Path, count: int) -> None:
        self.cluster = Cluster(count, folder)
        self.agents: dict[int, Agent] = {}
        self.samples: dict[str, list[float]] = {}

    def start(self, number: int, options: str = OPTIONS) -> None:
        self.agents[number] = self.cluster.start(number, options)

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
        self.samples.setdefault(name, []).append(step.at - at)
        moved = [h for h in before.keys() & after.keys() if before[h] != after[h]]
        possible = sum(r >= world for h, r in before.items() if h in after)
        where = ", ".join(f"{h}={r}" for h, r in sorted(after.items()))
        old = [s.at for s in self.cluster.steps() if s.attempt != step.attempt and s.at < step.at]
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
    show.event("  and started again", 3, again)
    show.event("link cut", 2, host.cut)
    show.event("  and mended", 3, host.mend)
    show.event("agent stopped (SIGSTOP)", 2, send(signal.SIGSTOP))
    show.event("  and continued", 3, send(signal.SIGCONT))
    show.event("agent told to go (SIGTERM)", 2, send(signal.SIGTERM))
    gone(show, number, 128 + signal.SIGTERM)
    show.event("  and started again", 3, again)


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

    for _ in range(rounds):
        coordinator.kill()
        calm("phalanx coordinator killed", 4)
        coordinator.wait(10)
        coordinator = begin()
        calm("  and started again", 4)
        host.cut()
        calm("its link cut", 5)
        host.mend()
        calm("  and mended", 4)
        coordinator.send_signal(signal.SIGSTOP)
        calm("phalanx coordinator stopped (SIGSTOP)", 5)
        coordinator.send_signal(signal.SIGCONT)
        calm("  and continued", 4)
    show.event("agent killed (SIGKILL)", 2, lambda: show.agents[2].signal(signal.SIGKILL))
    del show.agents[2]
    show.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    if reason := hosts.why_not():
        print(f"multi-node: not run: {reason}")
        return 0
    began = time.monotonic()
    scenes: list[tuple[int, Callable[[Show], None]]] = [
        (3, lambda show: elastic(show, given.rounds)),
        (4, lambda show: separate(show, 1)),
    ]
    for count, scene in scenes:
        folder = Path(tempfile.mkdtemp(prefix="phalanx-nodes-"))
        show = Show(folder, count)
        try:
            scene(show)
        except AssertionError as error:
            print(f"multi-node: FAILED: {error}\n(what was written: {folder})")
            return 1
        finally:
            show.cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"multi-node: all as it should be, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
