"""A small agent for tests: real worker processes, real signals, the messages of docs/training.md.

Workers are forked from one preloaded process (`Nursery`), so that a test does not pay for
torch's import. `Agent` plays the part of ``phalanx run``.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.process.channel import Channel, ChannelClosed, MalformedMessage
from phalanx.process.page import ProgressPage
from phalanx.recovery import ladder, repair
from phalanx.recovery.repair import Holding

HERE = Path(__file__).parent


class Nursery:
    """The preloaded parent. One order, one child."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            os.set_inheritable(other.fileno(), True)
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "small_agent.py"), str(other.fileno())],
                pass_fds=[other.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
            )
        self._socket.settimeout(200)  # it imports torch
        try:
            assert self._socket.recv(100) == b"ready"
        except BaseException:
            self._process.kill()
            self.close()
            raise
        self._socket.settimeout(60)

    def fork(self, order: dict[str, Any], fds: list[int]) -> int:
        body = json.dumps(order).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._socket.sendmsg([body], rights)
        return int(self._socket.recv(100))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


def _serve(fd: int) -> None:
    """The nursery's own loop."""
    import torch

    torch.set_num_threads(1)
    import numpy
    import programs

    programs.warm()
    del numpy
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    control = socket.socket(fileno=fd)
    control.send(b"ready")
    while True:
        body, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(64))
        if not body:
            os._exit(0)  # nothing to tear down that is worth the time
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        pid = os.fork()
        if pid:
            for number in fds:
                os.close(number)
            control.send(str(pid).encode())
            continue
        status = 70
        try:
            control.close()
            status = _become(json.loads(body), list(fds))
        finally:
            os._exit(status)


