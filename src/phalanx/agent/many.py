"""The agent of one of several nodes: it does what the coordinator tells, and tells what happens.

Which nodes take part, with which ranks, what is done about a fault: all that is agreed by
``phalanx.rendezvous`` in whichever agent is the coordinator. Here are the hands: workers are
started, told, stopped; deaths and messages are passed on. A command of a lower term or
generation than the last one is refused.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.agent import exit_codes, report
from phalanx.agent.console import Console, seconds
from phalanx.agent.crew import CannotStart, Crew
from phalanx.agent.inplace import Hands, event_of
from phalanx.agent.offers import Offers
from phalanx.agent.signals import JobSignals
from phalanx.agent.story import Story, plain
from phalanx.coordinator import net
from phalanx.coordinator.words import Alone, Copied, Reached
from phalanx.elastic.agent.server import worker_env
from phalanx.process import pause
from phalanx.process.supervisor import (
    KeeperLost,
    KeeperReady,
    StoreLost,
    Supervisor,
    SupervisorError,
    WorkerDied,
    WorkerProcess,
    WorkerSpoke,
)
from phalanx.rendezvous import model as m

if TYPE_CHECKING:
    from phalanx.agent.config import JobConfig, NodesConfig
    from phalanx.coordinator.node import CoordinatorNode
    from phalanx.events import EventLog
    from phalanx.health import LoopHealth, Metric
    from phalanx.process.channel import Message

PROGRESS_EVERY = 1.0
"""Seconds between two reports of the furthest step."""

REFUSAL = 5.0
"""Seconds that the words of a search for the coordinator that has ended are waited for."""

EVIDENCE = 40
"""Lines of a worker's last output that travel."""


