"""Processes that are to stand back for a while behind those that compute."""

from __future__ import annotations

import os
import threading
from functools import lru_cache

from phalanx.process import tree

STEP = 10
"""By how much the niceness of one that stands back is higher than our own."""


@lru_cache(maxsize=1)
def may_raise() -> bool:
    """Whether we may put back a priority that we have lowered: most users may not.

    Tried on a thread, with which the change ends.
    """
    found: list[bool] = []

    def attempt() -> None:
        own = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, own)
        try:
            os.setpriority(os.PRIO_PROCESS, own, before + 1)
            os.setpriority(os.PRIO_PROCESS, own, before)
        except OSError:
            return
        found.append(os.getpriority(os.PRIO_PROCESS, own) == before)

    try:
        thread = threading.Thread(target=attempt, name="phalanx-priority", daemon=True)
        thread.start()
    except RuntimeError:  # no more threads for this user
        return False
    thread.join()
    return found == [True]


def lower(pid: int) -> None:
    """Have a process, with all that it starts, stand back; only if that can be undone."""
    if may_raise():
        _set(pid, os.getpriority(os.PRIO_PROCESS, 0) + STEP)


def restore(pid: int) -> None:
    """Undo `lower`, for what the process has started as well."""
    if may_raise():
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for one in (pid, *(entry.pid for entry in tree.descendants(pid))):
            _set(one, own)


def _set(pid: int, niceness: int) -> None:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return  # it is dead
    for thread in map(int, threads):
        try:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
        except OSError:
            pass  # ended meanwhile
