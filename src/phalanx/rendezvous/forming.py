"""From no worker to a generation: who is in it, when it can start, and what each is told."""

from __future__ import annotations

from phalanx.rendezvous import ranks
from phalanx.rendezvous.model import Assign, Assignment, Over, Park, Seat, Stop, Verdict
from phalanx.rendezvous.state import Peer, Phase, State, Turn, tell_roster

NO_RENDEZVOUS = 120
"""The exit status when the nodes did not find together; ``phalanx.agent.exit_codes``."""


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


def stop_all(turn: Turn, why: str, *, start_at: float | None = None) -> None:
    """End what runs; a generation forms when all of it has ended."""
    turn.set(
        phase=Phase.STOPPING,
        why=why,
        stop_by=turn.now + turn.options.rejoin,
        start_at=start_at,
        gather_by=None,
        call_by=None,
        offer_by=None,
    )
    turn.note("stopping", generation=turn.state.generation, why=why)
    for peer in turn.state.peers.values():
        if peer.runs:
            turn.tell(peer.node.id, Stop(peer.runs, why))
    settle(turn)


def available(state: State) -> list[Peer]:
    """The nodes that could take part now: members of the last generation first, then those
    that wait, spares last, each in the order in which they came."""
    seated = {seat.node for seat in state.seats}
    return sorted(
        (p for p in state.peers.values() if not p.runs),
        key=lambda p: (p.node.id not in seated, p.node.spare, p.since),
    )


def choose(turn: Turn, *, spares: bool) -> list[Peer]:
    """Who would be in the next generation; with ``spares``, as many as needed."""
    state, options = turn.state, turn.options
    seated = {seat.node for seat in state.seats}
    able = available(state)
    chosen = [p for p in able if not p.node.spare or p.node.id in seated][: options.most]
    room = min(options.most, max(state.peak, options.least)) - len(chosen)
    if spares and room > 0:
        chosen += [p for p in able if p.node.spare and p.node.id not in seated][:room]
    return chosen


def how_many(turn: Turn, *, spares: bool) -> int:
    """How many ``choose`` would return; cheap, since each join asks."""
    state, options = turn.state, turn.options
    if spares or state.seats:
        return len(choose(turn, spares=spares))
    count = sum(not (p.runs or p.node.spare) for p in state.peers.values())
    return min(count, options.most)


def settle(turn: Turn) -> None:
    """Go on from STOPPING and GATHERING as far as can be."""
    if turn.state.phase is Phase.STOPPING:
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
    state, options, now = turn.state, turn.options, turn.now
    out_of_time = state.gather_by is not None and now >= state.gather_by
    count = how_many(turn, spares=state.generation > 0 or out_of_time)
    if count < options.least:
        if out_of_time:
            finish(turn, Verdict(False, NO_RENDEZVOUS, _too_few(turn, count)))
        elif state.gather_by is None:
            turn.set(gather_by=now + options.join, call_by=None)
        return
    turn.set(gather_by=None)
    if state.generation == 0 and count < options.most and not out_of_time:
        if state.call_by is None:
            turn.set(call_by=now + options.last_call)
        assert turn.state.call_by is not None
        if now < turn.state.call_by:
            return
    turn.set(call_by=None)
    if state.start_at is not None and now < state.start_at:
        return
    chosen = choose(turn, spares=state.generation > 0 or out_of_time)
    seats = ranks.seats([p.node for p in chosen], state.seats)
    host = next((seat.node for seat in seats if state.peers[seat.node].offer), None)
    if host is None:
        if state.offer_by is None:
            turn.set(offer_by=now + options.rejoin)
        elif now >= state.offer_by:
            finish(turn, Verdict(False, NO_RENDEZVOUS, "no node offered to serve the store"))
        return
    assign(turn, seats, host)


def _too_few(turn: Turn, count: int) -> str:
    options = turn.options
    return (
        f"{count} of at least {options.least} nodes were there after {options.join:g} s: start "
        "the others, or ask for fewer (--nnodes MIN:MAX) or more time (--rdzv-conf join_timeout)"
    )


def restarts_left(turn: Turn) -> int:
    used = turn.state.spent + len(turn.state.attempts)
    return max(0, turn.options.max_restarts - used)


def assign(turn: Turn, seats: tuple[Seat, ...], host: str) -> None:
    """A new generation, all of whose workers start."""
    before = {seat.node: seat.ranks for seat in turn.state.seats}
    turn.set(
        phase=Phase.RUNNING,
        generation=turn.state.generation + 1,
        attempt=turn.state.attempt + 1,
        seats=seats,
        store=turn.state.peers[host].offer,
        host_of_store=host,
        done=frozenset(),
        began=turn.now,
        furthest=None,
        peak=max(turn.state.peak, len(seats)),
        start_at=None,
        offer_by=None,
        why="",
    )
    turn.change(host, offer="")
    state = turn.state
    for group, seat in enumerate(seats):
        turn.change(seat.node, runs=state.generation, parked="", held=None)
        old = before.get(seat.node, ())
        assignment = Assignment(
            term=state.term,
            generation=state.generation,
            attempt=state.attempt,
            seat=seat,
            group=group,
            groups=len(seats),
            world=state.world,
            store=state.store,
            host_of_store=host,
            previous=tuple(
                old[local] if local < len(old) else None for local in range(len(seat.ranks))
            ),
            restarts_left=restarts_left(turn),
        )
        turn.tell(seat.node, Assign(assignment))
    turn.note(
        "generation",
        generation=state.generation,
        attempt=state.attempt,
        world=state.world,
        nodes=[seat.node for seat in seats],
        moved=ranks.moves([Seat(n, r) for n, r in before.items()], seats),
    )
    park_others(turn)
    tell_roster(turn)


def park_others(turn: Turn) -> None:
    """Tell those without a seat why they wait, once."""
    seated = {seat.node for seat in turn.state.seats}
    for peer in list(turn.state.peers.values()):
        if peer.node.id not in seated and not peer.runs:
            park(turn, peer, _why_parked(turn, peer))


def park(turn: Turn, peer: Peer, why: str) -> None:
    if peer.parked != why:
        turn.change(peer.node.id, parked=why)
        turn.tell(peer.node.id, Park(why))


def _why_parked(turn: Turn, peer: Peer) -> str:
    if peer.node.spare:
        return "this node is a spare: it takes the place of one that is lost"
    return (
        f"all {turn.options.most} places are taken: this node takes the place of one that is lost"
    )


def wants_more(turn: Turn) -> bool:
    """Whether a generation formed now would have more nodes than the one that runs."""
    state, options = turn.state, turn.options
    if len(state.seats) >= options.most or state.done:
        return False
    seated = {seat.node for seat in state.seats}
    waiting = [p for p in available(state) if p.node.id not in seated]
    if any(not p.node.spare for p in waiting):
        return True
    return bool(waiting) and len(state.seats) < state.peak
