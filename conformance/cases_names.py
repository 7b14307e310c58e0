"""Names, shapes, defaults: what a program that only reads the interface relies on."""

from __future__ import annotations

import abc
import inspect
from typing import Any

from harness import (
    Impl,
    case,
    fields,
    outcome,
    plain,
    quiet_warnings,
    raised,
    signature,
    worker_spec,
)

PUBLIC = {
    "elastic.agent.server": "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup"
    " WorkerSpec WorkerState TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE",
    "elastic.agent.server.api": "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup"
    " WorkerSpec WorkerState DEFAULT_ROLE _TERMINAL_STATE_SYNC_ID _RoleInstanceInfo"
    " _get_fq_hostname put_metric record store_util",
    "elastic.agent.server.local_elastic_agent": "LocalElasticAgent TORCHELASTIC_ENABLE_FILE_TIMER"
    " TORCHELASTIC_TIMER_FILE TORCHELASTIC_HEALTH_CHECK_PORT"
    " TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT _AliveCallbackProxy"
    " _resolve_uninterruptible_state_timeout start_processes read_proc_state",
    "elastic.agent.server.health_check_server": "HealthCheckServer create_healthcheck_server log",
    "elastic.timer": "configure expires TimerClient TimerRequest TimerServer FileTimerClient"
    " FileTimerRequest FileTimerServer LocalTimerClient LocalTimerServer",
    "elastic.timer.api": "RequestQueue TimerClient TimerRequest TimerServer configure expires",
    "elastic.timer.local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    "elastic.timer.file_based_local_timer": "FileTimerClient FileTimerRequest FileTimerServer"
    " log_debug_info_for_expired_timers",
    "elastic.timer.debug_info_logging": "log_debug_info_for_expired_timers",
    "elastic.multiprocessing": "start_processes MultiprocessContext SubprocessContext PContext"
    " ProcessFailure RunProcsResult SignalException Std LogsDest LogsSpecs DefaultLogsSpecs to_map",
    "elastic.multiprocessing.api": "start_processes MultiprocessContext SubprocessContext PContext"
    " RunProcsResult SignalException Std LogsDest LogsSpecs DefaultLogsSpecs to_map get_std_cm"
    " _validate_full_rank _wrap _terminate_process_handler threading signal logger IS_WINDOWS",
    "elastic.multiprocessing.errors": "ProcessFailure ChildFailedError record ErrorHandler"
    " get_error_handler",
    "elastic.multiprocessing.errors.error_handler": "ErrorHandler",
    "elastic.multiprocessing.errors.handlers": "get_error_handler",
    "elastic.multiprocessing.redirects": "redirect redirect_stdout redirect_stderr",
    "elastic.multiprocessing.tail_log": "tail_logfile TailLog",
    "elastic.multiprocessing.subprocess_handler": "SubprocessHandler get_subprocess_handler",
    "elastic.rendezvous": "RendezvousClosedError RendezvousConnectionError RendezvousError"
    " RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator"
    " RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousStateError"
    " RendezvousStoreInfo RendezvousTimeoutError rendezvous_handler_registry",
    "elastic.rendezvous.api": "RendezvousClosedError RendezvousConnectionError RendezvousError"
    " RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator"
    " RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousStateError"
    " RendezvousStoreInfo RendezvousTimeoutError rendezvous_handler_registry",
    "elastic.rendezvous.registry": "get_rendezvous_handler",
    "elastic.rendezvous.utils": "parse_rendezvous_endpoint",
    "elastic.events": "Event EventSource EventMetadataValue NodeState RdzvEvent record"
    " record_rdzv_event construct_and_record_rdzv_event get_logging_handler",
    "elastic.metrics": "configure getStream put_metric publish_metric prof profile"
    " get_elapsed_time_ms MetricData MetricHandler MetricsConfig ConsoleMetricHandler"
    " NullMetricHandler initialize_metrics",
    "elastic.metrics.api": "configure getStream put_metric prof MetricData MetricHandler",
    "elastic.utils.store": "store_timeout get_all synchronize barrier",
    "elastic.utils": "get_env_variable_or_raise get_socket_with_port macros",
    "elastic.utils.distributed": "get_free_port",
    "elastic.utils.logging": "get_logger",
    "elastic.utils.process_state": "read_proc_state is_uninterruptible_state",
    "elastic.control_plane": "worker_main",
    "launcher": "LaunchConfig elastic_launch launch_agent",
    "launcher.api": "LaunchConfig elastic_launch launch_agent _get_entrypoint_name"
    " _get_addr_and_port rdzv_registry LocalElasticAgent",
}

