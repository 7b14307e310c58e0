"""While workers run: who is lost, who failed, who is done, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.recovery import policy
from phalanx.rendezvous import sessions
from phalanx.rendezvous.budgets import fault
from phalanx.rendezvous.forming import finish, hurry, settle, stop_all
from phalanx.rendezvous.model import (
    Commit,
    Failed,
    Progress,
    Refused,
    Seat,
    Share,
    Stopped,
    Succeeded,
    Verdict,
    WorkerEvent,
)
from phalanx.rendezvous.state import Phase, State, Turn

ECHO = 1.0
"""Seconds for which the cause of an exception like "connection closed by peer" is waited for."""


def failed(turn: Turn, node: str, what: Failed) -> None:
    """A fault that is not to be recovered in place."""
    state = turn.state
    if state.seat_of(node) is None or not state.base <= what.generation <= state.generation:
        return
    exception = what.end.get("exception")
    echo = policy.is_echo(what.returncode, exception if isinstance(exception, str) else None)
    if state.phase is Phase.RUNNING and echo:
        turn.set(echo=(node, what), judge_by=turn.now + ECHO)
        stop_all(turn, f"{what.reason} on {turn.name(node)}")
    elif state.phase is Phase.RUNNING:
        fault(turn, node, what)
    elif state.phase is Phase.STOPPING and state.echo is not None and not echo:
        judge(turn, node, what)
    elif state.phase is Phase.STOPPING:
        hurry(turn, what.reason)


def judge(turn: Turn, node: str, what: Failed) -> None:
    """This is what ended the attempt."""
    turn.set(echo=None, judge_by=None)
    fault(turn, node, what)


def judge_in_time(turn: Turn) -> None:
    """No other cause was heard of: the one that looked like an echo it is."""
    state = turn.state
    if state.echo is not None and state.judge_by is not None and turn.now >= state.judge_by:
        judge(turn, *state.echo)


def worker_event(turn: Turn, node: str, what: WorkerEvent) -> None:
    if what.kind == "prepared":
        commit(turn, node, what)
    elif turn.state.phase is Phase.RUNNING:
        sessions.worker_event(turn, node, what)
    elif what.kind in ("died", "fault") and turn.state.seat_of(node) is not None:
        hurry(turn, f"rank {what.rank} cannot finish the step")


def succeeded(turn: Turn, node: str, what: Succeeded) -> None:
    state = turn.state
    if what.generation != state.generation or state.seat_of(node) is None:
        return
    turn.change(node, runs=0)
    if state.phase is not Phase.RUNNING:
        settle(turn)  # an end is as good as a stop
        return
    turn.set(done=state.done | {node})
    if all(seat.node in turn.state.done for seat in state.seats):
        finish(turn, Verdict(True))


def progress(turn: Turn, node: str, what: Progress) -> None:
    state = turn.state
    if what.generation != state.generation or state.seat_of(node) is None:
        return
    if state.furthest is None:
        turn.set(furthest=what.step, told_at=turn.now)
    elif what.step > state.furthest:
        pace = (turn.now - state.told_at) / (what.step - state.furthest)
        # nodes that say the same in turn would make it seem faster than it is: harmless, the
        # step to stop at is then further away
        turn.set(furthest=what.step, told_at=turn.now, pace=pace or state.pace)


def stopped(turn: Turn, node: str, what: Stopped) -> None:
    peer = turn.state.peers[node]
    if not peer.runs or what.generation < peer.runs:
        return
    turn.change(node, runs=0)
    if turn.state.phase is not Phase.RUNNING:
        settle(turn)
    elif turn.state.seat_of(node) is None:
        sessions.grow(turn)
    elif node not in turn.state.done:
        lose_share(turn, node, f"the workers on {turn.name(node)} were stopped")


def commit(turn: Turn, node: str, what: WorkerEvent) -> None:
    """Whether a checkpoint may count: while this is the job, and its generation the last."""
    state, step = turn.state, what.data.get("step")
    seat = state.seat_of(node)
    if seat is None or what.rank not in seat.ranks or not isinstance(step, int):
        return
    why = ""
    if what.generation != state.generation or state.phase not in (Phase.RUNNING, Phase.STOPPING):
        why = f"generation {what.generation} is over"
    elif state.lost:
        why = "a node is lost"
    elif not state.has_quorum(turn.options):
        why = "the other nodes cannot be reached, and may go on by themselves"
    if why:
        turn.tell(node, Refused(what.generation, what.rank, step, why))
        return
    within = turn.options.commit_within
    turn.set(fence_until=turn.now + within)
    turn.tell(node, Commit(what.generation, what.rank, step, within))


def away(turn: Turn, node: str) -> None:
    """The node's connection has closed: until it is known why it may be on another side."""
    state = turn.state
    if node in state.peers and _votes(state, node):
        turn.set(unsure=state.unsure | {node})


