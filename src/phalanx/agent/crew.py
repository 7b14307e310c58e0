"""The processes of one node: started, replaced, told, watched, stopped.

A crew knows its workers by *local* rank. What a rank means to the job, who else is in it, which
generation is next and where the store is, its user tells it (``begin``, ``replace``, ``tell``,
``renew_store``); nothing here decides on a recovery. Happenings come from the supervisor's
``wait`` and are handed to ``note`` by whoever runs the loop. Everything but ``worker_of``,
``save_stacks``, ``condemn`` and ``facts`` is for the loop's own thread.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.agent import exit_codes, report
from phalanx.agent.config import JobConfig
from phalanx.agent.console import Console
from phalanx.agent.hangs import HangWatch
from phalanx.agent.standbys import NOBODY, Standby, Standbys, fixed_differences
from phalanx.agent.streams import Streams
from phalanx.elastic.agent.server import worker_env
from phalanx.elastic.multiprocessing.api import wall_ns
from phalanx.elastic.multiprocessing.errors import ProcessFailure
from phalanx.events import EVENTS_ENV
from phalanx.process import errorfile, pause, syscalls, tree
from phalanx.process.channel import MAX_FDS, ChannelClosed, ChannelFull, Message
from phalanx.process.supervisor import (
    StartOrder,
    Supervisor,
    SupervisorError,
    WorkerDied,
    WorkerGarbled,
    WorkerGone,
    WorkerProcess,
    WorkerSpoke,
)
from phalanx.recovery import blame

if TYPE_CHECKING:
    from phalanx.elastic.timer import FileTimerServer
    from phalanx.events import EventLog
    from phalanx.health import LoopHealth
    from phalanx.process.oom import Mark, OomWatch
    from phalanx.process.program import Program
    from phalanx.process.stop import StopReport
    from phalanx.process.store_process import StoreProcess

PREPARE_AFTER = 1.0
"""Seconds after a start when the next set of warm workers is forked."""

PATIENCE = 30.0
"""Seconds after its start during which a worker is given time to install signal handlers."""

LATE_TICK = 0.1
"""Seconds between two looks whether it has: nothing tells of it."""

SAID_LIMIT = 1000
"""How many messages of one worker the events record takes."""

SLATE = "slate"
"""What a session calls the memory in which a rank writes what is its own (``keep``)."""

STACKS_SECONDS = 5.0
"""Bound on the time that a hang goes on for its stacks; some tenths are usual."""

TIMER_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
_STOP = signal.SIGSTOP  # a worker leads a session: SIGTSTP would not stop it


class CannotStart(RuntimeError):
    """The workers cannot be started; ``status`` is what to exit with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Crew:
    """``config.nproc`` workers of one job on this node."""

    def __init__(
        self,
        config: JobConfig,
        supervisor: Supervisor,
        console: Console,
        events: EventLog,
        health: LoopHealth,
    ) -> None:
        """Raises ValueError, OSError for a log folder and NumaError for a binding that will
        not do.
        """
        self.config = config
        self.supervisor = supervisor
        self.console = console
        self.events = events
        self.health = health
        self._bound = self._bind()
        self.streams = Streams(config)
        if self.streams.temporary is not None:
            supervisor.tidy(self.streams.temporary)
        self.standbys = Standbys(config.standby, self._start_standby, self.streams, console, events)
        self.host = socket.gethostname()
        self.workers: dict[int, WorkerProcess] = {}  # those that hold the ranks now
        self.ranks: Sequence[int] = ()  # the global rank of each local one
        self.generation = 0  # what the workers were last told
        self.hung: dict[int, str] = {}  # worker id: why we ended it
        self.unkillable: list[int] = []
        self.stacks: Path | None = None  # saved, and not spoken of yet
        self.store: StoreProcess | None = None
        self._old_stores: list[StoreProcess] = []  # of the generations of this episode
        self.attempt = 0
        self._all: list[WorkerProcess] = []  # with replaced ones that are not gone yet
        self._envs: dict[int, dict[str, str]] = {}
        self._kept: dict[int, dict[str, int]] = {}  # by local rank
        self._holders: dict[int, str] = {}  # by rank: who held what its next process is given
        # set by whoever has snapshots copied: (rank, descriptor, step, back)
        self.on_snapshot: Callable[[int, int, int, bool], object] | None = None
        self._prepare_at: float | None = None
        self._watchdog: FileTimerServer | None = None
        self._oom: OomWatch | None = None
        self._marks: dict[int, Mark] = {}  # by worker id
        self._hangs = HangWatch(config.hang_limits) if config.hang_limits else None
        self.stop_asked: Callable[[], bool] = lambda: False  # a start under way ends early
        # signals for the program, and the ids of the workers that have got them
        self._passing: list[tuple[int, set[int]]] = []
        self._looking = False  # stacks are being saved by another thread
        self._found: deque[Mapping[WorkerProcess, str]] = deque()  # what it has looked into
        # set by whoever can have all ranks leave their step: (one of them, why) -> whether they are
        self.ask_to_leave: Callable[[WorkerProcess, str], bool] | None = None
        # what other threads found to hang: worker, why; the loop ends them
        self._condemned: deque[tuple[WorkerProcess, str]] = deque()
        self._said_unlike = False
        self._said: dict[int, int] = {}  # by worker id: messages that are recorded as they are

    # ------------------------------------------------------------------ starting

    def begin(
        self,
        ranks: Sequence[int],
        envs: dict[int, dict[str, str]],
        *,
        generation: int,
        attempt: int,
    ) -> None:
        """A new attempt of the whole group; the workers of the last one are gone.

        ``ranks``: the global rank of each local rank. ``envs``: each local rank's variables,
        without the agent's own; ``attempt`` names the folder of the logs.

        Raises CannotStart when there can be no log files.
        """
        self._all, self.hung, self.workers, self._marks = [], {}, {}, {}
        self.generation, self.attempt = generation, attempt
        self._keep_for(ranks)
        self.ranks = (*ranks,)  # the last, and another object: see `_lineup`
        self._envs = envs
        for env in envs.values():
            env["PHALANX_GENERATION"] = str(generation)
            env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = self.config.signals
        self._start_watchdog()
        prefixes = {
            local_rank: worker_env.log_prefix(
                self.config.prefix_template or "[${role_name}${rank}]:",
                role_name=self.config.role,
                rank=rank,
                local_rank=local_rank,
                host=self.host,
                attempt=attempt,
            )
            for local_rank, rank in enumerate(ranks)
        }
        try:
            dest = self.streams.begin(envs, prefixes)
        except OSError as error:
            folder = self.config.log_dir or error.filename
            raise CannotStart(
                f"there can be no log files in {folder}: {error.strerror}",
                exit_codes.CANNOT_START,
            ) from error
        for local_rank, path in dest.error_files.items():
            _forget(path)
            envs[local_rank].setdefault("TORCHELASTIC_ERROR_FILE", path)
        if self.config.standby:
            commands = {rank: self._program(rank) for rank in envs}
            self.standbys.begin(
                fixed_differences(envs, {r: (*p.argv, *p.args) for r, p in commands.items()})
            )

    def start(self) -> list[WorkerProcess]:
        """Start a process for every local rank, all or none; fewer only when ``stop_asked``.

        Raises CannotStart, SupervisorError.
        """
        started = self._launch(range(len(self.ranks)), {})
        self.workers = {w.local_rank: w for w in started}
        self.events.record(
            "workers_started",
            pids={w.local_rank: w.pid for w in started},
            warm=all(w.warm for w in started),
        )
        for worker in started:
            self._hand_over(worker)
        self.prepare_later()
        return started

    def replace(
        self, local_rank: int, generation: int, env: Mapping[str, str] | None = None
    ) -> WorkerProcess:
        """Another process for a rank, one that waits for its ``join``: a standby that is
        ready, else a new one.

        ``env``: variables that differ from those of ``begin``.
        Raises CannotStart, SupervisorError.
        """
        extra = {**(env or {}), "PHALANX_JOIN": "1", "PHALANX_GENERATION": str(generation)}
        self._put_aside(local_rank)
        standby = self.standbys.take({**self._envs[local_rank], **extra}.get("WORLD_SIZE", ""))
        if standby is not None:
            worker = self._seat(standby, local_rank, generation, extra)
        else:
            started = self._launch([local_rank], extra)
            if not started:
                raise SupervisorError("the job is being stopped")
            (worker,) = started
            self.workers[local_rank] = worker
            self._hand_over(worker)
        self.events.record(
            "worker_replaced",
            local_rank=local_rank,
            pid=worker.pid,
            warm=worker.warm,
            standby=standby is not None,
        )
        return worker

    def resized(self, world: int) -> None:
        """The job has so many ranks from now on; those here have been told by `tell`."""
        for env in self._envs.values():
            env["WORLD_SIZE"] = env["ROLE_WORLD_SIZE"] = str(world)
        self.standbys.resized(str(world))

    def _put_aside(self, local_rank: int) -> None:
        """What the rank's last process has told of its end stays, and is not the next one's."""
        old, path = self.workers.get(local_rank), self.streams.error_file(local_rank)
        if old is not None and path and path != os.devnull:
            try:
                os.rename(path, f"{path}.{old.incarnation}")
            except OSError:
                pass  # it told nothing

    def _start_standby(self, slot: int) -> tuple[WorkerProcess, Mapping[str, str]] | None:
        """A process for whichever rank; built as the last one, which prints least.

        Raises CannotStart, SupervisorError.
        """
        like = len(self.ranks) - 1
        extra = {
            "PHALANX_JOIN": "1",
            "PHALANX_GENERATION": str(self.generation),
            "TORCHELASTIC_ERROR_FILE": os.devnull,
        }
        env = self._environment(like, extra)
        try:
            streams = self.streams.open_apart(slot)
        except (OSError, RuntimeError) as error:
            raise CannotStart(str(error), exit_codes.CANNOT_START) from error
        started = self._start([self._order(NOBODY, like, env, *streams)], streams)
        return (started[0], env) if started else None

    def _seat(
        self, standby: Standby, local_rank: int, generation: int, extra: Mapping[str, str]
    ) -> WorkerProcess:
        """Give a rank to a standby: its variables, its streams, what its last process kept."""
        worker = standby.worker
        self.supervisor.assign(worker, local_rank)
        self._all.append(worker)
        self.workers[local_rank] = worker
        env = self._environment(local_rank, extra)
        changed = {name: value for name, value in env.items() if standby.env.get(name) != value}
        out, err = self.streams.open(local_rank)
        opened = [fd for fd in (out, err) if fd is not None]
        streams = {}
        for name, fd, own in (("stdout", out, 1), ("stderr", err, 2)):
            if fd is not None or syscalls.is_open(own):
                streams[name] = own if fd is None else fd
        try:
            self.standbys.hand_over(standby, streams)
            self._tell(
                worker,
                "take",
                tuple(streams.values()),
                environment=changed,
                streams=list(streams),
            )
        finally:
            for fd in opened:
                os.close(fd)
        self._hand_over(worker)
        assert standby.hello is not None
        # it said so long ago, and whoever recovers has to hear it now
        fields = {**standby.hello.fields, "generation": generation}
        self.supervisor.replay(WorkerSpoke(worker, Message("hello", fields)))
        return worker

    def prepare_later(self) -> None:
        """Have warm workers for the next start forked in a moment (``PREPARE_AFTER``)."""
        self._prepare_at = pause.now() + PREPARE_AFTER

    def _prepare(self) -> None:
        if self.config.starts_warm:
            try:
                self.supervisor.prepare(self.config.nproc + 1)  # one for the store
            except SupervisorError:
                pass  # the keeper is lost: the next wait tells

    def _launch(self, local_ranks: Iterable[int], extra: Mapping[str, str]) -> list[WorkerProcess]:
        orders: list[StartOrder] = []
        opened: list[int] = []
        try:
            for local_rank in local_ranks:
                out, err = self.streams.open(local_rank)
                opened += [fd for fd in (out, err) if fd is not None]
                env = self._environment(local_rank, extra)
                if self._kept.get(local_rank):
                    env["PHALANX_KEPT"] = ",".join(self._kept[local_rank])
                orders.append(self._order(local_rank, local_rank, env, out, err))
        except BaseException as error:
            for fd in opened:
                os.close(fd)
            if isinstance(error, (OSError, ValueError)):
                raise _cannot_start(error) from error
            raise
        started = self._start(orders, opened)
        # a page keeps a descriptor open for as long as its worker is remembered
        self._all = [w for w in self._all if not w.gone] + started
        return started

    def _environment(self, local_rank: int, extra: Mapping[str, str]) -> dict[str, str]:
        env = {**os.environ, **self.config.environment, **self._envs[local_rank], **extra}
        if self.config.events:
            env.setdefault(EVENTS_ENV, os.path.abspath(self.config.events))
        return env

    def _order(
        self, local_rank: int, like: int, env: dict[str, str], out: int | None, err: int | None
    ) -> StartOrder:
        """``like``: the local rank whose program it runs."""
        return StartOrder(
            local_rank,
            self._program(like),
            env,
            stdout=out,
            stderr=err,
            warm=self.config.starts_warm and not self._differs(env),
        )

    def _start(self, orders: Sequence[StartOrder], opened: Iterable[int]) -> list[WorkerProcess]:
        """Raises CannotStart, SupervisorError; closes what was ``opened``."""
        try:
            started = self.supervisor.start(orders, self.config.start_timeout, self.stop_asked)
        except (OSError, ValueError) as error:
            raise _cannot_start(error) from error
        finally:
            for fd in opened:
                os.close(fd)
        if self._oom is None:
            from phalanx.process.oom import OomWatch

            self._oom = OomWatch()
        for worker in started:
            self._marks[worker.id] = self._oom.mark(worker.pid)
        return started

    def _program(self, local_rank: int) -> Program:
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

    # ------------------------------------------------------------------ the workers' store

    def serve_store(self, listener: socket.socket) -> None:
        """Serve the store of a new attempt; the last one's is closed."""
        self.close_store()
        self.store = self.supervisor.start_store(listener)

    def renew_store(self, listener: socket.socket) -> None:
        """Serve a new generation's store beside the last one's.

        Somebody may be about to connect to that: until the group has come together
        (``close_old_stores``) nobody may be left knocking at a closed door.

        Raises SupervisorError.
        """
        old = self.store
        if old is not None and old.port == listener.getsockname()[1]:
            old.close()  # with a given port both would take connections from one socket
        self.store = self.supervisor.start_store(listener, eager=True)
        if old is not None and not old.gone:
            self._old_stores.append(old)

    def store_lost(self, store: StoreProcess) -> bool:
        """A store has died; whether it was the one that the workers use."""
        self.events.record("store_lost", returncode=store.returncode)
        if store in self._old_stores:
            self._old_stores.remove(store)
            return False
        self.store = None
        return True

    def close_old_stores(self) -> None:
        """The group has come together: nobody asks earlier generations' stores any more."""
        stores, self._old_stores = self._old_stores, []
        for store in stores:
            store.close()

    def close_store(self) -> None:
        """Close all stores."""
        self.close_old_stores()
        store, self.store = self.store, None
        if store is not None:
            store.close()

    # ------------------------------------------------------------------ channel

    def tell(self, local_rank: int, kind: str, **say: Any) -> None:
        """Send a message. Who reads none is ended; who is dead is reported dead in turn."""
        self._tell(self.workers[local_rank], kind, **say)

    def _tell(
        self, worker: WorkerProcess, kind: str, fds: tuple[int, ...] = (), **say: Any
    ) -> None:
        try:
            worker.channel.send(kind, fds, **say)
        except ChannelClosed:
            pass  # dead: we are about to be told
        except ChannelFull:
            self._kill(worker, "reads no messages of the agent")

    def dump(
        self, local_ranks: Iterable[int], *, writers: Sequence[int], commit: bool, **order: Any
    ) -> None:
        """Order a last checkpoint. With it goes what ranks gave to be kept step by step: a rank
        whose process is dead or new cannot write down itself what was its own.
        """
        told = list(local_ranks)
        scribes = [local for local in told if self.ranks[local] in writers] or told
        given: dict[int, dict[int, int]] = {local: {} for local in told}
        if not commit and scribes:
            for number, (local, kept) in enumerate(sorted(self._kept.items())):
                records = given[scribes[number % len(scribes)]]
                if SLATE in kept and len(records) < MAX_FDS:
                    records[self.ranks[local]] = kept[SLATE]
        for local, records in given.items():
            self._tell(
                self.workers[local],
                "dump",
                tuple(records.values()),
                records=list(records),
                writers=list(writers),
                commit=commit,
                **order,
            )

    def _hand_over(self, worker: WorkerProcess) -> None:
        """Give a fresh process what earlier ones of its rank wanted kept."""
        kept = self._kept.get(worker.local_rank)
        if kept:
            say: dict[str, Any] = {"names": list(kept)}
            if holder := self._holders.pop(self.ranks[worker.local_rank], ""):
                say["holder"] = holder
            self._tell(worker, "kept", tuple(kept.values()), **say)

    def _keep_for(self, ranks: Sequence[int]) -> None:
        """What is kept goes with its rank; what is of ranks that are not here any more goes."""
        held = {self.ranks[n]: kept for n, kept in self._kept.items() if n < len(self.ranks)}
        self._kept = {n: held.pop(rank) for n, rank in enumerate(ranks) if rank in held}
        for kept in held.values():
            for fd in kept.values():
                os.close(fd)

    def adopt(self, rank: int, fd: int, holder: str) -> None:
        """Keep snapshots that another node, ``holder``, has held of a rank; the descriptor is ours
        now."""
        self._holders[rank] = holder
        kept = self._kept.setdefault(self.ranks.index(rank), {})
        if (old := kept.pop("snapshots", None)) is not None:
            os.close(old)
        kept["snapshots"] = fd

    def kept(self, worker: WorkerProcess, message: Message) -> bool:
        """Take the message's descriptors; True when that is all of it: it was of what is kept, or a
        word of a standby.
        """
        idle = self.standbys.on_message(worker, message)
        if message.type == "snapshot":
            for fd in message.fds:
                os.close(fd)
            self._note_snapshot(worker, message)
            return True
        name = message.fields.get("name")
        fits = isinstance(name, str) and name and "," not in name and len(message.fds) == 1
        if message.type != "keep" or not fits or idle:
            for fd in message.fds:
                os.close(fd)
            return idle or message.type == "keep"
        kept = self._kept.setdefault(worker.local_rank, {})
        old = kept.pop(str(name), None)
        if old is not None:
            os.close(old)
        if len(kept) >= 8:
            os.close(message.fds[0])
        else:
            kept[str(name)] = message.fds[0]
        return True

    def _note_snapshot(self, worker: WorkerProcess, message: Message) -> None:
        fd = self._kept.get(worker.local_rank, {}).get("snapshots")
        step = message.fields.get("step")
        if self.on_snapshot is None or fd is None or type(step) is not int:
            return
        if self.is_current(worker) and message.fields.get("generation") == self.generation:
            rank = self.ranks[worker.local_rank]
            self.on_snapshot(rank, fd, step, message.fields.get("back") is True)

    def worth_recording(self, worker: WorkerProcess) -> bool:
        """Whether to record another message as it came: who never stops sending fills no disk."""
        count = self._said[worker.id] = self._said.get(worker.id, 0) + 1
        return count <= SAID_LIMIT

    # ------------------------------------------------------------------ watching

    def note(self, happening: Any) -> None:
        """Record what happened to a worker (messages are their reader's)."""
        if getattr(happening, "worker", None) and happening.worker.local_rank == NOBODY:
            self.standbys.note(happening)
            return
        if isinstance(happening, WorkerDied):
            worker = happening.worker
            self.events.record(
                "worker_died",
                local_rank=worker.local_rank,
                pid=worker.pid,
                returncode=worker.returncode,
                dead_ns=worker.dead_ns,
                step=worker.page.read().step,
                stopped=bool(worker.signalled_by_us),
            )
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
        elif isinstance(happening, WorkerGarbled) and self.worth_recording(happening.worker):
            self.events.record(
                "worker_garbled",
                local_rank=happening.worker.local_rank,
                error=str(happening.error),
            )

    def is_current(self, worker: WorkerProcess) -> bool:
        """Whether this process holds its rank (and no later one does)."""
        return self.workers.get(worker.local_rank) is worker

    def succeeded(self) -> bool:
        """Whether all have ended well and are gone."""
        return bool(self.workers) and all(
            w.returncode == 0 and w.gone for w in self.workers.values()
        )

    def due(self) -> float | None:
        """When the next ``tick`` has something to do, in seconds of ``pause.now``."""
        soon = pause.now() + LATE_TICK if self._passing else None
        due = (soon, self._prepare_at, self.standbys.due())
        return min((t for t in due if t is not None), default=None)

    def tick(self, now: float) -> None:
        """Standbys that are due, hangs, and those that other threads condemned."""
        if self._prepare_at is not None and now >= self._prepare_at:
            self._prepare_at = None
            self._prepare()
        if self._prepare_at is None and self.standbys.tick(now, list(self.workers.values())):
            self._prepare()  # it may have used one of those
        for one in list(self._passing):  # a signal handler may add to it
            if self._passed(*one):
                self._passing.remove(one)
        # Who is looked into by another process stands still meanwhile, so one hang at a time.
        if self._hangs is not None and not self._looking:
            hung = self._hangs.look(self.workers.values(), now)
            if hung:
                self._look_into({self.workers[rank]: why for rank, why in hung.items()})
        while self._found:
            self._end_hung(self._found.popleft(), now)
        while self._condemned:
            self._kill(*self._condemned.popleft())

    def kill(self, local_rank: int, why: str) -> None:
        """SIGKILL for a worker that hangs; ``why`` is a clause for a person (``end_of``)."""
        self._kill(self.workers[local_rank], why)

    def _kill(self, worker: WorkerProcess, why: str) -> None:
        if worker.alive:
            self.hung[worker.id] = why
            worker.signal(signal.SIGKILL)

    def _look_into(self, hung: Mapping[WorkerProcess, str]) -> None:
        """Save the stacks of all; then the loop goes on with `_end_hung`."""
        self._looking = True

        def look() -> None:
            saved = [str(path) for path in self.save_stacks()]
            for worker, why in hung.items():
                self.events.record(
                    "worker_hung",
                    local_rank=worker.local_rank,
                    pid=worker.pid,
                    why=why,
                    stacks=saved,
                )
            self._found.append(hung)
            self.supervisor.wake()

        # looking into every process takes a while: the loop goes on meanwhile
        try:
            threading.Thread(target=look, name="phalanx-stacks", daemon=True).start()
        except RuntimeError:  # no more threads for this user: without the stacks, then
            self._found.append(hung)

    def _end_hung(self, hung: Mapping[WorkerProcess, str], now: float) -> None:
        """Kill what hangs: the rest is a death like any other. Those that are all in the same
        step cannot be told apart: if they can, they leave it, and who does not is killed."""
        assert self._hangs is not None
        self._looking = False
        still = {w: why for w, why in hung.items() if self._hangs.still_silent(w)}
        self._hangs.forgive(now)
        if len(still) > 1 and self.ask_to_leave is not None:
            worker, why = next(iter(still.items()))
            if self.ask_to_leave(worker, f"all ranks of its step: {why}"):
                return
        for worker, why in still.items():
            self._kill(worker, f"hung: {why}")

    def forgive(self) -> None:
        """Let everybody's silence count from now: they are called to another generation."""
        if self._hangs is not None:
            self._hangs.forgive(pause.now())

    def condemn(self, worker: WorkerProcess, why: str) -> None:
        """Have the loop end a worker that hangs. From any thread: only the loop's own may
        use a worker's descriptors.
        """
        self._condemned.append((worker, why))
        self.supervisor.wake()

    def worker_of(self, pid: int) -> WorkerProcess | None:
        """The living worker that this process is, or is a child of. From any thread."""
        try:
            session = os.getsid(pid)
        except OSError:
            return None
        for worker in list(self.workers.values()):
            if worker.pid in (pid, session) and worker.alive:
                return worker
        return None

    def save_stacks(self) -> list[Path]:
        """The stacks of all living workers, into a folder that stays. From any thread.

        Never raises.
        """
        from phalanx.watchdog.stacks import save_stacks

        root = Path(self.streams.specs.root_log_dir or ".")
        folder = root / "stacks" / f"attempt_{self.attempt}"
        ranks = {
            w.pid: f"rank_{self.ranks[w.local_rank]}"
            for w in list(self.workers.values())
            if w.alive
        }
        saved = save_stacks(ranks, folder, STACKS_SECONDS)
        if saved:
            self.streams.keeps_logs = True
            self.stacks = folder
        return saved

    # ------------------------------------------------------------------ PyTorch's file timers

    def _start_watchdog(self) -> None:
        self.stop_watchdog()
        path = os.environ.get(TIMER_FILE)
        if os.environ.get(TIMER_ENABLE) == "1":
            import tempfile
            import uuid

            from phalanx.elastic.timer import FileTimerServer

            path = path or os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")
            self.supervisor.tidy(path)
            self._watchdog = FileTimerServer(
                path,
                self.config.run_id,
                max_interval=0.1,
                daemon=True,
                allowed_pids=lambda pid: self.worker_of(pid) is not None,
                on_expired=self._on_timer_expired,
            )
            self._watchdog.start()
            self.health.watch("watchdog", self._watchdog.get_last_progress_time, timeout=60.0)
        if path:
            for env in self._envs.values():
                env[TIMER_FILE] = path

    def stop_watchdog(self) -> None:
        """The workers are gone: no timer of theirs counts any more."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            self.health.unwatch("watchdog")
            watchdog.stop()

    def _on_timer_expired(self, pid: int, requests: Any) -> bool:
        """A watchdog timer ran out (in the watchdog's thread): stacks first, then the kill."""
        worker = self.worker_of(pid)
        if worker is None:
            return False
        scopes = ", ".join(str(r.scope_id)[:200] for r in requests)
        saved = self.save_stacks()
        self.events.record(
            "timer_expired",
            local_rank=worker.local_rank,
            pid=pid,
            scopes=scopes,
            stacks=[str(p) for p in saved],
        )
        self.condemn(worker, f"did not end {scopes} before its timer ran out")
        return True

    # ------------------------------------------------------------------ the end

    def stop(
        self, signum: int, grace: float, hurry: Callable[[], bool] = lambda: False
    ) -> StopReport | None:
        """End every process of the crew; None when all were gone already.

        ``grace`` in seconds; ``hurry`` cuts it short (``Supervisor.stop``).
        """
        idle = self.standbys.end()
        living = [w for w in self._all if not w.gone]
        if not living:
            return None
        stopped = self.supervisor.stop([*living, *idle], signum, grace, hurry)
        self.unkillable += [w.pid for w in stopped.unkillable]
        self.events.record("workers_stopped", seconds=stopped.seconds, swept=stopped.swept)
        return stopped

    def close(self) -> None:
        """Let go of everything, the supervisor included; the workers are stopped already."""
        self.streams.end_attempt()
        self.close_store()
        self.supervisor.close(grace=1.0)
        self.streams.close()
        if self._oom is not None:
            self._oom.close()
        for kept in self._kept.values():
            for fd in kept.values():
                os.close(fd)
        self._kept.clear()

    def pass_on(self, number: int) -> None:
        """A signal for the program: to every worker alone, those of a start under way too.

        For a signal handler; the next ``tick`` does it. One that would end a program that has
        only just begun, and has had no time to say what it does with it, waits for that
        (``PATIENCE``).
        """
        self._passing.append((number, set()))
        self.supervisor.wake()

    def _passed(self, number: int, got: set[int]) -> bool:
        """Pass it on to who has not got it yet; whether all have."""
        living = [w for w in self.workers.values() if w.alive]
        for worker in living:
            young = time.monotonic_ns() - worker.started_ns < PATIENCE * 1e9
            if worker.id in got or (young and not tree.expects(worker.pid, number)):
                continue
            got.add(worker.id)
            try:
                # not worker.signal(): that would count as a stop of ours
                syscalls.pidfd_send_signal(worker.pidfd, number)
            except OSError:
                pass
        return bool(living) and got >= {w.id for w in living}

    def pause(self) -> None:
        """Stop the workers, with all that they have started, and this process; go on with
        them when it is continued. Time bounds do not count it (``phalanx.process.pause``).
        """
        stopped: list[tree.Stat] = []
        for worker in self.supervisor.running():
            for pid in (worker.pid, *(entry.pid for entry in tree.descendants(worker.pid))):
                entry = tree.stat(pid)
                if entry is not None and entry.state not in "Tt" and tree.kill(entry, _STOP):
                    stopped.append(entry)
        self.events.record("job_paused", processes=len(stopped))
        before = pause.total()
        pause.stop_here()
        for entry in reversed(stopped):
            tree.kill(entry, signal.SIGCONT)
        self.events.record("job_continued", seconds=pause.total() - before)

    # ------------------------------------------------------------------ facts

    def end_of(self, worker: WorkerProcess, light: bool = False) -> report.WorkerEnd:
        """What is known of a worker's end; ``light``: without waiting for its output."""
        record = errorfile.read(self.streams.error_file(worker.local_rank) or os.devnull)
        if record is not None and worker.returncode is not None and worker.returncode <= 0:
            record = None  # it went on after what it recorded
        lines, path = ((), "") if light else self.streams.last_lines(worker.local_rank)
        progress = worker.page.read()
        # a SIGKILL that is not ours was there before our milder signal
        not_ours = worker.returncode == -signal.SIGKILL and (
            int(signal.SIGKILL) not in worker.signalled_by_us
        )
        stopped = bool(worker.signalled_by_us) and worker.id not in self.hung and not not_ours
        dead = worker.dead_ns if worker.dead_ns is not None else time.monotonic_ns()
        message = record.message if record else None
        exception = message.get("message") if isinstance(message, dict) else message
        return report.WorkerEnd(
            rank=self.ranks[worker.local_rank],
            local_rank=worker.local_rank,
            pid=worker.pid,
            host=self.host,
            returncode=worker.returncode,
            dead_ns=worker.dead_ns,
            stopped=stopped,
            exception=exception or blame.exception_in(lines),
            traceback=record.text if record and isinstance(message, dict) else "",
            stderr_tail=tuple(lines),
            log_file=path,
            step=progress.step,
            lasted=max(0.0, (dead - worker.started_ns) / 1e9),
            memory=self._memory(worker) if not light else None,
            hung=self.hung.get(worker.id),
        )

    def ends(self) -> list[report.WorkerEnd]:
        """Of all workers, with all that they have written."""
        self.streams.end_attempt()
        return [self.end_of(w) for w in self.workers.values()]

    def failures(self, ends: Sequence[report.WorkerEnd]) -> dict[int, ProcessFailure]:
        """Those that failed by themselves, as PyTorch's agents report them: by global rank."""
        return {
            e.rank: ProcessFailure(
                local_rank=e.local_rank,
                pid=e.pid,
                exitcode=e.returncode or 0,
                error_file=self.streams.error_file(e.local_rank) or "<N/A>",
                observed_ns=wall_ns(e.dead_ns or time.monotonic_ns()),
            )
            for e in ends
            if e.failed and not e.stopped
        }

    def _memory(self, worker: WorkerProcess) -> str | None:
        """A sentence if the kernel says that memory ran out."""
        mark = self._marks.get(worker.id)
        if self._oom is None or mark is None or not worker.returncode:
            return None
        return self._oom.explain(mark, worker.returncode, worker.max_rss)

    def lacks(self) -> str:
        """Which workers ought to run and do not; "": none. From any thread, without waiting."""
        *_, workers = self._lineup()
        dead = [rank for rank, w in workers if not w.alive and w.returncode != 0]
        if dead:
            return f"dead: rank {report.ranges(dead)}"
        return "" if any(w.alive for _, w in workers) else "no worker runs"

    def _lineup(self) -> tuple[int, int, list[tuple[int, WorkerProcess]]]:
        """Generation, attempt, and the workers with their global ranks, all of one moment."""
        while True:
            ranks = self.ranks
            generation, attempt = self.generation, self.attempt
            workers = list(self.workers.values())
            if self.ranks is ranks:
                return generation, attempt, [(ranks[w.local_rank], w) for w in workers]

    def facts(self) -> dict[str, Any]:
        """Ranks, pids, states, progress for ``/status``. From any thread, without waiting."""
        generation, attempt, lineup = self._lineup()
        workers = []
        for rank, worker in lineup:
            progress = worker.page.read()
            workers.append(
                {
                    "local_rank": worker.local_rank,
                    "rank": rank,
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
        return {
            "generation": generation,
            "attempt": attempt,
            "workers": workers,
            "standbys": self.standbys.facts(),
        }


def _cannot_start(error: OSError | ValueError) -> CannotStart:
    if isinstance(error, TimeoutError):
        text = f"{error}; --start-timeout S waits longer, --no-warm imports nothing ahead of them"
        return CannotStart(text, exit_codes.CANNOT_START)
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


__all__ = ["CannotStart", "Crew"]
