"""The agent's side: starts workers through the keeper, waits for what happens, stops them."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from phalanx.process import launch, pause, syscalls, tree, wire
from phalanx.process.channel import HELD, Channel, ChannelClosed, MalformedMessage, Message
from phalanx.process.page import ProgressPage
from phalanx.process.program import Program
from phalanx.process.stop import StopReport, stop_workers
from phalanx.process.store_process import StoreProcess

if TYPE_CHECKING:
    from phalanx.process.preload import PreloadPlan, PreloadReport

SEND_SECONDS = 10  # how long the keeper may leave an order unread
END_SECONDS = 3.0  # how long the keeper waits, at `close`, for its tree to be empty
TURN_SECONDS = 1.0  # the longest single wait when somebody wants to see the loop turn
SILENCE_SECONDS = 10.0  # after which the keeper is asked whether it is there
ANSWER_SECONDS = 5.0  # for its answer; not counted is the time in which we stood still too
ASKED_AT_MOST = 3  # times, before a keeper that does not answer is killed
ORPHAN_SECONDS = 5.0  # how long `open` waits for what a lost keeper left behind
_MESSAGES_AT_ONCE = 1000  # more than fit into a channel
_SIGTERM = int(signal.SIGTERM)


class SupervisorError(RuntimeError):
    """The supervisor cannot do this now; the text says why."""


@dataclass(frozen=True)
class StartOrder:
    """One worker to start. None for a standard stream: the agent's own."""

    local_rank: int
    program: Program
    env: Mapping[str, str]  # the complete environment
    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    cwd: str | None = None
    warm: bool = False


class WorkerProcess:
    """A process that was started as a worker, and what is known of its end."""

    def __init__(self, id: int, order: StartOrder, incarnation: int, mark: str) -> None:
        self.id = id
        self.local_rank = order.local_rank
        self.incarnation = incarnation
        self.mark = mark  # the value of PHALANX_WORKER in its environment
        self.pid = 0
        self.warm = False
        self.started_ns = 0  # CLOCK_MONOTONIC
        self.dead_ns: int | None = None
        self.returncode: int | None = None  # as subprocess has it
        self.gone = False  # reaped, its memory free, its descendants gone
        self.max_rss: int | None = None  # bytes
        self.signalled_by_us: set[int] = set()
        self.swept = 0  # descendants that outlived it and were killed
        self.left: tuple[int, ...] = ()  # descendants that did not die of SIGKILL
        self.page: ProgressPage
        self.channel: Channel
        self.ticks = -1
        self.pidfd = -1
        self.failure: BaseException | None = None
        self.watcher: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Not known to be dead."""
        return self.dead_ns is None

    def signal(self, signum: int) -> bool:
        """Signal this process alone. False: it is gone."""
        if self.gone or self.pidfd < 0:
            return False
        try:
            syscalls.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return False
        self.signalled_by_us.add(int(signum))
        return True

    def __repr__(self) -> str:
        state = "gone" if self.gone else "alive" if self.alive else "dead"
        return (
            f"<worker {self.local_rank}.{self.incarnation} pid {self.pid} {state} "
            f"returncode {self.returncode}>"
        )


@dataclass(frozen=True)
class WorkerDied:
    """Its program can do no more; memory may not be free yet."""

    worker: WorkerProcess


@dataclass(frozen=True)
class WorkerGone:
    """Its process has been reaped and what it left behind is gone."""

    worker: WorkerProcess


@dataclass(frozen=True)
class WorkerSpoke:
    """A message came over its channel."""

    worker: WorkerProcess
    message: Message


@dataclass(frozen=True)
class WorkerGarbled:
    """Something that is no message came over its channel."""

    worker: WorkerProcess
    error: MalformedMessage


@dataclass(frozen=True)
class KeeperReady:
    """The imports are done; warm starts are quick from now on, if ``report.safe``.

    If not, warm orders are started fresh.
    """

    report: PreloadReport


@dataclass(frozen=True)
class KeeperLost:
    """The keeper is dead, and with it all workers. `Supervisor.open` starts another."""

    returncode: int | None
    reason: str


@dataclass(frozen=True)
class StoreLost:
    """A store ended that nobody had closed."""

    store: StoreProcess


@dataclass(frozen=True)
class Woken:
    """Somebody called `Supervisor.wake`."""


Happening = Union[  # noqa: UP007  (an alias is evaluated)
    WorkerDied, WorkerGone, WorkerSpoke, WorkerGarbled, KeeperReady, KeeperLost, StoreLost, Woken
]


class _Subreaper:
    """The agent adopts orphans while at least one supervisor is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False

    def hold(self) -> None:
        with self._lock:
            if self._users == 0 and not syscalls.is_subreaper():
                syscalls.set_subreaper(True)
                self._ours = True
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._ours:
                syscalls.set_subreaper(False)
                self._ours = False


