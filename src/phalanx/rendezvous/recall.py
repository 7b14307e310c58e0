"""A coordinator that has just taken over learns from the members what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.rendezvous.forming import park_others, settle
from phalanx.rendezvous.model import Assignment, Roster, Seat, Stop
from phalanx.rendezvous.running import lose_shares
from phalanx.rendezvous.sessions import grow, tell_regroup
from phalanx.rendezvous.state import Electorate, Peer, Phase, State, Turn, tell_roster


def _newest(state: State) -> Assignment | None:
    held = [p.held for p in state.peers.values() if p.held is not None]
    return max(held, key=lambda a: (a.generation, a.term), default=None)


def complete(state: State) -> bool:
    """Whether all members of the last generation are here or known to be gone."""
    newest = _newest(state)
    known = len(_members(state, newest)) if newest is not None else 0
    if state.roster is None:
        return newest is not None and known >= newest.groups
    away = state.gone | state.unsure
    voters = _voters(state.roster)
    if not all(node in state.peers or node in away for node in voters):
        return False
    if voters & away and state.spares_by is not None:
        # one of those that wait may take the empty seat
        spares = [n for n, _ in state.roster.nodes[state.roster.members :] if n not in away]
        if not all(node in state.peers for node in spares):
            return False
    return newest is None or known + len(voters & away) >= newest.groups


def _voters(roster: Roster) -> frozenset[str]:
    return frozenset(node for node, _ in roster.nodes[: roster.members])


def _members(state: State, newest: Assignment) -> list[tuple[Peer, Assignment]]:
    """Those who hold a share of the group that was started last: of its newest generation, or
    of an earlier one, if they have not heard of those that followed in place."""
    shares = [(p, p.held) for p in state.peers.values() if p.held is not None]
    shares = [(p, a) for p, a in shares if a.attempt == newest.attempt and a.shape == newest.shape]
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
    turn.set(recall_by=None, spares_by=None, heard=(), lost=(), gone=frozenset(), roster=None)
    if newest is None:
        _remember(turn, state)
        return []
    members = _members(state, newest)
    base = min(share.generation for _, share in members)
    seats = _all_seats(newest, [share.seat for _, share in members], _names(state, newest, base))
    missing = [seat.node for seat in seats if seat.node not in state.peers]
    turn.seat(seats)
    turn.set(
        phase=Phase.RUNNING,
        generation=newest.generation,
        attempt=newest.attempt,
        base=base,
        shape=newest.shape,
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
    _count_voters(turn, state, newest.generation)
    turn.note(
        "took_over",
        term=state.term,
        generation=newest.generation,
        nodes=[seat.node for seat in turn.state.seats],
    )
    for peer in list(state.peers.values()):
        seat = turn.state.seat_of(peer.node.id)
        if seat is not None and (peer.held is None or peer.held.seat != seat):
            missing.append(peer.node.id)  # it has not heard of its seat
            seat = None
        runs = peer.runs
        if peer.held is not None and seat is None:
            turn.tell(peer.node.id, Stop(peer.held.generation, "this generation is over"))
        elif peer.held is not None and seat is not None:
            runs = newest.generation
            if peer.held.generation < newest.generation:
                tell_regroup(turn, seat, peer.held.generation)
        turn.change(peer.node.id, runs=runs, held=None, share=None, last=None)
    return missing


def _remember(turn: Turn, before: State) -> None:
    """No worker runs: what forms next follows from what ran last."""
    last = [p.last for p in before.peers.values() if p.last is not None]
    newest = max(last, key=lambda a: (a.generation, a.term), default=None)
    turn.set(phase=Phase.GATHERING)
    if newest is None:
        if before.roster is not None:  # at least no generation comes twice
            turn.set(generation=before.roster.generation)
            _count_voters(turn, before, before.roster.generation)
        return
    seats = {a.seat.ranks: a.seat for a in last if a.generation == newest.generation}
    turn.seat(tuple(sorted(seats.values(), key=lambda seat: seat.ranks)))
    turn.set(
        generation=max(newest.generation, before.roster.generation if before.roster else 0),
        attempt=newest.attempt,
        peak=newest.groups,
        spent=max(0, turn.options.max_restarts - newest.restarts_left),
    )
    _count_voters(turn, before, turn.state.generation)
    turn.note("took_over", term=before.term, generation=turn.state.generation, nodes=[])


def _count_voters(turn: Turn, before: State, generation: int) -> None:
    """Whose majority counts: the members of the last generation, and those who elected this
    coordinator. Of them everybody is uncertain who is neither here nor gone for certain.
    """
    electorates = [Electorate(generation, frozenset(turn.state.places))]
    if not turn.state.places:
        electorates = []
    if before.roster is not None and _voters(before.roster) != (
        electorates[0].nodes if electorates else None
    ):
        electorates.insert(0, Electorate(before.roster.generation, _voters(before.roster)))
    voters = frozenset[str]().union(*(e.nodes for e in electorates))
    knows = {
        p.node.id: a.generation
        for p in before.peers.values()
        if (a := p.held or p.last) is not None
    }
    here = frozenset(before.peers) - before.unsure
    turn.set(electorates=tuple(electorates), knows=knows, unsure=voters - here - before.gone)
    turn.retire()


def _names(state: State, newest: Assignment, base: int) -> tuple[str, ...]:
    """The members by their seats, if what is known of them belongs to this group."""
    roster = state.roster
    if roster is None or not base <= roster.generation <= newest.generation:
        return ()
    names = tuple(node for node, _ in roster.nodes[: roster.members])
    return names if len(names) == newest.groups else ()


def _all_seats(newest: Assignment, known: Sequence[Seat], names: Sequence[str]) -> tuple[Seat, ...]:
    """The seats of the group, also those for whose ranks nobody came: of the newest's size
    where they can be, else one for each rank, and under a made-up name where none is known.
    """
    held = {rank for seat in known for rank in seat.ranks}
    size = len(newest.seat.ranks)
    if newest.world != size * newest.groups:
        size = 1
    blocks: dict[int, list[int]] = {}
    for rank in range(newest.world):
        if rank not in held:
            blocks.setdefault(rank // size, []).append(rank)
    gaps = {tuple(ranks): f"lost-{block}" for block, ranks in blocks.items()}
    seats = [*known, *(Seat(name, ranks) for ranks, name in gaps.items())]
    seats.sort(key=lambda seat: seat.ranks)
    taken = {seat.node for seat in known}
    if len(seats) == len(names):
        seats = [
            replace(seat, node=name) if seat.ranks in gaps and name not in taken else seat
            for seat, name in zip(seats, names, strict=True)
        ]
    return tuple(seats)


def lose(turn: Turn, missing: list[str]) -> None:
    """Go on without those that did not come."""
    if turn.state.phase is Phase.GATHERING:
        settle(turn)
    if turn.state.phase is not Phase.RUNNING:
        return
    if missing:
        nodes = f"{len(missing)} node{'s' if len(missing) > 1 else ''}"
        lose_shares(turn, missing, f"{nodes} did not come to the new coordinator")
    if turn.state.phase is not Phase.RUNNING:
        return
    tell_roster(turn)
    grow(turn)
    if turn.state.phase is Phase.RUNNING:
        park_others(turn)
