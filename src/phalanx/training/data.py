"""Batches that can be had again: the step that was interrupted gets the data it had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """

    def __init__(self, loader: Iterable[Any], sampler: Any = None, *, again: bool = True) -> None:
        self._loader = loader
        self._keep = again  # whether a batch may have to come again
        if sampler is None:
            sampler = getattr(loader, "sampler", None)
        self._sampler = sampler if hasattr(sampler, "set_epoch") else None
        self.epoch = 0
        self.index = 0  # of the next batch
        self._random = b""
        self._iterator: Iterator[Any] | None = None
        # Batches since the last `state_dict`, and those to come again, each with the random
        # states after it was made.
        self._recent: list[tuple[Any, bytes]] = []
        self._ahead = 0  # how many at the end of `_recent` are still to be given out

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            batch, random = self._recent[-self._ahead]
            self._ahead -= 1
            self.index += 1
            rng.restore(random)
            return batch
        empty = False
        while True:
            if self._iterator is None:
                self._open()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                if empty:
                    raise ValueError("the loader gives no batches") from None
                empty = self.index == 0
                self.epoch += 1
                self.index = 0
                self._iterator = None
                self._recent.clear()
                continue
            self.index += 1
            if self._keep:
                self._recent.append((batch, rng.capture()))
            return batch

    def _open(self) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self._random = rng.capture()
        self._iterator = iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position. Batches given out before it are forgotten."""
        if self._ahead:
            self._recent = self._recent[-self._ahead :]
        else:
            self._recent = []
        return {"epoch": self.epoch, "index": self.index, "random": self._random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        epoch, index = int(state["epoch"]), int(state["index"])
        behind = self.index - index
        given = len(self._recent) - self._ahead
        if self._iterator is not None and epoch == self.epoch and 0 <= behind <= given:
            self._ahead += behind
            self.index = index
            return
        self.epoch, self.index = epoch, 0
        self._recent, self._ahead, self._iterator = [], 0, None
        self._random = state["random"]
        if not self._random:
            return
        now = rng.capture()
        rng.restore(self._random)
        random = self._random
        self._open()
        self._random = random
        assert self._iterator is not None
        for _ in range(index):
            next(self._iterator)
        self.index = index
        rng.restore(now)
