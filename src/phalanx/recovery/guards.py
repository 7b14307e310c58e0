"""The questions of the table: whether a rule applies to an event in a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.recovery import choice, words
from phalanx.recovery.model import (
    Fault,
    FaultCleared,
    FaultSeen,
    Job,
    NicSwitched,
    NodeReplaced,
    Report,
    State,
    Status,
    StopComplete,
    Strategies,
    StressTested,
    Subscribed,
)
from phalanx.recovery.turn import Guard, Turn
from phalanx.recovery.words import Code


def _level_ignored(turn: Turn, fault: Fault) -> bool:
    if fault.level in words.IGNORED_LEVELS:
        return True
    if fault.level in words.SUB_HEALTH_LEVELS:
        config = turn.job.config
        return not (config.sub_healthy == "graceExit" and choice.dump_only(config))
    return False


def seen(*faults: Fault) -> dict[tuple[int, int, str], int]:
    """The newest process of which each fault is known."""
    newest: dict[tuple[int, int, str], int] = {}
    for fault in faults:
        newest[fault.what] = max(fault.incarnation, newest.get(fault.what, -1))
    return newest


def joined(old: tuple[Fault, ...], new: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Both, with one entry per fault: a rank that fails over and over does not add up."""
    return tuple({fault.what: fault for fault in (*old, *new)}.values())


def new_faults(turn: Turn) -> tuple[Fault, ...]:
    """Those faults of the event that this job has not seen and that ask for a recovery."""
    event = turn.event
    if not isinstance(event, FaultSeen) or not turn.job.config.enabled:
        return ()
    job = turn.job
    if event.report and event.report in job.seen_reports:
        return ()
    known = seen(*job.faults, *job.waiting, *job.present)
    world = job.config.world_size
    return tuple(
        f
        for f in event.faults
        if f.incarnation > known.get(f.what, -1)
        and not _level_ignored(turn, f)
        and not (world and f.rank >= world)
    )


def fresh_ranks(turn: Turn) -> tuple[Fault, ...]:
    """New faults on nodes that scale-in has not already sent away."""
    gone = set(turn.job.isolated)
    return tuple(f for f in new_faults(turn) if turn.job.config.node_of(f.rank) not in gone)


def _worse(turn: Turn) -> bool:
    """The new faults change what is known: another rank, a normal fault on a retryable
    rank, or another process of the same rank."""
    job = turn.job
    known: dict[tuple[int, int], int] = {}  # (rank, type) to process
    for f in (*job.faults, *job.waiting):
        known[f.rank, f.kind] = max(f.incarnation, known.get((f.rank, f.kind), -1))
    return any(
        f.incarnation > max(known.get((f.rank, kind), -1) for kind in (f.kind, words.NORMAL))
        for f in new_faults(turn)
    )


def _fits(turn: Turn) -> bool:
    """The report answers the open signal of this state."""
    event, job = turn.event, turn.job
    assert isinstance(event, Report)
    if job.open is None:
        return False
    if event.key is not None:
        return event.key == job.open.key
    if (
        isinstance(event, Status)
        and job.state not in (State.CONTINUING, State.MIGRATING)  # nobody pins a name there
        and event.strategy not in _names_reported(job)
    ):
        return False
    ranks = {fault.rank for fault in (*job.faults, *job.waiting)}
    return not (event.ranks and ranks and ranks.isdisjoint(event.ranks))


def _names_reported(job: Job) -> tuple[str, ...]:
    """The strategy names with which a client may report the outcome of the open signal."""
    assert job.open is not None
    if job.open.key.signal in (words.SAVE_AND_EXIT,):
        return (words.DUMP,)
    if job.open.key.signal == words.FAULT_NODES_EXIT:
        return (words.DOWNGRADE,)
    if job.chosen == words.IN_PLACE and job.state is State.RESTARTING:
        return (words.RECOVER, words.IN_PLACE)
    return (job.open.key.strategy,)


def _code(turn: Turn) -> int:
    assert isinstance(turn.event, StopComplete | Status)
    return turn.event.code


