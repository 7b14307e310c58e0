"""The agent of ``phalanx run``: one job on one machine, kept running.

It is a SimpleElasticAgent (the state, the rank table, the events and metrics of PyTorch's
contract) with a loop of its own: it waits in the supervisor's selector, restarts by the
policy of ``phalanx.recovery.policy``, has workers recovered in place (``inplace``), and has it
told (``story``). The processes are the ``crew``'s.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.agent import exit_codes, report
from phalanx.agent.config import JobConfig
from phalanx.agent.console import Console
from phalanx.agent.crew import CannotStart, Crew
from phalanx.agent.inplace import InPlace, is_hello
from phalanx.agent.signals import JobSignals
from phalanx.agent.story import Story
from phalanx.elastic.agent.server import worker_env
from phalanx.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from phalanx.elastic.metrics import put_metric
from phalanx.elastic.multiprocessing import SignalException
from phalanx.elastic.rendezvous.local import LocalRendezvousHandler
from phalanx.process import pause
from phalanx.process.supervisor import (
    KeeperLost,
    KeeperReady,
    StoreLost,
    Supervisor,
    SupervisorError,
    WorkerDied,
    WorkerSpoke,
)
from phalanx.recovery import policy
from phalanx.recovery.deadlines import RECOVER, STEP

if TYPE_CHECKING:
    from phalanx.agent.counsel import Counsel
    from phalanx.events import EventLog
    from phalanx.health import LoopHealth, Metric


STOP_SHARE = 0.8
"""Of the time to stop: for the step and its checkpoint; the rest is for those that hang."""


class JobAgent(SimpleElasticAgent):
    """One job. ``run()`` returns when it is over; stop signals come out as SignalException."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: JobConfig,
        supervisor: Supervisor,
        console: Console,
        events: EventLog,
        health: LoopHealth,
    ) -> None:
        super().__init__(spec, shutdown_timeout=config.shutdown_timeout)
        self.config = config
        self.supervisor = supervisor
        self.events = events
        self.health = health
        self.signals = JobSignals(
            config.signals, supervisor.wake, lambda number: self.crew.pass_on(number)
        )
        self.crew = Crew(config, supervisor, console, events, health)
        self.crew.stop_asked = self._no_more_starts
        self.story = Story(config, console, events)
        self.counsel: Counsel | None = None
        self.in_place = self._recovery()
        self.root: report.WorkerEnd | None = None
        self.verdict: policy.Verdict | None = None
        self._attempts: list[policy.Attempt] = []
        self._keeper_lost: str | None = None
        self._stop: SignalException | None = None  # that the ranks are ending their loops for
        self._stop_by = 0.0

    def _recovery(self) -> InPlace:
        """What decides on recoveries: the machine alone, or a controller."""
        parts = (
            self.crew,
            self.story,
            self.signals.checked,
            self._next_store,
            self._replaced,
        )
        controller = self.config.controller
        if controller is None:
            return InPlace(*parts)
        from phalanx.agent.advised import Advised
        from phalanx.agent.counsel import Counsel

        advised = Advised(*parts)
        advised.counsel = self.counsel = Counsel(
            controller,
            controller.job or self.config.run_id,
            self._worker_group.spec.local_world_size,
            self.supervisor.wake,
            self.events,
        )
        return advised

    # ------------------------------------------------------------------ starting

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        generation, attempt = self.crew.generation + 1, self._restart_count()
        self.events.update(generation=generation, attempt=attempt)
        self.in_place.begin(len(worker_group.workers), generation)
        served = self._serve_store()
        envs = {}
        for worker in worker_group.workers:
            env = envs[worker.local_rank] = worker_env.of_worker(
                worker_group,
                worker,
                restart_count=attempt,
                use_agent_store=served,
                agent_env={**os.environ, **self.config.environment},
            )
            worker_env.put_local_rank(env, worker.local_rank, spec.virtual_local_rank, os.environ)
        self.crew.begin(
            [w.global_rank for w in worker_group.workers],
            envs,
            generation=generation,
            attempt=attempt,
        )
        with self.signals.checked():
            started = self.crew.start()
        self._take_all(self.supervisor.wait(0))
        if not attempt and self.story.restart is None:
            self.story.started(started)
        self.health.set_ready(True)
        return {w.local_rank: w.pid for w in started}

    def _serve_store(self) -> bool:
        """Have the workers' store of this round served by a process of its own."""
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, LocalRendezvousHandler) or not handler.offers_listener:
            return bool(getattr(handler, "use_agent_store", False))
        if not handler.use_agent_store:
            self.crew.serve_store(handler.claim_listener())
        return True

    def _next_store(self) -> tuple[socket.socket, str]:
        """The next round's socket and address, for a recovery in place."""
        handler = self._worker_group.spec.rdzv_handler
        where = handler.next_rendezvous().bootstrap_store_info
        address = f"{where.master_addr}:{where.master_port}" if where else ""
        return handler.claim_listener(), address  # type: ignore[attr-defined]

    def _replaced(self, rank: int, pid: int) -> None:
        self._worker_group.workers[rank].id = pid

    # ------------------------------------------------------------------ the loop

    def _invoke_run(self, role: str = "default") -> RunResult:
        group, spec = self._worker_group, self._worker_group.spec
        self._begin(self._initialize_workers)
        while True:
            result = self._supervise()
            state = group.state = result.state
            put_metric(f"workers.{spec.role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{spec.role}.{state.name.lower()}", 1)
            if state == WorkerState.SUCCEEDED:
                self.crew.streams.end_attempt()
                self._exit_barrier()
                return result
            self._stop_workers(group)
            result = self._post_mortem()
            assert self.verdict is not None
            if not self.verdict.restart:
                group.state = WorkerState.FAILED
                return result
            self._remaining_restarts = max(0, self._remaining_restarts - 1)
            self._back_off(self.verdict.delay)
            if self._keeper_lost:
                self._keeper_lost = None
                self.supervisor.open()
            self.story.timeline.restarts += 1
            self._begin(self._restart_workers)
            self.story.restarted()

    def _begin(self, start: Callable[[WorkerGroup], None]) -> None:
        """Start the group. A keeper that is lost meanwhile is a failed attempt."""
        try:
            start(self._worker_group)
        except SupervisorError:
            self._note_all(self.supervisor.wait(0))
            if self._keeper_lost is None:
                raise
        except CannotStart:
            raise
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise
            text = f"the workers cannot be started: {error} (see ulimit -u)"
            raise CannotStart(text, exit_codes.CANNOT_START) from error

    def _supervise(self) -> RunResult:
        """Until all workers have ended well, or the group has to be started again."""
        while True:
            self._heed_signals()
            self._take_all(self.supervisor.wait(self._patience()))
            self._tick()
            if self.in_place.why is not None:
                if self._stop is not None:
                    raise self._stop
                return RunResult(state=WorkerState.FAILED)
            if self.crew.succeeded():
                stopped = self.in_place.stopped
                if self._stop is not None and stopped is not None:
                    self.story.stopped(stopped)
                    raise self._stop
                by_rank = {w.global_rank: None for w in self._worker_group.workers}
                return RunResult(state=WorkerState.SUCCEEDED, return_values=by_rank)

    def _heed_signals(self) -> None:
        """A stop signal ends the job; on SIGTERM a session first finishes a step and saves it.

        Raises SignalException.
        """
        now = pause.now()
        try:
            self.signals.check()
        except SignalException as stop:
            step = None
            if stop.sigval == signal.SIGTERM:
                self._take_all(self.supervisor.wait(0))  # who can was perhaps told just now
                step = self.in_place.stop()
            if step is None:
                raise
            self._stop, self._stop_by = stop, now + STOP_SHARE * self._shutdown_timeout
            self.story.stopping(step, self._stop_by - now)
        if self._stop is not None and (self.signals.hurry() or now >= self._stop_by):
            self._shutdown_timeout = max(1, round((1 - STOP_SHARE) * self._shutdown_timeout))
            raise self._stop

    def _no_more_starts(self) -> bool:
        """A stop that the ranks are ending their loops for lets a recovery come to its end, while
        there is time."""
        if self._stop is None:
            return self.signals.asked()
        return self.signals.hurry() or pause.now() >= self._stop_by

    def _patience(self) -> float:
        """Seconds until something is due, at most the monitor interval."""
        now = pause.now()
        due = [self.in_place.due(), self.crew.due(), self._stop_by if self._stop else None]
        waits = [max(0.0, t - now) for t in due if t is not None]
        return min([self._worker_group.spec.monitor_interval, *waits])

    def _tick(self) -> None:
        now = pause.now()
        self.health.tick()
        self.in_place.tick(now)
        if self.story.restart is not None:
            pages = [w.page.read() for w in self.crew.workers.values()]
            self.story.see_restarted(pages, time.monotonic())
        self.crew.tick(now)

    def _take_all(self, happened: list[Any]) -> None:
        """What happened. Each worker has a channel of its own, and a death is known faster
        than any word: what others said before is taken first.
        """
        if happened:
            happened += self.supervisor.wait(0)
        for happening in sorted(happened, key=lambda h: not is_hello(h)):
            self._take(happening)

    def _take(self, happening: Any) -> None:
        """One thing that happened."""
        if isinstance(happening, WorkerSpoke):
            self.in_place.on_message(happening.worker, happening.message)
        elif isinstance(happening, WorkerDied):
            self.crew.note(happening)
            self.in_place.on_died(happening.worker)
        elif isinstance(happening, KeeperReady):
            self.story.keeper_ready(happening.report)
        elif isinstance(happening, KeeperLost):
            self._keeper_lost = happening.reason
            self.crew.store = None
            self.in_place.give_up(happening.reason)
            self.events.record("keeper_lost", reason=happening.reason)
        elif isinstance(happening, StoreLost):
            if self.crew.store_lost(happening.store):
                self.in_place.give_up("the workers' store was lost")
        else:
            self.crew.note(happening)

    def _note_all(self, happenings: Iterable[Any]) -> None:
        """What happens while the group is down: recorded, and nothing is done about it."""
        for happening in happenings:
            if isinstance(happening, WorkerDied):
                self.crew.note(happening)
            elif isinstance(happening, WorkerSpoke):
                self.crew.kept(happening.worker, happening.message)
            else:
                self._take(happening)

    # ------------------------------------------------------------------ the end of an attempt

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._end_workers(signal.SIGTERM, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the group now, without waiting."""
        if self.in_place.why is not None:
            return RunResult(state=WorkerState.FAILED)
        if self.crew.succeeded():
            return RunResult(state=WorkerState.SUCCEEDED)
        return RunResult(state=WorkerState.HEALTHY)

    def _end_workers(self, signum: int, grace: float) -> None:
        self.health.set_ready(False, "restarting")
        if self._keeper_lost is None:
            self.crew.stop(signum, grace, self.signals.hurry)
        self._note_all(self.supervisor.wait(0))
        self.crew.stop_watchdog()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_workers(death_sig, timeout)
        self.crew.close()

    def _post_mortem(self) -> RunResult:
        """Say what happened, and decide whether to start again."""
        ends = self.crew.ends()
        current = list(self.crew.workers.values())
        # whoever died with the keeper is its victim
        self.root = root = None if self._keeper_lost else report.root_cause(ends)
        deaths = [w.dead_ns for w in current if w.dead_ns is not None]
        first = min(deaths) / 1e9 if deaths else time.monotonic()
        if root is not None and root.dead_ns is not None:
            first = root.dead_ns / 1e9
        steps = [e.step for e in ends if e.step is not None]
        done = [
            p.step - (p.phase in (STEP, RECOVER))  # the page has the one that it is in
            for p in (w.page.read() for w in current)
            if p.step is not None
        ]
        began = min((w.started_ns for w in current), default=None)
        self._attempts.append(
            policy.Attempt(
                lasted=max(0.0, first - began / 1e9) if began is not None else 0.0,
                returncode=root.returncode if root else None,
                exception=_class_of(root.exception) if root and root.exception else None,
                first_step=min(steps) if steps else None,
                last_step=max(steps) if steps else None,
            )
        )
        max_restarts = self._worker_group.spec.max_restarts
        bounds = policy.Policy(
            max_restarts=max_restarts,
            never=self.config.never_retried,
            always=self.config.always_retried,
        )
        self.verdict = policy.decide(bounds, self._attempts)
        if self.in_place.final and self.verdict.restart:
            self.verdict = policy.Verdict(False, reason=self.in_place.why or "")
        if self.in_place.ended is not None:
            reason = f"the controller ended the job ({self.in_place.ended})"
            self.verdict = policy.Verdict(False, reason=reason)
        stacks, self.crew.stacks = self.crew.stacks, None
        self.story.failed(
            ends,
            root,
            self.verdict,
            why_group=self.in_place.why,
            keeper_lost=self._keeper_lost,
            stacks=stacks,
            restarts=(len(self._attempts), max_restarts),
        )
        self.story.restart_begins(first, max(done, default=None))
        return RunResult(state=WorkerState.FAILED, failures=self.crew.failures(ends))

    def _back_off(self, delay: float) -> None:
        if delay <= 0:
            return
        self.story.backing_off(delay)
        end = pause.now() + delay
        while (left := end - pause.now()) > 0:
            self.signals.check()
            self._note_all(self.supervisor.wait(left))
            self.health.tick()

    # ------------------------------------------------------------------ others ask

    def numbers(self) -> list[Metric]:
        """For ``/metrics``. From any thread, without waiting."""
        from phalanx.health import Metric

        workers, timeline = list(self.crew.workers.values()), self.story.timeline
        steps = [s for w in workers if (s := w.page.read().step) is not None]
        out = [
            Metric("phalanx_workers", len(workers), "Workers of this node"),
            Metric("phalanx_workers_alive", sum(w.alive for w in workers), "Those that live"),
            Metric("phalanx_standbys", self.crew.standbys.ready, "Built, and without a rank"),
            Metric("phalanx_generation", self.crew.generation, "The membership's number"),
            Metric("phalanx_attempt", self._restart_count(), "Starts of the group, from 0"),
            Metric("phalanx_restarts", timeline.restarts, "Group restarts", "counter"),
            Metric("phalanx_in_place", timeline.in_place, "Recoveries in place", "counter"),
            Metric("phalanx_recovering_seconds", timeline.recovering, "Spent so", "counter"),
        ]
        if steps:
            out.append(Metric("phalanx_step", max(steps), "The furthest finished step"))
        return out

    def facts(self) -> Mapping[str, Any]:
        """For ``/status``: ranks, pids, states, progress. From any thread, without waiting."""
        episode = self.in_place.episode
        return {
            "run_id": self.config.run_id,
            "state": self._worker_group.state.value,
            **self.crew.facts(),
            "restarts_left": self._remaining_restarts,
            "recoveries_in_place": self.story.timeline.in_place,
            "recovering": episode.cause if episode else None,
            "controller": " ".join(self.counsel.link_state) if self.counsel else None,
        }


def _class_of(exception: str) -> str:
    return exception.split(":", 1)[0].strip().rsplit(".", 1)[-1]


__all__ = ["CannotStart", "JobAgent"]
