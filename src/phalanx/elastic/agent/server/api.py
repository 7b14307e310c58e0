"""The agent's loop, for workers of any kind.

:class:`SimpleElasticAgent` knows when to rendezvous, start, watch, restart and stop; a
subclass knows how. The private members are part of the contract: people override them.
"""

from __future__ import annotations

import abc
import inspect
import json
import math
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import phalanx.elastic.utils.store as store_util
from phalanx.elastic.events import Event, EventSource, record
from phalanx.elastic.metrics import prof, put_metric
from phalanx.elastic.utils.foreign import is_graceful_exit, is_signal
from phalanx.elastic.utils.hostname import fq_hostname
from phalanx.elastic.utils.logging import get_logger

if TYPE_CHECKING:
    from phalanx.elastic.events import EventMetadataValue
    from phalanx.elastic.multiprocessing.errors import ProcessFailure
    from phalanx.elastic.rendezvous import RendezvousHandler
    from phalanx.elastic.utils.store import Store

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_ROLE_INFO_PREFIX = "torchelastic/role_info/"
_ASSIGNED_RANKS_PREFIX = "torchelastic/assigned_ranks/"
_EXIT_BARRIER_VARIABLE = "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"
_DEFAULT_EXIT_BARRIER_TIMEOUT = 300.0
# How often a signal may interrupt the last shutdown before it is given up.
_SHUTDOWN_TRIES = 16

logger = get_logger(__name__)


@dataclass
class WorkerSpec:
    """What to run on this node, and how often to try again.

    ``entrypoint`` is a function or the path of a program; ``args`` are its arguments, in which
    ``${local_rank}`` is replaced. ``fn`` is the old name of ``entrypoint``.
    ``max_restarts`` counts failures of the group. ``monitor_interval`` is the longest time in
    seconds between two looks at the workers. ``master_addr`` and ``master_port`` go before what
    the rendezvous says. ``event_log_handler`` names a destination of
    :mod:`phalanx.elastic.events`. With ``virtual_local_rank`` each worker is local rank 0 and
    sees one device.

    Raises ``AssertionError`` for a number that is not above zero or a missing entry point.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size must be above 0, got {self.local_world_size}")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval must be above 0, got {self.monitor_interval}")
        if self.fn:
            warnings.warn(
                "WorkerSpec.fn will be deprecated, please use WorkerSpec.entrypoint instead",
                category=DeprecationWarning,
                stacklevel=3,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("there is nothing to run: entrypoint is missing")

    def get_entrypoint_name(self) -> str:
        """The file name of a program, the qualified name of a function."""
        if self.entrypoint is None:
            raise AssertionError("there is nothing to run: entrypoint is missing")
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        name = getattr(self.entrypoint, "__qualname__", None)
        return str(name) if name else type(self.entrypoint).__qualname__


class Worker:
    """One worker. ``id`` is the agent's name for it, for local processes the pid.

    Ranks and sizes are -1 before the first rendezvous and may change with each.
    """

    __slots__ = [
        "global_rank",
        "id",
        "local_rank",
        "role_rank",
        "role_world_size",
        "world_size",
    ]

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank},"
            f"role_rank={self.role_rank},world_size={self.world_size},"
            f"role_world_size={self.role_world_size}"
        )

    def __repr__(self) -> str:
        return str(self)


class WorkerState(str, Enum):
    """The state of a group; its workers change state together."""

    UNKNOWN = "UNKNOWN"
    """The agent has lost track. It gives up."""
    INIT = "INIT"
    """Not started yet."""
    HEALTHY = "HEALTHY"
    """Running."""
    UNHEALTHY = "UNHEALTHY"
    """Running, but not well."""
    STOPPED = "STOPPED"
    """Stopped by the agent, to be started again."""
    SUCCEEDED = "SUCCEEDED"
    """All ended well."""
    FAILED = "FAILED"
    """One ended badly."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether there are processes in this state."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """The workers of this node. All but ``spec``, ``workers`` and ``state`` is None at first."""

    __slots__ = [
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    ]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=i) for i in range(spec.local_world_size)]
        self.store: Store | None = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