def _votes(state: State, node: str) -> bool:
    member = state.seat_of(node) is not None
    return member or any(node in voters.nodes for voters in state.electorates)


def departed(turn: Turn, node: str, why: str, *, certain: bool = True) -> None:
    """The node is gone. Its share counts as done if it was."""
    state = turn.state
    member = state.seat_of(node) is not None
    name = turn.name(node)
    turn.drop(node)
    unsure = state.unsure - {node}
    turn.set(unsure=unsure if certain or not _votes(state, node) else unsure | {node})
    turn.retire()
    turn.note("node_gone", node=node, why=why, member=member, certain=certain)
    if state.phase is Phase.RUNNING and member and node not in state.done:
        lose_share(turn, node, f"{name} {why}")
    else:
        if member and state.echo is not None:
            # that is why: a loss is no fault of the program
            turn.set(echo=None, judge_by=None, why=f"{name} {why}")
        if member:
            hurry(turn, f"{name} {why}")
        settle(turn)


def lose_share(turn: Turn, node: str, why: str) -> None:
    """No worker runs any more where this seat is. A node that waits takes it in place, or the
    others go on as a smaller world, if the program can; else the whole group starts again, with
    whoever is there."""
    lose_shares(turn, [node], why)


def lose_shares(turn: Turn, nodes: Sequence[str], why: str) -> None:
    """As ``lose_share``, of several nodes at once."""
    others = tuple(loss for loss in turn.state.lost if loss[0] not in nodes)
    turn.set(lost=(*others, *((node, why) for node in nodes)))
    make_good(turn)


def make_good(turn: Turn) -> None:
    """What is to be done about the seats that are lost; not as long as somebody who is lost may
    commit a checkpoint, or it is not known whether somebody is: the workers wait for each other
    anyway, and so need not start again.
    """
    state = turn.state
    if state.fence_until is not None and turn.now >= state.fence_until:
        turn.set(fence_until=None)
    if sessions.waits(turn):
        return
    turn.set(lost=(), heard=())
    if lost := [(seat, why) for node, why in state.lost if (seat := state.seat_of(node))]:
        _replace(turn, [seat for seat, _ in lost], lost[0][1])
    for node, what in state.heard:
        here = turn.state.phase is Phase.RUNNING and node in turn.state.peers
        if here and isinstance(what, WorkerEvent):
            sessions.worker_event(turn, node, what)


def _replace(turn: Turn, seats: Sequence[Seat], why: str) -> None:
    substitutes = sessions.substitutes(turn, seats)
    if substitutes is not None:
        sessions.move_in(turn, seats, substitutes, why)
        return
    why_not = sessions.shrink(turn, seats, why)
    if why_not is not None:
        stop_all(turn, f"{why} ({why_not})" if why_not else why)


def shares(turn: Turn, said: Sequence[tuple[str, Share, int]]) -> None:
    """Nodes that came back say how it stands with their workers of that generation: first
    who lives, since that decides what can be done for those who do not (``deaths``).
    """
    for node, what, generation in said:
        if turn.state.phase is Phase.RUNNING:
            sessions.share(turn, node, what, generation)
    for node, what, generation in said:
        if what.failed is not None:
            failed(turn, node, what.failed)
        elif what.done:
            succeeded(turn, node, Succeeded(generation))


def deaths(turn: Turn, said: Sequence[tuple[str, Share, int]]) -> None:
    """And who does not live."""
    for node, what, generation in said:
        if what.failed is None and not what.done:
            sessions.deaths(turn, node, what, generation)
