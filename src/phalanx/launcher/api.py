"""From a configuration to an agent that has run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import phalanx.elastic.rendezvous.registry as rdzv_registry
from phalanx.elastic import events, metrics
from phalanx.elastic.agent.server.api import WorkerSpec, _resolve_exit_barrier_timeout
from phalanx.elastic.agent.server.local_elastic_agent import (
    LocalElasticAgent,
    _AliveCallbackProxy,
)
from phalanx.elastic.multiprocessing import DefaultLogsSpecs
from phalanx.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from phalanx.elastic.rendezvous import RendezvousParameters
from phalanx.elastic.rendezvous.utils import parse_rendezvous_endpoint
from phalanx.elastic.utils.foreign import is_named, is_signal
from phalanx.elastic.utils.logging import get_logger

if TYPE_CHECKING:
    from phalanx.elastic.agent.server.api import SimpleElasticAgent
    from phalanx.elastic.agent.server.health_check_server import HealthCheckServer
    from phalanx.elastic.multiprocessing import LogsSpecs
    from phalanx.elastic.rendezvous import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_DEFAULT_RDZV_TIMEOUT = 900  # seconds
_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

logger = get_logger(__name__)


@dataclass
class LaunchConfig:
    """What a job is.

    ``min_nodes`` to ``max_nodes`` nodes with ``nproc_per_node`` workers each. Times are in
    seconds: ``monitor_interval`` (longest time between two looks at the workers),
    ``shutdown_timeout`` (how long workers may take to leave; default:
    ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` or 30), ``exit_barrier_timeout`` (how long a node that
    is done waits for the others; default: ``TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT`` or 300),
    ``rdzv_timeout`` (old name of ``rdzv_configs["timeout"]``, 900).
    ``start_method`` is spawn, fork or forkserver, for functions. ``logs_specs`` says where
    output goes (default: to the console). ``run_id`` names the job; empty: a random one.

    Raises ``ValueError`` for a time below zero.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    exit_barrier_timeout: float | None = None

    def __post_init__(self) -> None:
        # A copy: the dictionary may be shared by several configurations.
        self.rdzv_configs = dict(self.rdzv_configs)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _DEFAULT_RDZV_TIMEOUT)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _shutdown_timeout_of_environment()
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")
        self.exit_barrier_timeout = _resolve_exit_barrier_timeout(self.exit_barrier_timeout)
        if self.exit_barrier_timeout < 0:
            raise ValueError(
                f"exit_barrier_timeout must be non-negative, got {self.exit_barrier_timeout}"
            )


def _shutdown_timeout_of_environment() -> int:
    text = os.environ.get(_SHUTDOWN_VARIABLE) or "30"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{_SHUTDOWN_VARIABLE} must be whole seconds, got {text!r}")


class elastic_launch:
    """``elastic_launch(config, entrypoint)(*args)`` runs the job.

    It returns what the workers of this node returned, by global rank.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(
            self._config,
            self._entrypoint,
            list(args),
            health_check_server=self._health_check_server,
        )


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """The name of a function; of a program its path, or its script if it is this Python."""
    if entrypoint is None:
        return ""
    if not isinstance(entrypoint, str):
        name = getattr(entrypoint, "__name__", None)
        return str(name) if name else type(entrypoint).__name__
    if entrypoint != sys.executable:
        return entrypoint
    return next((str(arg) for arg in args if str(arg) and not str(arg).startswith("-")), "")


def _get_addr_and_port(
    rdzv_parameters: RendezvousParameters,
) -> tuple[str | None, int | None]:
    """The master's address when it is known beforehand (backend ``static``)."""
    if rdzv_parameters.backend != "static":
        return None, None
    endpoint = (rdzv_parameters.endpoint or "").strip()
    if not endpoint:
        raise ValueError(
            "Endpoint is missing in endpoint. Try to add --master-addr and --master-port"
        )
    host, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if port == -1:
        raise ValueError(f"port is missing in endpoint: {endpoint}. Try to specify --master-port")
    return host, port


def rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    """What the rendezvous handler of a configuration is made from."""
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def worker_spec(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> WorkerSpec:
    """The specification of a configuration's workers, with a new rendezvous handler."""
    parameters = rendezvous_parameters(config)
    master_addr, master_port = _get_addr_and_port(parameters)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run a job's part on this node; what its workers returned, by global rank.

    Works from any thread; off the main thread no signal handlers are installed. Exports
    ``TORCHELASTIC_SIGNALS_TO_HANDLE`` for the workers' start, and gives ``config`` a run id if
    it has none.

    Raises :class:`ChildFailedError` when workers failed, ``SignalException`` when a signal ended
    it, ``ValueError`` for a configuration that makes no sense, and what rendezvous and start
    raise.
    """
    if not config.run_id:
        import uuid

        config.run_id = str(uuid.uuid4().int)
        logger.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    name = _get_entrypoint_name(entrypoint, args)
    logger.info("Starting %s with launch configs: %s", name, config)

    os.environ[_SIGNALS_VARIABLE] = config.signals_to_handle
    spec = worker_spec(config, entrypoint, args)
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,  # type: ignore[arg-type]
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        exit_barrier_timeout=config.exit_barrier_timeout,
        shutdown_timeout=config.shutdown_timeout,  # type: ignore[arg-type]
        health_check_server=health_check_server,
    )
    if health_check_server is not None:
        callback = health_check_server.alive_callback
        if isinstance(callback, _AliveCallbackProxy):
            callback.set_delegate(agent._get_alive_time)
    return run_agent(
        agent,
        name=name,
        rdzv_handler=spec.rdzv_handler,
        event_log_handler=config.event_log_handler,
        metrics_cfg=config.metrics_cfg,
    )


def run_agent(
    agent: SimpleElasticAgent,
    *,
    name: str,
    rdzv_handler: RendezvousHandler,
    event_log_handler: str = "null",
    metrics_cfg: dict[str, str] | None = None,
) -> dict[int, Any]:
    """Run an agent, record its last event, shut its rendezvous down; as :func:`launch_agent`.

    After a ``SignalException`` the rendezvous is left open: other nodes go on. A failure
    to shut it down is logged and hides nothing.
    """
    shut_down = True
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(metrics_cfg))
        result = agent.run()
        events.record(agent.get_event_succeeded(), event_log_handler)
        if result is None:  # an agent of another make, not needed by its rendezvous
            return {}
        if result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures or _unexplained())
        return result.return_values
    except Exception as error:
        if is_named(error, "ChildFailedError"):
            raise
        if is_signal(error):
            shut_down = False
        events.record(agent.get_event_failed(), event_log_handler)
        raise
    finally:
        if shut_down:
            try:
                rdzv_handler.shutdown()
            except Exception as error:
                if is_signal(error):
                    raise
                logger.warning("the rendezvous could not be shut down", exc_info=True)


def _unexplained() -> dict[int, ProcessFailure]:
    """A failure for an agent that says its workers failed, but not which."""
    failure = ProcessFailure(local_rank=-1, pid=0, exitcode=1, error_file="")
    failure.message = "the agent reported failed workers, but not which of them, nor why"
    return {-1: failure}
