"""LaunchConfig, elastic_launch, launch_agent (T26, T135 to T143)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import entrypoints
from cases_errors import recorded
from cases_local import failure
from harness import (
    Impl,
    brief,
    case,
    env,
    events_of,
    folder,
    metrics_of,
    outcome,
    plain,
    quiet_warnings,
    raised,
    until,
)


def config(impl: Impl, **options: Any) -> Any:
    values: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 1,
        "run_id": "job",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_configs": {"is_host": True, "join_timeout": 20},
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "start_method": "fork",
        "local_addr": "127.0.0.1",
    }
    values.update(options)
    return impl.launcher.LaunchConfig(**values)


def launch(impl: Impl, entrypoint: Any, *args: Any, **options: Any) -> Any:
    return outcome(lambda: impl.launcher.elastic_launch(config(impl, **options), entrypoint)(*args))


@case("T143.config")
def launch_config(impl: Impl) -> Any:
    """LaunchConfig after construction, and what it refuses."""
    make = impl.launcher.LaunchConfig
    default = make(1, 2, 3)
    given = {"a": 1}
    timed = make(1, 1, 1, rdzv_timeout=5, rdzv_configs=given)
    with env(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600"):
        by_env, explicit = make(1, 1, 1), make(1, 1, 1, shutdown_timeout=120)
    with env(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x"):
        bad = raised(lambda: make(1, 1, 1))
    try:
        make(1, 1, 1, shutdown_timeout=-5)
    except ValueError as error:
        negative = "shutdown_timeout must be non-negative" in str(error)
    return {
        "configs": [default.rdzv_configs, timed.rdzv_configs],
        "caller's dict": given,
        "own timeout kept": make(1, 1, 1, rdzv_configs={"timeout": 7}).rdzv_configs,
        "logs": type(default.logs_specs).__name__,
        "shutdown": [default.shutdown_timeout, by_env.shutdown_timeout, explicit.shutdown_timeout],
        "zero": make(1, 1, 1, shutdown_timeout=0).shutdown_timeout,
        "bad env": bad,
        "negative": negative,
        "numa": default.numa_options,
        "nodes unchecked": raised(lambda: make(0, -1, 0)),
        "keywords only needed": raised(lambda: make(1, 1)),
    }


@case("T139.launch_functions")
def functions(impl: Impl) -> Any:
    """elastic_launch with functions."""
    return {
        "values": launch(impl, entrypoints.local_rank, nproc_per_node=2),
        "arguments": launch(impl, entrypoints.echo, {"a": [1, 2]}),
        "nothing": launch(impl, entrypoints.nothing),
        "keywords": raised(
            lambda: impl.launcher.elastic_launch(config(impl), entrypoints.echo)(value=1)
        ),
    }


@case("T139.launch_scripts")
def scripts(impl: Impl) -> Any:
    """elastic_launch with programs."""
    with folder() as d:
        seen = launch(
            impl, "/bin/sh", "-c", f"echo $RANK $WORLD_SIZE > {d}/$RANK", nproc_per_node=2
        )
        found = {p.name: p.read_text() for p in sorted(d.iterdir())}
    return {"end": seen, "found": found}


@case("T46.child_failed_error")
def child_failed(impl: Impl) -> Any:
    """A failing job: ChildFailedError with name and failures."""

    def of(entrypoint: Any, *args: Any, **options: Any) -> Any:
        try:
            impl.launcher.elastic_launch(config(impl, **options), entrypoint)(*args)
        except impl.errors.ChildFailedError as error:
            return {
                "name": error.name,
                "failures": {str(r): failure(f) for r, f in sorted(error.failures.items())},
                "first": error.get_first_failure()[0],
            }
        return "no error"

    return {
        "function": of(entrypoints.fail, "oh no"),
        "program": of("/bin/sh", "-c", "exit 7"),
        "signal": of(sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"),
        "python": of(sys.executable, "-S", "-c", "import sys; sys.exit(3)"),
        "restarts": of(entrypoints.fail, max_restarts=2),
    }


@case("T46.agent_error_file")
def agent_error_file(impl: Impl) -> Any:
    """Under record, the agent's own error file is the root's."""

    def failing() -> None:
        impl.launcher.elastic_launch(config(impl, nproc_per_node=2), entrypoints.fail)("oh no")

    return recorded(impl, failing)


@case("T102.events")
def events(impl: Impl) -> Any:
    """Events of whole launches, in order."""
    shown = {}
    with events_of(impl) as seen:
        launch(impl, entrypoints.nothing, nproc_per_node=2)
    shown["good"] = [brief(e) for e in seen]
    with events_of(impl) as bad:
        launch(impl, "/bin/sh", "-c", "exit 3")
    shown["failed"] = [brief(e) for e in bad]
    with events_of(impl) as broken:
        launch(impl, "/does/not/exist")
    shown["broken"] = [brief(e) for e in broken]
    final = seen[-1]["metadata"] if seen else {}
    shown["last"] = [
        final.get("run_id"),
        final.get("rdzv_backend"),
        final.get("role"),
        json.loads(final["metadata"]) if final else None,
    ]
    return shown


@case("T102.event_patch")
def event_patch(impl: Impl) -> Any:
    """The launcher calls events.record by module; once with the end of the agent."""
    target = impl.module_name("elastic.events") + ".record"
    with mock.patch(target) as record:
        launch(impl, entrypoints.nothing)
        good = [[c.args[0].name, *map(str, c.args[1:])] for c in record.call_args_list]
    return [good[-1], len(good)]


@case("T102.agent_raises")
def agent_raises(impl: Impl) -> Any:
    """An exception of the agent: comes out, one FAILED event, rendezvous shut down or not."""
    shown = {}
    local = impl.launcher.LocalElasticAgent
    for label, error in (
        ("exception", MemoryError("x")),
        ("signal", impl.mp.SignalException("stop", signal.SIGTERM)),
        ("interrupt", KeyboardInterrupt()),
    ):
        with (
            mock.patch.object(local, "run", side_effect=error),
            mock.patch(
                impl.module_name("launcher.api") + ".rdzv_registry.get_rendezvous_handler"
            ) as get,
            events_of(impl) as seen,
        ):
            get.return_value.get_backend.return_value = "b"
            get.return_value.get_run_id.return_value = "r"
            what = launch(impl, entrypoints.nothing)
            shutdowns = get.return_value.shutdown.call_count
        shown[label] = {"outcome": what, "events": [brief(e) for e in seen], "shutdowns": shutdowns}
    return shown


@case("T139.shutdown_of_rendezvous")
def shutdown_of_rendezvous(impl: Impl) -> Any:
    """The handler is shut down once on success; its failure does not hide what failed."""
    local = impl.launcher.LocalElasticAgent
    result = impl.server.RunResult(impl.server.WorkerState.SUCCEEDED, {0: 5})
    bad = impl.server.RunResult(
        impl.server.WorkerState.FAILED,
        failures={0: impl.errors.ProcessFailure(0, 997, 3, "<N/A>")},
    )
    shown = {}
    for label, end, side in (
        ("good", result, None),
        ("good, shutdown fails", result, OSError("no")),
        ("bad, shutdown fails", bad, OSError("no")),
    ):
        with (
            mock.patch.object(local, "run", return_value=end),
            mock.patch(
                impl.module_name("launcher.api") + ".rdzv_registry.get_rendezvous_handler"
            ) as get,
        ):
            get.return_value.get_backend.return_value = "b"
            get.return_value.get_run_id.return_value = "r"
            get.return_value.shutdown.side_effect = side
            what = launch(impl, entrypoints.nothing)
            shown[label] = [what, get.return_value.shutdown.call_count]
    return shown


@case("T26.graceful")
def graceful(impl: Impl) -> Any:
    """An agent that was told to leave (run() returns None)."""
    error = impl.rdzv.RendezvousGracefulExitError()
    with mock.patch(
        impl.module_name("launcher.api") + ".rdzv_registry.get_rendezvous_handler"
    ) as get:
        get.return_value.get_backend.return_value = "b"
        get.return_value.get_run_id.return_value = "r"
        get.return_value.next_rendezvous.side_effect = error
        return launch(impl, entrypoints.nothing)


@case("T15.unhealthy_end")
def unhealthy(impl: Impl) -> Any:
    """A group that ended unhealthy."""
    result = impl.server.RunResult(impl.server.WorkerState.UNHEALTHY)
    with mock.patch.object(
        impl.launcher.LocalElasticAgent, "_monitor_workers", return_value=result
    ):
        seen = launch(impl, entrypoints.nothing)
    return {"success": "returned" in seen}


@case("T142.signals_variable")
def signals_variable(impl: Impl) -> Any:
    """TORCHELASTIC_SIGNALS_TO_HANDLE as workers see it."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    shown = {}
    for label, options in (("default", {}), ("own", {"signals_to_handle": "SIGTERM,SIGUSR1"})):
        with env(**{name: None}):
            shown[label] = [
                launch(impl, entrypoints.variables, name, **options),
                os.environ.get(name),
            ]
    return shown


