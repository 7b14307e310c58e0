"""Data that are dealt out anew when the number of ranks changes in the middle of an epoch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from phalanx.training.data import Batches  # noqa: E402

pytestmark = pytest.mark.torch


def batches(
    samples: int, batch: int, rank: int, world: int, *, keep: bool = False, **how: Any
) -> Batches:
    sampler = DistributedSampler(range(samples), world, rank, seed=5, **how)
    loader = DataLoader(range(samples), batch, sampler=sampler)
    return Batches(loader, rank=rank, world=world, keep=keep)


def epoch_of(samples: int, drop_last: bool, batch: int, plan: list[tuple[int, int]]) -> Any:
    """What all ranks have in epoch 0 when the world changes after so many steps each, and what
    has not been taken when the first comes to epoch 1."""
    world = plan[0][0]
    ranks = [batches(samples, batch, r, world, drop_last=drop_last) for r in range(world)]
    had: list[list[int]] = []
    for at, (world, steps) in enumerate([*plan, (plan[-1][0], 10_000)]):
        state = ranks[0].state_dict()
        assert all(
            (r.state_dict()["epoch"], r.state_dict()["index"]) == (state["epoch"], state["index"])
            for r in ranks
        )
        if at:
            kept = ranks[:world]
            for rank, one in enumerate(kept):
                one.assume(rank, world)
                one.redeal()
            for rank in range(len(kept), world):  # newcomers are told the position
                one = batches(samples, batch, rank, world, drop_last=drop_last)
                one.load_state_dict(state)
                kept.append(one)
            ranks = kept
        for _ in range(steps):
            for one in ranks:
                next(one)
                had.append(one._recent[-1][0][0].tolist())
            if {one.epoch for one in ranks} != {0}:
                assert {one.epoch for one in ranks} == {1}
                return had[: -len(ranks)], ranks
    raise AssertionError("the epoch has no end")


plans = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.booleans(), st.integers(1, 3), plans)
def test_no_sample_is_lost_or_had_twice(
    samples: int, drop_last: bool, batch: int, plan: list[tuple[int, int]]
) -> None:
    if drop_last and samples < 5:
        return  # nothing may be left for anybody
    had, ranks = epoch_of(samples, drop_last, batch, plan)
    world = len(ranks)
    count = Counter(sample for some in had for sample in some)
    twice = sum(count.values()) - len(count)
    if drop_last:
        assert not twice
        assert samples - len(count) < world
    else:
        assert len(count) == samples
        assert twice < max(world, *(w for w, _ in plan))
    # the next epoch is dealt out as to so many ranks from the start
    fresh = [batches(samples, batch, r, world, drop_last=drop_last) for r in range(world)]
    for one, other in zip(ranks, fresh, strict=True):
        other.epoch = 1
        assert one._recent[-1][0][0].tolist() == next(other).tolist()
        assert next(one).tolist() == next(other).tolist()


def test_the_step_that_is_done_again_takes_what_nobody_had() -> None:
    ranks = [batches(24, 2, r, 3) for r in range(3)]
    order = [s for some in zip(*(r._sampler for r in ranks), strict=True) for s in some]
    for one in ranks:
        next(one)
    record = ranks[0].state_dict()  # at the start of a step
    for one in ranks:
        next(one)  # which is interrupted, by the loss of rank 1
    left = [ranks[2], ranks[0]]
    for rank, one in enumerate(left):
        one.assume(rank, 2)
        one.load_state_dict(record)
        one.redeal()
        assert next(one).tolist() == order[6 + rank :: 2][:2]
    # a second loss before the step is done
    left[0].assume(0, 1)
    left[0].load_state_dict(record)
    assert next(left[0]).tolist() == order[6:8]


def test_random_states_are_not_moved() -> None:
    one = batches(24, 2, 0, 2)
    next(one)
    before = torch.get_rng_state()
    one.assume(0, 1)
    one.redeal()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_that_deals_to_others_than_all_ranks_is_left_alone() -> None:
    sampler = DistributedSampler(range(24), 2, 1, shuffle=False)  # of four ranks, two and two
    one = Batches(DataLoader(range(24), 2, sampler=sampler), rank=3, world=4)
    assert next(one).tolist() == [1, 3]
    one.assume(2, 3)
    one.redeal()
    assert next(one).tolist() == [5, 7]
    assert (sampler.rank, sampler.num_replicas) == (1, 2)


def test_a_sampler_of_another_kind_goes_on_where_it_was() -> None:
    torch.manual_seed(3)
    one = Batches(DataLoader(range(24), 2, sampler=RandomSampler(range(24))), rank=1, world=2)
    first = next(one).tolist()
    one.assume(0, 1)
    one.redeal()
    torch.manual_seed(3)
    same = Batches(DataLoader(range(24), 2, sampler=RandomSampler(range(24))))
    assert next(same).tolist() == first
    assert next(one).tolist() == next(same).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(5, 60),
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=4),
)
def test_the_batch_of_all_is_kept(
    samples: int, batch: int, shares: int, plan: list[tuple[int, int]]
) -> None:
    """However many ranks there are, together they have what so many would have had."""
    calm = [batches(samples, batch, r, shares) for r in range(shares)]
    ranks = [batches(samples, batch, r, shares, keep=True) for r in range(shares)]
    for world, steps in [(shares, 2), *plan]:
        state = ranks[0].state_dict()
        newcomers = [batches(samples, batch, r, world, keep=True) for r in range(world)]
        ranks = [*ranks[:world], *newcomers[len(ranks) :]]
        for rank, one in enumerate(ranks):
            one.assume(rank, world)
            one.load_state_dict(state)
            one.redeal()
        for _ in range(steps):
            had: dict[int, list[int]] = {}
            for rank, one in enumerate(ranks):
                parts, weight = one.parts()
                assert weight == (world / shares if rank < shares else 0)
                for share, part in zip(range(rank, shares, world), parts, strict=rank < shares):
                    had[share] = part.tolist()
            assert had == {share: next(one).tolist() for share, one in enumerate(calm)}


def test_the_batch_of_all_needs_to_know_how_it_is_dealt_out() -> None:
    with pytest.raises(ValueError, match="DistributedSampler"):
        Batches(DataLoader(range(24), 2), keep=True)
    with pytest.raises(TypeError, match=r"job\.parts"):
        next(batches(24, 2, 0, 2, keep=True))


def test_a_step_that_is_done_again_does_not_read_the_epoch_again() -> None:
    read = []

    class Noting(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    one = Batches(DataLoader(Noting(), 2))
    for _ in range(5):
        one.forget()
        begin = one.state_dict()
        first = next(one).tolist()
        one.state_dict()  # as the record after the forward pass does
    one.load_state_dict(begin)
    assert next(one).tolist() == first
    assert len(read) == 10