class _RoleInstanceInfo:
    """What agents tell each other to number their workers."""

    __slots__ = ["local_world_size", "rank", "role"]

    def __init__(self, role: str, rank: int, local_world_size: int) -> None:
        self.role = role
        self.rank = rank
        self.local_world_size = local_world_size

    def serialize(self) -> bytes:
        return json.dumps(
            {"role": self.role, "rank": self.rank, "local_world_size": self.local_world_size}
        ).encode()

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        fields = json.loads(data)
        return _RoleInstanceInfo(fields["role"], fields["rank"], fields["local_world_size"])

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """By rank within a role, else -1 or 1 by the order of the role names."""
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(
        roles_infos: Sequence[_RoleInstanceInfo], role: str
    ) -> tuple[int, int]:
        """The first and last place of a role; (-1, -1) when it is not there."""
        places = [i for i, info in enumerate(roles_infos) if info.role == role]
        return (places[0], places[-1]) if places else (-1, -1)


def _rank_table(infos: Sequence[_RoleInstanceInfo]) -> list[list[int]]:
    """For each agent, by group rank: first global rank, world, first role rank, role's world."""
    role_sizes: dict[str, int] = {}
    for info in infos:
        role_sizes[info.role] = role_sizes.get(info.role, 0) + info.local_world_size
    world = sum(role_sizes.values())
    base = 0
    role_bases = dict.fromkeys(role_sizes, 0)
    table = []
    for info in infos:
        table.append([base, world, role_bases[info.role], role_sizes[info.role]])
        base += info.local_world_size
        role_bases[info.role] += info.local_world_size
    return table


@dataclass
class RunResult:
    """How a group ended: what its workers returned, how they failed; by GLOBAL rank.

    Workers that the agent itself stopped are in neither. A program returns nothing.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether the state is FAILED."""
        return self.state == WorkerState.FAILED


def _get_fq_hostname() -> str:
    return fq_hostname()


class ElasticAgent(abc.ABC):
    """Runs the workers of one node.

    What a worker needs for ``init_process_group("env://")`` is in its environment.
    """

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, starting them again within ``max_restarts``.

        A failure of the workers is in the result; anything else is raised.
        """

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group, live: the agent changes it while it runs."""


