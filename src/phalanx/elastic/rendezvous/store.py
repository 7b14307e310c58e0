"""A store inside this process, for agents that share it (threads, or one alone)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from phalanx.elastic.utils.store import DistStoreError, Store

__all__ = ["InProcessStore", "PrefixStore"]

_DEFAULT_TIMEOUT = timedelta(seconds=300)


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class InProcessStore:
    """Keys and values with torch's rules for stores; safe to use from many threads.

    Values are bytes; text is encoded as UTF-8. What waits raises
    :class:`~phalanx.elastic.utils.store.DistStoreError` (a ``RuntimeError``) after
    ``timeout``, which is 300 seconds at first.
    """

    def __init__(self, timeout: timedelta | float = _DEFAULT_TIMEOUT) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout = timedelta(seconds=_seconds(timeout))

    @property
    def timeout(self) -> timedelta:
        """How long ``get``, ``wait`` and ``multi_get`` wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Wait that long from now on; a plain number is in seconds."""
        self._timeout = timedelta(seconds=_seconds(timeout))

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value, over one that is there."""
        with self._changed:
            self._values[key] = _bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """A value, waiting for it to appear."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0; the new number. ``ValueError`` if it is not one."""
        with self._changed:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            self._changed.notify_all()
        return number

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value behind the one that is there."""
        with self._changed:
            self._values[key] = self._values.get(key, b"") + _bytes(value)
            self._changed.notify_all()

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put ``desired`` if the value is ``expected``; the value that is there then.

        An empty ``expected`` matches a key that is not there. Any other leaves such a key
        alone and comes back itself.
        """
        wanted = _bytes(expected)
        with self._changed:
            present = self._values.get(key)
            if present == wanted or (present is None and not wanted):
                present = self._values[key] = _bytes(desired)
                self._changed.notify_all()
            return wanted if present is None else present

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys are there now."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there."""
        wanted = list(keys)
        with self._changed:
            self._await(wanted, timeout)

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Several values, waiting for all to appear."""
        wanted = list(keys)
        with self._changed:
            self._await(wanted, None)
            return [self._values[key] for key in wanted]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put several values at once. ``ValueError`` if there are not as many as keys."""
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys, but {len(values)} values")
        with self._changed:
            self._values.update(zip(keys, map(_bytes, values), strict=True))
            self._changed.notify_all()

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        with self._changed:
            return len(self._values)

    def has_extended_api(self) -> bool:
        """Whether ``append``, ``multi_get`` and ``multi_set`` are there: yes."""
        return True

    def _await(self, keys: list[str], timeout: timedelta | float | None) -> None:
        allowed = _seconds(self._timeout if timeout is None else timeout)
        deadline = time.monotonic() + allowed
        while True:
            missing = [key for key in keys if key not in self._values]
            if not missing:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                raise DistStoreError(f"wait timeout after {allowed:g} s, keys missing: {shown}")
            self._changed.wait(left)


class PrefixStore:
    """Another store's keys that begin with ``<prefix>/``, without it."""

    def __init__(self, prefix: str, store: InProcessStore | PrefixStore) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        """What stands before every key."""
        return self._prefix

    @property
    def underlying_store(self) -> InProcessStore | PrefixStore:
        """The store that holds the keys."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """That of the underlying store."""
        return self._store.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Sets that of the underlying store."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._full(key), value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(self._full(key), expected, desired)

    def check(self, keys: Iterable[str]) -> bool:
        return self._store.check(map(self._full, keys))

    def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        self._store.wait(map(self._full, keys), timeout)

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        return self._store.multi_get(map(self._full, keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set([self._full(key) for key in keys], values)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        return True

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _conforms(store: InProcessStore | PrefixStore) -> Store:
    return store  # for the type checker: both are stores to the agent
