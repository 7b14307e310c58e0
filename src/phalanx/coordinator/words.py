"""What travels besides the words of ``phalanx.rendezvous.model``: who calls, and who answers."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.rendezvous.model import Node, Options

VERSION = 1


@dataclass(frozen=True)
class Hello:
    """The first word of an agent on its stream. ``term`` of the envelope: the highest it knows."""

    run_id: str
    node: str
    epoch: int = 0
    version: int = VERSION
    options: Options | None = None


@dataclass(frozen=True)
class Welcome:
    """I am the coordinator, in the envelope's term. ``silence``: seconds without a sign of life
    after which either end counts as lost. ``separate``: I am no agent, and none is to take my
    place."""

    coordinator: str
    silence: float
    separate: bool = False


@dataclass(frozen=True)
class Beat:
    """I am alive: said by an agent three times in each ``Welcome.silence``, and answered."""


@dataclass(frozen=True)
class Moved:
    """I am not the coordinator; ``endpoint`` ("host:port") is, as far as I know. "": nobody."""

    endpoint: str = ""


@dataclass(frozen=True)
class StatusRequest:
    """What is the state of the job? ``run_id`` "": of any."""

    run_id: str = ""


@dataclass(frozen=True)
class StatusReply:
    """``text`` is a JSON object (``hub.Hub.status``)."""

    text: str


# --- snapshots at another node ----------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """The snapshot of a rank after ``step``, of ``length`` bytes, follows in Pieces, then CopyEnd.
    ``kind`` as in `process.slate`. ``forget``: nothing follows; the steps after this one are
    void, for the rank has gone back to it."""

    run_id: str
    generation: int
    rank: int
    world: int
    step: int
    length: int = 0
    kind: int = 0
    forget: bool = False


@dataclass(frozen=True)
class Piece:
    """The body is a part of a snapshot as it is."""


@dataclass(frozen=True)
class CopyEnd:
    """``checksum``: CRC-32 of the whole."""

    checksum: int


@dataclass(frozen=True)
class Held:
    """What was sent is held. ``why``: it is not, and why."""

    why: str = ""


@dataclass(frozen=True)
class Wanted:
    """Which snapshots are held of these ranks?"""

    run_id: str
    ranks: tuple[int, ...]
    world: int


# --- to the agent, not on the wire ----------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """There is a coordinator (again, or another): answer with Join before anything else.

    ``node`` is this agent's, with ``address`` (by which the coordinator is reached from here) and
    ``endpoint`` filled in. ``term`` is the coordinator's.
    """

    node: Node
    term: int
    coordinator: str = ""


@dataclass(frozen=True)
class Copied:
    """The snapshot of ``rank`` after ``step`` is on its way no more: the neighbour holds it, or
    it could not be had."""

    rank: int
    step: int


@dataclass(frozen=True)
class Alone:
    """The coordinator is lost; ``how`` is a clause. It is looked for, or another is elected."""

    how: str
