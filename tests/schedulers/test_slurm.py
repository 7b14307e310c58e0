"""The recipe for Slurm on a real one: nodes die, the job ends well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "slurm" / "train.sbatch"
PROGRAM = Path(__file__).with_name("program.py")

slow = pytest.mark.skipif(
    os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: set PHALANX_SLOW_TESTS=1"
)


class Job:
    """The recipe with ``program.py``, submitted. ``said`` are the lines of its workers."""

    def __init__(self, slurm: Any, name: str, **env: str) -> None:
        self.slurm = slurm
        self.folder = slurm.shared / name
        self.folder.mkdir()
        given = {"WORKERS": "1", "GRACE": "5", "LATE": "1", "TEST_OUT": str(self.folder), **env}
        self.number = slurm.submit("--nodes=3", str(RECIPE), str(PROGRAM), env=given)

    def said(self, what: str = "") -> list[str]:
        path = self.folder / "said"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(what)]

    def began(self, count: int) -> list[str]:
        """The hosts of the workers' starts, once there have been so many."""
        self.slurm.until(lambda: len(self.said("began")) >= count, f"{count} starts of workers")
        return [line.split()[1] for line in self.said("began")]

    def create(self, name: str, text: str = "") -> None:
        (self.folder / "new").write_text(text)
        os.replace(self.folder / "new", self.folder / name)

    def ended(self) -> tuple[str, str, str]:
        """State, exit code and number of requeues, when it has ended; its output on failure."""
        job = self.slurm.ended(self.number)
        print(self.slurm.output(self.number))
        state = job["JobState"].replace("COMPLETING", "COMPLETED")
        return state, job["ExitCode"], job["Restarts"]


@pytest.fixture
def nodes(slurm: Any) -> list[Any]:
    """The nodes, all of them up again after an earlier test."""
    slurm.command("scancel", "--user=root", check=False)
    for node in slurm.nodes:
        if not node.pids():
            slurm.start_node(node)
    slurm.until(lambda: not slurm.command("squeue", "--noheader"), "no job is left")
    slurm.until(lambda: slurm.states() == ["idle"] * 3, "all nodes are idle")
    return list(slurm.nodes)


def test_a_node_dies_and_the_job_ends_well(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "node")
    first = job.began(2)
    command = slurm.output(job.number).partition("how it is: ")[2].splitlines()[0]
    shown = slurm.command(*command.split())
    assert all(f"{name} " in shown for name in first), shown
    victim = next(n for n in nodes[1:] if n.name in first)
    spare = next(n for n in nodes if n.name not in first)
    slurm.kill_node(victim)
    assert spare.name in job.began(4)[2:]
    job.create("enough")
    assert job.ended() == ("COMPLETED", "0:0", "0")
    assert len(job.said("ended")) == 2


@slow
def test_a_slurmd_alone_dies_and_its_workers_go_on(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "slurmd")
    first = job.began(2)
    victim = next(n for n in nodes[1:] if n.name in first)
    slurm.kill_slurmd(victim)
    slurm.until(lambda: "down" in "".join(slurm.states()), "the node is down")
    job.create("enough")
    assert job.ended() == ("COMPLETED", "0:0", "0")
    assert len(job.said("began")) == 2, "no worker was started again"
    slurm.kill_node(victim)


@slow
def test_told_to_stop_it_saves_and_is_requeued_as_a_new_epoch(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "requeue")
    job.began(2)
    slurm.command("scancel", "--batch", "--signal=USR1", str(job.number))
    again = job.began(4)
    assert len(job.said("SIGTERM")) == 2, "each worker is told once"
    assert len(set(again[2:])) == 2
    assert not job.said("began-at-0")[2:], "it goes on from its checkpoint"
    job.create("enough")
    assert job.ended() == ("COMPLETED", "0:0", "1")
    run = slurm.shared / f"phalanx-{job.number}"
    assert sorted(p.name for p in run.iterdir()) == ["0", "1"]


@slow
def test_a_job_of_higher_priority_takes_its_nodes(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "preempted")
    job.began(2)
    urgent = slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true")
    assert slurm.ended(urgent)["ExitCode"] == "0:0"
    job.began(4)
    assert len(job.said("SIGTERM")) == 2
    job.create("enough")
    assert job.ended()[:2] == ("COMPLETED", "0:0")


@slow
def test_a_job_that_is_cancelled_does_not_come_back(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "cancelled")
    job.began(2)
    slurm.command("scancel", str(job.number))
    slurm.until(lambda: slurm.states() == ["idle"] * 3, "all nodes are idle")
    assert job.ended()[0] == "CANCELLED"


@slow
def test_the_node_with_the_script_dies(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "script", PHALANX_ON_SPLIT="continue")
    first = job.began(2)
    slurm.until(lambda: "takes the place" in slurm.output(job.number), "there is a spare")
    script = slurm.job(job.number)["BatchHost"]
    dead = next(n for n in nodes if n.name == script)
    slurm.kill_node(dead)
    if script in first:
        assert script not in job.began(4)[2:]
    job.create("enough")
    slurm.until(lambda: slurm.job(job.number)["Restarts"] == "1", "the agents have it requeued")
    assert len(job.said("ended")) == 2
    slurm.start_node(dead)
    assert job.ended() == ("COMPLETED", "0:0", "1")
    assert len(job.said("ended")) == 2, "the requeued script saw that all was done"


@slow
def test_a_program_that_fails_for_good(slurm: Any, nodes: list[Any]) -> None:
    job = Job(slurm, "fails")
    job.began(2)
    job.create("fail", "7")
    assert job.ended() == ("FAILED", "7:0", "0")
