"""Which workers hang, by their progress pages: limits learnt or given, see docs/hangs.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.process import pause
from phalanx.recovery import deadlines

if TYPE_CHECKING:
    from phalanx.process.supervisor import WorkerProcess

OFF, AUTO = "off", "auto"

UNNAMED = "unnamed"
"""The phase of a worker that calls ``phalanx.progress`` without naming one."""

LONG: Mapping[str, float] = {
    deadlines.START: 1800.0,
    deadlines.BETWEEN: 1800.0,
    deadlines.CHECKPOINT: 3600.0,
    deadlines.EVALUATION: 7200.0,
    UNNAMED: 1800.0,
}
"""Seconds for phases whose length is not learnt unless the user gives one: an evaluation
that nobody announced must not look like a hang. A step is learnt."""


def limits_from(text: str) -> deadlines.Limits | None:
    """``off``, ``auto``, seconds for all phases but the start, or ``PHASE=SECONDS,...``.

    None: no watch. Raises ValueError for anything else.
    """
    text = text.strip()
    if text == OFF:
        return None
    given = dict(LONG)
    if text == AUTO:
        return deadlines.Limits(given)
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if not 0 < seconds < float("inf"):
            raise ValueError("seconds are more than zero; to switch it off: off")
        phases = (deadlines.STEP, deadlines.RECOVER, *LONG)
        return deadlines.Limits({p: seconds for p in phases if p != deadlines.START})
    for part in text.split(","):
        phase, equals, value = part.partition("=")
        try:
            given[phase.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not phase.strip():
            raise ValueError(f"off, auto, seconds, or PHASE=SECONDS,... ; not {text!r}")
    return deadlines.Limits(given)


class HangWatch:
    """One learner per rank; what was learnt outlives a restart, the old silence does not."""

    def __init__(self, limits: deadlines.Limits) -> None:
        self._limits = limits
        self._learners: dict[int, deadlines.Learner] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # by rank: (worker id, beats)

    def look(self, workers: Iterable[WorkerProcess], now: float) -> dict[int, str]:
        """Local ranks that hang, with what is wrong. ``now``: as ``pause.now``."""
        workers = list(workers)
        living: dict[int, deadlines.Learner] = {}
        for worker in workers:
            rank = worker.local_rank
            if not worker.alive:
                continue
            learner = self._learners.get(rank) or deadlines.Learner(self._limits)
            told = worker.page.read()
            seen = self._seen.get(rank)
            if seen is None or seen[0] != worker.id:
                learner, seen = learner.fresh(), (worker.id, 0)
            if told.beats != seen[1]:
                at = pause.at(told.beat_ns / 1e9)
                learner = learner.heard(at, told.phase or UNNAMED, told.step)
                seen = (worker.id, told.beats)
            self._learners[rank], self._seen[rank] = learner, seen
            living[rank] = learner
        blamed = deadlines.first_to_hang(living, now)
        verdicts = {rank: living[rank].verdict(now) for rank in blamed}
        if len(verdicts) > 1:
            # Inside a step who waits for others and who hangs look the same, unless it is stopped.
            stopped = [w.local_rank for w in workers if w.local_rank in verdicts and _stopped(w)]
            if stopped:
                return {rank: f"stopped, and {verdicts[rank]}" for rank in stopped}
        return verdicts

    def forgive(self, now: float) -> None:
        """Let the silence of all count from ``now``: they are called to another generation."""
        for rank, learner in self._learners.items():
            self._learners[rank] = learner.forgiven(now)

    def still_silent(self, worker: WorkerProcess) -> bool:
        """Whether it lives and has said nothing since ``look`` named it."""
        seen = self._seen.get(worker.local_rank)
        return worker.alive and seen == (worker.id, worker.page.read().beats)


def _stopped(worker: WorkerProcess) -> bool:
    """Whether a signal (or a debugger) has stopped its process."""
    try:
        text = Path(f"/proc/{worker.pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])
