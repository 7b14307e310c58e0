"""When a worker that says nothing is taken to hang.

A worker's progress page says in which phase it is and when it spoke last. How long it may stay
silent depends on the phase: a start imports and builds for minutes, a step takes as long as the
steps before it, a checkpoint waits for storage. The limits are given, or learnt from how long
the phases took so far.

Pure: `Learner` is a value; `heard` gives the next one, `limit` and `verdict` only look. State
belongs to one incarnation of one worker: after a restart begin with `fresh`, which keeps what was
learnt about durations and nothing of the old silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

START = "start"  #: from the first word to the first step
STEP = "step"
BETWEEN = "between"  #: after a step, before the next: logging, evaluation without a name
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
RECOVER = "recover"

#: seconds for a phase of which nothing is known yet
UNKNOWN: Mapping[str, float] = {
    START: 1800.0,
    STEP: 1800.0,
    BETWEEN: 1800.0,
    CHECKPOINT: 3600.0,
    EVALUATION: 7200.0,
    RECOVER: 900.0,
}
_MEMORY = 64


@dataclass(frozen=True)
class Limits:
    """``given``: seconds by phase, not to be learnt; 0: never. ``factor`` times the longest of the
    last durations, and at least ``least`` seconds, is the learnt limit, from ``enough`` on."""

    given: Mapping[str, float] = field(default_factory=dict)
    factor: float = 8.0
    least: float = 10.0
    enough: int = 5

    def __post_init__(self) -> None:
        for phase, seconds in self.given.items():
            if seconds < 0:
                raise ValueError(f"limit of phase {phase!r} is {seconds}; give seconds, 0: never")
        if self.factor <= 1:
            raise ValueError(f"factor is {self.factor}; it must be above 1")


@dataclass(frozen=True)
class Learner:
    """What is known of one worker."""

    limits: Limits = field(default_factory=Limits)
    durations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    phase: str = START
    step: int | None = None
    since: float | None = None  # when it was last heard; None: not armed, it has never spoken

    def heard(self, at: float, phase: str, step: int | None) -> Learner:
        """The worker has spoken at ``at`` (seconds, any clock): its page has changed."""
        if self.since is None:
            return replace(self, phase=phase, step=step, since=at)
        durations = dict(self.durations)
        past = durations.get(self.phase, ())
        durations[self.phase] = (*past, max(0.0, at - self.since))[-_MEMORY:]
        return replace(self, durations=durations, phase=phase, step=step, since=at)

    def fresh(self) -> Learner:
        """For the next process of this rank."""
        return Learner(self.limits, self.durations)

    def forgiven(self, now: float) -> Learner:
        """Its silence counts from ``now``: it has waited for one that is being replaced."""
        return self if self.since is None else replace(self, since=max(self.since, now))

    def limit(self) -> float | None:
        """Seconds of silence that are allowed now; None: for ever."""
        given = self.limits.given.get(self.phase)
        if given is not None:
            return given or None
        past = self.durations.get(self.phase, ())
        unknown = UNKNOWN.get(self.phase, UNKNOWN[STEP])
        if len(past) < self.limits.enough or self.phase == START:
            return unknown
        return min(unknown, max(self.limits.least, self.limits.factor * max(past)))

    def due(self) -> float | None:
        """When it will be taken to hang if nothing is heard; None: never."""
        limit = self.limit()
        return None if self.since is None or limit is None else self.since + limit

    def verdict(self, now: float) -> str:
        """Empty, or what is wrong, in words."""
        due = self.due()
        if due is None or now < due or self.since is None:
            return ""
        where = f"phase {self.phase!r}" + ("" if self.step is None else f" of step {self.step}")
        return f"silent for {now - self.since:.1f} s in {where}; {self.limit():.1f} s are allowed"


def first_to_hang(learners: Mapping[int, Learner], now: float) -> tuple[int, ...]:
    """The ranks that hang themselves, not those that wait for them.

    When one rank hangs the others wait in a collective and are silent too. To blame are those
    that are furthest behind: the lowest step, and among them those in another phase than `STEP`,
    since who is outside a step waits for nobody. As long as they keep to their own limits (one
    rank writes a checkpoint, the others wait for it) nobody is to blame. Those that are all
    inside the same step cannot be told apart here: they are named when the last of them is over
    its limit. Ranks that have never spoken do not count.
    """
    armed = {rank: one for rank, one in learners.items() if one.since is not None}
    if not armed:
        return ()
    lowest = min(_place(one) for one in armed.values())
    behind = {rank for rank, one in armed.items() if _place(one) == lowest}
    outside = {rank for rank in behind if armed[rank].phase != STEP}
    hanging = {rank for rank in outside or behind if armed[rank].verdict(now)}
    if not outside and hanging != behind:
        return ()
    return tuple(sorted(hanging))


def _place(one: Learner) -> int:
    return -1 if one.step is None else one.step
