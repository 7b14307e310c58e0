"""``SubprocessContext``: workers that are programs, started by the supervisor."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from phalanx.elastic.multiprocessing.api import PContext, RunProcsResult, logger
from phalanx.elastic.multiprocessing.errors import first_failure
from phalanx.elastic.multiprocessing.logs_specs import LogsSpecs
from phalanx.process.oom import Mark, OomWatch
from phalanx.process.program import Program
from phalanx.process.supervisor import (
    KeeperLost,
    StartOrder,
    Supervisor,
    SupervisorError,
    Woken,
    WorkerDied,
    WorkerGone,
    WorkerProcess,
)

if TYPE_CHECKING:
    import socket

    from phalanx.process.logs import OutputRelay
    from phalanx.process.store_process import StoreProcess
    from phalanx.process.supervisor import Happening

__all__ = ["SubprocessContext"]


class SubprocessContext(PContext):
    """Runs ``entrypoint`` with ``str()`` of each argument, in the agent's environment.

    PyTorch's constructor; ours, by keyword, beside those of `PContext`:

    * ``supervisor``: an open one to use, which stays the caller's (default: one for
      this context); what else happens in it goes to ``on_happening``;
    * ``program_for``: a function from local rank to `Program`, used instead of
      ``entrypoint`` and ``args``; with ``warm`` it is started warm where possible;
    * ``relay``: takes stderr where it is not redirected, to show and to remember its end;
      with ``relay_prefixes`` (by local rank) stdout too.
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        supervisor: Supervisor | None = None,
        program_for: Callable[[int], Program] | None = None,
        warm: bool = False,
        relay: OutputRelay | None = None,
        relay_prefixes: Mapping[int, str] | None = None,
        on_happening: Callable[[Happening], None] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            **more,
        )
        self._numa_options = numa_options
        self._own_supervisor = supervisor is None
        self._supervisor = supervisor
        self._opened = False
        self._started = False
        self._program_for = program_for
        self._warm = warm
        self._relay = relay
        self._relay_prefixes = relay_prefixes
        self._relayed: set[int] = set()  # local ranks whose stderr the relay has
        self._on_happening = on_happening
        self._workers: dict[int, WorkerProcess] = {}
        self._stores: list[StoreProcess] = []
        self._oom: OomWatch | None = None
        self._marks: dict[int, Mark] = {}
        self._victims: dict[int, int] = {}  # local rank to when we began to stop it
        self._keeper_lost: str | None = None
        self._news = False
        self._woken = False
        self._result: RunProcsResult | None = None

    @property
    def workers(self) -> dict[int, WorkerProcess]:
        """The supervisor's workers by local rank: page, channel, incarnation. Ours."""
        return self._workers

    @property
    def subprocess_handlers(self) -> dict[int, _Handler]:
        """PyTorch's attribute: handles by local rank, each with ``proc`` and ``close``."""
        return {rank: _Handler(self, worker) for rank, worker in self._workers.items()}

    # -- starting

    def _ready_supervisor(self) -> Supervisor:
        if self._own_supervisor and not self._opened:
            self._supervisor = Supervisor(job=self.name)
            self._supervisor.open()
        self._opened = True
        assert self._supervisor is not None
        return self._supervisor

    def _start(self) -> None:
        if self._started:
            raise ValueError("the processes of this context have been started already")
        self._started = True
        if not self.nprocs:
            return
        supervisor = self._ready_supervisor()
        self._oom = OomWatch()
        with ExitStack() as files:
            orders = [self._order(rank, files) for rank in range(self.nprocs)]
            try:
                workers = supervisor.start(orders)
            except SupervisorError as error:
                if self._own_supervisor:
                    raise
                logger.warning("the keeper is started again: %s", str(error))
                supervisor.open()
                workers = supervisor.start(orders)
        self._workers = {worker.local_rank: worker for worker in workers}
        self._marks = {worker.local_rank: self._oom.mark(worker.pid) for worker in workers}

    def _order(self, rank: int, files: ExitStack) -> StartOrder:
        if self._program_for is not None:
            program = self._program_for(rank)
        else:
            program = Program((str(self.entrypoint), *(str(arg) for arg in self.args[rank])))
        warm = self._warm
        if self._numa_options is not None:
            from phalanx.process import numa

            bound = numa.command(program.argv, self._numa_options, rank)
            if bound != program.argv:
                program, warm = dataclasses.replace(program, argv=bound), False
        # None for a variable: the worker does not have it.
        wanted = {**os.environ, **self.envs[rank]}
        env = {name: value for name, value in wanted.items() if value is not None}
        return StartOrder(
            local_rank=rank,
            program=program,
            env=env,
            stdout=self._stream(rank, "stdout", self.stdouts[rank], files),
            stderr=self._stream(rank, "stderr", self.stderrs[rank], files),
            cwd=None if self._own_supervisor else os.getcwd(),
            warm=warm,
        )

    def _stream(self, rank: int, name: str, path: str, files: ExitStack) -> int | None:
        relayed = self._relay is not None and (name == "stderr" or self._relay_prefixes is not None)
        if relayed and path in ("", os.devnull):
            assert self._relay is not None
            prefix = (self._relay_prefixes or {}).get(rank, "")
            fd = self._relay.attach(rank, name, prefix=prefix, show=not path)
            if name == "stderr":
                self._relayed.add(rank)
        elif path:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(path, flags, 0o644)
        else:
            return None
        files.callback(os.close, fd)
        return fd

    def start_store(self, listener: socket.socket, eager: bool = False) -> StoreProcess:
        """See `PContext.start_store`."""
        store = self._ready_supervisor().start_store(listener, eager=eager)
        self._stores.append(store)
        return store

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {rank: worker.pid for rank, worker in self._workers.items()}

    # -- waiting

    def _wait_event(self, timeout: float) -> bool:
        if self._supervisor is None or not self._opened:
            return super()._wait_event(timeout)
        end = time.monotonic() + timeout
        while not self._news:
            left = end - time.monotonic()
            if self._take(max(0.0, left)):
                return True
            if left <= 0:
                return False
        return True

    def _settle(self, end: float) -> None:
        # Several programs often fail, or end, at the same time: one that does is not a victim.
        self._woken = False
        while not self._woken and self._opened and any(self._failed()):
            left = end - time.monotonic()
            if left <= 0 or all(w.returncode is not None for w in self._workers.values()):
                return
            self._take(left)

    def _wake(self) -> None:
        if self._supervisor is not None and self._opened:
            self._supervisor.wake()
        else:
            super()._wake()

    def _take(self, timeout: float) -> bool:
        """Wait for happenings and note them; True if the caller should look or was woken."""
        assert self._supervisor is not None
        look = False
        for happening in self._supervisor.wait(timeout):
            if isinstance(happening, (WorkerDied, WorkerGone)):
                if self._workers.get(happening.worker.local_rank) is happening.worker:
                    self._news = look = True
            elif isinstance(happening, KeeperLost):
                self._keeper_lost = happening.reason
                self._news = look = True
                logger.error("%s", happening.reason)
            elif isinstance(happening, Woken):
                self._woken = look = True
            if self._on_happening is not None:
                self._on_happening(happening)
        return look

    def _failed(self) -> Iterator[tuple[int, WorkerProcess]]:
        return ((rank, w) for rank, w in self._workers.items() if w.returncode)

    def _poll(self) -> RunProcsResult | None:
        if self._result is not None:
            return self._result
        if self._supervisor is not None and self._opened:
            self._take(0)
        self._news = False
        running = any(worker.returncode is None for worker in self._workers.values())
        if running and not any(self._failed()):
            return None
        oom, self._oom = self._oom, None  # outlives the close: the peak is known only then
        try:
            self.close()
            self._result = self._make_result(oom)
        finally:
            if oom is not None:
                oom.close()
        return self._result

    def _make_result(self, oom: OomWatch | None) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank, worker in self._workers.items():
            code = worker.returncode
            if code is None:  # not even SIGKILL has ended it
                code = -signal.SIGKILL
            if code == 0:
                continue
            victim = rank in self._victims
            explanation = None if victim else self._keeper_lost
            if oom is not None and not victim and explanation is None:
                explanation = oom.explain(self._marks[rank], code, worker.max_rss)
            result.failures[rank] = self._failure(
                rank,
                worker.pid,
                code,
                worker.dead_ns or time.monotonic_ns(),
                signalled_ns=self._victims.get(rank),
                explanation=explanation,
            )
        if result.failures:
            first = result.failures[first_failure(result.failures)]
            logger.error(
                "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s",
                first.exitcode,
                first.local_rank,
                first.pid,
                self.entrypoint,
            )
        else:
            result.return_values = dict.fromkeys(range(self.nprocs))
        return result

    def _stderr_tail(self, local_rank: int) -> list[str]:
        if self._relay is not None and local_rank in self._relayed:
            self._relay.drain(local_rank)
            return self._relay.tail(local_rank)
        return super()._stderr_tail(local_rank)

    # -- stopping

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        supervisor = self._supervisor
        if supervisor is None or not self._opened:
            return
        workers = list(self._workers.values())
        try:
            if any(not worker.gone for worker in workers):
                self._stop(supervisor, workers, death_sig, timeout)
        finally:
            try:
                for store in self._stores:
                    store.close()
                self._stores.clear()
            finally:
                if self._own_supervisor:
                    supervisor.close()
                    self._supervisor = None
                self._opened = False
                if self._oom is not None:
                    self._oom.close()
                    self._oom = None

    def _stop(
        self,
        supervisor: Supervisor,
        workers: list[WorkerProcess],
        death_sig: signal.Signals,
        timeout: float,
    ) -> None:
        self._take(0)
        now = time.monotonic_ns()
        alive = [worker for worker in workers if worker.alive]
        if self._keeper_lost is None:  # else they are dying of that already
            for worker in alive:
                self._victims.setdefault(worker.local_rank, now)
        if alive:
            logger.warning(
                "stopping %s with %s, for %s s at most",
                ", ".join(f"local rank {w.local_rank} (pid {w.pid})" for w in alive),
                signal.Signals(death_sig).name,
                timeout,
            )
        report = supervisor.stop(workers, int(death_sig), timeout, self._hurry)
        for worker in report.killed:
            logger.warning(
                "local rank %s (pid %s) did not end after %s and was killed",
                worker.local_rank,
                worker.pid,
                signal.Signals(death_sig).name,
            )
        for worker in report.unkillable:
            logger.error(
                "local rank %s (pid %s) does not end after SIGKILL and is given up: the "
                "kernel holds it, perhaps for a device; this host may need attention",
                worker.local_rank,
                worker.pid,
            )
        self._take(0)


class _Handler:
    """A worker of the supervisor in the clothes of PyTorch's ``SubprocessHandler``."""

    def __init__(self, context: SubprocessContext, worker: WorkerProcess) -> None:
        self.local_rank_id = worker.local_rank
        self.proc = _Proc(context, worker)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the process; it stays the context's."""
        self.proc.send_signal(death_sig or signal.SIGTERM)


class _Proc:
    """What is commonly used of ``subprocess.Popen``."""

    def __init__(self, context: SubprocessContext, worker: WorkerProcess) -> None:
        self._context = context
        self._worker = worker

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def returncode(self) -> int | None:
        return self._worker.returncode

    def poll(self) -> int | None:
        """The return code, None while it runs."""
        if self._context._opened:
            self._context._take(0)
        return self._worker.returncode

    def send_signal(self, sig: int) -> None:
        """Signal this process alone."""
        self._worker.signal(sig)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)