class NodeAgent:
    """One node's agent. ``run`` returns the exit status when the job is over."""

    def __init__(
        self,
        config: JobConfig,
        nodes: NodesConfig,
        bond: CoordinatorNode,
        supervisor: Supervisor,
        console: Console,
        events: EventLog,
        health: LoopHealth,
    ) -> None:
        """Raises ValueError, OSError and NumaError as ``Crew`` does."""
        self.config, self.nodes = config, nodes
        self.bond = bond
        self.me = bond.node
        self.offers: Offers | None = None  # once the address is known by which peers reach us
        self.supervisor = supervisor
        self.console = console
        self.events = events
        self.health = health
        self.signals = JobSignals(
            config.signals, supervisor.wake, lambda number: self.crew.pass_on(number)
        )
        self.crew = Crew(config, supervisor, console, events, health)
        self.story = Story(config, console, events)
        self.crew.stop_asked = self.signals.asked
        if nodes.copies:
            self.crew.on_snapshot = self._copy
        self.hands = Hands(self.crew, self.signals.checked)
        self.status: int | None = None  # once it is known
        self.assignment: m.Assignment | None = None  # whose workers run here
        self._last: m.Assignment | None = None  # the newest there was
        self._fence = (0, 0)  # the highest term and generation seen
        self._speaks = False  # some worker said hello: the program can be recovered in place
        self._reported = 0  # the generation whose end was told
        # ranks here that said hello, that can go on in another world, and that are done
        self._in_loop: set[int] = set()
        self._resizes: set[int] = set()
        self._finished: set[int] = set()
        self._failed: m.Failed | None = None
        self._prepared: dict[int, int] = {}  # rank: step of a checkpoint that waits for a word
        self._draining: tuple[int, float] | None = None  # generation, until when
        self._told_at = 0.0
        self._told_step: int | None = None
        self._keeper_lost = False
        self._began_stop: float | None = None
        self._isolated = False
        self._ready = not config.starts_warm  # the keeper has imported what the program imports
        self._reached: Reached | None = None  # to be answered with a Join once it has

    # ------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Until the job is over.

        Raises SignalException when the agent is told to stop, SupervisorError when there can
        be no keeper.
        """
        self.bond.attend()
        self.supervisor.watch(self.bond.fd, lambda: None)
        try:
            while self.status is None:
                self.signals.check()
                for happening in self.supervisor.wait(self._patience()):
                    self._take(happening)
                for telling in self.bond.take():
                    self._obey(telling)
                    if self.status is not None:
                        break
                self._tick()
        finally:
            self.supervisor.unwatch(self.bond.fd)
        return self.status

    def _patience(self) -> float:
        crew, draining = self.crew.due(), self._draining
        waits = [] if crew is None else [max(0.0, crew - pause.now())]
        if draining is not None:
            waits.append(max(0.0, draining[1] - time.monotonic()))
        return min([self.config.monitor_interval, *waits])

    def _tick(self) -> None:
        now = time.monotonic()
        self.health.tick()
        self.crew.tick(pause.now())
        if self.story.restart is not None and self.crew.workers:
            pages = [w.page.read() for w in self.crew.workers.values()]
            self.story.see_restarted(pages, now)
        if self._draining is not None:
            self._see_drained(now)
        elif self.assignment is not None and self.crew.succeeded():
            self._report_success()
        self._tell_progress(now)
        self._see_isolation(now)

    def _see_drained(self, now: float) -> None:
        assert self._draining is not None
        generation, until = self._draining
        if self.crew.succeeded():
            self._finish_stop(generation)
        elif now >= until:
            self._stop_now(generation)

    def _report_success(self) -> None:
        assert self.assignment is not None
        if self._reported < self.assignment.generation:
            self._reported = self.assignment.generation
            self.crew.streams.end_attempt()
            self.bond.say(m.Succeeded(self.assignment.generation))

    def _tell_progress(self, now: float) -> None:
        if self.assignment is None or now < self._told_at + PROGRESS_EVERY:
            return
        self._told_at = now
        steps = self._steps()
        if steps is not None and steps[1] != self._told_step:
            self._told_step = steps[1]
            self.bond.say(m.Progress(self.assignment.generation, steps[1]))

    def _steps(self) -> tuple[int, int] | None:
        """The least and the most finished step here, where known."""
        steps = [s for w in self.crew.workers.values() if (s := w.page.read().step) is not None]
        return (min(steps), max(steps)) if steps else None

    def _see_isolation(self, now: float) -> None:
        since = self.bond.alone_since()
        if since is None:
            self._isolated = False
            return
        if not self._isolated and now >= since + self.nodes.isolation and self.crew.workers:
            self._isolated = True
            self.console.fail(
                f"no coordinator for {seconds(self.nodes.isolation)}: the workers here are "
                "stopped, the other nodes may have gone on without them (--isolation-timeout)"
            )
            self._end_workers()
            self._clear()
        # the coordinator's end says why, in time; should it not, this does
        if now >= since + self.nodes.join + REFUSAL and not self.crew.workers:
            self.console.fail(f"no coordinator was found within {seconds(self.nodes.join)}")
            self.status = exit_codes.RENDEZVOUS

    # ------------------------------------------------------------------ what happens here

    def _take(self, happening: Any) -> None:
        if isinstance(happening, WorkerSpoke):
            self._on_message(happening.worker, happening.message)
        elif isinstance(happening, WorkerDied):
            self.crew.note(happening)
            self._on_died(happening.worker)
        elif isinstance(happening, KeeperReady):
            self.story.keeper_ready(happening.report)
            self._be_ready()
        elif isinstance(happening, KeeperLost):
            self._keeper_lost = True
            self.crew.store = None
            self._be_ready()
            self.events.record("keeper_lost", reason=happening.reason)
            self._fail(happening.reason)
        elif isinstance(happening, StoreLost):
            if self.crew.store_lost(happening.store) and self._draining is None:
                self._fail("the workers' store was lost")
        else:
            self.crew.note(happening)

    def _on_died(self, worker: WorkerProcess) -> None:
        a = self.assignment
        if a is None or not self.crew.is_current(worker) or self._keeper_lost:
            return
        rank = self.crew.ranks[worker.local_rank]
        if worker.returncode == 0:
            if self._speaks and self._draining is None:
                self._finished.add(rank)
                self._event(rank, "finished", {})
            return
        end = self.crew.end_of(worker)
        words = report.describe(end)
        if self._began_stop is None and worker.dead_ns is not None:
            self._began_stop = worker.dead_ns / 1e9
        if self._speaks:
            self.console.warn(words)
            hung = worker.id in self.crew.hung
            self._event(
                rank,
                "died",
                {
                    "how": report.how(end),
                    "step": end.step,
                    "hung": hung,
                    "returncode": end.returncode,
                    "end": _facts_of(end),
                },
            )
        else:
            self._fail(words, end)

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        if self.crew.kept(worker, message) or not self.crew.is_current(worker):
            return
        rank = self.crew.ranks[worker.local_rank]
        event = event_of(rank, message, self.crew.generation)
        if event is not None and type(event).__name__ in _KINDS:
            self._speaks = True
            if message.type == "hello":
                self._in_loop.add(rank)
                if getattr(event, "resizes", False):
                    self._resizes.add(rank)
            elif message.type == "finished":
                self._finished.add(rank)
            facts = dataclasses.asdict(event)
            del facts["rank"]
            self._event(rank, _KINDS[type(event).__name__], facts)
            return
        if message.type == "prepared":
            self._on_prepared(rank, message)
            return
        if message.type in ("stopped_at", "dumped"):
            self._event(rank, message.type, plain(message.fields))
        if self.crew.worth_recording(worker):
            said = {**plain(message.fields), "local_rank": worker.local_rank}
            self.events.record("worker_said", **{**said, "type": message.type})

    def _on_prepared(self, rank: int, message: Message) -> None:
        """A checkpoint is written but for its name: the coordinator says whether it counts."""
        generation, step = message.fields.get("generation"), message.fields.get("step")
        if not isinstance(step, int):
            return
        if generation != self.crew.generation:
            why = f"generation {generation} is over"
            self._answer(m.Refused(self.crew.generation, rank, step, why), generation)
            return
        self._prepared[rank] = step
        self._event(rank, "prepared", {"step": step})

    def _answer(self, telling: m.Commit | m.Refused, generation: Any = None) -> None:
        """Pass the word on to the worker that asked."""
        a = self.assignment
        if a is None or telling.rank not in a.seat.ranks or telling.generation != a.generation:
            return
        if self._prepared.get(telling.rank) == telling.step:
            del self._prepared[telling.rank]
        say: dict[str, Any] = {"generation": generation or telling.generation}
        say["step"] = telling.step
        local_rank = a.seat.ranks.index(telling.rank)
        if isinstance(telling, m.Commit):
            self.crew.tell(local_rank, "commit", within=telling.within, **say)
        else:
            self.events.record("commit_refused", step=telling.step, why=telling.reason)
            self.crew.tell(local_rank, "refused", reason=telling.reason, **say)

    def _event(self, rank: int, kind: str, facts: Mapping[str, Any]) -> None:
        self.bond.say(m.WorkerEvent(self.crew.generation, rank, kind, facts))

    def _fail(
        self,
        reason: str,
        end: report.WorkerEnd | None = None,
        *,
        retryable: bool = True,
        status: int | None = None,
    ) -> None:
        """Tell of a fault that only a new attempt cures; the first of a generation counts."""
        a = self.assignment
        if a is None or self._reported >= a.generation:
            return
        self._reported = a.generation
        self.console.fail(reason)
        facts: dict[str, Any] = {}
        if end is not None:
            self.console.quote(report.evidence(end))
            if end.log_file:
                self.console.say(f"its stderr: {end.log_file}")
            facts = _facts_of(end)
        self._failed = m.Failed(
            a.generation,
            end.rank if end is not None else None,
            reason,
            end.returncode if end is not None else status,
            facts,
            retryable,
        )
        self.bond.say(self._failed)

    # ------------------------------------------------------------------ what the coordinator tells

    def _obey(self, telling: m.Telling | Reached | Alone | Copied) -> None:
        if isinstance(telling, Reached):
            self._join_job(telling)
        elif isinstance(telling, Copied):
            self._copied(telling)
        elif isinstance(telling, Alone):
            self._reached = None
            self.events.record("coordinator_lost", how=telling.how)
            if self.assignment is not None:
                self.console.warn(f"the coordinator is lost ({telling.how}); the workers run on")
        elif isinstance(telling, m.Assign):
            if self._passes(telling.assignment):
                self._assign(telling.assignment)
        elif isinstance(telling, m.Regroup):
            if self._passes(telling.assignment):
                self._regroup(telling)
        elif isinstance(telling, m.Stop):
            self._stop(telling)
        elif isinstance(telling, m.Kill):
            if self.assignment is not None and telling.generation == self.assignment.generation:
                self.hands.kill(telling.rank, telling.why)
        elif isinstance(telling, m.Dump):
            self._dump(telling)
        elif isinstance(telling, m.Commit | m.Refused):
            self._answer(telling)
        elif isinstance(telling, m.Recovered):
            self._recovered(telling)
        elif isinstance(telling, m.Park):
            self.health.set_ready(False, telling.reason)
            self.events.record("parked", reason=telling.reason)
            self.console.say(f"waiting: {telling.reason}")
        elif isinstance(telling, m.Refuse):
            self.events.record("refused", reason=telling.reason)
            self.console.fail(telling.reason)
            self._end_workers()
            self.status = telling.status
        elif isinstance(telling, m.Over):
            self._over(telling.verdict)

    def _be_ready(self) -> None:
        self._ready = True
        reached, self._reached = self._reached, None
        if reached is not None:
            self._join_job(reached)

    def _join_job(self, reached: Reached) -> None:
        self.me = reached.node
        if not self._ready:
            # a newcomer makes all others start again: not before it can start at once itself
            self._reached = reached
            return
        self.events.record("coordinator", term=reached.term, at=reached.coordinator)
        if self.offers is None:
            self.offers = Offers(
                self.me.address,
                self.nodes.ports,
                self.nodes.store_port if self.nodes.node_rank in (None, 0) else 0,
            )
        offer = self.offers.current_or_none(self.console.warn)
        self.bond.say(
            m.Join(self.me, self.nodes.epoch, self.assignment, offer, self._share(), self._last)
        )
        for rank, step in self._prepared.items():  # whoever was asked may have forgotten
            self._event(rank, "prepared", {"step": step})

    def _share(self) -> m.Share | None:
        """What has become of the workers here."""
        a = self.assignment
        if a is None:
            return None
        workers = self.crew.workers.values()
        return m.Share(
            in_loop=tuple(sorted(self._in_loop - self._finished)),
            resizes=tuple(sorted(self._resizes)),
            finished=tuple(sorted(self._finished)),
            dead=tuple(
                sorted(self.crew.ranks[w.local_rank] for w in workers if w.returncode and w.gone)
            ),
            done=self._failed is None and self._reported >= a.generation,
            failed=self._failed,
        )

    def _passes(self, a: m.Assignment) -> bool:
        """Whether this is newer than all that was told before."""
        if (a.term, a.generation) <= self._fence:
            self.events.record("stale_command", term=a.term, told_generation=a.generation)
            return False
        self._fence = (a.term, a.generation)
        self._last = a
        return True

    def _environment(self, a: m.Assignment, local_rank: int) -> dict[str, str]:
        host, port = net.split(a.store)
        env = worker_env.build(
            role=self.config.role,
            rank=a.seat.ranks[local_rank],
            world_size=a.world,
            role_rank=a.seat.ranks[local_rank],
            role_world_size=a.world,
            local_world_size=len(a.seat.ranks),
            group_rank=a.group,
            group_world_size=a.groups,
            master_addr=host,
            master_port=port,
            restart_count=a.attempt,
            max_restarts=self.config.max_restarts,
            run_id=self.config.run_id,
            use_agent_store=True,
            agent_env={**os.environ, **self.config.environment},
        )
        env["PHALANX_FENCED"] = "1"  # ask before a checkpoint gets its name
        if self.nodes.copies:
            env["PHALANX_COPIES"] = "1"  # tell of snapshots, and hear of their copies
        virtual = self.config.virtual_local_rank
        worker_env.put_local_rank(env, local_rank, virtual, os.environ)
        return env

    def _copy(self, rank: int, fd: int, step: int, back: bool) -> None:
        """A snapshot is there: the neighbour is to have it too."""
        if (a := self.assignment) is not None:
            self.bond.copy(rank, a.world, a.generation, os.dup(fd), step, back=back)

    def _copied(self, what: Copied) -> None:
        """The worker may take its next one."""
        for local_rank in self.hands.local([what.rank]).values():
            if local_rank in self.crew.workers:
                self.crew.tell(local_rank, "copied", step=what.step)

    def _fetch(self, a: m.Assignment, had: Iterable[int]) -> None:
        """The snapshots of ranks that were elsewhere before, from the neighbours."""
        ranks = sorted({*a.seat.ranks} - {*had})
        if not self.nodes.copies or a.generation == 1 or not ranks:
            return
        with self.signals.checked():
            found = self.bond.copies(ranks, a.world, a.beside, self.nodes.rejoin / 2)
        for rank, (fd, holder) in found.items():
            self.crew.adopt(rank, fd, holder)
        if found:
            holders = sorted({holder for _, holder in found.values()})
            self.events.record("snapshots_fetched", ranks=sorted(found), holders=holders)
            whose = f"rank {report.ranges(sorted(found))}"
            self.console.say(f"snapshots of {whose} were held by {', '.join(holders)}")

    def _note_membership(self, a: m.Assignment) -> None:
        self.bond.beside(a.beside)
        self.events.update(generation=a.generation, attempt=a.attempt, node=a.group)
        self.events.record(
            "membership",
            term=a.term,
            ranks=list(a.seat.ranks),
            world=a.world,
            nodes=a.groups,
            store=a.store,
        )

    def _open_store(self, a: m.Assignment, *, beside: bool) -> None:
        """Serve the generation's store if it is this node's to do, and offer the next one."""
        if a.host_of_store != self.me.id:
            if not beside:
                self.crew.close_store()
            return
        listener = self.offers.take(a.store) if self.offers is not None else None
        if listener is None:
            raise CannotStart(
                f"the store of generation {a.generation} is to be at {a.store}, which is not "
                "this node's",
                exit_codes.CANNOT_START,
            )
        try:
            if beside:
                self.crew.renew_store(listener)
            else:
                self.crew.serve_store(listener)
        finally:
            listener.close()  # the store has its own descriptor of it
        self._offer()

    def _offer(self) -> None:
        assert self.offers is not None
        if offer := self.offers.current_or_none(self.console.warn):
            self.bond.say(m.Offer(offer))

    def _assign(self, a: m.Assignment) -> None:
        """A seat in a new attempt; or in place of a lost node, with ``fresh`` replacements."""
        if [w for w in self.crew.workers.values() if not w.gone]:
            self._end_workers()
        self._clear()
        self.assignment = a
        self._speaks = a.fresh is not None
        self._note_membership(a)
        try:
            if self._keeper_lost:
                self.supervisor.open()
                self._keeper_lost = False
            envs = {n: self._environment(a, n) for n in range(len(a.seat.ranks))}
            had = self.crew.ranks
            self.crew.begin(a.seat.ranks, envs, generation=a.generation, attempt=a.attempt)
            self._fetch(a, had)
            self._open_store(a, beside=False)
            if a.fresh is None:
                with self.signals.checked():
                    started = self.crew.start()
                if self.story.restart is not None:
                    self.story.restarted()
                else:
                    self.story.started(started)
            else:
                for local_rank in a.fresh:
                    self.hands.replace(a.seat.ranks[local_rank], a.generation)
                self._join(a)
        except CannotStart as error:
            self._fail(str(error), retryable=False, status=error.status)
            return
        except SupervisorError as error:
            self._fail(str(error))
            return
        self.health.set_ready(True)
        ranks = report.ranges(a.seat.ranks)
        self.console.say(
            f"rank{'s' if len(a.seat.ranks) > 1 else ''} {ranks} of {a.world} here, node "
            f"{a.group} of {a.groups} (generation {a.generation}, attempt {a.attempt})"
        )

    def _regroup(self, telling: m.Regroup) -> None:
        """In place: the survivors leave, replacements start, all join."""
        a, old = telling.assignment, self.assignment
        if old is None or a.generation <= old.generation or self._draining is not None:
            return
        fresh = set(a.fresh or ())
        self.assignment = a
        self._note_membership(a)
        self.console.warn(telling.cause)
        if telling.at is None:  # else they go on until after that step
            for local_rank in self.crew.workers:
                if local_rank not in fresh:
                    self.crew.tell(local_rank, "leave", generation=a.generation - 1)
        self._renumber(old.seat.ranks, a.seat.ranks)
        self.crew.resized(a.world)
        self._prepared = {}
        try:
            self._open_store(a, beside=True)
            for local_rank in sorted(fresh):
                rank = a.seat.ranks[local_rank]
                self._in_loop.discard(rank)
                self._resizes.discard(rank)
                self.hands.replace(rank, a.generation, self._environment(a, local_rank))
        except (CannotStart, SupervisorError) as error:
            self._fail(str(error))
            return
        self._join(a, telling.at)

    def _renumber(self, old: Sequence[int], ranks: Sequence[int]) -> None:
        """The workers here have other ranks from now on."""
        self.crew.ranks = ranks
        now = dict(zip(old, ranks, strict=True))
        for known in (self._in_loop, self._resizes, self._finished):
            renamed = {now[rank] for rank in known}
            known.clear()
            known.update(renamed)

    def _join(self, a: m.Assignment, after: int | None = None) -> None:
        """Tell all workers here who they are in this generation. ``after``: the step that those
        who stay finish before."""
        fresh = set(a.fresh or ())
        self.crew.generation = a.generation
        previous = a.previous or (None,) * len(a.seat.ranks)
        for local_rank, rank in enumerate(a.seat.ranks):
            self.crew.tell(
                local_rank,
                "join",
                generation=a.generation,
                rank=rank,
                world=a.world,
                store=a.store,
                previous_rank=None if local_rank in fresh else previous[local_rank],
                **({} if after is None or local_rank in fresh else {"after": after}),
            )
        self.crew.prepare_later()

    def _dump(self, telling: m.Dump) -> None:
        a = self.assignment
        if a is None or telling.generation != a.generation:
            return
        self.crew.dump(
            self.crew.workers,
            generation=telling.generation,
            step=telling.step,
            writers=list(telling.writers),
            commit=telling.commit,
        )

    def _recovered(self, telling: m.Recovered) -> None:
        self.crew.close_old_stores()
        self._began_stop = None
        self.story.timeline.in_place += 1
        self.story.timeline.recovering += telling.seconds
        self.story.timeline.lose(telling.lost_steps)
        who = "step tried again"
        if telling.strategy == "elastic-training" and self.assignment is not None:
            who = f"{self.assignment.world} ranks"
        elif telling.replaced:
            who = f"rank {report.ranges(telling.replaced)} replaced"
        phases = ", ".join(f"{name} +{seconds(at)}" for name, at in telling.phases)
        lost = telling.lost_steps
        steps = f"; {lost} finished steps lost" if lost is not None else ""
        self.events.record(
            "recovered",
            strategy=telling.strategy,
            seconds=telling.seconds,
            phases=dict(telling.phases),
            lost_steps=lost,
        )
        self.console.good(
            f"{who}, training again after {seconds(telling.seconds)} ({phases}{steps})"
        )

    # ------------------------------------------------------------------ stopping

    def _stop(self, telling: m.Stop) -> None:
        a = self.assignment
        if a is None or not self.crew.workers:
            self._clear()
            self.bond.say(m.Stopped(telling.generation))
            return
        if telling.generation < a.generation:
            return  # of one that is no more
        self.events.record("stop", reason=telling.reason, at=telling.at)
        if self._began_stop is None:
            self._began_stop = time.monotonic()
            self.console.warn(telling.reason)
        if telling.at is not None and self._speaks:
            if self._draining is None:
                self._draining = (a.generation, time.monotonic() + self.nodes.rejoin / 2)
            for local_rank in self.crew.workers:
                self.crew.tell(local_rank, "stop_at", step=telling.at)
            return
        self._stop_now(telling.generation)

    def _stop_now(self, generation: int) -> None:
        self._end_workers()
        self._finish_stop(generation)

    def _finish_stop(self, generation: int) -> None:
        steps = self._steps()
        self.story.restart_begins(
            self._began_stop or time.monotonic(), steps[1] if steps is not None else None
        )
        self._clear()
        self.bond.say(m.Stopped(generation, steps))

    def _clear(self) -> None:
        """No worker runs here, and none is expected to."""
        self.assignment = None
        self._draining = None
        self._began_stop = None
        self._told_step = None
        self._in_loop, self._resizes, self._finished = set(), set(), set()
        self._failed = None
        self._prepared = {}
        self.crew.workers = {}
        self.crew.close_store()

    def _end_workers(self, signum: int = signal.SIGTERM) -> None:
        self.health.set_ready(False, "no worker runs here now")
        if not self._keeper_lost:
            self.crew.stop(signum, self.config.shutdown_timeout, self.signals.hurry)
        self._note_all(self.supervisor.wait(0))
        self.crew.stop_watchdog()
        self.crew.streams.end_attempt()

    def _note_all(self, happenings: Iterable[Any]) -> None:
        """What happens while the workers are being stopped: recorded, no more."""
        for happening in happenings:
            if isinstance(happening, WorkerDied):
                self.crew.note(happening)
            elif isinstance(happening, WorkerSpoke):
                self.crew.kept(happening.worker, happening.message)
            elif isinstance(happening, KeeperLost):
                self._keeper_lost = True
                self.crew.store = None
            elif isinstance(happening, StoreLost):
                self.crew.store_lost(happening.store)
            else:
                self.crew.note(happening)

    # ------------------------------------------------------------------ the end

    def _over(self, verdict: m.Verdict) -> None:
        self.events.record(
            "verdict",
            success=verdict.success,
            status=verdict.status,
            reason=verdict.reason,
            culprit=verdict.culprit,
        )
        self._end_workers()
        self.status = verdict.status
        if verdict.success:
            self.console.good(self.story.summary("done"))
        else:
            self.console.fail(verdict.reason)
            self.console.fail(self.story.summary("failed"))

    def leave(self, number: int) -> None:
        """Told to stop by a signal: say so at once, so that the others need not wait for the
        workers here, then end these.
        """
        self.bond.say(m.Leave(f"was told to stop by {signal.Signals(number).name}"))
        self._end_workers(number if number != signal.SIGINT else signal.SIGTERM)

    def close(self, goodbye: str) -> None:
        """Let go of everything; the workers are ended if that has not happened."""
        if [w for w in self.crew.workers.values() if not w.gone] and not self._keeper_lost:
            self.crew.stop(signal.SIGKILL, 0.0)
        self.bond.close(goodbye, self.signals.hurry)
        self.crew.close()
        if self.offers is not None:
            self.offers.close()

    # ------------------------------------------------------------------ others ask

    def numbers(self) -> list[Metric]:
        """For ``/metrics``. From any thread, without waiting."""
        from phalanx.health import Metric

        workers, timeline, a = (
            list(self.crew.workers.values()),
            self.story.timeline,
            self.assignment,
        )
        return [
            Metric("phalanx_workers", len(workers), "Workers of this node"),
            Metric("phalanx_workers_alive", sum(w.alive for w in workers), "Those that live"),
            Metric("phalanx_standbys", self.crew.standbys.ready, "Built, and without a rank"),
            Metric("phalanx_nodes", a.groups if a else 0, "Nodes that take part"),
            Metric("phalanx_generation", self._fence[1], "The membership's number"),
            Metric("phalanx_attempt", a.attempt if a else 0, "Starts of the group, from 0"),
            Metric("phalanx_in_place", timeline.in_place, "Recoveries in place", "counter"),
            Metric("phalanx_recovering_seconds", timeline.recovering, "Spent so", "counter"),
            *self.bond.numbers(),
        ]

    def facts(self) -> Mapping[str, Any]:
        """For ``/status``: membership, ranks, pids, progress. From any thread."""
        a = self.assignment
        return {
            **self.crew.facts(),
            "run_id": self.config.run_id,
            "node": self.me.id,
            "address": self.me.address,
            "generation": self._fence[1],
            "attempt": a.attempt if a else None,
            "term": a.term if a else self._fence[0],
            "group": a.group if a else None,
            "nodes": a.groups if a else None,
            "world": a.world if a else None,
            "ranks": list(a.seat.ranks) if a else [],
            "recoveries_in_place": self.story.timeline.in_place,
            "coordinator": dict(self.bond.facts()),
        }


def _facts_of(end: report.WorkerEnd) -> dict[str, Any]:
    """A worker's end, as far as it travels."""
    facts = dataclasses.asdict(end)
    facts["stderr_tail"] = tuple(end.stderr_tail)[-EVIDENCE:]
    facts["traceback"] = end.traceback[-8000:]
    if end.exception is not None:
        facts["exception"] = str(end.exception)[:8000]
    return facts


_KINDS = {
    "Hello": "hello",
    "Left": "left",
    "Fault": "fault",
    "GoodStep": "good_step",
    "Finished": "finished",
}
