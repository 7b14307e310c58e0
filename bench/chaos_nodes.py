"""Random faults of hosts, agents and workers of one job on three hosts (network namespaces).

    python bench/chaos_nodes.py [--minutes 5] [--seed 1] [--job N]

``phalanx run --nnodes 2 --spares 1`` with a session. An agent is killed, told to go, stopped for a
while; a link is cut for a while; a worker is killed, stopped (the agent has to find out that it
hangs) or made to raise; a whole host dies; one time in three it is the coordinator's host that is
hit, wherever that is by then; at any moment. What is gone is started again. Each job must end well
on every agent, with the losses of a run that nothing happened to, bit for bit, no rank held
twice in a generation, and nothing left behind. Needs root. The same seed gives the same faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "many_nodes"))
import hosts
from cluster import Agent, Cluster

SESSION = Path(hosts.__file__).parent / "session.py"
CONF = "last_call_timeout=60,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
OPTIONS = (
    f"--nnodes 2 --spares 1 --rdzv-id job --shutdown-timeout 5 --max-restarts 50 "
    f"--hang-timeout 10 --rdzv-conf {CONF}"
)
STEPS = 800
KINDS = ("kill", "terminate", "stop", "cut", "worker", "host", "hang", "raise")


class Job:
    """One job, its faults, and what it must look like at the end."""

    def __init__(self, number: int, folder: Path) -> None:
        self.chance = random.Random(number)
        self.cluster = Cluster(3, folder)
        (folder / "slow").touch()
        self.agents: dict[int, Agent] = {}

    def start(self, number: int) -> None:
        self.agents[number] = self.cluster.start(number, OPTIONS, SESSION, (str(STEPS), "0"))

    def ready(self) -> bool:
        """Two nodes train and the third waits (its keeper is warm)."""
        told = [a.events("membership") + a.events("parked") for a in self.agents.values()]
        return all(told)

    def fault(self) -> str:
        number, kind = self.chance.randrange(3), self.chance.choice(KINDS)
        pause, leader = self.chance.uniform(0.2, 6.0), self.chance.random() < 1 / 3
        if leader:
            number = self.coordinator(number)
        agent, host = self.agents[number], self.cluster.hosts[number]
        if kind == "kill":
            agent.signal(signal.SIGKILL)
        elif kind == "terminate":
            agent.signal(signal.SIGTERM)
        elif kind == "host":
            host.kill()
        elif kind in ("worker", "hang"):
            mine = {s.pid for s in self.cluster.steps() if s.host == host.name}
            for pid in mine & set(host.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if kind == "worker" else signal.SIGSTOP)
        elif kind == "raise":
            (self.cluster.folder / f"raise-{host.name}").touch()
        elif kind == "stop":
            agent.signal(signal.SIGSTOP)
            time.sleep(pause)
            agent.signal(signal.SIGCONT)
        else:
            host.cut()
            time.sleep(pause)
            host.mend()
        if kind in ("kill", "terminate", "host"):
            status = agent.wait()
            assert status in (-signal.SIGKILL, 128 + signal.SIGTERM), f"exit status {status}"
            self.cluster.until(lambda: not host.pids(), f"nothing is left on {host.name}")
            self.start(number)
        return f"{kind} {host.name}{' (coordinator)' if leader else ''}"

    def coordinator(self, otherwise: int) -> int:
        """The number of the host whose agent coordinates, by what the agents have recorded."""
        told = [
            (e["data"]["term"], e["data"]["at"])
            for a in self.agents.values()
            for e in a.events("coordinator")
        ]
        at = max(told, default=(0, ""))[1].rpartition(":")[0]
        return next((n for n in range(3) if self.cluster.hosts[n].address == at), otherwise)

    def end(self) -> None:
        self.cluster.until(self.ready, "all agents are back")
        (self.cluster.folder / "slow").unlink()
        for agent in self.agents.values():
            status = agent.wait()
            assert status == 0, f"{agent.name} exited {status}:\n{agent.err[-3000:]}"
        assert not self.cluster.hosts.left(), "processes are left on the hosts"


def losses(cluster: Cluster) -> dict[tuple[int, int], set[str]]:
    found: dict[tuple[int, int], set[str]] = {}
    for s in cluster.steps():
        found.setdefault((s.rank, s.step), set()).add(s.loss)
    return found


def calm(folder: Path) -> dict[tuple[int, int], set[str]]:
    """The losses of a run of two ranks that nothing happens to."""
    with Cluster(1, folder) as cluster:
        words = "--nproc-per-node 2 --rdzv-endpoint 127.0.0.1:0"
        status = cluster.start(0, words, SESSION, (str(STEPS), "0")).wait()
        assert status == 0, cluster.agents[0].err
        return losses(cluster)


def one(number: int, expected: dict[tuple[int, int], set[str]]) -> str:
    """The faults of a job that ended as it should. AssertionError: it did not."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-chaos-"))
    job = Job(number, folder)
    done: list[str] = []
    try:
        for n in range(3):
            job.start(n)
        job.cluster.until(job.ready, "all agents are there")
        for _ in range(job.chance.randint(1, 4)):
            time.sleep(job.chance.uniform(0.0, 3.0))
            done.append(job.fault())
        job.end()
        wrong = {k: v for k, v in losses(job.cluster).items() if v != expected[k]}
        assert not wrong, f"other losses than undisturbed: {wrong}"
    except AssertionError as error:
        raise AssertionError(f"{', '.join(done)}: {error}\n(what was written: {folder})") from None
    finally:
        job.cluster.close()
    shutil.rmtree(folder, ignore_errors=True)
    return ", ".join(done)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", type=int)
    given = parser.parse_args()
    if reason := hosts.why_not():
        print(f"chaos on several hosts: not run: {reason}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="phalanx-chaos-"))
    expected = calm(folder)
    shutil.rmtree(folder, ignore_errors=True)
    end = time.monotonic() + 60 * given.minutes
    number, ran, bad = given.seed * 100_000, 0, 0
    while given.job is not None or time.monotonic() < end:
        number = given.job if given.job is not None else number + 1
        began = time.monotonic()
        try:
            done = one(number, expected)
            print(f"job {number}: well after {done} ({time.monotonic() - began:.0f} s)", flush=True)
        except AssertionError as error:
            bad += 1
            print(f"job {number}: FAILED after {error}", flush=True)
        ran += 1
        if given.job is not None:
            break
    print(f"chaos on several hosts: {ran} jobs, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
