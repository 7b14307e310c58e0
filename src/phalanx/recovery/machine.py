"""One job's state machine: :func:`step` takes a state and an event, gives the next.

The rules are the rows of :mod:`phalanx.recovery.table`. What their words mean stands in
``guards`` (questions), ``actions`` (changes) and ``entries`` (what entering a state does).
Nothing there reads a clock, waits, or talks to anybody: times come in as seconds of wall
clock, what has to be done goes out as effects.
"""

from __future__ import annotations

from hashlib import blake2b

from phalanx.recovery.actions import ACTIONS
from phalanx.recovery.entries import ENTRIES
from phalanx.recovery.guards import GUARDS
from phalanx.recovery.model import (
    Event,
    Job,
    Outcome,
    Report,
    State,
)
from phalanx.recovery.turn import Turn

_ANSWERED = 8  # remembered keyed reports per job


def enter(turn: Turn, state: State) -> None:
    """Leaves the old state, enters the new one."""
    job = turn.job
    if job.state is not State.IDLE and state is not State.IDLE:
        turn.set(phases=(*job.phases, (job.state.value, round(turn.now - job.entered, 6)))[-64:])
    if state is not State.REPLACING:
        turn.set(node_deadline=None)
    ENTRIES[state](turn)
    turn.set(state=state, entered=turn.now)


def _mark(event: Event) -> str:
    """What makes two reports the same one; "": the sender does not say."""
    if not isinstance(event, Report) or event.key is None:
        return ""
    return blake2b(repr(event).encode(), digest_size=8).hexdigest()


def step(job: Job, event: Event, now: float) -> Outcome:
    """What one event does to one job. Total: every event has an answer in every state."""
    from phalanx.recovery.table import DECIDED, rows

    turn = Turn(job, event, now)
    mark = _mark(event)
    if mark and mark in job.answered:
        return Outcome(job, changed=False)  # repeated, its answer was lost: the same one again
    for row in rows(job.state, type(event)):
        if row.guard and not GUARDS[row.guard](turn):
            continue
        if mark and row.does != "stale":
            turn.set(answered=(*job.answered, mark)[-_ANSWERED:])
        ACTIONS[row.does](turn)
        target = turn.target if row.next is DECIDED else row.next
        if target is not None:
            assert isinstance(target, State)
            enter(turn, target)
        return Outcome(
            turn.job, tuple(turn.effects), int(turn.code), turn.info, turn.job is not job
        )
    raise AssertionError(f"no answer for {type(event).__name__} in {job.state}")


def due(job: Job) -> float | None:
    """When this job next wants a Timeout or a NodeTimeout; None: never."""
    if job.node_deadline is not None and job.deadline is not None:
        return min(job.node_deadline, job.deadline)
    return job.deadline if job.node_deadline is None else job.node_deadline
