"""The agent whose workers are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.elastic import events
from phalanx.elastic.agent.server import worker_env as environment
from phalanx.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    _get_fq_hostname,
    _now_ms,
)
from phalanx.elastic.agent.server.health_check_server import (
    HealthCheckServer,
    create_healthcheck_server,
)
from phalanx.elastic.metrics import prof
from phalanx.elastic.multiprocessing import PContext, start_processes
from phalanx.elastic.multiprocessing.api import handled_signals
from phalanx.elastic.utils.logging import get_logger
from phalanx.elastic.utils.process_state import is_uninterruptible_state, read_proc_state
from phalanx.process import tree

if TYPE_CHECKING:
    from phalanx.elastic.events import EventMetadataValue
    from phalanx.elastic.multiprocessing import LogsSpecs
    from phalanx.elastic.multiprocessing.errors import ProcessFailure
    from phalanx.elastic.timer import FileTimerRequest, FileTimerServer

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"

_WATCHDOG_INTERVAL = 0.1  # seconds
_HEALTH_TIMEOUT = 60  # seconds without progress
_STORE_TIMEOUT = 300  # seconds

logger = get_logger(__name__)


def _resolve_uninterruptible_state_timeout(explicit: float | None) -> float:
    """Seconds: what was said, else the environment's, else 0 (off); never below 0."""
    if explicit is not None:
        return max(0.0, float(explicit))
    try:
        return max(0.0, float(os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT) or 0))
    except ValueError:
        return 0.0


class _AliveCallbackProxy:
    """A health callback that can be given before there is an agent: alive until it has one."""

    def __init__(self) -> None:
        self._delegate: Callable[[], int] | None = None

    def __call__(self) -> int:
        return self._delegate() if self._delegate is not None else int(time.time())

    def set_delegate(self, delegate: Callable[[], int]) -> None:
        self._delegate = delegate


