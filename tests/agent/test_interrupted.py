"""What comes at the wrong moment: signals in the middle of a start, Ctrl-Z, a killed agent."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest

from phalanx.process import pause, tree

pytestmark = pytest.mark.process

# A module that holds up the keeper's imports, and so every warm start, until it is let go.
SLOW = """
import os, time
open(os.environ["TEST_OUT"] + "/importing", "w").close()
while not os.path.exists(os.environ["TEST_OUT"] + "/go"): time.sleep(0.01)
"""


def slow(job, folder: Path, options: str, source: str):
    (folder / "slow_to_import.py").write_text(SLOW)
    env = {"PYTHONPATH": str(folder)}
    run = job(f"--preload slow_to_import {options}", source, env=env)
    run.until((folder / "importing").exists)
    return run


def test_a_user_signal_during_a_start_reaches_all_once_they_can_take_it(job, tmp_path) -> None:
    source = """
    say("up")
    wait_for("install")  # until then it would end the program
    signal.signal(signal.SIGUSR2, lambda *_: (say("usr2"), sys.exit(0)))
    while True: signal.pause()
    """
    run = slow(job, tmp_path, "--nproc-per-node 2 --max-restarts 0", source)
    run.signal(signal.SIGUSR2)
    (tmp_path / "go").touch()
    run.until(lambda: run.said().count("up") == 2)
    (tmp_path / "install").touch()
    assert run.wait() == 0, run.err
    assert run.said().count("usr2") == 2


def test_a_stop_signal_during_a_start_ends_it_and_nobody_runs(job, tmp_path) -> None:
    run = slow(job, tmp_path, "--nproc-per-node 2", "say('up')")
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert "stopped by SIGTERM" in run.err
    assert run.said() == []


def state(pid: int) -> str:
    entry = tree.stat(pid)
    return entry.state if entry is not None else "gone"


def test_ctrl_z_stops_the_workers_too_and_they_go_on_with_the_agent(job) -> None:
    source = """
    import subprocess
    child = subprocess.Popen(["sleep", "333"])
    say(os.getpid(), child.pid)
    wait_for("end")
    """
    run = job("--nproc-per-node 2", source)
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    all_pids = [run.pid, *(int(p) for line in lines for p in line.split())]
    for _ in range(2):
        run.signal(signal.SIGTSTP)
        run.until(lambda: all(state(pid) == "T" for pid in all_pids))
        run.signal(signal.SIGCONT)
        run.until(lambda: all(state(pid) != "T" for pid in all_pids))
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert len(run.events("job_paused")) == len(run.events("job_continued")) == 2


def test_a_pause_does_not_count(monkeypatch) -> None:
    monkeypatch.setattr(pause, "_pauses", [(10.0, 15.0), (20.0, 120.0)])
    assert pause.at(5.0) == 5.0
    assert pause.at(12.0) == 10.0  # while we were stopped
    assert pause.at(16.0) == 11.0
    assert pause.at(120.0) == pause.at(20.0) == 15.0
    assert pause.at(130.0) == 25.0
    assert pause.total() == 105.0


def left_in(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*")]


def test_a_killed_agent_leaves_nothing_in_the_temporary_folder(job) -> None:
    run = job("", "say('up'); wait_for('never')", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    run.until(run.said)
    temporary = run.folder / "temporary"
    assert left_in(temporary)
    run.signal(signal.SIGKILL)
    run.process.communicate(timeout=20)  # the keeper has the streams until it is gone
    end = time.monotonic() + 20
    while left_in(temporary) and time.monotonic() < end:
        os.sched_yield()
    assert left_in(temporary) == []


def test_a_killed_agent_with_a_stopped_keeper_leaves_no_process(job) -> None:
    source = """
    import subprocess
    child = subprocess.Popen(["sleep", "333"], start_new_session=True)
    say(os.getppid(), os.getpid(), child.pid)
    wait_for("never")
    """
    run = job("--nproc-per-node 2", source)
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    pids = [int(p) for line in lines for p in line.split()]
    os.kill(pids[0], signal.SIGSTOP)
    run.until(lambda: state(pids[0]) == "T")
    fds = [os.pidfd_open(pid) for pid in set(pids)]
    run.signal(signal.SIGKILL)
    run.process.communicate(timeout=20)
    for fd in fds:
        assert select.select([fd], [], [], 20)[0], lines
        os.close(fd)