SIGNATURES = """
elastic.agent.server:WorkerSpec
elastic.agent.server:WorkerSpec.get_entrypoint_name
elastic.agent.server:Worker
elastic.agent.server:WorkerGroup
elastic.agent.server:RunResult
elastic.agent.server:RunResult.is_failed
elastic.agent.server:WorkerState.is_running
elastic.agent.server:ElasticAgent.run
elastic.agent.server:ElasticAgent.get_worker_group
elastic.agent.server:SimpleElasticAgent
elastic.agent.server:SimpleElasticAgent.run
elastic.agent.server:SimpleElasticAgent.get_worker_group
elastic.agent.server:SimpleElasticAgent._start_workers
elastic.agent.server:SimpleElasticAgent._stop_workers
elastic.agent.server:SimpleElasticAgent._monitor_workers
elastic.agent.server:SimpleElasticAgent._shutdown
elastic.agent.server:SimpleElasticAgent._rendezvous
elastic.agent.server:SimpleElasticAgent._assign_worker_ranks
elastic.agent.server:SimpleElasticAgent._initialize_workers
elastic.agent.server:SimpleElasticAgent._restart_workers
elastic.agent.server:SimpleElasticAgent._invoke_run
elastic.agent.server:SimpleElasticAgent._exit_barrier
elastic.agent.server:SimpleElasticAgent._record_metrics
elastic.agent.server:SimpleElasticAgent._record_metric_with_condition
elastic.agent.server:SimpleElasticAgent._record_flakiness_metric
elastic.agent.server:SimpleElasticAgent._record_worker_events
elastic.agent.server:SimpleElasticAgent._get_worker_state
elastic.agent.server:SimpleElasticAgent.record_duration
elastic.agent.server:SimpleElasticAgent._construct_event
elastic.agent.server:SimpleElasticAgent.get_event_failed
elastic.agent.server:SimpleElasticAgent.get_event_succeeded
elastic.agent.server.local_elastic_agent:LocalElasticAgent
elastic.agent.server.local_elastic_agent:LocalElasticAgent._setup_local_watchdog
elastic.agent.server.local_elastic_agent:LocalElasticAgent._setup_healthcheck
elastic.agent.server.local_elastic_agent:LocalElasticAgent._get_fq_hostname
elastic.agent.server.local_elastic_agent:LocalElasticAgent._get_alive_time
elastic.agent.server.local_elastic_agent:LocalElasticAgent._log_watchdog_event
elastic.agent.server.local_elastic_agent:LocalElasticAgent._set_local_rank_env
elastic.agent.server.local_elastic_agent:LocalElasticAgent._check_uninterruptible_state_timeout
elastic.agent.server.local_elastic_agent:LocalElasticAgent._update_uninterruptible_dwell
elastic.agent.server.local_elastic_agent:LocalElasticAgent._shutdown
elastic.agent.server.health_check_server:HealthCheckServer
elastic.agent.server.health_check_server:create_healthcheck_server
elastic.timer:configure
elastic.timer:expires
elastic.timer:TimerRequest
elastic.timer:TimerClient.acquire
elastic.timer:TimerClient.release
elastic.timer:TimerServer
elastic.timer:FileTimerClient
elastic.timer:FileTimerClient.acquire
elastic.timer:FileTimerClient.release
elastic.timer:FileTimerRequest
elastic.timer:FileTimerServer
elastic.timer:FileTimerServer.register_timers
elastic.timer:FileTimerServer.clear_timers
elastic.timer:FileTimerServer.get_expired_timers
elastic.timer:FileTimerServer.run_once
elastic.timer:FileTimerServer.is_process_running
elastic.timer:FileTimerServer._reap_worker
elastic.timer:FileTimerServer.get_last_progress_time
elastic.timer:LocalTimerClient
elastic.timer:LocalTimerServer
elastic.timer.debug_info_logging:log_debug_info_for_expired_timers
elastic.multiprocessing:start_processes
elastic.multiprocessing:PContext
elastic.multiprocessing:PContext.start
elastic.multiprocessing:PContext.wait
elastic.multiprocessing:PContext.pids
elastic.multiprocessing:PContext.close
elastic.multiprocessing:MultiprocessContext
elastic.multiprocessing:SubprocessContext
elastic.multiprocessing:RunProcsResult
elastic.multiprocessing:SignalException
elastic.multiprocessing:Std.from_str
elastic.multiprocessing:LogsDest
elastic.multiprocessing:LogsSpecs
elastic.multiprocessing:LogsSpecs.reify
elastic.multiprocessing:DefaultLogsSpecs
elastic.multiprocessing:DefaultLogsSpecs.reify
elastic.multiprocessing:to_map
elastic.multiprocessing.api:get_std_cm
elastic.multiprocessing.api:_wrap
elastic.multiprocessing.api:_validate_full_rank
elastic.multiprocessing.api:_terminate_process_handler
elastic.multiprocessing.errors:ProcessFailure
elastic.multiprocessing.errors:ProcessFailure.signal_name
elastic.multiprocessing.errors:ProcessFailure.timestamp_isoformat
elastic.multiprocessing.errors:ChildFailedError
elastic.multiprocessing.errors:ChildFailedError.get_first_failure
elastic.multiprocessing.errors:ChildFailedError.format_msg
elastic.multiprocessing.errors:record
elastic.multiprocessing.errors:get_error_handler
elastic.multiprocessing.errors:ErrorHandler.initialize
elastic.multiprocessing.errors:ErrorHandler.record_exception
elastic.multiprocessing.errors:ErrorHandler._write_error_file
elastic.multiprocessing.errors:ErrorHandler.override_error_code_in_rootcause_data
elastic.multiprocessing.errors:ErrorHandler.dump_error_file
elastic.multiprocessing.errors:ErrorHandler._rm
elastic.multiprocessing.redirects:redirect
elastic.multiprocessing.redirects:redirect_stdout
elastic.multiprocessing.redirects:redirect_stderr
elastic.multiprocessing.tail_log:TailLog
elastic.multiprocessing.tail_log:tail_logfile
elastic.multiprocessing.subprocess_handler:SubprocessHandler
elastic.multiprocessing.subprocess_handler:SubprocessHandler.close
elastic.multiprocessing.subprocess_handler:get_subprocess_handler
elastic.rendezvous:RendezvousInfo
elastic.rendezvous:RendezvousStoreInfo
elastic.rendezvous:RendezvousStoreInfo.build
elastic.rendezvous:RendezvousParameters
elastic.rendezvous:RendezvousParameters.get
elastic.rendezvous:RendezvousParameters.get_as_bool
elastic.rendezvous:RendezvousParameters.get_as_int
elastic.rendezvous:RendezvousHandlerRegistry.register
elastic.rendezvous:RendezvousHandlerRegistry.create_handler
elastic.rendezvous.registry:get_rendezvous_handler
elastic.events:Event
elastic.events:Event.deserialize
elastic.events:Event.serialize
elastic.events:RdzvEvent
elastic.events:record
elastic.events:record_rdzv_event
elastic.events:construct_and_record_rdzv_event
elastic.events:get_logging_handler
elastic.metrics:configure
elastic.metrics:getStream
elastic.metrics:put_metric
elastic.metrics:prof
elastic.metrics:MetricData
elastic.metrics:MetricsConfig
elastic.metrics:initialize_metrics
elastic.metrics:get_elapsed_time_ms
elastic.utils.store:store_timeout
elastic.utils.store:get_all
elastic.utils.store:synchronize
elastic.utils.store:barrier
elastic.utils:get_env_variable_or_raise
elastic.utils:get_socket_with_port
elastic.utils.distributed:get_free_port
elastic.utils.logging:get_logger
elastic.utils.process_state:read_proc_state
elastic.utils.process_state:is_uninterruptible_state
launcher:LaunchConfig
launcher:elastic_launch
launcher:launch_agent
launcher.api:_get_entrypoint_name
launcher.api:_get_addr_and_port
""".split()

