"""The agent's loop, with workers and a rendezvous that are not real."""

import json
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic import events, metrics
from phalanx.elastic.agent.server import api
from phalanx.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    _rank_table,
    _RoleInstanceInfo,
)
from phalanx.elastic.multiprocessing.errors import ProcessFailure
from phalanx.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from phalanx.elastic.rendezvous.store import InProcessStore

FAILED, UNHEALTHY = WorkerState.FAILED, WorkerState.UNHEALTHY
HEALTHY, SUCCEEDED = WorkerState.HEALTHY, WorkerState.SUCCEEDED


def work():
    pass


def failure(local_rank=0, exitcode=1):
    return ProcessFailure(local_rank=local_rank, pid=999, exitcode=exitcode, error_file="")


def result(state):
    if state in (FAILED, UNHEALTHY):
        return RunResult(state, failures={0: failure()})
    return RunResult(state, return_values={0: "v", 1: "w"} if state == SUCCEEDED else {})


class Handler(RendezvousHandler):
    """One node; ``waiting`` is what num_nodes_waiting says, one after the other."""

    def __init__(self, calls=None, waiting=(), store=None):
        self.calls = [] if calls is None else calls
        self.waiting = list(waiting)
        self.store = store
        self.rounds = 0

    def get_backend(self):
        return "fake"

    def get_run_id(self):
        return "run"

    def next_rendezvous(self):
        self.calls.append("next_rendezvous")
        self.rounds += 1
        store = self.store or InProcessStore(5)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("master", 1000 + self.rounds))

    def num_nodes_waiting(self):
        count = self.waiting.pop(0) if self.waiting else 0
        self.calls.append(f"num_nodes_waiting={count}")
        return count

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def shutdown(self):
        return True


def spec(handler=None, **fields):
    fields = {"local_world_size": 2, "monitor_interval": 0.001, "entrypoint": work, **fields}
    return WorkerSpec("trainer", rdzv_handler=handler or Handler(), **fields)


class Agent(SimpleElasticAgent):
    """Plays a list of monitor results, the last one again and again, and notes what is called."""

    TRACED = (
        "_invoke_run", "_initialize_workers", "_rendezvous", "_assign_worker_ranks",
        "_restart_workers", "_exit_barrier", "_record_metrics", "_record_worker_events",
    )  # fmt: skip

    def __init__(self, spec, states=(), **options):
        super().__init__(spec, **options)
        self.states = list(states)
        self.calls = getattr(spec.rdzv_handler, "calls", [])
        for name in self.TRACED:
            setattr(self, name, self._traced(name, getattr(self, name)))

    def _traced(self, name, method):
        def call(*args, **kwargs):
            self.calls.append(name)
            return method(*args, **kwargs)

        return call

    def _start_workers(self, worker_group):
        self.calls.append(f"start({worker_group.state.value})")
        return {worker.local_rank: 100 + worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group):
        self.calls.append("stop")
        worker_group.group_rank = None

    def _monitor_workers(self, worker_group):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        self.calls.append(f"monitor={state.value}")
        return result(state)

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        self.calls.append(f"shutdown({death_sig.name},{timeout})")


def agent_of(states, waiting=(), **options):
    handler_options = {}
    return Agent(spec(Handler(waiting=waiting, **handler_options), **options), states)


@pytest.fixture
def recorded(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "record", lambda event, where="null": seen.append(event))
    return seen


@pytest.fixture
def put(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "put_metric", lambda name, value: seen.append((name, value)))
    return seen


# The data classes.


@pytest.mark.parametrize("state", list(WorkerState))
def test_is_running(state):
    assert WorkerState.is_running(state) == (state.value in ("HEALTHY", "UNHEALTHY"))
    assert state.value == state.name and isinstance(state, str)


def test_a_new_group():
    group = WorkerGroup(spec(local_world_size=4))
    assert group.state == WorkerState.INIT
    assert [worker.local_rank for worker in group.workers] == [0, 1, 2, 3]
    for worker in group.workers:
        assert (worker.global_rank, worker.role_rank, worker.id) == (-1, -1, None)
        assert (worker.world_size, worker.role_world_size) == (-1, -1)
    assert [group.group_rank, group.store, group.group_world_size] == [None] * 3
    assert [group.master_addr, group.master_port] == [None] * 2
    with pytest.raises(AttributeError):
        group.something = 1


