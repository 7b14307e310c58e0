"""Batches that can be had again: the step that was interrupted gets the data it had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from phalanx.training import rng


class Batches:
    """An endless run over a loader, epoch after epoch, with a position.

    ``next(batches)`` gives the next batch. The position (epoch, index) is saved at the start
    of each step; after a roll back the same batches come again, and a replacement skips to
    where its predecessor was: by the loader's own ``load_state_dict`` if it has one, else by
    iterating (which reads the skipped batches). Shuffling is repeated exactly: the random
    state at the start of the epoch is part of the position. A batch that comes again leaves the
    random states as they were when it was made.

    ``sampler`` (default: the loader's own, if it has ``set_epoch``) is told each epoch.

    With a ``DistributedSampler`` and a ``batch_size`` the samples are dealt out to the ranks there
    are: when their number changes in the middle of an epoch, what no rank has had yet is dealt
    out to the new ones. Others go through what their loader gives them, each rank for itself.

    ``keep``: instead the epoch stays dealt out to as many as there were ranks at first, and each
    rank has the batches of one or several of those (`parts`), so that all ranks together have the
    same samples in each step, however many they are. A rank beyond their number has the batch
    of another, for nothing.

    :raises ValueError: ``keep``, but it is not known how the samples are dealt out.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sampler: Any = None,
        *,
        again: bool = True,
        rank: int = 0,
        world: int = 1,
        keep: bool = False,
    ) -> None:
        self._loader = loader
        self._keep = again  # whether a batch may have to come again
        if sampler is None:
            sampler = getattr(loader, "sampler", None)
        self._sampler: Any = sampler if hasattr(sampler, "set_epoch") else None
        size = getattr(loader, "batch_size", None)
        # Samples in a batch, where it is known how they are dealt out; else 0.
        known = _is_dealt(self._sampler)
        own = (rank, world) == (getattr(sampler, "rank", -1), getattr(sampler, "num_replicas", -1))
        self._size: int = size if isinstance(size, int) and known and own else 0
        if keep and (not self._size or getattr(loader, "persistent_workers", False)):
            raise ValueError(
                'elastic="batch" needs a DistributedSampler over all ranks, a loader with a '
                "batch_size, and no persistent_workers"
            )
        self._keep_batch = keep
        self.rank, self.world = rank, world
        self._opened_as: tuple[int, ...] = ()
        self.epoch = 0
        self.index = 0  # of the next batch, since the deal
        self._ranks = world  # among whom the epoch, or the rest of it, is dealt out
        self._dealt = 0  # samples of the epoch that all ranks had before this deal
        self._random = b""
        self._iterators: list[Iterator[Any]] = []  # one for each share
        # Rounds since the last `forget`, and those to come again, each with the random states
        # after it was made.
        self._recent: list[tuple[list[Any], bytes]] = []
        self._ahead = 0  # how many at the end of `_recent` are still to be given out

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._keep_batch:
            raise TypeError('with elastic="batch" a rank may have several batches: use job.parts()')
        return self._round()[0]

    def parts(self) -> tuple[list[Any], float]:
        """The batches of this rank for the next step, and the factor of each one's loss, with
        which the mean over the ranks is that over all batches."""
        batches = self._round()
        if not self._keep_batch:
            return batches, 1.0
        return batches, 0.0 if self.rank >= self._ranks else self.world / self._ranks

    def _shares(self) -> tuple[int, ...]:
        if not self._keep_batch:
            return (self.rank,)
        return tuple(range(self.rank, self._ranks, self.world)) or (self.rank % self._ranks,)

    def _round(self) -> list[Any]:
        if self._ahead:
            batches, random = self._recent[-self._ahead]
            self._ahead -= 1
            self.index += 1
            rng.restore(random)
            return batches
        empty = False
        while True:
            if not self._iterators:
                self._open()
            try:
                batches = [next(iterator) for iterator in self._iterators]
            except StopIteration:
                if empty:
                    raise ValueError("the loader gives no batches") from None
                empty = self.index == 0 and not self._dealt
                self.epoch += 1
                self.index = self._dealt = 0
                if not self._keep_batch:
                    self._ranks = self.world
                self._iterators = []
                self._recent.clear()
                continue
            self.index += 1
            if self._keep:
                self._recent.append((batches, rng.capture()))
            return batches

    def _open(self) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self._random = rng.capture()
        self._opened_as = self._shares()
        self._iterators = []
        for one in self._opened_as:
            if self._size:
                deal(self._sampler, one, self._ranks, self._dealt)
            iterator = iter(self._loader)
            if len(self._opened_as) > 1:  # the sampler is asked when the first batch is
                iterator = chain(list(islice(iterator, 1)), iterator)
            self._iterators.append(iterator)

    def assume(self, rank: int, world: int) -> None:
        """This is another rank from now on, or one of another number: takes effect with the next
        `redeal` or `load_state_dict`."""
        if not self._size:
            deal(self._sampler, rank, world, before=self.world)
        self.rank, self.world = rank, world

    def redeal(self) -> None:
        """Deal out what is left of the epoch to the ranks there are now. On all ranks, at the
        same position."""
        self.load_state_dict(self.state_dict())

    def forget(self) -> None:
        """Batches given out before will not be asked for again."""
        self._recent = self._recent[-self._ahead :] if self._ahead else []

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "random": self._random,
            "ranks": self._ranks,
            "dealt": self._dealt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        epoch, index = int(state["epoch"]), int(state["index"])
        ranks, dealt = int(state.get("ranks", self._ranks)), int(state.get("dealt", 0))
        if ranks != self.world and not self._keep_batch:
            dealt, index = self._had(ranks, dealt, index), 0 if self._size else index
            ranks = self.world
        behind = self.index - index
        given = len(self._recent) - self._ahead
        same = (epoch, ranks, dealt) == (self.epoch, self._ranks, self._dealt)
        self._ranks, self._dealt = ranks, dealt
        same = same and self._shares() == self._opened_as
        if self._iterators and same and 0 <= behind <= given:
            self._ahead += behind
            self.index = index
            return
        self.epoch, self.index = epoch, 0
        self._recent, self._ahead, self._iterators = [], 0, []
        self._random = state["random"]
        if not self._random:
            return
        now = rng.capture()
        rng.restore(self._random)
        random = self._random
        self._open()
        self._random = random
        for iterator in self._iterators:
            for _ in range(index):
                next(iterator)
        self.index = index
        rng.restore(now)

    def _had(self, ranks: int, dealt: int, index: int) -> int:
        """Samples of the epoch that ``ranks`` ranks have had after ``index`` batches each, of
        those from ``dealt`` on."""
        if not self._size:
            return 0
        each = share(len(self._sampler.dataset), ranks, dealt, self._sampler.drop_last)
        return dealt + ranks * min(index * self._size, each)


