"""What one job's state machine holds, is told, and asks for. Immutable values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from phalanx.recovery import words


class State(str, Enum):
    """Where one job stands. ``AWAITS`` in :mod:`phalanx.recovery.table` says what for."""

    IDLE = "idle"
    STOPPING = "stopping"
    CLEARING = "clearing"
    AGREEING = "agreeing"
    ROUTING = "routing"
    RETRYING = "retrying"
    RESTARTING = "restarting"
    REPLACING = "replacing"
    SHRINKING = "shrinking"
    ISOLATING = "isolating"
    SMALLER = "smaller"
    GROWING = "growing"
    SAVING = "saving"
    DUMPING = "dumping"
    EXITING = "exiting"
    KILLING = "killing"
    PAUSING = "pausing"
    SWITCHING = "switching"
    TESTING = "testing"
    CONTINUING = "continuing"
    PREPARING = "preparing"
    SPARE_RUNNING = "spare-running"
    OLD_LEAVING = "old-leaving"
    MIGRATING = "migrating"


@dataclass(frozen=True)
class Node:
    """A node of a job: its rank, its names, its global ranks."""

    rank: int
    name: str = ""
    ip: str = ""
    sn: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobConfig:
    """What a job enables, and its bounds in seconds.

    ``strategies`` are names of the ladder (``recover-strategy`` of ClusterD); use
    :func:`phalanx.recovery.choice.enabled` to get them in order with ``exit`` added.
    """

    strategies: tuple[str, ...] = (words.EXIT,)
    enabled: bool = True
    sub_healthy: str = "ignore"  # ignore, graceExit, hotSwitch
    world_size: int = 0  # 0: not known
    devices_per_node: int = 0  # 0: not known
    nodes: tuple[Node, ...] = ()
    spares: int | None = None  # None: not known
    watches_nodes: bool = False  # somebody tells when a node has been replaced
    report_timeout: float = 900.0
    answer_timeout: float = 60.0  # how long a client waits for our next word
    reschedule_timeout: float = 270.0
    clear_wait: float = 15.0
    routing_wait: float = 3.0
    exit_wait: float = 135.0
    kill_wait: float = 60.0
    spare_wait: float = 60.0
    leave_wait: float = 900.0
    max_rounds: int = 16

    def node_of(self, rank: int) -> int | None:
        """The node rank that a global rank lives on; None when nobody has said."""
        for node in self.nodes:
            if rank in node.ranks:
                return node.rank
        return rank // self.devices_per_node if self.devices_per_node > 0 else None

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The global ranks of a node; empty when nobody has said."""
        for known in self.nodes:
            if known.rank == node and known.ranks:
                return known.ranks
        if self.devices_per_node <= 0:
            return ()
        first = node * self.devices_per_node
        last = first + self.devices_per_node
        return tuple(range(first, min(last, self.world_size) if self.world_size else last))


@dataclass(frozen=True)
class Fault:
    """One rank's fault. ``source`` names the device fault it came from; "": the client's word."""

    rank: int
    kind: int = words.NORMAL
    source: str = ""
    level: str = ""
    incarnation: int = 0
    reason: str = ""

    @property
    def what(self) -> tuple[int, int, str]:
        """What makes two reports the same fault, of the same process or an older one."""
        return (self.rank, self.kind, self.source)


@dataclass(frozen=True)
class Key:
    """What makes a signal itself, however often it is delivered."""

    uuid: str
    signal: str
    strategy: str = ""
    round: int = 0


@dataclass(frozen=True)
class Signal:
    """A ``ProcessManageSignal`` before it has a job id and bytes."""

    key: Key
    actions: tuple[str, ...] = ()
    ranks: tuple[tuple[int, int], ...] = ()  # (rank, fault type)
    timeout: int = 0
    nodes: tuple[int, ...] = ()
    extra: str = ""
    report_within: int = 0
    reason: str = ""
    repeatable: bool = False  # an original client may get it twice without harm


@dataclass(frozen=True)
class Received:
    """A ``ProcessManageSignal`` as it came to a client, with plain values."""

    key: Key
    job_id: str
    signal: str
    actions: tuple[str, ...]
    ranks: dict[int, int]
    strategy: str
    timeout: int
    nodes: tuple[int, ...]
    extra: str
    report_within: int
    reason: str
    again: bool

    @property
    def in_place(self) -> bool:
        """The strategy is recover-in-place (which is ``recover`` on the wire)."""
        return self.extra == words.IN_PLACE


@dataclass(frozen=True)
class Maintenance:
    """A NIC switch or a stress test in progress, or a hot switch."""

    kind: str  # nic, stress, node
    ranks: tuple[str, ...] = ()
    ops: tuple[bool, ...] = ()
    stress: tuple[tuple[str, tuple[int, ...]], ...] = ()
    node: int = -1
    message: str = ""


