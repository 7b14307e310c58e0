"""What is protected, and how it is told, handed over, kept and put back.

*Tensors* are parameters and buffers of the models, the optimizers' state, and single tensors;
of a DTensor its local part. *Small state* is everything else: options of the optimizers'
parameter groups, and whatever has ``state_dict`` and ``load_state_dict``. Of the small state
some is the rank's *own* (random states, samplers, data positions): a replacement gets that of
its predecessor, everything else comes from a replica.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.process.slate import Slate
from phalanx.training import codec, rng
from phalanx.training.data import Batches, deal
from phalanx.training.wrappers import _is_fsdp

#: tensors smaller than this travel together, in buffers of at most `_TOGETHER`
_WHOLE = 4 << 20
_TOGETHER = 32 << 20
_MAX_MANIFEST = 256 << 20
_OWN_KINDS = ("Sampler", "DataLoader", "StatefulDataLoader", "Batches")


class StateMismatch(RuntimeError):
    """This rank's objects do not fit the state that another rank hands over."""


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that is in this process."""
    part: Any = tensor.detach()
    if hasattr(part, "_local_tensor"):
        part = part._local_tensor
    return part  # type: ignore[no-any-return]


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


class Protected:
    """The objects given to ``protect``."""

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optims: dict[str, torch.optim.Optimizer] = {}
        self.small: dict[str, Any] = {}
        self.own: set[str] = set()
        self.loose: dict[str, torch.Tensor] = {}

    def add(self, name: str, thing: Any, own: bool | None = None) -> None:
        """:raises TypeError: something that cannot be protected; says what would do."""
        if isinstance(thing, nn.Module):
            self.models[name] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.optims[name] = thing
        elif isinstance(thing, torch.Tensor):
            self.loose[name] = thing
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            try:
                codec.pack(thing.state_dict())
            except codec.NotPackable as error:
                raise TypeError(
                    f"protect({name}=...): {error}; its state_dict() must hold plain values, "
                    f"tensors or numpy arrays"
                ) from None
            self.small[name] = thing
            if own is None:
                own = any(kind.__name__ in _OWN_KINDS for kind in type(thing).__mro__)
            if own:
                self.own.add(name)
        elif type(thing).__name__ in ("DistributedSampler", "RandomSampler", "SequentialSampler"):
            # Nothing in it changes but the epoch.
            self.small[name] = _EpochOnly(thing)
            self.own.add(name)
        else:
            raise TypeError(
                f"protect({name}=...) cannot protect a {type(thing).__name__}: give a module, an "
                f"optimizer, a tensor, or an object with state_dict() and load_state_dict()"
            )

    def assume(self, rank: int, world: int, before: int) -> None:
        """What deals out data by rank is told another one, or another number of ranks than
        ``before``."""
        for thing in self.small.values():
            if isinstance(thing, Batches):
                thing.assume(rank, world)
            elif isinstance(thing, _EpochOnly):
                deal(thing._sampler, rank, world, before=before)

    def forget(self) -> None:
        """A step begins: the data of those before will not be asked for again."""
        for thing in self.small.values():
            if isinstance(thing, Batches):
                thing.forget()

    def redeal(self) -> None:
        """What is left of the data goes to the ranks there are now."""
        for thing in self.small.values():
            if isinstance(thing, Batches):
                thing.redeal()

    # -- replicas ------------------------------------------------------------

    def shard(self, rank: int, world: int, given: Sequence[Sequence[int]] | None) -> int:
        """A number that is equal on ranks that hold the same part of the state.

        ``given``: groups of replicas. Else: where parameters are DTensors, the coordinates on
        those mesh dimensions along which they are not replicated; with DDP the ranks of its
        process group; else every rank is alone.
        """
        if given is not None:
            for group in given:
                if rank in group:
                    return min(group)
            return world + rank
        marks: set[str] = set()
        for name, model in self.models.items():
            covered: set[int] = set()
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    process_group: Any = module.process_group
                    members = torch.distributed.get_process_group_ranks(process_group)
                    marks.add(f"{name}:ddp:{sorted(members)}")
                    covered.update(id(p) for p in module.parameters())
            for parameter in model.parameters():
                if _is_dtensor(parameter):
                    some: Any = parameter
                    mesh = some.device_mesh
                    where = mesh.get_coordinate() or []
                    coordinates = [
                        (dim, where[dim])
                        for dim, placement in enumerate(some.placements)
                        if not placement.is_replicate()
                    ]
                    marks.add(f"{name}:mesh:{mesh.mesh.flatten().tolist()}:{coordinates}")
                elif id(parameter) not in covered and world > 1:
                    if any(_is_fsdp(module) for module in model.modules()):
                        continue  # not sharded, the same on all ranks of the mesh
                    return world + rank
        if not marks:
            return world + rank if world > 1 else 0
        digest = hashlib.sha256("|".join(sorted(marks)).encode()).digest()
        return int(struct.unpack("<q", digest[:8])[0] >> 2)

    def shards(self, world: int, given: Sequence[Sequence[int]] | None) -> int:
        """How many different shards there are in the whole job (see `shard`)."""
        if given is not None:
            return len(given) + world - sum(map(len, given))
        wrapped = [
            module
            for model in self.models.values()
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        ]
        for parameter in self.parameters():
            if _is_dtensor(parameter):
                some: Any = parameter
                mesh = some.device_mesh
                count = 1
                for dim, placement in enumerate(some.placements):
                    if not placement.is_replicate():
                        count *= mesh.size(dim)
                return int(count * (world // mesh.size()))
        if wrapped:
            return world // max(1, min(dist_size(module) for module in wrapped))
        return world

    # -- small state ---------------------------------------------------------

    def small_state(self) -> dict[str, Any]:
        """Everything that is not tensors, but the random states."""
        return {
            "own": {n: t.state_dict() for n, t in self.small.items() if n in self.own},
            "all": {n: t.state_dict() for n, t in self.small.items() if n not in self.own},
            "groups": {n: _options(o) for n, o in self.optims.items()},
        }

    def own_state(self) -> dict[str, Any]:
        return {"own": {n: self.small[n].state_dict() for n in self.own}}

    def load_small(self, state: dict[str, Any]) -> None:
        """Put back what is in ``state``; what is not there stays.

        :raises StateMismatch: it is for other objects.
        """
        for part in ("own", "all"):
            for name, value in state.get(part, {}).items():
                if name not in self.small:
                    raise StateMismatch(f"state for {name!r}, which is not protected here")
                self.small[name].load_state_dict(value)
        for name, groups in state.get("groups", {}).items():
            optim = self.optims.get(name)
            if optim is None or len(optim.param_groups) != len(groups):
                raise StateMismatch(f"optimizer {name!r} has other parameter groups here")
            for group, options in zip(optim.param_groups, groups, strict=True):
                group.update(options)

    # -- tensors -------------------------------------------------------------

    def parameters(self) -> Iterable[torch.Tensor]:
        for model in self.models.values():
            yield from model.parameters()

    def describe(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """What tensors there are, in words, and the tensors, in the same order."""
        tensors: list[torch.Tensor] = []
        words: dict[str, Any] = {"models": {}, "optims": {}, "loose": {}}

        def note(tensor: Any) -> list[Any]:
            part = local(tensor)
            tensors.append(part)
            return [
                codec.dtype_name(part.dtype),
                list(part.shape),
                part.device.type,
                _is_dtensor(tensor),
            ]

        for name, model in self.models.items():
            words["models"][name] = [[n, *note(t)] for n, t in _named(model)]
        for name, optim in self.optims.items():
            state = []
            for index, parameter in enumerate(_parameters(optim)):
                entries: list[list[Any]] = []
                for key, value in optim.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        entries.append([key, "t", *note(value)])
                    else:
                        entries.append([key, "v", value])
                if entries:
                    state.append([index, entries])
            words["optims"][name] = state
        for name, tensor in self.loose.items():
            words["loose"][name] = note(tensor)
        return words, tensors

    def accept(self, words: dict[str, Any]) -> list[torch.Tensor]:
        """Make this rank's objects have the tensors that ``words`` describe.

        Returns where the values go, in order. Optimizer state that is not there yet is made.

        :raises StateMismatch: names, shapes or types differ.
        """
        places: list[torch.Tensor] = []
        if set(words["models"]) != set(self.models) or set(words["optims"]) != set(self.optims):
            raise StateMismatch("other models or optimizers are protected here")
        for name, entries in words["models"].items():
            mine = _named(self.models[name])
            if [n for n, _ in mine] != [entry[0] for entry in entries]:
                raise StateMismatch(f"model {name!r} has other parameters or buffers here")
            for (title, tensor), entry in zip(mine, entries, strict=True):
                part = local(tensor)
                if not _fits(part, entry[1], entry[2]):
                    raise StateMismatch(
                        f"{name}.{title} is {part.dtype} {list(part.shape)} here, "
                        f"{entry[1]} {entry[2]} there"
                    )
                places.append(part)
        for name, state in words["optims"].items():
            optim = self.optims[name]
            parameters = _parameters(optim)
            held = {index for index, _ in state}
            for index, parameter in enumerate(parameters):
                if index not in held:
                    optim.state.pop(parameter, None)
            for index, entries in state:
                if not 0 <= index < len(parameters):
                    raise StateMismatch(f"optimizer {name!r} has fewer parameters here")
                self._accept_entries(optim, parameters[index], entries, places)
        for name, entry in words["loose"].items():
            if name not in self.loose or not _fits(local(self.loose[name]), entry[0], entry[1]):
                raise StateMismatch(f"tensor {name!r} is another one here")
            places.append(local(self.loose[name]))
        return places

    @staticmethod
    def _accept_entries(
        optim: torch.optim.Optimizer, parameter: Any, entries: Any, places: list[torch.Tensor]
    ) -> None:
        mine: dict[str, Any] = optim.state[parameter]
        fresh: dict[str, Any] = {}
        for key, kind, *rest in entries:
            if kind == "v":
                fresh[key] = rest[0]
                continue
            dtype, shape, device, sharded = rest
            value = mine.get(key)
            if not isinstance(value, torch.Tensor) or not _fits(local(value), dtype, shape):
                place = local(parameter).device if device != "cpu" else torch.device("cpu")
                value = torch.zeros(shape, dtype=codec.dtype_of(dtype), device=place)
                if sharded:
                    value = _sharded_like(parameter, value)
            fresh[key] = value
            places.append(local(value))
        mine.clear()
        mine.update(fresh)


def dist_size(module: Any) -> int:
    return int(torch.distributed.get_world_size(module.process_group))


class _EpochOnly:
    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": getattr(self._sampler, "epoch", 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(state["epoch"])


def _sharded_like(parameter: Any, part: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _fits(tensor: torch.Tensor, dtype: str, shape: Sequence[int]) -> bool:
    return codec.dtype_name(tensor.dtype) == dtype and list(tensor.shape) == list(shape)


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _parameters(optim: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _options(optim: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optim.param_groups]


# -- one rank's record of the start of a step ---------------------------------

BEGIN = 1  #: as it was when the step began
AFTER = 2  #: as the rank's own state was when the update of the step before began


_LENGTHS = struct.Struct("<III")


def record(protected: Protected, guard: BufferGuard, *, own_only: bool) -> list[bytes]:
    """Random states, small state, and the buffers that change in training (with DDP they
    differ from rank to rank, so no replica has them)."""
    random = rng.capture()
    small = codec.pack(protected.own_state() if own_only else protected.small_state())
    buffers = guard.save()
    return [_LENGTHS.pack(len(random), len(small), len(buffers)), random, small, buffers]


def split_record(body: bytes) -> tuple[bytes, dict[str, Any], bytes]:
    """Random states, small state, buffers. :raises ValueError: not a record."""
    try:
        random, small, buffers = _LENGTHS.unpack_from(body)
    except struct.error:
        raise ValueError("a record that is too short") from None
    at = _LENGTHS.size
    if len(body) < at + random + small + buffers:
        raise ValueError("a record that was cut off")
    return (
        body[at : at + random],
        codec.unpack(body[at + random : at + random + small]),
        body[at + random + small : at + random + small + buffers],
    )


# -- buffers: changed by the forward pass, so put back when a step is left -----


class BufferGuard:
    """The models' buffers as they were when the step began.

    Those that change go into the rank's record; of the others there is a copy, in case they
    begin to. Which change is seen by their version counters; batch norm's kernels do not move
    those, so its buffers are always taken.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._buffers: list[torch.Tensor] = []
        self._changing: list[int] = []
        for model in models:
            norms: set[int] = set()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    norms.update(id(buffer) for buffer in module.buffers(recurse=False))
            for buffer in model.buffers():
                if id(buffer) in norms:
                    self._changing.append(len(self._buffers))
                self._buffers.append(local(buffer))
        self._memory = [buffer.data_ptr() for buffer in self._buffers]
        self._versions = [buffer._version for buffer in self._buffers]
        self._copies = {
            index: buffer.clone()
            for index, buffer in enumerate(self._buffers)
            if index not in self._changing
        }
        self._saved: bytes | None = None
        self._saved_versions: list[int] = []
        self._staging: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []

    def covers(self, models: Iterable[nn.Module]) -> bool:
        """Whether these are still the same buffers: one that was replaced by a new tensor
        instead of being changed in place cannot be put back."""
        now = [local(buffer).data_ptr() for model in models for buffer in model.buffers()]
        return self._memory == now

    def begin(self) -> None:
        """A step begins: find out which buffers have begun to change."""
        for index in list(self._copies):
            if self._buffers[index]._version != self._versions[index]:
                del self._copies[index]
                self._changing.append(index)
                self._staging.clear()
                self._saved = None

    def forward_ran(self) -> None:
        """A model was called, so what was saved before is old."""
        self._saved = None

    def save(self) -> bytes:
        """Those that change, as bytes. Made again only when something may have changed them."""
        if not self._changing:
            return b""
        versions = [self._buffers[index]._version for index in self._changing]
        if self._saved is not None and versions == self._saved_versions:
            return self._saved
        if not self._staging:
            self._stage()
        parts = [struct.pack(f"<{len(self._changing) + 1}I", len(self._changing), *self._changing)]
        for flat, views, buffers in self._staging:
            torch._foreach_copy_(views, buffers)
            parts.append(codec.as_bytes(flat).cpu().numpy().tobytes())
        self._saved, self._saved_versions = b"".join(parts), versions
        return self._saved

    def _stage(self) -> None:
        """Memory to gather them in: one piece for each run of the same type."""
        self._changing.sort(key=lambda i: (str(self._buffers[i].dtype), i))
        runs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for index in self._changing:
            buffer = self._buffers[index]
            runs.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, device), buffers in runs.items():
            sizes = [buffer.numel() for buffer in buffers]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            views = [
                view.view(buffer.shape)
                for view, buffer in zip(torch.split(flat, sizes), buffers, strict=True)
            ]
            self._staging.append((flat, views, buffers))

    def load(self, saved: bytes) -> None:
        """Put back what `save` gave, and those that were not meant to change.

        :raises StateMismatch: other buffers.
        """
        self._saved = None
        with torch.no_grad():
            for index, copy in self._copies.items():
                if self._buffers[index]._version != self._versions[index]:
                    self._buffers[index].copy_(copy)
                    self._versions[index] = self._buffers[index]._version
            if not saved:
                return
            (count,) = struct.unpack_from("<I", saved)
            indices = struct.unpack_from(f"<{count}I", saved, 4)
            if max(indices) >= len(self._buffers):
                raise StateMismatch("the record has more buffers than the models")
            places = [self._buffers[index] for index in indices]
            sizes = [place.numel() * place.element_size() for place in places]
            at = 4 + 4 * count
            if len(saved) != at + sum(sizes):
                raise StateMismatch("the record has other buffers than the models")
            for place, size in zip(places, sizes, strict=True):
                if size:
                    part = torch.frombuffer(bytearray(saved[at : at + size]), dtype=torch.uint8)
                    place.copy_(part.view(place.dtype).reshape(place.shape))
                at += size


