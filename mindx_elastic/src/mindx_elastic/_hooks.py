"""What stands in for torch's launch_agent, _invoke_run and _initialize_workers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mindx_elastic import _own, api
from mindx_elastic._decide import Action, Look, Reset, decide, read_reset

log = logging.getLogger("mindx_elastic")

MANY_RESTARTS = 32767
_START_WAIT = 60.0
_FLUSH_POLL = 0.5
_ECHO = 60.0  # seconds in which a worker's failure may be that of a restarted peer
_PATIENCE = 30.0  # seconds for the controller's word, unless TASKD_REPORT_FAULT_TIMEOUT says more


def recovery_on() -> bool:
    """Whether the environment asks for recovery."""
    return bool(
        os.environ.get("MINDX_TASK_ID")
        and (os.environ.get("MINDX_SERVER_IP") or os.environ.get("MINDX_SERVER_DOMAIN"))
        and (
            os.environ.get("ELASTIC_PROCESS_RECOVER_ENABLE") == "1"
            or os.environ.get("PROCESS_RECOVER") == "on"
        )
    )


def in_place_allowed() -> bool:
    """Whether single processes may be restarted."""
    return os.environ.get("ENABLE_RESTART_FAULT_PROCESS") == "on"


def patience() -> float:
    """How long a reported fault may stay without a decision, in seconds."""
    try:
        value = float(os.environ["TASKD_REPORT_FAULT_TIMEOUT"])
    except (KeyError, ValueError):
        return _PATIENCE
    return value if value > 0 else _PATIENCE


def controller_address() -> str:
    """Where the controller is; on the well-known port unless it is given."""
    if os.environ.get("LOCAL_PROXY_ENABLE") == "on":
        return "127.0.0.1"
    return os.environ.get("MINDX_SERVER_IP") or os.environ["MINDX_SERVER_DOMAIN"]


def launch_agent(original: Callable[..., Any]) -> Callable[..., Any]:
    """max_restarts 0 becomes a number that recoveries do not use up; a program with a Phalanx
    session is run by Phalanx's own agent."""

    @functools.wraps(original)
    def wrapper(config: Any, entrypoint: Any, args: Any, **more: Any) -> Any:
        if not recovery_on():
            return original(config, entrypoint, args, **more)
        if config.max_restarts == 0:
            config = dataclasses.replace(config, max_restarts=MANY_RESTARTS)
        line = _own.words(config, entrypoint, args)
        job = line and _own.job_config(
            line, (controller_address(),), os.environ["MINDX_TASK_ID"], patience()
        )
        if job:
            return _own.run(job)
        return original(config, entrypoint, args, **more)

    return wrapper


