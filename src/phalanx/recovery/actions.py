"""The deeds of the table: how an event changes a job, before the next state is entered."""

from __future__ import annotations

from dataclasses import replace

from phalanx.recovery import choice, words
from phalanx.recovery.guards import fresh_ranks, joined, new_faults, seen, sub_health_node
from phalanx.recovery.model import (
    Configured,
    Fault,
    FaultCleared,
    FaultSeen,
    GiveUp,
    HotSwitch,
    Job,
    Key,
    Maintenance,
    NodeReplaced,
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
)
from phalanx.recovery.turn import Action, Turn
from phalanx.recovery.words import Code

_SEEN = 32  # remembered report ids per job


def _note_faults(turn: Turn) -> None:
    """Remembers which devices are broken and which reports came."""
    event, job = turn.event, turn.job
    assert isinstance(event, FaultSeen)
    known = seen(*job.present)
    devices = tuple(f for f in event.faults if f.source and f.what not in known)
    if devices:
        turn.set(present=joined(job.present, devices))
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
        uuid=turn.new_uuid(job.round + 1),
        barred=(),
        reported=(),
        replaced=(),
        stay=(),
        retried=False,
        chosen="",
        faults=joined(job.faults, job.waiting),
        waiting=(),
        node_deadline=None,
    )


def _merge(turn: Turn) -> None:
    """Takes the new faults into this round."""
    fresh = new_faults(turn)
    _note_faults(turn)
    turn.set(faults=joined(turn.job.faults, fresh))
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
    fresh = fresh_ranks(turn)
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
    turn.set(waiting=joined(turn.job.waiting, fresh))


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
    turn.set(faults=joined(turn.job.faults, turn.job.waiting), waiting=())


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
        node = sub_health_node(turn)
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
    turn.set(faults=joined(job.faults, bad))
    _new_round(turn)


def _resume_agents(turn: Turn) -> None:
    job = turn.job
    if job.state is State.TESTING:
        turn.effects.append(ResetFile("clear"))
        key = Key(turn.new_uuid(1000 + job.round), words.CONTINUE_START_AGENT, "", job.round)
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