def test_a_worker_in_words():
    worker = Worker(1, 2, 3, 4, 5)
    expected = "local_rank=1,global_rank=2,role_rank=3,world_size=4,role_world_size=5"
    assert str(worker) == repr(worker) == expected
    assert worker != Worker(1, 2, 3, 4, 5)


def test_spec_fields_and_defaults():
    made = WorkerSpec("r", 1, None, None, "/bin/prog")
    assert list(vars(made)) == [
        "role", "local_world_size", "rdzv_handler", "fn", "entrypoint", "args", "max_restarts",
        "monitor_interval", "master_port", "master_addr", "local_addr", "event_log_handler",
        "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters",
        "virtual_local_rank",
    ]  # fmt: skip
    assert (made.args, made.max_restarts, made.monitor_interval) == ((), 3, 0.1)
    assert (made.event_log_handler, made.virtual_local_rank) == ("null", False)
    assert made.get_entrypoint_name() == "prog"
    made.max_restarts = -1
    assert made.max_restarts == -1


@pytest.mark.parametrize(
    "bad", [{"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}]
)
def test_spec_refuses(bad):
    with pytest.raises(AssertionError):
        spec(**bad)


def test_spec_fn_is_the_old_name():
    with pytest.warns(DeprecationWarning, match="entrypoint") as caught:
        made = spec(fn=work, entrypoint="other")
    assert made.entrypoint is work and made.get_entrypoint_name() == "work"
    assert caught[0].filename == __file__


def test_entrypoint_names():
    import functools

    assert spec(entrypoint=functools.partial(work)).get_entrypoint_name() == "partial"
    made = spec()
    made.entrypoint = None
    with pytest.raises(AssertionError):
        made.get_entrypoint_name()


def test_run_result():
    assert RunResult(FAILED).is_failed() and not RunResult(UNHEALTHY).is_failed()
    assert RunResult({}, {}).is_failed() is False
    assert RunResult(SUCCEEDED).return_values == {} == RunResult(SUCCEEDED).failures


# Ranks.


def test_role_info_travels():
    info = _RoleInstanceInfo("role", 1, 10)
    assert json.loads(info.serialize()) == {"role": "role", "rank": 1, "local_world_size": 10}
    back = _RoleInstanceInfo.deserialize(info.serialize())
    assert (back.role, back.rank, back.local_world_size) == ("role", 1, 10)


def test_role_info_order():
    compare = _RoleInstanceInfo.compare
    assert compare(_RoleInstanceInfo("r", 2, 1), _RoleInstanceInfo("r", 1, 1)) == 1
    assert compare(_RoleInstanceInfo("r1", 9, 1), _RoleInstanceInfo("r2", 1, 1)) == -1
    assert compare(_RoleInstanceInfo("r2", 1, 1), _RoleInstanceInfo("r1", 9, 1)) == 1
    infos = [_RoleInstanceInfo(role, 0, 1) for role in ("t", "t", "t", "p", "p")]
    assert _RoleInstanceInfo.find_role_boundaries(infos, "t") == (0, 2)
    assert _RoleInstanceInfo.find_role_boundaries(infos, "p") == (3, 4)
    assert _RoleInstanceInfo.find_role_boundaries(infos, "x") == (-1, -1)


class CountingStore(InProcessStore):
    def __init__(self):
        super().__init__(10)
        self.operations = []

    def set(self, key, value):
        self.operations.append("set")
        super().set(key, value)

    def get(self, key):
        self.operations.append("get")
        return super().multi_get([key])[0]

    def multi_get(self, keys):
        self.operations.append("multi_get")
        return super().multi_get(keys)

    def multi_set(self, keys, values):
        self.operations.append("multi_set")
        super().multi_set(keys, values)


def assign(nodes):
    """What agents in threads agree on: per node its workers; and the store they used."""
    store = CountingStore()

    def one(rank):
        role, size = nodes[rank]
        made = WorkerSpec(role, size, None, None, work)
        return Agent(made)._assign_worker_ranks(store, rank, len(nodes), made)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, range(len(nodes)))), store


