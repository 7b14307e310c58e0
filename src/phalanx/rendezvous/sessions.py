"""Recovery in place over several nodes: the machine of one group of workers, and its words
turned into words to nodes.

``recovery.episode`` decides for the ranks of the generation that runs; which node is told what
follows here. A node that is lost while another one waits is one fault of all its ranks: the
other takes its seat, and the survivors keep their processes.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from phalanx.recovery import episode as ep
from phalanx.recovery import ladder
from phalanx.rendezvous.budgets import fault
from phalanx.rendezvous.forming import assignment, available, grow, stop_all
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
    if seat is None or what.rank not in seat.ranks:
        return
    if not state.born.get(what.rank, state.base) <= what.generation <= state.generation:
        return
    event = event_of(what)
    if event is None:
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
            worker_event(turn, node, WorkerEvent(generation, rank, "hello"))
    for rank in what.finished:
        worker_event(turn, node, WorkerEvent(generation, rank, "finished"))


def deaths(turn: Turn, node: str, what: Share, generation: int) -> None:
    """And who does not."""
    how = {"how": "died while there was no coordinator"}
    for rank in what.dead:
        if turn.state.phase is Phase.RUNNING:
            worker_event(turn, node, WorkerEvent(generation, rank, "died", how))


# --- nodes that are lost -----------------------------------------------------------------------


def substitute(turn: Turn, seat: Seat) -> Peer | None:
    """A node that waits and could take this seat in place; None: there is none, or the program
    cannot be recovered in place."""
    state = turn.state
    if state.machine is None or state.machine.over is not None or not turn.options.in_place:
        return None
    fenced = state.fence_until is not None and turn.now < state.fence_until
    if not state.has_quorum(turn.options) or (fenced and state.unsure - state.dead):
        return None
    place = state.places[seat.node]
    fitting = (
        p
        for p in available(state)
        if (p.node.id not in state.places or p.node.id == seat.node)
        and p.node.slots == len(seat.ranks)
        and p.node.rank in (None, place)
    )
    return next(fitting, None)


def move_in(turn: Turn, seat: Seat, peer: Peer, why: str) -> None:
    """The node takes the seat of one that is lost, as one fault of all its ranks."""
    state = turn.state
    place = state.places[seat.node]
    seats = list(state.seats)
    seats[place] = Seat(peer.node.id, seat.ranks)
    turn.seat(tuple(seats))
    turn.set(moved_in=state.moved_in | {peer.node.id})
    turn.note("seat_taken", node=peer.node.id, of=seat.node, ranks=list(seat.ranks))
    step(turn, ep.Gone(seat.ranks, why), arriving=peer.node.id)


# --- the machine's words -----------------------------------------------------------------------


def step(turn: Turn, event: ep.Event, arriving: str = "") -> None:
    """Feed the machine and pass on what it says."""
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
            _regroup(turn, effect.generation, fresh, arriving)
        elif isinstance(effect, ep.RestartGroup):
            _restart(turn, effect, event)
        elif isinstance(effect, ep.Recovered):
            _recovered(turn, effect)


def _bounds(turn: Turn) -> ep.Bounds:
    if turn.options.in_place:
        return ep.Bounds()
    return ep.Bounds(policy=ladder.Policy(enabled=frozenset({ladder.Strategy.RESTART})))


def _regroup(turn: Turn, generation: int, fresh: frozenset[int], arriving: str) -> None:
    """A new generation of the same ranks: ``fresh`` are new processes, the others stay."""
    state = turn.state
    seated = [state.peers[s.node] for s in state.seats if s.node in state.peers]
    host = next((p for p in seated if p.offer and p.node.id != arriving), None)
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
        turn.change(seat.node, runs=generation, parked="")
        tell_regroup(turn, seat, generation - 1, arrives=seat.node == arriving)
    if arriving:
        tell_roster(turn)


def tell_regroup(turn: Turn, seat: Seat, since: int, *, arrives: bool = False) -> None:
    """Tell a node of the generation that runs; it knows of that of ``since``."""
    state = turn.state
    new = [state.born.get(rank, 0) > since for rank in seat.ranks]
    fresh = tuple(local for local, is_new in enumerate(new) if is_new)
    previous = tuple(None if n else r for n, r in zip(new, seat.ranks, strict=True))
    share = assignment(turn, state.places[seat.node], previous, fresh)
    episode = state.machine.episode if state.machine else None
    if arrives:
        turn.tell(seat.node, Assign(share))
    elif episode is None:
        turn.tell(seat.node, Regroup(share, 0, "the connection was lost", ""))
    else:
        strategy = RECOVER if state.moved_in else episode.strategy
        turn.tell(seat.node, Regroup(share, episode.number, episode.cause, strategy))


def _restart(turn: Turn, effect: ep.RestartGroup, event: ep.Event) -> None:
    if isinstance(event, ep.Gone):
        stop_all(turn, event.how)  # a loss of a node is no fault of the program
        return
    state = turn.state
    node, failed = state.culprit or ("", None)
    if failed is None or node not in state.peers:
        node = state.node_of(getattr(event, "rank", 0))
        failed = Failed(state.generation, None, effect.why)
    fault(turn, node, failed, final=effect.why if effect.final else "")


def _recovered(turn: Turn, effect: ep.Recovered) -> None:
    done, state = effect.episode, turn.state
    lost = [n for _, r in done.reports if isinstance(n := r.get("lost_steps"), int) and n >= 0]
    told = Recovered(
        done.number,
        state.generation,
        RECOVER if state.moved_in else done.strategy,
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