class SimpleElasticAgent(ElasticAgent):
    """The loop of an agent with one group of workers; ``role`` arguments are ignored.

    A subclass says how to start, stop, watch and clean up. Beyond PyTorch's members there
    are hooks for those who want more than its policy: :meth:`_await_event`,
    :meth:`_should_restart`, :meth:`_restart_count`; ``_attempt`` counts the starts of the
    group from 0, for whatever reason it was started.

    ``exit_barrier_timeout`` (seconds; default: ``TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT`` or 300) is
    how long a node whose workers are done waits for the others. ``shutdown_timeout`` (seconds)
    is how long workers may take to leave after the first signal, on every path.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float | None = None,
        shutdown_timeout: int = 30,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Store | None = None
        self._exit_barrier_timeout = _resolve_exit_barrier_timeout(exit_barrier_timeout)
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._attempt = -1
        # When the loop last came round (Unix seconds); None while it may rightly take long.
        self._loop_tick: float | None = None
        self._woken = threading.Event()

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start all workers; the id of each by local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers, whether they run, hang, are dead or never were."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are, without waiting."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Let go of everything, workers included: first by ``death_sig``, after ``timeout``
        seconds by force. May be called again."""

    # What more than PyTorch's policy is done with.

    def wake(self) -> None:
        """Make the loop look at the workers now. From any thread."""
        self._woken.set()

    def _await_event(self, timeout: float) -> None:
        """Wait for something to happen to the workers, for ``timeout`` seconds at most.

        The loop calls this before each look at the workers.
        """
        self._woken.wait(timeout)
        self._woken.clear()

    def _should_restart(self, result: RunResult) -> bool:
        """Whether to start the group again after this failure; may wait before it says so.

        Each time it says so one of the remaining restarts is used up.
        """
        return self._remaining_restarts > 0

    def _restart_count(self) -> int:
        """What ``TORCHELASTIC_RESTART_COUNT`` says: the restarts after failures of this node."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round and put what it decided into ``worker_group``."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            info = spec.rdzv_handler.next_rendezvous()
        where = info.bootstrap_store_info
        master_addr = spec.master_addr or (where.master_addr if where else None)
        master_port = spec.master_port or (where.master_port if where else None)
        self._store = info.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        worker_group.workers = workers
        worker_group.store = info.store
        worker_group.group_rank = info.rank
        worker_group.group_world_size = info.world_size
        worker_group.master_addr = master_addr
        worker_group.master_port = master_port
        logger.info(
            "[%s] Rendezvous complete: restart_count=%s master=%s:%s group_rank=%s "
            "group_world_size=%s workers=%s event_log_handler=%s",
            spec.role,
            self._restart_count(),
            master_addr,
            master_port,
            info.rank,
            info.world_size,
            workers,
            spec.event_log_handler,
        )

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the workers of this node.

        Each agent tells the store its role and how many workers it has; that of group rank 0
        reads all, numbers them in the order of the group ranks and writes each agent's
        share. Constant work for each agent but that one. With
        ``TORCH_ELASTIC_WORKER_IDENTICAL=1`` all nodes are taken to be alike, and the store
        is not asked.
        """
        size = spec.local_world_size
        if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
            base, world = group_rank * size, group_world_size * size
            role_base, role_world = base, world
        else:
            own = _RoleInstanceInfo(spec.role, group_rank, size)
            store.set(f"{_ROLE_INFO_PREFIX}{group_rank}", own.serialize())
            if group_rank == 0:
                told = store.multi_get([f"{_ROLE_INFO_PREFIX}{i}" for i in range(group_world_size)])
                table = _rank_table([_RoleInstanceInfo.deserialize(data) for data in told])
                store.multi_set(
                    [f"{_ASSIGNED_RANKS_PREFIX}{i}" for i in range(group_world_size)],
                    [json.dumps(row) for row in table],
                )
            base, world, role_base, role_world = json.loads(
                store.get(f"{_ASSIGNED_RANKS_PREFIX}{group_rank}")
            )
        return [
            Worker(
                local_rank=i,
                global_rank=base + i,
                role_rank=role_base + i,
                world_size=world,
                role_world_size=role_world,
            )
            for i in range(size)
        ]

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Rendezvous and start; the group counts as healthy from then on."""
        self._attempt += 1
        role = worker_group.spec.role
        logger.info("[%s] Rendezvous'ing worker group", role)
        self._rendezvous(worker_group)
        logger.info("[%s] Starting worker group", role)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            record(
                self._construct_event("START", EventSource.WORKER, worker),
                worker_group.spec.event_log_handler,
            )
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop, rendezvous, start."""
        logger.info("[%s] Stopping worker group", worker_group.spec.role)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end.

        A node that the rendezvous does not need succeeds with an empty result. A
        ``SignalException`` is passed on once the workers are gone.
        """
        start = time.monotonic()
        is_shut_down = False
        try:
            result = self._invoke_run(role)
            self._total_execution_time = math.ceil(time.monotonic() - start)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        except Exception as error:
            if is_graceful_exit(error):
                logger.info("Rendezvous gracefully exited: %s", error)
                return RunResult(state=WorkerState.SUCCEEDED)
            if is_signal(error):
                sigval: signal.Signals = getattr(error, "sigval", signal.SIGTERM)
                name = getattr(sigval, "name", sigval)
                logger.warning("Received %s death signal, shutting down workers", name)
                self._call_shutdown(sigval)
                is_shut_down = True
            raise
        finally:
            self._loop_tick = None
            if not is_shut_down:
                self._shut_down_for_good()
            self._total_execution_time = math.ceil(time.monotonic() - start)

    def _shut_down_for_good(self) -> None:
        """Shut down; a signal that interrupts it ends the workers at once, and is passed on then.

        Leaving in the middle would leave workers behind that nobody owns.
        """
        interruption: Exception | None = None
        for _ in range(_SHUTDOWN_TRIES):
            try:
                self._call_shutdown(None if interruption is None else signal.SIGKILL)
                break
            except Exception as error:
                if not is_signal(error):
                    raise
                interruption = error
        if interruption is not None:
            raise interruption

    def _call_shutdown(self, death_sig: signal.Signals | None = None) -> None:
        """Call ``_shutdown`` with as much as it takes: subclasses know fewer arguments."""
        shutdown: Callable[..., None] = self._shutdown
        known = _parameters(shutdown)
        positional = [] if death_sig is None or (known is not None and not known) else [death_sig]
        if known is None or "timeout" in known:
            shutdown(*positional, timeout=self._shutdown_timeout)
        else:
            shutdown(*positional)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The loop: start, then wait, look, decide, until the group has succeeded or failed."""
        group = self._worker_group
        spec = group.spec
        role = spec.role
        logger.info("[%s] starting workers for entrypoint: %s", role, spec.get_entrypoint_name())
        self._initialize_workers(group)
        while True:
            if group.state == WorkerState.INIT:
                raise AssertionError(f"[{role}] the worker group was not started")
            self._loop_tick = time.time()
            self._await_event(spec.monitor_interval)
            result = self._monitor_workers(group)
            state = group.state = result.state
            put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{role}.{state.name.lower()}", 1)

            if state == WorkerState.SUCCEEDED:
                logger.info("[%s] worker group successfully finished", role)
                self._loop_tick = None
                self._exit_barrier()
                return result
            if state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                self._loop_tick = None
                if self._should_restart(result):
                    logger.info(
                        "[%s] Worker group %s. %s/%s attempts left; will restart worker group",
                        role,
                        state.name,
                        self._remaining_restarts,
                        spec.max_restarts,
                    )
                    self._remaining_restarts = max(0, self._remaining_restarts - 1)
                    self._restart_workers(group)
                else:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    if state == WorkerState.UNHEALTHY:
                        # Unhealthy to the end is a failure: nobody must take it for success.
                        return RunResult(WorkerState.FAILED, result.return_values, result.failures)
                    return result
            elif state == WorkerState.HEALTHY:
                waiting = spec.rdzv_handler.num_nodes_waiting()
                if waiting > 0:
                    logger.info(
                        "[%s] Detected %s new nodes from group_rank=%s; will restart worker group",
                        role,
                        waiting,
                        group.group_rank,
                    )
                    self._loop_tick = None
                    self._restart_workers(group)
            else:
                raise RuntimeError(f"[{role}] Worker group in {state.name} state")

    def _exit_barrier(self) -> None:
        """Wait for the other nodes to succeed as well, within bounds; it is no failure if not."""
        logger.info(
            "Local worker group finished (%s). Waiting %s seconds for other agents to finish",
            self._worker_group.state,
            self._exit_barrier_timeout,
        )
        start = time.monotonic()
        self._in_exit_barrier = True
        try:
            store_util.barrier(
                store=self._store,  # type: ignore[arg-type]
                world_size=self._worker_group.group_world_size,  # type: ignore[arg-type]
                key_prefix=_TERMINAL_STATE_SYNC_ID,
                barrier_timeout=self._exit_barrier_timeout,
            )
            logger.info(
                "Done waiting for other agents. Elapsed: %s seconds", time.monotonic() - start
            )
        except Exception as error:
            if is_signal(error):
                logger.warning("Got termination signal: %s", getattr(error, "sigval", error))
                raise
            logger.exception(
                "Error waiting on exit barrier. Elapsed: %s seconds", time.monotonic() - start
            )
        finally:
            self._in_exit_barrier = False

    # Events and metrics.

    def get_event_failed(self) -> Event:
        """The agent's last event when it raises, with the traceback of the current exception."""
        return self._construct_event(
            state="FAILED", source=EventSource.AGENT, raw_error=traceback.format_exc()
        )

    def get_event_succeeded(self) -> Event:
        """The agent's last event when it returns, whatever became of the workers."""
        return self._construct_event(state="SUCCEEDED", source=EventSource.AGENT)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            record(
                self._construct_event(
                    state=self._get_worker_state(worker, result),
                    source=EventSource.WORKER,
                    worker=worker,
                    raw_error=json.dumps(failure.error_file_data) if failure else None,
                    exit_code=failure.exitcode if failure else None,
                    worker_pid=failure.pid if failure else None,
                ),
                self._worker_group.spec.event_log_handler,
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """The state to record for a worker; ``ValueError`` when the result does not know it."""
        failure = result.failures.get(worker.global_rank)
        if not failure and result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            return "TERMINATED"  # stopped by the agent because of another
        if failure or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"Unknown worker: {worker.global_rank}")

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event of the agent that says how long the body took."""
        start = time.perf_counter()
        try:
            yield
        finally:
            record(
                self._construct_event(
                    state=state,
                    source=EventSource.AGENT,
                    duration_ms=(time.perf_counter() - start) * 1000,
                ),
                self._worker_group.spec.event_log_handler,
            )

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group = self._worker_group
        spec = group.spec
        inner: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker:
            # Readers of torch's events expect each of these in an array of one.
            inner["local_rank"] = (worker.local_rank,)
            inner["role_rank"] = (worker.role_rank,)
            inner["role_world_size"] = (worker.role_world_size,)
            inner["exit_code"] = (exit_code,)
            inner["worker_pid"] = (worker_pid,)
        metadata: dict[str, EventMetadataValue] = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker else None,
            "role": spec.role,
            "hostname": _get_fq_hostname(),
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(inner),
            "agent_restarts": spec.max_restarts - self._remaining_restarts,
            "duration_ms": duration_ms,
        }
        return Event(
            f"torchelastic.worker.status.{state}",
            source=source,
            timestamp=_now_ms(),
            metadata=metadata,
        )

    def _record_metrics(self, group_results: RunResult) -> None:
        failed = group_results.is_failed()
        self._record_flakiness_metric(failed)
        spec = self._worker_group.spec
        retried = self._remaining_restarts != spec.max_restarts
        put_metric(f"workers.{spec.role}.run_total", 1)
        self._record_metric_with_condition("run_success_with_retries", not failed and retried)
        self._record_metric_with_condition("run_success_no_retries", not failed and not retried)
        self._record_metric_with_condition("run_failed_with_retries", failed and retried)
        self._record_metric_with_condition("run_failed_no_retries", failed and not retried)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        role = self._worker_group.spec.role
        put_metric(f"workers.{role}.{metric_name}", 1 if condition else 0)

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """100 for a failed run, else the share of the restarts that were used, in per cent."""
        spec = self._worker_group.spec
        flakiness = 100.0
        if not is_failed:
            flakiness -= 100.0 * (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        put_metric(f"workers.{spec.role}.flakiness", int(flakiness))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _resolve_exit_barrier_timeout(explicit: float | None) -> float:
    """Seconds: what was said, else the environment's, else 300. ``ValueError`` for nonsense."""
    if explicit is not None:
        return explicit
    text = os.environ.get(_EXIT_BARRIER_VARIABLE)
    if not text:
        return _DEFAULT_EXIT_BARRIER_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{_EXIT_BARRIER_VARIABLE} must be seconds, 0 or more, got {text!r}")
    return seconds


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the parameters; None when it takes any, or does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