DATACLASSES = """
elastic.agent.server:WorkerSpec elastic.agent.server:RunResult elastic.multiprocessing:LogsDest
elastic.multiprocessing:RunProcsResult elastic.multiprocessing:ProcessFailure
elastic.events:Event elastic.events:RdzvEvent elastic.rendezvous:RendezvousStoreInfo
launcher:LaunchConfig
""".split()


def _there(impl: Impl, module: str, names: str) -> Any:
    try:
        found = impl.mod(module)
    except ModuleNotFoundError as error:
        return {"module": f"missing: {type(error).__name__}"}
    return {"missing": [n for n in names.split() if not hasattr(found, n)]}


@case("T0.names")
def names(impl: Impl) -> Any:
    """Every public name and patch point of section 0 exists where it should."""
    return {module: _there(impl, module, listed) for module, listed in PUBLIC.items()}


@case("T0.not_exported")
def not_exported(impl: Impl) -> Any:
    """What the server package does not export."""
    return {
        n: hasattr(impl.server, n)
        for n in ("LocalElasticAgent", "HealthCheckServer", "create_healthcheck_server")
    }


@case("T0.signatures")
def signatures(impl: Impl) -> Any:
    """Parameters with names, kinds and defaults."""

    def one(path: str) -> Any:
        try:
            return signature(impl.get(path))
        except (AttributeError, ModuleNotFoundError) as error:
            return f"missing: {type(error).__name__}"

    return {path.replace(".", "/"): one(path) for path in SIGNATURES}


