"""The words between the agents of one job and its coordinator. Pure values.

The coordinator feeds what it hears (``Said`` by a node, ``Lost`` nodes, ``Tick``) to
``rendezvous.job.advance`` and sends the effects (``To`` a node) back. The same values travel
on the wire (``phalanx.coordinator.wire``), so they hold nothing but None, bool, int, float,
str, tuples and mappings of those, and each other.

Times are seconds of the receiver's own clock; none travels. ``generation`` 0 means none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# --- what is agreed -----------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One agent, as it introduces itself.

    ``id`` is unique for each agent process. ``address`` is where its peers reach it (the host
    of a store it serves); ``endpoint`` ("host:port") where it would answer as coordinator.
    ``slots`` workers fit on it. ``rank``: ``--node-rank``, honoured or refused. ``spare``: takes
    part only in place of another.
    """

    id: str
    address: str
    endpoint: str = ""
    slots: int = 1
    rank: int | None = None
    spare: bool = False
    host: str = ""  # the host's name, for words to a person


@dataclass(frozen=True)
class Seat:
    """A node's place in a generation: global ranks by local rank, in order."""

    node: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Assignment:
    """One node's share of a generation. Immutable; equal for all but ``seat`` and ``group``.

    ``store`` is "host:port" of the workers' store, served by the node ``host_of_store`` on the
    listener it offered. ``previous``: the rank that each local rank's slot held before, None for
    a new one. ``fresh`` lists the local ranks whose process is to be started as a
    replacement (PHALANX_JOIN=1); None: the whole group starts (a new attempt). ``shape``: the
    generation in which the ranks were dealt out last; what was held in an earlier one may be
    another's now. ``beside``: the endpoints of the next nodes, which hold copies of this one's
    snapshots.
    """

    term: int
    generation: int
    attempt: int
    seat: Seat
    group: int  # the node's index among the members, GROUP_RANK
    groups: int  # how many nodes take part, GROUP_WORLD_SIZE
    world: int
    store: str
    host_of_store: str
    previous: tuple[int | None, ...] = ()
    fresh: tuple[int, ...] | None = None
    restarts_left: int = 0
    shape: int = 0
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How the job ended: ``status`` is the exit status of every agent; ``culprit`` a node id."""

    success: bool
    status: int = 0
    reason: str = ""
    culprit: str = ""


# --- what a node says ---------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """A worker here failed, and its program cannot be recovered in place.

    ``end``: the facts of ``agent.report.WorkerEnd`` in JSON. ``retryable`` false: a new try
    would not cure it (a node that cannot start its workers at all).
    """

    generation: int
    rank: int | None
    reason: str
    returncode: int | None = None
    end: Mapping[str, object] = field(default_factory=dict)
    retryable: bool = True


@dataclass(frozen=True)
class Share:
    """What has become of the workers of ``Join.held``, as their node sees it now: global ranks
    whose worker is ``in_loop`` (it said hello), ``resizes`` (and that it can go on in a world of
    another size), has ``finished``, or is ``dead``; ``done``: all
    have ended well; ``failed``: what was said of them.
    """

    in_loop: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    done: bool = False
    failed: Failed | None = None
    resizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Join:
    """I am here. Also after a lost connection and to a new coordinator.

    ``held``: the assignment whose workers run here now or have all ended well here, None if none
    do; ``share``: what has become of them, so that nothing is lost that was said to a
    coordinator just before its end. ``last``: the newest assignment it has had, also when none
    of its workers is left: what a new coordinator remembers. ``offer``: a listener
    ("host:port") that is bound and not used yet, for the store of the next generation.
    ``epoch``: the requeue's number; a finished epoch's verdict is told to late comers.
    ``promised``: the agents to which it has promised a term above the coordinator's. ``leads``:
    the coordinator is in this agent.
    """

    node: Node
    epoch: int = 0
    held: Assignment | None = None
    offer: str = ""
    share: Share | None = None
    last: Assignment | None = None
    promised: tuple[str, ...] = ()
    leads: bool = False


@dataclass(frozen=True)
class Offer:
    """Another unused listener for a store, since the last one was used."""

    store: str


@dataclass(frozen=True)
class WorkerEvent:
    """What happened to the worker of ``rank``: the events of ``recovery.episode`` by name.

    ``kind``: hello, died, fault, left, good_step, finished, stopped_at, dumped; ``data`` are the
    fields of that event without the rank. ``prepared`` (``step``): a checkpoint is written but
    for its mark, the answer is Commit or Refused; said again after each Join without an answer.
    ``died`` may have ``returncode`` and ``end`` too, as
    in ``Failed``: what ends the job is told with them.
    """

    generation: int
    rank: int
    kind: str
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Succeeded:
    """All workers here ended well."""

    generation: int


@dataclass(frozen=True)
class Stopped:
    """No worker of ``generation`` (or an earlier one) runs here any more: the answer to Stop."""

    generation: int
    steps: tuple[int, int] | None = None  # least and most finished, where known


@dataclass(frozen=True)
class Took:
    """The answer to each Assign and Regroup: this node knows of ``generation``, and promises
    nobody a term who does not."""

    generation: int


@dataclass(frozen=True)
class Progress:
    """The furthest finished step here; said at most once a second, never needed in time."""

    generation: int
    step: int


@dataclass(frozen=True)
class Leave:
    """I am going (SIGTERM, drain): a departure, not a fault."""

    reason: str


Saying = Join | Offer | WorkerEvent | Failed | Succeeded | Stopped | Took | Progress | Leave

# --- what the coordinator says -------------------------------------------------------------


@dataclass(frozen=True)
class Assign:
    """Take this seat: start the whole group, or only the ``fresh`` ones.

    No (term, generation) is started twice: one that is not higher than the last is ignored.
    """

    assignment: Assignment


@dataclass(frozen=True)
class Park:
    """Wait: there is no seat now (a spare, a surplus node, or quarantine until told)."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """End all workers of ``generation`` and answer Stopped. ``at``: finish that step first."""

    generation: int
    reason: str
    at: int | None = None


@dataclass(frozen=True)
class Regroup:
    """In place: tell the surviving workers here ``leave(generation - 1)`` and then ``join``.

    ``assignment.previous`` are the ranks that they held. ``at``: they finish that step before.
    """

    assignment: Assignment
    episode: int
    cause: str
    strategy: str
    at: int | None = None


@dataclass(frozen=True)
class Kill:
    """End the worker of ``rank`` with SIGKILL; its death is reported in turn."""

    generation: int
    rank: int
    why: str


@dataclass(frozen=True)
class Recovered:
    """The episode is over: for the words and the accounts of every agent."""

    episode: int
    generation: int
    strategy: str
    seconds: float
    phases: tuple[tuple[str, float], ...] = ()
    replaced: tuple[int, ...] = ()
    lost_steps: int | None = None


@dataclass(frozen=True)
class Dump:
    """``dump`` of docs/training.md for the workers here."""

    generation: int
    step: int
    writers: tuple[int, ...]
    commit: bool = False


@dataclass(frozen=True)
class Commit:
    """The checkpoint that ``rank`` has prepared may have its mark, within so many seconds from
    when it was prepared: until then no generation forms that the writer does not know of.
    """

    generation: int
    rank: int
    step: int
    within: float


@dataclass(frozen=True)
class Refused:
    """It may not: another generation may have been formed."""

    generation: int
    rank: int
    step: int
    reason: str


NO_RENDEZVOUS = 120
"""The exit status when the nodes did not find together; ``phalanx.agent.exit_codes``."""


@dataclass(frozen=True)
class Refuse:
    """You cannot take part; ``reason`` says why and what to do. The agent ends."""

    reason: str
    status: int = NO_RENDEZVOUS


@dataclass(frozen=True)
class Roster:
    """Who would take over, in order: (node id, endpoint) of the members and the spares.

    Sent when it changes. ``members`` counts the first entries: those whose majority decides.
    """

    term: int
    generation: int
    nodes: tuple[tuple[str, str], ...]
    members: int


@dataclass(frozen=True)
class Over:
    """The job is over: stop what runs, exit with the verdict's status, say goodbye (Leave)."""

    verdict: Verdict


