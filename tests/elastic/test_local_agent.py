"""The agent of local processes, with a process context that is not real."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic.agent import server
from phalanx.elastic.agent.server import local_elastic_agent as module
from phalanx.elastic.agent.server import worker_env
from phalanx.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from phalanx.elastic.agent.server.local_elastic_agent import (
    LocalElasticAgent,
    _AliveCallbackProxy,
    _is_descendant,
    _resolve_uninterruptible_state_timeout,
)
from phalanx.elastic.multiprocessing.errors import ProcessFailure
from phalanx.elastic.rendezvous.local import LocalRendezvousHandler
from phalanx.elastic.utils import get_env_variable_or_raise, macros
from phalanx.elastic.utils.process_state import is_uninterruptible_state, read_proc_state

NAMES = {
    "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE",
    "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip


def outcome(failures=None, return_values=None):
    return SimpleNamespace(
        is_failed=lambda: bool(failures),
        failures=failures or {},
        return_values=return_values or {},
    )


class Context:
    """A process context whose wait says what it is told to, one after the other."""

    def __init__(self, outcomes, pids):
        self.outcomes = outcomes
        self._pids = pids
        self.closed = []

    def pids(self):
        return dict(self._pids)

    def wait(self, timeout=-1, period=1):
        assert timeout == 0
        return self.outcomes.pop(0)

    def close(self, death_sig=None, timeout=30):
        self.closed.append((death_sig, timeout))


class Starter:
    """Stands for start_processes: a context per start, with the next list of outcomes."""

    def __init__(self, *plays, pids=(500, 501)):
        self.plays = list(plays)
        self.pids = pids
        self.calls = []
        self.contexts = []

    def __call__(self, **how):
        self.calls.append(how)
        self.contexts.append(
            Context(self.plays.pop(0), dict(zip(how["args"], self.pids, strict=False)))
        )
        return self.contexts[-1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "TORCH_")) or name in (
            "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
        ):  # fmt: skip
            monkeypatch.delenv(name)
    # Another test may have imported it; then the agent would serve the store.
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


@pytest.fixture
def starter(monkeypatch):
    def use(*plays, **options):
        made = Starter(*plays, **options)
        monkeypatch.setattr(module, "start_processes", made)
        return made

    return use


@pytest.fixture
def make():
    handlers = []

    def agent(agent_class=LocalElasticAgent, workers=2, handler=None, **options):
        handlers.append(handler or LocalRendezvousHandler("c10d", "run"))
        names = set(WorkerSpec.__dataclass_fields__) & set(options)
        fields = {name: options.pop(name) for name in names}
        fields = {"monitor_interval": 0.001, "entrypoint": "/bin/prog", **fields}
        spec = WorkerSpec("trainer", workers, handlers[-1], **fields)
        return agent_class(spec, options.pop("logs_specs", MagicMock()), **options)

    yield agent
    for handler in handlers:
        handler.shutdown()


DONE = outcome(return_values={0: "a", 1: "b"})


def crash(local_rank=1, exitcode=-9):
    failure = ProcessFailure(local_rank=local_rank, pid=501, exitcode=exitcode, error_file="")
    return outcome(failures={local_rank: failure})


def test_names_of_the_package():
    assert not hasattr(server, "LocalElasticAgent") and not hasattr(server, "HealthCheckServer")
    assert server.TORCHELASTIC_TIMER_FILE == "TORCHELASTIC_TIMER_FILE"
    assert server.TORCHELASTIC_ENABLE_FILE_TIMER == "TORCHELASTIC_ENABLE_FILE_TIMER"


# Starting.


def test_success(starter, make):
    started = starter([None, DONE])
    agent = make(args=("--rank=${local_rank}", 7))
    ended = agent.run()
    assert ended == RunResult(WorkerState.SUCCEEDED, {0: "a", 1: "b"})
    (how,) = started.calls
    assert set(how) == {
        "name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes", "start_method",
        "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters",
    }  # fmt: skip
    assert (how["name"], how["entrypoint"], how["start_method"]) == (
        "trainer",
        "/bin/prog",
        "spawn",
    )
    assert how["args"] == {0: ("--rank=0", 7), 1: ("--rank=1", 7)}
    assert how["log_line_prefixes"] is None and how["logs_specs"] is agent._logs_specs
    assert started.contexts[0].closed == [(signal.SIGTERM, 30)]
    assert agent._pcontext is started.contexts[0]


def test_environment_of_the_workers(starter, make):
    started = starter([DONE])
    agent = make(max_restarts=5)
    agent.run()
    first, second = started.calls[0]["envs"][0], started.calls[0]["envs"][1]
    assert set(first) == set(second) == NAMES
    assert second == {
        "LOCAL_RANK": "1", "RANK": "1", "GROUP_RANK": "0", "ROLE_RANK": "1",
        "ROLE_NAME": "trainer", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": first["MASTER_PORT"], "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "5", "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    assert int(first["MASTER_PORT"]) > 0


def test_environment_of_the_agent_is_passed_on(starter, make, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", "/some/pipe")
    started = starter([DONE])
    make(master_addr="test_host", master_port=42).run()
    env = started.calls[0]["envs"][1]
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and env["OMP_NUM_THREADS"] == "3"
    assert env["CUDA_VISIBLE_DEVICES"] == "5,7" and env["LOCAL_RANK"] == "1"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("test_host", "42")
    assert env["TORCHELASTIC_TIMER_FILE"] == "/some/pipe"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ["0", "1"]), ("5,7", ["5", "7"]), ("5, 7 ,9", ["5", "7"])]
)
def test_virtual_local_rank(starter, make, monkeypatch, visible, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    started = starter([DONE])
    make(virtual_local_rank=True).run()
    envs = started.calls[0]["envs"].values()
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "0"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == expected


def test_too_few_devices(starter, make, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    started = starter([DONE])
    with pytest.raises(ValueError, match="local_rank 1 exceeds available GPUs"):
        make(virtual_local_rank=True).run()
    assert started.calls == []


def test_a_subclass_may_set_the_local_rank(starter, make):
    class Mine(LocalElasticAgent):
        def _set_local_rank_env(self, worker_env, local_rank, spec):
            super()._set_local_rank_env(worker_env, local_rank, spec)
            worker_env["MINE"] = f"{worker_env['LOCAL_RANK']}/{spec.role}"

    started = starter([DONE])
    make(Mine).run()
    assert started.calls[0]["envs"][1]["MINE"] == "1/trainer"


def test_log_prefixes(starter, make):
    started = starter([DONE])
    make(
        log_line_prefix_template="[${role_name}-${local_rank}:${rank}@${attempt}]${not_here}:"
    ).run()
    assert started.calls[0]["log_line_prefixes"] == {
        0: "[trainer-0:0@0]${not_here}:",
        1: "[trainer-1:1@0]${not_here}:",
    }


def test_no_master_address_is_an_error_in_words(starter, make):
    started = starter([DONE])
    agent = make()
    agent._worker_group.store = object()
    with pytest.raises(ValueError, match="master_addr"):
        agent._start_workers(agent._worker_group)
    assert started.calls == []


@pytest.mark.parametrize("missing", ["store", "logs_specs", "entrypoint"])
def test_start_needs(make, missing):
    agent = make()
    if missing != "store":
        agent._rendezvous(agent._worker_group)
    if missing == "logs_specs":
        agent._logs_specs = None
    if missing == "entrypoint":
        agent._worker_group.spec.entrypoint = None
    with pytest.raises(AssertionError):
        agent._start_workers(agent._worker_group)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${local_rank}", "3"),
        ("a$local_rank.b", "a3.b"),
        ("$local_rank$local_rank", "33"),
        ("$local_rank_more ${local_rank_more}", "$local_rank_more ${local_rank_more}"),
        ("cost: 5$ $$ $", "cost: 5$ $$ $"),
        ("$$local_rank", "$$local_rank"),
        ("$${local_rank}", "$${local_rank}"),
        ("$$$local_rank", "$$3"),
        ("$HOME ${HOME}", "$HOME ${HOME}"),
    ],
)
def test_macros(text, expected):
    assert macros.substitute([text, 7, None], "3") == [expected, 7, None]
    assert worker_env.arguments((text,), 3) == (expected,)


@given(st.text())
def test_other_text_is_left_alone(text):
    if "local_rank" not in text:
        assert macros.substitute([text], "3") == [text]


def test_environment_look_up(monkeypatch):
    monkeypatch.setenv("PHALANX_TEST", "v")
    assert get_env_variable_or_raise("PHALANX_TEST") == "v"
    monkeypatch.delenv("PHALANX_TEST")
    with pytest.raises(ValueError, match="PHALANX_TEST expected, but not set"):
        get_env_variable_or_raise("PHALANX_TEST")


# The store of the workers.


class Serving(LocalElasticAgent):
    served: list[socket.socket]

    def _serve_store(self, worker_group):
        listener = self._claim_store_listener(worker_group)
        if listener is not None:
            self.served = [*getattr(self, "served", []), listener]
            with contextlib.closing(socket.create_connection(listener.getsockname(), 5)):
                pass


def test_an_agent_that_serves_the_store(starter, make):
    started = starter([crash()], [DONE])
    agent = make(Serving)
    agent.run()
    envs = [call["envs"][0] for call in started.calls]
    assert [env["TORCHELASTIC_USE_AGENT_STORE"] for env in envs] == ["True", "True"]
    assert len(agent.served) == 2 and envs[0]["MASTER_PORT"] != envs[1]["MASTER_PORT"]


@pytest.mark.parametrize("why", ["port", "switch", "foreign"])
def test_no_store_to_serve(starter, make, monkeypatch, why):
    started = starter([DONE])
    options = {}
    if why == "port":
        options["master_port"] = 42
    elif why == "switch":
        options["handler"] = LocalRendezvousHandler("c10d", "run", share_store=False)
    else:
        options["handler"] = MagicMock()
        info = options["handler"].next_rendezvous.return_value
        info.rank, info.world_size = 0, 1
        info.store.get.return_value = "[0, 2, 0, 2]"
        info.store.multi_get.return_value = [b'{"role":"trainer","rank":0,"local_world_size":2}']
        info.bootstrap_store_info.master_addr = "h"
        options["handler"].num_nodes_waiting.return_value = 0
        options["handler"].get_run_id.return_value = "run"
        options["handler"].get_backend.return_value = "mock"
        options["handler"].use_agent_store = True
    agent = make(Serving, **options)
    agent.run()
    assert not hasattr(agent, "served")
    told = started.calls[0]["envs"][0]["TORCHELASTIC_USE_AGENT_STORE"]
    assert told == ("True" if why == "foreign" else "False")


# Watching.


def test_failure_is_by_global_rank_and_restarts(starter, make):
    started = starter([None, crash()], [crash()])
    agent = make(max_restarts=1)
    agent._assign_worker_ranks = lambda store, *_: _numbered_from(agent, 10)
    ended = agent.run()
    assert ended.state == WorkerState.FAILED and list(ended.failures) == [11]
    assert [call["envs"][0]["TORCHELASTIC_RESTART_COUNT"] for call in started.calls] == ["0", "1"]
    ports = [call["envs"][0]["MASTER_PORT"] for call in started.calls]
    assert ports[0] != ports[1]
    assert [len(context.closed) for context in started.contexts] == [1, 2]


def _numbered_from(agent, base):
    workers = LocalElasticAgent(agent._worker_group.spec, MagicMock())._worker_group.workers
    for worker in workers:
        worker.global_rank = worker.role_rank = base + worker.local_rank
    return workers


def test_pids_that_do_not_match(starter, make, monkeypatch):
    starter([DONE], [DONE])
    agent = make()
    agent._rendezvous(agent._worker_group)
    agent._start_workers(agent._worker_group)
    assert agent._monitor_workers(agent._worker_group) == RunResult(WorkerState.UNKNOWN)
    counter = iter(range(100))
    monkeypatch.setattr(Context, "pids", lambda context: {0: 500, 1: next(counter)})
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()


def test_monitor_without_workers(make):
    agent = make()
    with pytest.raises(AssertionError):
        agent._monitor_workers(agent._worker_group)


def test_a_mocked_context_is_closed_once(make):
    with patch("phalanx.elastic.agent.server.local_elastic_agent.start_processes") as start:
        start.return_value.pids.return_value = {0: 0}
        agent = make(workers=1)
        with patch.object(agent, "_monitor_workers") as monitor:
            monitor.return_value = RunResult(WorkerState.SUCCEEDED, return_values={0: 0})
            agent.run("worker")
    start.return_value.close.assert_called_once()


class WaitingContext(Context):
    """Has a wait of its own; ``deaths`` are the moments when it returns early."""

    def __init__(self, outcomes, pids, event):
        super().__init__(outcomes, pids)
        self.event = event
        self.waits = 0

    def wait_event(self, timeout):
        self.waits += 1
        self.event.wait(timeout)


def waiting_agent(make, monkeypatch, event, outcomes, **options):
    agent = make(**options)
    context = WaitingContext(outcomes, {0: 1, 1: 2}, event)
    monkeypatch.setattr(module, "start_processes", lambda **how: context)
    return agent, context


def test_a_death_ends_the_wait(make, monkeypatch):
    event = threading.Event()
    agent, context = waiting_agent(make, monkeypatch, event, [DONE], monitor_interval=60)
    threading.Timer(0.05, event.set).start()
    start = time.monotonic()
    agent.run()
    assert time.monotonic() - start < 30 and context.waits == 1


def test_a_context_that_never_waits_does_not_make_the_loop_spin(make, monkeypatch):
    event = threading.Event()
    event.set()
    agent, context = waiting_agent(
        make, monkeypatch, event, [None] * 9 + [DONE], monitor_interval=0.02
    )
    start = time.monotonic()
    agent.run()
    assert context.waits == 10 and time.monotonic() - start >= 3 * 0.02


def test_overrides_and_handlers_are_asked_at_each_tick(make, monkeypatch):
    asked = []

    class Mine(LocalElasticAgent):
        def _monitor_workers(self, worker_group):
            asked.append("monitor")
            return super()._monitor_workers(worker_group)

    event = threading.Event()
    agent, _ = waiting_agent(
        make, monkeypatch, event, [None, None, DONE], agent_class=Mine, monitor_interval=0.001
    )
    monkeypatch.setattr(
        agent._rdzv_handler, "num_nodes_waiting", lambda: asked.append("waiting") or 0
    )
    agent.run()
    assert asked == ["monitor", "waiting", "monitor", "waiting", "monitor"]


# Stopping.


def test_shutdown_timeout_is_used_on_every_path(starter, make):
    started = starter([crash()], [crash()])
    make(max_restarts=1, shutdown_timeout=3).run()
    assert [context.closed for context in started.contexts] == [
        [(signal.SIGTERM, 3)],
        [(signal.SIGTERM, 3)] * 2,
    ]


def test_shutdown_by_hand(make):
    agent = make(shutdown_timeout=240)
    agent._shutdown()
    agent._pcontext = MagicMock()
    agent._shutdown(death_sig=signal.SIGTERM, timeout=150)
    agent._pcontext.close.assert_called_once_with(signal.SIGTERM, 150)
    agent._stop_workers(agent._worker_group, is_restart=True)
    agent._pcontext.close.assert_called_with(signal.SIGTERM, 240)


def test_a_failing_start_is_cleaned_up(make):
    agent = make()
    with (
        patch.object(module, "start_processes", side_effect=FileNotFoundError("prog")),
        pytest.raises(FileNotFoundError),
    ):
        agent.run()
    assert agent._pcontext is None


# Watchdog and health.


def test_watchdog(starter, make, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = starter([crash()], [DONE])
    seen = []
    agent = make()
    agent._log_watchdog_event = lambda name, request: seen.append(name)
    agent.run()
    paths = [call["envs"][0]["TORCHELASTIC_TIMER_FILE"] for call in started.calls]
    assert all(path.startswith(f"{tmp_path}/watchdog_timer_") for path in paths)
    assert paths[0] != paths[1] and list(tmp_path.iterdir()) == []
    assert agent._worker_watchdog is None
    assert seen == ["watchdog started", "watchdog stopped"] * 2


def test_watchdog_at_a_given_place(starter, make, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "pipe"))
    started = starter([DONE])
    made = MagicMock()
    with patch("phalanx.elastic.timer.FileTimerServer", return_value=made) as server_class:
        make().run()
    how = server_class.call_args.kwargs
    assert (how["file_path"], how["run_id"]) == (str(tmp_path / "pipe"), "run")
    assert (how["max_interval"], how["daemon"]) == (0.1, True)
    made.start.assert_called_once_with()
    made.stop.assert_called_once_with()
    assert started.calls[0]["envs"][1]["TORCHELASTIC_TIMER_FILE"] == str(tmp_path / "pipe")


def test_watchdog_events(make):
    agent = make()
    request = SimpleNamespace(worker_pid=7, scope_id="s", expiration_time=1.5, signal=9)
    with patch("phalanx.elastic.events.record") as record:
        agent._log_watchdog_event("kill worker process", request)
        agent._log_watchdog_event("watchdog started", None)
    first, second = (call.args[0] for call in record.call_args_list)
    assert first.name == "kill worker process" and first.timestamp > 0
    assert first.metadata["state"] == "RUNNING" and first.metadata["role"] == "trainer"
    assert json.loads(first.metadata["metadata"]) == {
        "watchdog_event": "kill worker process",
        "worker_pid": "7",
        "scope_id": "s",
        "expiration_time": "1.5",
        "signal": "9",
    }
    assert json.loads(second.metadata["metadata"]) == {"watchdog_event": "watchdog started"}


@pytest.mark.process
def test_only_descendants_may_set_timers():
    import subprocess

    assert not _is_descendant(os.getpid()) and not _is_descendant(os.getppid())
    assert not _is_descendant(1) and not _is_descendant(2**22 + 1)
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; read x; kill $!"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as shell:
        grandchild = int(shell.stdout.readline())
        assert _is_descendant(shell.pid) and _is_descendant(grandchild)
        shell.stdin.close()
        shell.wait(10)


def test_health_check_lives_through_restarts(starter, make, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "12345")
    starter([crash()], [DONE])
    made = MagicMock()
    with patch.object(module, "create_healthcheck_server", return_value=made) as create:
        agent = make()
        agent.run()
    create.assert_called_once_with(alive_callback=agent._get_alive_time, port=12345, timeout=60)
    assert [call[0] for call in made.method_calls] == ["start", "stop"]
    assert agent._health_check_server is None


@pytest.mark.parametrize("port", ["abc", "", "-1", "65536"])
def test_bad_health_port_costs_a_warning(starter, make, monkeypatch, caplog, port):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", port)
    starter([DONE])
    with patch.object(module, "create_healthcheck_server") as create:
        assert not make().run().is_failed()
    create.assert_not_called()
    assert "TORCHELASTIC_HEALTH_CHECK_PORT" in caplog.text


def test_a_given_health_server_is_kept_and_stopped_at_the_end(starter, make, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "12345")
    starter([crash()], [DONE])
    given_server = MagicMock()
    with patch.object(module, "create_healthcheck_server") as create:
        make(health_check_server=given_server).run()
    create.assert_not_called()
    given_server.stop.assert_called_once_with()


def test_alive_time(make, monkeypatch):
    agent = make()
    monkeypatch.setattr(module.time, "time", lambda: 1000.7)
    assert agent._get_current_time_secs() == agent._get_alive_time() == 1000
    agent._loop_tick = 900.5
    assert agent._get_alive_time() == 900
    agent._worker_watchdog = SimpleNamespace(get_last_progress_time=lambda: 800)
    assert agent._get_alive_time() == 800
    agent._in_exit_barrier = True
    assert agent._get_alive_time() == 1000


def test_alive_time_follows_the_loop(starter, make):
    starter([None, crash()], [None, DONE])
    ticks = []

    class Watched(LocalElasticAgent):
        def _monitor_workers(self, worker_group):
            ticks.append(("monitor", self._loop_tick is not None))
            return super()._monitor_workers(worker_group)

        def _stop_workers(self, worker_group):
            ticks.append(("stop", self._loop_tick is not None))
            super()._stop_workers(worker_group)

    agent = make(Watched)
    agent.run()
    assert ticks == [("monitor", True)] * 2 + [("stop", False)] + [("monitor", True)] * 2
    assert agent._loop_tick is None


def test_alive_proxy(monkeypatch):
    proxy = _AliveCallbackProxy()
    assert abs(proxy() - time.time()) < 5
    proxy.set_delegate(lambda: 5)
    assert proxy() == 5


# Processes that the kernel holds.


@pytest.mark.parametrize(
    ("explicit", "env", "expected"),
    [
        (None, None, 0), (None, "", 0), (None, "x", 0), (None, "-1", 0), (None, "2.5", 2.5),
        (0, "7", 0), (3, "7", 3), (-3, "7", 0),
    ],
)  # fmt: skip
def test_uninterruptible_timeout(monkeypatch, make, explicit, env, expected):
    if env is not None:
        monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", env)
    assert _resolve_uninterruptible_state_timeout(explicit) == expected
    agent = make(uninterruptible_state_timeout=explicit)
    assert agent._uninterruptible_state_timeout == expected


def test_a_held_worker_fails_the_group_for_good(starter, make, monkeypatch):
    started = starter([None] * 100)
    monkeypatch.setattr(module, "read_proc_state", lambda pid: "D" if pid == 501 else "S")
    clock = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock) / 10)
    agent = make(uninterruptible_state_timeout=1)
    ended = agent.run()
    assert ended.is_failed() and list(ended.failures) == [1]
    assert "state D" in ended.failures[1].message and ended.failures[1].pid == 501
    assert agent._remaining_restarts == 0 and len(started.calls) == 1
    assert started.contexts[0].closed


def test_time_in_the_kernel(make, monkeypatch):
    agent = make()
    states = {1: "D", 2: "S", 3: None}
    now = [0.0]
    monkeypatch.setattr(module, "read_proc_state", states.get)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert agent._check_uninterruptible_state_timeout(agent._worker_group, 5) is None
    agent._pcontext = Context([], {0: 1, 1: 2})
    check = agent._check_uninterruptible_state_timeout
    assert check(agent._worker_group, 5) is None
    now[0] = 4.0
    states[1] = None  # unreadable: its time goes on
    assert check(agent._worker_group, 5) is None
    now[0], states[1] = 6.0, "D+"
    assert check(agent._worker_group, 5).state == WorkerState.UNHEALTHY
    states[1] = "R"
    assert check(agent._worker_group, 5) is None
    assert agent._uninterruptible_state_first_seen == {}
    states[1] = "D"
    assert check(agent._worker_group, 5) is None
    agent._pcontext = Context([], {0: 3})
    assert check(agent._worker_group, 5) is None
    assert agent._uninterruptible_state_first_seen == {}


def test_state_of_a_process(monkeypatch):
    assert read_proc_state(os.getpid()) in ("R", "S")
    assert read_proc_state(2**22 + 1) is None
    assert [is_uninterruptible_state(state) for state in ("D", "D+", "S", None)] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"7 (a b) D 1 2", "D"),
        (b"7 (x) y) (z)) S 1", "S"),
        (b"7 (x)", None),
        (b"nonsense", None),
        (b"", None),
    ],
)
def test_state_line(monkeypatch, line, state, tmp_path):
    import builtins

    path = tmp_path / "stat"
    path.write_bytes(line)
    real = builtins.open
    monkeypatch.setattr(
        "builtins.open",
        lambda name, *rest, **more: real(path if name == "/proc/7/stat" else name, *rest, **more),
    )
    assert read_proc_state(7) == state


# Around a worker's main function.


def test_worker_main_records_what_fails(monkeypatch, tmp_path):
    from phalanx.elastic.control_plane import worker_main

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @worker_main()
    def main(value):
        if isinstance(value, BaseException):
            raise value
        return value

    assert main(7) == 7
    assert main(SystemExit(0)) is None
    with pytest.raises(SystemExit):
        main(SystemExit(3))
    assert not path.exists()
    with pytest.raises(RuntimeError, match="broken"):
        main(RuntimeError("broken"))
    assert "RuntimeError: broken" in json.loads(path.read_text())["message"]["message"]


def test_the_worker_server_is_torchs(monkeypatch, caplog, tmp_path):
    from phalanx.elastic.control_plane import worker_main

    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(tmp_path / "socket"))
    with worker_main():
        pass
    assert "import torch before worker_main" in caplog.text
