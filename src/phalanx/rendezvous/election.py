"""Who coordinates next, when the coordinator is lost. Pure.

Agents stand in the order of the roster; the first of them that lives asks the members of the
last generation for the next term. A member promises each term once, and none while it still
hears a coordinator. A majority of the members makes it coordinator, where a coordinator whose
end was seen does not count as one; so of two halves of a job at most one has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from phalanx.rendezvous.model import Roster, Verdict

# --- what agents ask each other -----------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """Promise me this term: I (``candidate``, at ``endpoint``) have lost the coordinator.
    ``generation``: the last that I know."""

    run_id: str
    term: int
    candidate: str
    endpoint: str
    generation: int


@dataclass(frozen=True)
class Promise:
    """``granted``: yours is the ``term``. Else ``term`` is the highest I know, ``why`` a clause,
    ``endpoint`` the coordinator I hear ("": none), ``verdict`` how the job has ended."""

    granted: bool
    term: int
    why: str = ""
    endpoint: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Who:
    """Are you there, and whom do you follow?"""

    run_id: str


@dataclass(frozen=True)
class Lead:
    """I coordinate the job in this term."""

    run_id: str
    term: int
    node: str
    endpoint: str


@dataclass(frozen=True)
class Here:
    """I am ``node``, and know of this term; ``endpoint``: the coordinator that I hear, "" for
    none."""

    term: int
    endpoint: str = ""
    node: str = ""


# --- what a member answers ------------------------------------------------------------------


@dataclass(frozen=True)
class Ballot:
    """What a member has promised, and what it hears. ``following``: the endpoint of the
    coordinator it is connected to now, "" for none."""

    run_id: str
    term: int = 0  # the highest seen or promised
    promised: str = ""  # to whom ``term`` was promised
    generation: int = 0
    following: str = ""
    verdict: Verdict | None = None
    # The term promised last to each candidate: one of an earlier term may have won by it.
    promises: Mapping[str, int] = field(default_factory=dict)


def vote(ballot: Ballot, ask: Ask) -> tuple[Ballot, Promise]:
    """The answer to an Ask, and what is remembered of it."""

    def no(why: str) -> tuple[Ballot, Promise]:
        answer = Promise(False, ballot.term, why, ballot.following, ballot.verdict)
        return ballot, answer

    if ask.run_id != ballot.run_id:
        return no("that is another job")
    if ballot.verdict is not None:
        return no("the job is over")
    if ballot.following:
        return no("the coordinator lives")
    if ask.generation < ballot.generation:
        return no(f"generation {ballot.generation} has formed since")
    if ask.term == ballot.term and ballot.promised == ask.candidate:
        return ballot, Promise(True, ask.term)
    if ask.term <= ballot.term:
        return no(f"term {ballot.term} has been promised")
    promises = {**ballot.promises, ask.candidate: ask.term}
    ballot = replace(ballot, term=ask.term, promised=ask.candidate, promises=promises)
    return ballot, Promise(True, ask.term)


def promised_away(ballot: Ballot, me: str, term: int) -> tuple[str, ...]:
    """Whom this member may have made coordinator of a term above ``term``, itself left out: it
    follows another now."""
    return tuple(sorted(n for n, t in ballot.promises.items() if t > term and n != me))


# --- what a candidate decides ---------------------------------------------------------------


def before(roster: Roster, me: str, lost: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Those who come first for the office, without the ``lost``: all, if I am not in it."""
    found = []
    for node, endpoint in roster.nodes:
        if node == me:
            break
        if node not in lost and endpoint:
            found.append((node, endpoint))
    return tuple(found)


def stands(roster: Roster, me: str) -> bool:
    """Whether this agent knows all members, and so may ask them."""
    return len(roster.nodes) >= roster.members and any(node == me for node, _ in roster.nodes)


def voters(roster: Roster, me: str) -> tuple[tuple[str, str], ...]:
    """Whom to ask."""
    return tuple((n, e) for n, e in roster.nodes[: roster.members] if n != me)


def won(roster: Roster, me: str, promises: Iterable[str], on_split: str, ended: str = "") -> bool:
    """Whether these promises make ``me`` the coordinator: those of a majority of the members.

    ``ended``: the last coordinator, if it ended for certain while this agent was connected to it;
    it is left out of the count, since it had promised nobody anything. Other members that are
    dead are not: they may have promised their term to another before. Of two members one may go
    on alone with ``on_split`` "continue": if both sides of a split were started so, both do.
    """
    members = {node for node, _ in roster.nodes[: roster.members]}
    living = members - {ended}
    agreed = ({me} | set(promises)) & living
    if 2 * len(agreed) > len(living) or not living:
        return True
    return len(members) == 2 and me in members and on_split == "continue"