def rows(workers):
    return [
        (w.local_rank, w.role_rank, w.global_rank, w.world_size, w.role_world_size) for w in workers
    ]


def test_rank_table_of_two_roles():
    nodes = [("ps", 4), ("trainer", 1), ("trainer", 2), ("trainer", 3), ("ps", 5)]
    assigned, store = assign(nodes)
    assert [rows(workers) for workers in assigned] == [
        [(i, i, i, 15, 9) for i in range(4)],
        [(0, 0, 4, 15, 6)],
        [(0, 1, 5, 15, 6), (1, 2, 6, 15, 6)],
        [(0, 3, 7, 15, 6), (1, 4, 8, 15, 6), (2, 5, 9, 15, 6)],
        [(i, 4 + i, 10 + i, 15, 9) for i in range(5)],
    ]
    counts = {name: store.operations.count(name) for name in set(store.operations)}
    assert counts == {"set": 5, "multi_get": 1, "multi_set": 1, "get": 5}
    assert json.loads(store.get("torchelastic/assigned_ranks/4")) == [10, 15, 4, 9]


def test_rank_table_of_equal_nodes():
    assigned, _ = assign([("t", 8)] * 3)
    assert rows(assigned[1]) == [(i, 8 + i, 8 + i, 24, 24) for i in range(8)]


@pytest.mark.parametrize(
    ("sizes", "roles", "worlds"),
    [
        ([8, 1, 2, 3, 4, 5, 2], ["a", "b", "b", "b", "b", "c", "c"], {"a": 8, "b": 10, "c": 7}),
        ([1, 4, 4, 4, 4, 3, 3], ["a", "b", "b", "b", "b", "c", "c"], {"a": 1, "b": 16, "c": 6}),
    ],
)
def test_ranks_are_complete_and_consecutive(sizes, roles, worlds):
    assigned, _ = assign(list(zip(roles, sizes, strict=True)))
    everybody = [worker for workers in assigned for worker in workers]
    assert [worker.global_rank for worker in everybody] == list(range(sum(sizes)))
    for role, world in worlds.items():
        mine = [w for r, ws in zip(roles, assigned, strict=True) if r == role for w in ws]
        assert [worker.role_rank for worker in mine] == list(range(world))
        assert {worker.role_world_size for worker in mine} == {world}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=20))
def test_any_rank_table_is_complete(nodes):
    infos = [_RoleInstanceInfo(role, i, size) for i, (role, size) in enumerate(nodes)]
    table = _rank_table(infos)
    ranks, by_role = [], {}
    for (role, size), (base, world, role_base, role_world) in zip(nodes, table, strict=True):
        ranks += range(base, base + size)
        by_role.setdefault(role, []).extend(range(role_base, role_base + size))
        assert world == sum(each for _, each in nodes)
        assert role_world == sum(each for other, each in nodes if other == role)
    assert ranks == list(range(len(ranks)))
    assert all(mine == list(range(len(mine))) for mine in by_role.values())


def test_identical_nodes_ask_no_store(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    made = spec(local_world_size=3)
    workers = Agent(made)._assign_worker_ranks(None, 2, 4, made)
    assert rows(workers) == [(i, 6 + i, 6 + i, 12, 12) for i in range(3)]


# The loop.


def test_constructor():
    agent = agent_of([SUCCEEDED], max_restarts=7)
    assert agent.get_worker_group() is agent.get_worker_group("other") is agent._worker_group
    assert agent._remaining_restarts == 7 and agent._worker_group.state == WorkerState.INIT
    assert (agent._exit_barrier_timeout, agent._shutdown_timeout) == (300, 30)
    assert (agent._store, agent._total_execution_time, agent._in_exit_barrier) == (None, 0, False)


def test_exit_barrier_timeout_of_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "750")
    assert Agent(spec())._exit_barrier_timeout == 750
    assert Agent(spec(), exit_barrier_timeout=20)._exit_barrier_timeout == 20
    for bad in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", bad)
        with pytest.raises(ValueError, match="EXIT_BARRIER_TIMEOUT"):
            Agent(spec())


