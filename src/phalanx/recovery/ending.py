"""How a group of workers is brought to its end when in place is possible no more. Pure.

Phases, each with a bound:

| phase | what is awaited |
|--|--|
| `leave` | each rank that can write says what it holds |
| `dump` | the writers chosen by `repair.dump` write the newest whole step, complete or not at all |
| `commit` | one rank gives it its name |
| `exit` | ranks that reported a fault and live end with their own exception |
| `over` | nothing |

A phase that fails, or cannot begin, falls to `exit`: what could not be dumped is said in `words`.
The order of messages is that of docs/training.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from phalanx.recovery import repair

AHEAD = 1.0
"""Seconds from the word to the step after which all stop, at the pace that is known."""


def stop_step(pace: Iterable[tuple[int, float]]) -> int | None:
    """The step after which all ranks stop when they are told now; None: nobody is in a step.

    ``pace``: of each rank the step that it is in, and its seconds per step (0: not known).
    All must hear it before they are through with that step: it is `AHEAD` seconds, at least
    two steps, beyond the furthest.
    """
    known = list(pace)
    if not known:
        return None
    fastest = min((seconds for _, seconds in known if seconds > 0), default=0.0)
    ahead = math.ceil(min(AHEAD / fastest, 1e9)) if fastest else 2
    return max(step for step, _ in known) + max(2, ahead)


class Phase(str, Enum):
    LEAVE = "leave"
    DUMP = "dump"
    COMMIT = "commit"
    EXIT = "exit"
    OVER = "over"


@dataclass(frozen=True)
class Bounds:
    """How long each phase may last, in seconds."""

    leave: float = 10.0
    dump: float = 600.0
    commit: float = 60.0
    exit: float = 3.0


@dataclass(frozen=True)
class Leave:
    """``leave`` of this generation to these ranks."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Dump:
    """``dump`` to these ranks: ``writers`` write a shard each, or (``commit``) one finishes."""

    generation: int
    step: int
    writers: tuple[int, ...]
    ranks: tuple[int, ...]
    commit: bool = False


@dataclass(frozen=True)
class Exit:
    """``exit`` to these ranks: who has an exception of its own raises it."""

    ranks: tuple[int, ...]
    code: int = 1


Effect = Leave | Dump | Exit


@dataclass(frozen=True)
class Ending:
    """The end under way. ``phases`` are (name, seconds since it began)."""

    generation: int
    began: float
    by: float
    phase: Phase
    able: frozenset[int]  # living ranks that can write
    blamed: frozenset[int]  # living ranks that are told to exit
    asked: frozenset[int] = frozenset()  # whose answer is awaited
    holdings: tuple[repair.Holding, ...] = ()
    shards: int = 0
    plan: repair.DumpPlan | None = None
    wrote: frozenset[int] = frozenset()
    dumped: int | None = None  # the step that is in storage now
    words: str = ""  # what became of the dump
    phases: tuple[tuple[str, float], ...] = ()


Step = tuple[Ending, list[Effect]]


def begin(
    generation: int,
    *,
    able: Iterable[int],
    expected: Iterable[int],
    blamed: Iterable[int],
    held: Iterable[tuple[repair.Holding, int]],
    now: float,
    bounds: Bounds,
) -> Step:
    """``able``: living ranks that can write a dump (none: no dump). ``expected``: those of
    them that will answer ``leave``. ``held``: what ranks have said already on leaving this
    generation, each with its number of shards.
    """
    ending = Ending(
        generation, now, now + bounds.leave, Phase.LEAVE, frozenset(able), frozenset(blamed)
    )
    for holding, shards in held:
        ending = _hold(ending, holding, shards)
    if not ending.able:
        return _to_exit(ending, "", now, bounds)
    known = {holding.rank for holding in ending.holdings}
    ending = replace(ending, asked=ending.able & frozenset(expected) - known)
    leave: list[Effect] = [Leave(generation, tuple(sorted(ending.able)))]
    if ending.asked:
        return ending, leave
    ending, effects = _to_dump(ending, now, bounds)
    return ending, leave + effects


def left(ending: Ending, holding: repair.Holding, shards: int, now: float, bounds: Bounds) -> Step:
    """A rank has left this generation and holds this."""
    if ending.phase is not Phase.LEAVE:
        return ending, []
    ending = replace(_hold(ending, holding, shards), asked=ending.asked - {holding.rank})
    return (ending, []) if ending.asked else _to_dump(ending, now, bounds)


