"""The agent and the launcher with real processes and real signals."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from phalanx.elastic.agent.server.api import WorkerSpec, WorkerState
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, Std
from phalanx.elastic.multiprocessing.errors import ChildFailedError, record
from phalanx.elastic.rendezvous import RendezvousParameters
from phalanx.elastic.rendezvous.registry import get_rendezvous_handler
from phalanx.launcher import LaunchConfig, elastic_launch

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # spawned workers get it too

import agent_worker_functions as workers  # noqa: E402

pytestmark = pytest.mark.process

PROGRAM = [sys.executable, workers.__file__]
BOUND = 60  # seconds; far more than anything here takes


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "TORCH_ELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # so that it is restored
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE")


@pytest.fixture
def run(tmp_path):
    handlers = []

    def run(entrypoint, *args, workers=2, redirects=Std.NONE, **fields):
        handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "run", 1, 1))
        handlers.append(handler)
        options = {
            name: fields.pop(name)
            for name in ("log_line_prefix_template", "shutdown_timeout", "start_method")
            if name in fields
        }
        spec = WorkerSpec(
            "default", workers, handler, entrypoint=entrypoint, args=args,
            **{"max_restarts": 0, "monitor_interval": 0.05, **fields},
        )  # fmt: skip
        agent = LocalElasticAgent(
            spec, DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=redirects), **options
        )
        return agent, agent.run()

    yield run
    for handler in handlers:
        handler.shutdown()


def config(tmp_path, **fields):
    fields = {"max_restarts": 0, "monitor_interval": 0.05, **fields}
    return LaunchConfig(
        1, 1, 2, logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path / "logs")), run_id="run",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", **fields,
    )  # fmt: skip


def test_functions_return_what_they_return(run):
    agent, ended = run(workers.echo, "foo")
    assert ended.return_values == {0: "foo", 1: "foo"} and not ended.is_failed()
    assert agent._worker_group.state == WorkerState.SUCCEEDED


def test_large_values_and_nothing(run):
    assert run(workers.big, workers=1)[1].return_values == {0: list(range(200_000))}
    assert run(workers.nothing, start_method="fork")[1].return_values == {0: None, 1: None}


def test_environment_of_a_worker(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    names = [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_TIMER_FILE",
    ]  # fmt: skip
    values = run(workers.environment, *names, max_restarts=2)[1].return_values
    assert values[1] == dict(
        zip(names, ["1", "1", "2", "2", "127.0.0.1", "3", "run", "0", None], strict=True)
    )


def test_a_death_costs_one_restart(run):
    agent, ended = run(workers.killed_at_first, max_restarts=3)
    assert ended.return_values == {0: 1, 1: 1}
    assert agent._remaining_restarts == 2 and agent._attempt == 1


def test_restarts_run_out(run):
    agent, ended = run(workers.sad_if_odd, max_restarts=1)
    assert ended.state == WorkerState.FAILED and agent._remaining_restarts == 0
    assert 1 in ended.failures and ended.failures[1].exitcode == 1


def test_a_death_is_acted_upon_before_the_interval_is_over(run):
    start = time.monotonic()
    _, ended = run(workers.exits_with, 3, monitor_interval=50, workers=1)
    assert ended.failures[0].exitcode == 3 and time.monotonic() - start < 40


def test_the_first_failure_reaches_the_agents_own_error_file(run, tmp_path, monkeypatch):
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))

    @record
    def main():
        _, ended = run(workers.sad, workers=1)
        raise ChildFailedError("sad", ended.failures)

    with pytest.raises(ChildFailedError) as caught:
        main()
    rank, failure = caught.value.get_first_failure()
    message = json.loads(reply.read_text())["message"]
    assert rank == 0 and failure.exitcode == 1
    assert "sad because i throw" in message["message"]
    assert int(message["extraInfo"]["timestamp"]) == failure.timestamp
    assert message["errorCode"] == 1


def test_programs(run, tmp_path):
    _, ended = run(PROGRAM[0], PROGRAM[1], "echo", "rank-${local_rank}-$$", redirects=Std.OUT)
    assert ended.return_values == {0: None, 1: None}
    outputs = {path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert outputs == {"rank-0-$$\n", "rank-1-$$\n"}


def test_a_program_that_is_not_there(run):
    with pytest.raises(FileNotFoundError):
        run("/no/such/program")


def test_timers_cost_a_restart_and_not_the_agent(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "timers"))
    _, ended = run(workers.timer_runs_out, max_restarts=1)
    assert ended.return_values == {0: "1", 1: "1"}
    assert not (tmp_path / "timers").exists()


# The launcher.


def test_launch_function(tmp_path):
    assert elastic_launch(config(tmp_path), workers.echo)("x") == {0: "x", 1: "x"}


def test_launch_from_a_thread(tmp_path):
    outcome = []
    thread = threading.Thread(
        target=lambda: outcome.append(elastic_launch(config(tmp_path), workers.echo)("x"))
    )
    thread.start()
    thread.join(BOUND)
    assert outcome == [{0: "x", 1: "x"}]


def test_launch_program_that_fails(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path), PROGRAM[0])(PROGRAM[1], "sad")
    assert caught.value.name == workers.__file__


def test_static_port_that_is_taken(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = config(tmp_path, rdzv_configs={"rank": 0})
        made.rdzv_backend, made.rdzv_endpoint = "static", f"127.0.0.1:{port}"
        with pytest.raises(Exception, match=f"port {port} .* process {os.getpid()}"):
            elastic_launch(made, workers.nothing)()


AGENT = """
    import sys
    sys.path.insert(0, {here!r})
    import agent_worker_functions as workers
    from phalanx.elastic.multiprocessing import DefaultLogsSpecs
    from phalanx.launcher import LaunchConfig, elastic_launch

    if __name__ == "__main__":
        config = LaunchConfig(
            1, 1, 2, run_id="run", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            max_restarts=0, shutdown_timeout=5,
            logs_specs=DefaultLogsSpecs(log_dir={logs!r}),
        )
        {launch}