def test_order_of_calls_when_all_goes_well():
    agent = agent_of([HEALTHY, SUCCEEDED])
    assert agent.run() == result(SUCCEEDED)
    assert agent.calls == [
        "_invoke_run", "_initialize_workers", "_rendezvous", "next_rendezvous",
        "_assign_worker_ranks", "start(INIT)", "monitor=HEALTHY", "num_nodes_waiting=0",
        "monitor=SUCCEEDED", "_exit_barrier", "_record_metrics", "_record_worker_events",
        "shutdown(SIGTERM,30)",
    ]  # fmt: skip
    group = agent._worker_group
    assert group.state == SUCCEEDED
    assert (group.group_rank, group.group_world_size) == (0, 1)
    assert (group.master_addr, group.master_port) == ("master", 1001)
    assert group.store is agent._store is not None
    assert [worker.id for worker in group.workers] == [100, 101]
    assert agent._remaining_restarts == 3 and agent._attempt == 0


def test_order_of_calls_of_a_restart():
    agent = agent_of([FAILED, SUCCEEDED], max_restarts=1)
    agent.run()
    assert agent.calls[agent.calls.index("monitor=FAILED") :][:7] == [
        "monitor=FAILED", "_restart_workers", "stop", "_initialize_workers", "_rendezvous",
        "next_rendezvous", "_assign_worker_ranks",
    ]  # fmt: skip
    assert "start(STOPPED)" in agent.calls
    assert agent._remaining_restarts == 0 and agent._attempt == 1
    assert agent._worker_group.master_port == 1002


@pytest.mark.parametrize("state", [FAILED, UNHEALTHY])
def test_restarts_run_out(state):
    agent = agent_of([state], max_restarts=3)
    ended = agent.run()
    assert ended.is_failed() and list(ended.failures) == [0]
    assert agent._worker_group.state == FAILED and agent._remaining_restarts == 0
    assert agent.calls.count(f"monitor={state.value}") == 4
    assert agent.calls[-4:] == [
        "stop", "_record_metrics", "_record_worker_events", "shutdown(SIGTERM,30)",
    ]  # fmt: skip
    assert "_exit_barrier" not in agent.calls


@pytest.mark.parametrize("state", [WorkerState.UNKNOWN, WorkerState.STOPPED, WorkerState.INIT])
def test_states_that_make_no_sense(state):
    agent = agent_of([state], max_restarts=100)
    with pytest.raises(Exception, match=rf"\[trainer\].*{state.name}"):
        agent.run()
    assert agent.calls[-2:] == [f"monitor={state.value}", "shutdown(SIGTERM,30)"]
    assert agent._worker_group.state == state and agent._remaining_restarts == 100


def test_membership_change():
    agent = agent_of([HEALTHY, HEALTHY, SUCCEEDED], waiting=[0, 1])
    agent.run()
    tail = agent.calls[agent.calls.index("num_nodes_waiting=1") :]
    assert tail[:3] == ["num_nodes_waiting=1", "_restart_workers", "stop"]
    assert "start(STOPPED)" in tail and agent._remaining_restarts == 3
    assert agent._restart_count() == 0 and agent._attempt == 1


def test_the_first_start_may_fail():
    agent = agent_of([HEALTHY])
    with patch.object(agent, "_start_workers", side_effect=OSError("no")), pytest.raises(OSError):
        agent.run()
    assert agent._worker_group.state == WorkerState.INIT
    assert agent.calls[-1] == "shutdown(SIGTERM,30)"


def test_restart_workers_again_and_again():
    agent = agent_of([HEALTHY])
    for _ in range(3):
        agent._restart_workers(agent._worker_group)
        assert agent._worker_group.state == HEALTHY
        assert agent._worker_group.group_rank == 0
    assert agent.calls.count("stop") == agent.calls.count("start(STOPPED)") == 3


def test_spec_goes_before_the_rendezvous():
    agent = agent_of([SUCCEEDED], master_addr="elsewhere", master_port=42)
    agent.run()
    assert agent._worker_group.master_addr == "elsewhere"
    assert agent._worker_group.master_port == 42


