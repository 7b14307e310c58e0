"""The conformance runner itself: that it can tell a difference, and survives bad cases."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "conformance"


@pytest.fixture(scope="module")
def compare():
    sys.path.insert(0, str(HERE))
    try:
        yield importlib.import_module("compare")
    finally:
        sys.path.remove(str(HERE))


def judge(compare, torch, ours, *listed):
    expected = [compare.Difference("C", at, t, o, "why") for at, t, o in listed]
    return compare.judge("C", {"seen": torch}, {"seen": ours}, expected)


@pytest.mark.parametrize(
    ("torch", "ours", "listed", "kind"),
    [
        ({"a": 1}, {"a": 1}, [], "same"),
        ({"a": 1}, {"a": 2}, [], "unexpected"),
        ({"a": 1}, {"a": True}, [], "unexpected"),
        ({"a": 1}, {}, [], "unexpected"),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, [("a.b", [1], [2])], "purpose"),
        ({"a": 1}, {}, [("a", 1, "<absent>")], "purpose"),
        (1, 2, [("", 1, 2)], "purpose"),
        # One listed, one not.
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, [("a", 1, 2)], "unexpected"),
        # Listed, but gone, or another on either side.
        ({"a": 1}, {"a": 1}, [("a", 1, 2)], "unexpected"),
        ({"a": 1}, {"a": 3}, [("a", 1, 2)], "unexpected"),
        ({"a": 0}, {"a": 2}, [("a", 1, 2)], "unexpected"),
    ],
)
def test_sorting(compare, torch, ours, listed, kind):
    verdict = judge(compare, torch, ours, *listed)
    assert verdict.kind == kind
    assert bool(verdict.notes) == (kind == "unexpected")
    if kind != "unexpected":
        assert bool(verdict.reasons) == (kind == "purpose")


def test_one_broken_side_breaks_the_case(compare):
    verdict = compare.judge("C", {"seen": 1}, {"broken": "it hung"}, [])
    assert verdict.kind == "broken"
    assert verdict.notes == ["ours: it hung"]


def test_summary_and_report(compare):
    verdicts = [
        judge(compare, 1, 1),
        judge(compare, 1, 2, ("", 1, 2)),
        judge(compare, 1, 3, ("", 1, 2)),
    ]
    assert compare.summary(verdicts) == "1 same, 1 on purpose, 1 unexpected"
    text = compare.report(verdicts, verbose=False)
    assert "why" in text
    assert "UNEXPECTED" in text
    assert " same" not in text


CASES = """
import os, time
from harness import case

@case("X1.good")
def good(impl):
    return impl.name and {"a": [1, (2,)], "b": {3: None}}

@case("X2.raises")
def raises(impl):
    raise KeyError("text")

@case("X3.dies")
def dies(impl):
    os._exit(3)

@case("X4.hangs", timeout=0.5)
def hangs(impl):
    time.sleep(60)

@case("X5.fork_that_comes_up")
def fork(impl):
    pid = os.fork()
    if pid == 0:
        raise ValueError("from the child")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

@case("X6.leaves_a_child")
def leaves(impl):
    if os.fork() == 0:
        time.sleep(60)
    return "done"
"""


@pytest.mark.process
def test_bad_cases_cost_only_themselves(tmp_path):
    for name in ("run.py", "harness.py", "compare.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "cases_x.py").write_text(CASES)
    driver = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import run\n"
        "cases = list(run.load(['cases_x']).values())\n"
        "print(json.dumps(run.collect(cases, ['phalanx'], 1, False)['phalanx']))\n"
    )
    (tmp_path / "driver.py").write_text(driver)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["X1.good"]["seen"] == {"a": [1, [2]], "b": {"3": None}}
    assert "KeyError" in seen["X2.raises"]["broken"]
    assert seen["X3.dies"]["broken"] == "the process running it died"
    assert "not done in 0.5 s" in seen["X4.hangs"]["broken"]
    assert seen["X5.fork_that_comes_up"]["seen"] == 1
    assert seen["X6.leaves_a_child"]["seen"] == "done"


def test_every_listed_difference_has_a_case_and_a_reason():
    program = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import run, expected_differences as e\n"
        "names = run.load()\n"
        "assert len(names) > 200, len(names)\n"
        "assert not [d for d in e.EXPECTED if d.case not in names or len(d.why) < 20]\n"
        "assert len({(d.case, d.at) for d in e.EXPECTED}) == len(e.EXPECTED)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
