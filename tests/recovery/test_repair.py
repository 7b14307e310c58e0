"""The choice of the state to go on with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recovery.repair import Holding, Origin, choose


def ranks(*held, shards=None):
    """Holdings from (step, clean) pairs; None: nothing."""
    return [
        Holding(
            rank,
            0 if shards is None else shards[rank],
            None if one is None else one[0],
            True if one is None else one[1],
        )
        for rank, one in enumerate(held)
    ]


C, D = True, False


@pytest.mark.parametrize(
    ("holdings", "origin", "step", "transfers"),
    [
        # nobody needs anything
        (ranks((4, C), (4, C)), Origin.REPLICA, 4, ()),
        (ranks((-1, C), (-1, C)), Origin.REPLICA, -1, ()),
        # a newcomer gets it from a survivor, several from several
        (ranks((4, C), None, (4, C)), Origin.REPLICA, 4, ((0, 1),)),
        (ranks((4, C), None, (4, C), None), Origin.REPLICA, 4, ((0, 1), (2, 3))),
        (ranks(None, None, (4, C), None), Origin.REPLICA, 4, ((2, 0), (2, 1), (2, 3))),
        # one had finished the step: the others are brought there
        (ranks((4, C), (5, C), None), Origin.REPLICA, 5, ((1, 0), (1, 2))),
        # broken off in the update: not a source
        (ranks((4, D), (4, C), None), Origin.REPLICA, 4, ((1, 0), (1, 2))),
        (ranks((4, D), (4, D), None), Origin.NONE, -1, ()),
        # hybrid: ranks 0, 2 hold shard 0, ranks 1, 3 shard 1
        (ranks((4, C), None, (4, C), (4, C), shards=[0, 1, 0, 1]), Origin.REPLICA, 4, ((3, 1),)),
        (
            ranks((5, C), None, (4, C), (4, C), shards=[0, 1, 0, 1]),
            Origin.REPLICA,
            4,
            ((2, 0), (3, 1)),
        ),
        (ranks((5, C), None, (5, C), (4, C), shards=[0, 1, 0, 1]), Origin.NONE, -1, ()),
        (ranks((4, C), None, (4, C), None, shards=[0, 1, 0, 1]), Origin.NONE, -1, ()),
    ],
)
def test_memory(holdings, origin, step, transfers):
    plan = choose(holdings)
    assert (plan.origin, plan.step, plan.transfers) == (origin, step, transfers)


def test_snapshot_where_memory_is_not_whole():
    plan = choose(
        [
            Holding(0, 0, 7, snapshots=frozenset({3, 5})),
            Holding(1, 1, None, snapshots=frozenset({3, 5})),
            Holding(2, 2, 7, snapshots=frozenset({5, 7})),
        ]
    )
    assert plan.origin is Origin.SNAPSHOT
    assert plan.step == 5
    assert plan.load == (0, 1, 2)
    assert plan.lost == 2
    assert "no clean holder of shard 1" in plan.why


def test_snapshot_is_handed_to_a_replica_that_lost_its_own():
    plan = choose(
        [
            Holding(0, 0, None, snapshots=frozenset({5})),
            Holding(1, 0, None),
            Holding(2, 1, None, snapshots=frozenset({5})),
        ]
    )
    assert (plan.load, plan.transfers) == ((0, 2), ((0, 1),))


@pytest.mark.parametrize(
    ("snapshot", "checkpoint", "origin", "step"),
    [
        (5, 3, Origin.SNAPSHOT, 5),
        (5, 5, Origin.SNAPSHOT, 5),
        (5, 9, Origin.CHECKPOINT, 9),
        (None, 9, Origin.CHECKPOINT, 9),
    ],
)
def test_after_a_restart_the_newest_wins(snapshot, checkpoint, origin, step):
    kept = frozenset() if snapshot is None else frozenset({snapshot})
    fresh = [Holding(rank, rank, -1, snapshots=kept, checkpoint=checkpoint) for rank in range(3)]
    plan = choose(fresh)
    assert (plan.origin, plan.step) == (origin, step)


def test_a_checkpoint_that_one_rank_cannot_see_is_not_taken():
    one = Holding(0, 0, None, checkpoint=5)
    assert choose([one, Holding(1, 1, 4)]).origin is Origin.NONE
    assert choose([one, Holding(1, 1, None, checkpoint=3)]).step == 3


def test_bad_input():
    with pytest.raises(ValueError, match="no ranks"):
        choose([])
    with pytest.raises(ValueError, match="twice"):
        choose([Holding(0, 0, 1), Holding(0, 0, 1)])


holdings = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.none() | st.integers(-1, 3),
        st.booleans(),
        st.frozensets(st.integers(0, 3), max_size=2),
        st.none() | st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
).map(lambda rows: [Holding(rank, *row) for rank, row in enumerate(rows)])


@given(holdings)
def test_everybody_ends_with_the_plan_s_step(held):
    plan = choose(held)
    ranks_ = {h.rank: h for h in held}
    have = set()
    for rank, holding in ranks_.items():
        in_memory = plan.origin is Origin.REPLICA and holding.clean and holding.step == plan.step
        if in_memory or rank in plan.load:
            have.add(rank)
    for rank in plan.load:
        assert plan.step in ranks_[rank].snapshots
    for source, receiver in plan.transfers:
        assert source in have
        assert receiver not in have
        assert ranks_[source].shard == ranks_[receiver].shard
    received = [receiver for _, receiver in plan.transfers]
    assert len(set(received)) == len(received)
    if plan.origin in (Origin.REPLICA, Origin.SNAPSHOT):
        assert have | set(received) == set(ranks_)
    if plan.origin is Origin.CHECKPOINT:
        assert all(h.checkpoint is not None and h.checkpoint >= plan.step for h in held)
    assert plan.lost >= 0


@given(holdings, st.randoms())
def test_the_order_of_the_list_does_not_matter(held, random):
    shuffled = list(held)
    random.shuffle(shuffled)
    assert choose(shuffled) == choose(held)


@given(holdings)
def test_nothing_newer_that_is_whole_is_passed_over(held):
    plan = choose(held)
    shards = {h.shard for h in held}
    for step in range(plan.step + 1, 5):
        whole = all(
            any(h.shard == shard and h.clean and h.step == step for h in held) for shard in shards
        )
        kept = all(any(h.shard == shard and step in h.snapshots for h in held) for shard in shards)
        assert not whole
        assert not kept