def test_execution_time_is_in_whole_seconds(monkeypatch):
    class Clock:
        now = 0.0

        def __getattr__(self, name):
            return getattr(time, name)

        def monotonic(self):
            Clock.now += 1.5
            return Clock.now

    monkeypatch.setattr(api, "time", Clock())
    agent = agent_of([SUCCEEDED])
    agent.run("ignored")
    assert isinstance(agent._total_execution_time, int) and agent._total_execution_time > 0


# Waiting.


def test_the_wait_can_be_cut_short():
    agent = Agent(spec(monitor_interval=60), [SUCCEEDED])
    timer = threading.Timer(0.05, agent.wake)
    timer.start()
    start = time.monotonic()
    agent.run()
    assert time.monotonic() - start < 30
    timer.join()


def test_hooks_decide_about_restarts():
    class Picky(Agent):
        def _should_restart(self, result):
            self.calls.append(f"should={len(result.failures)}")
            return self._attempt < 1

    agent = Picky(spec(max_restarts=0), [FAILED])
    assert agent.run().is_failed()
    assert agent.calls.count("should=1") == 2 and agent._attempt == 1
    assert agent._remaining_restarts == 0


# Signals and other exceptions.


class SignalException(Exception):
    """Another package's exception of that name."""

    def __init__(self, sigval):
        super().__init__("signal")
        self.sigval = sigval


def interrupted(agent, signals, method="_invoke_run"):
    return patch.object(agent, method, side_effect=[SignalException(each) for each in signals])


def test_a_signal_shuts_down_once_with_itself():
    agent = Agent(spec(), shutdown_timeout=7)
    with interrupted(agent, [signal.SIGHUP]), pytest.raises(SignalException):
        agent.run()
    assert agent.calls == ["shutdown(SIGHUP,7)"]


def test_our_own_signal_exception():
    from phalanx.elastic.multiprocessing import SignalException as OurSignalException

    agent = agent_of([HEALTHY])
    error = OurSignalException("x", sigval=signal.SIGTERM)
    with patch.object(agent, "_invoke_run", side_effect=error), pytest.raises(OurSignalException):
        agent.run()
    assert agent.calls == ["shutdown(SIGTERM,30)"]


@pytest.mark.parametrize(
    ("more", "shutdowns"),
    [(1, ["SIGHUP", "SIGTERM"]), (2, ["SIGHUP", "SIGTERM", "SIGKILL"])],
)
def test_further_signals_never_leave_workers_behind(more, shutdowns):
    seen = []

    class Nervous(Agent):
        def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
            seen.append(death_sig.name)
            if len(seen) <= more:
                raise SignalException(signal.SIGINT)

    agent = Nervous(spec())
    with interrupted(agent, [signal.SIGHUP]), pytest.raises(SignalException):
        agent.run()
    assert seen == shutdowns


def test_any_other_exception_shuts_down():
    agent = agent_of([HEALTHY])
    with (
        patch.object(agent, "_monitor_workers", side_effect=KeyError("x")),
        pytest.raises(KeyError),
    ):
        agent.run()
    assert agent.calls[-1] == "shutdown(SIGTERM,30)"


@pytest.mark.parametrize("ours", [True, False])
def test_a_node_that_is_not_needed_succeeds_with_nothing(ours):
    error_class = (
        RendezvousGracefulExitError
        if ours
        else type("RendezvousGracefulExitError", (Exception,), {})
    )
    agent = agent_of([HEALTHY])
    with patch.object(agent._worker_group.spec.rdzv_handler, "next_rendezvous") as rendezvous:
        rendezvous.side_effect = error_class("not needed")
        ended = agent.run()
    assert (ended.state, ended.return_values, ended.failures) == (SUCCEEDED, {}, {})
    assert agent.calls[-1] == "shutdown(SIGTERM,30)" and "_record_metrics" not in agent.calls


@pytest.mark.parametrize("style", ["none", "signal", "anything"])
def test_subclasses_may_know_fewer_arguments_of_shutdown(style):
    seen = []

    class Old(Agent):
        if style == "none":

            def _shutdown(self):
                seen.append(())

        elif style == "signal":

            def _shutdown(self, death_sig=signal.SIGTERM):
                seen.append((death_sig,))

        else:

            def _shutdown(self, *args, **kwargs):
                seen.append((args, kwargs))

    agent = Old(spec(), [SUCCEEDED])
    agent.run()
    with interrupted(agent, [signal.SIGINT]), pytest.raises(SignalException):
        agent.run()
    assert (
        seen
        == {
            "none": [(), ()],
            "signal": [(signal.SIGTERM,), (signal.SIGINT,)],
            "anything": [((), {"timeout": 30}), ((signal.SIGINT,), {"timeout": 30})],
        }[style]
    )


