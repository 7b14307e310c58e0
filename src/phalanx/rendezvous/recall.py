"""A coordinator that has just taken over learns from the members what runs."""

from __future__ import annotations

from phalanx.rendezvous.forming import grow, park_others, settle
from phalanx.rendezvous.model import Assignment, Seat, Stop
from phalanx.rendezvous.running import lose_share
from phalanx.rendezvous.sessions import tell_regroup
from phalanx.rendezvous.state import Peer, Phase, State, Turn, tell_roster


def _newest(state: State) -> Assignment | None:
    held = [p.held for p in state.peers.values() if p.held is not None]
    return max(held, key=lambda a: (a.generation, a.term), default=None)


def complete(state: State) -> bool:
    """Whether all members of the last generation are here or known to be gone."""
    newest = _newest(state)
    if newest is None:
        return False
    return len(_members(state, newest)) + len(state.gone) >= newest.groups


def _members(state: State, newest: Assignment) -> list[tuple[Peer, Assignment]]:
    """Those who hold a share of the group that was started last: of its newest generation, or
    of an earlier one, if they have not heard of those that followed in place."""
    shares = [(p, p.held) for p in state.peers.values() if p.held is not None]
    shares = [(p, a) for p, a in shares if a.attempt == newest.attempt and a.world == newest.world]
    shares.sort(key=lambda share: -share[1].generation)
    taken: set[int] = set()
    out = []
    for peer, held in shares:
        if taken.isdisjoint(held.seat.ranks):  # else its seat was given to another
            taken.update(held.seat.ranks)
            out.append((peer, held))
    return out


def rebuild(turn: Turn) -> list[str]:
    """Take the newest generation that anybody holds for the one that runs.

    Returns the names of seats nobody came for (their nodes' ids are not known).
    """
    state = turn.state
    newest = _newest(state)
    turn.set(recall_by=None, heard=(), gone=frozenset())
    if newest is None:
        turn.set(phase=Phase.GATHERING)
        return []
    members = _members(state, newest)
    held = {rank for _, share in members for rank in share.seat.ranks}
    missing = _gaps(sorted(set(range(newest.world)) - held), newest)
    seats = [*(share.seat for _, share in members), *missing]
    turn.seat(tuple(sorted(seats, key=lambda seat: seat.ranks)))
    turn.set(
        phase=Phase.RUNNING,
        generation=newest.generation,
        attempt=newest.attempt,
        base=min(share.generation for _, share in members),
        born={
            share.seat.ranks[local]: share.generation
            for _, share in members
            for local in share.fresh or ()
        },
        store=newest.store,
        host_of_store=newest.host_of_store,
        began=turn.now,
        peak=max(state.peak, newest.groups),
        spent=max(0, turn.options.max_restarts - newest.restarts_left),
    )
    turn.note(
        "took_over",
        term=state.term,
        generation=newest.generation,
        nodes=[seat.node for seat in turn.state.seats],
    )
    for peer in list(state.peers.values()):
        seat = turn.state.seat_of(peer.node.id)
        runs = peer.runs
        if peer.held is not None and seat is None:
            turn.tell(peer.node.id, Stop(peer.held.generation, "this generation is over"))
        elif peer.held is not None and seat is not None:
            runs = newest.generation
            if peer.held.generation < newest.generation:
                tell_regroup(turn, seat, peer.held.generation)
        turn.change(peer.node.id, runs=runs, held=None, share=None)
    return [seat.node for seat in missing]


def _gaps(ranks: list[int], newest: Assignment) -> list[Seat]:
    """Seats for ranks nobody holds: of the newest's size where they can be, else as they lie."""
    size = len(newest.seat.ranks)
    if newest.world != size * newest.groups:
        size = 1
    blocks: dict[int, list[int]] = {}
    for rank in ranks:
        blocks.setdefault(rank // size, []).append(rank)
    return [Seat(f"lost-{block}", tuple(found)) for block, found in blocks.items()]


def lose(turn: Turn, missing: list[str]) -> None:
    """Go on without those that did not come."""
    if turn.state.phase is Phase.GATHERING:
        settle(turn)
    if turn.state.phase is not Phase.RUNNING:
        return
    count = len(missing)
    for node in missing:
        if turn.state.phase is Phase.RUNNING and turn.state.seat_of(node) is not None:
            nodes = f"{count} node{'s' if count > 1 else ''}"
            lose_share(turn, node, f"{nodes} did not come to the new coordinator")
    if turn.state.phase is not Phase.RUNNING:
        return
    tell_roster(turn)
    grow(turn)
    if turn.state.phase is Phase.RUNNING:
        park_others(turn)