@dataclass(frozen=True)
class Job:
    """One job's whole recovery state; what the journal holds."""

    job_id: str
    config: JobConfig = field(default_factory=JobConfig)
    next_config: JobConfig | None = None
    state: State = State.IDLE
    episode: int = 0  # counts up
    round: int = 0  # within the episode
    uuid: str = ""
    began: float = 0.0  # seconds, wall clock
    entered: float = 0.0
    deadline: float | None = None
    node_deadline: float | None = None
    faults: tuple[Fault, ...] = ()  # of this round
    waiting: tuple[Fault, ...] = ()  # for the next round
    present: tuple[Fault, ...] = ()  # device faults that have not been cleared
    replaced: tuple[int, ...] = ()  # nodes replaced in this round
    isolated: tuple[int, ...] = ()  # nodes that scale-in has sent away
    stay: tuple[int, ...] = ()  # nodes whose processes can be restarted in place
    reported: tuple[str, ...] = ()
    barred: tuple[tuple[str, str], ...] = ()  # (strategy, why) of this round
    chosen: str = ""
    why: str = ""
    retried: bool = False
    open: Signal | None = None
    delivered: bool = False
    maintenance: Maintenance | None = None
    switch_off: bool = False  # a hot switch failed: no further ones for this job
    subscribed: bool = False
    keyed: bool = False
    client: str = ""
    incarnation: int = 0
    seen_reports: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()  # marks of the keyed reports taken last
    outcome: str = ""  # of the last episode
    phases: tuple[tuple[str, float], ...] = ()  # (state, seconds) of this episode


# ------------------------------------------------------------------ events


@dataclass(frozen=True)
class Event:
    """Something the machine is told."""


@dataclass(frozen=True)
class FaultSeen(Event):
    """Faults of ranks: from the client (ReportProcessFault) or from a device."""

    faults: tuple[Fault, ...]
    report: str = ""


@dataclass(frozen=True)
class FaultCleared(Event):
    source: str


@dataclass(frozen=True)
class Report(Event):
    """What the three reports have in common; ``key`` only from our own clients."""

    ranks: tuple[int, ...] = ()
    key: Key | None = None


@dataclass(frozen=True)
class StopComplete(Report):
    code: int = 0
    info: str = ""


@dataclass(frozen=True)
class Strategies(Report):
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status(Report):
    code: int = 0
    info: str = ""
    strategy: str = ""
    isolate: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeout(Event):
    """The state's bound has passed."""


@dataclass(frozen=True)
class NodeTimeout(Event):
    """No replacement for a node in time."""


@dataclass(frozen=True)
class NodeReplaced(Event):
    node: int


@dataclass(frozen=True)
class NodeReady(Event):
    node: int


@dataclass(frozen=True)
class NodeGone(Event):
    node: int


@dataclass(frozen=True)
class Subscribed(Event):
    client: str = ""
    incarnation: int = 0
    keyed: bool = False


@dataclass(frozen=True)
class Unsubscribed(Event):
    pass


@dataclass(frozen=True)
class Delivered(Event):
    """The open signal was handed to the transport, or the client acknowledged it."""

    key: Key


@dataclass(frozen=True)
class SwitchNic(Event):
    ranks: tuple[str, ...] = ()
    ops: tuple[bool, ...] = ()


@dataclass(frozen=True)
class NicSwitched(Event):
    ok: bool


@dataclass(frozen=True)
class StressTest(Event):
    stress: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class StressTested(Event):
    """Per rank the worst code: "0" ok, "1" not run, "2" to "4" faulty."""

    codes: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class HotSwitch(Event):
    node: int


@dataclass(frozen=True)
class Configured(Event):
    config: JobConfig


@dataclass(frozen=True)
class GiveUp(Event):
    reason: str = ""


# ------------------------------------------------------------------ effects


@dataclass(frozen=True)
class Effect:
    """Something the machine asks for, to be done once the new state is in the journal."""


@dataclass(frozen=True)
class Send(Effect):
    """The open signal, to the job's subscriber; repeated under its key to the next one."""

    signal: Signal
    again: bool = False


@dataclass(frozen=True)
class Tell(Effect):
    """A signal that nobody waits for; lost when nobody listens."""

    signal: Signal


@dataclass(frozen=True)
class ToWorkers(Effect):
    """The NIC or stress order, to the worker-side stream."""

    maintenance: Maintenance


@dataclass(frozen=True)
class ToOperator(Effect):
    """The end of a NIC switch or stress test, to whoever asked for it."""

    kind: str
    message: str


@dataclass(frozen=True)
class ResetFile(Effect):
    """The reset.json side channel: flushing, faults, clear or restart."""

    operation: str
    ranks: tuple[int, ...] = ()
    in_place: bool = False


@dataclass(frozen=True)
class Record(Effect):
    """A line for the events record."""

    kind: str
    data: Mapping[str, object]


@dataclass(frozen=True)
class Outcome:
    """What came of one event: the new state, what to do, and what to answer the sender."""

    job: Job
    effects: tuple[Effect, ...] = ()
    code: int = 0
    info: str = ""
    changed: bool = True  # False: nothing to put into the journal
