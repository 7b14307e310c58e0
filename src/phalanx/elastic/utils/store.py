"""Barriers and exchanges over a store of any make.

A store is whatever has ``set, get, add, wait, multi_get, multi_set, set_timeout`` and
``timeout``: torch's stores and :class:`phalanx.elastic.rendezvous.store.InProcessStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from .foreign import is_store_error

__all__ = ["DistStoreError", "Store", "barrier", "get_all", "store_timeout", "synchronize"]

_NUM_MEMBERS = "/num_members"
_LAST_MEMBER_CHECKIN = "/last_member"
_TRACE = "/TRACE"
_TRACING_GATE = "/TRACING_GATE"
_MAX_TRACE_MISSING_RANKS = 16
_ANY_VALUE = "<val_ignored>"


class DistStoreError(RuntimeError):
    """A store did not answer in time. torch's class of this name is treated alike."""


class Store(Protocol):
    """What the agent asks of a store."""

    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: Any, timeout: timedelta = ..., /) -> Any: ...
    def multi_get(self, keys: Any, /) -> list[bytes]: ...
    def multi_set(self, keys: Any, values: Any, /) -> Any: ...
    def set_timeout(self, timeout: timedelta, /) -> Any: ...
    @property
    def timeout(self) -> timedelta: ...


@contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Give the store another timeout (seconds) for the body, and its own again afterwards."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of ``<prefix>0`` to ``<prefix><world_size - 1>``, waiting for all of them.

    Rank 0 leaves last: it may be the host of the store.
    """
    values = store.multi_get([f"{prefix}{i}" for i in range(world_size)])
    last = _barrier_nonblocking(store=store, world_size=world_size, key_prefix=f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return values


def synchronize(
    store: Store,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Exchange ``data`` among ``world_size`` members; each gets everybody's, by rank.

    A prefix serves once: nothing is deleted. ``timeout`` is in seconds.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until ``world_size`` members have called this with the same ``key_prefix``.

    One addition and one wait for each member. A prefix serves once. With ``rank``
    the error of a barrier that nobody completed names the missing ranks, put into
    words by ``rank_tracing_decoder``; rank 0 looks for ``trace_timeout`` seconds.

    Raises the store's own error (:class:`DistStoreError` or torch's) after
    ``barrier_timeout`` seconds.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    before = store.timeout
    store.set_timeout(timedelta(seconds=barrier_timeout))
    last = _barrier_nonblocking(store=store, world_size=world_size, key_prefix=key_prefix)
    try:
        store.wait([last])
    except RuntimeError as error:
        if rank is None or not is_store_error(error):
            raise
        missing = _try_detecting_missing_ranks(
            store,
            world_size,
            key_prefix,
            rank,
            rank_tracing_decoder or str,
            trace_timeout,
        )
        if missing is None:
            raise
        raise type(error)(
            f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
            f"(world_size={world_size}, missing_ranks=[{', '.join(missing)}], "
            f"timeout={barrier_timeout})"
        ) from None
    # Only now: after an error PyTorch's leaves the store as it is, and is held to it by tests.
    store.set_timeout(before)


def _barrier_nonblocking(store: Store, world_size: int, key_prefix: str) -> str:
    """Check in at a barrier; the key that appears once everybody has is the answer."""
    last = key_prefix + _LAST_MEMBER_CHECKIN
    if store.add(key_prefix + _NUM_MEMBERS, 1) == world_size:
        store.set(last, _ANY_VALUE)
    return last


def _try_detecting_missing_ranks(
    store: Store,
    world_size: int,
    key_prefix: str,
    rank: int,
    rank_decoder: Callable[[int], str],
    trace_timeout: float,
) -> Iterable[str] | None:
    """Who did not come to the barrier: rank 0 finds out, the others wait until it has."""
    store.set(f"{key_prefix}{rank}{_TRACE}", _ANY_VALUE)
    gate = f"{key_prefix}{_TRACING_GATE}"
    if rank != 0:
        if _came(store, [gate]):
            return [f"[<check rank 0 ({rank_decoder(0)}) for missing rank info>]"]
        return None
    missing: list[str] = []
    for other in range(1, world_size):
        # All share one allowance: once it is spent on a missing one, the rest are only looked at.
        patience = timedelta(milliseconds=1) if missing else timedelta(seconds=trace_timeout)
        if not _came(store, [f"{key_prefix}{other}{_TRACE}"], patience):
            missing.append(rank_decoder(other))
            if len(missing) == _MAX_TRACE_MISSING_RANKS:
                break
    store.set(gate, _ANY_VALUE)
    return missing


def _came(store: Store, keys: Sequence[str], patience: timedelta | None = None) -> bool:
    try:
        if patience is None:
            store.wait(list(keys))
        else:
            store.wait(list(keys), patience)
    except RuntimeError as error:
        if not is_store_error(error):
            raise
        return False
    return True
