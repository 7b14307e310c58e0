"""Hangs: the limits, and real workers that stop."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from phalanx.agent.hangs import LONG, HangWatch, limits_from
from phalanx.process.page import Progress


def worker(rank: int, id: int, beats: int, at: float, phase: str = "step", step: int = 1):
    told = Progress(1, step, phase, int(at * 1e9), beats, 1, None)
    page = SimpleNamespace(read=lambda: told)
    return SimpleNamespace(local_rank=rank, id=id, alive=True, page=page)


def test_the_words() -> None:
    assert limits_from("off") is None
    assert limits_from("auto").given == LONG  # type: ignore[union-attr]
    seconds = limits_from("60").given  # type: ignore[union-attr]
    assert (seconds["step"], seconds["unnamed"]) == (60, 60)
    assert "start" not in seconds
    assert limits_from("step=5, checkpoint=9").given["checkpoint"] == 9  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "0", "-1", "inf", "nan", "soon", "step", "step=", "=3"])
def test_wrong_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"seconds|SECONDS"):
        limits_from(text)


def test_who_is_silent_too_long_is_named_and_a_new_process_starts_afresh() -> None:
    watch = HangWatch(limits_from("30"))  # type: ignore[arg-type]
    assert watch.look([worker(0, 1, 1, 100.0)], 120.0) == {}
    assert "30.0 s are allowed" in watch.look([worker(0, 1, 1, 100.0)], 131.0)[0]
    assert watch.look([worker(0, 2, 0, 0.0)], 500.0) == {}


def test_who_never_spoke_is_left_alone() -> None:
    watch = HangWatch(limits_from("30"))  # type: ignore[arg-type]
    assert watch.look([worker(0, 1, 0, 0.0)], 1e6) == {}


@pytest.mark.process
def test_of_those_in_one_step_the_stopped_one_is_named() -> None:
    watch = HangWatch(limits_from("30"))  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "60"]) as still, subprocess.Popen(["sleep", "60"]) as other:
        try:
            still.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, still.pid, os.WSTOPPED | os.WNOWAIT)
            both = [worker(0, 1, 1, 100.0), worker(1, 2, 1, 102.0)]
            both[0].pid, both[1].pid = other.pid, still.pid
            assert watch.look(both, 131.0) == {}
            assert watch.look(both, 140.0) == {
                1: "stopped, and silent for 38.0 s in phase 'step' of step 1; 30.0 s are allowed"
            }
            both[1].pid = other.pid
            assert set(watch.look(both, 140.0)) == {0, 1}
        finally:
            still.kill()
            other.kill()


@pytest.mark.process
def test_a_stopped_worker_is_found_its_stack_saved_and_the_group_restarted(job, tmp_path) -> None:
    run = job(
        f"--nproc-per-node 2 --max-restarts 1 --hang-timeout 1.5 --log-dir {tmp_path / 'logs'}",
        """
        import phalanx
        if ATTEMPT == 0:
            phalanx.progress(1 if RANK == 1 else 2)
            if RANK == 1: os.kill(os.getpid(), signal.SIGSTOP)
            for step in range(3, 100000):
                phalanx.progress(step); time.sleep(0.01)
        """,
    )
    assert run.wait() == 0, run.err
    assert "rank 1" in run.err
    assert "hung: silent for" in run.err
    assert len(list((tmp_path / "logs").glob("**/stacks_rank_*.txt"))) == 2
    (event,) = run.events("worker_hung")
    assert event["data"]["local_rank"] == 1
