"""The coordinator of one job: what it hears in, a new state and what it says out. Pure.

``advance`` is total: every phase has an answer to every event, and every wait a bound
(``next_deadline`` says when to send the next ``Tick``).
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.recovery import episode as ep
from phalanx.rendezvous import budgets, ranks, recall, running, sessions
from phalanx.rendezvous.forming import finish, park, park_others, release, settle
from phalanx.rendezvous.model import (
    Away,
    Effect,
    Event,
    Failed,
    Join,
    Leave,
    Lost,
    Offer,
    Options,
    Over,
    Progress,
    Refuse,
    Saying,
    Stop,
    Stopped,
    Succeeded,
    Tick,
    Verdict,
    WorkerEvent,
)
from phalanx.rendezvous.state import Peer, Phase, State, Turn, next_deadline, tell_roster

__all__ = ["Phase", "State", "advance", "next_deadline"]


def advance(state: State, event: Event, now: float, options: Options) -> tuple[State, list[Effect]]:
    """One step. Never raises, whatever a node says."""
    turn = Turn(state, now, options)
    if isinstance(event, Tick):
        _tick(turn)
    elif isinstance(event, Away):
        running.away(turn, event.node)
    elif isinstance(event, Lost):
        _departed(turn, event.node, event.how, certain=event.certain)
    elif isinstance(event.what, Join):
        _join(turn, event.node, event.what)
    elif event.node not in state.peers:
        pass  # it has not introduced itself, or is gone
    elif isinstance(event.what, Leave):
        _departed(turn, event.node, f"left: {event.what.reason}")
    elif state.phase is not Phase.OVER:
        if not isinstance(event.what, Offer | Stopped):  # a node may stop what it does not know
            turn.hear_of(event.node, event.what.generation)
        hear(turn, event.node, event.what)
    if turn.state.lost and turn.state.phase is Phase.RUNNING:
        running.make_good(turn)
    return turn.state, turn.effects


def hear(turn: Turn, node: str, what: Saying) -> None:
    """What a node that is here says, while the job goes on."""
    if isinstance(what, Offer):
        turn.change(node, offer=what.store)
        settle(turn)
    elif turn.state.phase is Phase.RECALL:
        turn.set(heard=(*turn.state.heard, (node, what)))
    elif isinstance(what, WorkerEvent):
        running.worker_event(turn, node, what)
    elif isinstance(what, Failed):
        running.failed(turn, node, what)
    elif isinstance(what, Succeeded):
        running.succeeded(turn, node, what)
    elif isinstance(what, Stopped):
        running.stopped(turn, node, what)
    elif isinstance(what, Progress):
        running.progress(turn, node, what)


def _tick(turn: Turn) -> None:
    due = next_deadline(turn.state)
    if due is None or turn.now < due:
        return
    phase = turn.state.phase
    if phase is Phase.RECALL:
        if turn.state.spares_by is not None and turn.now >= turn.state.spares_by:
            turn.set(spares_by=None)
        if turn.state.recall_by is None or turn.now >= turn.state.recall_by:
            _recalled(turn)
        else:
            _recall(turn)
        return
    if release(turn) and phase is Phase.RUNNING:
        sessions.grow(turn)
    machine = turn.state.machine
    if machine is not None and turn.state.phase is Phase.RUNNING:
        sessions.step(turn, ep.Tick())
    running.judge_in_time(turn)
    settle(turn)


def _departed(turn: Turn, node: str, why: str, *, certain: bool = True) -> None:
    state = turn.state
    if node not in state.peers:
        if certain and node in state.unsure:
            turn.set(unsure=state.unsure - {node}, gone=state.gone | {node})
            turn.retire()
            _recall(turn) if state.phase is Phase.RECALL else settle(turn)
        return
    if state.phase is Phase.OVER:
        turn.drop(node)
    elif state.phase is Phase.RECALL:
        if certain:
            turn.set(gone=state.gone | {node}, unsure=state.unsure - {node})
        else:
            turn.set(unsure=state.unsure | {node})
        turn.drop(node)
        _recall(turn)
    else:
        running.departed(turn, node, why, certain=certain)


# --- coming -------------------------------------------------------------------------------


def _join(turn: Turn, node: str, what: Join) -> None:
    state = turn.state
    if what.node.id != node:
        turn.tell(node, Refuse(f"this connection is {node}'s, and not {what.node.id}'s"))
        return
    if what.epoch < state.epoch:
        reason = f"the job is in epoch {state.epoch}: this agent is of epoch {what.epoch}"
        turn.tell(node, Refuse(reason))
        return
    if what.epoch > state.epoch:
        _next_epoch(turn, what.epoch)
        state = turn.state
    if state.phase is Phase.OVER:
        assert state.verdict is not None
        turn.put(Peer(what.node, state.arrivals))
        turn.tell(node, Over(state.verdict))
        return
    others = []
    if what.node.rank is not None:
        others = [p.node for p in state.peers.values() if p.node.rank is not None]
    refusal = ranks.clash(what.node, others, turn.options.most)
    if refusal is not None:
        if node in state.peers:
            _departed(turn, node, "came back as another")
        turn.tell(node, Refuse(refusal))
        turn.note("refused", node=node, why=refusal)
        return
    if node in state.peers:
        _again(turn, node, what)
    else:
        _new(turn, node, what)


def _next_epoch(turn: Turn, epoch: int) -> None:
    """The job was queued again: what is left of the earlier epoch ends."""
    over = Verdict(False, 1, f"epoch {epoch} of the job has begun elsewhere")
    finish(turn, over)
    turn.state = State.fresh(turn.state.term, epoch)


def _peer(turn: Turn, what: Join) -> Peer:
    """The node as it stands now: known, and not yet told anything."""
    old = turn.state.peers.get(what.node.id)
    since = old.since if old else turn.state.arrivals
    if old is None:
        turn.set(arrivals=since + 1)
    held = what.held
    runs = held.generation if held else 0
    numbers = ((held.generation, held.seat.ranks),) if held else ()
    peer = Peer(
        *(what.node, since, what.offer, runs, held, what.share, what.last),
        promised=what.promised,
        leads=what.leads,
        numbers=numbers,
    )
    turn.put(peer)
    node = what.node.id
    if node in turn.state.unsure or node in turn.state.gone:
        turn.set(unsure=turn.state.unsure - {node}, gone=turn.state.gone - {node})
        turn.set(dead=turn.state.dead - {node})
    return peer


def _new(turn: Turn, node: str, what: Join) -> None:
    peer = _peer(turn, what)
    budgets.inherit(turn, what.node)
    turn.note("node_joined", node=node, host=what.node.host, address=what.node.address)
    state = turn.state
    remembers = peer.held is not None or peer.last is not None
    if remembers and state.generation == 0 and state.phase is Phase.GATHERING:
        # we have forgotten: a coordinator that was started again
        recall_by = turn.now + turn.options.recall
        fence = turn.now + turn.options.commit_within
        turn.set(phase=Phase.RECALL, recall_by=recall_by, fence_until=fence)
        turn.set(gather_by=None, call_by=None)
    if turn.state.phase is Phase.RECALL:
        _recall(turn)
    elif peer.runs:
        turn.tell(node, Stop(peer.runs, "this generation is over"))
    elif state.phase is Phase.RUNNING:
        _waits(turn, node)
    else:
        settle(turn)
        if turn.state.phase is Phase.GATHERING:
            count, least = len(turn.state.peers), turn.options.least
            why = f"waiting for nodes: {count} of at least {least} came"
            park(turn, turn.state.peers[node], why)


def _waits(turn: Turn, node: str) -> None:
    """A node is there while others run."""
    sessions.grow(turn)
    if turn.state.phase is Phase.RUNNING:
        park_others(turn)
        tell_roster(turn, node)


def _again(turn: Turn, node: str, what: Join) -> None:
    """The connection was lost and is there again, before its loss was seen."""
    state = turn.state
    peer = _peer(turn, what)
    turn.note("node_back", node=node)
    if state.phase is Phase.RECALL:
        _recall(turn)
    elif state.phase is Phase.RUNNING and state.seat_of(node) is not None:
        _back_in_seat(turn, node, peer)
    elif peer.runs:
        now_stopping = state.phase is Phase.STOPPING and peer.runs == state.generation
        why = state.why if now_stopping else "this generation is over"
        turn.tell(node, Stop(peer.runs, why, state.stop_at if now_stopping else None))
    elif state.phase is Phase.RUNNING:
        _waits(turn, node)
    else:
        settle(turn)


def _back_in_seat(turn: Turn, node: str, peer: Peer) -> None:
    state, held = turn.state, peer.held
    seat = state.seat_of(node)
    assert seat is not None
    name = turn.name(node)
    held_by_all = held is not None and held.generation >= state.base
    if held is None or not held_by_all or len(held.seat.ranks) != len(seat.ranks):
        if held is not None:
            turn.tell(node, Stop(held.generation, "this generation is over"))
        if node in state.done and held is None:
            return
        # it has lost its workers, or what it was told last did not arrive
        running.lose_share(turn, node, f"{name} lost its connection, and its workers with it")
        return
    turn.change(node, runs=0 if node in state.done else state.generation, held=None, share=None)
    if held.generation < state.generation and node not in state.done:
        sessions.tell_regroup(turn, seat, held.generation)
        turn.number(seat)
    tell_roster(turn, node)
    if peer.share is not None:
        said = [(node, peer.share, held.generation)]
        running.shares(turn, said)
        running.deaths(turn, said)


# --- after a takeover ---------------------------------------------------------------------


def _recall(turn: Turn) -> None:
    if recall.complete(turn.state):
        _recalled(turn)


def _recalled(turn: Turn) -> None:
    heard = turn.state.heard
    shares = [(p.node.id, p.share, p.runs) for p in turn.state.peers.values() if p.share]
    missing = recall.rebuild(turn)
    shares = [share for share in shares if turn.state.seat_of(share[0]) is not None]
    running.shares(turn, shares)
    ends = [said for said in heard if isinstance(said[1], Failed | Succeeded)]
    _hear_all(turn, ends)
    # before what the others say of the consequences
    recall.lose(turn, missing)
    running.deaths(turn, shares)
    _hear_all(turn, [said for said in heard if said not in ends])


def _hear_all(turn: Turn, heard: Sequence[tuple[str, Saying]]) -> None:
    for node, what in heard:
        if node in turn.state.peers and turn.state.phase is not Phase.OVER:
            hear(turn, node, what)
