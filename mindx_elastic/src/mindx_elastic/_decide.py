"""What a patched agent does in one tick: a pure function of what it sees.

The lines are those of the Elastic Agent's loop, in its order, as far as they can be known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

LIMIT = 1 << 20
FILE = "/user/restore/reset/config/reset.json"


class Action(Enum):
    """What to do now."""

    KEEP = "keep monitoring"
    SUCCEED = "all workers are done"
    KILL = "end all workers and fail"
    LEAVE = "end all workers gracefully and fail"
    RESTART_RANKS = "restart these ranks only"
    RESTART_ALL = "restart all workers"
    RECOVER = "a worker failed: ask the controller"


@dataclass(frozen=True)
class Reset:
    """reset.json as far as it matters."""

    faults: tuple[int, ...] = ()
    unrecovered: bool = False
    recovered: bool = False
    retry: int = 0
    flushing: bool = False
    graceful: bool = False
    restart_process: bool = False


@dataclass(frozen=True)
class Look:
    """What the agent sees in one tick. Ranks are global ones."""

    killed: bool = False
    reset: Reset = field(default_factory=Reset)
    before: Reset = field(default_factory=Reset)
    mine: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    all_done: bool = False
    in_place: bool = False
    node: int = 0


def decide(look: Look) -> tuple[Action, tuple[int, ...], str]:
    """(action, ranks, why)."""
    reset, before = look.reset, look.before
    if look.killed:
        return Action.KILL, (), "killMaster"
    if reset.graceful:
        return Action.LEAVE, (), "GracefulExit in reset.json"
    hit = tuple(rank for rank in reset.faults if rank in look.mine)
    if hit and reset.faults != before.faults and not reset.flushing:
        if reset.restart_process and look.in_place:
            return Action.RESTART_RANKS, hit, f"reset.json lists ranks {hit}, in place"
        return Action.KILL, hit, f"reset.json lists ranks {hit} of this node as faulty"
    if reset.retry > before.retry and not (reset.unrecovered or reset.recovered):
        return Action.RESTART_ALL, (), f"RetryTime grew to {reset.retry}"
    if reset.recovered and not reset.unrecovered and not before.recovered:
        return Action.RESTART_ALL, (), "all ranks are recovered (hot reset)"
    if look.all_done:
        return Action.SUCCEED, (), ""
    if look.failed:
        return Action.RECOVER, look.failed, f"ranks {look.failed} failed"
    return Action.KEEP, (), ""


def reset_path() -> str:
    """Where reset.json is."""
    return os.environ.get("PHALANX_RESET_FILE", FILE)


def read_reset(path: str | None = None) -> Reset:
    """The file, or an empty one when it is not there, no file, too large, or malformed."""
    path = path or reset_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return Reset()
    with os.fdopen(fd, "rb") as stream:
        try:
            data = stream.read(LIMIT + 1)
        except OSError:
            return Reset()
    if len(data) > LIMIT:
        return Reset()
    return parse_reset(data)


def parse_reset(data: bytes) -> Reset:
    """The same, from bytes."""
    try:
        body = json.loads(data)
        entries = body.get("RankList") or []
        states: Mapping[int, str] = {int(e["RankId"]): str(e.get("Status", "")) for e in entries}
        return Reset(
            tuple(sorted(rank for rank, status in states.items() if status == "fault")),
            "unrecovered" in states.values(),
            "recovered" in states.values(),
            int(body.get("RetryTime", 0)),
            bool(body.get("FaultFlushing", False)),
            int(body.get("GracefulExit", 0)) == 1,
            bool(body.get("RestartFaultProcess", False)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Reset()
