"""Time that does not pass while this process is stopped (Ctrl-Z).

Whoever bounds how long something of the job may take counts by `now` and not by the clock of
the machine: the workers were stopped as well.
"""

from __future__ import annotations

import signal
import threading
import time

_pauses: list[tuple[float, float]] = []  # begin and end, monotonic seconds; oldest first

lock = threading.RLock()
"""Held while stopped. Threads that act on what is overdue hold it from look to act."""


def now() -> float:
    """Monotonic seconds, without those in which we were stopped."""
    return at(time.monotonic())


def at(moment: float) -> float:
    """What `now` was at a moment of the monotonic clock, past or present."""
    return moment - sum(min(end, moment) - begin for begin, end in _pauses if begin < moment)


def total() -> float:
    """Seconds stopped so far."""
    return sum(end - begin for begin, end in _pauses)


def stop_here() -> None:
    """Stop this process until somebody continues it (SIGCONT)."""
    with lock:
        begin = time.monotonic()
        # to this thread: it takes no further step before it is stopped
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        _pauses.append((begin, time.monotonic()))
