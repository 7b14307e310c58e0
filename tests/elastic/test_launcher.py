"""The launcher, with an agent that is not real."""

import functools
import os
import signal
import subprocess
import sys
from unittest.mock import MagicMock, patch

import pytest

import phalanx.launcher as launcher
from phalanx.elastic.agent.server.api import RunResult, WorkerState
from phalanx.elastic.agent.server.local_elastic_agent import _AliveCallbackProxy
from phalanx.elastic.multiprocessing import SignalException
from phalanx.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from phalanx.elastic.rendezvous import RendezvousParameters
from phalanx.launcher.api import (
    LaunchConfig,
    _get_addr_and_port,
    _get_entrypoint_name,
    elastic_launch,
    launch_agent,
)


def config(**fields):
    fields = {"run_id": "run", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", **fields}
    return LaunchConfig(1, 1, 2, logs_specs=MagicMock(), **fields)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    ):
        monkeypatch.setenv(name, "x")  # so that it is restored, whatever the launcher does
        monkeypatch.delenv(name)


@pytest.fixture
def world():
    """An agent and a handler that are mocks, and the events they record."""
    with (
        patch("phalanx.launcher.api.LocalElasticAgent") as agent_class,
        patch("phalanx.elastic.rendezvous.registry.get_rendezvous_handler") as get_handler,
        patch("phalanx.elastic.events.record") as record,
    ):
        made = MagicMock()
        made.agent_class, made.agent = agent_class, agent_class.return_value
        made.get_handler, made.handler = get_handler, get_handler.return_value
        made.record = record
        made.agent.run.return_value = RunResult(WorkerState.SUCCEEDED, {0: "a"})
        yield made


def failure():
    return ProcessFailure(local_rank=1, pid=5, exitcode=3, error_file="")


# The configuration.


def test_config_fields_and_defaults():
    made = LaunchConfig(1, 2, 3)
    assert list(vars(made)) == [
        "min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role",
        "rdzv_endpoint", "rdzv_backend", "rdzv_configs", "rdzv_timeout", "max_restarts",
        "monitor_interval", "start_method", "log_line_prefix_template", "metrics_cfg",
        "local_addr", "event_log_handler", "numa_options", "signals_to_handle",
        "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank",
        "shutdown_timeout", "exit_barrier_timeout",
    ]  # fmt: skip
    assert (made.run_id, made.role, made.rdzv_backend) == ("", "default_role", "etcd")
    assert (made.max_restarts, made.monitor_interval, made.start_method) == (3, 0.1, "spawn")
    assert made.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert made.rdzv_configs == {"timeout": 900} and made.logs_specs is not None
    assert (made.shutdown_timeout, made.exit_barrier_timeout) == (30, 300)


def test_config_leaves_the_callers_dictionary_alone():
    shared = {"rank": 0}
    assert config(rdzv_configs=shared, rdzv_timeout=5).rdzv_configs == {"rank": 0, "timeout": 5}
    assert config(rdzv_configs={"timeout": 7}).rdzv_configs == {"timeout": 7}
    assert shared == {"rank": 0}


@pytest.mark.parametrize(
    ("name", "variable", "default"),
    [
        ("shutdown_timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30),
        ("exit_barrier_timeout", "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", 300),
    ],
)
def test_config_times(monkeypatch, name, variable, default):
    assert getattr(config(), name) == default
    assert getattr(config(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"{name} must be non-negative"):
        config(**{name: -5})
    monkeypatch.setenv(variable, "600")
    assert getattr(config(), name) == 600
    assert getattr(config(**{name: 120}), name) == 120
    for bad in ("soon", "-1"):
        monkeypatch.setenv(variable, bad)
        with pytest.raises(ValueError, match=r"(?i)timeout"):
            config()


# Names and addresses.


def work():
    pass


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (work, [], "work"),
        (functools.partial(work), [], "partial"),
        (None, [], ""),
        ("/bin/prog", ["x"], "/bin/prog"),
        (sys.executable, [], ""),
        (sys.executable, ["-u"], ""),
        (sys.executable, ["-u", "", "train.py", "x"], "train.py"),
        (sys.executable, ["-u", 7], "7"),
    ],
)
def test_entrypoint_name(entrypoint, args, name):
    assert _get_entrypoint_name(entrypoint, args) == name


def test_address_known_beforehand():
    def of(backend, endpoint):
        return _get_addr_and_port(RendezvousParameters(backend, endpoint, "run", 1, 1))

    assert of("c10d", "h:1") == (None, None)
    assert of("static", " h:1 ") == ("h", 1)
    for endpoint, text in (("", "Endpoint is missing"), ("h", "port is missing")):
        with pytest.raises(ValueError, match=text):
            of("static", endpoint)


# Launching.


def test_success(world):
    assert elastic_launch(config(), work)("x", 1) == {0: "a"}
    how = world.agent_class.call_args.kwargs
    spec = how["spec"]
    assert (spec.args, spec.local_world_size, spec.entrypoint) == (("x", 1), 2, work)
    assert spec.rdzv_handler is world.handler and spec.role == "default_role"
    assert (how["shutdown_timeout"], how["exit_barrier_timeout"]) == (30, 300)
    parameters = world.get_handler.call_args.args[0]
    assert (parameters.run_id, parameters.get("timeout")) == ("run", 900)
    world.agent.run.assert_called_once_with()
    world.record.assert_called_once_with(world.agent.get_event_succeeded(), "null")
    world.handler.shutdown.assert_called_once_with()


