"""An agent's conversation with a controller: each answer, and both machines against each other."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.recovery import counsel as c
from phalanx.recovery import model as m
from phalanx.recovery import words
from phalanx.recovery.counsel import Phase, State, Trouble
from phalanx.recovery.machine import due, step

LADDER = ("retry", "recover-in-place", "dump", "exit")


def heard(
    kind: str,
    strategy: str = "",
    *,
    ranks=(1,),
    extra: str = "",
    within: int = 900,
    round_: int = 1,
) -> c.Heard:
    action = {words.STOP_TRAIN: words.A_STOP_TRAIN}.get(kind, words.A_CHANGE)
    return c.Heard(
        m.Received(
            m.Key("u", kind, strategy, round_),
            "j",
            kind,
            (action,),
            dict.fromkeys(ranks, 1),
            strategy,
            60,
            (),
            extra,
            within,
            "because",
            False,
        )
    )


STOP, AGREE = heard(words.STOP_TRAIN), heard(words.GLOBAL_FAULT)
IN_PLACE = heard(words.CHANGE_STRATEGY, "recover", extra=words.IN_PLACE)
DUMP, EXIT = heard(words.CHANGE_STRATEGY, "dump"), heard(words.CHANGE_STRATEGY, "exit")
FAULT = c.Faulted((Trouble(1, incarnation=1),), ("recover-in-place", "dump"))
UP = State(up=True)


def run(state: State, *events: c.Event, now: float = 0.0) -> tuple[State, list[str]]:
    """The state after these, and the names of all effects in order."""
    names = []
    for event in events:
        state, effects = c.advance(state, event, now)
        for effect in effects:
            more = getattr(effect, "strategy", None) or getattr(effect, "code", None)
            names.append(type(effect).__name__ + ("" if more is None else f" {more}"))
    return state, names


def test_a_decision_from_the_fault_to_the_good_step():
    state, said = run(UP, FAULT, STOP, c.Stopped(), AGREE, IN_PLACE, c.Done())
    assert said == [
        "SayFault",
        "Halt",
        "SayStopped",
        "SayOffer",
        "Decided recover-in-place",
        "SayStatus 0",
    ]
    assert state == UP


def test_the_offer_is_in_the_wires_words():
    _, effects = c.advance(run(UP, FAULT, STOP, c.Stopped())[0], AGREE, 0)
    assert effects == [c.SayOffer(AGREE.signal, ("recover", "dump", "exit"))]


def test_what_fails_is_told_and_the_next_word_is_awaited():
    asked = run(UP, FAULT, STOP, c.Stopped(), AGREE, IN_PLACE)[0]
    state, said = run(asked, c.Failed(406, "no good step", ("dump",)), DUMP, c.Done())
    assert said == ["SayStatus 406", "Decided dump", "SayStatus 0"]
    assert state.phase is Phase.IDLE
    # nobody there any more: alone, and at once
    down = run(asked, c.Linked(False))[0]
    assert run(down, c.Failed(406, "", ()))[1] == ["SayStatus 406", "DecideAlone"]


@pytest.mark.parametrize("heard_before", [(), (STOP,), (STOP, c.Stopped(), AGREE)])
def test_no_word_in_time_and_later_signals_are_answered_with_what_was_done(heard_before):
    asked = run(UP, FAULT, *heard_before)[0]
    assert run(asked, c.Tick(), now=1.9)[1] == []
    state, said = run(asked, c.Tick(), now=2.0)
    assert said[0] == "DecideAlone"
    assert ("SayStopped" in said) == (heard_before == (STOP,))
    state, said = run(state, c.TookAlone("recover-in-place"), STOP, AGREE, DUMP, c.Done())
    assert said == ["SayStopped", "SayOffer", "SayStatus 499"]
    state, said = run(state, EXIT)
    assert said == ["SayStatus 0"] or said == ["SayStatus Code.OK"]
    assert state.alone == ""
    # the same strategy as was taken alone is a success
    state = run(asked, c.Tick(), c.TookAlone("recover-in-place"), c.Done(), now=2.0)[0]
    assert run(state, STOP, AGREE, IN_PLACE)[1][-1].endswith(" 0")


def test_without_a_controller_nothing_is_waited_for_and_all_is_told_later_at_once():
    down = State(up=False)
    state, said = run(down, FAULT, c.TookAlone("recover-in-place"), c.Done())
    assert said == ["DecideAlone"]
    state, said = run(
        state, c.Faulted((Trouble(2),), ()), c.TookAlone("recover-in-place"), c.Done()
    )
    assert said == ["DecideAlone"]
    _, effects = c.advance(state, c.Linked(True), 0)
    assert [t.rank for t in effects[0].troubles] == [1, 2]
    # on the very first try it is waited for, but for one decision only
    state, said = run(State(), FAULT)
    assert said == [] and state.asking
    state, said = run(state, c.Tick(), c.TookAlone("exit"), c.Done(), FAULT, now=2.0)
    assert said == ["DecideAlone", "DecideAlone"]


def test_a_second_fault_while_the_first_is_decided_goes_into_the_same_decision():
    state, _ = run(UP, FAULT, c.Faulted((Trouble(2),), ("dump",)), STOP, c.Stopped(), AGREE)
    _, effects = c.advance(state, EXIT, 0)
    assert effects[0].ranks == {1, 2} and not effects[0].foreign


def test_a_fault_that_somebody_else_has_reported():
    state, said = run(UP, STOP)
    assert said == ["Halt"]
    state, effects = c.advance(state, c.Stopped(("recover-in-place",)), 0)
    _, effects = c.advance(run(state, AGREE)[0], IN_PLACE, 0)
    assert effects == [c.Decided("recover-in-place", frozenset({1}), "because", frozenset({1}))]


def test_the_word_to_end_always_counts():
    for state in (UP, State(up=False), run(UP, FAULT)[0], replace(UP, alone="exit")):
        assert run(state, heard(words.KILL_MASTER, within=0))[1] == ["Decided end"]


def test_an_order_that_comes_without_a_stop():
    save = heard(words.SAVE_AND_EXIT)
    assert run(UP, FAULT, save, c.Done())[1] == ["SayFault", "Decided dump", "SayStatus 0"]
    assert run(UP, save)[1] == ["Decided dump"]


def test_what_one_node_cannot_do_is_refused_and_the_next_word_awaited():
    move = heard(words.CHANGE_STRATEGY, "recover")
    _, said = run(UP, FAULT, STOP, c.Stopped(), AGREE, move, EXIT)
    assert said[-2:] == ["SayStatus 405", "Decided exit"]
    several = replace(UP, able=c.ONE_NODE | {"recover"})
    assert run(several, FAULT, STOP, c.Stopped(), AGREE, move)[1][-1] == "Decided recover"


def test_signals_of_a_process_before_this_one():
    assert run(UP, IN_PLACE)[1] == ["SayStatus 499"]
    assert run(UP, AGREE)[1] == ["SayOffer"]
    assert run(UP, EXIT)[1][0].startswith("SayStatus")


EVENTS = st.one_of(
    st.sampled_from(
        [
            STOP,
            AGREE,
            IN_PLACE,
            DUMP,
            EXIT,
            FAULT,
            c.Faulted((), ()),
            c.Faulted((Trouble(2, 0), Trouble(3, 2)), ("retry",)),
            c.Failed(499, "x", ()),
            c.Stopped(),
            c.Done(),
            c.TookAlone("exit"),
            c.Linked(True),
            c.Linked(False),
            c.Tick(),
            heard(words.KILL_MASTER, within=0),
            heard(words.SAVE_AND_EXIT),
            heard(words.HOT_SWITCH, within=0),
            heard("a word of the future"),
            heard(words.CHANGE_STRATEGY, "continue", ranks=()),
        ]
    )
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 3)), max_size=30))
def test_every_event_has_an_answer_and_every_question_a_bound(steps):
    state, now = State(), 0.0
    for event, pause in steps:
        now += pause
        state, effects = c.advance(state, event, now)
        assert state.asking == (state.until is not None)
        assert sum(isinstance(e, c.Decided | c.DecideAlone) for e in effects) <= 1
    if state.asking:
        assert state.until is not None
        state, effects = c.advance(state, c.Tick(), state.until)
        assert isinstance(effects[0], c.DecideAlone)


@pytest.mark.parametrize("seed", range(60))
def test_both_machines_come_to_an_end_whatever_is_lost(seed):
    """The controller's machine and ours, over a line that is cut at random and comes back."""
    rng = random.Random(seed)
    strategies = tuple(s for s in LADDER if rng.random() < 0.7) or ("exit",)
    job = m.Job("j", m.JobConfig(strategies=strategies, world_size=4, devices_per_node=4))
    ours = State(up=True)
    now, up = 100.0, True
    seen: set[m.Key] = set()
    inbox: deque[m.Signal] = deque()  # signals on their way
    outbox: deque[m.Event] = deque()  # reports that are repeated until they are answered
    todo: deque[c.Event] = deque()  # what the agent will say next
    faults, decisions = 4, 0

    def controller(event: m.Event) -> None:
        nonlocal job
        out = step(job, event, now)
        job = out.job
        if up:
            inbox.extend(e.signal for e in out.effects if isinstance(e, m.Send))

    def agent(event: c.Event) -> None:
        nonlocal ours, decisions
        ours, effects = c.advance(ours, event, now)
        for e in effects:
            if isinstance(e, c.SayFault):
                outbox.append(
                    m.FaultSeen(
                        tuple(
                            m.Fault(t.rank, t.kind, incarnation=t.incarnation) for t in e.troubles
                        ),
                        str(rng.random()),
                    )
                )
            elif isinstance(e, c.SayStopped):
                outbox.append(m.StopComplete(key=e.signal.key))
            elif isinstance(e, c.SayOffer):
                outbox.append(m.Strategies(key=e.signal.key, names=e.names))
            elif isinstance(e, c.SayStatus):
                outbox.append(
                    m.Status(key=e.signal.key, code=int(e.code), strategy=e.signal.strategy)
                )
            elif isinstance(e, c.Halt):
                todo.append(c.Stopped(("recover-in-place", "dump")))
            else:
                decisions += 1
                if isinstance(e, c.DecideAlone):
                    todo.append(c.TookAlone(rng.choice(["recover-in-place", "exit"])))
                failed = rng.random() < 0.2 and not isinstance(e, c.DecideAlone)
                todo.append(c.Failed(406, "", ("dump",)) if failed else c.Done())

    controller(m.Subscribed("a", 1, True))
    for turn in range(600):
        now += rng.choice([0.0, 0.01, 0.5])
        if turn < 300 and rng.random() < 0.08:
            up = not up
            agent(c.Linked(up))
            inbox.clear()
            controller(m.Subscribed("a", 1, True) if up else m.Unsubscribed())
        elif turn >= 300 and not up:
            up = True
            agent(c.Linked(True))
            controller(m.Subscribed("a", 1, True))
        choices = []
        if faults and turn < 300 and ours.phase is not Phase.ASKING and not todo:
            choices.append("fault")
        choices += ["inbox"] * bool(inbox) + ["outbox"] * bool(outbox and up)
        choices += ["todo"] * bool(todo)
        what = rng.choice(choices) if choices else "time"
        if what == "fault" and (turn > 5 or rng.random() < 0.3):
            faults -= 1
            agent(c.Faulted((Trouble(rng.randrange(4), 1, 10 - faults),), ("recover-in-place",)))
        elif what == "inbox":
            signal = inbox.popleft()
            if signal.key not in seen:
                seen.add(signal.key)
                agent(c.Heard(_received(signal)))
        elif what == "outbox":
            controller(outbox.popleft())
        elif what == "todo":
            agent(todo.popleft())
        elif what == "time":
            now += 1.0
            if ours.until is not None and now >= ours.until:
                agent(c.Tick())
        if (at := due(job)) is not None and now >= at:
            controller(m.Timeout())
    assert decisions or faults == 4
    assert not ours.asking
    assert job.state is m.State.IDLE, (job.state, job.open, ours)
    assert ours.phase is Phase.IDLE
    assert not ours.unsaid


def _received(s: m.Signal) -> m.Received:
    return m.Received(
        s.key, "j", s.key.signal, s.actions, dict(s.ranks), s.key.strategy, s.timeout, s.nodes,
        s.extra, s.report_within, s.reason, False,
    )  # fmt: skip