@case("T0.dataclass_fields")
def dataclass_fields(impl: Impl) -> Any:
    """Fields in order, with defaults."""
    return {path.replace(".", "/"): fields(impl.get(path)) for path in DATACLASSES}


@case("T0.abstract")
def abstract(impl: Impl) -> Any:
    """Which methods a subclass must write."""

    def of(path: str) -> list[str]:
        return sorted(getattr(impl.get(path), "__abstractmethods__", ()))

    return {
        path.rpartition(":")[2]: of(path)
        for path in (
            "elastic.agent.server:ElasticAgent",
            "elastic.agent.server:SimpleElasticAgent",
            "elastic.agent.server.local_elastic_agent:LocalElasticAgent",
            "elastic.multiprocessing:PContext",
            "elastic.multiprocessing:LogsSpecs",
            "elastic.multiprocessing:DefaultLogsSpecs",
            "elastic.rendezvous:RendezvousHandler",
            "elastic.timer:TimerClient",
            "elastic.timer:TimerServer",
            "elastic.timer.api:RequestQueue",
            "elastic.metrics:MetricHandler",
        )
    }


@case("T0.kin")
def kin(impl: Impl) -> Any:
    """Which class derives from which."""
    pairs = {
        "SimpleElasticAgent<ElasticAgent": (impl.api.SimpleElasticAgent, impl.api.ElasticAgent),
        "LocalElasticAgent<Simple": (impl.local.LocalElasticAgent, impl.api.SimpleElasticAgent),
        "ElasticAgent<ABC": (impl.api.ElasticAgent, abc.ABC),
        "WorkerState<str": (impl.api.WorkerState, str),
        "SignalException<Exception": (impl.mp.SignalException, Exception),
        "Closed<Error": (impl.rdzv.RendezvousClosedError, impl.rdzv.RendezvousError),
        "Timeout<Error": (impl.rdzv.RendezvousTimeoutError, impl.rdzv.RendezvousError),
        "Connection<Error": (impl.rdzv.RendezvousConnectionError, impl.rdzv.RendezvousError),
        "State<Error": (impl.rdzv.RendezvousStateError, impl.rdzv.RendezvousError),
        "Graceful<Error": (impl.rdzv.RendezvousGracefulExitError, impl.rdzv.RendezvousError),
        "RendezvousError<Exception": (impl.rdzv.RendezvousError, Exception),
        "ChildFailedError<Exception": (impl.errors.ChildFailedError, Exception),
        "FileTimerClient<TimerClient": (impl.timer.FileTimerClient, impl.timer.TimerClient),
        "LocalTimerServer<TimerServer": (impl.timer.LocalTimerServer, impl.timer.TimerServer),
        "DefaultLogsSpecs<LogsSpecs": (impl.mp.DefaultLogsSpecs, impl.mp.LogsSpecs),
        "SubprocessContext<PContext": (impl.mp.SubprocessContext, impl.mp.PContext),
        "MultiprocessContext<PContext": (impl.mp.MultiprocessContext, impl.mp.PContext),
        "Console<MetricHandler": (
            impl.get("elastic.metrics:ConsoleMetricHandler"),
            impl.get("elastic.metrics:MetricHandler"),
        ),
    }
    return {name: issubclass(a, b) for name, (a, b) in pairs.items()}