@case("T142.what_the_agent_is_given")
def agent_given(impl: Impl) -> Any:
    """The LocalElasticAgent that launch_agent makes."""
    target = impl.module_name("launcher.api") + ".LocalElasticAgent"
    with (
        mock.patch(target) as agent,
        mock.patch(
            impl.module_name("launcher.api") + ".rdzv_registry.get_rendezvous_handler"
        ) as get,
    ):
        agent.return_value.run.return_value.is_failed.return_value = False
        agent.return_value.run.return_value.return_values = {0: 1}
        seen = launch(
            impl,
            entrypoints.nothing,
            3,
            nproc_per_node=4,
            role="reader",
            max_restarts=9,
            shutdown_timeout=77,
            log_line_prefix_template="t",
            virtual_local_rank=True,
            duplicate_stdout_filters=["x"],
            event_log_handler="console",
        )
    kwargs = agent.call_args.kwargs
    spec = kwargs.pop("spec")
    params = get.call_args.args[0]
    logs = kwargs.pop("logs_specs")
    return {
        "end": seen,
        "positional": len(agent.call_args.args),
        "keywords": plain(
            {
                k: v
                for k, v in sorted(kwargs.items())
                if k
                in (
                    "start_method",
                    "log_line_prefix_template",
                    "shutdown_timeout",
                    "health_check_server",
                )
            }
        ),
        "logs": type(logs).__name__,
        "spec": {
            n: plain(getattr(spec, n))
            for n in (
                "role local_world_size entrypoint args max_restarts monitor_interval master_addr"
                " master_port local_addr event_log_handler numa_options duplicate_stdout_filters"
                " duplicate_stderr_filters virtual_local_rank"
            ).split()
        },
        "parameters": [
            params.backend,
            params.endpoint,
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            params.local_addr,
            plain(params.config),
        ],
    }