class LocalElasticAgent(SimpleElasticAgent):
    """Runs ``local_world_size`` processes of a function or a program on this machine.

    ``logs_specs`` says where their output goes; ``start_method`` (spawn, fork, forkserver) is
    for functions. ``log_line_prefix_template`` stands before each line shown from a worker;
    in it ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${group_rank}``, ``${attempt}`` and
    ``${host}`` are replaced. ``health_check_server`` is stopped at the end.
    ``uninterruptible_state_timeout``: a worker that the kernel holds for so many seconds
    fails the group without a restart (0: off; default: the environment's).

    From the environment: ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` starts a watchdog at
    ``TORCHELASTIC_TIMER_FILE``; ``TORCHELASTIC_HEALTH_CHECK_PORT`` starts a health check server.

    Hooks beyond PyTorch's, and those of :class:`SimpleElasticAgent`: :meth:`_start_processes`,
    :meth:`_serve_store`, :meth:`_make_watchdog`.
    """

    # False in an agent that handles signals in a way of its own.
    _handle_signals = True

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float | None = None,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._pcontext: PContext | None = None
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._worker_watchdog: FileTimerServer | None = None
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _resolve_uninterruptible_state_timeout(
            uninterruptible_state_timeout
        )
        self._uninterruptible_state_first_seen: dict[int, float] = {}
        self._stopping_workers_only = False
        self._early_returns = 0
        self._workers_store: Any = None  # torch's, while this process serves it
        self._signals = ExitStack()
        self._signals_held = False

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end.

        From the first start of workers until this returns, signals become ``SignalException``
        (on the main thread), the exit barrier and the time between two groups included.
        """
        with self._signals:
            return super().run(role)

    # Starting.

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        if worker_group.store is None:
            raise AssertionError("there was no rendezvous: the worker group has no store")
        if spec.entrypoint is None:
            raise AssertionError("there is nothing to run: entrypoint is missing")
        if self._logs_specs is None:
            raise AssertionError("logs_specs is missing")

        self._serve_store(worker_group)
        use_agent_store = bool(getattr(spec.rdzv_handler, "use_agent_store", False))
        logger.info("use_agent_store: %s", use_agent_store)

        args: dict[int, tuple[Any, ...]] = {}
        envs: dict[int, dict[str, str]] = {}
        prefixes: dict[int, str] = {}
        for worker in worker_group.workers:
            local_rank = worker.local_rank
            env = environment.of_worker(
                worker_group,
                worker,
                restart_count=self._restart_count(),
                use_agent_store=use_agent_store,
                agent_env=os.environ,
            )
            self._set_local_rank_env(env, local_rank, spec)
            envs[local_rank] = env
            args[local_rank] = environment.arguments(spec.args, local_rank)
            if self._log_line_prefix_template:
                prefixes[local_rank] = environment.log_prefix(
                    self._log_line_prefix_template,
                    role_name=spec.role,
                    rank=worker.global_rank,
                    local_rank=local_rank,
                    group_rank=worker_group.group_rank,
                    attempt=max(0, self._attempt),
                    host=socket.gethostname(),
                )

        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._hold_signals()
        self._early_returns = 0
        self._pcontext = self._start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes or None,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        # The context stops workers by itself when one of them fails: with our patience.
        self._pcontext.shutdown_timeout = self._shutdown_timeout
        return dict(self._pcontext.pids())

    def _hold_signals(self) -> None:
        """Keep the handlers that a process context would take down with itself."""
        if not self._handle_signals or threading.current_thread() is not threading.main_thread():
            return
        if not self._signals_held:
            self._signals_held = True
            self._signals.callback(setattr, self, "_signals_held", False)
            self._signals.enter_context(handled_signals())

    def _start_processes(self, **how: Any) -> PContext:
        """Start the processes; ``how`` is what ``start_processes`` takes, by name."""
        return start_processes(**how)

    def _set_local_rank_env(
        self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec
    ) -> None:
        """Put ``LOCAL_RANK`` and ``CUDA_VISIBLE_DEVICES`` into a worker's variables."""
        environment.put_local_rank(worker_env, local_rank, spec.virtual_local_rank, os.environ)

    def _serve_store(self, worker_group: WorkerGroup) -> None:
        """Serve the store of the workers, if this agent can; until they are stopped.

        This one can when the program it runs in has imported torch. Otherwise the workers are
        told that worker 0 serves the store. Another agent takes the socket with
        :meth:`_claim_store_listener` and has it served in its own way.
        """
        store_class = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
        listener = None if store_class is None else self._claim_store_listener(worker_group)
        if store_class is None or listener is None:
            return
        host, port = listener.getsockname()[:2]
        self._workers_store = store_class(
            {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),
            port,
            None,
            True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT),
            master_listen_fd=os.dup(listener.fileno()),
        )

    def _claim_store_listener(self, worker_group: WorkerGroup) -> socket.socket | None:
        """The listening socket at which the workers will look for their store.

        None when the rendezvous offers none, as foreign handlers do, or when ``WorkerSpec``
        sends the workers elsewhere. After this call ``use_agent_store`` of the handler is True for
        this round. The socket stays the handler's: duplicate its descriptor.
        """
        handler: Any = worker_group.spec.rdzv_handler
        listener = getattr(handler, "listener", None)
        if not isinstance(listener, socket.socket) or not handler.offers_listener:
            return None
        if listener.getsockname()[1] != worker_group.master_port:
            return None
        claimed: socket.socket = handler.claim_listener()
        return claimed

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Start the watchdog if it is asked for, and tell the workers where its pipe is."""
        path = os.environ.get(TORCHELASTIC_TIMER_FILE)
        if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) == "1":
            if path is None:
                path = _fresh_timer_path()
            run_id = envs[0]["TORCHELASTIC_RUN_ID"] if envs else ""
            logger.info("Starting a FileTimerServer with %s", path)
            self._worker_watchdog = self._make_watchdog(path, run_id)
            self._worker_watchdog.start()
        else:
            logger.info("%s is not 1: no FileTimerServer", TORCHELASTIC_ENABLE_FILE_TIMER)
        if path is not None:
            for env in envs.values():
                env[TORCHELASTIC_TIMER_FILE] = path

    def _make_watchdog(self, file_path: str, run_id: str) -> FileTimerServer:
        """The server of the workers' timers; it is started and stopped elsewhere."""
        from phalanx.elastic import timer

        return timer.FileTimerServer(
            file_path=file_path,
            run_id=run_id,
            max_interval=_WATCHDOG_INTERVAL,
            daemon=True,
            log_event=self._log_watchdog_event,
            allowed_pids=_is_descendant,
        )

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        group = self._worker_group
        spec = group.spec
        inner = {"watchdog_event": name}
        if request is not None:
            inner["worker_pid"] = str(request.worker_pid)
            inner["scope_id"] = request.scope_id
            inner["expiration_time"] = str(request.expiration_time)
            inner["signal"] = str(request.signal)
        metadata: dict[str, EventMetadataValue] = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": None,
            "group_rank": group.group_rank,
            "worker_id": None,
            "role": spec.role,
            "hostname": self._get_fq_hostname(),
            "state": "RUNNING",
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": None,
            "metadata": json.dumps(inner),
            "agent_restarts": spec.max_restarts - self._remaining_restarts,
        }
        event = events.Event(
            name=name, source=events.EventSource.AGENT, timestamp=_now_ms(), metadata=metadata
        )
        events.record(event, spec.event_log_handler)

    def _get_fq_hostname(self) -> str:
        return _get_fq_hostname()

    # Health.

    def _setup_healthcheck(self) -> None:
        """Start the health check server if there is to be one and is none yet.

        It lives as long as the agent: a restart of the workers is no reason to be unreachable.
        """
        text = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
        if text is None:
            logger.info("%s is not set: no health check", TORCHELASTIC_HEALTH_CHECK_PORT)
            return
        if self._health_check_server is not None:
            return
        try:
            port = int(text)
            if not 0 <= port < 2**16:
                raise ValueError(text)
        except ValueError:
            logger.warning(
                "%s must be a port number, got %r: no health check server is started",
                TORCHELASTIC_HEALTH_CHECK_PORT,
                text,
            )
            return
        server = create_healthcheck_server(
            alive_callback=self._get_alive_time, port=port, timeout=_HEALTH_TIMEOUT
        )
        server.start()
        self._health_check_server = server

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())

    def _get_alive_time(self) -> int:
        """When this agent last made progress, in Unix seconds; for the health check.

        That is the last turn of its loop, or of the watchdog if that is longer ago; and now
        while it starts or stops workers, waits for other nodes, or is at the exit barrier.
        """
        if self._in_exit_barrier:
            return self._get_current_time_secs()
        times = [self._get_current_time_secs()]
        tick, watchdog = self._loop_tick, self._worker_watchdog
        if tick is not None:
            times.append(int(tick))
        if watchdog is not None:
            times.append(int(watchdog.get_last_progress_time()))
        return min(times)

    # Watching.

    def wake(self) -> None:
        super().wake()
        wake = getattr(self._pcontext, "wake", None)
        if callable(wake):
            wake()

    def _await_event(self, timeout: float) -> None:
        """Wait for a death, for ``timeout`` seconds at most.

        The process context does it when it has ``wait_event(timeout)``.
        """
        wait_event = getattr(self._pcontext, "wait_event", None)
        if not callable(wait_event) or self._woken.is_set():
            super()._await_event(timeout)
            return
        end = time.monotonic() + timeout
        wait_event(timeout)
        left = end - time.monotonic()
        if left <= 0:
            return
        # Each worker dies once: a context that returns early more often than that would have
        # us spin, so it is given the whole interval.
        self._early_returns += 1
        if self._early_returns > 2 * len(self._worker_group.workers) + 2:
            super()._await_event(left)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        role = worker_group.spec.role
        if self._pcontext is None:
            raise AssertionError("no workers were started")
        expected = {worker.id for worker in worker_group.workers}
        actual = set(self._pcontext.pids().values())
        if expected != actual:
            logger.error(
                "[%s] worker pids do not match process_context pids. Expected: %s, actual: %s",
                role,
                expected,
                actual,
            )
            return RunResult(state=WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if not result:
            if self._uninterruptible_state_timeout > 0:
                stuck = self._check_uninterruptible_state_timeout(
                    worker_group, self._uninterruptible_state_timeout
                )
                if stuck is not None:
                    return stuck
            return RunResult(state=WorkerState.HEALTHY)
        by_local_rank = worker_group.workers
        if result.is_failed():
            return RunResult(
                state=WorkerState.FAILED,
                failures={
                    by_local_rank[local_rank].global_rank: failure
                    for local_rank, failure in result.failures.items()
                },
            )
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={
                by_local_rank[local_rank].global_rank: value
                for local_rank, value in result.return_values.items()
            },
        )

    def _check_uninterruptible_state_timeout(
        self, worker_group: WorkerGroup, timeout: float
    ) -> RunResult | None:
        """UNHEALTHY when the kernel has held a worker for ``timeout`` seconds or longer.

        Then nothing is restarted on this machine: what holds it holds a device as well.
        """
        if self._pcontext is None:
            return None
        role = worker_group.spec.role
        pids = self._pcontext.pids()
        seen = self._uninterruptible_state_first_seen
        for pid in set(seen) - set(pids.values()):
            del seen[pid]
        failures: dict[int, ProcessFailure] = {}
        for local_rank, pid in pids.items():
            dwell = self._update_uninterruptible_dwell(pid, role, timeout)
            if dwell is not None and dwell >= timeout:
                logger.error(
                    "[%s] Worker pid=%s stuck in uninterruptible sleep (D-state) for %.1f s "
                    "(limit %.1f s); the worker group is UNHEALTHY and is not restarted",
                    role,
                    pid,
                    dwell,
                    timeout,
                )
                global_rank = worker_group.workers[local_rank].global_rank
                failures[global_rank] = _stuck_failure(local_rank, pid, dwell)
        if not failures:
            return None
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.UNHEALTHY, failures=failures)

    def _update_uninterruptible_dwell(self, pid: int, role: str, timeout: float) -> float | None:
        """For how many seconds the kernel has held a process; None if it does not, or won't say."""
        state = read_proc_state(pid)
        if state is None:
            return None
        seen = self._uninterruptible_state_first_seen
        if not is_uninterruptible_state(state):
            seen.pop(pid, None)
            return None
        now = time.monotonic()
        if pid not in seen:
            logger.warning(
                "[%s] Worker pid=%s entered uninterruptible sleep (D-state); it fails the group "
                "if it stays for %.1f s",
                role,
                pid,
                timeout,
            )
        return now - seen.setdefault(pid, now)

    # Stopping.

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        """Stop the workers, with the same patience as at the end (``shutdown_timeout``)."""
        self._stopping_workers_only = True
        try:
            self._call_shutdown()
        finally:
            self._stopping_workers_only = False

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 30,
        is_restart: bool = False,
    ) -> None:
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            self._worker_watchdog = None
        if self._health_check_server is not None and not self._stopping_workers_only:
            self._health_check_server.stop()
            self._health_check_server = None
        if self._pcontext:
            self._pcontext.close(death_sig, timeout)
        self._workers_store = None


def _fresh_timer_path() -> str:
    import tempfile
    import uuid

    return os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")


def _is_descendant(pid: int) -> bool:
    """Whether a process descends from this one; only such may set timers."""
    for _ in range(64):
        entry = tree.stat(pid)
        if entry is None:
            return False
        if entry.ppid == os.getpid():
            return True
        if entry.ppid <= 1:
            return False
        pid = entry.ppid
    return False


def _stuck_failure(local_rank: int, pid: int, seconds: float) -> ProcessFailure:
    from phalanx.elastic.multiprocessing.errors import ProcessFailure

    failure = ProcessFailure(
        local_rank=local_rank, pid=pid, exitcode=-signal.SIGKILL, error_file=""
    )
    failure.message = (
        f"stuck in uninterruptible sleep (state D) for {seconds:.1f} s: the kernel holds it, "
        "most often for a device or a network file system"
    )
    return failure
