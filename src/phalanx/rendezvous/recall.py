"""A coordinator that has just taken over learns from the members what runs."""

from __future__ import annotations

from phalanx.rendezvous.forming import park_others, settle, stop_all
from phalanx.rendezvous.model import Assignment, Seat, Stop
from phalanx.rendezvous.running import grow
from phalanx.rendezvous.state import Phase, State, Turn, tell_roster


def _newest(state: State) -> Assignment | None:
    held = [p.held for p in state.peers.values() if p.held is not None]
    return max(held, key=lambda a: (a.generation, a.term), default=None)


def complete(state: State) -> bool:
    """Whether all members of the last generation are here or known to be gone."""
    newest = _newest(state)
    if newest is None:
        return False
    here = sum(
        p.held is not None and p.held.generation == newest.generation for p in state.peers.values()
    )
    return here + len(state.gone) >= newest.groups


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
    seats = [
        p.held.seat
        for p in state.peers.values()
        if p.held is not None and p.held.generation == newest.generation
    ]
    held = {rank for seat in seats for rank in seat.ranks}
    missing = _gaps(sorted(set(range(newest.world)) - held), newest)
    seats = sorted([*seats, *missing], key=lambda seat: seat.ranks)
    used = max(0, turn.options.max_restarts - newest.restarts_left)
    turn.set(
        phase=Phase.RUNNING,
        generation=newest.generation,
        attempt=newest.attempt,
        seats=tuple(seats),
        store=newest.store,
        host_of_store=newest.host_of_store,
        began=turn.now,
        peak=max(state.peak, newest.groups),
        spent=used,
    )
    turn.note(
        "took_over",
        term=state.term,
        generation=newest.generation,
        nodes=[seat.node for seat in seats],
    )
    for peer in list(state.peers.values()):
        if peer.held is not None and peer.held.generation < newest.generation:
            turn.tell(peer.node.id, Stop(peer.held.generation, "this generation is over"))
        turn.change(peer.node.id, held=None)
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
    if missing:
        count = len(missing)
        stop_all(turn, f"{count} node{'s' if count > 1 else ''} did not come back")
        return
    tell_roster(turn)
    grow(turn)
    if turn.state.phase is Phase.RUNNING:
        park_others(turn)