@case("T138.static_master")
def static_master(impl: Impl) -> Any:
    """Backend static: the master is the endpoint; without one or its port: refused."""
    make = impl.rdzv.RendezvousParameters
    get = impl.get("launcher.api:_get_addr_and_port")
    names = ("MASTER_ADDR", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    from harness import free_port

    port = free_port()
    options = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0, "timeout": 20}}
    return {
        "static": outcome(lambda: list(get(make("static", "h:5", "r", 1, 1)))),
        "c10d": outcome(lambda: list(get(make("c10d", "h:5", "r", 1, 1)))),
        "no endpoint": raised(lambda: get(make("static", "", "r", 1, 1))),
        "no port": raised(lambda: get(make("static", "h", "r", 1, 1))),
        "blanks": outcome(lambda: list(get(make("static", " h:5 ", "r", 1, 1)))),
        "launch": launch(
            impl, entrypoints.variables, *names, rdzv_endpoint=f"127.0.0.1:{port}", **options
        ),
        "launch, no port": launch(impl, entrypoints.nothing, rdzv_endpoint="127.0.0.1", **options),
    }


@case("T138.names")
def names(impl: Impl) -> Any:
    """_get_entrypoint_name."""
    get = impl.get("launcher.api:_get_entrypoint_name")
    return [
        get(entrypoints.nothing, []),
        get(sys.executable, ["-u", "-S", "train.py", "x"]),
        get(sys.executable, ["-u"]),
        get(sys.executable, []),
        get("/bin/echo", ["a"]),
        get(None, []),
    ]


