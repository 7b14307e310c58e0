"""Telling the exceptions of another package apart without importing it.

torch's handlers and contexts work here, so torch's own exception classes arrive
here. They are recognised by the name of a class in their ancestry.
"""

from __future__ import annotations


def is_named(error: BaseException, *names: str) -> bool:
    """Whether ``error`` is of a class with one of these names, or derives from one."""
    return any(cls.__name__ in names for cls in type(error).__mro__)


def is_signal(error: BaseException) -> bool:
    """Whether this is a ``SignalException``, ours or torch's."""
    return is_named(error, "SignalException")


def is_graceful_exit(error: BaseException) -> bool:
    """Whether this is a ``RendezvousGracefulExitError``, ours or torch's."""
    return is_named(error, "RendezvousGracefulExitError")


def is_store_error(error: BaseException) -> bool:
    """Whether a store gave up waiting or lost its connection, ours or torch's."""
    return is_named(error, "DistStoreError", "_DistStoreError", "DistError")
