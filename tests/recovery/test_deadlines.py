"""How long a worker may be silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recovery.deadlines import (
    BETWEEN,
    CHECKPOINT,
    START,
    STEP,
    UNKNOWN,
    Learner,
    Limits,
    first_to_hang,
)


def after(*beats, limits=None):
    learner = Learner(limits or Limits(least=0.5))
    for at, phase, step in beats:
        learner = learner.heard(at, phase, step)
    return learner


def steps(count, seconds, **more):
    return after(*[(n * seconds, STEP, n) for n in range(count)], **more)


def test_not_armed_before_the_first_word():
    assert Learner().due() is None
    assert Learner().verdict(1e9) == ""


@pytest.mark.parametrize(
    ("learner", "limit"),
    [
        (after((0, START, None)), UNKNOWN[START]),
        (steps(3, 1.0), UNKNOWN[STEP]),
        (steps(6, 1.0), 8.0),
        (steps(6, 0.001), 0.5),
        (steps(6, 1000.0), UNKNOWN[STEP]),
        (steps(6, 1.0, limits=Limits({STEP: 3.0})), 3.0),
        (steps(6, 1.0, limits=Limits({STEP: 0.0})), None),
        (after((0, "of my own", 1)), UNKNOWN[STEP]),
    ],
)
def test_limits(learner, limit):
    assert learner.limit() == limit


def test_a_phase_that_is_rare_and_long_does_not_widen_that_of_steps():
    beats, at = [], 0.0
    for step in range(10):
        beats += [(at, STEP, step), (at + 1, CHECKPOINT, step)]
        at += 101
    learner = after(*beats, (at, STEP, 10))
    assert learner.limit() == 8.0
    assert learner.heard(at + 1, CHECKPOINT, 10).limit() == 800.0


def test_the_verdict_says_where():
    learner = steps(6, 1.0)
    assert learner.verdict(12.9) == ""
    assert learner.verdict(13.5) == (
        "silent for 8.5 s in phase 'step' of step 5; 8.0 s are allowed"
    )


def test_a_new_process_starts_without_the_old_silence():
    fresh = steps(6, 1.0).fresh()
    assert fresh.verdict(1e9) == ""
    again = fresh.heard(1e6, STEP, 6)
    assert again.limit() == 8.0
    assert again.due() == 1e6 + 8


def test_who_is_behind_is_to_blame_not_who_waits():
    def at(step, phase=STEP):
        learner = steps(6, 1.0)
        return learner.heard(6.0, phase, step)

    ranks = {0: at(7), 1: at(7), 2: at(6), 3: at(7)}
    assert first_to_hang(ranks, 7.0) == ()
    assert first_to_hang(ranks, 1e6) == (2,)
    assert first_to_hang({0: at(7), 1: at(7, BETWEEN)}, 1e6) == (1,)
    assert first_to_hang({0: at(7), 1: at(7)}, 1e6) == (0, 1)


def test_who_is_in_the_same_step_is_named_with_all_others_in_it():
    early = steps(6, 1.0).heard(6.0, STEP, 7)
    late = steps(6, 1.0).heard(6.4, STEP, 7)
    assert early.verdict(15.0)
    assert not late.verdict(15.0)
    assert first_to_hang({0: early, 1: late}, 15.0) == ()
    assert first_to_hang({0: early, 1: late}, 18.0) == (0, 1)


def test_who_waits_for_a_rank_that_may_take_its_time_is_not_accused():
    usual = steps(8, 1.0, limits=Limits(least=0.5))  # its limit for a step: 8 s
    waiting = usual.heard(8.0, STEP, 8)
    for step in (7, 8):  # others have begun the next step already, or wait in the same one
        writing = usual.heard(8.0, CHECKPOINT, step)
        ranks = {0: writing, 1: waiting, 2: waiting}
        assert first_to_hang(ranks, 60.0) == ()
        assert first_to_hang(ranks, 8.0 + UNKNOWN[CHECKPOINT]) == (0,)


def test_who_never_spoke_hides_nobody():
    assert first_to_hang({0: Learner(), 1: steps(8, 1.0)}, 1e6) == (1,)
    assert first_to_hang({0: Learner()}, 1e6) == ()


def test_bad_limits():
    with pytest.raises(ValueError, match="'step' is -1"):
        Limits({STEP: -1})
    with pytest.raises(ValueError, match="factor"):
        Limits(factor=1.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from([START, STEP, CHECKPOINT, BETWEEN])),
        min_size=1,
        max_size=40,
    )
)
def test_whoever_keeps_to_what_was_learnt_is_never_accused(waits):
    learner, now = Learner(), 0.0
    for step, (wait, phase) in enumerate(waits):
        learner = learner.heard(now, phase, step)
        limit = learner.limit()
        assert limit is not None
        now += min(wait, limit * 0.99)
        assert learner.verdict(now) == ""
        assert learner.verdict(learner.since + limit)