@case("T138.empty_run_id")
def empty_run_id(impl: Impl) -> Any:
    """No run id: a random number, as text; and an unknown backend."""
    with quiet_warnings():
        seen = launch(impl, entrypoints.variables, "TORCHELASTIC_RUN_ID", run_id="")
    value = seen["returned"]["0"]["TORCHELASTIC_RUN_ID"]
    return {
        "digits": value.isdigit() and len(value) > 20,
        "unknown backend": launch(impl, entrypoints.nothing, rdzv_backend="nonsense"),
        "unknown handler": launch(impl, entrypoints.nothing, event_log_handler="nonsense"),
        "no entrypoint": launch(impl, None),
        "no workers": launch(impl, entrypoints.nothing, nproc_per_node=0),
    }


@case("T141.launcher_logs")
def logs(impl: Impl) -> Any:
    """A log folder through the launcher, over a restart."""
    with folder() as d:
        specs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.ALL)
        script = (
            'echo "attempt $TORCHELASTIC_RESTART_COUNT"; exit $(( TORCHELASTIC_RESTART_COUNT < 1 ))'
        )
        seen = launch(impl, "/bin/sh", "-c", script, max_restarts=1, logs_specs=specs)
        files = {}
        for path in sorted(d.rglob("*")):
            if path.is_file():
                parts = path.relative_to(d).parts
                files["/".join([parts[0][:4] + "<X>", *parts[1:]])] = path.read_text()
        return {"end": seen, "files": files}


@case("T47.launcher_metrics")
def metrics(impl: Impl) -> Any:
    """Metrics of a whole launch."""
    with metrics_of(impl) as seen:
        launch(impl, "/bin/sh", "-c", "exit $((TORCHELASTIC_RESTART_COUNT < 1))", max_restarts=1)
    return {n: v for n, v in seen if n.startswith("workers.") and not n.endswith("healthy")}


@case("T40.launcher_environment")
def environment(impl: Impl) -> Any:
    """Variables of a worker through the launcher."""
    with env(OMP_NUM_THREADS="1"):
        seen = launch(impl, entrypoints.variables, nproc_per_node=2, role="reader")
    shown = {}
    for rank, values in seen["returned"].items():
        values["TORCHELASTIC_ERROR_FILE"] = Path(values["TORCHELASTIC_ERROR_FILE"]).name
        values["MASTER_PORT"] = values["MASTER_PORT"].isdigit()
        shown[rank] = values
    return shown


@case("T87.signal")
def signal_stops(impl: Impl) -> Any:
    """A signal to the process that launches: SignalException, workers gone."""
    shown = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with folder() as d:
            timer = threading.Thread(
                target=lambda d=d, number=number: (
                    until((d / "0").exists),
                    time.sleep(0.2),  # its START event may come after its first line
                    os.kill(os.getpid(), number),
                )
            )
            timer.start()
            with events_of(impl) as seen:
                what = launch(impl, entrypoints.wait_to_be_killed, str(d), shutdown_timeout=3)
            timer.join()
            pid = int((d / "0").read_text())
            from harness import gone

            shown[number.name] = [what, gone(pid), [brief(e) for e in seen]]
    return shown


@case("T86.handlers_afterwards")
def handlers_afterwards(impl: Impl) -> Any:
    """Signal handlers of the caller's process after a launch."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    launch(impl, entrypoints.nothing)
    return {
        "SIGTERM": "default" if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else "changed"
    }


@case("T139.twice")
def twice(impl: Impl) -> Any:
    """The same configuration launched twice."""
    both = config(impl)
    first = outcome(lambda: impl.launcher.elastic_launch(both, entrypoints.nothing)())
    second = outcome(lambda: impl.launcher.elastic_launch(both, entrypoints.nothing)())
    return [first, second]


@case("T139.from_a_thread")
def from_thread(impl: Impl) -> Any:
    """A launch off the main thread."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(launch(impl, entrypoints.echo, 1)))
    thread.start()
    thread.join(15)
    return seen


@case("T96.their_record_here", batch="torch_things")
def cross_record(impl: Impl) -> Any:
    """Workers that use the other implementation's record, under this one's agent."""
    other = impl.other
    with folder() as d:
        script = d / "w.py"
        script.write_text(
            f"from {other.module_name('elastic.multiprocessing.errors')} import record\n"
            "@record\ndef main():\n    raise ValueError('crossed')\n"
            "if __name__ == '__main__':\n    main()\n"
        )
        try:
            impl.launcher.elastic_launch(config(impl), sys.executable)(str(script))
        except impl.errors.ChildFailedError as error:
            return {str(r): failure(f) for r, f in error.failures.items()}
    return "no error"