Telling = (
    Assign
    | Park
    | Stop
    | Regroup
    | Kill
    | Recovered
    | Dump
    | Commit
    | Refused
    | Refuse
    | Roster
    | Over
)

# --- events and effects of the coordinator's machine ------------------------------------------


@dataclass(frozen=True)
class Said:
    """The node said this, on its current connection."""

    node: str
    what: Saying


@dataclass(frozen=True)
class Away:
    """The node's connection has closed, and it is being asked whether its agent has ended: ``Lost``
    follows, or the node's own ``Join``. Until then it is not counted on.
    """

    node: str


@dataclass(frozen=True)
class Lost:
    """The node's connection closed, or it was silent for too long; ``how`` is a clause.

    ``certain``: its agent ended while it was connected (the connection closed, and its machine
    answers that nobody listens at its endpoint). Not so if it was out of contact before, since it
    was silent or this process stopped: it may have promised its vote to another meanwhile, and
    those on its side may go on; so nothing is formed here by less than a majority. May be said
    again with ``certain`` true when the answer is there.
    """

    node: str
    how: str
    certain: bool = True


@dataclass(frozen=True)
class Tick:
    """The clock has passed a deadline (an early tick changes nothing)."""


Event = Said | Away | Lost | Tick


@dataclass(frozen=True)
class To:
    """Say this to that node."""

    node: str
    what: Telling


@dataclass(frozen=True)
class Note:
    """For the events record: ``kind`` and plain data."""

    kind: str
    data: Mapping[str, object] = field(default_factory=dict)


Effect = To | Note


@dataclass(frozen=True)
class Options:
    """What the job was started with. All agents must agree; the first one's count.

    Times in seconds. ``join``: how long fewer than ``least`` nodes are waited for, at first and
    after losses; ``last_call``: how long more are waited for once ``least`` are there, for the
    first generation only; ``rejoin``: how long a forming generation waits for live members to
    stop their workers; ``recall``: how long a new coordinator waits for the members of the last
    generation to come. ``on_split``: "wait" or "continue" when one of two nodes may be beyond a
    cut. ``commit_within``: how long a word to commit is good for. ``spares`` nodes beyond
    ``most`` wait; further ones do too.
    """

    least: int = 1
    most: int = 1
    spares: int = 0
    join: float = 600.0
    last_call: float = 30.0
    rejoin: float = 60.0
    recall: float = 5.0
    max_restarts: int = 3
    in_place: bool = True
    on_split: str = "wait"
    commit_within: float = 5.0
    node_failures: int = 3
    quarantine: float = 600.0
    epoch: int = 0