_subreaper = _Subreaper()


class _Wake:
    """An eventfd that lives as long as its owner: a late `set` hits no other descriptor."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # it is set, many times

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def __del__(self) -> None:
        os.close(self.fd)


def _never() -> bool:
    return False


@dataclass
class _Keeper:
    pid: int
    pidfd: int
    sock: socket.socket
    heard: float  # when it last said anything, or was last asked whether it is there
    asked: int = 0  # times, since it said anything


@dataclass
class _Death:
    """What a watching thread found out."""

    worker: WorkerProcess
    at_ns: int
    status: int


class Supervisor:
    """Starts, watches and stops the workers of one job on this machine.

    Usable from any thread, by one thread at a time; `wake` from everywhere. It installs no
    signal handler. Callbacks of `watch` may call `wake` and nothing else here.
    """

    def __init__(
        self,
        *,
        job: str,
        python: Sequence[str] = (),
        plan: PreloadPlan | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``python``: the command of the interpreter, default this one. ``plan``: what to
        import ahead of warm starts; None: never start warm. ``env``: the keeper's own.
        """
        self.on_turn: Callable[[], None] | None = None  # called at each turn of any wait here
        self._token = os.urandom(6).hex()
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", job)[:80]
        self._tidied: list[str] = []
        self._page_prefix = f"phalanx-{name}-{self._token}."
        self._python = tuple(python) or (sys.executable,)
        self._plan = plan
        self.env: Mapping[str, str] = dict(os.environ if env is None else env)  # the keeper's
        self._keeper: _Keeper | None = None
        self._opened = False
        self._epoll: select.epoll | None = None
        self._wake = _Wake()
        self._woken = False
        self._called_back = False
        self._spoken = False
        self._handlers: dict[int, Callable[[], None]] = {}
        self._pending: list[Happening] = []
        self._deaths: deque[_Death] = deque()
        self._ids = 0
        self._incarnations: dict[int, int] = {}
        self._workers: dict[int, WorkerProcess] = {}  # started or starting, not gone
        self._stores: dict[int, StoreProcess] = {}
        self._watchers: list[threading.Thread] = []
        self._orphans: dict[int, int] = {}  # pidfd to pid; of a lost keeper
        # Sessions that children of the keeper have led of late. A zombie of a lost keeper
        # shows whose it was by nothing else.
        self._sessions: deque[int] = deque(maxlen=1000)
        self._killed: set[tuple[int, int]] = set()  # of a lost keeper: pid and start

    def __enter__(self) -> Supervisor:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- life

    def open(self) -> None:
        """Start the keeper; does not wait for its imports.

        After `KeeperLost` it starts another one, when what the last one left is gone.
        Raises SupervisorError if a keeper is there or leftovers do not die, OSError.
        """
        if self._keeper is not None:
            raise SupervisorError("the supervisor is open already")
        if not self._opened:
            self._epoll = select.epoll()
            self._handle(self._wake.fd, self._on_wake)
            _subreaper.hold()
            self._opened = True
        end = time.monotonic() + ORPHAN_SECONDS
        while self._workers or self._orphans:
            left = end - time.monotonic()
            if left < 0:
                pids = [w.pid for w in self._workers.values()] + list(self._orphans.values())
                raise SupervisorError(f"processes of the lost keeper do not die: {pids}")
            self._pump(left)
        self._killed.clear()
        try:
            self._spawn()
        except BaseException:
            self._shut()
            raise

    def preload(self, plan: PreloadPlan) -> None:
        """Have the keeper import what ``plan`` names: for one that was not known at `open`."""
        self._need_keeper()
        self._plan = plan
        self._order({"op": "plan", "plan": plan.to_json()})

    def _spawn(self) -> None:
        ours, theirs = wire.pair()
        try:
            pid = self._spawn_keeper(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        pidfd = syscalls.pidfd_open(pid)
        wire.limit_sending(ours, SEND_SECONDS)
        self._keeper = _Keeper(pid, pidfd, ours, time.monotonic())
        self._handle(ours.fileno(), self._on_keeper)
        for path in self._tidied:
            self._order({"op": "tidy", "path": path})
        if self._plan is not None:
            self._order({"op": "plan", "plan": self._plan.to_json()})

    def _spawn_keeper(self, theirs: socket.socket) -> int:
        env = dict(self.env)
        for name in (launch.WORKER, launch.CHANNEL_FD, launch.PROGRESS_FD):
            env.pop(name, None)
        env[launch.KEEPER] = self._token
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        command = [*self._python, "-u", "-c", _KEEPER_CODE, "3", str(os.getpid()), root]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The keeper prints nothing on standard output; what an import prints goes to
            # standard error.
            errors = 2 if syscalls.is_open(2) else null
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                (os.POSIX_SPAWN_DUP2, errors, 1),
                (os.POSIX_SPAWN_DUP2, errors, 2),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            ]
            if null == 3 and errors == null:  # the first action would replace it
                actions = [*actions[1:3], actions[0], actions[3]]
            options: dict[str, Any] = {
                "file_actions": actions,
                "setsigmask": (),
                "setsigdef": tuple(_catchable()),
            }
            try:
                return os.posix_spawnp(command[0], command, env, setsid=True, **options)
            except NotImplementedError:
                return os.posix_spawnp(command[0], command, env, **options)
        except OSError as error:
            error.filename = command[0]
            raise
        finally:
            os.close(null)

    def close(self, grace: float = 5.0) -> None:
        """Stop what runs (SIGTERM, ``grace`` seconds), end the keeper, sweep, join.

        Nothing that a worker started is left, but for processes that SIGKILL cannot end.
        """
        if not self._opened:
            return
        try:
            if self._keeper is not None and self._workers:
                self.stop(list(self._workers.values()), grace=grace)
        finally:
            try:
                self._end_keeper()
            finally:
                self._shut()

    def _end_keeper(self) -> None:
        keeper = self._keeper
        if keeper is not None:
            try:
                wire.send(keeper.sock, {"op": "close", "seconds": END_SECONDS})
            except (wire.Hangup, OSError):
                pass
            if not _readable(keeper.pidfd, END_SECONDS + 2.0):
                syscalls.pidfd_send_signal(keeper.pidfd, signal.SIGKILL)
            self._lose_keeper("closed")
        end = time.monotonic() + ORPHAN_SECONDS
        while (self._workers or self._orphans) and (left := end - time.monotonic()) > 0:
            self._pump(left)
        for thread in self._watchers:
            thread.join(max(0.0, end - time.monotonic()))
        self._watchers.clear()

    def _shut(self) -> None:
        for worker in self._workers.values():
            self._release(worker)
        self._workers.clear()
        for store in self._stores.values():
            store.mark_gone(None)
        self._stores.clear()
        for pidfd in self._orphans:
            os.close(pidfd)
        self._orphans.clear()
        self._handlers.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None
        _refuse(self._pending)
        self._pending.clear()
        self._deaths.clear()
        self._opened = False
        _subreaper.release()

    # -- starting

    def start(
        self,
        orders: Sequence[StartOrder],
        timeout: float = 120.0,
        give_up: Callable[[], bool] = _never,
    ) -> list[WorkerProcess]:
        """Start them all, or none.

        When ``give_up`` says so (it is asked whenever anything happens, `wake` too) no more
        are started, and those that are come back alone: who may run already can be stopped
        as any other worker.

        A warm order waits for the keeper's imports; one that cannot be started warm is
        started fresh (`WorkerProcess.warm` says which it was). Raises FileNotFoundError,
        PermissionError and so on, naming the file, when one cannot be executed;
        TimeoutError when not all have started after ``timeout`` seconds; SupervisorError
        when there is no keeper or it is lost meanwhile. Nothing is left running then.
        """
        self._need_keeper()
        end = pause.now() + timeout
        workers: list[WorkerProcess] = []
        given_up = False
        try:
            for order in orders:
                if give_up():
                    break
                workers.append(self._order_start(order))
            while any(worker.pid == 0 and worker.failure is None for worker in workers):
                self._need_keeper()
                if not given_up and give_up():
                    given_up = True
                    self._order({"op": "call_off", "ids": [w.id for w in workers if not w.pid]})
                    end = min(end, pause.now() + ORPHAN_SECONDS)
                left = end - pause.now()
                if left <= 0 and given_up:
                    break
                if left <= 0:
                    late = [w.local_rank for w in workers if w.pid == 0]
                    raise TimeoutError(
                        f"after {timeout} s these local ranks have not started: {late}"
                    )
                self._pump(left)
            if given_up:
                self._take_back([worker for worker in workers if not worker.pid])
                workers = [worker for worker in workers if worker.pid]
            for worker in workers:
                if worker.failure is not None:
                    raise worker.failure
            self._need_keeper()
        except BaseException:
            self._take_back(workers)
            raise
        for worker in workers:
            self._incarnations[worker.local_rank] = worker.incarnation + 1
        return workers

    def _order_start(self, order: StartOrder) -> WorkerProcess:
        self._ids += 1
        mark = f"{self._token}.{self._ids}"
        incarnation = self._incarnations.get(order.local_rank, 0)
        worker = WorkerProcess(self._ids, order, incarnation, mark)
        page_name = f"{self._page_prefix}{self._ids}"
        worker.page = ProgressPage.create(page_name)
        worker.channel, theirs = Channel.pair()
        self._workers[worker.id] = worker
        fds = {"page": worker.page.fd, "channel": theirs.fileno()}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            fd = getattr(order, name)
            if fd is None and syscalls.is_open(number):
                fd = number
            if fd is not None:
                fds[name] = fd
        program = order.program
        try:
            self._order(
                {
                    "op": "start",
                    "id": worker.id,
                    "mark": mark,
                    "page": page_name,
                    "argv": list(map(os.fspath, program.argv)),
                    "script": program.script,
                    "module": program.module,
                    "args": list(program.args),
                    "env": dict(order.env),
                    "cwd": order.cwd,
                    "warm": order.warm and program.warmable and self._plan is not None,
                    "fds": list(fds),
                },
                list(fds.values()),
            )
        except BaseException:
            del self._workers[worker.id]
            worker.channel.close()
            raise
        finally:
            theirs.close()
            worker.page.close()  # the memory stays mapped
        self._handle(worker.channel.fileno(), self._on_channel)
        return worker

    def _take_back(self, workers: Sequence[WorkerProcess]) -> None:
        """End what was started of a start that failed, and forget it."""
        self.order({"op": "cancel", "ids": [worker.id for worker in workers]})
        started = [worker for worker in workers if worker.pid]
        end = time.monotonic() + ORPHAN_SECONDS
        while any(not w.gone for w in started) and (left := end - time.monotonic()) > 0:
            self._pump(left)
        for worker in workers:
            if self._workers.pop(worker.id, None) is not None:
                self._release(worker)
        taken = set(map(id, workers))
        theirs = [h for h in self._pending if id(getattr(h, "worker", None)) in taken]
        self._pending = [h for h in self._pending if id(getattr(h, "worker", None)) not in taken]
        _refuse(theirs)

    def assign(self, worker: WorkerProcess, local_rank: int) -> None:
        """Let a worker that was started as another (or for no rank yet) have this local rank."""
        worker.local_rank = local_rank
        worker.incarnation = self._incarnations.get(local_rank, 0)
        self._incarnations[local_rank] = worker.incarnation + 1

    def replay(self, happening: Happening) -> None:
        """Have the next `wait` tell of this, ahead of all that is still to happen."""
        self._pending.append(happening)

    def tidy(self, path: str) -> None:
        """Have the keeper remove this when the agent is killed, and so cannot do it itself.

        A pipe, or a folder as far as it is empty then.
        """
        self._tidied.append(path)
        self.order({"op": "tidy", "path": path})

    def prepare(self, count: int) -> None:
        """Have ``count`` warm processes forked and waiting; the next warm starts use them, and a
        store if they have torch.

        Does not wait. Those that a start has used are not replaced until the next call.
        Without a plan it does nothing.
        """
        self._need_keeper()
        if self._plan is not None:
            self._order({"op": "prepare", "count": count})

    def start_store(
        self, listener: socket.socket, *, host: str | None = None, eager: bool = False
    ) -> StoreProcess:
        """Serve a torch ``TCPStore`` on ``listener``, which is bound and listens.

        The server is a process of its own, started when the first connection is there, or
        at once if ``eager``. The listener stays the caller's. ``host``: the address at which the
        server reaches itself; default the one the listener is bound to. Raises
        SupervisorError, ValueError.
        """
        self._need_keeper()
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ValueError("the store's socket must be listening: call listen() first")
        self._ids += 1
        store = StoreProcess(self, self._ids, listener, host)
        self._stores[store.id] = store
        self._order(
            {
                "op": "store",
                "id": store.id,
                "host": store.host,
                "port": store.port,
                "eager": eager,
            },
            [listener.fileno()],
        )
        return store

    # -- waiting

    def wait(self, timeout: float) -> list[Happening]:
        """What happened; waits at most ``timeout`` seconds, less when anything happens.

        An empty list: the time is over, or a callback of `watch` has run.
        """
        self._need_open()
        end = time.monotonic() + timeout
        self._called_back = False
        self._pump(0 if self._pending else timeout)
        while not self._pending and not self._called_back:
            left = end - time.monotonic()
            if left <= 0:
                break
            self._pump(left)
        happened, self._pending = self._pending, []
        return happened

    def wake(self) -> None:
        """Have `wait` return; from any thread, or a signal handler."""
        self._woken = True
        self._wake.set()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` in `wait` whenever ``fd`` is readable or hung up."""
        self._need_open()

        def call() -> None:
            self._called_back = True
            callback()

        self._handle(fd, call)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`; before ``fd`` is closed."""
        self._unhandle(fd)

    def running(self) -> list[WorkerProcess]:
        """Those that have started and are not gone, in a start under way too.

        To be called between other calls here, or from a signal handler during one.
        """
        return [worker for worker in list(self._workers.values()) if worker.pidfd >= 0]

    def signal(self, workers: Iterable[WorkerProcess], signum: int) -> None:
        """Send ``signum`` to each worker alone; those that are gone are passed over."""
        for worker in workers:
            worker.signal(signum)

    def stop(
        self,
        workers: Sequence[WorkerProcess],
        signum: int = _SIGTERM,
        grace: float = 30.0,
        hurry: Callable[[], bool] = _never,
    ) -> StopReport:
        """Stop them and what they started; see `phalanx.process.stop`.

        Their `WorkerDied` and `WorkerGone` come with the next `wait`.
        """
        self._need_open()
        return stop_workers(self, workers, signum, grace, hurry)

    # -- for stop and store

    def pump(self, timeout: float) -> None:
        """Take in what happens for at most ``timeout`` seconds; `wait` tells of it later."""
        self._pump(timeout)

    def order(self, message: dict[str, Any]) -> bool:
        """Send an order to the keeper; False if it is lost."""
        if self._keeper is None:
            return False
        try:
            self._order(message)
        except SupervisorError:
            return False
        return True

    # -- inside

    def _need_open(self) -> None:
        if not self._opened:
            raise SupervisorError("the supervisor is not open")

    def _need_keeper(self) -> None:
        self._need_open()
        if self._keeper is None:
            raise SupervisorError("the keeper is lost; open() starts another")

    def _order(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        keeper = self._keeper
        if keeper is None:
            raise SupervisorError("the keeper is lost; open() starts another")
        try:
            wire.send(keeper.sock, message, fds)
        except wire.Hangup:
            self._on_keeper()  # what it told before counts
            raise SupervisorError("the keeper is lost; open() starts another") from None
        except BlockingIOError:
            syscalls.pidfd_send_signal(keeper.pidfd, signal.SIGKILL)
            self._lose_keeper(f"it read no orders for {SEND_SECONDS} s and was killed")
            raise SupervisorError("the keeper is lost; open() starts another") from None

    def _handle(self, fd: int, handler: Callable[[], None]) -> None:
        assert self._epoll is not None
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def _unhandle(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None and self._epoll is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass  # closed by its owner

    def _pump(self, timeout: float) -> None:
        assert self._epoll is not None
        if self.on_turn is not None:
            self.on_turn()
            timeout = min(timeout, TURN_SECONDS)
        if self._keeper is not None:
            timeout = min(timeout, self._keeper_due() - time.monotonic())
        self._spoken = False
        for fd, _ in self._epoll.poll(max(0.0, timeout)):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        if self._spoken:
            self._hear()
        while self._deaths:
            self._on_death(self._deaths.popleft())
        if self._keeper is not None and time.monotonic() >= self._keeper_due():
            self._ask_keeper(self._keeper)

    def _keeper_due(self) -> float:
        assert self._keeper is not None
        patience = ANSWER_SECONDS if self._keeper.asked else SILENCE_SECONDS
        return self._keeper.heard + patience

    def _ask_keeper(self, keeper: _Keeper) -> None:
        """It has long said nothing: a keeper that is stopped or stuck would wedge the job."""
        if keeper.asked >= ASKED_AT_MOST:
            syscalls.pidfd_send_signal(keeper.pidfd, signal.SIGKILL)
            self._lose_keeper("it did not answer and was killed")
            return
        keeper.asked += 1
        keeper.heard = time.monotonic()
        try:
            wire.send(keeper.sock, {"op": "ping"}, block=False)
        except (BlockingIOError, wire.Hangup):
            pass  # it does not read; or we are about to be told

    def _on_wake(self) -> None:
        self._wake.clear()
        if self._woken:
            self._woken = False
            self._pending.append(Woken())

    def _on_keeper(self) -> None:
        keeper = self._keeper
        assert keeper is not None
        while self._keeper is keeper:
            try:
                received = wire.receive(keeper.sock)
            except wire.Hangup:
                self._lose_keeper("it ended")
                return
            if received is None:
                return
            keeper.heard, keeper.asked = time.monotonic(), 0
            news, fds = received
            getattr(self, "_on_" + news["ev"])(news, fds)

    def _on_pong(self, news: dict[str, Any], fds: list[int]) -> None:
        pass  # that it says anything is what counts

    def _on_ready(self, news: dict[str, Any], fds: list[int]) -> None:
        from phalanx.process.preload import PreloadReport

        if news["report"] is None:
            report = PreloadReport(safe=False, why_not=news["why_not"])
        else:
            report = PreloadReport.from_json(news["report"])
        self._pending.append(KeeperReady(report))

    def _on_helper(self, news: dict[str, Any], fds: list[int]) -> None:
        self._sessions.append(news["pid"])

    def _on_started(self, news: dict[str, Any], fds: list[int]) -> None:
        worker = self._workers.get(news["id"])
        if worker is None:  # taken back
            launch.close_all(fds)
            self.order({"op": "cancel", "ids": [news["id"]]})
            return
        worker.pidfd = fds.pop()
        worker.started_ns = time.monotonic_ns()
        worker.ticks = news["ticks"]
        worker.warm = news["warm"]
        worker.pid = news["pid"]
        self._sessions.append(worker.pid)

    def _on_failed(self, news: dict[str, Any], fds: list[int]) -> None:
        worker = self._workers.get(news["id"])
        if worker is not None:
            worker.failure = _exec_error(news)

    def _on_gone(self, news: dict[str, Any], fds: list[int]) -> None:
        worker = self._workers.get(news["id"])
        if worker is not None:
            worker.max_rss = news["max_rss"]
            worker.swept = news["swept"]
            worker.left = tuple(news["left"])
            self._worker_gone(worker, os.waitstatus_to_exitcode(news["status"]))

    def _on_store_started(self, news: dict[str, Any], fds: list[int]) -> None:
        store = self._stores.get(news["id"])
        if store is not None:
            store.pid = news["pid"]
        self._sessions.append(news["pid"])

    def _on_store_gone(self, news: dict[str, Any], fds: list[int]) -> None:
        store = self._stores.pop(news["id"], None)
        if store is not None:
            status = news["status"]
            store.mark_gone(None if status is None else os.waitstatus_to_exitcode(status))
            if not store.closing:
                self._pending.append(StoreLost(store))

    def _on_channel(self) -> None:
        self._spoken = True  # all are read when the selector's news are taken in

    def _hear(self, *also: tuple[int, Happening]) -> None:
        """Tell of what the workers have said, and of ``also``, in the order of their times.

        What one worker does follows from what others did before; so nobody is told of an
        effect ahead of its cause. A pass over the channels has all that was sent before it
        began; what is younger waits for the next pass, as its cause may not have been read.
        """
        told = list(also)
        for _ in range(3):  # who never stops speaking may be told of out of order
            now = time.monotonic_ns()
            for worker in tuple(self._workers.values()):
                told += self._read(worker)
            told.sort(key=lambda one: one[0])
            self._pending += [happening for at, happening in told if at <= now]
            told = [one for one in told if one[0] > now]
            if not told:
                return
        self._pending += [happening for _, happening in told]

    def _read(self, worker: WorkerProcess) -> Iterator[tuple[int, Happening]]:
        last = 0  # one worker's words stay in their order
        for _ in range(_MESSAGES_AT_ONCE):
            fd = worker.channel.fileno()
            try:
                message = worker.channel.receive()
            except ChannelClosed:
                self._unhandle(fd)
                return
            except MalformedMessage as error:
                last = max(last, time.monotonic_ns())  # it has no time of its own
                yield last, WorkerGarbled(worker, error)
                continue
            if message is None:
                return
            if message.type == HELD:
                launch.close_all(message.fds)
                self._watch_death(worker)
            else:
                now = time.monotonic_ns()
                last = max(last, min(message.sent_ns or now, now))
                yield last, WorkerSpoke(worker, message)

    def _watch_death(self, worker: WorkerProcess) -> None:
        if worker.watcher is None:
            watcher = threading.Thread(
                target=self._await_death, args=(worker,), name="phalanx-death", daemon=True
            )
            try:
                watcher.start()
            except RuntimeError:  # no more threads for this user: the keeper will tell
                return
            worker.watcher = watcher
            self._watchers = [thread for thread in self._watchers if thread.is_alive()]
            self._watchers.append(watcher)

    def _await_death(self, worker: WorkerProcess) -> None:
        if not worker.page.await_death():
            return
        now = time.monotonic_ns()
        status = tree.death_status(worker.pid, worker.ticks)
        if status is not None:
            self._deaths.append(_Death(worker, now, status))
            self._wake.set()

    def _on_death(self, death: _Death) -> None:
        worker = death.worker
        if worker.dead_ns is None and worker.id in self._workers:
            # Its descendants go now, so that none of them outlives the start of a
            # replacement: the keeper takes its orders one after the other.
            self.order({"op": "dead", "id": worker.id})
            self._worker_died(worker, os.waitstatus_to_exitcode(death.status), death.at_ns)

    def _worker_died(self, worker: WorkerProcess, returncode: int | None, at_ns: int) -> None:
        if worker.dead_ns is None:
            worker.dead_ns = at_ns
            worker.returncode = returncode
            self._hear((at_ns, WorkerDied(worker)))

    def _worker_gone(self, worker: WorkerProcess, returncode: int | None) -> None:
        self._worker_died(worker, returncode, time.monotonic_ns())
        worker.returncode = returncode
        worker.gone = True
        self._workers.pop(worker.id, None)
        self._release(worker)
        self._pending.append(WorkerGone(worker))

    def _release(self, worker: WorkerProcess) -> None:
        if worker.watcher is not None and worker.watcher.is_alive() and worker.gone:
            worker.page.abandon(worker.pid)
        self._unhandle(worker.channel.fileno())
        worker.channel.close()
        worker.page.close()
        if worker.pidfd >= 0:
            self._unhandle(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1

    # -- a lost keeper

    def _lose_keeper(self, why: str) -> None:
        """The keeper has ended or hung up: take its end, and what it left, into our hands."""
        keeper = self._keeper
        assert keeper is not None
        self._keeper = None
        self._unhandle(keeper.sock.fileno())
        keeper.sock.close()
        if not _readable(keeper.pidfd, 1.0):
            syscalls.pidfd_send_signal(keeper.pidfd, signal.SIGKILL)
            _readable(keeper.pidfd, 5.0)
        returncode = _reap(keeper.pid)
        os.close(keeper.pidfd)
        if why != "closed":
            reason = f"keeper (pid {keeper.pid}) is lost: {why}, {_say(returncode)}"
            self._pending.append(KeeperLost(returncode, reason))
        for store in list(self._stores.values()):
            del self._stores[store.id]
            store.mark_gone(None)
            if not store.closing and why != "closed":
                self._pending.append(StoreLost(store))
        for worker in list(self._workers.values()):
            if worker.pid == 0:
                worker.failure = SupervisorError("the keeper was lost during the start")
                continue
            # The death signal has killed it, unless the program has dropped it.
            worker.signal(signal.SIGKILL)
            self._handle(worker.pidfd, partial(self._on_orphaned_worker, worker))
        self._adopt()

    def _on_orphaned_worker(self, worker: WorkerProcess) -> None:
        self._worker_gone(worker, _reap(worker.pid))
        self._adopt()

    def _adopt(self) -> None:
        """Kill and reap those of our children that a lost keeper's workers left to us."""
        known = {worker.pid for worker in self._workers.values()} | set(self._orphans.values())
        for pid in tree.children(os.getpid()):
            if pid in known:
                continue
            entry = tree.stat(pid)
            if entry is None or not self._is_ours(entry):
                continue
            try:
                pidfd = syscalls.pidfd_open(pid)
            except OSError:
                continue
            self._orphans[pidfd] = pid
            for below in (*tree.descendants(pid), entry):
                tree.kill(below)
                self._killed.add((below.pid, below.start))
            self._handle(pidfd, partial(self._on_orphan_end, pidfd))

    def _on_orphan_end(self, pidfd: int) -> None:
        self._unhandle(pidfd)
        os.close(pidfd)
        _reap(self._orphans.pop(pidfd))
        self._adopt()

    def _is_ours(self, root: tree.Stat) -> bool:
        if root.name == launch.unborn_name(self._token):
            return True
        for entry in (root, *tree.descendants(root.pid)):
            if entry.session in self._sessions or (entry.pid, entry.start) in self._killed:
                return True
            if tree.environment_value(entry.pid, launch.KEEPER) == self._token:
                return True
            mark = tree.environment_value(entry.pid, launch.WORKER)
            if mark is not None and mark.startswith(self._token + "."):
                return True
            if tree.holds_page(entry.pid, self._page_prefix):
                return True
        return False


