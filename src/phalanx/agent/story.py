"""What is said of a job, to a person and in the events record, and where its time went.

Nothing here decides or waits; whoever runs the job calls a method when something has happened.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.agent import report
from phalanx.agent.console import Console, seconds
from phalanx.recovery import policy

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.agent.config import JobConfig
    from phalanx.events import EventLog
    from phalanx.process.channel import Message
    from phalanx.process.page import Progress
    from phalanx.process.preload import PreloadReport
    from phalanx.process.supervisor import WorkerProcess
    from phalanx.recovery import episode as ep


@dataclass
class Timeline:
    """Where the job's time went, in seconds; ``lost`` finished steps done again, if known."""

    began: float = field(default_factory=time.monotonic)
    recovering: float = 0.0
    restarts: int = 0
    in_place: int = 0
    lost: int | None = None

    def lose(self, steps: int | None) -> None:
        if steps is not None:
            self.lost = (self.lost or 0) + steps


@dataclass
class Restart:
    """A whole-group restart under way: when its phases were over (monotonic seconds)."""

    died: float
    stopped: float = 0.0
    started: float = 0.0
    last_step: int | None = None


class Story:
    """One job's words and accounts."""

    def __init__(self, config: JobConfig, console: Console, events: EventLog) -> None:
        self.config = config
        self.console = console
        self.events = events
        self.timeline = Timeline()
        self.restart: Restart | None = None
        self._warm_note = ""

    # ------------------------------------------------------------------ starts

    def keeper_ready(self, told: PreloadReport) -> None:
        self.events.record(
            "keeper_ready",
            imported=list(told.imported),
            failed=dict(told.failed),
            safe=told.safe,
            why_not=told.why_not,
            seconds=told.seconds,
        )
        if not told.safe:
            self.console.warn(f"workers start with a fresh interpreter: {told.why_not}")
        self._warm_note = _warm_note(told)

    def started(self, workers: Sequence[WorkerProcess]) -> None:
        """The first start; a restart is told when training goes on."""
        program = self.config.program
        name = program.module or (os.path.basename(program.script) if program.script else None)
        what = name or os.path.basename(program.argv[0])
        warm = " warm" if workers and all(w.warm for w in workers) else ""
        count = len(workers)
        self.console.say(
            f"{count}{warm} worker{'s' if count != 1 else ''} of {what} started"
            f"{self._warm_note if warm else ''} (run {self.config.run_id})"
        )

    # ------------------------------------------------------------------ a failed attempt

    def failed(
        self,
        ends: Sequence[report.WorkerEnd],
        root: report.WorkerEnd | None,
        verdict: policy.Verdict,
        *,
        why_group: str | None,
        keeper_lost: str | None,
        stacks: Path | None,
        restarts: tuple[int, int],
    ) -> None:
        """An attempt is over. ``restarts``: the number of the next one, and how many there are."""
        console = self.console
        if root is None:
            console.fail(keeper_lost or why_group or "the workers ended")
        else:
            console.fail(report.describe(root))
            if root.log_file or not verdict.restart:  # else it stands a few lines above
                console.quote(report.evidence(root))
            if root.log_file:
                console.say(f"its stderr: {root.log_file}")
        if stacks is not None:
            console.say(f"stacks of all workers before the end: {stacks}")
        others = report.victims(ends, root)
        if others and not keeper_lost:
            console.say(others)
        if verdict.restart:
            number, budget = restarts
            count = self.config.nproc
            who = f"all {count} workers" if count > 1 else "the worker"
            console.say(f"restarting {who} (restart {number} of {budget})")
        else:
            console.fail(f"not restarted: {verdict.reason}")
        self.events.record(
            "attempt_failed",
            root=_end_json(root) if root else None,
            reason=why_group,
            restart=verdict.restart,
            verdict=verdict.reason,
        )

    def backing_off(self, delay: float) -> None:
        self.console.say(f"waiting {seconds(delay)} before the restart")

    # ------------------------------------------------------------------ a restart's account

    def restart_begins(self, died: float, last_step: int | None) -> None:
        """The old group is gone. ``died``: the first death, in monotonic seconds."""
        self.close_account()
        self.restart = Restart(died, stopped=time.monotonic(), last_step=last_step)

    def restarted(self) -> None:
        """The new processes run."""
        assert self.restart is not None
        self.restart.started = time.monotonic()

    def see_restarted(self, pages: Iterable[Progress], now: float) -> None:
        """Close the restart's account when every worker has made a step, or told nothing."""
        restart = self.restart
        if restart is None or not restart.started:
            return
        pages = list(pages)
        beats = [p.first_beat_ns for p in pages if p.first_beat_ns]
        known = len(beats) == len(pages) and bool(pages)
        if not known and (restart.last_step is not None or now < restart.started + 1.0):
            return
        phases = [
            ("stopped", restart.stopped - restart.died),
            ("started", restart.started - restart.died),
        ]
        if known:
            phases.append(("first step", max(beats) / 1e9 - restart.died))
        total = phases[-1][1]
        lost = None
        resumed = min((p.first_step for p in pages if p.first_step is not None), default=None)
        if restart.last_step is not None and resumed is not None:
            lost = max(0, restart.last_step - (resumed - 1))
        self.timeline.recovering += total
        self.timeline.lose(lost)
        words = ", ".join(f"{name} +{seconds(at)}" for name, at in phases)
        again = f"; {lost} finished steps done again" if lost is not None else ""
        self.console.good(
            f"{'training again' if known else 'workers run again'} after {seconds(total)} "
            f"({words}{again})"
        )
        self.events.record(
            "recovered",
            strategy="restart",
            seconds=total,
            phases=dict(phases),
            lost_steps=lost,
        )
        self.restart = None

    def close_account(self) -> None:
        """Count the time of a restart after which nobody got as far as a step."""
        restart, self.restart = self.restart, None
        if restart is not None and restart.started:
            self.timeline.recovering += restart.started - restart.died

    # ------------------------------------------------------------------ recovery in place

    def episode_began(self, now: ep.Episode, words: str) -> None:
        self.events.update(episode=now.number)
        self.events.record(
            "episode_began",
            cause=now.cause,
            strategy=now.strategy,
            passed_over=dict(now.passed_over),
        )
        self.console.warn(words)

    def next_round(self, now: ep.Episode) -> None:
        """Something went wrong before every rank had finished a step."""
        self.events.record(
            "episode_round",
            round=now.round,
            strategy=now.strategy,
            passed_over=dict(now.passed_over),
        )

    def giving_up(self, why: str) -> None:
        """Nothing cheaper than a restart of the group is left; it may be written down first."""
        self.console.warn(f"in place is not possible: {why}")

    def gave_up(self, effect: ep.RestartGroup) -> None:
        self.events.record(
            "restart_group",
            why=effect.why,
            final=effect.final,
            dumped=effect.dumped,
            words=effect.words,
        )
        if effect.words:
            say = self.console.warn if effect.dumped is None else self.console.good
            say(effect.words)

    def recovered(self, effect: ep.Recovered, how: str = "") -> None:
        """Every rank has finished a step: the episode is over. ``how`` ranks were replaced."""
        done = effect.episode
        self.timeline.in_place += 1
        self.timeline.recovering += effect.seconds
        lost = [n for _, r in done.reports if isinstance(n := r.get("lost_steps"), int) and n >= 0]
        self.timeline.lose(max(lost) if lost else None)
        phases = ", ".join(f"{name} +{seconds(at)}" for name, at in done.phases)
        who = (
            f"rank {report.ranges(sorted(done.replaced))} replaced{how}"
            if done.replaced
            else "step tried again"
        )
        self.events.record(
            "recovered",
            strategy=done.strategy,
            seconds=effect.seconds,
            rounds=done.round,
            phases=dict(done.phases),
            reports={str(r): plain(told) for r, told in done.reports},
        )
        self.events.update(episode=None)
        steps = f"; {max(lost)} finished steps lost" if lost else ""
        self.console.good(
            f"{who}, training again after {seconds(effect.seconds)} ({phases}{steps})"
        )

    # ------------------------------------------------------------------ a controller's word

    def advised(self, strategy: str, why: str) -> None:
        """The controller has decided. ``why``: its reason, which begins with the strategy."""
        reason = f": {why}" if why and why != strategy else f": {strategy}"
        self.console.say(f"decided by the controller{reason}")

    def alone(self, strategy: str, why: str) -> None:
        """It has not, and what is done without it."""
        self.console.warn(f"decided without the controller ({why}): {strategy}")

    # ------------------------------------------------------------------ the end

    def stopping(self, step: int, limit: float) -> None:
        """All ranks were told to end after ``step``; ``limit`` seconds for that."""
        self.events.record("stopping", step=step)
        self.console.say(
            f"told to stop: the workers end after step {step} ({seconds(limit)} for that)"
        )

    def stopped(self, message: Message) -> None:
        """All ranks have ended after the same step."""
        step, saved = message.fields.get("step"), message.fields.get("saved") is True
        self.events.record("stopped", step=step, saved=saved)
        what = " and was saved" if saved else "; the session has no checkpoint directory"
        self.console.good(f"step {step} was the last{what}")

    def summary(self, what: str) -> str:
        """The closing line."""
        self.close_account()
        total = time.monotonic() - self.timeline.began
        parts = [f"{what} after {seconds(total)}"]
        count = self.timeline.restarts + self.timeline.in_place
        if count:
            kinds = []
            if self.timeline.in_place:
                kinds.append(f"{self.timeline.in_place} in place")
            if self.timeline.restarts:
                kinds.append(
                    f"{self.timeline.restarts} restart{'s' if self.timeline.restarts > 1 else ''}"
                )
            parts.append(
                f"{seconds(self.timeline.recovering)} of it recovering ({', '.join(kinds)})"
            )
            if self.timeline.lost is not None:
                parts.append(f"{self.timeline.lost} finished steps done again")
        return ", ".join(parts)


def plain(say: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker said, as the events record can hold it."""
    return {k: v for k, v in json.loads(json.dumps(dict(say), default=str)).items() if k != "kind"}


def _warm_note(told: PreloadReport) -> str:
    imported = [m for m in told.imported if "." not in m]
    if not imported:
        return ""
    return f", {', '.join(imported)} imported once in {seconds(told.seconds)}"


def _end_json(end: report.WorkerEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "pid": end.pid,
        "host": end.host,
        "returncode": end.returncode,
        "exception": end.exception,
        "step": end.step,
        "lasted": end.lasted,
        "hung": end.hung,
        "memory": end.memory,
    }


__all__ = ["Story", "Timeline", "plain"]