"""
FUNCTION = "elastic_launch(config, workers.ready_then_sleep)({ready!r})"
AS_PROGRAM = (
    "elastic_launch(config, sys.executable)(workers.__file__, 'ready_then_sleep', {ready!r})"
)


@pytest.mark.parametrize("launch", [FUNCTION, AS_PROGRAM], ids=["function", "program"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_agent_and_workers(tmp_path, launch, signum):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent(AGENT).format(
            here=HERE, logs=str(tmp_path / "logs"), launch=launch.format(ready=str(ready))
        )
    )
    # Held open for writing too: two workers that come one after the other are no end of file.
    fifo = os.open(ready, os.O_RDWR)
    with (
        open(fifo) as told,
        subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True) as agent,
    ):
        pids = [int(told.readline()) for _ in range(2)]
        agent.send_signal(signum)
        _, errors = agent.communicate(timeout=BOUND)
    assert agent.returncode == 1 and f"got signal: {int(signum)}" in errors
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# With torch.


@pytest.mark.torch
def test_workers_with_torch_meet_on_the_agents_store(tmp_path, monkeypatch):
    """The agent's process has torch: it serves the store, a fresh one for the second group."""
    pytest.importorskip("torch.distributed")
    monkeypatch.setenv("FAIL_ONCE", "1")
    made = config(tmp_path, max_restarts=1, start_method="fork")
    assert elastic_launch(made, workers.sum_of_ranks)() == {0: (1, "True"), 1: (1, "True")}


@pytest.mark.torch
def test_programs_with_torch_meet_on_worker_0(run, monkeypatch, tmp_path):
    """The agent's process has no torch: worker 0 serves the store on the port that was held."""
    pytest.importorskip("torch.distributed")
    monkeypatch.delitem(sys.modules, "torch.distributed")
    _, ended = run(PROGRAM[0], PROGRAM[1], "sum_of_ranks", redirects=Std.ALL)
    outputs = {path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert not ended.is_failed(), [
        path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")
    ]
    assert outputs == {"(1, 'False')\n"}
