"""The ladder of strategies inside one job."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recovery.ladder import (
    RETRYABLE,
    Fault,
    History,
    Kind,
    Policy,
    Situation,
    Strategy,
    after,
    choose,
    good_step,
)

ALL = Policy(enabled=frozenset(Strategy))


def situation(*kinds, step=3, **more):
    faults = tuple(Fault(rank, kind, step, "text") for rank, kind in enumerate(kinds))
    return Situation(faults, **{"living": 3, **more})


@pytest.mark.parametrize(
    ("policy", "case", "strategy"),
    [
        (Policy(), situation(Kind.DEVICE), Strategy.RETRY),
        (Policy(), situation(Kind.NETWORK, Kind.PEER), Strategy.RETRY),
        (Policy(), situation(Kind.DEATH), Strategy.IN_PLACE),
        (Policy(), situation(Kind.HANG), Strategy.IN_PLACE),
        (Policy(), situation(Kind.DEATH, Kind.PEER), Strategy.IN_PLACE),
        (Policy(), situation(Kind.MEMORY), Strategy.IN_PLACE),
        (Policy(), situation(Kind.BUG), Strategy.IN_PLACE),
        (Policy(), situation(Kind.DEATH, able=False), Strategy.RESTART),
        (Policy(), situation(Kind.DEVICE, able=False), Strategy.RESTART),
        (Policy(), situation(Kind.LOST_STATE), Strategy.RESTART),
        (Policy(), situation(Kind.DEATH, living=0), Strategy.RESTART),
        (Policy(), situation(Kind.DEATH, whole=False), Strategy.RESTART),
        (Policy(enabled=frozenset()), situation(Kind.DEATH), Strategy.EXIT),
        (Policy(restarts=0), situation(Kind.LOST_STATE), Strategy.EXIT),
        (
            Policy(enabled=frozenset({Strategy.IN_PLACE})),
            situation(Kind.DEVICE),
            Strategy.IN_PLACE,
        ),
    ],
)
def test_first_choice(policy, case, strategy):
    decision = choose(policy, History(), case)
    assert decision.strategy is strategy
    assert decision.why


def test_falls_rung_by_rung_at_one_step_and_ends():
    history, taken = History(), []
    policy = Policy(restarts=1, same_step=2)
    for _ in range(20):
        decision = choose(policy, history, situation(Kind.DEVICE))
        taken.append(decision.strategy)
        if decision.strategy is Strategy.EXIT:
            break
        history = after(history, decision, situation(Kind.DEVICE).faults)
    r, i = Strategy.RETRY, Strategy.IN_PLACE
    assert taken == [r, r, i, i, Strategy.RESTART, Strategy.EXIT]
    assert "step 3" in dict(decision.passed_over)[Strategy.RETRY]


def test_a_good_step_beyond_gives_the_tries_at_a_step_back_but_not_the_budget():
    policy = Policy(retries=3)
    history = History()
    for step in (3, 4, 5):
        case = situation(Kind.DEVICE, step=step)
        decision = choose(policy, history, case)
        assert decision.strategy is Strategy.RETRY
        history = good_step(after(history, decision, case.faults), step)
        assert history.here == ()
    decision = choose(policy, history, situation(Kind.DEVICE, step=6))
    assert decision.strategy is Strategy.IN_PLACE
    assert dict(decision.passed_over)[Strategy.RETRY] == "used 3 of 3 times"


def test_the_same_bug_at_the_same_step_ends_the_job():
    history, case = History(), situation(Kind.BUG)
    for _ in range(2):
        decision = choose(Policy(), history, case)
        assert decision.strategy is Strategy.IN_PLACE
        history = after(history, decision, case.faults)
    decision = choose(Policy(), history, case)
    assert decision.strategy is Strategy.EXIT
    assert "same exception" in decision.why


def test_dump_goes_before_restart_and_exit():
    assert choose(ALL, History(), situation(Kind.DEATH, able=True, dump_possible=True)) == (
        choose(ALL, History(), situation(Kind.DEATH, able=True))
    )
    last = Policy(enabled=frozenset({Strategy.DUMP}))
    decision = choose(last, History(), situation(Kind.DEATH, dump_possible=True))
    assert (decision.strategy, decision.dump_first) == (Strategy.EXIT, True)
    decision = choose(last, History(), situation(Kind.DEATH, dump_possible=True, living=0))
    assert not decision.dump_first


cases = st.builds(
    Situation,
    st.lists(
        st.builds(Fault, st.integers(0, 3), st.sampled_from(Kind), st.none() | st.integers(0, 5)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    living=st.integers(0, 4),
    able=st.booleans(),
    whole=st.booleans(),
    dump_possible=st.booleans(),
)


@given(st.lists(cases, max_size=12))
def test_total_bounded_and_never_impossible(faults):
    policy = dataclasses.replace(ALL, retries=3, in_place=3, restarts=2)
    history = History()
    for case in faults:
        decision = choose(policy, history, case)
        kinds = {fault.kind for fault in case.faults}
        if decision.strategy is Strategy.RETRY:
            assert kinds <= RETRYABLE
            assert case.able
        if decision.strategy is Strategy.IN_PLACE:
            assert case.able
            assert case.living
        history = after(history, decision, case.faults)
        assert history.retries <= 3
        assert history.in_place <= 3
        assert history.restarts <= 2


def test_a_good_step_ends_a_scene_whose_step_nobody_knew() -> None:
    history = History()
    for _ in range(10):
        unknown = situation(Kind.DEATH, step=None)
        decision = choose(Policy(), history, unknown)
        assert decision.strategy is Strategy.IN_PLACE
        history = good_step(after(history, decision, unknown.faults), 7)