def initialize_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing starts while faults are still being collected or one of our ranks is faulty."""

    @functools.wraps(original)
    def wrapper(self: Any, worker_group: Any, *args: Any, **more: Any) -> Any:
        if recovery_on():
            until = time.monotonic() + _START_WAIT
            while (reset := read_reset()).flushing and time.monotonic() < until:
                time.sleep(_FLUSH_POLL)  # a file in a mounted ConfigMap tells nobody
            if reset.flushing:
                log.warning("reset.json has been flushing for %d s; starting", _START_WAIT)
        return original(self, worker_group, *args, **more)

    return wrapper


def invoke_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """The agent's loop, where recovery is on; torch's own elsewhere."""

    @functools.wraps(original)
    def wrapper(self: Any, role: str = "default") -> Any:
        if not recovery_on():
            return original(self, role)
        return Run(self).run()

    return wrapper


class Processes:
    """A node's worker processes inside torch's context, one by one.

    torch ends all of them when one fails; asked here, they are asked without that.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._starts: dict[int, int] = {}

    @property
    def context(self) -> Any:
        """torch's context if its processes can be restarted singly, else None."""
        context = getattr(self._agent, "_pcontext", None)
        wanted = ("subprocess_handlers", "args", "envs", "stdouts", "stderrs", "_failures")
        return context if all(hasattr(context, name) for name in wanted) else None

    def failed(self) -> dict[int, int]:
        """Local ranks that have ended badly, with their exit codes."""
        context = self.context
        if context is None:
            return {}
        codes = {r: h.proc.poll() for r, h in context.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code not in (None, 0)}

    def restart(self, local_ranks: tuple[int, ...]) -> dict[int, int]:
        """Kills and starts these; the new process ids."""
        import inspect
        import signal

        from torch.distributed.elastic.multiprocessing.subprocess_handler import (
            get_subprocess_handler,
        )

        context, made = self.context, {}
        for rank in local_ranks:
            old = context.subprocess_handlers[rank]
            if old.proc.poll() is None:
                old.close(death_sig=signal.SIGKILL)
                old.proc.wait(10)
            count = self._starts[rank] = self._starts.get(rank, 0) + 1
            env = {**context.envs[rank], "RESTART_FAULT_PROCESS_TYPE": "worker"}
            arguments = {
                "entrypoint": context.entrypoint,
                "args": context.args[rank],
                "env": env,
                # the log of the one before stays
                "stdout": f"{context.stdouts[rank]}.{count}" if context.stdouts[rank] else "",
                "stderr": f"{context.stderrs[rank]}.{count}" if context.stderrs[rank] else "",
                "local_rank_id": rank,
                "numa_options": getattr(context, "_numa_options", None),
            }
            known = inspect.signature(get_subprocess_handler).parameters
            handler = get_subprocess_handler(**{k: v for k, v in arguments.items() if k in known})
            context.subprocess_handlers[rank] = handler
            context._failures.pop(rank, None)
            context._running_local_ranks.add(rank)
            made[rank] = handler.proc.pid
        return made