# The directory of the caller must not be a place to import from (``-c`` puts it first).
_KEEPER_CODE = (
    "import sys\n"
    "if sys.path[:1]==['']:del sys.path[0]\n"
    "if sys.argv[3] not in sys.path:sys.path.append(sys.argv[3])\n"
    "from phalanx.process import keeper,launch\n"
    "launch.become(*keeper.main(sys.argv[1:]))"
)


def _catchable() -> Iterable[int]:
    return (s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP))


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _refuse(happenings: Iterable[Happening]) -> None:
    """Close the descriptors of messages that nobody will be told of."""
    for happening in happenings:
        if isinstance(happening, WorkerSpoke):
            launch.close_all(happening.message.fds)


def _reap(pid: int) -> int | None:
    """The return code of a child that has ended; None if it is not ours to ask."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def _say(returncode: int | None) -> str:
    if returncode is None:
        return "status unknown"
    if returncode < 0:
        return f"killed by signal {-returncode}"
    return f"exit status {returncode}"


def _exec_error(news: dict[str, Any]) -> BaseException:
    name, code, text = news["file"], news["errno"], news["text"]
    if text:
        return ValueError(f"cannot start {name!r}: {text}")
    if code == errno.ENOENT and os.path.isfile(name):
        return FileNotFoundError(code, "the interpreter that its first line names is missing", name)
    return OSError(code, os.strerror(code), name)
