"""From no worker to a generation: who is in it, when it can start, and what each is told."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.recovery import episode as ep
from phalanx.rendezvous import ranks
from phalanx.rendezvous.model import (
    NO_RENDEZVOUS,
    Assign,
    Assignment,
    Options,
    Over,
    Park,
    Seat,
    Stop,
    Verdict,
)
from phalanx.rendezvous.state import Peer, Phase, State, Turn, tell_roster

BESIDE = 2
"""Neighbours that a node is told of."""


def finish(turn: Turn, verdict: Verdict) -> None:
    """The job is over: everybody is told, those that come later as well."""
    if turn.state.phase is Phase.OVER:
        return
    turn.set(phase=Phase.OVER, verdict=verdict)
    turn.note(
        "job_over",
        success=verdict.success,
        status=verdict.status,
        reason=verdict.reason,
        culprit=verdict.culprit,
    )
    for node in turn.state.peers:
        turn.tell(node, Over(verdict))


def stop_all(turn: Turn, why: str, *, start_at: float | None = None, at: int | None = None) -> None:
    """End what runs (after step ``at``); a generation forms when all of it has ended."""
    turn.set(
        phase=Phase.STOPPING,
        why=why,
        lost=(),
        heard=(),
        stop_at=at,
        stop_by=turn.now + turn.options.rejoin,
        start_at=start_at,
        gather_by=None,
        call_by=None,
        offer_by=None,
    )
    turn.note("stopping", generation=turn.state.generation, why=why, at=at)
    for peer in turn.state.peers.values():
        if peer.runs:
            turn.tell(peer.node.id, Stop(peer.runs, why, at))
    settle(turn)


def hurry(turn: Turn, why: str) -> None:
    """That step will not be finished by all: end what still runs now."""
    if turn.state.phase is Phase.STOPPING and turn.state.stop_at is not None:
        turn.set(stop_at=None, why=why)
        for peer in turn.state.peers.values():
            if peer.runs:
                turn.tell(peer.node.id, Stop(peer.runs, why))


def available(state: State) -> list[Peer]:
    """The nodes that could take part now: members of the last generation first, then those
    that wait, spares last, each in the order in which they came."""
    return sorted(
        (p for p in state.peers.values() if not p.runs and not state.is_out(p.node.id)),
        key=lambda p: (p.node.id not in state.places, p.node.spare, p.since),
    )


def choose(turn: Turn, *, spares: bool) -> list[Peer]:
    """Who would be in the next generation; with ``spares``, as many as needed."""
    state, options = turn.state, turn.options
    seated = state.places
    able = available(state)
    chosen = [p for p in able if not p.node.spare or p.node.id in seated][: options.most]
    room = min(options.most, max(state.peak, options.least)) - len(chosen)
    if spares and room > 0:
        chosen += [p for p in able if p.node.spare and p.node.id not in seated][:room]
    return chosen


def how_many(turn: Turn, *, spares: bool) -> int:
    """How many ``choose`` would return; cheap, since each join asks."""
    state, options = turn.state, turn.options
    if spares or state.seats or state.records:
        return len(choose(turn, spares=spares))
    count = sum(not (p.runs or p.node.spare) for p in state.peers.values())
    return min(count, options.most)


def settle(turn: Turn) -> None:
    """Go on from STOPPING and GATHERING as far as can be."""
    if turn.state.phase is Phase.STOPPING:
        if turn.state.echo is not None:
            return
        late = [p for p in turn.state.peers.values() if p.runs]
        if late and (turn.state.stop_by is None or turn.now < turn.state.stop_by):
            return
        for peer in late:
            name = turn.name(peer.node.id)
            turn.note("left_behind", node=peer.node.id, why=f"{name} did not stop its workers")
        turn.set(phase=Phase.GATHERING, stop_by=None)
    if turn.state.phase is Phase.GATHERING:
        _gather(turn)


def _gather(turn: Turn) -> None:
    options, now = turn.options, turn.now
    for wait in ("start_at", "fence_until"):
        due = getattr(turn.state, wait)
        if due is not None and now >= due:
            turn.set(**{wait: None})
    offer_by = turn.state.offer_by
    turn.set(offer_by=None)  # only what is waited for has a bound
    state = turn.state
    out_of_time = state.gather_by is not None and now >= state.gather_by
    count = how_many(turn, spares=state.generation > 0 or out_of_time)
    if count < options.least:
        if state.records and release(turn, all_of_them=True):
            _gather(turn)  # better with a bad node than not at all
        elif out_of_time:
            finish(turn, Verdict(False, NO_RENDEZVOUS, _too_few(turn, count)))
        elif state.gather_by is None:
            turn.set(gather_by=now + options.join, call_by=None)
        return
    if state.has_quorum(options):
        turn.set(gather_by=None)
    if state.generation == 0 and count < options.most and not out_of_time:
        if state.call_by is None:
            turn.set(call_by=now + options.last_call)
        assert turn.state.call_by is not None
        if now < turn.state.call_by:
            return
    turn.set(call_by=None)
    if state.start_at is not None:
        return
    if not state.has_quorum(options):
        if state.gather_by is None:
            turn.set(gather_by=now + options.join)
            turn.note("no_majority", unsure=sorted(state.unsure))
        elif out_of_time:
            finish(turn, Verdict(False, NO_RENDEZVOUS, _no_majority(turn)))
        return
    if state.unsure - state.dead and state.fence_until is not None:
        return
    chosen = choose(turn, spares=state.generation > 0 or out_of_time)
    seats = ranks.seats([p.node for p in chosen], state.seats)
    host = next((seat.node for seat in seats if state.peers[seat.node].offer), None)
    if host is None:
        turn.set(offer_by=offer_by or now + options.rejoin)
        if offer_by is not None and now >= offer_by:
            finish(turn, Verdict(False, NO_RENDEZVOUS, "no node offered to serve the store"))
        return
    assign(turn, seats, host)


def _too_few(turn: Turn, count: int) -> str:
    options = turn.options
    return (
        f"{count} of at least {options.least} nodes were there after {options.join:g} s: start "
        "the others, or ask for fewer (--nnodes MIN:MAX) or more time (--rdzv-conf join_timeout)"
    )


def _no_majority(turn: Turn) -> str:
    lost, count = len(turn.state.unsure), len(turn.state.seats)
    return (
        f"{lost} of {count} nodes cannot be reached and may go on by themselves: this side is "
        "no majority (for two nodes --on-split continue goes on all the same)"
    )


def restarts_left(turn: Turn) -> int:
    used = turn.state.spent + len(turn.state.attempts)
    return max(0, turn.options.max_restarts - used)


def assign(turn: Turn, seats: tuple[Seat, ...], host: str) -> None:
    """A new generation, all of whose workers start."""
    state = turn.state
    before = {seat.node: seat.ranks for seat in state.seats}
    moved = ranks.moves(state.seats, seats)
    generation = state.generation + 1
    turn.seat(seats)
    turn.set(
        phase=Phase.RUNNING,
        generation=generation,
        attempt=state.attempt + 1,
        base=generation,
        shape=generation,
        born={},
        store=state.peers[host].offer,
        host_of_store=host,
        done=frozenset(),
        began=turn.now,
        furthest=None,
        pace=0.0,
        peak=max(state.peak, len(seats)),
        start_at=None,
        offer_by=None,
        stop_at=None,
        why="",
        moved_in=frozenset(),
        culprit=None,
    )
    turn.elect()
    if state.machine is not None:
        fresh = ep.State.fresh(turn.state.world, generation, state.machine)
        turn.set(machine=fresh)
    turn.change(host, offer="")
    for group, seat in enumerate(seats):
        turn.change(seat.node, runs=generation, parked="", held=None, numbers=())
        turn.number(seat)
        old = before.get(seat.node, ())
        previous = tuple(
            old[local] if local < len(old) else None for local in range(len(seat.ranks))
        )
        turn.tell(seat.node, Assign(assignment(turn, group, previous)))
    turn.note(
        "generation",
        generation=generation,
        attempt=turn.state.attempt,
        world=turn.state.world,
        nodes=[seat.node for seat in seats],
        moved=moved,
    )
    park_others(turn)
    tell_roster(turn)


def assignment(
    turn: Turn,
    group: int,
    previous: tuple[int | None, ...],
    fresh: tuple[int, ...] | None = None,
) -> Assignment:
    """The share of the node in seat ``group`` of the generation that runs."""
    state = turn.state
    return Assignment(
        term=state.term,
        generation=state.generation,
        attempt=state.attempt,
        seat=state.seats[group],
        group=group,
        groups=len(state.seats),
        world=state.world,
        store=state.store,
        host_of_store=state.host_of_store,
        previous=previous,
        fresh=fresh,
        restarts_left=restarts_left(turn),
        shape=state.shape,
        beside=_beside(turn.state, group),
    )


def _beside(state: State, group: int) -> tuple[str, ...]:
    """Where the next nodes listen, in the order of ranks, the first one after the last."""
    count = len(state.seats)
    after = [state.seats[(group + n) % count].node for n in range(1, min(count, BESIDE + 1))]
    return tuple(state.peers[node].node.endpoint for node in after if node in state.peers)


def park_others(turn: Turn) -> None:
    """Tell those without a seat why they wait, once."""
    for peer in list(turn.state.peers.values()):
        if peer.node.id not in turn.state.places and not peer.runs:
            park(turn, peer, _why_parked(turn, peer))


def park(turn: Turn, peer: Peer, why: str) -> None:
    if peer.parked != why:
        turn.change(peer.node.id, parked=why)
        turn.tell(peer.node.id, Park(why))


def _why_parked(turn: Turn, peer: Peer) -> str:
    record = turn.state.records.get(peer.node.id)
    if record is not None and record.until is not None:
        minutes = turn.options.quarantine / 60
        return f"this node failed too often: it is left out for {minutes:.0f} minutes"
    if peer.node.spare:
        return "this node is a spare: it takes the place of one that is lost"
    return (
        f"all {turn.options.most} places are taken: this node takes the place of one that is lost"
    )


def wants_more(state: State, options: Options) -> bool:
    """Whether a generation formed now would have more nodes than the one that runs."""
    if len(state.seats) >= options.most or state.done:
        return False
    waiting = [p for p in available(state) if p.node.id not in state.places]
    if any(not p.node.spare for p in waiting):
        return True
    return bool(waiting) and len(state.seats) < state.peak


TELLING = 1.5
"""Seconds within which the word to stop after a step is with every worker."""


def step_to_stop_at(state: State, now: float) -> int | None:
    """A step that nobody can have finished before all have heard of it; None: not known."""
    if state.furthest is None or not state.pace:
        return None
    ahead = (now - state.told_at + TELLING) / state.pace
    return state.furthest + max(2, math.ceil(min(ahead, 1e9)))


def release(turn: Turn, *, all_of_them: bool = False) -> bool:
    """Let nodes in again whose time is over (or all); whether there were any."""
    freed = {
        node: replace(record, until=None)
        for node, record in turn.state.records.items()
        if record.until is not None and (all_of_them or turn.now >= record.until)
    }
    if freed:
        turn.set(records={**turn.state.records, **freed})
        for node in freed:
            turn.note("node_let_in", node=node)
    return bool(freed)
