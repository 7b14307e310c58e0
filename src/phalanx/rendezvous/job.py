"""The coordinator of one job: what it hears in, a new state and what it says out. Pure.

``advance`` is total: every phase has an answer to every event, and every wait a bound
(``next_deadline`` says when to send the next ``Tick``).
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.rendezvous import ranks, recall, running
from phalanx.rendezvous.forming import finish, park, park_others, settle
from phalanx.rendezvous.model import (
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
)
from phalanx.rendezvous.state import Peer, Phase, State, Turn, next_deadline, tell_roster

__all__ = ["Phase", "State", "advance", "next_deadline"]


def advance(state: State, event: Event, now: float, options: Options) -> tuple[State, list[Effect]]:
    """One step. Never raises, whatever a node says."""
    turn = Turn(state, now, options)
    if isinstance(event, Tick):
        _tick(turn)
    elif isinstance(event, Lost):
        _departed(turn, event.node, event.how)
    elif isinstance(event.what, Join):
        _join(turn, event.node, event.what)
    elif event.node not in state.peers:
        pass  # it has not introduced itself, or is gone
    elif isinstance(event.what, Leave):
        _departed(turn, event.node, f"left: {event.what.reason}")
    elif state.phase is not Phase.OVER:
        hear(turn, event.node, event.what)
    return turn.state, turn.effects


def hear(turn: Turn, node: str, what: Saying) -> None:
    """What a node that is here says, while the job goes on."""
    if isinstance(what, Offer):
        turn.change(node, offer=what.store)
        settle(turn)
    elif turn.state.phase is Phase.RECALL:
        turn.set(heard=(*turn.state.heard, (node, what)))
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
    if turn.state.phase is Phase.RECALL:
        _recalled(turn)
    else:
        settle(turn)


def _departed(turn: Turn, node: str, why: str) -> None:
    state = turn.state
    if node not in state.peers:
        return
    if state.phase is Phase.OVER:
        turn.drop(node)
    elif state.phase is Phase.RECALL:
        turn.set(gone=state.gone | {node})
        turn.drop(node)
        _recall(turn)
    else:
        running.departed(turn, node, why)


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


def _new(turn: Turn, node: str, what: Join) -> None:
    held = what.held
    runs = held.generation if held else 0
    turn.put(Peer(what.node, turn.state.arrivals, what.offer, runs, held))
    turn.set(arrivals=turn.state.arrivals + 1)
    turn.note("node_joined", node=node, host=what.node.host, address=what.node.address)
    state = turn.state
    if held is not None and held.generation > state.generation and state.generation == 0:
        # we have forgotten: a coordinator that was started again
        turn.set(phase=Phase.RECALL, recall_by=turn.now + turn.options.recall, gather_by=None,
                 call_by=None)  # fmt: skip
    if turn.state.phase is Phase.RECALL:
        _recall(turn)
        return
    if held is not None:
        turn.tell(node, Stop(held.generation, "this generation is over"))
        return
    if state.phase is Phase.RUNNING:
        running.grow(turn)
        if turn.state.phase is Phase.RUNNING:
            park_others(turn)
            tell_roster(turn, node)
        return
    settle(turn)
    if turn.state.phase is Phase.GATHERING:
        count, least = len(turn.state.peers), turn.options.least
        park(turn, turn.state.peers[node], f"waiting for nodes: {count} of at least {least} came")


def _again(turn: Turn, node: str, what: Join) -> None:
    """The connection was lost and is there again, before its loss was seen."""
    state, held = turn.state, what.held
    peer = state.peers[node]
    seated = state.seat_of(node) is not None
    if state.phase is Phase.RECALL or (held.generation if held else 0) != (
        state.generation if seated and (peer.runs or node in state.done) else 0
    ):
        # it has lost its workers, or what it was told last did not arrive
        _departed(turn, node, "lost its connection")
        if turn.state.phase is not Phase.OVER:
            _new(turn, node, what)
        return
    turn.put(replace(peer, node=what.node, offer=what.offer, parked=""))
    if state.phase is Phase.STOPPING and peer.runs:
        turn.tell(node, Stop(peer.runs, state.why))
    elif state.phase is Phase.RUNNING:
        if not seated:
            park_others(turn)
        tell_roster(turn, node)
    settle(turn)


# --- after a takeover ---------------------------------------------------------------------


def _recall(turn: Turn) -> None:
    if recall.complete(turn.state):
        _recalled(turn)


def _recalled(turn: Turn) -> None:
    heard = turn.state.heard
    missing = recall.rebuild(turn)
    for node, what in heard:
        if node in turn.state.peers and turn.state.phase is not Phase.OVER:
            hear(turn, node, what)
    recall.lose(turn, missing)
