"""Which strategy a fault of a training job is met with.

The ladder, cheapest first; each rung falls to the next:

| rung | when it is possible |
|--|--|
| `retry` | every fault is one that a new try may cure, and every process lives |
| `recover-in-place` | all living workers can leave and join, and there is a node for each rank |
| `elastic-training` | ranks have lost their place, and those that live can be a smaller world |
| `restart` | always (all processes anew, from snapshot or checkpoint) |
| `exit` | always |

`dump` is taken on the way to `restart` or `exit` when it is enabled and living workers hold
a whole state. Each rung has a budget, and there is a bound on live-lock: a fault at a step that
was the scene of one before, with no step finished since, moves on to the next rung.

Pure: `choose` takes the history and the situation and returns a decision; `after` the new
history.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class Kind(str, Enum):
    """What happened to a rank. The values are the words on the channel."""

    DEATH = "death"
    HANG = "hang"
    DEVICE = "device"
    NETWORK = "network"
    PEER = "peer"
    MEMORY = "memory"
    BUG = "bug"
    LOST_STATE = "lost-state"
    REGROUP = "regroup"


#: the process lives and a new try may cure it
RETRYABLE = frozenset({Kind.DEVICE, Kind.NETWORK, Kind.PEER})


class Strategy(str, Enum):
    RETRY = "retry"
    IN_PLACE = "recover-in-place"
    ELASTIC = "elastic-training"
    DUMP = "dump"
    RESTART = "restart"
    EXIT = "exit"


@dataclass(frozen=True)
class Fault:
    """One fault of one rank. ``step``: the one it was in, None if not known."""

    rank: int
    kind: Kind
    step: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Policy:
    """What is allowed, and how often."""

    enabled: frozenset[Strategy] = frozenset(
        {Strategy.RETRY, Strategy.IN_PLACE, Strategy.ELASTIC, Strategy.RESTART}
    )
    retries: int = 8  # in the whole job; a good step gives none back
    in_place: int = 64
    elastic: int = 64
    restarts: int = 3
    same_step: int = 3  # tries of one rung at one step before the next rung
    same_bug: int = 2  # the same exception of the program at the same step ends the job


@dataclass(frozen=True)
class History:
    """What has been tried."""

    retries: int = 0
    in_place: int = 0
    elastic: int = 0
    restarts: int = 0
    #: tries since a step beyond ``scene`` was finished, by rung
    here: tuple[tuple[Strategy, int], ...] = ()
    scene: int | None = None
    bugs: tuple[tuple[int, str, int], ...] = ()  # (step, text, times)

    def tried_here(self, strategy: Strategy) -> int:
        return dict(self.here).get(strategy, 0)


@dataclass(frozen=True)
class Situation:
    """The job when it has to be decided."""

    faults: tuple[Fault, ...]
    living: int  # workers whose process lives
    able: bool = True  # all of them have said hello and none has finished
    whole: bool = True  # as far as is known every shard has a living clean holder
    dump_possible: bool = False
    homeless: bool = False  # there is no node on which a new process could take the dead ranks
    resizes: bool = False  # the living can go on as another world


@dataclass(frozen=True)
class Decision:
    strategy: Strategy
    why: str
    passed_over: tuple[tuple[Strategy, str], ...] = field(default=())
    dump_first: bool = False


def choose(policy: Policy, history: History, situation: Situation) -> Decision:
    """The first rung that is enabled, possible and has budget left. Total: always answers.

    ``passed_over`` says for each cheaper rung why it was not taken.
    """
    over: list[tuple[Strategy, str]] = []
    history = _at_scene(history, _scene(situation.faults))
    kinds = {fault.kind for fault in situation.faults}
    what = _describe(situation.faults)

    if repeated := _repeated_bug(policy, history, situation.faults):
        return Decision(Strategy.EXIT, f"{what}: {repeated}", tuple(over), _dump(policy, situation))

    for strategy in (Strategy.RETRY, Strategy.IN_PLACE, Strategy.ELASTIC, Strategy.RESTART):
        if strategy is Strategy.ELASTIC and not situation.homeless:
            continue  # nobody asks for it
        if strategy not in policy.enabled:
            over.append((strategy, "not enabled"))
            continue
        why_not = _impossible(strategy, situation, kinds) or _exhausted(strategy, policy, history)
        if why_not:
            over.append((strategy, why_not))
            continue
        first = strategy is Strategy.RESTART and _dump(policy, situation)
        return Decision(strategy, what, tuple(over), first)
    return Decision(Strategy.EXIT, what, tuple(over), _dump(policy, situation))


def after(history: History, decision: Decision, faults: Sequence[Fault]) -> History:
    """The history with this decision in it."""
    history = _at_scene(history, _scene(faults))
    here = dict(history.here)
    here[decision.strategy] = here.get(decision.strategy, 0) + 1
    bugs = {(step, text): times for step, text, times in history.bugs}
    for fault in faults:
        if fault.kind is Kind.BUG:
            key = (-1 if fault.step is None else fault.step, fault.text)
            bugs[key] = bugs.get(key, 0) + 1
    return replace(
        history,
        retries=history.retries + (decision.strategy is Strategy.RETRY),
        in_place=history.in_place + (decision.strategy is Strategy.IN_PLACE),
        elastic=history.elastic + (decision.strategy is Strategy.ELASTIC),
        restarts=history.restarts + (decision.strategy is Strategy.RESTART),
        here=tuple(sorted(here.items())),
        bugs=tuple((step, text, times) for (step, text), times in sorted(bugs.items())),
    )


def good_step(history: History, step: int) -> History:
    """All ranks have finished ``step``: a scene at it or before it is left behind.

    So is one whose step is not known: a step was finished since.
    """
    if history.scene is not None and step < history.scene:
        return history
    return replace(history, scene=None, here=(), bugs=())


def _scene(faults: Collection[Fault]) -> int | None:
    return max((fault.step for fault in faults if fault.step is not None), default=None)


def _at_scene(history: History, step: int | None) -> History:
    # A later scene without a good step between cannot be, but a fault that does not know its
    # step belongs to the scene that is open.
    if step is None or history.scene is None or step <= history.scene:
        return replace(history, scene=history.scene if step is None else step)
    return replace(history, scene=step, here=(), bugs=())


def _impossible(strategy: Strategy, situation: Situation, kinds: set[Kind]) -> str:
    if strategy is Strategy.RESTART:
        return ""
    if not situation.able:
        return "not every living worker can leave its step"
    if Kind.LOST_STATE in kinds or not situation.whole:
        return "no living worker holds a whole state"
    if strategy is Strategy.RETRY:
        if situation.homeless:
            return "the ranks have other places"
        wrong = sorted(kind.value for kind in kinds - RETRYABLE)
        if wrong:
            return f"a {wrong[0]} is not cured by a new try"
        return ""
    if situation.living == 0:
        return "no worker is left"
    if strategy is Strategy.IN_PLACE and situation.homeless:
        return "no node is there to take the ranks"
    if strategy is Strategy.ELASTIC and not situation.resizes:
        return "the program keeps its world"
    return ""


def _exhausted(strategy: Strategy, policy: Policy, history: History) -> str:
    used, limit = {
        Strategy.RETRY: (history.retries, policy.retries),
        Strategy.IN_PLACE: (history.in_place, policy.in_place),
        Strategy.ELASTIC: (history.elastic, policy.elastic),
        Strategy.RESTART: (history.restarts, policy.restarts),
    }[strategy]
    if used >= limit:
        return f"used {used} of {limit} times"
    if strategy is not Strategy.RESTART:
        here = history.tried_here(strategy)
        if here >= policy.same_step:
            return f"tried {here} times at step {history.scene} without a good step since"
    return ""


def _repeated_bug(policy: Policy, history: History, faults: Collection[Fault]) -> str:
    known = {(step, text): times for step, text, times in history.bugs}
    for fault in faults:
        if fault.kind is not Kind.BUG:
            continue
        times = known.get((-1 if fault.step is None else fault.step, fault.text), 0) + 1
        if times > policy.same_bug:
            return f"the same exception for the {times}. time at the same step"
    return ""


def _dump(policy: Policy, situation: Situation) -> bool:
    return (
        Strategy.DUMP in policy.enabled
        and situation.dump_possible
        and situation.able
        and situation.living > 0
    )


def _describe(faults: Sequence[Fault]) -> str:
    parts = []
    for fault in sorted(faults, key=lambda f: f.rank):
        where = "" if fault.step is None else f" at step {fault.step}"
        parts.append(f"{fault.kind.value} of rank {fault.rank}{where}")
    return ", ".join(parts) or "no fault named"