def _become(order: dict[str, Any], fds: list[int]) -> int:
    import programs

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(order["env"])
    for name in order["unset"]:
        os.environ.pop(name, None)
    if fds:
        os.environ["PHALANX_CHANNEL_FD"] = str(fds[0])
        os.environ["PHALANX_PROGRESS_FD"] = str(fds[1])
    try:
        programs.run(order["spec"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    Path(order["status"]).write_text(str(code))
    return code


@dataclass
class Worker:
    rank: int
    incarnation: int
    pid: int
    channel: Channel
    page: ProgressPage
    pidfd: int
    status: Path
    born: float
    joining: bool = False
    hello: bool = False
    finished: bool = False
    died: float | None = None
    code: int | None = None
    said: list[Any] = field(default_factory=list)


class Agent:
    """Starts workers, replaces those that die, calls the others together."""

    def __init__(
        self,
        nursery: Nursery,
        world: int,
        spec: dict[str, Any],
        folder: Path,
        *,
        policy: ladder.Policy | None = None,
        env: dict[str, str] | None = None,
        standby: bool = False,
    ) -> None:
        self.standby = standby
        self.spare: Worker | None = None
        self.nursery = nursery
        self.world = world
        self.spec = spec
        self.folder = folder
        self.env = env or {}
        self.policy = policy or ladder.Policy()
        self.history = ladder.History()
        self.generation = 1
        self.workers: dict[int, Worker] = {}
        self.everyone: list[Worker] = []
        self.kept: dict[int, dict[str, int]] = {}
        self.decisions: list[ladder.Decision] = []
        self.faults: list[ladder.Fault] = []
        self.good: dict[int, dict[int, dict[str, Any]]] = {}
        self.good_at: dict[int, float] = {}  # generation to time of the last good step
        self.decided_at: dict[int, float] = {}
        self._stores: list[Any] = []
        self._pending: list[ladder.Fault] = []
        self._pending_since = 0.0
        self.on_message: Any = None
        self.dumped: Any = None

    # -- processes

    def _store(self) -> str:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        return f"127.0.0.1:{store.port}"

    def _start(self, rank: int, store: str, join: bool, spare: bool = False) -> None:
        incarnation = sum(worker.rank == rank for worker in self.everyone)
        mine, theirs = Channel.pair()
        page = ProgressPage.create(f"phalanx-test-{rank}")
        host, port = store.split(":")
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PHALANX_GENERATION": str(self.generation),
            "INCARNATION": str(incarnation),
            **self.env,
        }
        unset = ["PHALANX_JOIN", "PHALANX_KEPT"]
        if join:
            env["PHALANX_JOIN"] = "1"
            unset.remove("PHALANX_JOIN")
        kept = self.kept.get(rank, {})
        if kept and not spare:
            env["PHALANX_KEPT"] = ",".join(kept)
            unset.remove("PHALANX_KEPT")
            mine.send("kept", tuple(kept.values()), names=list(kept))
        status = self.folder / f"status-{rank}-{incarnation}"
        order = {
            "env": env,
            "unset": unset,
            "spec": {**self.spec, "folder": str(self.folder)},
            "log": str(self.folder / f"log-{rank}-{incarnation}"),
            "status": str(status),
        }
        born = time.monotonic()
        pid = self.nursery.fork(order, [theirs.fileno(), page.fd])
        theirs.close()
        worker = Worker(rank, incarnation, pid, mine, page, os.pidfd_open(pid), status, born)
        worker.joining = join
        if spare:
            self.spare = worker
        else:
            self.workers[rank] = worker
        self.everyone.append(worker)

    def start(self) -> None:
        store = self._store()
        for rank in range(self.world):
            self._start(rank, store, join=False)
        if self.standby:
            self._start(0, store, join=True, spare=True)

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.died is None]

    @property
    def over(self) -> bool:
        return bool(self.decisions) and self.decisions[-1].strategy is ladder.Strategy.EXIT

    # -- the loop

    def run(self, timeout: float = 60.0) -> None:
        """Until all workers have ended with 0, or the ladder says exit.

        :raises TimeoutError: it takes longer; the message has what the workers wrote.
        """
        end = time.monotonic() + timeout
        while True:
            if all(worker.code == 0 for worker in self.workers.values()):
                return
            if self.over and not self.living():
                return
            if time.monotonic() > end:
                raise TimeoutError(f"workers do not end\n{self.story()}")
            self._wait(min(0.5, max(0.0, end - time.monotonic())))
            self._decide()

    def run_until(self, what: Any, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(f"it does not come about\n{self.story()}")
            self._wait(0.02)
            self._decide()

    def _wait(self, timeout: float) -> None:
        poll = select.poll()
        where: dict[int, Worker] = {}
        spare = [] if self.spare is None or self.spare.died is not None else [self.spare]
        for worker in [*self.living(), *spare]:
            poll.register(worker.pidfd, select.POLLIN)
            poll.register(worker.channel, select.POLLIN)
            where[worker.pidfd] = where[worker.channel.fileno()] = worker
        if self._pending:
            timeout = min(timeout, 0.05)
        for fd, _ in poll.poll(timeout * 1000):
            worker = where[fd]
            if worker.died is None:
                self._listen(worker)
            if fd == worker.pidfd:
                self._buried(worker)

    def _listen(self, worker: Worker) -> None:
        while True:
            try:
                message = worker.channel.receive()
            except MalformedMessage:
                continue
            except ChannelClosed:
                return
            if message is None:
                return
            self._hear(worker, message)

    def _hear(self, worker: Worker, message: Any) -> None:
        fields = message.fields
        worker.said.append(message)
        if self.on_message is not None:
            self.on_message(worker, message)
        if message.type == "hello":
            worker.hello = True
        elif message.type == "finished":
            worker.finished = True
        elif message.type == "keep":
            held = self.kept.setdefault(worker.rank, {})
            if fields["name"] in held:
                os.close(held[fields["name"]])
            held[fields["name"]] = message.fds[0]
        elif message.type == "good_step":
            generation = fields["generation"]
            self.good.setdefault(generation, {})[worker.rank] = fields
            if len(self.good[generation]) == self.world:
                self.good_at[generation] = time.monotonic()
                self.history = ladder.good_step(self.history, fields["step"])
        elif message.type == "fault":
            kind = ladder.Kind(fields["kind"])
            if kind in (ladder.Kind.BUG, ladder.Kind.MEMORY):
                worker.said.append(message)
                self._fault(ladder.Fault(worker.rank, kind, fields["step"], fields["text"]))
            elif fields["generation"] == self.generation or fields["generation"] == -1:
                self._fault(ladder.Fault(worker.rank, kind, fields["step"], fields["text"]))

    def _fault(self, fault: ladder.Fault) -> None:
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(fault)
        self.faults.append(fault)

    def _buried(self, worker: Worker) -> None:
        worker.died = time.monotonic()
        os.close(worker.pidfd)
        worker.channel.close()
        with contextlib.suppress(OSError, ValueError):
            worker.code = int(worker.status.read_text())
        if worker.code == 0:
            return
        known = any(f.rank == worker.rank for f in self._pending if f.kind is ladder.Kind.BUG)
        if not known:
            step = worker.page.read().step
            self._fault(ladder.Fault(worker.rank, ladder.Kind.DEATH, step))

    def _decide(self) -> None:
        if not self._pending or self.over:
            return
        waited = time.monotonic() - self._pending_since
        kinds = {fault.kind for fault in self._pending}
        if kinds <= {ladder.Kind.PEER, ladder.Kind.REGROUP}:
            # an echo: whose fault it is will tell, or be found dead, however slow the machine
            silent = {w.rank for w in self.living()} - {fault.rank for fault in self._pending}
            if waited < (5.0 if silent else 1.0):
                return
        if ladder.Kind.BUG in kinds or ladder.Kind.MEMORY in kinds:
            doomed = {
                f.rank for f in self._pending if f.kind in (ladder.Kind.BUG, ladder.Kind.MEMORY)
            }
            if any(self.workers[rank].died is None for rank in doomed) and waited < 10.0:
                return
        faults, self._pending = tuple(self._pending), []
        living = self.living()
        situation = ladder.Situation(
            faults,
            living=len(living),
            able=all((w.hello or w.joining) and not w.finished for w in living),
            dump_possible=True,
        )
        decision = ladder.choose(self.policy, self.history, situation)
        self.history = ladder.after(self.history, decision, faults)
        self.decisions.append(decision)
        if decision.dump_first:
            self._dump()
        getattr(self, "_do_" + decision.strategy.name.lower())()

    def _next(self) -> str:
        self.generation += 1
        self.decided_at[self.generation] = time.monotonic()
        return self._store()

    def _send(self, worker: Worker, kind: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        with contextlib.suppress(ChannelClosed):
            worker.channel.send(kind, fds, **fields)

    def _do_retry(self) -> None:
        for worker in self.living():
            self._send(worker, "leave", generation=self.generation)
        self._call_together(self._next())

    def _do_in_place(self) -> None:
        old = self.generation
        for worker in self.living():
            self._send(worker, "leave", generation=old)
        store = self._next()
        for rank, worker in list(self.workers.items()):
            if worker.died is not None and self.spare is not None and self.spare.hello:
                spare, self.spare = self.spare, None
                spare.rank = rank
                self.workers[rank] = spare
                kept = self.kept.get(rank, {})
                spare.channel.send("kept", tuple(kept.values()), names=list(kept))
            elif worker.died is not None:
                self._start(rank, store, join=True)
        self._call_together(store)

    def _call_together(self, store: str) -> None:
        for worker in self.living():
            previous = None if worker.hello is False else worker.rank
            self._send(
                worker,
                "join",
                generation=self.generation,
                rank=worker.rank,
                world=self.world,
                store=store,
                previous_rank=previous,
            )

    def _do_restart(self) -> None:
        self._end_all()
        store = self._next()
        for rank in range(self.world):
            self._start(rank, store, join=False)

    def _dump(self) -> None:
        """A last checkpoint by those that hold the state."""
        living = self.living()
        for worker in living:
            self._send(worker, "leave", generation=self.generation)
        left = self._answers(living, "left", self.generation)
        plan = repair.dump(
            [Holding(w.rank, f["shard"], f["step"], f["clean"]) for w, f in left],
            max((f["shards"] for _, f in left), default=0),
        )
        self.dumped = plan
        if plan is None:
            return
        order = {"generation": self.generation, "step": plan.step, "writers": list(plan.writers)}
        slates = {r: k["slate"] for r, k in self.kept.items() if "slate" in k}
        for worker in living:
            given = slates if worker.rank == plan.writers[0] else {}
            fds = tuple(given.values())
            self._send(worker, "dump", fds, records=list(given), **order)
        writers = [worker for worker in living if worker.rank in plan.writers]
        answers = self._answers(living, "dumped", self.generation)
        wrote = {worker.rank for worker, fields in answers if fields["complete"]}
        if wrote >= set(plan.writers):
            self._send(writers[0], "dump", commit=True, **order)
            self._answers(writers[:1], "dumped", self.generation, commit=True)

    def _answers(self, workers: list[Worker], kind: str, generation: int, **more: Any) -> list[Any]:
        def given(worker: Worker) -> Any:
            for message in worker.said:
                fields = message.fields
                wanted = {"generation": generation, **more}
                if message.type == kind and wanted.items() <= fields.items():
                    return fields
            return None

        end = time.monotonic() + 10
        while time.monotonic() < end:
            if all(given(w) is not None or w.died is not None for w in workers):
                break
            self._wait(0.05)
        return [(w, given(w)) for w in workers if given(w) is not None]

    def _do_exit(self) -> None:
        for worker in self.living():
            self._send(worker, "exit", code=3)

    def _end_all(self) -> None:
        spare = [] if self.spare is None or self.spare.died is not None else [self.spare]
        everyone = [*self.living(), *spare]
        for worker in everyone:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in everyone:
            poll = select.poll()
            poll.register(worker.pidfd, select.POLLIN)
            assert poll.poll(10000), "a worker does not die"
            self._listen(worker)
            worker.died = time.monotonic()
            os.close(worker.pidfd)
            worker.channel.close()
        self._pending.clear()

    def close(self) -> None:
        self._end_all()
        for held in self.kept.values():
            for fd in held.values():
                os.close(fd)
        for worker in self.everyone:
            worker.page.close()
        self._stores.clear()

    # -- what happened

    def recovery_seconds(self, generation: int, fault_at: float) -> float:
        return self.good_at[generation] - fault_at

    def reports(self, generation: int) -> dict[int, dict[str, Any]]:
        return {rank: fields["report"] for rank, fields in self.good[generation].items()}

    def story(self) -> str:
        lines = [f"generation {self.generation}"]
        for decision in self.decisions:
            lines.append(f"{decision.strategy.value}: {decision.why} {decision.passed_over}")
        for worker in self.everyone:
            lines.append(
                f"rank {worker.rank}.{worker.incarnation} pid {worker.pid} code {worker.code} "
                f"died {worker.died} {worker.page.read() if worker.page.fd >= 0 else ''}"
            )
            lines += [f"   {m.type} {m.fields}" for m in worker.said[-6:]]
            log = self.folder / f"log-{worker.rank}-{worker.incarnation}"
            if log.exists():
                lines.append(log.read_text()[-2500:])
        return "\n".join(lines)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
