"""One job's recovery, as pure decisions.

:func:`step` takes a :class:`Job`, an event and the time and gives the next :class:`Job` and
what has to be done. The rules are rows of :mod:`phalanx.recovery.table`. No I/O, no clock,
no thread, no log; needs neither gRPC nor protobuf. (:mod:`phalanx.recovery.episode` is the
other pure machine here: one episode as the coordinator of a job sees it.)
"""

from typing import Any

_HOME = {
    "Code": "words",
    "Fault": "model",
    "Job": "model",
    "JobConfig": "model",
    "Key": "model",
    "Node": "model",
    "Outcome": "model",
    "Signal": "model",
    "State": "model",
    "due": "machine",
    "step": "machine",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Lazy: who needs one machine does not pay for the other.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
