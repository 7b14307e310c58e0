"""Checkpoints that are whole or not there.

A checkpoint is a directory ``step-<n>``. It is written under another name, every file is
flushed to storage, all ranks say that they are done, and only then rank 0 writes the commit
mark with the generation and gives it its name. A kill at any moment leaves the previous one
as it was; a generation that is over cannot commit over a newer one.

Models whose parameters are DTensors are written by `torch.distributed.checkpoint`; others are
the same on all ranks, and rank 0 writes them. What is each rank's own (random states, data
positions) is a small file per rank.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from phalanx.training import codec, rng, state
from phalanx.training.link import Permit

dist: Any = torch.distributed

_NAME = re.compile(r"step-(\d+)")
_MARK = "commit.json"


class Superseded(RuntimeError):
    """A newer generation has committed in this directory; this one may not."""


class NotCommitted(RuntimeError):
    """The checkpoint is written, but may not count: the job may have gone on elsewhere."""


class Checkpoints:
    """The checkpoints in one directory. Makes the directory when it is first written to."""

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        self.path = Path(path)
        self.keep = max(1, keep)
        #: asked with (generation, step) before a checkpoint gets its name; None: nobody is
        self.ask: Callable[[int, int], Permit] | None = None

    def committed(self) -> dict[int, dict[str, Any]]:
        """Step to commit mark, of all whole checkpoints."""
        found: dict[int, dict[str, Any]] = {}
        try:
            entries = list(self.path.iterdir())
        except OSError:
            return found
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            try:
                mark = json.loads((entry / _MARK).read_text())
                if mark["step"] == int(match[1]):
                    found[mark["step"]] = mark
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found

    def newest(self) -> int | None:
        """The last finished step of the newest whole checkpoint."""
        return max(self.committed(), default=None)

    def save(
        self,
        step: int,
        generation: int,
        protected: state.Protected,
        guard: state.BufferGuard,
        rank: int,
        world: int,
        extra: Any = None,
    ) -> None:
        """Write the state after ``step``, and ``extra`` of rank 0. Called by all ranks.

        :raises Superseded, NotCommitted: see there; on rank 0. :raises OSError: storage.
        """
        final = self.path / f"step-{step:010d}"
        draft = self.path / f"draft-{step:010d}-{generation}"
        if rank == 0:
            self._fence(generation)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        if world > 1:
            dist.barrier()
        if _sharded(protected):
            _save_sharded(draft / "sharded", protected)
        elif rank == 0:
            _write_tensors(draft / "whole.pt", protected)
        _write(draft / f"own-{rank}.bin", b"".join(state.record(protected, guard, own_only=False)))
        if rank == 0:
            _write(draft / "extra.bin", codec.pack(extra))
        if world > 1:
            dist.barrier()
        if rank == 0:
            self._commit(draft, final, step, generation, world)

    def dump(
        self,
        step: int,
        generation: int,
        protected: state.Protected,
        guard: state.BufferGuard,
        rank: int,
        shard: int | None,
        extra: Any = None,
    ) -> None:
        """Write this rank's part without talking to any other: its own small state, and its
        shard if it was chosen to. Sharded parts fit the same mesh only.

        :raises OSError: storage. :raises Superseded: see there.
        """
        self._fence(generation)
        draft = self.path / f"draft-{step:010d}-{generation}"
        draft.mkdir(parents=True, exist_ok=True)
        if shard is not None:
            name = f"shard-{shard}.pt" if _sharded(protected) else "whole.pt"
            _write_tensors(draft / name, protected)
            _write(draft / "extra.bin", codec.pack(extra))
        _write(draft / f"own-{rank}.bin", b"".join(state.record(protected, guard, own_only=False)))

    def dump_records(self, step: int, generation: int, records: Mapping[int, bytes | None]) -> None:
        """Write what ranks had of their own at the start of the step after ``step``, for those
        that cannot do so themselves: their processes are dead or new.

        :raises OSError: storage. :raises Superseded: see there.
        """
        self._fence(generation)
        draft = self.path / f"draft-{step:010d}-{generation}"
        for rank, record in records.items():
            if record is not None:
                draft.mkdir(parents=True, exist_ok=True)
                _write(draft / f"kept-{rank}.bin", record)

    def commit_dump(self, step: int, generation: int, world: int) -> None:
        """Give what all have written its name. By one rank, when all are done."""
        draft = self.path / f"draft-{step:010d}-{generation}"
        self._commit(draft, self.path / f"step-{step:010d}", step, generation, world)

    def _fence(self, generation: int) -> None:
        newest = max((mark["generation"] for mark in self.committed().values()), default=0)
        if newest > generation:
            raise Superseded(
                f"generation {newest} has committed in {self.path}; this is {generation}"
            )

    def _commit(self, draft: Path, final: Path, step: int, generation: int, world: int) -> None:
        self._fence(generation)
        mark = {"step": step, "generation": generation, "world": world, "format": 1}
        _write(draft / _MARK, json.dumps(mark).encode())
        _sync(draft)
        self._await_permit(generation, step)
        if final.exists():
            old = self.path / f"draft-old-{step:010d}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        draft.rename(final)
        _sync(self.path)
        self._prune(generation)

    def _await_permit(self, generation: int, step: int) -> None:
        if self.ask is None:
            return
        permit = self.ask(generation, step)
        if permit.until is None or time.monotonic() >= permit.until:
            why = permit.why or "the coordinator's word came too late"
            raise NotCommitted(f"the checkpoint of step {step} does not count: {why}")

    def _prune(self, generation: int) -> None:
        steps = sorted(self.committed())
        for step in steps[: -self.keep]:
            shutil.rmtree(self.path / f"step-{step:010d}", ignore_errors=True)
        for entry in self.path.glob("draft-*"):
            shutil.rmtree(entry, ignore_errors=True)

    def load(
        self,
        step: int,
        protected: state.Protected,
        guard: state.BufferGuard,
        rank: int,
        shard: int,
        kept: bytes | None = None,
    ) -> Any:
        """Put the state after ``step`` into the protected objects; returns its ``extra``.

        ``kept``: this rank's own record, in case the checkpoint was dumped without it. That of
        the checkpoint itself goes before.

        :raises StateMismatch: it was saved from other objects. :raises OSError: storage.
        """
        place = self.path / f"step-{step:010d}"
        part = place / f"shard-{shard}.pt"
        if part.exists():
            _read_tensors(part, protected)
        elif _sharded(protected):
            _load_sharded(place / "sharded", protected)
        else:
            _read_tensors(place / "whole.pt", protected)
        own = place / f"own-{rank}.bin"
        some = own if own.exists() else min(place.glob("own-*.bin"))
        random, small, buffers = state.split_record(some.read_bytes())
        if some != own:
            dumped = place / f"kept-{rank}.bin"
            if dumped.exists():
                kept = dumped.read_bytes()
            if kept is None:  # more ranks than when it was saved
                protected.load_small(small)
                return codec.unpack((place / "extra.bin").read_bytes())
            protected.load_small({**small, "own": {}})
            random, small, buffers = state.split_record(kept)
            small = {"own": small.get("own", {})}
        guard.load(buffers)
        protected.load_small(small)
        rng.restore(random)
        return codec.unpack((place / "extra.bin").read_bytes())


def _sharded(protected: state.Protected) -> bool:
    return any(state._is_dtensor(parameter) for parameter in protected.parameters())


def _write_tensors(path: Path, protected: state.Protected) -> None:
    words, tensors = protected.describe()
    with path.open("wb") as file:
        torch.save({"words": words, "tensors": [t.cpu() for t in tensors]}, file)
        file.flush()
        os.fsync(file.fileno())


def _read_tensors(path: Path, protected: state.Protected) -> None:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    places = protected.accept(saved["words"])
    if len(places) != len(saved["tensors"]):
        raise state.StateMismatch(f"{path} holds {len(saved['tensors'])} tensors")
    with torch.no_grad():
        for place, tensor in zip(places, saved["tensors"], strict=True):
            place.copy_(tensor)


def _trees(protected: state.Protected) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    optims = list(protected.optims.items())
    trees: dict[str, Any] = {"loose": dict(protected.loose)}
    for name, model in protected.models.items():
        mine = [(n, o) for n, o in optims if _belongs(o, model)]
        weights, options = get_state_dict(model, [o for _, o in mine])
        trees[f"model:{name}"] = weights
        if mine:
            trees[f"optim:{name}"] = options
    return trees


def _belongs(optim: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    ids = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in ids for group in optim.param_groups for p in group["params"])


def _save_sharded(path: Path, protected: state.Protected) -> None:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    dcp.save(_trees(protected), checkpoint_id=path)


def _load_sharded(path: Path, protected: state.Protected) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    trees = _trees(protected)
    dcp.load(trees, checkpoint_id=path)
    for name, model in protected.models.items():
        mine = [o for o in protected.optims.values() if _belongs(o, model)]
        set_state_dict(
            model,
            mine,
            model_state_dict=trees[f"model:{name}"],
            optim_state_dict=trees.get(f"optim:{name}", {}),
        )
    with torch.no_grad():
        for name, tensor in protected.loose.items():
            tensor.copy_(trees["loose"][name])


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