def test_run_id_is_made_up_once(world):
    made = config(run_id="")
    launch_agent(made, work, [])
    assert made.run_id.isdigit() and len(made.run_id) > 20
    assert world.get_handler.call_args.args[0].run_id == made.run_id


@pytest.mark.parametrize("signals", ["SIGTERM,SIGUSR1", None])
def test_signals_are_exported(world, signals):
    launch_agent(config(**({"signals_to_handle": signals} if signals else {})), "prog", [])
    expected = signals or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == expected


def test_static_tells_the_workers_its_endpoint(world):
    launch_agent(
        config(rdzv_backend="static", rdzv_endpoint="h:77", rdzv_configs={"rank": 0}), "prog", []
    )
    spec = world.agent_class.call_args.kwargs["spec"]
    assert (spec.master_addr, spec.master_port) == ("h", 77)


def test_failed_workers(world):
    world.agent.run.return_value = RunResult(WorkerState.FAILED, failures={1: failure()})
    with pytest.raises(ChildFailedError) as caught:
        launch_agent(config(), "prog", [])
    assert caught.value.name == "prog" and list(caught.value.failures) == [1]
    world.record.assert_called_once_with(world.agent.get_event_succeeded(), "null")
    world.handler.shutdown.assert_called_once_with()


def test_failed_workers_that_nobody_names(world):
    world.agent.run.return_value = RunResult(WorkerState.FAILED)
    with pytest.raises(ChildFailedError, match="reported failed workers"):
        launch_agent(config(), "prog", [])


@pytest.mark.parametrize("ending", ["failed", "error", "success"])
def test_a_failing_shutdown_hides_nothing(world, ending, caplog):
    world.handler.shutdown.side_effect = RuntimeError("store unreachable")
    expected = {"failed": ChildFailedError, "error": KeyError, "success": None}[ending]
    if ending == "failed":
        world.agent.run.return_value = RunResult(WorkerState.FAILED, failures={1: failure()})
    elif ending == "error":
        world.agent.run.side_effect = KeyError("mine")
    if expected is None:
        assert launch_agent(config(), "prog", []) == {0: "a"}
    else:
        with pytest.raises(expected):
            launch_agent(config(), "prog", [])
    world.handler.shutdown.assert_called_once_with()
    assert "store unreachable" in caplog.text


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("sigval", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_rendezvous_open(world, ours, sigval):
    if ours:
        error = SignalException("test", sigval)
    else:
        error = type("SignalException", (Exception,), {"sigval": sigval})("test")
    world.agent.run.side_effect = error
    with pytest.raises(type(error)):
        launch_agent(config(), work, [])
    world.handler.shutdown.assert_not_called()
    world.record.assert_called_once_with(world.agent.get_event_failed(), "null")


def test_any_other_error_closes_the_rendezvous(world):
    world.agent.run.side_effect = RuntimeError("any")
    with pytest.raises(RuntimeError, match="any"):
        launch_agent(config(event_log_handler="console"), work, [])
    world.handler.shutdown.assert_called_once_with()
    world.record.assert_called_once_with(world.agent.get_event_failed(), "console")


def test_interrupt_from_the_keyboard_closes_the_rendezvous(world):
    world.agent.run.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        launch_agent(config(), work, [])
    world.handler.shutdown.assert_called_once_with()


@pytest.mark.parametrize("nothing", [None, RunResult(WorkerState.SUCCEEDED)])
def test_a_node_that_is_not_needed_returns_nothing(world, nothing):
    world.agent.run.return_value = nothing
    assert launch_agent(config(), work, []) == {}
    world.handler.shutdown.assert_called_once_with()


def test_metrics_are_initialised_before_the_run(world):
    with patch("phalanx.elastic.metrics.initialize_metrics") as initialize:
        initialize.side_effect = lambda cfg: world.agent.run.assert_not_called()
        launch_agent(config(metrics_cfg={"a": "b"}), work, [])
    assert initialize.call_args.args[0].params == {"a": "b"}


def test_health_server_is_passed_on_and_wired(world):
    server = MagicMock(alive_callback=_AliveCallbackProxy())
    world.agent._get_alive_time = lambda: 7
    launch_agent(config(), work, [], health_check_server=server)
    assert world.agent_class.call_args.kwargs["health_check_server"] is server
    assert server.alive_callback() == 7


def test_nothing_is_recorded_for_a_configuration_that_cannot_be(world):
    world.get_handler.side_effect = ValueError("not registered")
    with pytest.raises(ValueError, match="not registered"):
        launch_agent(config(), work, [])
    world.record.assert_not_called()


# Imports.


def test_names_of_the_package():
    assert launcher.LaunchConfig is LaunchConfig and launcher.elastic_launch is elastic_launch
    assert launcher.launch_agent is launch_agent


@pytest.mark.process
def test_imports_are_lean():
    code = (
        "import sys, phalanx.launcher, phalanx.elastic.agent.server, phalanx.elastic.control_plane;"
        "heavy = {'torch', 'numpy', 'asyncio', 'http.server', 'importlib.metadata',"
        " 'prometheus_client', 'multiprocessing.connection', 'multiprocessing.pool',"
        " 'xmlrpc', 'email', 'ssl', 'uuid'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