@case("T0.constants")
def constants(impl: Impl) -> Any:
    """Values of the constants."""
    return {
        "file_timer": impl.server.TORCHELASTIC_ENABLE_FILE_TIMER,
        "timer_file": impl.server.TORCHELASTIC_TIMER_FILE,
        "health": impl.local.TORCHELASTIC_HEALTH_CHECK_PORT,
        "dstate": impl.local.TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
        "role": impl.api.DEFAULT_ROLE,
        "terminal": impl.api._TERMINAL_STATE_SYNC_ID,
        "addr_key": impl.rdzv.RendezvousStoreInfo.MASTER_ADDR_KEY,
        "port_key": impl.rdzv.RendezvousStoreInfo.MASTER_PORT_KEY,
    }


@case("T0.torch_not_imported")
def torch_not_imported(impl: Impl) -> Any:
    """Whether using the agent brings in torch."""
    import sys

    for module in PUBLIC:
        if not module.startswith("run"):
            impl.mod(module)
    return {"torch imported": "torch" in sys.modules}


@case("T1.enums")
def enums(impl: Impl) -> Any:
    """Enum members, values, and what counts as running."""
    state = impl.server.WorkerState
    events = impl.mod("elastic.events")
    std = impl.mp.Std
    return {
        "states": {s.name: s.value for s in state},
        "running": {s.name: state.is_running(s) for s in state},
        "str": [
            str(state.HEALTHY),
            repr(state.HEALTHY),
            f"{state.HEALTHY}",
            state.HEALTHY == "HEALTHY",
        ],
        "sources": {s.name: s.value for s in events.EventSource},
        "nodes": {s.name: s.value for s in events.NodeState},
        "std": {s.name: int(s) for s in std},
        "std_or": int(std.OUT | std.ERR),
        "std_repr": [repr(std.NONE), str(std.OUT)],
        "std_in": [std.OUT in std.ALL, bool(std.NONE)],
    }


@case("T2.worker_group")
def worker_group(impl: Impl) -> Any:
    """Worker and WorkerGroup as built."""
    group = impl.server.WorkerGroup(worker_spec(impl, local_world_size=4))
    worker = impl.server.Worker(2, 5, 1, 9, 4)
    fresh = impl.server.Worker(0)
    return {
        "state": group.state.name,
        "local": [w.local_rank for w in group.workers],
        "global": {w.global_rank for w in group.workers},
        "world": {w.world_size for w in group.workers},
        "ids": [w.id for w in group.workers],
        "rest": [
            group.group_rank,
            group.group_world_size,
            group.store,
            group.master_addr,
            group.master_port,
        ],
        "str": str(worker),
        "repr": repr(worker),
        "fresh": [str(fresh), fresh.id, fresh.role_rank, fresh.role_world_size],
        "equal": impl.server.Worker(1) == impl.server.Worker(1),
        "slots": [sorted(impl.server.Worker.__slots__), sorted(impl.server.WorkerGroup.__slots__)],
        "extra attribute": raised(lambda: setattr(worker, "colour", 1)),
    }


