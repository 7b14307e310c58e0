"""Which node holds which ranks. Pure.

Ranks are 0..world-1, a node's are consecutive, and as few as possible change hands: whoever
stays keeps its place, a newcomer takes a hole, and without one the highest node moves into
the lowest hole. With unequal slots the places cannot be exchanged like that; then the nodes
keep their order and close up, and a newcomer takes a hole of just its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.rendezvous.model import Node, Seat


def clash(node: Node, others: Sequence[Node], most: int) -> str | None:
    """Why ``node`` cannot take part beside ``others``: a sentence, or None if it can."""
    if node.slots < 1:
        return f"the agent on {_who(node)} offers {node.slots} workers; at least 1 is needed"
    if node.rank is None:
        return None
    if not 0 <= node.rank < most:
        return (
            f"--node-rank {node.rank} of {_who(node)} is not one of the job's {most}: "
            f"give 0 to {most - 1}"
        )
    for other in others:
        if other.rank == node.rank and other.id != node.id:
            return (
                f"--node-rank {node.rank} is given to {_who(other)} and to {_who(node)}: "
                "give each node its own, or none to any"
            )
    return None


def _who(node: Node) -> str:
    return f"{node.host} ({node.address})" if node.host else node.address


def seats(members: Sequence[Node], before: Sequence[Seat] = ()) -> tuple[Seat, ...]:
    """The seats of ``members`` (in the order in which they came), in the order of ranks.

    ``before``: the seats of the last generation, also of nodes that are gone. A node's
    ``rank`` (``--node-rank``) is its place where there are that many nodes.
    """
    before = sorted(before, key=lambda seat: seat.ranks)
    if _even(members, before):
        order = _places(members, [seat.node for seat in before])
    else:
        order = _in_line(members, before)
    out, first = [], 0
    for node in order:
        out.append(Seat(node.id, tuple(range(first, first + node.slots))))
        first += node.slots
    return tuple(out)


def _even(members: Sequence[Node], before: Sequence[Seat]) -> bool:
    """Whether all nodes, then and now, have equally many ranks, so that places can be swapped."""
    return len({n.slots for n in members} | {len(seat.ranks) for seat in before}) <= 1


def _places(members: Sequence[Node], before: Sequence[str]) -> list[Node]:
    taken: dict[int, Node] = {}
    waiting = {node.id: node for node in members}

    def put(node: Node, place: int) -> None:
        taken[place] = waiting.pop(node.id)

    count = len(members)
    for node in members:
        if node.rank is not None and node.rank < count and node.rank not in taken:
            put(node, node.rank)
    for place, name in enumerate(before[:count]):
        if name in waiting and place not in taken:
            put(waiting[name], place)
    old = {name: place for place, name in enumerate(before)}
    displaced = sorted(
        (node for node in waiting.values() if node.id in old), key=lambda node: -old[node.id]
    )
    late = [node for node in waiting.values() if node.id not in old]
    late.sort(key=lambda node: node.rank if node.rank is not None else count)
    holes = [place for place in range(count) if place not in taken]
    for node, place in zip([*displaced, *late], holes, strict=True):
        put(node, place)
    return [taken[place] for place in range(count)]


def _in_line(members: Sequence[Node], before: Sequence[Seat]) -> list[Node]:
    here = {node.id: node for node in members}
    if any(node.rank is not None for node in members):
        count = len(members)
        old = {seat.node: place for place, seat in enumerate(before)}

        def key(node: Node) -> tuple[int, int]:
            return (count if node.rank is None else node.rank, old.get(node.id, count))

        return sorted(members, key=key)
    known = {seat.node for seat in before}
    late = [node for node in members if node.id not in known]
    line = []
    for seat in before:
        if seat.node in here:
            line.append(here[seat.node])
            continue
        fits = next((node for node in late if node.slots == len(seat.ranks)), None)
        if fits is not None:
            late.remove(fits)
            line.append(fits)
    return [*line, *late]


def moves(before: Sequence[Seat], after: Sequence[Seat]) -> int:
    """How many nodes that stay have other ranks than before."""
    old = {seat.node: seat.ranks for seat in before}
    return sum(seat.node in old and old[seat.node] != seat.ranks for seat in after)
