"""``--node-check``: a node that fails it stays out, and says why."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx.agent import exit_codes

pytestmark = pytest.mark.process


def check(job, command: str, more: str = ""):
    run = job.raw(
        ["--node-check", command, *more.split(), "--no-python", "/bin/sh", "-c", "echo ran"]
    )
    return run, run.wait()


def test_a_sound_node_takes_part(job) -> None:
    run, status = check(job, "echo all is well")
    assert status == 0, run.err
    assert "ran" in run.out
    assert "all is well" not in run.out + run.err
    assert run.events("node_checked")


@pytest.mark.parametrize(
    ("command", "why", "line"),
    [
        (
            "echo first; echo device 3 is sick >&2; exit 4",
            "ended with status 4",
            "device 3 is sick",
        ),
        ("kill -9 $$", "killed by SIGKILL", ""),
        ("/no/such/check", "ended with status 127", "not found"),
    ],
)
def test_another_stays_out_with_the_reason(job, command: str, why: str, line: str) -> None:
    run, status = check(job, command)
    assert status == exit_codes.NODE_CHECK, run.err
    assert "ran" not in run.out
    assert "stays out of the job" in run.err and why in run.err and line in run.err
    assert not run.events("workers_started")


def test_one_that_does_not_end_is_ended_with_all_it_started(job) -> None:
    run, status = check(
        job, "yes & sleep 300 & echo $! >pid; exec 1>&- 2>&-; wait", "--node-check-timeout 1"
    )
    assert status == exit_codes.NODE_CHECK, run.err
    assert "did not end within 1.0 s" in run.err
    pid = int((run.folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stop_signal_ends_it(job) -> None:
    run = job.raw(["--node-check", "touch began; sleep 300", "--no-python", "true"])
    run.until(lambda: (run.folder / "began").exists())
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.err
