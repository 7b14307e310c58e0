"""The agent of ``phalanx run``: one job on one machine, kept running.

It is a SimpleElasticAgent (the state, the rank table, the events and metrics of PyTorch's
contract) with a loop of its own: it waits in the supervisor's selector, restarts by the
policy of ``phalanx.agent.policy``, recovers workers in place by the machine of
``phalanx.recovery.episode``, and says what happened.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.agent import exit_codes, policy, report
from phalanx.agent.config import JobConfig
from phalanx.agent.console import Console, seconds
from phalanx.agent.hangs import HangWatch
from phalanx.agent.signals import JobSignals
from phalanx.agent.streams import Streams
from phalanx.elastic.agent.server import worker_env
from phalanx.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from phalanx.elastic.metrics import put_metric
from phalanx.elastic.multiprocessing.api import wall_ns
from phalanx.elastic.multiprocessing.errors import ProcessFailure
from phalanx.elastic.rendezvous.local import LocalRendezvousHandler
from phalanx.process import errorfile, syscalls
from phalanx.process.channel import ChannelClosed, ChannelFull, Message
from phalanx.process.supervisor import (
    KeeperLost,
    KeeperReady,
    StartOrder,
    StoreLost,
    Supervisor,
    SupervisorError,
    WorkerDied,
    WorkerGarbled,
    WorkerGone,
    WorkerProcess,
    WorkerSpoke,
)

if TYPE_CHECKING:
    from types import ModuleType

    from phalanx.elastic.timer import FileTimerServer
    from phalanx.events import EventLog
    from phalanx.health import LoopHealth, Metric
    from phalanx.process.oom import Mark, OomWatch
    from phalanx.process.preload import PreloadReport
    from phalanx.process.store_process import StoreProcess
    from phalanx.recovery import episode as ep

START_SECONDS = 600.0
"""How long the start of a group may take: the keeper's imports are in it."""

PREPARE_AFTER = 1.0
"""Seconds after a start when the next set of warm workers is forked."""

SAID_LIMIT = 1000
"""How many messages of one worker the events record takes."""