# The exit barrier.


def test_exit_barrier_is_called_by_its_module(monkeypatch):
    seen = []
    monkeypatch.setattr(api.store_util, "barrier", lambda **how: seen.append(how))
    agent = Agent(spec(), [SUCCEEDED], exit_barrier_timeout=9)
    agent.run()
    assert seen == [
        {
            "store": agent._store,
            "world_size": 1,
            "key_prefix": "torchelastic/agent/terminal_state",
            "barrier_timeout": 9,
        }
    ]


def test_exit_barrier_failure_is_no_failure(monkeypatch, caplog):
    caplog.set_level(logging.ERROR)

    def barrier(**how):
        assert agent._in_exit_barrier
        raise RuntimeError("nobody came")

    monkeypatch.setattr(api.store_util, "barrier", barrier)
    agent = agent_of([SUCCEEDED])
    assert not agent.run().is_failed()
    assert "nobody came" in caplog.text and agent._in_exit_barrier is False


def test_exit_barrier_with_nobody_else():
    agent = Agent(spec(), exit_barrier_timeout=0)
    agent._store, agent._worker_group.group_world_size = InProcessStore(), 2
    agent._exit_barrier()  # it is no failure
    assert agent._in_exit_barrier is False


def test_a_signal_leaves_the_exit_barrier(monkeypatch):
    def barrier(**how):
        raise SignalException(signal.SIGTERM)

    monkeypatch.setattr(api.store_util, "barrier", barrier)
    agent = agent_of([SUCCEEDED])
    with pytest.raises(SignalException):
        agent.run()
    assert agent._in_exit_barrier is False and agent.calls[-1] == "shutdown(SIGTERM,30)"


# Events.


def names(recorded):
    return [
        (event.source.value, event.name.removeprefix("torchelastic.worker.status."))
        for event in recorded
    ]


def test_events_of_a_clean_run(recorded):
    agent_of([HEALTHY, SUCCEEDED]).run()
    assert names(recorded) == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("WORKER", "SUCCEEDED"),
    ]


def test_events_of_a_restart_and_a_failure(recorded):
    agent_of([FAILED], max_restarts=1).run()
    begin = [("AGENT", "RENDEZVOUS"), ("AGENT", "ASSIGN_WORKER_RANKS")] + [("WORKER", "START")] * 2
    assert names(recorded) == [*begin, *begin, ("WORKER", "FAILED"), ("WORKER", "TERMINATED")]
    failed = recorded[-2].metadata
    assert json.loads(failed["raw_error"])["message"] == "<NONE>"
    assert failed["agent_restarts"] == 1
    assert json.loads(failed["metadata"])["exit_code"] == [1]
    assert json.loads(failed["metadata"])["worker_pid"] == [999]


def test_an_event_in_full(recorded):
    before = time.time_ns() // 1_000_000
    agent = agent_of([SUCCEEDED], max_restarts=4)
    agent.run()
    agent._remaining_restarts = 2
    event = agent._construct_event("SUCCEEDED", events.EventSource.WORKER, _first(agent))
    assert before <= event.timestamp <= time.time_ns() // 1_000_000
    assert list(event.metadata) == [
        "run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state",
        "total_run_time", "rdzv_backend", "raw_error", "metadata", "agent_restarts",
        "duration_ms",
    ]  # fmt: skip
    assert event.metadata["run_id"] == "run" and event.metadata["rdzv_backend"] == "fake"
    assert event.metadata["worker_id"] == "100" and event.metadata["agent_restarts"] == 2
    assert json.loads(event.metadata["metadata"]) == {
        "group_world_size": 1,
        "entry_point": "work",
        "local_rank": [0],
        "role_rank": [0],
        "role_world_size": [2],
        "exit_code": [None],
        "worker_pid": [None],
    }
    assert events.Event.deserialize(event.serialize()) == event
    rendezvous = recorded[0].metadata
    assert rendezvous["duration_ms"] >= 0 and rendezvous["worker_id"] is None
    assert json.loads(rendezvous["metadata"]) == {"group_world_size": None, "entry_point": "work"}


