"""What the coordinator knows, and the hand that changes it for the length of one event."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from phalanx.recovery import episode as ep
from phalanx.recovery import policy
from phalanx.rendezvous.model import (
    Assignment,
    Effect,
    Failed,
    Node,
    Note,
    Options,
    Roster,
    Saying,
    Seat,
    Share,
    Telling,
    To,
    Verdict,
)

SPARES = 1.0
"""Seconds for which a new coordinator waits for a spare when a seat is empty."""

CANDIDATES = 32
"""How many nodes are told the whole roster; the others are told these only, so that the bytes
of a generation grow with the number of nodes and not with its square."""


class Phase(str, Enum):
    """Where the job stands."""

    RECALL = "recall"  # after a takeover: the members say what runs
    GATHERING = "gathering"  # no worker runs; a generation forms when it can
    RUNNING = "running"
    STOPPING = "stopping"  # the workers are told to end
    OVER = "over"


@dataclass(frozen=True)
class Peer:
    """A node that is connected."""

    node: Node
    since: int  # the how manieth to come
    offer: str = ""
    runs: int = 0  # the generation whose workers may run there, 0 for none
    held: Assignment | None = None  # what it said it holds, until the coordinator knows itself
    share: Share | None = None  # and what it said has become of it
    last: Assignment | None = None  # what it had last
    parked: str = ""  # why it was told to wait
    promised: tuple[str, ...] = ()  # whom it has promised a term above this coordinator's
    leads: bool = False  # the coordinator is in its agent
    # the ranks of its workers, each with the generation since which they are called so
    numbers: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ranks_in(self, generation: int) -> tuple[int, ...]:
        """What its workers were called in that generation; () if it had none."""
        return next((ranks for since, ranks in reversed(self.numbers) if since <= generation), ())


@dataclass(frozen=True)
class Record:
    """What is held against a node; kept when its agent is gone. ``faults``: when they were;
    ``until``: it is left out until then.
    """

    host: str
    address: str
    faults: tuple[float, ...] = ()
    until: float | None = None


@dataclass(frozen=True)
class Electorate:
    """The members from a generation on: a majority of them makes a coordinator."""

    generation: int
    nodes: frozenset[str]


@dataclass(frozen=True)
class State:
    """One job. ``seats``, ``store`` and what is done belong to ``generation``, or, while none
    runs, to the last one: ranks follow from it.
    """

    term: int = 1
    epoch: int = 0
    phase: Phase = Phase.GATHERING
    peers: Mapping[str, Peer] = field(default_factory=dict)
    arrivals: int = 0
    generation: int = 0
    attempt: int = -1
    seats: tuple[Seat, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)  # each node's index in seats
    base: int = 0  # the generation in which the whole group was started last
    born: Mapping[int, int] = field(default_factory=dict)  # since then: ranks started in place
    shape: int = 0  # the generation since which every node has the ranks it has
    store: str = ""
    host_of_store: str = ""
    # Those whose majority counts: of the last generation, and of earlier ones of whose members
    # not yet a majority knows of a later one.
    electorates: tuple[Electorate, ...] = ()
    knows: Mapping[str, int] = field(default_factory=dict)  # the newest generation a node knows of
    dead: frozenset[str] = frozenset()  # of the unsure: ended for certain, votes uncertain
    unsure: frozenset[str] = frozenset()  # of them, those that may be beyond a cut, lost or not yet
    fence_until: float | None = None  # until then a member that is lost may use a word to commit
    done: frozenset[str] = frozenset()  # nodes whose workers have all ended well
    began: float = 0.0
    furthest: int | None = None  # the last finished step that anybody told of
    told_at: float = 0.0  # when that was
    pace: float = 0.0  # seconds a step, 0 while not known
    machine: ep.State | None = None  # once a worker has said hello
    moved_in: frozenset[str] = frozenset()  # nodes that took a seat in the episode
    culprit: tuple[str, Failed] | None = None  # of the last death: its node, what it died of
    records: Mapping[str, Record] = field(default_factory=dict)
    peak: int = 0  # the most nodes that any generation had
    # bounds on the waits of the phase
    gather_by: float | None = None  # for enough nodes
    call_by: float | None = None  # for more than enough
    stop_by: float | None = None  # for the workers' ends
    offer_by: float | None = None  # for a store
    start_at: float | None = None  # the back-off after a fault
    recall_by: float | None = None
    spares_by: float | None = None  # until then also for those that wait
    gone: frozenset[str] = frozenset()  # in RECALL: members that will not come
    roster: Roster | None = None  # in RECALL: the last coordinator's
    # What was said and is yet to be taken: in RECALL, and while ``lost`` waits.
    heard: tuple[tuple[str, Saying], ...] = ()
    # In RUNNING: nodes that are lost, and why, as long as nothing can be done about their seats.
    lost: tuple[tuple[str, str], ...] = ()
    attempts: tuple[policy.Attempt, ...] = ()  # those that a fault ended
    spent: int = 0  # restarts used under earlier coordinators
    # a failure that looks like the echo of another one, and until when that one is waited for
    echo: tuple[str, Failed] | None = None
    judge_by: float | None = None
    why: str = ""  # why the workers are to end
    stop_at: int | None = None  # after which step
    verdict: Verdict | None = None

    @staticmethod
    def fresh(term: int = 1, epoch: int = 0) -> State:
        """A job nobody has come to yet."""
        return State(term=term, epoch=epoch)

    @staticmethod
    def recall(
        term: int,
        now: float,
        options: Options,
        gone: frozenset[str] = frozenset(),
        absent: frozenset[str] = frozenset(),
        roster: Roster | None = None,
    ) -> State:
        """After a takeover: the members of the last generation are waited for; what runs is
        what they say. Not waited for are those ``gone`` (their agents have ended for certain)
        and those ``absent`` (the last coordinator's node, which does not answer; if it is also
        ``gone``, its end was seen). ``roster``:
        the last that is known.
        """
        return State(
            term=term,
            epoch=options.epoch,
            phase=Phase.RECALL,
            recall_by=now + options.recall,
            fence_until=now + options.commit_within,
            roster=roster,
            gone=gone & absent,
            dead=gone - absent,
            unsure=(absent | gone) - (gone & absent),
            spares_by=now + SPARES,
        )

    @property
    def settled(self) -> bool:
        """Over, and all have said goodbye: the coordinator may end."""
        return self.phase is Phase.OVER and not self.peers

    @property
    def world(self) -> int:
        return self.seats[-1].ranks[-1] + 1 if self.seats else 0

    def seat_of(self, node: str) -> Seat | None:
        place = self.places.get(node)
        return None if place is None else self.seats[place]

    def node_of(self, rank: int) -> str:
        place = bisect_right(self.seats, rank, key=lambda seat: seat.ranks[0]) - 1
        return self.seats[place].node

    def has_quorum(self, options: Options) -> bool:
        """Whether no other side of a cut can have a majority of the members: what is formed or
        committed here is then the job's.

        Half of them is enough for a coordinator while no other can be elected: none of that half
        has promised a later term to somebody who is not here. Of two coordinators the earlier one
        has such a member in its half, since a majority has elected the later one. It does not
        count itself: when its end is seen the others are a majority without it.
        """
        return all(self._is_majority(voters, options) for voters in self.electorates)

    def _is_majority(self, voters: Electorate, options: Options) -> bool:
        lost = len(voters.nodes & self.unsure)
        if not lost:
            return True
        here = [self.peers[n] for n in voters.nodes - self.unsure if n in self.peers]
        follow = self.peers.keys() - self.unsure  # they stand for nothing now
        loyal = sum(not p.leads and follow.issuperset(p.promised) for p in here)
        if len(here) > lost or 2 * loyal >= len(voters.nodes):
            return True
        return len(voters.nodes) == 2 and options.on_split == "continue"

    def is_out(self, node: str) -> bool:
        """Whether the node is left out for its faults."""
        record = self.records.get(node)
        return record is not None and record.until is not None


def next_deadline(state: State) -> float | None:
    """When the next Tick is due; None while nothing is waited for."""
    let_in = [r.until for r in state.records.values() if r.until is not None]
    machine = None if state.machine is None else ep.next_deadline(state.machine)
    due: tuple[float | None, ...] = {
        Phase.RECALL: (state.recall_by, state.spares_by),
        Phase.GATHERING: (
            state.gather_by,
            state.call_by,
            state.offer_by,
            state.start_at,
            state.fence_until if state.unsure - state.dead else None,
            *let_in,
        ),
        Phase.STOPPING: (state.stop_by, state.judge_by),
        Phase.RUNNING: (machine, state.fence_until if state.lost else None, *let_in),
        Phase.OVER: (),
    }[state.phase]
    return min((t for t in due if t is not None), default=None)


class Turn:
    """The handling of one event: the state as it is changed, and the effects so far."""

    def __init__(self, state: State, now: float, options: Options) -> None:
        self.state = state
        self.now = now
        self.options = options
        self.effects: list[Effect] = []
        self._peers: dict[str, Peer] | None = None

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def seat(self, seats: tuple[Seat, ...]) -> None:
        self.set(seats=seats, places={seat.node: place for place, seat in enumerate(seats)})

    def elect(self) -> None:
        """The nodes that have seats are those whose majority counts, beside earlier ones."""
        nodes = frozenset(self.state.places)
        old = self.state.electorates
        if not old or old[-1].nodes != nodes:
            self.set(electorates=(*old, Electorate(self.state.generation, nodes)))
            self.retire()

    def hear_of(self, node: str, generation: int) -> None:
        """The node knows of this generation."""
        if len(self.state.electorates) > 1 and self.state.knows.get(node, 0) < generation:
            self.set(knows={**self.state.knows, node: generation})
            self.retire()

    def retire(self) -> None:
        """Forget electorates none of which could elect anybody any more: of the living a
        majority knows of the next one, and promises nothing to who does not."""
        state = self.state
        while len(state.electorates) > 1:
            first, following = state.electorates[:2]
            living = [n for n in first.nodes if n in state.peers or n in state.unsure]
            know = sum(state.knows.get(n, 0) >= following.generation for n in living)
            if 2 * know <= len(living) and living:
                break
            state = replace(state, electorates=state.electorates[1:])
        if state is not self.state:
            voters = frozenset[str]().union(*(e.nodes for e in state.electorates))
            knows = {} if len(state.electorates) == 1 else state.knows
            unsure = state.unsure & voters
            self.state = replace(state, unsure=unsure, dead=state.dead & unsure, knows=knows)

    def _own_peers(self) -> dict[str, Peer]:
        if self._peers is None or self._peers is not self.state.peers:
            self._peers = dict(self.state.peers)
            self.set(peers=self._peers)
        return self._peers

    def put(self, peer: Peer) -> None:
        self._own_peers()[peer.node.id] = peer

    def change(self, node: str, **changes: object) -> None:
        peer = self.state.peers.get(node)
        if peer is not None:
            self.put(replace(peer, **changes))  # type: ignore[arg-type]

    def number(self, seat: Seat) -> None:
        """From this generation on the node's workers have the seat's ranks."""
        peer = self.state.peers.get(seat.node)
        if peer is None:
            return
        if not peer.numbers or peer.numbers[-1][1] != seat.ranks:
            numbers = (*peer.numbers, (self.state.generation, seat.ranks))
            self.put(replace(peer, numbers=numbers))

    def drop(self, node: str) -> None:
        self._own_peers().pop(node, None)

    def tell(self, node: str, what: Telling) -> None:
        self.effects.append(To(node, what))

    def note(self, kind: str, **data: object) -> None:
        self.effects.append(Note(kind, data))

    def name(self, node: str) -> str:
        """The node in words for a person."""
        peer = self.state.peers.get(node)
        if peer is None:
            return node
        return peer.node.host or peer.node.address or node


def tell_roster(turn: Turn, only: str | None = None) -> None:
    """Tell who would take over: all of it to the first ones, the first ones to all."""
    state = turn.state
    seated = [seat.node for seat in state.seats if seat.node in state.peers]
    here = set(seated)
    waiting = sorted(
        (p for p in state.peers.values() if p.node.id not in here), key=lambda p: p.since
    )
    order = [state.peers[node].node for node in seated] + [p.node for p in waiting]
    nodes = tuple((node.id, node.endpoint) for node in order)
    whole = Roster(state.term, state.generation, nodes, len(seated))
    short = replace(whole, nodes=nodes[:CANDIDATES])
    for place, (node, _) in enumerate(nodes):
        if only in (None, node):
            turn.tell(node, whole if place < CANDIDATES else short)
        elif place < CANDIDATES:
            turn.tell(node, whole)  # the newcomer is in it