class Run:
    """One agent's run with the controller's decisions."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.spec = agent._worker_group.spec
        self.processes = Processes(agent)
        self.signals: queue.Queue[Any] = queue.Queue()
        self.link: Any = None
        self.store: Any = None
        self.replaced: set[int] = set()  # local ranks restarted singly since the group's start
        self.replaced_at = 0.0
        self.echo = ""
        self.killed = False
        self.before = Reset()
        self.incarnations: dict[int, int] = {}
        self.checks: queue.Queue[dict[int, int]] = queue.Queue()
        self.stop = threading.Event()

    # -- set-up

    def run(self) -> Any:
        from torch.distributed.elastic.agent.server.api import WorkerState

        agent, group = self.agent, self.agent._worker_group
        agent._rendezvous = self.with_a_fresh_store(agent._rendezvous)
        agent._initialize_workers(group)
        self.before = read_reset()
        self.open_link()
        self.start_device_check()
        try:
            while True:
                time.sleep(self.spec.monitor_interval)
                action, ranks, why = decide(self.look())
                self.before = read_reset()
                if action is Action.KEEP:
                    self.answer_signals()
                elif action is Action.SUCCEED:
                    result = agent._monitor_workers(group)
                    group.state = result.state
                    if result.state == WorkerState.SUCCEEDED:
                        agent._exit_barrier()
                        return result
                elif action in (Action.KILL, Action.LEAVE):
                    return self.fail(why)
                elif action is Action.RESTART_RANKS:
                    self.restart_ranks(self.local(ranks), why)
                elif action is Action.RESTART_ALL:
                    self.restart_all(why)
                elif action is Action.RECOVER:
                    result = self.recover(self.local(ranks))
                    if result is not None:
                        return result
        finally:
            self.stop.set()
            if self.link is not None:
                self.link.close()

    def with_a_fresh_store(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """A restarted group gets a store of its own: torch's agent shares one among all
        attempts, in which the addresses of dead workers lead the new ones astray."""

        def rendezvous(group: Any) -> None:
            original(group)
            restarted = self.agent._remaining_restarts < self.spec.max_restarts
            shared = getattr(self.spec.rdzv_handler, "use_agent_store", False)
            if restarted and shared and group.group_world_size == 1:
                from torch.distributed import TCPStore

                self.store = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
                group.master_port = self.store.port

        return rendezvous

    def open_link(self) -> None:
        """Node 0 holds the job's connection; the others only report."""
        from phalanx.client import Credentials, Declaration, Link

        group = self.agent._worker_group
        secure = os.environ.get("ELASTIC_GRPC_SECURE_CONNECT") == "on"
        root = os.environ.get("ELASTIC_GRPC_SECURE_CERTIFICATES_PATH", "")
        if secure and not root:
            raise ValueError(
                "ELASTIC_GRPC_SECURE_CONNECT=on needs a root certificate in "
                "ELASTIC_GRPC_SECURE_CERTIFICATES_PATH; or switch it off"
            )
        world = group.workers[0].world_size if group.workers else 0
        self.link = Link(
            controller_address(),
            os.environ["MINDX_TASK_ID"],
            self.signals.put,
            on_state=lambda state, text: log.info("controller: %s %s", state, text),
            declaration=Declaration(world_size=world, devices_per_node=self.spec.local_world_size),
            credentials=Credentials(
                root if secure else "", token=os.environ.get("PHALANX_CONTROLLER_TOKEN", "")
            ),
        )
        if group.group_rank == 0:
            self.link.start()

    def start_device_check(self) -> None:
        if api.device_check is None:
            return
        check, interval = api.device_check

        def ask() -> None:
            known: dict[int, int] = {}
            while not self.stop.wait(interval):
                try:
                    found = dict(check())
                except Exception:
                    log.exception("the device check failed")
                    continue
                fresh = {r: k for r, k in found.items() if known.get(r) != k}
                known = found
                if fresh:
                    self.checks.put(fresh)

        threading.Thread(target=ask, name="mindx-device-check", daemon=True).start()

    # -- seeing

    def globals(self) -> dict[int, int]:
        """Global rank to local rank."""
        return {w.global_rank: w.local_rank for w in self.agent._worker_group.workers}

    def local(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        table = self.globals()
        return tuple(table[rank] for rank in ranks if rank in table)

    def look(self) -> Look:
        table = self.globals()
        by_local = {local: rank for rank, local in table.items()}
        failed = tuple(sorted(by_local[local] for local in self.processes.failed()))
        context = self.processes.context
        if context is not None:
            codes = [h.proc.poll() for h in context.subprocess_handlers.values()]
            done = all(code == 0 for code in codes)
        else:
            done = self.poll_torch()
        return Look(
            self.killed,
            read_reset(),
            self.before,
            tuple(sorted(table)),
            failed,
            done,
            in_place_allowed() and context is not None,
            self.agent._worker_group.group_rank or 0,
        )

    def poll_torch(self) -> bool:
        """For contexts whose processes cannot be asked singly: torch's own answer."""
        from torch.distributed.elastic.agent.server.api import WorkerState

        state = self.agent._monitor_workers(self.agent._worker_group).state
        if state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self.restart_or_fail(
                "a worker failed, and this kind of worker cannot be restarted singly"
            )
        return bool(state == WorkerState.SUCCEEDED)

    # -- doing

    def fail(self, why: str) -> Any:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        log.error("ending all workers: %s", why)
        result = self.agent._monitor_workers(self.agent._worker_group)
        self.agent._stop_workers(self.agent._worker_group)
        self.agent._worker_group.state = WorkerState.FAILED
        return RunResult(state=WorkerState.FAILED, failures=result.failures)

    def restart_ranks(self, local_ranks: tuple[int, ...], why: str) -> None:
        self.replaced |= set(local_ranks)
        self.replaced_at = time.monotonic()
        made = self.processes.restart(local_ranks)
        log.warning("restarted only local ranks %s (pids %s): %s", local_ranks, made, why)
        for local, pid in made.items():
            self.agent._worker_group.workers[local].id = pid

    def restart_all(self, why: str) -> None:
        log.warning("restarting the whole group: %s", why)
        self.replaced.clear()
        self.agent._remaining_restarts -= 1
        self.agent._restart_workers(self.agent._worker_group)

    def restart_or_fail(self, why: str) -> Any:
        if self.agent._remaining_restarts > 0:
            self.restart_all(why)
            return None
        return self.fail(f"{why}; no restarts are left")

    def why_not_in_place(self) -> str:
        """Why single processes are not restarted; "": they are."""
        if not in_place_allowed():
            return (
                "ENABLE_RESTART_FAULT_PROCESS is not on; workers that do not wait for the word, "
                "like plain DDP, fail with their peer"
            )
        return self.echo

    def note_echo(self, failed: tuple[int, ...]) -> None:
        """See whether workers fail because a peer did, which no restart of one of them cures."""
        others = sorted(set(failed) - self.replaced)
        if self.replaced and others and time.monotonic() - self.replaced_at < _ECHO:
            self.echo = (
                f"local rank {others[0]} failed {time.monotonic() - self.replaced_at:.0f} s after "
                f"only {sorted(self.replaced)} had been restarted: these workers do not wait for "
                "the word, like plain DDP, and fail with their peer"
            )

    def report(self, faults: dict[int, int], reasons: dict[int, str]) -> bool:
        """Tells the controller; False: nobody is there."""
        import grpc

        from phalanx.client import LinkDown

        for rank in faults:
            self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        try:
            answer = self.link.report_fault(
                faults,
                incarnations={r: self.incarnations[r] for r in faults},
                reasons=reasons,
                timeout=min(10.0, patience()),
            )
        except (LinkDown, grpc.RpcError) as error:
            log.warning("the fault could not be reported: %s", error)
            return False
        if answer.code:
            log.warning("the controller did not take the fault: %s %s", answer.code, answer.info)
        return bool(answer.code == 0)

    def recover(self, failed: tuple[int, ...]) -> Any:
        """Reports a failure and does what the controller says, within a bound."""
        by_local = {local: rank for rank, local in self.globals().items()}
        codes = self.processes.failed()
        self.note_echo(failed)
        reasons = {by_local[r]: f"exit code {codes.get(r)}" for r in failed}
        log.warning("workers failed: %s; asking the controller", reasons)
        if not self.report({by_local[r]: 1 for r in failed}, reasons):
            return self.restart_or_fail("a worker failed and no controller answered")
        until = time.monotonic() + patience()
        while (left := until - time.monotonic()) > 0:
            try:
                signal = self.signals.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue
            done, result = self.obey(signal)
            if done:
                return result
        return self.restart_or_fail(f"no decision of the controller in {patience():g} s")

    def answer_signals(self) -> None:
        """Signals that come while nothing is wrong here (faults of devices, of other nodes)."""
        try:
            self.report(self.checks.get_nowait(), {})
        except queue.Empty:
            pass
        while True:
            try:
                signal = self.signals.get_nowait()
            except queue.Empty:
                return
            self.obey(signal)

    def obey(self, signal: Any) -> tuple[bool, Any]:
        """(the episode is over for this agent, what _invoke_run returns or None)."""
        import grpc

        from phalanx.client import LinkDown

        try:
            return self._obey(signal)
        except (LinkDown, grpc.RpcError) as error:
            log.warning("%s could not be answered: %s", signal.signal, error)
            return False, None

    def _obey(self, signal: Any) -> tuple[bool, Any]:
        link, failed = self.link, tuple(self.processes.failed())
        if signal.signal == "killMaster":
            self.killed = True
            return True, None
        if signal.signal == "stopTrain":
            link.stop_complete(signal, 0)
        elif signal.signal == "globalFault":
            offer = ["exit"] if self.why_not_in_place() else ["recover", "exit"]
            link.strategies(signal, offer)
        elif signal.signal == "saveAndExit" or signal.strategy == "dump":
            link.status(signal, 407, "this agent cannot save; the workers' own controller can")
        elif signal.strategy == "recover" and signal.in_place:
            faulty = self.local(tuple(signal.ranks)) or failed
            self.restart_ranks(faulty, f"the controller decided: {signal.reason}")
            link.status(signal, 0)
            return True, None
        elif signal.strategy == "exit":
            why = f"the controller decided: {signal.reason}"
            if why_not := self.why_not_in_place():
                why += f" (in place was not offered: {why_not})"
            result = self.restart_or_fail(why)
            link.status(signal, 0)
            return True, result
        elif signal.report_within:
            link.status(signal, 406, f"this agent cannot do {signal.strategy or signal.signal}")
        return False, None
