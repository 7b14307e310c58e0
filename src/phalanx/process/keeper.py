"""The keeper: parent of all workers of a node.

It is single threaded, imports next to nothing, and does four things: start what the
agent orders, tell what ended, kill what a dead worker left behind, and kill everything
when the agent is gone. It never blocks on anybody: the agent's socket is non-blocking and
news wait in a queue.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections import deque

from phalanx.process import launch, nursery, syscalls, tree, wire

TYPE_CHECKING = False  # saves the import of ``typing``
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

SWEEP_SECONDS = 2.0  # how long the news of a worker's end waits for its leftovers to be gone
END_SECONDS = 10.0  # how long the keeper itself waits for its tree to be empty
_NURSERY_LIVES = 3
NURSERY_SECONDS = 10  # how long the nursery may leave an order unread
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGPIPE,
)

# Like the keeper's own command line: nothing is imported from the current directory.
_STORE_CODE = (
    "import sys\n"
    "if sys.path[:1]==['']:del sys.path[0]\n"
    "if sys.argv[1] not in sys.path:sys.path.append(sys.argv[1])\n"
    "from phalanx.torch_bridge.store_server import serve\n"
    "serve(int(sys.argv[2]),sys.argv[3],int(sys.argv[4]))"
)


class Kid:
    """A child of the keeper that it knows."""

    def __init__(self, role: str, pid: int, order: dict[str, Any] | None = None) -> None:
        self.role = role  # worker, standby, nursery, store, failed
        self.pid = pid
        self.order = order or {}
        self.why: dict[str, Any] = {}  # failed: what went wrong
        self.errors = -1  # worker being exec'ed: where it reports a failure
        self.line: socket.socket | None = None  # standby: where its order goes
        self.ready = False  # standby: it does nothing any more but wait for that
        self.pidfd = -1  # standby: for the agent, later
        self.status = 0
        self.max_rss = 0
        self.swept: set[tuple[int, int]] = set()  # pid and start of what it left
        self.deadline = 0.0

    @property
    def id(self) -> int:
        return int(self.order["id"])


class Keeper:
    """See the module."""

    def __init__(self, sock: socket.socket, agent: int, root: str) -> None:
        self.root = root
        self.pid = os.getpid()
        self.agent = sock
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.outbox: deque[tuple[dict[str, Any], list[int]]] = deque()
        self.kids: dict[int, Kid] = {}  # by pid; alive, or dead and not reaped
        self.sweeping: dict[int, Kid] = {}  # by id; reaped, its leftovers not yet gone
        self.doomed: set[int] = set()  # ids that are dying: what they have goes as well
        self.standbys: deque[Kid] = deque()
        self.standbys_wanted = 0
        self.stores: dict[int, tuple[dict[str, Any], int]] = {}  # lazy, by id; listener
        self.keys = 0
        self.forking: dict[int, tuple[dict[str, Any], list[int]]] = {}  # asked of the nursery
        self.waiting: list[tuple[dict[str, Any], list[int]]] = []  # for the nursery's imports
        self.plan: str | None = None
        self.nursery: socket.socket | None = None
        self.nursery_pid = 0
        self.nursery_lives = _NURSERY_LIVES
        self.preloaded = False
        self.has_torch = False
        self.given_up: set[tuple[int, int]] = set()  # leftovers that do not die
        self.over = False
        self.tidied: list[str] = []  # what the agent would remove itself if it could
        self.end_seconds = END_SECONDS

        self.watch(sock.fileno(), self.hear_agent)
        # The socket alone is not enough: a fork of the agent may hold a copy of its end.
        try:
            self.agent_pidfd = syscalls.pidfd_open(agent)
            self.watch(self.agent_pidfd, self.agent_died)
        except ProcessLookupError:
            self.over = True
        if os.getppid() != agent:
            self.over = True
        self.wake, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.watch(self.wake, self.child_changed)

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def run(self) -> None:
        while not self.over:
            timeout = None
            if self.sweeping:
                first = min(kid.deadline for kid in self.sweeping.values())
                timeout = max(0.0, first - time.monotonic()) * 1000 + 1
            for fd, _ in self.poll.poll(timeout):
                handler = self.handlers.get(fd)
                if handler is not None and not self.over:
                    handler()
            if self.sweeping:
                self.sweep()
        self.end()
        for path in self.tidied:
            tidy(path)

    # -- the agent

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue news for the agent; ``fds`` are closed when they are sent."""
        self.outbox.append((message, list(fds)))
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            message, fds = self.outbox[0]
            try:
                wire.send(self.agent, message, fds, block=False)
            except BlockingIOError:
                break
            except wire.Hangup:
                self.over = True
                return
            self.outbox.popleft()
            launch.close_all(fds)
        events = select.POLLIN | (select.POLLOUT if self.outbox else 0)
        self.poll.modify(self.agent.fileno(), events)

    def agent_died(self) -> None:
        self.over = True

    def hear_agent(self) -> None:
        self.flush()
        while not self.over:
            try:
                received = wire.receive(self.agent)
            except wire.Hangup:
                self.over = True
                return
            if received is None:
                return
            order, fds = received
            getattr(self, "do_" + order["op"])(order, fds)

    def do_plan(self, order: dict[str, Any], fds: list[int]) -> None:
        self.plan = order["plan"]
        self.open_nursery()

    def do_start(self, order: dict[str, Any], fds: list[int]) -> None:
        if order["warm"]:
            if order["cwd"] is not None and not os.path.isdir(order["cwd"]):
                code = errno.ENOTDIR if os.path.exists(order["cwd"]) else errno.ENOENT
                self.start_failed(order, {"errno": code, "file": order["cwd"], "text": ""})
                launch.close_all(fds)
                return
            ready = self.ready_standby()
            if ready is not None:
                self.use_standby(ready, "worker", order, fds)
                pidfd, ready.pidfd = ready.pidfd, -1
                self.started(ready, pidfd, warm=True)
                return
            if self.nursery is not None:
                self.ask_nursery(order, fds)
                return
        self.exec_start(order, fds)

    def do_prepare(self, order: dict[str, Any], fds: list[int]) -> None:
        self.standbys_wanted = order["count"]
        self.add_standby()

    def add_standby(self) -> None:
        """Have the next standby forked, when the last one is ready: what they do before that
        they do one after the other.
        """
        coming = [o for o, _ in (*self.forking.values(), *self.waiting) if o["op"] == "standby"]
        waits = coming or not all(kid.ready for kid in self.standbys)
        if self.nursery is None or waits or len(self.standbys) >= self.standbys_wanted:
            return
        ours, theirs = wire.pair()
        self.ask_nursery({"op": "standby"}, [theirs.detach(), ours.detach()])

    def hear_standby(self, kid: Kid) -> None:
        assert kid.line is not None
        try:
            news = wire.receive(kid.line)
        except wire.Hangup:
            self.unwatch(kid.line.fileno())  # we are about to be told of its end
            return
        if news is not None:
            kid.ready = True
            self.add_standby()

    def do_signal(self, order: dict[str, Any], fds: list[int]) -> None:
        """Signal the process group of each."""
        for kid in self.named(order["ids"]):
            try:
                os.killpg(kid.pid, order["signum"])
            except OSError:
                pass

    def do_kill(self, order: dict[str, Any], fds: list[int]) -> None:
        """SIGKILL each with all that it has started."""
        for kid in self.named(order["ids"]):
            below = tree.descendants(kid.pid)
            try:
                os.kill(kid.pid, signal.SIGKILL)
                self.doom(kid, below)
                os.killpg(kid.pid, signal.SIGKILL)  # who was forked meanwhile
            except OSError:
                pass

    def do_dead(self, order: dict[str, Any], fds: list[int]) -> None:
        """The agent knows that this worker is dying: take what it leaves, ahead of its end."""
        for kid in self.named([order["id"]]):
            self.doom(kid, tree.descendants(kid.pid))

    def doom(self, kid: Kid, below: list[tree.Stat]) -> None:
        """Kill what is below it and the orphans it has made; what slips through is swept later."""
        self.doomed.add(kid.id)
        for entry in (*below, *self.leftovers()):
            if tree.kill(entry):
                kid.swept.add((entry.pid, entry.start))

    def do_cancel(self, order: dict[str, Any], fds: list[int]) -> None:
        """Forget starts that nobody waits for any more."""
        for start_id in order["ids"]:
            for item in list(self.waiting):
                if item[0].get("id") == start_id:
                    self.waiting.remove(item)
                    launch.close_all(item[1])
            for order_, _ in self.forking.values():
                if order_.get("id") == start_id:
                    order_["cancelled"] = True
        self.do_kill(order, fds)

    def do_store(self, order: dict[str, Any], fds: list[int]) -> None:
        self.stores[order["id"]] = (order, fds[0])
        if order["eager"]:
            self.start_store(order["id"])
        else:
            self.watch(fds[0], lambda: self.start_store(order["id"]))

    def do_store_close(self, order: dict[str, Any], fds: list[int]) -> None:
        lazy = self.stores.pop(order["id"], None)
        if lazy is not None:
            self.unwatch(lazy[1])
            os.close(lazy[1])
            self.tell({"ev": "store_gone", "id": order["id"], "status": None})
            return
        for item in list(self.waiting):
            if item[0]["op"] == "store" and item[0]["id"] == order["id"]:
                self.waiting.remove(item)
                launch.close_all(item[1])
                self.tell({"ev": "store_gone", "id": order["id"], "status": None})
                return
        for order_, _ in self.forking.values():
            if order_["op"] == "store" and order_["id"] == order["id"]:
                order_["cancelled"] = True
        for kid in list(self.kids.values()):
            if kid.role == "store" and kid.id == order["id"]:
                os.kill(kid.pid, signal.SIGKILL)

    def do_call_off(self, order: dict[str, Any], fds: list[int]) -> None:
        """Start no more of these; those that are being forked come to be workers."""
        for item in list(self.waiting):
            if item[0].get("id") in order["ids"]:
                self.waiting.remove(item)
                launch.close_all(item[1])
                why = {"errno": errno.ECANCELED, "file": item[0]["argv"][0], "text": ""}
                self.start_failed(item[0], why)

    def do_tidy(self, order: dict[str, Any], fds: list[int]) -> None:
        self.tidied.append(order["path"])

    def do_ping(self, order: dict[str, Any], fds: list[int]) -> None:
        self.tell({"ev": "pong"})

    def do_close(self, order: dict[str, Any], fds: list[int]) -> None:
        self.over = True
        self.tidied.clear()  # it is there to do so
        self.end_seconds = order["seconds"]

    def named(self, ids: Sequence[int]) -> list[Kid]:
        return [kid for kid in self.kids.values() if kid.role == "worker" and kid.id in ids]

    # -- starting by exec

    def exec_start(self, order: dict[str, Any], fds: list[int]) -> None:
        named = dict(zip(order["fds"], fds, strict=True))
        try:
            errors, theirs = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
        except OSError as error:
            launch.close_all(fds)
            self.start_failed(order, {"errno": error.errno, "file": order["argv"][0], "text": ""})
            return
        if pid == 0:
            launch.exec_program(order, named, theirs, self.pid)
        os.close(theirs)
        launch.close_all(fds)
        kid = Kid("worker", pid, order)
        kid.errors = errors
        kid.pidfd = syscalls.pidfd_open(pid)
        self.kids[pid] = kid
        self.watch(errors, lambda: self.exec_settled(kid))

    def exec_settled(self, kid: Kid) -> None:
        """The child has exec'ed, has said why it cannot, or is dead."""
        if kid.errors < 0:
            return
        text = os.read(kid.errors, 1 << 16)
        self.unwatch(kid.errors)
        os.close(kid.errors)
        kid.errors = -1
        pidfd, kid.pidfd = kid.pidfd, -1
        if text:
            kid.role = "failed"
            kid.why = json.loads(text)  # told when it has ended
            os.close(pidfd)
        else:
            self.started(kid, pidfd, warm=False)

    def started(self, kid: Kid, pidfd: int, warm: bool) -> None:
        kid.order = {name: kid.order[name] for name in ("id", "mark", "page")}
        entry = tree.stat(kid.pid)
        ticks = entry.start if entry is not None else -1
        self.tell(
            {"ev": "started", "id": kid.id, "pid": kid.pid, "warm": warm, "ticks": ticks}, [pidfd]
        )

    def start_failed(self, order: dict[str, Any], why: dict[str, Any]) -> None:
        self.tell({**why, "ev": "failed", "id": order["id"]})

    # -- starting warm

    def open_nursery(self) -> None:
        ours, theirs = wire.pair()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            why = f"no process for the imports could be forked: {error.strerror}"
            self.tell({"ev": "ready", "report": None, "why_not": why})
            return
        if pid == 0:
            try:
                self.forget()
                ours.detach()
                assert self.plan is not None
                nursery.main(theirs, self.plan, self.pid)
            except launch.Become:
                raise
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
        theirs.close()
        wire.limit_sending(ours, NURSERY_SECONDS)
        self.kids[pid] = Kid("nursery", pid)
        self.tell({"ev": "helper", "pid": pid})
        self.nursery = ours
        self.nursery_pid = pid
        self.preloaded = False
        self.watch(ours.fileno(), self.hear_nursery)

    def forget(self) -> None:
        """In a fork: let no object of the keeper close a descriptor later.

        The numbers will be somebody else's by then.
        """
        for sock in (self.agent, self.nursery, *(kid.line for kid in self.standbys)):
            if sock is not None:
                sock.detach()

    def ask_nursery(self, order: dict[str, Any], fds: list[int]) -> None:
        """Have it fork. What is asked is kept until it is done, in case the nursery dies."""
        if not self.preloaded:
            self.waiting.append((order, fds))
            return
        assert self.nursery is not None
        self.keys += 1
        order["key"] = self.keys
        self.forking[self.keys] = (order, fds)
        try:
            wire.send(self.nursery, order, fds[:1] if order["op"] == "standby" else fds)
        except wire.Hangup:
            self.nursery_died()
        except BlockingIOError:  # it reads whenever it does not fork: it hangs
            os.kill(self.nursery_pid, signal.SIGKILL)
            self.nursery_died()

    def hear_nursery(self) -> None:
        while self.nursery is not None:
            try:
                received = wire.receive(self.nursery)
            except wire.Hangup:
                self.nursery_died()
                return
            if received is None:
                return
            news, fds = received
            if news["ev"] == "preloaded":
                self.nursery_ready(news)
            else:
                self.forked(news, fds)

    def nursery_ready(self, news: dict[str, Any]) -> None:
        self.tell({"ev": "ready", "report": news["report"]})
        if not news["safe"]:
            self.nursery_lives = 0  # it leaves; its hang-up sends the waiting to exec
            return
        self.preloaded = True
        self.has_torch = news["torch"]
        waiting, self.waiting = self.waiting, []
        for order, fds in waiting:
            self.ask_again(order, fds)

    def ask_again(self, order: dict[str, Any], fds: list[int]) -> None:
        """Place an order that waited, or whose nursery died."""
        if order["op"] == "start" and self.nursery is None:
            self.exec_start(order, fds)
        elif order["op"] == "store" and (self.nursery is None or not self.has_torch):
            self.exec_store(order, fds[0])
        elif self.nursery is None:
            launch.close_all(fds)
        else:
            self.ask_nursery(order, fds)

    def nursery_died(self) -> None:
        assert self.nursery is not None
        self.unwatch(self.nursery.fileno())
        self.nursery.close()
        self.nursery = None
        self.nursery_lives -= 1
        was_ready, self.preloaded = self.preloaded, False
        lost = [*self.forking.values(), *self.waiting]
        self.forking, self.waiting = {}, []
        # One that died during the imports would die of them again.
        if was_ready and self.nursery_lives > 0:
            self.open_nursery()
        elif not was_ready and self.nursery_lives > 0:
            why = "the process that imports ahead died during the imports"
            self.tell({"ev": "ready", "report": None, "why_not": why})
        for order, fds in lost:
            self.ask_again(order, fds)

    def forked(self, news: dict[str, Any], fds: list[int]) -> None:
        order, kept = self.forking.pop(news["key"], ({"op": "nothing"}, []))
        if news["ev"] == "fork_failed":
            if order["op"] == "start":
                why = {"errno": news["errno"], "file": order["argv"][0], "text": ""}
                self.start_failed(order, why)
            elif order["op"] == "store":
                self.tell({"ev": "store_gone", "id": order["id"], "status": None})
            launch.close_all(kept)
            return
        pid = news["pid"]
        if order["op"] == "standby":
            kid = Kid("standby", pid)
            kid.line = socket.socket(fileno=kept.pop(1))
            kid.pidfd = fds.pop()
            self.standbys.append(kid)
            self.watch(kid.line.fileno(), lambda: self.hear_standby(kid))
            self.tell({"ev": "helper", "pid": pid})
        elif order["op"] == "start":
            kid = Kid("worker", pid, order)
            if not order.get("cancelled"):
                self.started(kid, fds.pop(), warm=True)
        elif order["op"] == "store":
            kid = Kid("store", pid, order)
            self.tell({"ev": "store_started", "id": kid.id, "pid": pid})
        else:
            kid = Kid("failed", pid)
        launch.close_all((*kept, *fds))
        self.kids[pid] = kid
        if order["op"] == "nothing" or order.get("cancelled"):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def ready_standby(self) -> Kid | None:
        return next((kid for kid in self.standbys if kid.ready), None)

    def use_standby(self, kid: Kid, role: str, order: dict[str, Any], fds: list[int]) -> None:
        """Have it carry out this order; ``fds`` are closed here."""
        self.standbys.remove(kid)
        self.standbys_wanted -= 1
        assert kid.line is not None
        self.unwatch(kid.line.fileno())
        kid.role = role
        kid.order = order
        try:
            wire.send(kid.line, order, fds)
        except (wire.Hangup, OSError):
            pass  # it is dead: its end is told like that of any worker
        kid.line.close()
        kid.line = None
        launch.close_all(fds)

    # -- the store

    def start_store(self, store_id: int) -> None:
        order, listener = self.stores.pop(store_id)
        self.unwatch(listener)
        ready = self.ready_standby() if self.has_torch else None
        if ready is not None:
            self.use_standby(ready, "store", order, [listener])
            os.close(ready.pidfd)
            ready.pidfd = -1
            self.tell({"ev": "store_started", "id": ready.id, "pid": ready.pid})
        elif self.nursery is not None and (self.has_torch or not self.preloaded):
            self.ask_nursery(order, [listener])
        else:
            self.exec_store(order, listener)

    def exec_store(self, order: dict[str, Any], listener: int) -> None:
        try:
            pid = os.fork()
        except OSError:
            os.close(listener)
            self.tell({"ev": "store_gone", "id": order["id"], "status": None})
            return
        if pid == 0:
            try:
                os.setsid()
                launch.die_with(self.pid)
                launch.reset_signals()
                os.set_inheritable(listener, True)
                words = (self.root, str(listener), order["host"], str(order["port"]))
                os.execv(sys.executable, (sys.executable, "-c", _STORE_CODE, *words))
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(127)
        os.close(listener)
        self.kids[pid] = Kid("store", pid, order)
        self.tell({"ev": "store_started", "id": order["id"], "pid": pid})

    # -- ends

    def child_changed(self) -> None:
        try:
            while os.read(self.wake, 4096):
                pass
        except BlockingIOError:
            pass
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            kid = self.kids.get(pid)
            if kid is None and self.nursery is not None:
                self.hear_nursery()  # a worker is ours only after the nursery has named it
                kid = self.kids.get(pid)
            # No kid: an orphan that we had adopted.
            if kid is not None:
                self.ended(kid, status, usage.ru_maxrss * 1024)

    def ended(self, kid: Kid, status: int, max_rss: int) -> None:
        if kid.errors >= 0:
            self.exec_settled(kid)
        del self.kids[kid.pid]
        if kid.role == "worker":
            kid.status = status
            kid.max_rss = max_rss
            kid.deadline = time.monotonic() + SWEEP_SECONDS
            self.sweeping[kid.id] = kid
            self.doomed.add(kid.id)
        elif kid.role == "failed":
            if kid.why:
                self.start_failed(kid.order, kid.why)
        elif kid.role == "store":
            self.tell({"ev": "store_gone", "id": kid.id, "status": status})
        elif kid.role == "nursery":
            self.hear_nursery()
            if self.nursery is not None and kid.pid == self.nursery_pid:
                self.nursery_died()  # a stray fork of it may keep the socket open
        elif kid.role == "standby":
            self.standbys.remove(kid)
            self.standbys_wanted -= 1
            assert kid.line is not None
            self.unwatch(kid.line.fileno())
            kid.line.close()
            os.close(kid.pidfd)
            self.add_standby()

    def sweep(self) -> None:
        """Kill what dead workers left behind; tell of each whose leftovers are gone."""
        leftovers = self.leftovers()
        alive = {(entry.pid, entry.start) for entry in leftovers}
        for entry in leftovers:
            tree.kill(entry)
        now = time.monotonic()
        # Which of several that are swept together had it is not worth knowing.
        for kid in list(self.sweeping.values()):
            kid.swept |= alive
            if alive and now < kid.deadline:
                continue
            del self.sweeping[kid.id]
            self.given_up |= alive
            self.doomed.discard(kid.id)
            self.tell(
                {
                    "ev": "gone",
                    "id": kid.id,
                    "status": kid.status,
                    "max_rss": kid.max_rss,
                    "swept": len(kid.swept),
                    "left": sorted(pid for pid, _ in alive),
                }
            )

    def leftovers(self) -> list[tree.Stat]:
        """Orphans that we adopted and that no living worker can have left behind."""
        candidates = [pid for pid in tree.children(self.pid) if pid not in self.kids]
        if candidates and self.nursery is not None:
            self.hear_nursery()  # it names workers before they can be our children
            candidates = [pid for pid in candidates if pid not in self.kids]
        if not candidates:
            return []
        living: dict[int, Kid] = {}
        for kid in (*self.kids.values(), *self.sweeping.values()):
            if kid.role == "worker":
                living[kid.id] = kid
        for gone in self.doomed:
            living.pop(gone, None)
        found: list[tree.Stat] = []
        for pid in candidates:
            root = tree.stat(pid)
            if root is None:
                continue
            family = [root, *tree.descendants(pid)]
            if not self.belongs(family, living):
                found += [entry for entry in family if not entry.zombie]
        if self.given_up:
            found = [entry for entry in found if (entry.pid, entry.start) not in self.given_up]
        return found

    def belongs(self, family: list[tree.Stat], living: dict[int, Kid]) -> bool:
        """Whether a living worker has left this family; one without any mark may be anybody's."""
        if not living:
            return False
        sessions = {kid.pid for kid in living.values()}
        marks = {kid.order["mark"] for kid in living.values()}
        pages = {kid.order["page"] for kid in living.values()}
        known = (*self.sweeping.values(), *self.kids.values())
        gone = [kid for kid in known if kid.role == "worker" and kid.id in self.doomed]
        # One that is dying already has lost its marks.
        killed = set().union(*(kid.swept for kid in gone))
        if any((entry.pid, entry.start) in killed for entry in family):
            return False
        if any(entry.session in sessions for entry in family):
            return True
        if any(entry.session == kid.pid for entry in family for kid in gone):
            return False
        gone_marks = {kid.order["mark"] for kid in gone}
        gone_pages = {kid.order["page"] for kid in gone}
        for entry in family:
            mark = tree.environment_value(entry.pid, launch.WORKER)
            if mark in marks:
                return True
            if mark in gone_marks:
                return False
            held = tree.holds_page(entry.pid, "phalanx-")
            if pages.intersection(held):
                return True
            if gone_pages.intersection(held):
                return False
        return True

    def end(self) -> None:
        """Kill the tree until it is empty, then leave."""
        deadline = time.monotonic() + self.end_seconds
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        pause = 1
        while True:
            below = tree.descendants(self.pid)
            for entry in below:
                tree.kill(entry)
            try:
                while os.wait4(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if time.monotonic() > deadline:
                left = [entry.pid for entry in tree.descendants(self.pid) if not entry.zombie]
                print(f"phalanx keeper: these did not die of SIGKILL: {left}", file=sys.stderr)
                os._exit(3)
            # Deaths wake us; the pause is for what slips in between a look and a kill.
            poll.poll(pause)
            pause = min(pause * 2, 50)
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                pass


def tidy(path: str) -> None:
    """Remove a pipe, or a folder as far as nobody has written anything there."""
    try:
        if stat.S_ISFIFO(os.lstat(path).st_mode):
            os.unlink(path)
    except OSError:
        return
    for folder, _, _ in os.walk(path, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass


def main(argv: list[str]) -> tuple[dict[str, Any], dict[str, str], Callable[[int], None]]:
    """Be the keeper.

    ``argv``: the descriptor of the agent's socket, the agent's pid, where this package is.

    Returns only in a forked worker, with the arguments of `launch.become`.
    """
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    syscalls.set_death_signal(signal.SIGCONT)  # stopped or not, we are to end with the agent
    fd = int(argv[0])
    launch.close_others([fd])
    os.set_inheritable(fd, False)
    if os.getsid(0) != os.getpid():
        os.setsid()
    syscalls.set_subreaper(True)
    sock = socket.socket(fileno=fd)
    try:
        Keeper(sock, int(argv[1]), argv[2]).run()
    except launch.Become as found:
        return found.order, found.env, found.finish
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(4)  # the workers die with us
    os._exit(0)