@case("T3.worker_spec")
def spec_checks(impl: Impl) -> Any:
    """What WorkerSpec refuses."""

    def f() -> None: ...

    with quiet_warnings() as seen:
        with_fn = worker_spec(impl, entrypoint=None, fn=f)
        both = worker_spec(impl, entrypoint="echo", fn=f)
    return {
        "fn": [with_fn.entrypoint is f, both.entrypoint is f, [w.category.__name__ for w in seen]],
        "no workers": outcome(lambda: worker_spec(impl, local_world_size=0)),
        "negative": outcome(lambda: worker_spec(impl, local_world_size=-1)),
        "interval": outcome(lambda: worker_spec(impl, monitor_interval=0)),
        "no entrypoint": outcome(lambda: worker_spec(impl, entrypoint=None)),
        "restarts unchecked": outcome(lambda: worker_spec(impl, max_restarts=-1).max_restarts),
        "names": [
            worker_spec(impl, entrypoint="/bin/echo").get_entrypoint_name(),
            worker_spec(impl, entrypoint=f).get_entrypoint_name().rpartition(".")[2],
        ],
        "mutable": outcome(lambda: setattr(worker_spec(impl), "role", "x")),
    }


@case("T3.run_result")
def run_result(impl: Impl) -> Any:
    """RunResult: defaults and is_failed over all states."""
    state, result = impl.server.WorkerState, impl.server.RunResult
    return {
        "failed": {s.name: result(s).is_failed() for s in state},
        "defaults": [result(state.INIT).return_values, result(state.INIT).failures],
        "repr": repr(result(state.INIT)),
        "equal": result(state.INIT) == result(state.INIT),
        "procs": [
            impl.mp.RunProcsResult().is_failed(),
            impl.mp.RunProcsResult(failures={0: 1}).is_failed(),
            repr(impl.mp.RunProcsResult()),
        ],
    }


@case("T4.role_info")
def role_info(impl: Impl) -> Any:
    """The record each agent tells the others."""
    info = impl.api._RoleInstanceInfo
    one = info("role", 1, 10)
    back = info.deserialize(one.serialize())
    roles = [
        info(r, i, 1)
        for i, r in enumerate(["parameter_server", "trainer", "trainer", "trainer", "reader"])
    ]
    odd = [info("a", 1, 1), info("b", 2, 1), info("a", 3, 1)]
    return {
        "bytes": one.serialize(),
        "type": type(one.serialize()).__name__,
        "back": [back.role, back.rank, back.local_world_size],
        "compare": [
            info.compare(info("r", 2, 1), info("r", 1, 1)),
            info.compare(info("r", 1, 1), info("r", 4, 1)),
            info.compare(info("r1", 1, 1), info("r2", 1, 1)),
            info.compare(info("r2", 1, 1), info("r1", 1, 1)),
        ],
        "bounds": [
            info.find_role_boundaries(roles, "trainer"),
            info.find_role_boundaries(roles, "reader"),
            info.find_role_boundaries(roles, "nobody"),
            info.find_role_boundaries(odd, "a"),
        ],
    }


@case("T0.reprs")
def reprs(impl: Impl) -> Any:
    """How things show themselves."""
    from harness import folder, normal

    rdzv = impl.rdzv
    with folder() as d:
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.OUT)
        same = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.OUT)
        other = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.ERR)
        shown = {
            "logs": normal(repr(logs), {str(d): "<DIR>"}),
            "logs ==": [logs == same, logs == other, logs == 1],
            "store_info": repr(rdzv.RendezvousStoreInfo("h", 1)),
            "metric": repr(impl.get("elastic.metrics:MetricData")(0, "g", "n", 1)),
            "event": str(
                impl.get("elastic.events:Event")("n", impl.get("elastic.events:EventSource").AGENT)
            ),
            "timer_request": [
                impl.timer.TimerRequest("w", "s", 1.0) == impl.timer.TimerRequest("w", "s", 1.0),
                [
                    getattr(impl.timer.TimerRequest("w", "s", 1.0), n)
                    for n in ("worker_id", "scope_id", "expiration_time")
                ],
                impl.timer.FileTimerRequest(1, "s", 1.0, 9)
                == impl.timer.FileTimerRequest(1, "s", 1.0, 9),
            ],
        }
    params = inspect.signature(rdzv.RendezvousParameters).parameters
    shown["parameters"] = list(params)
    signal_error = impl.mp.SignalException("text", 15)
    shown["signal"] = [str(signal_error), plain(signal_error.sigval)]
    return shown
