"""Every event in every state has an answer; whatever nodes say, no rank is given twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

NAMES = ["a", "b", "c", "d"]
KINDS = ["hello", "died", "fault", "left", "good_step", "finished", "prepared", "dumped", "?"]
DATA = [
    {},
    {"how": "was killed"},
    {"how": 3},
    {"kind": "network", "text": "x"},
    {"kind": "lost-state", "text": "x"},
    {"step": 3, "report": {}},
    {"step": True},
    {"waiting": True, "generation": 2},
    {"generation": "x"},
]
ENDS = [{}, {"exception": "closed by peer"}, {"step": 3}, {"hung": "y"}, {"exception": 1}]


def small(r: random.Random) -> int:
    return r.randint(-1, 4)


def assignment(r: random.Random) -> m.Assignment:
    world, generation = r.randint(1, 4), r.randint(1, 5)
    seat = m.Seat(r.choice(NAMES), (world - 1,))
    return m.Assignment(
        1, generation, generation - 1, seat, world - 1, world, world, "h:1", seat.node
    )


def join(r: random.Random, name: str) -> m.Join:
    node = m.Node(
        name,
        f"10.0.0.{name}",
        slots=r.choice([1, 1, 2]),
        rank=r.choice([None, None, None, 0, 1]),
        spare=r.random() < 0.2,
    )
    share = m.Share((small(r),), (small(r),), (small(r),), r.random() < 0.3)
    return m.Join(
        node,
        epoch=int(r.random() < 0.05),
        held=assignment(r) if r.random() < 0.3 else None,
        offer=r.choice(["", "h:2", "h:3"]),
        share=share if r.random() < 0.4 else None,
        last=assignment(r) if r.random() < 0.3 else None,
    )


def saying(r: random.Random, state: job.State) -> m.Saying:
    near = r.choice([state.generation, state.generation, small(r)])
    return r.choice(
        [
            m.Offer("h:4"),
            m.WorkerEvent(near, small(r), r.choice(KINDS), r.choice(DATA)),
            m.WorkerEvent(near, small(r), "hello"),
            m.WorkerEvent(near, small(r), "died", {"how": "was killed"}),
            m.Failed(near, r.choice([None, 0]), "x", small(r), r.choice(ENDS), r.random() < 0.7),
            m.Succeeded(near),
            m.Stopped(near),
            m.Stopped(near),
            m.Took(near),
            m.Progress(near, small(r)),
            m.Leave("bye"),
        ]
    )


def event(r: random.Random, state: job.State) -> m.Event:
    chance, name = r.random(), r.choice(NAMES)
    if chance < 0.35:
        return m.Said(name, join(r, name))
    if chance < 0.85:
        return m.Said(name, saying(r, state))
    if chance < 0.95:
        if r.random() < 0.5:
            return m.Away(name)
        return m.Lost(name, "z", r.random() < 0.5)
    return m.Tick()


@pytest.mark.parametrize("part", range(5))
def test_every_event_has_an_answer(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        play(random.Random(seed))


def play(r: random.Random) -> None:
    opts = m.Options(
        least=r.randint(1, 2),
        most=r.randint(2, 3),
        join=20.0,
        last_call=3.0,
        rejoin=5.0,
        max_restarts=r.randint(0, 5),
        in_place=r.random() < 0.8,
        on_split=r.choice(["wait", "continue"]),
        node_failures=r.randint(1, 3),
        quarantine=30.0,
    )
    start = r.choice(["fresh", "fresh", "recall"])
    roster = m.Roster(1, 2, (("a", "a:1"), ("b", "b:1"), ("c", "c:1")), 2)
    lost = frozenset({"a"})
    state = job.State.fresh()
    if start == "recall":
        state = job.State.recall(2, 0.0, opts, frozenset(), lost, roster)
    held: dict[tuple[int, int], str] = {}
    now = 0.0
    for _ in range(60):
        now += r.choice([0.0, 0.1, 1.0, 4.0])
        for what in (event(r, state), m.Tick()):
            before = state.generation
            state, effects = job.advance(state, what, now, opts)
            assert state.epoch > 0 or state.generation >= before
            due = job.next_deadline(state)
            assert not isinstance(what, m.Tick) or due is None or due > now
            for effect in effects:
                if isinstance(effect, m.Note):
                    continue
                assert isinstance(effect, m.To)
                told = effect.what
                if isinstance(told, m.Assign | m.Regroup) and state.epoch == 0:
                    a = told.assignment
                    for rank in a.seat.ranks:
                        assert 0 <= rank < a.world
                        owner = held.setdefault((a.generation, rank), effect.node)
                        assert owner == effect.node
    # left alone, every wait ends
    for _ in range(100):
        due = job.next_deadline(state)
        if due is None:
            break
        state, _ = job.advance(state, m.Tick(), due, opts)
        assert (job.next_deadline(state) or due + 1) > due


def test_the_documents_table_has_all_phases() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rendezvous.md").read_text()
    table = {line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")}
    assert table == {phase.value for phase in job.Phase}
