"""The restart policy: a table, then properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recovery.policy import Attempt, Policy, decide

LONG, SHORT = 100.0, 0.5


def died(last: int | None = None, lasted: float = SHORT, code: int = 1, exc: str | None = None):
    return Attempt(lasted, code, exc, 0 if last is not None else None, last)


@pytest.mark.parametrize(
    ("attempts", "restart", "delay", "word"),
    [
        ([died(code=-9)], True, 0.0, ""),
        ([died(exc="ImportError")], False, 0.0, "ImportError"),
        ([died(exc="ModuleNotFoundError")], False, 0.0, "ModuleNotFoundError"),
        ([died(exc="SyntaxError")], False, 0.0, "SyntaxError"),
        ([died(5, exc="ImportError")], True, 0.0, ""),  # had got going: not a typo
        ([died(code=2)], False, 0.0, "exit code 2"),
        ([died(code=2, lasted=LONG)], True, 0.0, ""),
        ([died(code=127)], False, 0.0, "cannot be run"),
        ([died(code=-9)] * 4, False, 0.0, "all 3 restarts are used"),
        ([died(10), died(20), died(30)], True, 0.0, ""),
        ([died(), died()], True, 1.0, ""),
        ([died(), died(), died()], True, 2.0, ""),
    ],
)
def test_table(attempts: list[Attempt], restart: bool, delay: float, word: str) -> None:
    verdict = decide(Policy(), attempts)
    assert (verdict.restart, verdict.delay) == (restart, delay)
    assert word in verdict.reason
    assert restart or verdict.reason


def test_no_restarts_allowed_is_said() -> None:
    assert "--max-restarts 0" in decide(Policy(max_restarts=0), [died(code=-9)]).reason


def test_the_same_step_again_and_again_ends_the_job() -> None:
    policy = Policy(max_restarts=100)
    same = [died(50)] * 4
    assert decide(policy, same[:3]).restart
    verdict = decide(policy, same)
    assert not verdict.restart
    assert "no further than step 50" in verdict.reason


def test_progress_resets_the_back_off() -> None:
    policy = Policy(max_restarts=100, stuck_limit=50)
    stuck = [died(50)] * 8
    assert decide(policy, stuck).delay > 0
    assert decide(policy, [*stuck, died(60)]).delay == 0


def test_nothing_to_judge() -> None:
    with pytest.raises(ValueError, match="no attempt"):
        decide(Policy(), [])


attempt = st.builds(
    Attempt,
    lasted=st.floats(0, 1e4),
    returncode=st.sampled_from([1, 2, 7, -9, -15, 127]),
    exception=st.sampled_from([None, "ImportError", "RuntimeError"]),
    first_step=st.just(0),
    last_step=st.none() | st.integers(0, 100),
)


@given(st.lists(attempt, min_size=1, max_size=12), st.integers(0, 10))
def test_budget_and_bounds_hold(attempts: list[Attempt], budget: int) -> None:
    policy = Policy(max_restarts=budget)
    verdict = decide(policy, attempts)
    assert 0 <= verdict.delay <= policy.backoff_limit
    if len(attempts) > budget:
        assert not verdict.restart
    assert verdict.restart or verdict.reason


@given(st.integers(0, 50))
def test_a_job_without_progress_ends_whatever_the_budget(step: int) -> None:
    policy = Policy(max_restarts=10**6)
    attempts: list[Attempt] = []
    while len(attempts) < 100:
        attempts.append(died(step))
        if not decide(policy, attempts).restart:
            break
    assert len(attempts) <= policy.stuck_limit + 1


def test_exit_codes_that_the_user_has_judged() -> None:
    policy = Policy(never=frozenset({3, 137}), always=frozenset({2}))
    assert not decide(policy, [died(5, code=3)]).restart
    verdict = decide(policy, [died(5, code=-9)])
    assert not verdict.restart and "137" in verdict.reason
    assert decide(policy, [died(code=2)]).restart
    assert decide(policy, [died(code=4)]).restart
    assert not decide(policy, [died(code=2)] * 4).restart  # the budget holds for all