TIMER_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class CannotStart(RuntimeError):
    """The workers cannot be started; ``status`` is what to exit with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


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
class Recovery:
    """A whole-group restart under way: when its phases were over (monotonic seconds)."""

    died: float
    stopped: float = 0.0
    started: float = 0.0
    last_step: int | None = None


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
        self.console = console
        self.events = events
        self.health = health
        self._bound = self._bind()
        self.signals = JobSignals(config.signals, supervisor.wake, self._pass_on)
        self.streams = Streams(config)
        self.timeline = Timeline()
        self.ends: list[report.WorkerEnd] = []
        self.root: report.WorkerEnd | None = None
        self.verdict: policy.Verdict | None = None
        self.unkillable: list[int] = []
        self.generation = 0
        self._workers: dict[int, WorkerProcess] = {}
        self._all: list[WorkerProcess] = []  # with replaced ones that are not gone yet
        self._hung: dict[int, str] = {}  # worker id: why
        self._envs: dict[int, dict[str, str]] = {}
        self._store_process: StoreProcess | None = None
        self._old_stores: list[StoreProcess] = []  # of the generations of this episode
        # None until a worker says hello: a plain program needs no machine
        self._machine: ep.State | None = None
        self._why_group: str | None = None
        self._kept: dict[int, dict[str, int]] = {}
        self._attempts: list[policy.Attempt] = []
        self._recovery: Recovery | None = None
        self._prepare_at: float | None = None
        self._warm_note = ""
        self._keeper_lost: str | None = None
        self._watchdog: FileTimerServer | None = None
        self._host = socket.gethostname()
        self._oom: OomWatch | None = None
        self._marks: dict[int, Mark] = {}  # by worker id
        self._stacks: Path | None = None
        self._hangs = HangWatch(config.hang_limits) if config.hang_limits else None
        self._ending: set[int] = set()  # worker ids whose stacks are being saved
        # what other threads found to hang: worker, why; the loop ends them
        self._condemned: deque[tuple[WorkerProcess, str]] = deque()
        self._said_unlike = False
        self._said: dict[int, int] = {}  # by worker id: messages that are recorded as they are
        supervisor.on_turn = health.tick

    # ------------------------------------------------------------------ starting

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        self.generation += 1
        self._why_group = None
        attempt = self._restart_count()
        self.events.update(generation=self.generation, attempt=attempt)
        self._envs = {}
        for worker in worker_group.workers:
            env = worker_env.of_worker(
                worker_group,
                worker,
                restart_count=attempt,
                use_agent_store=self._serve_store(),
                agent_env={**os.environ, **self.config.environment},
            )
            worker_env.put_local_rank(env, worker.local_rank, spec.virtual_local_rank, os.environ)
            env["PHALANX_GENERATION"] = str(self.generation)
            env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self.config.signals
            self._envs[worker.local_rank] = env
        self._start_watchdog()
        prefixes = {
            w.local_rank: worker_env.log_prefix(
                self.config.prefix_template or "[${role_name}${rank}]:",
                role_name=spec.role,
                rank=w.global_rank,
                local_rank=w.local_rank,
                host=self._host,
                attempt=attempt,
            )
            for w in worker_group.workers
        }
        try:
            dest = self.streams.begin(self._envs, prefixes)
        except OSError as error:
            folder = self.config.log_dir or error.filename
            raise CannotStart(
                f"there can be no log files in {folder}: {error.strerror}",
                exit_codes.CANNOT_START,
            ) from error
        for local_rank, path in dest.error_files.items():
            _forget(path)
            self._envs[local_rank].setdefault("TORCHELASTIC_ERROR_FILE", path)
        if self._machine is not None:
            self._machine = _episodes().State.fresh(
                spec.local_world_size, self.generation, self._machine
            )
        self._all, self._hung, self._workers, self._marks = [], {}, {}, {}
        with self.signals.interruptible():
            started = self._launch(range(spec.local_world_size))
        self._workers = {w.local_rank: w for w in started}
        self.events.record(
            "workers_started",
            pids={w.local_rank: w.pid for w in started},
            warm=all(w.warm for w in started),
        )
        for process in started:
            self._hand_over(process)
        for happening in self.supervisor.wait(0):
            self._take(happening)
        self._prepare_at = time.monotonic() + PREPARE_AFTER
        self._say_start(started)
        self.health.set_ready(True)
        return {w.local_rank: w.pid for w in started}

    def _launch(
        self, local_ranks: Iterable[int], extra: Mapping[str, str] | None = None
    ) -> list[WorkerProcess]:
        """Start a process for each of these ranks, all or none."""
        orders, opened = [], []
        try:
            for local_rank in local_ranks:
                out, err = self.streams.open(local_rank)
                opened += [fd for fd in (out, err) if fd is not None]
                env = {**os.environ, **self.config.environment, **self._envs[local_rank]}
                env.update(extra or {})
                if self._kept.get(local_rank):
                    env["PHALANX_KEPT"] = ",".join(self._kept[local_rank])
                orders.append(
                    StartOrder(
                        local_rank,
                        self._program(local_rank),
                        env,
                        stdout=out,
                        stderr=err,
                        warm=self.config.starts_warm and not self._differs(env),
                    )
                )
            started = self.supervisor.start(orders, START_SECONDS)
        except (OSError, ValueError) as error:
            raise _cannot_start(error) from error
        finally:
            for fd in opened:
                os.close(fd)
        # a page keeps a descriptor open for as long as its worker is remembered
        self._all = [w for w in self._all if not w.gone] + started
        if self._oom is None:
            from phalanx.process.oom import OomWatch

            self._oom = OomWatch()
        for worker in started:
            self._marks[worker.id] = self._oom.mark(worker.pid)
        return started

    def _program(self, local_rank: int) -> Any:
        from dataclasses import replace

        program = self.config.program
        return replace(
            program,
            argv=worker_env.arguments(self._bound.get(local_rank, program.argv), local_rank),
            args=worker_env.arguments(program.args, local_rank),
        )

    def _bind(self) -> dict[int, tuple[str, ...]]:
        """Each local rank's command with its processors, for ``--numa-binding``.

        Raises phalanx.process.numa.NumaError.
        """
        if self.config.numa_binding is None:
            return {}
        from phalanx.process import numa

        options = numa.NumaOptions(numa.AffinityMode(self.config.numa_binding))
        argv = self.config.program.argv
        bound = {rank: numa.command(argv, options, rank) for rank in range(self.config.nproc)}
        if self.config.warm and self.config.program.warmable:
            self.console.say("workers start with a fresh interpreter: --numa-binding runs numactl")
        return bound

    def _differs(self, env: Mapping[str, str]) -> bool:
        """Whether a worker with this environment has to be started fresh."""
        from phalanx.process.preload import unlike

        names = unlike(self.supervisor.env, env)
        if names and not self._said_unlike:
            self._said_unlike = True
            self.console.warn(
                f"workers start with a fresh interpreter: {', '.join(names)} "
                f"{'is' if len(names) == 1 else 'are'} not as in the agent's environment, "
                "and what is imported already would not see it"
            )
        return bool(names)

    def _hand_over(self, worker: WorkerProcess) -> None:
        """Give a fresh process what earlier ones of its rank wanted kept."""
        kept = self._kept.get(worker.local_rank)
        if kept:
            self._tell(worker, "kept", tuple(kept.values()), names=list(kept))

    def _serve_store(self) -> bool:
        """Have the workers' store of this round served by a process of its own."""
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, LocalRendezvousHandler) or not handler.offers_listener:
            return bool(getattr(handler, "use_agent_store", False))
        if not handler.use_agent_store:
            self._close_store()
            self._store_process = self.supervisor.start_store(handler.claim_listener())
        return True

    def _close_old_stores(self) -> None:
        stores, self._old_stores = self._old_stores, []
        for store in stores:
            store.close()

    def _close_store(self) -> None:
        self._close_old_stores()
        store, self._store_process = self._store_process, None
        if store is not None:
            store.close()

    def _start_watchdog(self) -> None:
        self._stop_watchdog()
        if os.environ.get(TIMER_ENABLE) == "1":
            import tempfile
            import uuid

            from phalanx.elastic.timer import FileTimerServer

            path = os.environ.get(TIMER_FILE) or os.path.join(
                tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"
            )
            self._watchdog = FileTimerServer(
                path,
                self.config.run_id,
                max_interval=0.1,
                daemon=True,
                allowed_pids=lambda pid: self._worker_of(pid) is not None,
                on_expired=self._on_timer_expired,
            )
            self._watchdog.start()
            self.health.watch("watchdog", self._watchdog.get_last_progress_time, timeout=60.0)
        path_now = os.environ.get(TIMER_FILE) if self._watchdog is None else path
        if path_now:
            for env in self._envs.values():
                env[TIMER_FILE] = path_now

    def _stop_watchdog(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            self.health.unwatch("watchdog")
            watchdog.stop()

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
                self._settle()
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
            self.timeline.restarts += 1
            self._begin(self._restart_workers)
            assert self._recovery is not None
            self._recovery.started = time.monotonic()

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
            self.signals.check()
            for happening in self.supervisor.wait(self._patience()):
                self._take(happening)
            self._tick()
            if self._why_group is not None:
                return RunResult(state=WorkerState.FAILED)
            if self._workers and all(w.returncode == 0 and w.gone for w in self._workers.values()):
                by_rank = {w.global_rank: None for w in self._worker_group.workers}
                return RunResult(state=WorkerState.SUCCEEDED, return_values=by_rank)

    def _patience(self) -> float:
        """Seconds until something is due, at most the monitor interval."""
        due = [self._machine_due(), self._prepare_at]
        now = time.monotonic()
        waits = [max(0.0, t - now) for t in due if t is not None]
        return min([self._worker_group.spec.monitor_interval, *waits])

    def _tick(self) -> None:
        now = time.monotonic()
        self.health.tick()
        if self._prepare_at is not None and now >= self._prepare_at:
            self._prepare_at = None
            if self.config.starts_warm:
                try:
                    self.supervisor.prepare(self._worker_group.spec.local_world_size)
                except SupervisorError:
                    return  # the keeper is lost: the next wait tells
        due = self._machine_due()
        if due is not None and now >= due:
            self._advance(_episodes().Tick())
        if self._recovery is not None:
            self._see_recovered(now)
        if self._hangs is not None:
            for rank, why in self._hangs.look(self._workers.values(), now).items():
                self._end_hung(self._workers[rank], why)
        while self._condemned:
            self._kill_hung(*self._condemned.popleft())

    def _kill_hung(self, worker: WorkerProcess, why: str) -> None:
        if worker.alive:
            self._hung[worker.id] = why
            worker.signal(signal.SIGKILL)

    def _take(self, happening: Any) -> None:
        """One thing that happened."""
        if isinstance(happening, WorkerDied):
            self._on_died(happening.worker)
        elif isinstance(happening, WorkerGone):
            worker = happening.worker
            self.events.record(
                "worker_gone",
                local_rank=worker.local_rank,
                pid=worker.pid,
                returncode=worker.returncode,
                max_rss=worker.max_rss,
                swept=worker.swept,
            )
            if worker.left:
                self.unkillable += worker.left
        elif isinstance(happening, WorkerSpoke):
            self._on_message(happening.worker, happening.message)
        elif isinstance(happening, WorkerGarbled):
            if self._worth_recording(happening.worker):
                self.events.record(
                    "worker_garbled",
                    local_rank=happening.worker.local_rank,
                    error=str(happening.error),
                )
        elif isinstance(happening, KeeperReady):
            told = happening.report
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
        elif isinstance(happening, KeeperLost):
            self._keeper_lost = happening.reason
            self._store_process = None
            self._give_up(happening.reason)
            self.events.record("keeper_lost", reason=happening.reason)
        elif isinstance(happening, StoreLost):
            self.events.record("store_lost", returncode=happening.store.returncode)
            if happening.store in self._old_stores:
                self._old_stores.remove(happening.store)
                return
            self._store_process = None
            self._give_up("the workers' store was lost")

    def _give_up(self, why: str) -> None:
        """Have the whole group started again, or the job end; the first reason counts."""
        self._why_group = self._why_group or why

    def _is_current(self, worker: WorkerProcess) -> bool:
        return self._workers.get(worker.local_rank) is worker

    def _on_died(self, worker: WorkerProcess) -> None:
        self._note_death(worker)
        if not self._is_current(worker):
            return
        end = self._end_of(worker, light=True)
        how = report.how(end)
        if self._machine is None:
            if worker.returncode != 0:
                self._give_up(f"rank {worker.local_rank} {how}")
        elif worker.returncode == 0:
            self._advance(_episodes().Finished(worker.local_rank))
        else:
            hung = worker.id in self._hung
            step = worker.page.read().step
            died = _episodes().Died(worker.local_rank, how, step, hung)
            self._advance(died, report.describe(end))

    def _note_death(self, worker: WorkerProcess) -> None:
        self.events.record(
            "worker_died",
            local_rank=worker.local_rank,
            pid=worker.pid,
            returncode=worker.returncode,
            dead_ns=worker.dead_ns,
            step=worker.page.read().step,
            stopped=bool(worker.signalled_by_us),
        )

    def _note_all(self, happenings: Iterable[Any]) -> None:
        """What happens while the group is down: recorded, and nothing is done about it."""
        for happening in happenings:
            if isinstance(happening, WorkerDied):
                self._note_death(happening.worker)
            elif not isinstance(happening, WorkerSpoke):
                self._take(happening)
            elif happening.message.type == "keep":
                self._keep(happening.worker, happening.message)
            else:
                for fd in happening.message.fds:
                    os.close(fd)

    # ------------------------------------------------------------------ recovery in place

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        """What a worker said (docs/training.md). Nothing it says may harm the agent."""
        rank, say = worker.local_rank, message.fields
        if message.type == "keep":
            self._keep(worker, message)
            return
        for fd in message.fds:
            os.close(fd)
        if not self._is_current(worker):
            return
        generation = _whole(say.get("generation"), self.generation)
        step = _whole(say.get("step"), None)
        ep = _episodes()
        if self._machine is None:
            self._machine = ep.State.fresh(
                self._worker_group.spec.local_world_size, self.generation
            )
        if message.type == "hello":
            self._advance(ep.Hello(rank, generation, bool(say.get("waiting"))))
        elif message.type == "left":
            self._advance(ep.Left(rank, generation))
        elif message.type == "fault":
            kind, text = str(say.get("kind", ""))[:40], str(say.get("text", ""))[:2000]
            if self._worth_recording(worker):
                self.events.record(
                    "worker_fault", local_rank=rank, fault=kind, text=text, step=step
                )
            self._advance(ep.Fault(rank, generation, kind, text, step))
        elif message.type == "good_step":
            told = say.get("report")
            known = told if isinstance(told, dict) else {}
            self._advance(ep.GoodStep(rank, generation, step or 0, known))
        elif message.type == "finished":
            self._advance(ep.Finished(rank))
        elif self._worth_recording(worker):
            said = {**_plain(say), "local_rank": rank, "type": message.type}
            self.events.record("worker_said", **said)

    def _worth_recording(self, worker: WorkerProcess) -> bool:
        """Whether to record another message as it came: who never stops sending fills no disk."""
        count = self._said[worker.id] = self._said.get(worker.id, 0) + 1
        return count <= SAID_LIMIT

    def _keep(self, worker: WorkerProcess, message: Message) -> None:
        """Hold a descriptor for a rank's next incarnation."""
        name = message.fields.get("name")
        if not isinstance(name, str) or not name or "," in name or len(message.fds) != 1:
            for fd in message.fds:
                os.close(fd)
            return
        kept = self._kept.setdefault(worker.local_rank, {})
        old = kept.pop(name, None)
        if old is not None:
            os.close(old)
        if len(kept) >= 8:
            os.close(message.fds[0])
            return
        kept[name] = message.fds[0]

    def _advance(self, event: ep.Event, words: str | None = None) -> None:
        """Feed the machine and carry out what it says; ``words`` tell a person of the event."""
        assert self._machine is not None
        before = self._machine.episode
        self._machine, effects = _episodes().advance(self._machine, event, time.monotonic())
        now = self._machine.episode
        if now is not None and (before is None or before.number != now.number):
            self.events.update(episode=now.number)
            self.events.record("episode_began", cause=now.cause, strategy=now.strategy)
            self.console.warn(words or now.cause)
        elif words:
            self.console.warn(words)
        for effect in effects:
            self._carry_out(effect)

    def _machine_due(self) -> float | None:
        return None if self._machine is None else _episodes().next_deadline(self._machine)

    def _carry_out(self, effect: ep.Effect) -> None:
        ep = _episodes()
        if isinstance(effect, ep.Replace):
            self._replace(effect.rank, effect.generation)
        elif isinstance(effect, ep.Regroup):
            self._regroup(effect)
        elif isinstance(effect, ep.Kill):
            worker = self._workers[effect.rank]
            self.events.record("worker_killed", local_rank=effect.rank, why=effect.why)
            self._kill_hung(worker, effect.why)
        elif isinstance(effect, ep.RestartGroup):
            self.events.record("restart_group", why=effect.why)
            self._give_up(effect.why)
        elif isinstance(effect, ep.Recovered):
            self._recovered_in_place(effect)

    def _replace(self, rank: int, generation: int) -> None:
        try:
            with self.signals.interruptible():
                (worker,) = self._launch(
                    [rank], {"PHALANX_JOIN": "1", "PHALANX_GENERATION": str(generation)}
                )
        except (CannotStart, SupervisorError) as error:
            self._give_up(f"no replacement for rank {rank} could be started: {error}")
            return
        self._workers[rank] = worker
        self._worker_group.workers[rank].id = worker.pid
        self._hand_over(worker)
        self.events.record("worker_replaced", local_rank=rank, pid=worker.pid, warm=worker.warm)

    def _regroup(self, effect: ep.Regroup) -> None:
        if self._why_group is not None:
            return
        self.generation = effect.generation
        self.events.update(generation=effect.generation)
        handler = self._worker_group.spec.rdzv_handler
        old = self._store_process
        for rank in effect.survivors:
            self._tell(self._workers[rank], "leave", generation=effect.generation - 1)
        where = handler.next_rendezvous().bootstrap_store_info
        listener = handler.claim_listener()  # type: ignore[attr-defined]
        if old is not None and old.port == listener.getsockname()[1]:
            old.close()  # with a given port both would take connections from one socket
        try:
            self._store_process = self.supervisor.start_store(listener, eager=True)
        except SupervisorError as error:
            self._give_up(str(error))
            return
        for rank in effect.members:
            self._tell(
                self._workers[rank],
                "join",
                generation=effect.generation,
                rank=rank,
                world=len(effect.members),
                store=f"{where.master_addr}:{where.master_port}" if where else "",
                previous_rank=rank if rank in effect.survivors else None,
            )
        if old is not None and not old.gone:
            # Somebody may be about to connect to it: until the group has come together
            # nobody may be left knocking at a closed door.
            self._old_stores.append(old)
        self._prepare_at = time.monotonic() + PREPARE_AFTER

    def _tell(
        self, worker: WorkerProcess, kind: str, fds: tuple[int, ...] = (), **say: Any
    ) -> None:
        try:
            worker.channel.send(kind, fds, **say)
        except ChannelClosed:
            pass  # dead: we are about to be told
        except ChannelFull:
            self._kill_hung(worker, "reads no messages of the agent")

    def _recovered_in_place(self, effect: ep.Recovered) -> None:
        done = effect.episode
        self._close_old_stores()
        self.timeline.in_place += 1
        self.timeline.recovering += effect.seconds
        lost = [n for _, r in done.reports if isinstance(n := r.get("lost_steps"), int) and n >= 0]
        self.timeline.lose(max(lost) if lost else None)
        phases = ", ".join(f"{name} +{seconds(at)}" for name, at in done.phases)
        who = (
            f"rank {report.ranges(sorted(done.replaced))} replaced"
            if done.replaced
            else "step tried again"
        )
        self.events.record(
            "recovered",
            strategy=done.strategy,
            seconds=effect.seconds,
            rounds=done.round,
            phases=dict(done.phases),
            reports={str(r): _plain(told) for r, told in done.reports},
        )
        self.events.update(episode=None)
        steps = f"; {max(lost)} finished steps lost" if lost else ""
        self.console.good(
            f"{who}, training again after {seconds(effect.seconds)} ({phases}{steps})"
        )

    # ------------------------------------------------------------------ hangs

    def _end_hung(self, worker: WorkerProcess, why: str) -> None:
        """Save the stacks of all, then kill this one: the rest is a death like any other."""
        if worker.id in self._ending:
            return
        self._ending.add(worker.id)

        def end() -> None:
            saved = self._save_stacks()
            self.events.record(
                "worker_hung",
                local_rank=worker.local_rank,
                pid=worker.pid,
                why=why,
                stacks=[str(p) for p in saved],
            )
            self._condemn(worker, f"hung: {why}")

        # looking into every process takes a while: the loop goes on meanwhile
        threading.Thread(target=end, name="phalanx-stacks", daemon=True).start()

    def _condemn(self, worker: WorkerProcess, why: str) -> None:
        """Have the loop end a worker that hangs. From any thread: only the loop's own may
        use a worker's descriptors.
        """
        self._condemned.append((worker, why))
        self.supervisor.wake()

    def _worker_of(self, pid: int) -> WorkerProcess | None:
        """The living worker that this process is, or is a child of. From any thread."""
        try:
            session = os.getsid(pid)
        except OSError:
            return None
        for worker in list(self._workers.values()):
            if worker.pid in (pid, session) and worker.alive:
                return worker
        return None

    def _save_stacks(self) -> list[Path]:
        """The stacks of all living workers, into a folder that stays. Never raises."""
        from phalanx.watchdog.stacks import save_stacks

        root = Path(self.streams.specs.root_log_dir or ".")
        folder = root / "stacks" / f"attempt_{self._restart_count()}"
        ranks = {
            w.pid: f"rank_{self._worker_group.workers[w.local_rank].global_rank}"
            for w in list(self._workers.values())
            if w.alive
        }
        saved = save_stacks(ranks, folder, 10.0)
        if saved:
            self.streams.keeps_logs = True
            self._stacks = folder
        return saved

    def _on_timer_expired(self, pid: int, requests: Any) -> bool:
        """A watchdog timer ran out (in the watchdog's thread): stacks first, then the kill."""
        worker = self._worker_of(pid)
        if worker is None:
            return False
        scopes = ", ".join(str(r.scope_id)[:200] for r in requests)
        saved = self._save_stacks()
        self.events.record(
            "timer_expired",
            local_rank=worker.local_rank,
            pid=pid,
            scopes=scopes,
            stacks=[str(p) for p in saved],
        )
        self._condemn(worker, f"did not end {scopes} before its timer ran out")
        return True

    # ------------------------------------------------------------------ the end of an attempt

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._end_workers(signal.SIGTERM, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the group now, without waiting."""
        if self._why_group is not None:
            return RunResult(state=WorkerState.FAILED)
        if self._workers and all(w.returncode == 0 for w in self._workers.values()):
            return RunResult(state=WorkerState.SUCCEEDED)
        return RunResult(state=WorkerState.HEALTHY)

    def _end_workers(self, signum: int, grace: float) -> None:
        self.health.set_ready(False, "restarting")
        living = [w for w in self._all if not w.gone]
        if living and self._keeper_lost is None:
            stopped = self.supervisor.stop(living, signum, grace, self.signals.hurry)
            self.unkillable += [w.pid for w in stopped.unkillable]
            self.events.record("workers_stopped", seconds=stopped.seconds, swept=stopped.swept)
        self._note_all(self.supervisor.wait(0))
        self._stop_watchdog()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_workers(death_sig, timeout)
        self._settle()
        self._close_store()
        self.supervisor.close(grace=1.0)
        self.streams.close()
        if self._oom is not None:
            self._oom.close()
        for kept in self._kept.values():
            for fd in kept.values():
                os.close(fd)
        self._kept.clear()

    def _settle(self) -> None:
        """What is to be said when the workers are gone."""
        self.streams.end_attempt()

    def _end_of(self, worker: WorkerProcess, light: bool = False) -> report.WorkerEnd:
        """What is known of a worker's end; ``light``: without waiting for its output."""
        rank = self._worker_group.workers[worker.local_rank].global_rank
        record = errorfile.read(self.streams.error_file(worker.local_rank) or os.devnull)
        if record is not None and worker.returncode is not None and worker.returncode <= 0:
            record = None  # it went on after what it recorded
        lines, path = ((), "") if light else self.streams.last_lines(worker.local_rank)
        progress = worker.page.read()
        # a SIGKILL that is not ours was there before our milder signal
        not_ours = worker.returncode == -signal.SIGKILL and (
            int(signal.SIGKILL) not in worker.signalled_by_us
        )
        stopped = bool(worker.signalled_by_us) and worker.id not in self._hung and not not_ours
        dead = worker.dead_ns if worker.dead_ns is not None else time.monotonic_ns()
        message = record.message if record else None
        exception = message.get("message") if isinstance(message, dict) else message
        return report.WorkerEnd(
            rank=rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            host=self._host,
            returncode=worker.returncode,
            dead_ns=worker.dead_ns,
            stopped=stopped,
            exception=exception or report.exception_in(lines),
            traceback=record.text if record and isinstance(message, dict) else "",
            stderr_tail=tuple(lines),
            log_file=path,
            step=progress.step,
            lasted=max(0.0, (dead - worker.started_ns) / 1e9),
            memory=self._memory(worker) if not light else None,
            hung=self._hung.get(worker.id),
        )

    def _memory(self, worker: WorkerProcess) -> str | None:
        """A sentence if the kernel says that memory ran out."""
        mark = self._marks.get(worker.id)
        if self._oom is None or mark is None or not worker.returncode:
            return None
        return self._oom.explain(mark, worker.returncode, worker.max_rss)

    def _post_mortem(self) -> RunResult:
        """Say what happened, and decide whether to start again."""
        self.streams.end_attempt()
        current = list(self._workers.values())
        self.ends = [self._end_of(w) for w in current]
        # whoever died with the keeper is its victim
        self.root = root = None if self._keeper_lost else report.root_cause(self.ends)
        deaths = [w.dead_ns for w in current if w.dead_ns is not None]
        first = min(deaths) / 1e9 if deaths else time.monotonic()
        if root is not None and root.dead_ns is not None:
            first = root.dead_ns / 1e9
        steps = [e.step for e in self.ends if e.step is not None]
        self._attempts.append(
            policy.Attempt(
                lasted=max(0.0, first - min(w.started_ns for w in current) / 1e9)
                if current
                else 0.0,
                returncode=root.returncode if root else None,
                exception=_class_of(root.exception) if root and root.exception else None,
                first_step=min(steps) if steps else None,
                last_step=max(steps) if steps else None,
            )
        )
        self.verdict = policy.decide(
            policy.Policy(max_restarts=self._worker_group.spec.max_restarts), self._attempts
        )
        self._say_failure(root)
        self._close_account()
        self._recovery = Recovery(
            died=first,
            stopped=time.monotonic(),
            last_step=max(steps) if steps else None,
        )
        failures = {
            e.rank: ProcessFailure(
                local_rank=e.local_rank,
                pid=e.pid,
                exitcode=e.returncode or 0,
                error_file=self.streams.error_file(e.local_rank) or "<N/A>",
                observed_ns=wall_ns(e.dead_ns or time.monotonic_ns()),
            )
            for e in self.ends
            if e.failed and not e.stopped
        }
        self.events.record(
            "attempt_failed",
            root=_end_json(root) if root else None,
            reason=self._why_group,
            restart=self.verdict.restart,
            verdict=self.verdict.reason,
        )
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _back_off(self, delay: float) -> None:
        if delay <= 0:
            return
        self.console.say(f"waiting {seconds(delay)} before the restart")
        end = time.monotonic() + delay
        while (left := end - time.monotonic()) > 0:
            self.signals.check()
            self._note_all(self.supervisor.wait(left))
            self.health.tick()

    # ------------------------------------------------------------------ words

    def _say_start(self, started: list[WorkerProcess]) -> None:
        if self._restart_count() or self._recovery is not None:
            return
        program = self.config.program
        name = program.module or (os.path.basename(program.script) if program.script else None)
        what = name or os.path.basename(program.argv[0])
        warm = " warm" if started and all(w.warm for w in started) else ""
        count = len(started)
        self.console.say(
            f"{count}{warm} worker{'s' if count != 1 else ''} of {what} started"
            f"{self._warm_note if warm else ''} (run {self.config.run_id})"
        )

    def _say_failure(self, root: report.WorkerEnd | None) -> None:
        console = self.console
        if root is None:
            console.fail(self._keeper_lost or self._why_group or "the workers ended")
        else:
            console.fail(report.describe(root))
            assert self.verdict is not None
            if root.log_file or not self.verdict.restart:  # else it stands a few lines above
                console.quote(report.evidence(root))
            if root.log_file:
                console.say(f"its stderr: {root.log_file}")
        if self._stacks is not None:
            console.say(f"stacks of all workers before the end: {self._stacks}")
            self._stacks = None
        others = report.victims(self.ends, root)
        if others and not self._keeper_lost:
            console.say(others)
        assert self.verdict is not None
        if self.verdict.restart:
            number, budget = len(self._attempts), self._worker_group.spec.max_restarts
            count = self._worker_group.spec.local_world_size
            who = f"all {count} workers" if count > 1 else "the worker"
            console.say(f"restarting {who} (restart {number} of {budget})")
        else:
            console.fail(f"not restarted: {self.verdict.reason}")

    def _see_recovered(self, now: float) -> None:
        """Close the restart's account when every worker has made a step, or told nothing."""
        recovery = self._recovery
        assert recovery is not None
        if not recovery.started:
            return
        pages = [w.page.read() for w in self._workers.values()]
        beats = [p.first_beat_ns for p in pages if p.first_beat_ns]
        known = len(beats) == len(pages) and bool(pages)
        if not known and (recovery.last_step is not None or now < recovery.started + 1.0):
            return
        phases = [
            ("stopped", recovery.stopped - recovery.died),
            ("started", recovery.started - recovery.died),
        ]
        if known:
            phases.append(("first step", max(beats) / 1e9 - recovery.died))
        total = phases[-1][1]
        lost = None
        resumed = min((p.first_step for p in pages if p.first_step is not None), default=None)
        if recovery.last_step is not None and resumed is not None:
            lost = max(0, recovery.last_step - (resumed - 1))
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
        self._recovery = None

    def _close_account(self) -> None:
        """Count the time of a restart after which nobody got as far as a step."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None and recovery.started:
            self.timeline.recovering += recovery.started - recovery.died

    def summary(self, what: str) -> str:
        """The closing line."""
        self._close_account()
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

    # ------------------------------------------------------------------ others ask

    def _pass_on(self, number: int) -> None:
        """A signal for the program: to every worker alone."""
        for worker in self.supervisor.running():  # ours may still be in the making
            if worker.alive:
                try:
                    # not worker.signal(): that would count as a stop of ours
                    syscalls.pidfd_send_signal(worker.pidfd, number)
                except OSError:
                    pass

    def numbers(self) -> list[Metric]:
        """For ``/metrics``. From any thread, without waiting."""
        from phalanx.health import Metric

        workers = list(self._workers.values())
        steps = [s for w in workers if (s := w.page.read().step) is not None]
        out = [
            Metric("phalanx_workers", len(workers), "Workers of this node"),
            Metric("phalanx_workers_alive", sum(w.alive for w in workers), "Those that live"),
            Metric("phalanx_generation", self.generation, "The membership's number"),
            Metric("phalanx_attempt", self._restart_count(), "Starts of the group, from 0"),
            Metric("phalanx_restarts", self.timeline.restarts, "Group restarts", "counter"),
            Metric("phalanx_in_place", self.timeline.in_place, "Recoveries in place", "counter"),
            Metric("phalanx_recovering_seconds", self.timeline.recovering, "Spent so", "counter"),
        ]
        if steps:
            out.append(Metric("phalanx_step", max(steps), "The furthest finished step"))
        return out

    def facts(self) -> Mapping[str, Any]:
        """For ``/status``: ranks, pids, states, progress. From any thread, without waiting."""
        workers = []
        for worker in list(self._workers.values()):
            progress = worker.page.read()
            workers.append(
                {
                    "local_rank": worker.local_rank,
                    "rank": self._worker_group.workers[worker.local_rank].global_rank,
                    "pid": worker.pid,
                    "incarnation": worker.incarnation,
                    "warm": worker.warm,
                    "alive": worker.alive,
                    "returncode": worker.returncode,
                    "step": progress.step,
                    "phase": progress.phase,
                    "beat_age_seconds": round((time.monotonic_ns() - progress.beat_ns) / 1e9, 3)
                    if progress.beat_ns
                    else None,
                }
            )
        episode = self._machine.episode if self._machine else None
        return {
            "run_id": self.config.run_id,
            "state": self._worker_group.state.value,
            "generation": self.generation,
            "attempt": self._restart_count(),
            "restarts_left": self._remaining_restarts,
            "recoveries_in_place": self.timeline.in_place,
            "recovering": episode.cause if episode else None,
            "workers": workers,
        }


def _episodes() -> ModuleType:
    """The recovery machine, imported when the first worker can be recovered in place."""
    from phalanx.recovery import episode

    return episode


def _cannot_start(error: OSError | ValueError) -> CannotStart:
    if isinstance(error, TimeoutError):
        return CannotStart(str(error), exit_codes.CANNOT_START)
    if isinstance(error, ValueError) or error.filename is None:
        return CannotStart(f"the workers cannot be started: {error}", exit_codes.CANNOT_START)
    if error.errno == errno.ENOENT and error.strerror == os.strerror(errno.ENOENT):
        return CannotStart(f"there is no program {error.filename}", exit_codes.NOT_FOUND)
    status = exit_codes.NOT_FOUND if error.errno == errno.ENOENT else exit_codes.CANNOT_START
    return CannotStart(f"{error.filename} cannot be run: {error.strerror}", status)


def _forget(path: str) -> None:
    if path and path != os.devnull:
        try:
            os.unlink(path)
        except OSError:
            pass


def _whole(value: Any, default: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _plain(say: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in json.loads(json.dumps(dict(say), default=str)).items() if k != "kind"}


def _class_of(exception: str) -> str:
    return exception.split(":", 1)[0].strip().rsplit(".", 1)[-1]


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


__all__ = ["CannotStart", "JobAgent"]
