"""Whom the report blames and what it says."""

from __future__ import annotations

import pytest

from phalanx.agent.console import seconds
from phalanx.agent.report import WorkerEnd, describe, evidence, how, ranges, root_cause, victims


def end(rank: int, code: int | None, dead: int | None = 0, **more: object) -> WorkerEnd:
    return WorkerEnd(rank, rank, 100 + rank, "host", code, dead, **more)  # type: ignore[arg-type]


def test_a_kill_is_blamed_before_the_exception_it_causes() -> None:
    gloo = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234"
    ends = [end(0, 1, 5, exception=gloo), end(1, -9, 7), end(2, -15, 9, stopped=True)]
    root = root_cause(ends)
    assert root is ends[1]
    assert victims(ends, root) == "other ranks: 2 stopped, 0 lost their peer"


def test_the_first_death_is_blamed_among_equals() -> None:
    ends = [end(0, 1, 9, exception="ValueError: b"), end(1, 1, 4, exception="ValueError: a")]
    assert root_cause(ends) is ends[1]


def test_who_was_stopped_by_us_is_never_blamed() -> None:
    stopped = end(0, -15, 1, stopped=True)
    assert root_cause([stopped, end(1, 7, 5)]).rank == 1  # type: ignore[union-attr]
    assert root_cause([stopped]) is None
    assert root_cause([end(0, 0), end(1, None)]) is None


def test_a_hang_is_blamed_though_it_was_killed_by_us() -> None:
    hung = end(1, -9, 9, hung="made no progress for 30 s")
    ends = [end(0, 1, 3, exception="RuntimeError: Connection reset by peer"), hung]
    assert root_cause(ends) is hung


@pytest.mark.parametrize(
    ("worker", "text"),
    [
        (end(0, -9), "was killed by SIGKILL"),
        (end(0, 7), "exited with code 7"),
        (end(0, 1, exception="ValueError: no\nmore"), "raised ValueError: no"),
        (end(0, -64 - 35), "was killed by signal 99"),
        (end(0, None), "is still running"),
    ],
)
def test_how(worker: WorkerEnd, text: str) -> None:
    assert how(worker) == text


def test_the_line_names_rank_pid_host_step_and_memory() -> None:
    line = describe(end(3, -9, step=51, memory="probably out of memory: limit 1 GB"))
    for part in ("rank 3", "pid 103", "host", "SIGKILL", "step 51", "out of memory"):
        assert part in line


def test_evidence_prefers_the_traceback_and_is_bounded() -> None:
    worker = end(0, 1, traceback="\n".join(f"line {i}" for i in range(100)), stderr_tail=["x"])
    shown = evidence(worker, 5)
    assert len(shown) == 5
    assert shown[-1].endswith("line 99")
    assert evidence(end(0, 1, stderr_tail=["a", "", "b"])) == ["  | a", "  | b"]


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 2]) == "0-2, 5"
    assert ranges([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0004, "0.4 ms"), (0.034, "34 ms"), (0.21, "0.21 s"), (14.24, "14.2 s"),
     (185, "3 min 05 s"), (7260, "2 h 01 min")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