def dumped(
    ending: Ending,
    rank: int,
    step: int,
    commit: bool,
    complete: bool,
    text: str,
    now: float,
    bounds: Bounds,
) -> Step:
    """A rank has answered ``dump``; ``text``: why not, or where it is."""
    plan = ending.plan
    if plan is None or step != plan.step or rank not in ending.asked:
        return ending, []
    if ending.phase is Phase.COMMIT and commit:
        if complete:
            words = f"step {step} was dumped to {text} first" if text else f"step {step} was dumped"
            ending = _phase(replace(ending, dumped=step), "dumped", now)
            return _to_exit(ending, words, now, bounds)
        return _to_exit(ending, f"no dump: rank {rank} could not finish it: {text}", now, bounds)
    if ending.phase is not Phase.DUMP or commit:
        return ending, []
    if not complete and rank in plan.writers:
        return _to_exit(ending, f"no dump: rank {rank} could not write: {text}", now, bounds)
    ending = replace(
        ending,
        asked=ending.asked - {rank},
        wrote=ending.wrote | ({rank} if complete else frozenset()),
    )
    return (ending, []) if ending.asked else _to_commit(ending, now, bounds)


def died(ending: Ending, rank: int, now: float, bounds: Bounds) -> Step:
    """The process of ``rank`` is dead."""
    was_asked = rank in ending.asked
    ending = replace(
        ending,
        able=ending.able - {rank},
        blamed=ending.blamed - {rank},
        asked=ending.asked - {rank},
        holdings=tuple(h for h in ending.holdings if h.rank != rank),
    )
    if not was_asked:
        return ending, []
    if ending.phase is Phase.LEAVE:
        return (ending, []) if ending.asked else _to_dump(ending, now, bounds)
    if ending.phase is Phase.DUMP:
        assert ending.plan is not None
        if rank in ending.plan.writers and rank not in ending.wrote:
            return _to_dump(ending, now, bounds)  # others may hold its shard
        return (ending, []) if ending.asked else _to_commit(ending, now, bounds)
    if ending.phase is Phase.COMMIT:
        return _to_commit(ending, now, bounds)
    return (ending, []) if ending.asked else (replace(ending, phase=Phase.OVER), [])


def tick(ending: Ending, now: float, bounds: Bounds) -> Step:
    """The clock may have passed the bound of this phase."""
    if now < ending.by or ending.phase is Phase.OVER:
        return ending, []
    late = ", ".join(map(str, sorted(ending.asked)))
    if ending.phase is Phase.LEAVE:
        return _to_dump(replace(ending, asked=frozenset()), now, bounds)
    if ending.phase is Phase.DUMP:
        assert ending.plan is not None
        if ending.asked & set(ending.plan.writers):
            words = f"no dump: rank {late} did not write within {bounds.dump:g} s"
            return _to_exit(ending, words, now, bounds)
        return _to_commit(ending, now, bounds)
    if ending.phase is Phase.COMMIT:
        words = f"no dump: rank {late} did not finish it within {bounds.commit:g} s"
        return _to_exit(ending, words, now, bounds)
    return replace(ending, phase=Phase.OVER, asked=frozenset()), []


def _hold(ending: Ending, holding: repair.Holding, shards: int) -> Ending:
    if holding.rank not in ending.able:
        return ending
    others = tuple(h for h in ending.holdings if h.rank != holding.rank)
    return replace(ending, holdings=(*others, holding), shards=max(ending.shards, shards))


def _phase(ending: Ending, name: str, now: float) -> Ending:
    return replace(ending, phases=(*ending.phases, (name, now - ending.began)))


def _to_dump(ending: Ending, now: float, bounds: Bounds) -> Step:
    plan = repair.dump(ending.holdings, ending.shards)
    if plan is None:
        words = "no dump: the living ranks hold no whole state"
        return _to_exit(ending, words, now, bounds)
    if ending.phase is Phase.LEAVE:
        ending = _phase(ending, "left", now)
    ranks = tuple(sorted(h.rank for h in ending.holdings))
    ending = replace(
        ending,
        phase=Phase.DUMP,
        by=now + bounds.dump,
        plan=plan,
        asked=frozenset(ranks),
        wrote=frozenset(),
    )
    return ending, [Dump(ending.generation, plan.step, plan.writers, ranks)]


def _to_commit(ending: Ending, now: float, bounds: Bounds) -> Step:
    plan = ending.plan
    assert plan is not None
    living = sorted(ending.wrote & ending.able)
    if not living:
        return _to_exit(ending, "no dump: nobody is left to finish it", now, bounds)
    if ending.phase is Phase.DUMP:
        ending = _phase(ending, "written", now)
    ending = replace(
        ending, phase=Phase.COMMIT, by=now + bounds.commit, asked=frozenset(living[:1])
    )
    order = Dump(ending.generation, plan.step, plan.writers, (living[0],), commit=True)
    return ending, [order]


def _to_exit(ending: Ending, words: str, now: float, bounds: Bounds) -> Step:
    ending = replace(ending, words=words, asked=ending.blamed, by=now + bounds.exit)
    if not ending.blamed:
        return replace(ending, phase=Phase.OVER), []
    return replace(ending, phase=Phase.EXIT), [Exit(tuple(sorted(ending.blamed)))]
