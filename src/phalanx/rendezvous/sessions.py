"""Recovery in place over several nodes: the machine of one group of workers, and its words
turned into words to nodes.

``recovery.episode`` decides for the ranks of the generation that runs; which node is told what
follows here. A node that is lost while another one waits is one fault of all its ranks: the
other takes its seat, and the survivors keep their processes. They do so too when there is no
other, if the program can go on in a world of another size; and when more nodes come.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from phalanx.recovery import episode as ep
from phalanx.recovery import ladder
from phalanx.rendezvous import ranks
from phalanx.rendezvous.budgets import fault
from phalanx.rendezvous.forming import (
    assignment,
    available,
    step_to_stop_at,
    stop_all,
    wants_more,
)
from phalanx.rendezvous.model import (
    Assign,
    Failed,
    Kill,
    Recovered,
    Regroup,
    Seat,
    Share,
    WorkerEvent,
)
from phalanx.rendezvous.state import Peer, Phase, Turn, tell_roster

KINDS: Mapping[str, type] = {
    "hello": ep.Hello,
    "died": ep.Died,
    "fault": ep.Fault,
    "left": ep.Left,
    "good_step": ep.GoodStep,
    "finished": ep.Finished,
}

PATIENCE = 60.0
"""Seconds for what is between the steps that are finished before nodes are let in: evaluations."""

RECOVER = "recover"
"""The strategy's name when a node's ranks move to another."""


def event_of(what: WorkerEvent) -> ep.Event | None:
    """The event of the machine; None: no such kind, or its data are not what they should be."""
    kind = KINDS.get(what.kind)
    if kind is None:
        return None
    hints = _hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.name == "rank":
            found["rank"] = what.rank
        elif field.name in what.data:
            if not _fits(what.data[field.name], hints[field.name]):
                return None
            found[field.name] = what.data[field.name]
        elif field.name == "generation":
            found["generation"] = what.generation
        elif field.default is MISSING and field.default_factory is MISSING:
            return None
    event: ep.Event = kind(**found)
    return event


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


# --- what nodes say -------------------------------------------------------------------------


def worker_event(turn: Turn, node: str, what: WorkerEvent) -> None:
    """Something happened to a worker. What is said of another process than the one that holds
    the rank now, or by another node, changes nothing."""
    state = turn.state
    seat = state.seat_of(node)
    called = state.peers[node].ranks_in(what.generation)  # its workers may have other ranks now
    if seat is None or what.rank not in called:
        return
    what = replace(what, rank=seat.ranks[called.index(what.rank)])
    if not state.born.get(what.rank, state.base) <= what.generation <= state.generation:
        return
    event = event_of(what)
    if event is None:
        return
    if state.lost:  # it is heard when that is made good
        turn.set(heard=(*state.heard, (node, what)))
        return
    if isinstance(event, ep.Died):
        returncode, end = what.data.get("returncode"), what.data.get("end")
        failed = Failed(
            what.generation,
            what.rank,
            f"rank {what.rank} {event.how}",
            returncode if isinstance(returncode, int) else None,
            end if isinstance(end, Mapping) else {"hung": event.hung, "step": event.step},
        )
        turn.set(culprit=(node, failed))
    step(turn, event)


def share(turn: Turn, node: str, what: Share, generation: int) -> None:
    """What a node that came back says of its workers, for what was lost on the way: who lives."""
    machine = turn.state.machine
    for rank in what.in_loop:
        if machine is None or rank >= machine.world or not machine.members[rank].in_loop:
            able = {"resizes": rank in what.resizes}
            worker_event(turn, node, WorkerEvent(generation, rank, "hello", able))
    for rank in what.finished:
        worker_event(turn, node, WorkerEvent(generation, rank, "finished"))


def deaths(turn: Turn, node: str, what: Share, generation: int) -> None:
    """And who does not."""
    how = {"how": "died while there was no coordinator"}
    for rank in what.dead:
        if turn.state.phase is Phase.RUNNING:
            worker_event(turn, node, WorkerEvent(generation, rank, "died", how))


# --- nodes that are lost -----------------------------------------------------------------------


def substitutes(turn: Turn, seats: Sequence[Seat]) -> list[Peer] | None:
    """Nodes that wait and could take these seats in place; None: there are not enough, or the
    program cannot be recovered in place."""
    return None if _others_may_go_on(turn) else _fitting(turn, seats)


def _fitting(turn: Turn, seats: Sequence[Seat]) -> list[Peer] | None:
    state = turn.state
    if not _in_place(turn):
        return None
    free = [seat.node for seat in seats]
    waiting = [p for p in available(state) if p.node.id not in state.places or p.node.id in free]
    found = []
    for seat in seats:
        place = state.places[seat.node]
        fitting = (
            p for p in waiting if p.node.slots == len(seat.ranks) and p.node.rank in (None, place)
        )
        peer = next(fitting, None)
        if peer is None:
            return None
        waiting.remove(peer)
        found.append(peer)
    return found


def waits(turn: Turn) -> bool:
    """Whether the seats that are lost can be made good in place, but not yet."""
    state, machine = turn.state, turn.state.machine
    if not state.lost or machine is None or not _in_place(turn) or not _others_may_go_on(turn):
        return False
    asked = any(node in state.peers for node in state.unsure)  # whether they have ended
    if not asked and not state.has_quorum(turn.options):
        return False
    seats = [seat for node, _ in state.lost if (seat := state.seat_of(node)) is not None]
    gone = [rank for seat in seats for rank in seat.ranks]
    return ep.resizes(machine, gone) or _fitting(turn, seats) is not None


def move_in(turn: Turn, seats: Sequence[Seat], peers: Sequence[Peer], why: str) -> None:
    """The nodes take the seats of those that are lost, as one fault of all the ranks."""
    state = turn.state
    after = list(state.seats)
    for seat, peer in zip(seats, peers, strict=True):
        after[state.places[seat.node]] = Seat(peer.node.id, seat.ranks)
        turn.note("seat_taken", node=peer.node.id, of=seat.node, ranks=list(seat.ranks))
    arriving = frozenset(peer.node.id for peer in peers)
    turn.seat(tuple(after))
    turn.set(moved_in=state.moved_in | arriving)
    step(turn, ep.Gone(tuple(r for seat in seats for r in seat.ranks), why), arriving)


def _in_place(turn: Turn) -> bool:
    machine = turn.state.machine
    return machine is not None and machine.over is None and turn.options.in_place


def _others_may_go_on(turn: Turn) -> bool:
    """Whether nodes that are lost may form a generation too, or commit a checkpoint."""
    state = turn.state
    fenced = state.fence_until is not None and turn.now < state.fence_until
    return not state.has_quorum(turn.options) or (fenced and bool(state.unsure - state.dead))


# --- a world of another size -------------------------------------------------------------------


def shrink(turn: Turn, seats: Sequence[Seat], why: str) -> str | None:
    """Go on without these seats, with those that wait if there are any. Returns why that cannot
    be ("": the program is not made for it); None: it is done.
    """
    return _resize(turn, {seat.node for seat in seats}, why)


def _resize(turn: Turn, without: Collection[str], why: str, at: int | None = None) -> str | None:
    """A generation of those that are here and have a seat, but for ``without``, and of those that
    wait."""
    state, options = turn.state, turn.options
    without = {s.node for s in state.seats if s.node not in state.peers}.union(without)
    machine, gone = state.machine, [r for s in state.seats if s.node in without for r in s.ranks]
    if not _in_place(turn) or machine is None or not ep.resizes(machine, gone):
        return ""
    if _others_may_go_on(turn):
        return "the nodes that are lost may go on by themselves"
    stay = [state.peers[s.node] for s in state.seats if s.node not in without]
    seated = {peer.node.id for peer in stay}
    come = [p for p in available(state) if p.node.id not in seated]
    room = min(options.most, max(state.peak, options.least)) - len(stay)
    spares = [p for p in come if p.node.spare][: max(0, room)]
    come = ([p for p in come if not p.node.spare] + spares)[: options.most - len(stay)]
    if len(stay) + len(come) < options.least or not stay:
        return f"{len(stay) + len(come)} of at least {options.least} nodes are left"
    seats = ranks.seats([p.node for p in (*stay, *come)], state.seats)
    held = {s.node: s.ranks for s in state.seats if s.node in seated}
    origins = tuple(
        held[s.node][local] if s.node in held else None
        for s in seats
        for local in range(len(s.ranks))
    )
    cause = f"{why}: going on with {_of(len(origins), state.world)} ranks"
    grace = 0.0
    if at is not None and state.furthest is not None:
        grace = PATIENCE + 2 * state.pace * max(0, at - state.furthest)
    arriving = frozenset(p.node.id for p in come)
    step(turn, ep.Resized(origins, why, cause, grace), arriving, seats=seats, at=at)
    return None


def _of(now: int, before: int) -> str:
    return f"{now} of {before}" if now <= before else f"{now} instead of {before}"


def grow(turn: Turn) -> None:
    """A node waits and there is room. If the program can go on in a larger world it does; else
    the others stop, and all start again with it.

    With sessions the workers finish a step first, all the same one (and write it down if they
    stop); a recovery under way comes to its end before.
    """
    state = turn.state
    if state.phase is not Phase.RUNNING or state.lost or not wants_more(state, turn.options):
        return
    if state.machine is None:
        stop_all(turn, "more nodes are there")
    elif state.machine.episode is None and state.machine.over is None:
        at = step_to_stop_at(state, turn.now)
        if _resize(turn, (), "more nodes are there", at) is not None:
            stop_all(turn, "more nodes are there", at=at)


# --- the machine's words -----------------------------------------------------------------------


def step(
    turn: Turn,
    event: ep.Event,
    arriving: frozenset[str] = frozenset(),
    *,
    seats: tuple[Seat, ...] = (),
    at: int | None = None,
) -> None:
    """Feed the machine and pass on what it says. ``arriving``: nodes whose workers are all
    started in what follows; ``seats``: those of the next generation, where they are others.
    """
    state = turn.state
    machine = state.machine or ep.State.fresh(state.world, state.generation)
    machine, effects = ep.advance(machine, event, turn.now, _bounds(turn))
    turn.set(machine=machine)
    fresh = frozenset(e.rank for e in effects if isinstance(e, ep.Replace))
    for effect in effects:
        if isinstance(effect, ep.Kill):
            node = turn.state.node_of(effect.rank)
            turn.tell(node, Kill(turn.state.generation, effect.rank, effect.why))
        elif isinstance(effect, ep.Regroup):
            if isinstance(event, ep.Resized):
                _reseat(turn, event, effect.generation, seats)
            _regroup(turn, effect.generation, fresh, arriving, at)
            # even if all members stay: who takes over must know that they are this generation's
            tell_roster(turn)
        elif isinstance(effect, ep.RestartGroup):
            _restart(turn, effect, event)
        elif isinstance(effect, ep.Recovered):
            _recovered(turn, effect)


def _bounds(turn: Turn) -> ep.Bounds:
    if turn.options.in_place:
        return ep.Bounds()
    return ep.Bounds(policy=ladder.Policy(enabled=frozenset({ladder.Strategy.RESTART})))


def _reseat(turn: Turn, event: ep.Resized, generation: int, seats: tuple[Seat, ...]) -> None:
    """The ranks are dealt anew, and the processes keep what is known of them."""
    state = turn.state
    now = {old: new for new, old in enumerate(event.ranks) if old is not None}
    born = {now[rank]: since for rank, since in state.born.items() if rank in now}
    turn.note(
        "resized",
        ranks=len(event.ranks),
        before=state.world,
        nodes=[seat.node for seat in seats],
        moved=ranks.moves(state.seats, seats),
    )
    turn.seat(seats)
    turn.set(born=born, shape=generation, peak=max(state.peak, len(seats)))


def _regroup(
    turn: Turn, generation: int, fresh: frozenset[int], arriving: frozenset[str], at: int | None
) -> None:
    """A new generation: ``fresh`` are new processes, the others stay."""
    state = turn.state
    seated = [state.peers[s.node] for s in state.seats if s.node in state.peers]
    host = next((p for p in seated if p.offer and p.node.id not in arriving), None)
    host = host or next((p for p in seated if p.offer), None)
    if host is None:
        stop_all(turn, "no node offered to serve a store")
        return
    turn.set(
        generation=generation,
        store=host.offer,
        host_of_store=host.node.id,
        born={**state.born, **dict.fromkeys(fresh, generation)},
    )
    turn.change(host.node.id, offer="")
    turn.elect()
    for seat in state.seats:
        if seat.node not in state.peers:
            continue  # it is lost as well, and next
        arrives = seat.node in arriving
        turn.change(seat.node, runs=generation, parked="")
        if arrives:
            turn.change(seat.node, numbers=())
        tell_regroup(turn, seat, generation - 1, arrives=arrives, at=at)
        turn.number(seat)


def tell_regroup(
    turn: Turn, seat: Seat, since: int, *, arrives: bool = False, at: int | None = None
) -> None:
    """Tell a node of the generation that runs; it knows of that of ``since``."""
    state = turn.state
    new = [state.born.get(rank, 0) > since for rank in seat.ranks]
    fresh = tuple(local for local, is_new in enumerate(new) if is_new)
    peer = state.peers.get(seat.node)
    if peer is None:
        return  # lost as well, which is dealt with in a moment
    before = peer.ranks_in(since) or seat.ranks
    previous = tuple(None if n else r for n, r in zip(new, before, strict=True))
    share = assignment(turn, state.places[seat.node], previous, fresh)
    episode = state.machine.episode if state.machine else None
    if arrives:
        turn.tell(seat.node, Assign(share))
    elif episode is None:
        turn.tell(seat.node, Regroup(share, 0, "the connection was lost", ""))
    else:
        strategy = _strategy(turn, episode)
        turn.tell(seat.node, Regroup(share, episode.number, episode.cause, strategy, at))


def _restart(turn: Turn, effect: ep.RestartGroup, event: ep.Event) -> None:
    if isinstance(event, ep.Gone | ep.Resized):
        stop_all(turn, event.how)  # a loss of a node is no fault of the program
        return
    state = turn.state
    node, failed = state.culprit or ("", None)
    if failed is None or node not in state.peers:
        node = state.node_of(getattr(event, "rank", 0))
        failed = Failed(state.generation, None, effect.why)
    fault(turn, node, failed, final=effect.why if effect.final else "")


def _strategy(turn: Turn, episode: ep.Episode) -> str:
    elastic = episode.strategy == ladder.Strategy.ELASTIC.value
    return RECOVER if turn.state.moved_in and not elastic else episode.strategy


def _recovered(turn: Turn, effect: ep.Recovered) -> None:
    done, state = effect.episode, turn.state
    lost = [n for _, r in done.reports if isinstance(n := r.get("lost_steps"), int) and n >= 0]
    told = Recovered(
        done.number,
        state.generation,
        _strategy(turn, done),
        effect.seconds,
        done.phases,
        tuple(sorted(done.replaced)),
        max(lost, default=None),
    )
    for seat in state.seats:
        turn.tell(seat.node, told)
    turn.note(
        "recovered",
        episode=told.episode,
        generation=told.generation,
        strategy=told.strategy,
        seconds=told.seconds,
        phases=dict(told.phases),
        replaced=list(told.replaced),
        lost_steps=told.lost_steps,
    )
    turn.set(moved_in=frozenset(), culprit=None)
    grow(turn)