def _answered(code: int) -> Guard:
    return lambda t: _fits(t) and _code(t) == code


def _cleared_now(turn: Turn, ask: Callable[[Job], bool]) -> bool:
    event = turn.event
    assert isinstance(event, FaultCleared)
    left = tuple(f for f in turn.job.present if f.source != event.source)
    return not ask(replace(turn.job, present=left))


def sub_health_node(turn: Turn) -> int | None:
    """The node that a sub-health fault asks to replace by a hot switch."""
    event, job = turn.event, turn.job
    assert isinstance(event, FaultSeen)
    if job.config.sub_healthy != "hotSwitch" or job.switch_off or not job.config.enabled:
        return None
    known = seen(*job.present)
    for fault in event.faults:
        node = job.config.node_of(fault.rank)
        if (
            fault.level in words.SUB_HEALTH_LEVELS
            and fault.what not in known
            and node is not None
            and (node != 0 or job.keyed)
        ):
            return node
    return None


def _restarted(turn: Turn) -> bool:
    """Whoever subscribes now came after the word to leave was given."""
    event, job = turn.event, turn.job
    assert isinstance(event, Subscribed)
    return job.delivered or (event.keyed and event.incarnation > job.incarnation)


def _sound(turn: Turn) -> bool:
    assert isinstance(turn.event, StressTested)
    return all(code in ("0", "1") for _, code in turn.event.codes)


def _all_back(turn: Turn) -> bool:
    event = turn.event
    assert isinstance(event, NodeReplaced)
    return set(turn.job.isolated) <= {*turn.job.replaced, event.node}


def _exit_only(turn: Turn) -> bool:
    assert isinstance(turn.event, Strategies)
    return _fits(turn) and set(turn.event.names) <= {words.EXIT}


GUARDS: dict[str, Guard] = {
    "new fault": lambda t: bool(new_faults(t)),
    "new fault, dump only": lambda t: bool(new_faults(t)) and choice.dump_only(t.job.config),
    "sub-health, hot switch": lambda t: not new_faults(t) and sub_health_node(t) is not None,
    "new fault elsewhere": lambda t: bool(fresh_ranks(t)),
    "worse, keyed client": lambda t: t.job.keyed and _worse(t) and rounds_left(t.job),
    "worse, keyed client, no round left": lambda t: t.job.keyed and _worse(t),
    "fits, 0": _answered(0),
    "fits, 0, may clear": lambda t: _answered(0)(t) and choice.may_clear(t.job),
    "fits, 0, faults waiting": lambda t: _answered(0)(t) and bool(t.job.waiting),
    "fits, 201": _answered(Code.EXIT_ISOLATE_RANKS),
    "fits, 404": _answered(Code.NOT_READY),
    "fits, 405": lambda t: _answered(Code.RECOVERABLE)(t) and rounds_left(t.job),
    "fits, 499": _answered(Code.CLIENT_ERROR),
    "fits": _fits,
    "fits, only exit": _exit_only,
    "nothing left to clear": lambda t: _cleared_now(t, choice.may_clear),
    "routes are back": lambda t: _cleared_now(t, choice.routes_converging),
    "client there": lambda t: t.job.subscribed,
    "restarted": _restarted,
    "NIC": lambda t: _fits(t) and t.job.maintenance is not None and t.job.maintenance.kind == "nic",
    "stress": _fits,
    "switched": lambda t: isinstance(t.event, NicSwitched) and t.event.ok,
    "sound": _sound,
    "not 0": lambda t: _code(t) != 0,
    "all back": _all_back,
    "awaited node": lambda t: (
        t.job.maintenance is not None and getattr(t.event, "node", None) == t.job.maintenance.node
    ),
    "switch allowed": lambda t: not t.job.switch_off,
    "awaited": lambda t: t.job.open is not None and getattr(t.event, "key", None) == t.job.open.key,
}


def rounds_left(job: Job) -> bool:
    return job.round < job.config.max_rounds