def share(samples: int, ranks: int, dealt: int, drop_last: bool) -> int:
    """How many samples each of ``ranks`` ranks gets of those from ``dealt`` on. What is left over
    is dropped, or made up with samples from the epoch's start, as ``DistributedSampler`` does."""
    left = max(0, samples - dealt)
    return left // ranks if drop_last else -(-left // ranks)


def _is_dealt(sampler: Any) -> bool:
    from torch.utils.data import DistributedSampler

    return isinstance(sampler, DistributedSampler) and (
        type(sampler).__iter__ is DistributedSampler.__iter__
    )


def deal(sampler: Any, rank: int, ranks: int, dealt: int = 0, *, before: int | None = None) -> None:
    """Have a ``DistributedSampler`` deal out an epoch from sample ``dealt`` on to ``ranks`` ranks.

    One that does not deal to all ``before`` ranks is left alone. It takes every so manieth sample
    of the epoch's order, beginning at its rank: so for the rest of an epoch it is given a rank
    that is so much higher.
    """
    if not _is_dealt(sampler):
        if isinstance(getattr(sampler, "rank", None), int):
            sampler.rank = rank
        return
    if before not in (None, sampler.num_replicas):
        return
    each = share(len(sampler.dataset), ranks, dealt, sampler.drop_last)
    sampler.rank, sampler.num_replicas = dealt + rank, ranks
    sampler.num_samples, sampler.total_size = each, dealt + each * ranks
