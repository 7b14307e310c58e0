"""Ranks: dense, each held once, and as few moves as can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.rendezvous.model import Node, Seat
from phalanx.rendezvous.ranks import clash, moves, seats


def node(name: str, slots: int = 1, rank: int | None = None) -> Node:
    return Node(name, f"10.0.0.{ord(name[0]) - 96}", slots=slots, rank=rank, host=f"host-{name}")


def table(found: tuple[Seat, ...]) -> dict[str, tuple[int, ...]]:
    return {seat.node: seat.ranks for seat in found}


def test_first_come_first_seated() -> None:
    assert table(seats([node("b", 2), node("a", 2)])) == {"b": (0, 1), "a": (2, 3)}


def test_a_replacement_takes_the_hole() -> None:
    before = seats([node("a"), node("b"), node("c")])
    after = seats([node("a"), node("c"), node("d")], before)
    assert table(after) == {"a": (0,), "d": (1,), "c": (2,)}


def test_without_one_the_highest_moves_into_the_lowest_hole() -> None:
    before = seats([node(n, 2) for n in "abcd"])
    after = seats([node(n, 2) for n in "bcd"], before)
    assert table(after) == {"d": (0, 1), "b": (2, 3), "c": (4, 5)}


def test_unequal_nodes_close_up_in_order() -> None:
    before = seats([node("a", 1), node("b", 2), node("c", 3)])
    assert table(seats([node("b", 2), node("c", 3)], before)) == {"b": (0, 1), "c": (2, 3, 4)}
    same_size = seats([node("a", 1), node("c", 3), node("d", 2)], before)
    assert table(same_size) == {"a": (0,), "d": (1, 2), "c": (3, 4, 5)}


def test_node_ranks_are_honoured() -> None:
    found = seats([node("a", rank=2), node("b", rank=0), node("c", rank=1)])
    assert [seat.node for seat in found] == ["b", "c", "a"]
    found = seats([node("a"), node("b", rank=0), node("c")])
    assert [seat.node for seat in found] == ["b", "a", "c"]
    found = seats([node("a", 1, rank=1), node("b", 2, rank=0)])
    assert [seat.node for seat in found] == ["b", "a"]


def test_node_ranks_beyond_the_nodes_there_are() -> None:
    found = seats([node("a", rank=2), node("b", rank=0)])
    assert [seat.node for seat in found] == ["b", "a"]


@pytest.mark.parametrize(
    ("new", "others", "says"),
    [
        (node("a", rank=1), [node("b", rank=1)], "--node-rank 1 is given to host-b"),
        (node("a", rank=3), [], "give 0 to 2"),
        (node("a", slots=0), [], "at least 1"),
        (node("a", rank=1), [node("a", rank=1)], None),
        (node("a"), [node("b", rank=0)], None),
    ],
)
def test_what_cannot_be_honoured_is_refused(new: Node, others: list[Node], says: str) -> None:
    found = clash(new, others, 3)
    assert found is None if says is None else found is not None and says in found


histories = st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1), min_size=2, max_size=6).map(
    lambda sets: [sorted(s) for s in sets]
)


@given(histories, st.booleans(), st.data())
def test_every_rank_is_held_once(history: list[list[str]], even: bool, data: st.DataObject) -> None:
    slots = {n: 2 if even else data.draw(st.integers(1, 3)) for n in "abcdefgh"}
    pins = data.draw(
        st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7)).filter(
            lambda d: len(set(d.values())) == len(d)
        )
    )
    before: tuple[Seat, ...] = ()
    for names in history:
        after = seats([node(n, slots[n], pins.get(n)) for n in names], before)
        assert {seat.node for seat in after} == set(names)
        ranks = [rank for seat in after for rank in seat.ranks]
        assert ranks == list(range(sum(slots[n] for n in names)))
        assert all(len(seat.ranks) == slots[seat.node] for seat in after)
        before = after


@given(histories)
def test_equal_nodes_move_as_little_as_can_be(history: list[list[str]]) -> None:
    before: tuple[Seat, ...] = ()
    for names in history:
        after = seats([node(n, 2) for n in names], before)
        world = 2 * len(names)
        must = sum(s.node in names and s.ranks[0] >= world for s in before)
        assert moves(before, after) == must
        before = after
