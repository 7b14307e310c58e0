"""One job's state machine: :func:`step` takes a state and an event, gives the next.

The rules are the rows of :mod:`phalanx.recovery.table`; here is what their words mean:
``GUARDS`` (questions), ``ACTIONS`` (changes) and ``ENTRIES`` (what entering a state does).
Nothing here reads a clock, waits, or talks to anybody: times come in as seconds of wall
clock, what has to be done goes out as effects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b

from phalanx.recovery import choice, words
from phalanx.recovery.model import (
    Configured,
    Effect,
    Event,
    Fault,
    FaultCleared,
    FaultSeen,
    GiveUp,
    HotSwitch,
    Job,
    Key,
    Maintenance,
    NicSwitched,
    NodeReplaced,
    Outcome,
    Record,
    Report,
    ResetFile,
    Send,
    Signal,
    State,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    StressTested,
    Subscribed,
    SwitchNic,
    Tell,
    ToOperator,
    ToWorkers,
)
from phalanx.recovery.words import Code

_SEEN = 32  # remembered report ids per job
_ANSWERED = 8  # remembered keyed reports per job
_FIELDS = frozenset(f.name for f in fields(Job))


@dataclass
class Turn:
    """The working copy of one step."""

    job: Job
    event: Event
    now: float
    effects: list[Effect] = field(default_factory=list)
    code: int = 0
    info: str = ""
    target: State | None = None  # where DECIDE came out

    def set(self, **changes: object) -> None:
        # dataclasses.replace without its cost: this is most of what a step does.
        assert changes.keys() <= _FIELDS, changes
        job = object.__new__(Job)
        job.__dict__.update(self.job.__dict__, **changes)
        self.job = job

    def record(self, kind: str, **data: object) -> None:
        self.effects.append(Record(kind, data))


# ------------------------------------------------------------------ guards

Guard = Callable[[Turn], bool]
Action = Callable[[Turn], None]


def _level_ignored(turn: Turn, fault: Fault) -> bool:
    if fault.level in words.IGNORED_LEVELS:
        return True
    if fault.level in words.SUB_HEALTH_LEVELS:
        config = turn.job.config
        return not (config.sub_healthy == "graceExit" and choice.dump_only(config))
    return False


def _seen(*faults: Fault) -> dict[tuple[int, int, str], int]:
    """The newest process of which each fault is known."""
    seen: dict[tuple[int, int, str], int] = {}
    for fault in faults:
        seen[fault.what] = max(fault.incarnation, seen.get(fault.what, -1))
    return seen


def _joined(old: tuple[Fault, ...], new: tuple[Fault, ...]) -> tuple[Fault, ...]:
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
    seen = _seen(*job.faults, *job.waiting, *job.present)
    world = job.config.world_size
    return tuple(
        f
        for f in event.faults
        if f.incarnation > seen.get(f.what, -1)
        and not _level_ignored(turn, f)
        and not (world and f.rank >= world)
    )


def _fresh_ranks(turn: Turn) -> tuple[Fault, ...]:
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


def _sub_health_node(turn: Turn) -> int | None:
    """The node that a sub-health fault asks to replace by a hot switch."""
    event, job = turn.event, turn.job
    assert isinstance(event, FaultSeen)
    if job.config.sub_healthy != "hotSwitch" or job.switch_off or not job.config.enabled:
        return None
    seen = _seen(*job.present)
    for fault in event.faults:
        node = job.config.node_of(fault.rank)
        if (
            fault.level in words.SUB_HEALTH_LEVELS
            and fault.what not in seen
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
    "sub-health, hot switch": lambda t: not new_faults(t) and _sub_health_node(t) is not None,
    "new fault elsewhere": lambda t: bool(_fresh_ranks(t)),
    "worse, keyed client": lambda t: t.job.keyed and _worse(t) and _rounds_left(t.job),
    "worse, keyed client, no round left": lambda t: t.job.keyed and _worse(t),
    "fits, 0": _answered(0),
    "fits, 0, may clear": lambda t: _answered(0)(t) and choice.may_clear(t.job),
    "fits, 0, faults waiting": lambda t: _answered(0)(t) and bool(t.job.waiting),
    "fits, 201": _answered(Code.EXIT_ISOLATE_RANKS),
    "fits, 404": _answered(Code.NOT_READY),
    "fits, 405": lambda t: _answered(Code.RECOVERABLE)(t) and _rounds_left(t.job),
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


def _rounds_left(job: Job) -> bool:
    return job.round < job.config.max_rounds


# ------------------------------------------------------------------ actions


def _uuid(turn: Turn, round_: int) -> str:
    job = turn.job
    seed = f"{job.job_id}/{job.episode}/{round_}/{turn.now!r}".encode()
    return f"{int(turn.now * 1e9):X}-{blake2b(seed, digest_size=16).hexdigest()}"


def _note_faults(turn: Turn) -> None:
    """Remembers which devices are broken and which reports came."""
    event, job = turn.event, turn.job
    assert isinstance(event, FaultSeen)
    seen = _seen(*job.present)
    devices = tuple(f for f in event.faults if f.source and f.what not in seen)
    if devices:
        turn.set(present=_joined(job.present, devices))
    if event.report and event.report not in job.seen_reports:
        turn.set(seen_reports=(*job.seen_reports, event.report)[-_SEEN:])
    turn.info = "fault received"


def _begin(turn: Turn) -> None:
    """Opens an episode."""
    job = turn.job
    turn.set(
        episode=job.episode + 1,
        round=0,
        began=turn.now,
        phases=(),
        outcome="",
        waiting=(),
        isolated=(),
        why="",
    )
    turn.record("episode.begin", episode=turn.job.episode)


def _new_round(turn: Turn) -> None:
    """A new uuid, nothing tried yet."""
    job = turn.job
    turn.set(
        round=job.round + 1,
        uuid=_uuid(turn, job.round + 1),
        barred=(),
        reported=(),
        replaced=(),
        stay=(),
        retried=False,
        chosen="",
        faults=_joined(job.faults, job.waiting),
        waiting=(),
        node_deadline=None,
    )


def _merge(turn: Turn) -> None:
    """Takes the new faults into this round."""
    fresh = new_faults(turn)
    _note_faults(turn)
    turn.set(faults=_joined(turn.job.faults, fresh))
    if fresh:
        turn.record("fault", ranks=[f.rank for f in fresh], merged=turn.job.round)


def _begin_with_faults(turn: Turn) -> None:
    fresh = new_faults(turn)
    _note_faults(turn)
    _begin(turn)
    turn.set(faults=fresh)
    turn.record("fault", ranks=[f.rank for f in fresh])
    _new_round(turn)


def _next_round_with_faults(turn: Turn) -> None:
    """The same episode starts over with the old faults and the new ones."""
    _merge(turn)
    _new_round(turn)


def _new_round_of_new(turn: Turn) -> None:
    """A new round for the new faults only; the old ones are dealt with."""
    fresh = _fresh_ranks(turn)
    _note_faults(turn)
    turn.set(faults=fresh, waiting=(), round=0, began=turn.now, phases=())
    _new_round(turn)


def _next_round_of_waiting(turn: Turn) -> None:
    """What was broken is repaired; what broke meanwhile comes next."""
    turn.set(faults=turn.job.waiting, waiting=())
    _new_round(turn)


def _wait(turn: Turn) -> None:
    """Keeps the new faults until the open strategy has ended."""
    fresh = new_faults(turn)
    _note_faults(turn)
    turn.set(waiting=_joined(turn.job.waiting, fresh))


def _clear_one(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, FaultCleared)
    turn.set(present=tuple(f for f in turn.job.present if f.source != event.source))
    turn.info = "fault cleared"


def _ask_again(turn: Turn) -> None:
    """globalFault goes out again, as the next round under the same uuid."""
    turn.set(round=turn.job.round + 1, reported=())


def _retry_failed(turn: Turn) -> None:
    """405: the fault is a normal one from now on; the client is asked again what it can do."""
    event = turn.event
    assert isinstance(event, Status)
    turn.record("strategy.failed", strategy=words.RETRY, code=event.code, info=event.info)
    _take_waiting(turn)
    turn.set(retried=True, round=turn.job.round + 1, reported=())
    _bar(turn, words.RETRY, event.code)


def _take_waiting(turn: Turn) -> None:
    turn.set(faults=_joined(turn.job.faults, turn.job.waiting), waiting=())


def _bar(turn: Turn, strategy: str, code: int, why: str = "") -> None:
    barred = dict(turn.job.barred)
    for name, reason in choice.bars(strategy, code).items():
        barred.setdefault(name, why or reason)
    turn.set(barred=tuple(barred.items()))


def _bar_failed(turn: Turn) -> None:
    """Rules out what the reported code rules out."""
    event, job = turn.event, turn.job
    assert isinstance(event, Status)
    turn.record("strategy.failed", strategy=job.chosen, code=event.code, info=event.info)
    _take_waiting(turn)
    if job.chosen == words.RETRY:
        turn.set(retried=True)
    # Code 0 where it is not a success (never offered by the tables) counts as 406.
    _bar(turn, job.chosen, event.code or Code.UNRECOVERABLE)
    _choose_anew(turn)


def _bar_late(turn: Turn) -> None:
    job = turn.job
    turn.record("strategy.timeout", strategy=job.chosen, seconds=round(turn.now - job.entered, 3))
    _take_waiting(turn)
    if job.chosen == words.RETRY:
        turn.set(retried=True)
    _bar(turn, job.chosen, Code.UNRECOVERABLE, f"no word about {job.chosen} in time")
    _choose_anew(turn)


def _bar_nodes(turn: Turn) -> None:
    """No replacement came: replacing is over, shrinking is not."""
    _take_waiting(turn)
    _bar(turn, words.RECOVER, Code.RECOVERABLE, "no replacement in time")
    _choose_anew(turn)


def _choose_anew(turn: Turn) -> None:
    """A new round, since in-place and recover bear the same name on the wire: without it the
    second one's signal would have the first one's key."""
    turn.set(round=turn.job.round + 1)


def _bar_unstoppable(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, StopComplete)
    why = f"the workers could not be stopped (code {event.code})"
    turn.set(barred=tuple((name, why) for name in words.LADDER if name != words.EXIT))


def _bar_silent(turn: Turn) -> None:
    why = f"no word from the client while {turn.job.state.value}"
    turn.set(barred=tuple((name, why) for name in words.LADDER if name != words.EXIT))


def _bar_rounds(turn: Turn) -> None:
    why = f"{turn.job.round} rounds in one episode"
    turn.set(barred=tuple((name, why) for name in words.LADDER if name not in ("dump", "exit")))


def _take_offer(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, Strategies)
    turn.set(reported=tuple(dict.fromkeys(event.names))[:32])


_DECIDED = {
    words.RETRY: State.RETRYING,
    words.IN_PLACE: State.RESTARTING,
    words.RECOVER: State.REPLACING,
    words.ELASTIC: State.SHRINKING,
    words.DUMP: State.DUMPING,
    words.EXIT: State.EXITING,
}


def _decide(turn: Turn) -> None:
    """Chooses; with no retry to be had the faults are normal ones from here on."""
    job = turn.job
    chosen = choice.choose(job)
    if chosen.strategy != words.RETRY:
        turn.set(faults=tuple(replace(f, kind=words.NORMAL) for f in job.faults))
        chosen = choice.choose(turn.job)
    turn.set(chosen=chosen.strategy, why=chosen.reason[:500])
    turn.record(
        "strategy.chosen",
        strategy=chosen.strategy,
        skipped=[list(pair) for pair in chosen.skipped],
        round=turn.job.round,
        after_ms=round((turn.now - turn.job.began) * 1000, 3),
    )
    turn.target = _DECIDED[chosen.strategy]
    if chosen.strategy == words.RETRY and choice.routes_converging(turn.job):
        turn.target = State.ROUTING


def _isolate(turn: Turn) -> None:
    event, job = turn.event, turn.job
    assert isinstance(event, Status)
    faulty = set(choice.nodes_of(job.config, (f.rank for f in job.faults)))
    wanted = set(choice.nodes_of(job.config, event.isolate))
    turn.set(isolated=tuple(sorted(faulty | wanted)))


def _shrunk(turn: Turn) -> None:
    job = turn.job
    isolated = job.isolated or choice.nodes_of(job.config, (f.rank for f in job.faults))
    turn.set(isolated=isolated, faults=(), replaced=())
    turn.record("scaled.in", nodes=list(isolated), seconds=round(turn.now - job.began, 6))


def _node_back(turn: Turn) -> None:
    event, job = turn.event, turn.job
    assert isinstance(event, NodeReplaced)
    turn.set(replaced=tuple(sorted({*job.replaced, event.node})), node_deadline=None)
    turn.effects.append(ResetFile("clear"))
    turn.record("node.replaced", node=event.node)


def _grow(turn: Turn) -> None:
    _node_back(turn)
    turn.set(round=turn.job.round + 1, chosen=words.ELASTIC, why="all nodes are back")


def _finish(turn: Turn, outcome: str) -> None:
    job = turn.job
    phases = [*job.phases, (job.state.value, round(turn.now - job.entered, 6))]
    turn.record(
        "episode.end",
        episode=job.episode,
        outcome=outcome,
        reason=job.why,
        rounds=job.round,
        seconds=round(turn.now - job.began, 6),
        phases=[list(p) for p in phases],
    )
    turn.effects.append(ResetFile("clear"))
    turn.set(
        outcome=outcome,
        faults=(),
        waiting=(),
        isolated=(),
        replaced=(),
        stay=(),
        barred=(),
        reported=(),
        maintenance=None,
        node_deadline=None,
        chosen="",
        config=job.next_config or job.config,
        next_config=None,
    )


def _succeed(turn: Turn) -> None:
    _finish(turn, f"{turn.job.chosen or 'maintenance'} succeeded")


def _left(turn: Turn) -> None:
    turn.effects.append(ResetFile("restart"))
    dumped = bool(turn.job.open and turn.job.open.extra == words.DUMP_EXIT)
    _finish(turn, "dump and exit" if dumped else "exit")


def _killed(turn: Turn) -> None:
    _finish(turn, "killed")


def _dumped(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, Status)
    saved = event.code == 0
    turn.record("dump", saved=saved, code=event.code, info=event.info)
    turn.set(
        chosen=words.EXIT,
        why=f"dump {'saved' if saved else f'failed with {event.code}'}; the job leaves",
    )


def _leave(turn: Turn) -> None:
    turn.set(chosen=words.EXIT, why=_why_leave(turn))


def _why_leave(turn: Turn) -> str:
    if isinstance(turn.event, Strategies):
        return "the client offered nothing but exit"
    if isinstance(turn.event, Status):
        return f"{turn.job.state.value} failed with {turn.event.code}"
    return f"no word while {turn.job.state.value}"


def _give_up(turn: Turn) -> None:
    event = turn.event
    why = event.reason if isinstance(event, GiveUp) else ""
    if isinstance(event, StopComplete) and event.code == Code.NOT_READY:
        why = "the workers had not come up yet (404): nothing to repair or to save"
    turn.set(why=why or f"{turn.job.state.value} failed", chosen="")
    if turn.job.maintenance and turn.job.maintenance.kind != "node":
        _tell_operator(turn, f"failed: {turn.job.why}")


def _tell_operator(turn: Turn, message: str) -> None:
    if turn.job.maintenance is not None:
        turn.effects.append(ToOperator(turn.job.maintenance.kind, message))


def _start_maintenance(turn: Turn) -> None:
    event = turn.event
    _begin(turn)
    if isinstance(event, SwitchNic):
        turn.set(maintenance=Maintenance("nic", ranks=event.ranks, ops=event.ops))
    elif isinstance(event, StressTest):
        turn.set(maintenance=Maintenance("stress", stress=event.stress))
    turn.set(faults=(), waiting=())
    _new_round(turn)
    turn.record("maintenance", what=turn.job.maintenance.kind if turn.job.maintenance else "")


def _start_switch(turn: Turn) -> None:
    event = turn.event
    node: int | None
    if isinstance(event, HotSwitch):
        node = event.node
    else:
        node = _sub_health_node(turn)
        _note_faults(turn)
    _begin(turn)
    turn.set(maintenance=Maintenance("node", node=node if node is not None else -1), faults=())
    _new_round(turn)
    turn.record("hot-switch", node=node)


def _drop_maintenance(turn: Turn) -> None:
    """Ends a pause or a hot switch because a recovery has to begin."""
    job = turn.job
    if job.maintenance is None:
        return
    if job.maintenance.kind == "node":
        turn.effects.append(Tell(_stop_switch(job)))
    else:
        _resume_agents(turn)
        _tell_operator(turn, "failed: a recovery is under way")
    turn.set(maintenance=None)


def _stop_switch(job: Job) -> Signal:
    return Signal(Key(job.uuid, words.HOT_SWITCH, "", job.round), (words.A_STOP_SWITCH,))


def _switch_failed(turn: Turn) -> None:
    turn.effects.append(Tell(_stop_switch(turn.job)))
    turn.set(switch_off=True, why="the spare did not come up in time")
    _finish(turn, "hot switch given up")


def _faults_end_maintenance(turn: Turn) -> None:
    fresh = new_faults(turn)
    _note_faults(turn)
    _drop_maintenance(turn)
    turn.set(faults=fresh)
    _new_round(turn)


def _maintenance_failed(turn: Turn) -> None:
    event, job = turn.event, turn.job
    bad: tuple[Fault, ...] = ()
    if isinstance(event, StressTested):
        bad = tuple(
            Fault(rank, words.NORMAL, reason=f"stress test: code {code}")
            for rank, code in event.codes
            if code not in ("0", "1")
        )
    turn.record("maintenance.failed", what=job.maintenance.kind if job.maintenance else "")
    _drop_maintenance(turn)
    turn.set(faults=_joined(job.faults, bad))
    _new_round(turn)


def _resume_agents(turn: Turn) -> None:
    job = turn.job
    if job.state is State.TESTING:
        turn.effects.append(ResetFile("clear"))
        key = Key(_uuid(turn, 1000 + job.round), words.CONTINUE_START_AGENT, "", job.round)
        turn.effects.append(Tell(Signal(key, (words.A_CONTINUE_START,))))


def _maintenance_done(turn: Turn) -> None:
    _tell_operator(turn, "ok")
    turn.set(chosen="", why="maintenance ended")
    _finish(turn, "maintenance succeeded")


def _forbid_switches(turn: Turn) -> None:
    turn.set(switch_off=True)
    _leave(turn)


def _migrated(turn: Turn) -> None:
    turn.set(chosen=words.MIGRATION)
    _finish(turn, "migration succeeded")


def _subscribed(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, Subscribed)
    turn.set(
        subscribed=True,
        keyed=event.keyed,
        client=event.client,
        incarnation=event.incarnation,
    )


def _resend(turn: Turn) -> None:
    """The open signal again, unless a second copy could harm an original client."""
    _subscribed(turn)
    job = turn.job
    if job.open is not None and (job.keyed or not job.delivered or job.open.repeatable):
        turn.effects.append(Send(job.open, again=True))


def _unsubscribed(turn: Turn) -> None:
    turn.set(subscribed=False)


def _delivered(turn: Turn) -> None:
    if not turn.job.delivered:
        turn.set(delivered=True)


def _configure(turn: Turn) -> None:
    event = turn.event
    assert isinstance(event, Configured)
    if turn.job.state is State.IDLE:
        if event.config != turn.job.config:
            turn.set(config=event.config, next_config=None, switch_off=False)
    elif event.config != (turn.job.next_config or turn.job.config):
        turn.set(next_config=event.config)
        turn.info = "takes effect at the next episode"


def _stale(turn: Turn) -> None:
    """Answered, and changes nothing."""
    event, job = turn.event, turn.job
    awaited = job.open.key if job.open is not None else None
    waits = (
        f"{awaited.signal}{'/' + awaited.strategy if awaited.strategy else ''} round "
        f"{awaited.round}"
        if awaited
        else "nothing"
    )
    keyed = isinstance(event, Report) and event.key is not None
    turn.code = Code.ORDER_MIX if keyed else Code.OK
    turn.info = f"stale: job is {job.state.value} and waits for {waits}; nothing changed"


def _busy(turn: Turn) -> None:
    turn.code = Code.OM_RUNNING
    turn.info = f"the job is {turn.job.state.value}; ask again when it is idle"


def _refuse_switch(turn: Turn) -> None:
    turn.code = Code.OM_RUNNING
    turn.info = "a hot switch of this job failed before; reconfigure the job to allow another"


def _nothing(turn: Turn) -> None:
    pass


def _chain(*actions: Action) -> Action:
    def run(turn: Turn) -> None:
        for action in actions:
            action(turn)

    return run


ACTIONS: dict[str, Action] = {
    "begin an episode": _begin_with_faults,
    "note the fault": _note_faults,
    "merge": _merge,
    "merge, ask again": _chain(_merge, _ask_again),
    "merge, choose": _chain(_merge, _decide),
    "old and new faults, next round": _next_round_with_faults,
    "new faults, next round": _new_round_of_new,
    "waiting faults, next round": _next_round_of_waiting,
    "keep for the next round": _wait,
    "enough rounds, choose": _chain(_merge, _bar_rounds, _decide),
    "forget the fault": _clear_one,
    "take the offer, choose": _chain(_take_offer, _decide),
    "faults are normal, ask again": _retry_failed,
    "rule out, choose": _chain(_bar_failed, _decide),
    "rule out (late), choose": _chain(_bar_late, _decide),
    "rule out (no node), choose": _chain(_bar_nodes, _decide),
    "cannot stop, choose": _chain(_bar_unstoppable, _decide),
    "silent, choose": _chain(_bar_silent, _decide),
    "note the isolated nodes": _isolate,
    "smaller world": _shrunk,
    "note the new node": _node_back,
    "note the new node, grow": _grow,
    "succeed": _succeed,
    "note the dump": _dumped,
    "leave": _leave,
    "the job has left": _left,
    "give up": _give_up,
    "the master is dead": _killed,
    "start maintenance": _start_maintenance,
    "start hot switch": _start_switch,
    "faults end it": _faults_end_maintenance,
    "it failed": _maintenance_failed,
    "resume agents": _resume_agents,
    "maintenance done": _maintenance_done,
    "no spare": _switch_failed,
    "leave, no more switches": _forbid_switches,
    "migrated": _migrated,
    "note the subscriber, the job has left": _chain(_subscribed, _left),
    "repeat the open signal": _resend,
    "note the loss": _unsubscribed,
    "note the delivery": _delivered,
    "configure": _configure,
    "stale": _stale,
    "busy": _busy,
    "refuse": _refuse_switch,
    "nothing": _nothing,
}


# ------------------------------------------------------------------ entries


def _open(
    turn: Turn,
    signal: str,
    *actions: str,
    strategy: str = "",
    bound: float,
    report: bool = True,
    ranks: dict[int, int] | None = None,
    timeout: int | None = None,
    nodes: tuple[int, ...] = (),
    extra: str = "",
    repeatable: bool = False,
) -> None:
    """Makes a signal the open one and sends it."""
    job = turn.job
    made = Signal(
        Key(job.uuid, signal, strategy, job.round),
        actions,
        tuple((ranks if ranks is not None else {}).items()),
        int(bound) if timeout is None else timeout,
        nodes,
        extra,
        int(bound) if report else 0,
        job.why,
        repeatable,
    )
    turn.set(open=made, delivered=False, deadline=turn.now + bound)
    turn.effects.append(Send(made))


def _faulty_nodes(job: Job) -> tuple[int, ...]:
    """Nodes that have to go: faulty, not staying, not yet replaced."""
    nodes = choice.nodes_of(job.config, (f.rank for f in job.faults))
    return tuple(n for n in nodes if n not in job.stay and n not in job.replaced)


def _enter_stopping(turn: Turn) -> None:
    turn.effects.append(ResetFile("flushing"))
    _open(
        turn,
        words.STOP_TRAIN,
        words.A_STOP_TRAIN,
        ranks=choice.by_rank(turn.job.faults),
        bound=turn.job.config.report_timeout,
        repeatable=True,
    )


def _enter_agreeing(turn: Turn) -> None:
    config = turn.job.config
    turn.set(faults=choice.reclassify(turn.job))
    turn.set(stay=choice.staying(turn.job))
    job = turn.job
    kinds = choice.by_rank(job.faults)
    # An end that knows only ClusterD's field reads this as: wait this long for my next word.
    timeout = int(config.answer_timeout)
    if words.NORMAL not in kinds.values() and kinds:
        if words.NETWORK in kinds.values():
            timeout = max(timeout, 33)
        _open(
            turn,
            words.GLOBAL_FAULT,
            words.A_GLOBAL,
            ranks=kinds,
            timeout=timeout,
            bound=config.report_timeout,
            repeatable=True,
        )
        return
    gone = _faulty_nodes(job)
    ranks = {r: words.NORMAL for r in kinds if job.config.node_of(r) not in gone}
    for node in gone:
        known = job.config.ranks_of(node) or [r for r in kinds if job.config.node_of(r) == node]
        ranks.update(dict.fromkeys(known, words.NORMAL))
    turn.effects.append(ResetFile("faults", tuple(sorted(ranks)), bool(job.stay) and not gone))
    _open(
        turn,
        words.GLOBAL_FAULT,
        words.A_GLOBAL,
        words.A_NODES_EXIT,
        ranks=dict(sorted(ranks.items())),
        nodes=gone,
        timeout=timeout,
        bound=config.report_timeout,
        repeatable=True,
    )


def _change(
    turn: Turn,
    strategy: str,
    *more: str,
    nodes: tuple[int, ...] = (),
    extra: str = "",
    with_ranks: bool = True,
    bound: float | None = None,
    report: bool = True,
    repeatable: bool = False,
) -> None:
    job = turn.job
    _open(
        turn,
        words.CHANGE_STRATEGY,
        words.A_CHANGE,
        *more,
        strategy=strategy,
        ranks=choice.by_rank(job.faults) if with_ranks else None,
        bound=job.config.report_timeout if bound is None else bound,
        nodes=nodes,
        extra=extra,
        report=report,
        repeatable=repeatable,
    )


def _enter_retrying(turn: Turn) -> None:
    nodes = choice.nodes_of(turn.job.config, (f.rank for f in turn.job.faults))
    _change(turn, words.RETRY, nodes=nodes)


def _enter_restarting(turn: Turn) -> None:
    nodes = tuple(n for n in turn.job.stay if n >= 0)
    _change(turn, words.RECOVER, words.A_NODES_RESTART, nodes=nodes, extra=words.IN_PLACE)


def _enter_replacing(turn: Turn) -> None:
    job = turn.job
    # Whoever was told to keep a node, or nothing about nodes, learns now which ones go.
    told = words.IN_PLACE not in choice.enabled(job.config.strategies) and not job.retried
    turn.set(stay=())
    turn.effects.append(ResetFile("faults", tuple(choice.by_rank(job.faults))))
    more = () if told else (words.A_NODES_EXIT,)
    _change(turn, words.RECOVER, *more, nodes=_faulty_nodes(turn.job))
    if job.config.watches_nodes:
        turn.set(node_deadline=turn.now + job.config.reschedule_timeout)


def _enter_shrinking(turn: Turn) -> None:
    extra = json.dumps({"scale-in-strategy": "DP"})
    _change(turn, words.DOWNGRADE, nodes=_faulty_nodes(turn.job), extra=extra)


def _enter_isolating(turn: Turn) -> None:
    job = turn.job
    faulty = choice.nodes_of(job.config, (f.rank for f in job.faults))
    _open(
        turn,
        words.FAULT_NODES_EXIT,
        words.A_NODES_EXIT,
        nodes=tuple(n for n in job.isolated if n not in faulty),
        bound=job.config.report_timeout,
        repeatable=True,
    )


def _enter_growing(turn: Turn) -> None:
    extra = json.dumps({"scale-out-strategy": "DP"})
    _change(turn, words.UPGRADE, extra=extra, with_ranks=False)


def _enter_saving(turn: Turn) -> None:
    job = turn.job
    turn.set(chosen=words.DUMP, why="only dump and exit are enabled")
    turn.effects.append(ResetFile("faults", tuple(choice.by_rank(job.faults))))
    _open(
        turn,
        words.SAVE_AND_EXIT,
        words.A_SAVE_AND_EXIT,
        nodes=choice.nodes_of(job.config, (f.rank for f in job.faults)),
        ranks=choice.by_rank(job.faults),
        bound=job.config.report_timeout,
    )


def _enter_dumping(turn: Turn) -> None:
    _change(turn, words.DUMP, nodes=_faulty_nodes(turn.job))


def _enter_exiting(turn: Turn) -> None:
    job = turn.job
    after_dump = job.state in (State.DUMPING, State.SAVING)
    if not job.why:
        turn.set(why=job.chosen)
    _change(
        turn,
        words.EXIT,
        nodes=_faulty_nodes(turn.job),
        extra=words.DUMP_EXIT if after_dump else "",
        bound=job.config.exit_wait,
        repeatable=True,
    )


def _enter_killing(turn: Turn) -> None:
    _open(
        turn,
        words.KILL_MASTER,
        bound=turn.job.config.kill_wait,
        report=False,
        repeatable=True,
    )


def _enter_pausing(turn: Turn) -> None:
    job = turn.job
    stress = job.maintenance is not None and job.maintenance.kind == "stress"
    _open(
        turn,
        words.STOP_TRAIN,
        words.A_PAUSE_TRAIN,
        timeout=900 if stress else 0,  # how long to stay paused; 0: the client knows
        bound=job.config.report_timeout,
    )


def _wait_for(turn: Turn, seconds: float | None) -> None:
    turn.set(
        open=None,
        delivered=False,
        deadline=None if seconds is None else turn.now + seconds,
    )


def _enter_testing(turn: Turn) -> None:
    job = turn.job
    key = Key(_uuid(turn, 2000 + job.round), words.PAUSE_START_AGENT, "", job.round)
    turn.effects.append(Tell(Signal(key, (words.A_PAUSE_START,))))
    turn.effects.append(ResetFile("flushing"))
    _to_workers(turn)


def _to_workers(turn: Turn) -> None:
    assert turn.job.maintenance is not None
    _wait_for(turn, turn.job.config.report_timeout)
    turn.effects.append(ToWorkers(turn.job.maintenance))


def _enter_continuing(turn: Turn) -> None:
    _change(turn, words.CONTINUE, with_ranks=False)


def _enter_preparing(turn: Turn) -> None:
    job = turn.job
    assert job.maintenance is not None
    ranks = dict.fromkeys(job.config.ranks_of(job.maintenance.node), words.NORMAL)
    _open(
        turn,
        words.HOT_SWITCH,
        words.A_HOT_SWITCH,
        ranks=ranks,
        bound=job.config.spare_wait,
        report=False,
    )


def _enter_spare_running(turn: Turn) -> None:
    turn.set(round=turn.job.round + 1)
    _open(
        turn,
        words.HOT_SWITCH,
        words.A_NEW_POD_RUNNING,
        bound=turn.job.config.report_timeout,
        repeatable=True,
    )


def _enter_idle(turn: Turn) -> None:
    _wait_for(turn, None)
    turn.set(uuid="")


ENTRIES: dict[State, Action] = {
    State.IDLE: _enter_idle,
    State.STOPPING: _enter_stopping,
    State.CLEARING: lambda t: _wait_for(t, t.job.config.clear_wait),
    State.AGREEING: _enter_agreeing,
    State.ROUTING: lambda t: _wait_for(t, t.job.config.routing_wait),
    State.RETRYING: _enter_retrying,
    State.RESTARTING: _enter_restarting,
    State.REPLACING: _enter_replacing,
    State.SHRINKING: _enter_shrinking,
    State.ISOLATING: _enter_isolating,
    State.SMALLER: lambda t: _wait_for(t, None),
    State.GROWING: _enter_growing,
    State.SAVING: _enter_saving,
    State.DUMPING: _enter_dumping,
    State.EXITING: _enter_exiting,
    State.KILLING: _enter_killing,
    State.PAUSING: _enter_pausing,
    State.SWITCHING: _to_workers,
    State.TESTING: _enter_testing,
    State.CONTINUING: _enter_continuing,
    State.PREPARING: _enter_preparing,
    State.SPARE_RUNNING: _enter_spare_running,
    State.OLD_LEAVING: lambda t: _wait_for(t, t.job.config.leave_wait),
    State.MIGRATING: lambda t: _change(t, words.MIGRATION, with_ranks=False),
}


def enter(turn: Turn, state: State) -> None:
    """Leaves the old state, enters the new one."""
    job = turn.job
    if job.state is not State.IDLE and state is not State.IDLE:
        turn.set(phases=(*job.phases, (job.state.value, round(turn.now - job.entered, 6)))[-64:])
    if state is not State.REPLACING:
        turn.set(node_deadline=None)
    ENTRIES[state](turn)
    turn.set(state=state, entered=turn.now)


def _mark(event: Event) -> str:
    """What makes two reports the same one; "": the sender does not say."""
    if not isinstance(event, Report) or event.key is None:
        return ""
    return blake2b(repr(event).encode(), digest_size=8).hexdigest()


def step(job: Job, event: Event, now: float) -> Outcome:
    """What one event does to one job. Total: every event has an answer in every state."""
    from phalanx.recovery.table import DECIDED, rows

    turn = Turn(job, event, now)
    mark = _mark(event)
    if mark and mark in job.answered:
        return Outcome(job, changed=False)  # repeated, its answer was lost: the same one again
    for row in rows(job.state, type(event)):
        if row.guard and not GUARDS[row.guard](turn):
            continue
        if mark and row.does != "stale":
            turn.set(answered=(*job.answered, mark)[-_ANSWERED:])
        ACTIONS[row.does](turn)
        target = turn.target if row.next is DECIDED else row.next
        if target is not None:
            assert isinstance(target, State)
            enter(turn, target)
        return Outcome(
            turn.job, tuple(turn.effects), int(turn.code), turn.info, turn.job is not job
        )
    raise AssertionError(f"no answer for {type(event).__name__} in {job.state}")


def due(job: Job) -> float | None:
    """When this job next wants a Timeout or a NodeTimeout; None: never."""
    if job.node_deadline is not None and job.deadline is not None:
        return min(job.node_deadline, job.deadline)
    return job.deadline if job.node_deadline is None else job.node_deadline
