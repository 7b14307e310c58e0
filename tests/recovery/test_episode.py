"""The agent's recovery machine: walks, then a seeded simulation with hypothesis."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.recovery import ending, episode
from phalanx.recovery.ending import Dump, Exit, Leave, stop_step
from phalanx.recovery.episode import (
    Bounds,
    Died,
    Dumped,
    Effect,
    Event,
    Fault,
    Finished,
    GiveUp,
    GoodStep,
    Hello,
    Kill,
    Left,
    Recovered,
    Regroup,
    Replace,
    Resized,
    RestartGroup,
    State,
    Tick,
    next_deadline,
)

W = 4
BOUNDS = Bounds(ending=ending.Bounds())


def advance(state: State, event: Event, now: float) -> tuple[State, list[Effect]]:
    return episode.advance(state, event, now, BOUNDS)


def in_loop(world: int = W) -> State:
    state = State.fresh(world)
    for rank in range(world):
        state, effects = advance(state, Hello(rank, 1), 0.0)
        assert effects == []
    return state


def walk(state: State, *events: tuple[float, Event]) -> tuple[State, list[object]]:
    effects: list[object] = []
    for now, event in events:
        state, more = advance(state, event, now)
        effects += more
    return state, effects


def test_one_death_is_replaced_and_the_others_stay() -> None:
    state, effects = walk(in_loop(), (1.0, Died(2, "was killed by SIGKILL", 51)))
    assert effects == [Replace(2, 2), Regroup(2, (0, 1, 3), (0, 1, 2, 3))]
    events = [(1.01, Left(r, 1)) for r in (0, 1, 3)] + [(1.05, Hello(2, 2, True))]
    events += [(1.1, GoodStep(r, 2, 52)) for r in range(W)]
    state, effects = walk(state, *events)
    (over,) = effects
    assert isinstance(over, Recovered)
    assert round(over.seconds, 3) == 0.1
    assert [p[0] for p in over.episode.phases] == ["left", "replaced", "first step"]
    assert over.episode.strategy == "recover-in-place"
    assert state.episode is None
    assert next_deadline(state) is None


def test_a_plain_program_is_restarted_whole() -> None:
    _, effects = walk(State.fresh(W), (1.0, Died(0, "x")))
    assert len(effects) == 1
    assert isinstance(effects[0], RestartGroup)


def test_a_device_fault_is_retried_without_a_new_process() -> None:
    _, effects = walk(in_loop(), (1.0, Fault(1, 1, "device", "ECC")))
    assert effects == [Regroup(2, (0, 1, 2, 3), (0, 1, 2, 3))]


def test_a_lost_peer_waits_for_the_death_it_announces() -> None:
    state, effects = walk(in_loop(), (1.0, Fault(1, 1, "peer", "closed")))
    assert effects == []
    assert next_deadline(state) == 2.0
    _, died = walk(state, (1.2, Died(2, "x")))
    assert died[0] == Replace(2, 2)
    _, alone = walk(state, (2.0, Tick()))
    assert alone == [Regroup(2, (0, 1, 2, 3), (0, 1, 2, 3))]


def test_a_second_death_starts_the_next_round() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")))
    state, effects = walk(state, (1.05, Died(0, "x")))
    assert effects == [Replace(0, 3), Regroup(3, (1, 2, 3), (0, 1, 2, 3))]
    late, effects = walk(state, (1.06, GoodStep(1, 2, 9)))
    assert effects == []
    assert late.episode is not None
    assert late.episode.replaced == {0, 2}


def test_a_replacement_that_is_being_built_is_not_asked_to_leave() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")), (1.05, Died(0, "x")))
    state, _ = walk(state, (1.1, Left(1, 2)), (1.1, Left(3, 2)))
    _, effects = walk(state, (11.1, Tick()))
    assert effects == []


def test_a_replacement_that_dies_is_replaced_again() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")))
    _, effects = walk(state, (1.05, Died(2, "x")))
    assert effects == [Replace(2, 3), Regroup(3, (0, 1, 3), (0, 1, 2, 3))]


def test_who_does_not_leave_is_killed_and_counted() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")), (1.1, Left(0, 1)), (1.1, Left(1, 1)))
    state, effects = walk(state, (11.0, Tick()))
    assert effects == [Kill(3, "did not leave its step within 10 s")]
    _, effects = walk(state, (11.1, Died(3, "x")))
    assert effects[0] == Replace(3, 3)


def test_no_good_step_in_time_restarts_the_group() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")), *[(1.1, Left(r, 1)) for r in (0, 1, 3)])
    state, _ = walk(state, (1.2, Hello(2, 2, True)))
    _, effects = walk(state, (121.0, Tick()))
    assert effects == [RestartGroup("no good step within 120 s of the fault")]


def test_the_same_step_again_and_again_is_not_retried_for_ever() -> None:
    state = in_loop()
    now = 1.0
    tried = []
    for _ in range(10):
        state, effects = advance(state, Fault(1, state.generation, "device", "ECC", 7), now)
        if isinstance(effects[-1], Exit):
            break
        for rank in range(W):
            state, _ = advance(state, GoodStep(rank, state.generation, 6), now)
        tried.append([type(e).__name__ for e in effects])
        now += 1
    same = ["Regroup"], ["Kill", "Replace", "Regroup"]
    assert tried == [same[0]] * 3 + [same[1]] * 3
    assert effects[1:] == [Exit((1,))], "it shows its own exception"
    state, (over,) = advance(state, Died(1, "raised DeviceFault"), now)
    assert isinstance(over, RestartGroup)
    assert "tried 3 times at step 7" in over.why


def test_after_a_finish_in_place_is_over() -> None:
    _, effects = walk(in_loop(), (1.0, Finished(0)), (1.1, Died(1, "x")))
    assert isinstance(effects[0], RestartGroup)


def test_stale_words_change_nothing() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "x")))
    for event in (Fault(1, 1, "device", "old"), GoodStep(1, 1, 3), Hello(1, 9), Left(1, 0)):
        after, effects = advance(state, event, 1.5)
        assert effects == []
        assert after == state


def dumpers(world: int = W) -> State:
    state = State.fresh(world)
    for rank in range(world):
        state, _ = advance(state, Hello(rank, 1, dumps=True), 0.0)
    return state


def last_tries(state: State) -> tuple[State, list[object]]:
    """Rank 2 dies at step 7 until the ladder has nothing left in place."""
    effects: list[object] = []
    for now in range(1, 9):
        state, effects = walk(state, (float(now), Died(2, "was killed by SIGKILL", 7)))
        if isinstance(effects[-1], Leave):
            return state, effects
        for rank in range(W):
            state, _ = walk(
                state,
                (now + 0.1, Hello(rank, state.generation, dumps=True)),
                (now + 0.2, GoodStep(rank, state.generation, 6)),
            )
    raise AssertionError("the ladder never ends")


def holds(rank: int, generation: int, shard: int = 0, shards: int = 1, clean: bool = True) -> Left:
    return Left(rank, generation, 6, clean, shard, shards)


def test_what_living_ranks_hold_is_written_down_before_the_restart() -> None:
    state, effects = last_tries(dumpers())
    g = state.generation
    assert isinstance(effects[0], GiveUp)
    assert effects[1:] == [Leave(g, (0, 1, 3))]
    state, effects = walk(state, *[(9.0, holds(r, g)) for r in (0, 1, 3)])
    assert effects == [Dump(g, 6, (0,), (0, 1, 3))]
    state, effects = walk(state, *[(9.1, Dumped(r, g, 6, complete=True)) for r in (0, 1, 3)])
    assert effects == [Dump(g, 6, (0,), (0,), commit=True)]
    _, (over,) = walk(state, (9.2, Dumped(0, g, 6, commit=True, complete=True, text="/c")))
    assert isinstance(over, RestartGroup)
    assert over.dumped == 6
    assert over.words == "step 6 was dumped to /c first"
    assert "tried 3 times at step 7" in over.why
    assert not over.final


def test_a_writer_that_dies_is_followed_by_another_with_its_shard() -> None:
    state, _ = last_tries(dumpers())
    g = state.generation
    state, effects = walk(
        state, (9.0, holds(0, g, 0, 2)), (9.0, holds(1, g, 1, 2)), (9.0, holds(3, g, 1, 2))
    )
    assert effects == [Dump(g, 6, (0, 1), (0, 1, 3))]
    state, effects = walk(state, (9.1, Died(1, "x")))
    assert effects == [Dump(g, 6, (0, 3), (0, 3))]
    state, effects = walk(state, (9.2, Died(0, "x")))
    assert effects == [RestartGroup(state.why, words=effects[0].words)]
    assert "no whole state" in effects[0].words


def test_half_a_state_is_not_written_down() -> None:
    state, _ = last_tries(dumpers())
    g = state.generation
    _, effects = walk(state, *[(9.0, holds(r, g, clean=False)) for r in (0, 1, 3)])
    (over,) = effects
    assert over.dumped is None
    assert "no whole state" in over.words


def test_a_dump_that_takes_for_ever_ends_in_the_restart_all_the_same() -> None:
    state, _ = last_tries(dumpers())
    seen: list[object] = []
    for _ in range(4):
        if (due := next_deadline(state)) is None:
            break
        g = state.generation
        state, effects = walk(state, (due - 1, holds(0, g)), (due, Tick()))
        seen += effects
    assert [type(e).__name__ for e in seen] == ["Dump", "RestartGroup"]
    assert "did not write within 600 s" in seen[-1].words  # type: ignore[attr-defined]


def test_a_lost_peer_is_the_one_that_said_it_ends() -> None:
    told = Fault(2, 1, "bug", "ValueError: x", 7)
    state, effects = walk(in_loop(), (1.0, told), (1.0, Fault(1, 1, "peer", "closed")))
    state, effects = walk(state, (2.0, Tick()), (5.0, Tick()), (6.0, Finished(2)))
    assert effects == []
    _, effects = walk(state, (6.1, Died(2, "raised ValueError: x", 7)))
    assert effects[0] == Replace(2, 2)
    _, effects = walk(state, (21.0, Tick()))
    assert effects == [Kill(2, "did not end within 20 s of its exception")]


def test_the_same_exception_at_the_same_step_ends_the_job() -> None:
    state = in_loop()
    for now in range(1, 9):
        state, effects = walk(
            state, (now, Fault(1, state.generation, "bug", "ValueError: x", 7)), (now, Died(1, "x"))
        )
        if isinstance(effects[0], RestartGroup):
            break
        for rank in range(W):
            state, _ = walk(
                state,
                (now + 0.1, Hello(rank, state.generation)),
                (now + 0.2, GoodStep(rank, state.generation, 6)),
            )
    (over,) = effects
    assert isinstance(over, RestartGroup)
    assert over.final
    assert "the same exception for the 3. time" in over.why


KINDS = ["device", "network", "peer", "memory", "bug", "regroup", "lost-state"]


@st.composite
def resizes(draw: st.DrawFn, world: int) -> Resized:
    """Some stay, under any new rank, some come."""
    stay = draw(st.permutations(range(world)))[: draw(st.integers(0, world))]
    places: list[int | None] = [*stay, *[None] * draw(st.integers(not stay, 2))]
    return Resized(tuple(draw(st.permutations(places))), "x", "y", draw(st.floats(0, 20)))


events = st.one_of(
    st.builds(Died, st.integers(0, W - 1), st.just("x"), st.none() | st.integers(0, 5)),
    st.builds(
        Fault, st.integers(0, W - 1), st.integers(0, 8), st.sampled_from(KINDS), st.just("t")
    ),
    st.builds(Hello, st.integers(0, W - 1), st.integers(0, 8), st.booleans(), st.booleans()),
    st.builds(
        Left,
        st.integers(0, W - 1),
        st.integers(0, 8),
        st.none() | st.integers(0, 5),
        st.booleans(),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    st.builds(
        Dumped,
        st.integers(0, W - 1),
        st.integers(0, 8),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(GoodStep, st.integers(0, W - 1), st.integers(0, 8), st.integers(0, 5)),
    st.builds(Finished, st.integers(0, W - 1)),
    resizes(W),
    st.just(Tick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), events), max_size=60), st.booleans())
def test_any_order_of_events(steps: list[tuple[float, Event]], loop: bool) -> None:
    state = in_loop() if loop else State.fresh(W)
    now, generation, restarts = 1.0, 1, 0
    for wait, event in steps:
        now += wait
        named = event.ranks if isinstance(event, Resized) else (getattr(event, "rank", 0),)
        if any(rank is not None and rank >= state.world for rank in named):
            continue
        state, effects = advance(state, event, now)
        assert state.generation >= generation, "a generation never goes back"
        generation = state.generation
        restarts += sum(isinstance(e, RestartGroup) for e in effects)
        for effect in effects:
            if isinstance(effect, Regroup):
                assert effect.generation == state.generation
                assert effect.members == tuple(range(state.world)), "every rank is held once"
    assert restarts == (state.over is not None), "given up once at most, and said"
    # every wait ends: with the clock alone the episode is over after finitely many ticks
    for _ in range(50):
        due = next_deadline(state)
        if due is None:
            break
        now = max(now, due)
        state, effects = advance(state, Tick(), now)
        for effect in effects:
            if isinstance(effect, Kill):
                state, _ = advance(state, Died(effect.rank, effect.why), now)
    assert next_deadline(state) is None


def test_who_ends_in_the_middle_of_a_recovery_is_not_waited_for() -> None:
    state, _ = walk(in_loop(), (1.0, Died(2, "was killed by SIGKILL", 51)))
    state, effects = walk(state, (1.1, Finished(0)))
    assert effects == [RestartGroup("rank 0 ended while the others waited for it")]


def test_who_ends_after_its_good_step_harms_no_recovery() -> None:
    state, _ = walk(in_loop(2), (1.0, Died(1, "was killed by SIGKILL", 51)))
    events: list[tuple[float, Event]] = [(1.1, Hello(1, 2, True)), (1.2, GoodStep(0, 2, 52))]
    state, effects = walk(state, *events, (1.3, Finished(0)), (1.4, GoodStep(1, 2, 52)))
    assert [type(e) for e in effects] == [Recovered]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1e6)), max_size=5))
def test_the_step_to_stop_after_is_ahead_of_everybody(pace: list[tuple[int, float]]) -> None:
    step = stop_step(pace)
    assert (step is None) == (not pace)
    for at, seconds in pace:
        assert step is not None
        assert step >= at + 2
        assert seconds * (step - at) >= 0.99 or not seconds or seconds < 1e-9


def able(world: int = W) -> State:
    state = State.fresh(world)
    for rank in range(world):
        state, _ = advance(state, Hello(rank, 1, resizes=True), 0.0)
    return state


def test_survivors_go_on_as_a_smaller_world_with_what_is_known_of_them() -> None:
    state, effects = walk(able(4), (1.0, Resized((0, 3), "b was lost", "b was lost: on with 2")))
    assert effects == [Regroup(2, (0, 1), (0, 1))]
    assert state.world == 2
    assert state.episode is not None
    assert state.episode.strategy == "elastic-training"
    assert state.episode.cause == "b was lost: on with 2"
    events: list[tuple[float, Event]] = [(1.1, Left(r, 1)) for r in range(2)]
    state, effects = walk(state, *events, *((1.2, GoodStep(r, 2, 7)) for r in range(2)))
    assert [type(e) for e in effects] == [Recovered]


def test_newcomers_are_started_and_the_others_may_finish_a_step() -> None:
    state, effects = walk(able(2), (1.0, Resized((0, None, 1), "c came", "c came", 30.0)))
    assert effects == [Replace(1, 2), Regroup(2, (0, 2), (0, 1, 2))]
    assert next_deadline(state) == 1.0 + 10.0 + 30.0


def test_one_rank_that_cannot_be_resized_restarts_the_group() -> None:
    state, _ = walk(able(3), (0.5, Hello(1, 1)))
    state, effects = walk(state, (1.0, Resized((0, 1), "c was lost", "c was lost")))
    (over,) = effects
    assert isinstance(over, RestartGroup)
    assert "elastic-training: the program keeps its world" in over.why
    assert "recover-in-place: no node is there to take the ranks" in over.why


def test_a_second_loss_while_the_first_is_dealt_with() -> None:
    state, _ = walk(able(4), (1.0, Died(1, "was killed by SIGKILL", 5)))
    state, effects = walk(state, (1.1, Resized((0, 1), "b was lost", "b was lost")))
    assert effects == [Regroup(3, (0, 1), (0, 1))]
    assert state.episode is not None
    assert (state.episode.round, state.episode.replaced) == (2, frozenset({1}))