def _first(agent):
    return agent._worker_group.workers[0]


def test_last_events_of_the_agent():
    agent = agent_of([SUCCEEDED])
    assert agent.get_event_succeeded().source == "AGENT"
    assert agent.get_event_succeeded().metadata["state"] == "SUCCEEDED"
    try:
        raise ValueError("why")
    except ValueError:
        event = agent.get_event_failed()
    assert event.metadata["state"] == "FAILED" and "ValueError: why" in event.metadata["raw_error"]


def test_durations_are_recorded_even_then(recorded):
    agent = agent_of([SUCCEEDED])
    with (
        patch.object(agent._worker_group.spec.rdzv_handler, "next_rendezvous", side_effect=OSError),
        pytest.raises(OSError),
    ):
        agent.run()
    assert names(recorded) == [("AGENT", "RENDEZVOUS")]


def test_worker_states():
    agent = agent_of([SUCCEEDED])
    worker = _first(agent)
    worker.global_rank = 5
    assert agent._get_worker_state(worker, RunResult(SUCCEEDED, {5: None})) == "SUCCEEDED"
    assert agent._get_worker_state(worker, RunResult(FAILED, {}, {5: failure()})) == "FAILED"
    for state in (FAILED, UNHEALTHY):
        assert agent._get_worker_state(worker, RunResult(state)) == "TERMINATED"
    with pytest.raises(ValueError, match="Unknown worker: 5"):
        agent._get_worker_state(worker, RunResult(SUCCEEDED, {4: None}))


# Metrics.


@pytest.mark.parametrize(
    ("remaining", "maximum", "failed", "flakiness"),
    [(1, 1, False, 0), (3, 10, False, 63), (0, 0, False, 0), (1, 1, True, 100), (0, 1, False, 50)],
)
def test_flakiness(put, remaining, maximum, failed, flakiness):
    agent = agent_of([SUCCEEDED], max_restarts=maximum)
    agent._remaining_restarts = remaining
    agent._record_flakiness_metric(failed)
    assert put == [("workers.trainer.flakiness", flakiness)]


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("retried", [True, False])
def test_run_metrics(put, failed, retried):
    agent = agent_of([SUCCEEDED], max_restarts=10)
    agent._remaining_restarts -= 8 * retried
    agent._record_metrics(RunResult(FAILED, {}, {0: 0}) if failed else RunResult({}, {}))
    told = {name.removeprefix("workers.trainer."): value for name, value in put}
    assert told.pop("flakiness") >= 0
    assert told == {
        "run_total": 1,
        "run_success_with_retries": int(not failed and retried),
        "run_success_no_retries": int(not failed and not retried),
        "run_failed_with_retries": int(failed and retried),
        "run_failed_no_retries": int(failed and not retried),
    }


def test_metrics_of_each_tick(put):
    agent_of([HEALTHY, FAILED, SUCCEEDED], max_restarts=1).run()
    assert put[:6] == [
        ("workers.trainer.remaining_restarts", 1),
        ("workers.trainer.healthy", 1),
        ("workers.trainer.remaining_restarts", 1),
        ("workers.trainer.failed", 1),
        ("workers.trainer.remaining_restarts", 0),
        ("workers.trainer.succeeded", 1),
    ]


def test_profiled_methods(monkeypatch):
    import phalanx.elastic.metrics.api as metrics_api

    class Collector(metrics.MetricHandler):
        names: list[str] = []  # noqa: RUF012

        def emit(self, metric_data):
            self.names.append(metric_data.name)

    monkeypatch.setitem(metrics_api._metrics_map, "torchelastic", Collector())
    agent_of([FAILED, SUCCEEDED]).run()
    for method in (
        "run", "_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_restart_workers",
    ):  # fmt: skip
        assert f"SimpleElasticAgent.{method}.success" in Collector.names
        assert f"SimpleElasticAgent.{method}.duration.ms" in Collector.names
