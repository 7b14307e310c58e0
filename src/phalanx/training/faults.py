"""What kind of fault an exception in a training step is."""

from __future__ import annotations

import re

import torch

from phalanx.recovery.ladder import Kind
from phalanx.training.groups import GroupBroken


class DeviceFault(RuntimeError):
    """Raise this (or a subclass) for a device error that doing the step again may cure."""


class NetworkFault(ConnectionError):
    """Raise this (or a subclass) for a network error that doing the step again may cure."""


_DEVICE = re.compile(
    r"UCE ERROR|HBM MULTI BIT ECC|uncorrectable ECC|HCCL OP RETRY FAILED|SUSPECT REMOTE ERROR"
    r"|UB LINK ERROR|HCCS LINK ERROR|NVLink error|unhandled system error"
)
_MEMORY = re.compile(r"out of memory|can't allocate memory|DefaultCPUAllocator: not enough memory")
_PEER = re.compile(
    r"gloo[/:]|Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|Application timeout caused pair closure|remote worker crashing|NCCL communicator was aborted"
    r"|FORCE STOP|generation \d+ is over|Timed out waiting \d+ms for (?:recv|send) operation"
)


def classify(error: BaseException) -> Kind:
    """`Kind.DEVICE`, `NETWORK`, `PEER`, `MEMORY` or, for all else, `BUG`.

    Looks at the exception and at what it was explicitly raised ``from``.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = _classify_one(current)
        if kind is not Kind.BUG:
            return kind
        current = current.__cause__
    return Kind.BUG


def _classify_one(error: BaseException) -> Kind:
    if isinstance(error, DeviceFault):
        return Kind.DEVICE
    if isinstance(error, GroupBroken):
        return Kind.PEER
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Kind.MEMORY
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return Kind.PEER
    if isinstance(error, ConnectionError):
        return Kind.NETWORK
    if isinstance(error, RuntimeError):
        text = str(error)
        if _MEMORY.search(text):
            return Kind.MEMORY
        if _DEVICE.search(text):
            return Kind.DEVICE
        if _PEER.search(text):
            return Kind.PEER
    return Kind.BUG
