"""What entering a state does: the signal it opens, and how long its answer is waited for."""

from __future__ import annotations

import json

from phalanx.recovery import choice, words
from phalanx.recovery.model import (
    Job,
    Key,
    ResetFile,
    Send,
    Signal,
    State,
    Tell,
    ToWorkers,
)
from phalanx.recovery.turn import Action, Turn


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
    key = Key(turn.new_uuid(2000 + job.round), words.PAUSE_START_AGENT, "", job.round)
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