# -- handing over --------------------------------------------------------------


def _loads(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Which tensors travel together: large ones alone, the others in buffers, by kind of device
    in order. Depends on sizes only, so both sides come to the same."""
    loads: list[list[int]] = []
    open_load: list[int] = []
    size = 0
    device = ""
    for index, tensor in enumerate(tensors):
        length = tensor.numel() * tensor.element_size()
        if length == 0:
            continue
        if length >= _WHOLE:
            loads.append([index])
            continue
        if open_load and (size + length > _TOGETHER or tensor.device.type != device):
            loads.append(open_load)
            open_load, size = [], 0
        open_load.append(index)
        size += length
        device = tensor.device.type
    if open_load:
        loads.append(open_load)
    return loads


def _gathered(tensors: list[torch.Tensor]) -> torch.Tensor:
    parts = [codec.as_bytes(tensor.contiguous()) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def send(group: Any, receivers: Sequence[int], protected: Protected, extra: dict[str, Any]) -> int:
    """Hand all tensors and ``extra`` to ``receivers`` (group ranks). Returns bytes per receiver."""
    words, tensors = protected.describe()
    head = torch.frombuffer(bytearray(codec.pack({"words": words, **extra})), dtype=torch.uint8)
    length = torch.tensor([head.numel()], dtype=torch.int64)
    total = head.numel()
    for receiver in receivers:
        group.send([length], receiver, 0).wait()
        group.send([head], receiver, 0).wait()
    for load in _loads(tensors):
        data = _gathered([tensors[index] for index in load])
        total += data.numel()
        works = [group.send([data], receiver, 0) for receiver in receivers]
        for work in works:
            work.wait()
    return total


def receive(group: Any, source: int, protected: Protected) -> dict[str, Any]:
    """Take all tensors from ``source``; returns its ``extra``.

    :raises StateMismatch: what comes does not fit. :raises RuntimeError: the source is gone.
    """
    length = torch.zeros(1, dtype=torch.int64)
    group.recv([length], source, 0).wait()
    size = int(length.item())
    if not 0 < size <= _MAX_MANIFEST:
        raise StateMismatch(f"a description of {size} bytes from rank {source}")
    head = torch.empty(size, dtype=torch.uint8)
    group.recv([head], source, 0).wait()
    extra: dict[str, Any] = codec.unpack(head.numpy().tobytes())
    places = protected.accept(extra.pop("words"))
    with torch.no_grad():
        for load in _loads(places):
            _receive_load(group, source, [places[index] for index in load])
    return extra


def _receive_load(group: Any, source: int, places: list[torch.Tensor]) -> None:
    if len(places) == 1 and places[0].is_contiguous():
        group.recv([codec.as_bytes(places[0])], source, 0).wait()
        return
    sizes = [place.numel() * place.element_size() for place in places]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=places[0].device)
    group.recv([data], source, 0).wait()
    at = 0
    for place, size in zip(places, sizes, strict=True):
        # Cloned, since a view as a wider type needs an aligned start.
        part = data[at : at + size].clone().view(place.dtype).reshape(place.shape)
        place.copy_(part)
        at += size


# -- snapshots: all tensors in shared memory -----------------------------------


def snapshot_size(protected: Protected) -> int:
    """Bytes of one snapshot, with some room for optimizer state that grows."""
    words, tensors = protected.describe()
    total = sum(_aligned(t.numel() * t.element_size()) for t in tensors)
    return total + 4 * len(codec.pack(words)) + (1 << 20)


def take_snapshot(
    slate: Slate, step: int, protected: Protected, small: Sequence[bytes], extra: Any = None
) -> None:
    """Write all tensors, ``small`` (a `record`) and ``extra`` as the state after ``step``.

    :raises ValueError: it does not fit any more.
    """
    words, tensors = protected.describe()
    head = codec.pack({"words": words, "small": b"".join(small), "extra": extra})
    total = (
        8 + _aligned(8 + len(head)) + sum(_aligned(t.numel() * t.element_size()) for t in tensors)
    )
    if total > slate.capacity:
        raise ValueError(f"a snapshot of {total} bytes does not fit into {slate.capacity}")
    slot = slate.slot_for(step)
    start = slate.begin(slot)
    buffer = slate.buffer
    struct.pack_into("<Q", buffer, start, len(head))
    buffer[start + 8 : start + 8 + len(head)] = head
    at = start + _aligned(8 + len(head))
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            view = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=at)
            view.copy_(codec.as_bytes(tensor.contiguous()))
        at += _aligned(size)
    slate.commit(slot, step, at - start, 0)


def load_snapshot(slate: Slate, step: int, protected: Protected) -> tuple[bytes, Any]:
    """Put the tensors back; returns the `record` and the ``extra`` that were saved with them.

    :raises StateMismatch: it is not there, or for other objects.
    """
    found = slate.where(step)
    if found is None:
        raise StateMismatch(f"no snapshot of step {step}")
    start, _ = found
    buffer = slate.buffer
    (length,) = struct.unpack_from("<Q", buffer, start)
    head = codec.unpack(buffer[start + 8 : start + 8 + length])
    at = start + _aligned(8 + length)
    with torch.no_grad():
        for place in protected.accept(head["words"]):
            size = place.numel() * place.element_size()
            if size:
                view = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=at)
                place.copy_(view.view(place.dtype).reshape(place.shape))
            at += _aligned(size)
    return head["small"], head["extra"]


def _aligned(size: int) -> int:
    return (size + 63) // 64 * 64


__all__ = ["Batches", "Protected", "StateMismatch"]
