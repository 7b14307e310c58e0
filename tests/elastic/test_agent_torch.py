"""Side by side with torch: the same names and signatures, and torch's stores and handlers here."""

import contextlib
import dataclasses
import importlib
import inspect
import signal
from datetime import timedelta

import pytest

import phalanx.elastic.utils.store as store_util
from phalanx.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec, WorkerState
from phalanx.elastic.rendezvous.local import LocalRendezvousHandler
from phalanx.elastic.rendezvous.store import InProcessStore
from phalanx.elastic.utils.foreign import is_graceful_exit, is_signal, is_store_error

pytestmark = pytest.mark.torch
dist = pytest.importorskip("torch.distributed")

MODULES = {
    "elastic.agent.server": (),
    "elastic.agent.server.api": (
        "DEFAULT_ROLE", "_TERMINAL_STATE_SYNC_ID", "_RoleInstanceInfo", "_get_fq_hostname",
        "put_metric", "record", "store_util",
    ),
    "elastic.agent.server.local_elastic_agent": (
        "_AliveCallbackProxy", "_resolve_uninterruptible_state_timeout", "start_processes",
        "read_proc_state", "create_healthcheck_server",
    ),
    "elastic.rendezvous": ("_register_out_of_tree_handlers",),
    "elastic.rendezvous.api": ("RendezvousStoreInfo",),
    "elastic.rendezvous.registry": ("_register_default_handlers", "handler_registry"),
    "elastic.rendezvous.static_tcp_rendezvous": (),
    "elastic.rendezvous.utils": ("_parse_rendezvous_config", "_matches_machine_hostname"),
    "elastic.events": (
        "Event", "EventSource", "EventMetadataValue", "NodeState", "RdzvEvent", "record",
        "record_rdzv_event", "construct_and_record_rdzv_event", "get_logging_handler",
    ),
    "elastic.events.api": (),
    "elastic.metrics": (
        "configure", "getStream", "put_metric", "publish_metric", "prof", "profile",
        "get_elapsed_time_ms", "MetricData", "MetricHandler", "MetricsConfig",
        "ConsoleMetricHandler", "NullMetricHandler", "initialize_metrics",
    ),
    "elastic.metrics.api": (),
    "elastic.utils": ("get_env_variable_or_raise", "get_socket_with_port", "macros"),
    "elastic.utils.store": ("DistStoreError", "_barrier_nonblocking"),
    "elastic.utils.distributed": (),
    "elastic.utils.logging": ("get_logger", "_derive_module_name"),
    "elastic.utils.log_level": ("get_log_level",),
    "elastic.utils.process_state": (),
    "elastic.control_plane": ("TORCH_WORKER_SERVER_SOCKET",),
    "launcher": ("LaunchConfig", "elastic_launch", "launch_agent"),
    "launcher.api": ("_get_entrypoint_name", "_get_addr_and_port", "rdzv_registry"),
}  # fmt: skip

# Ours take more: a later torch's parameters, or one that older subclasses pass.
MORE_PARAMETERS = {
    "LaunchConfig.__init__": {"exit_barrier_timeout"},
    "LocalElasticAgent._stop_workers": {"is_restart"},
    "LocalElasticAgent._shutdown": {"is_restart"},
    "elastic.agent.server.local_elastic_agent.start_processes": {"ours"},
}


def pairs():
    for name, privates in MODULES.items():
        theirs = importlib.import_module(f"torch.distributed.{name}")
        ours = importlib.import_module(f"phalanx.{name}")
        for member in {*getattr(theirs, "__all__", ()), *privates}:
            yield f"{name}.{member}", getattr(ours, member), getattr(theirs, member)


def signatures(ours, theirs, name):
    """Yield (name, ours, theirs) for every function there, members of classes included."""
    if inspect.isclass(theirs):
        for member, value in vars(theirs).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if not inspect.isfunction(function):
                continue
            if member in ("__eq__", "__repr__", "__hash__", "__replace__"):
                continue
            mine = inspect.unwrap(getattr(ours, member))
            yield f"{name.rpartition('.')[2]}.{member}", mine, function
    elif inspect.isfunction(theirs):
        yield name, inspect.unwrap(ours), inspect.unwrap(theirs)


def parameters(function):
    return {
        name: (parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


@pytest.mark.parametrize("module", MODULES)
def test_names_are_there(module):
    theirs = importlib.import_module(f"torch.distributed.{module}")
    ours = importlib.import_module(f"phalanx.{module}")
    wanted = {*getattr(theirs, "__all__", ()), *MODULES[module]}
    assert {name for name in wanted if not hasattr(ours, name)} == set()


def test_signatures_are_the_same():
    different = []
    for name, ours, theirs in pairs():
        for member, mine, function in signatures(ours, theirs, name):
            if not inspect.isroutine(mine) or member.startswith("MetricData."):
                continue
            if member.endswith(".__subclasshook__"):  # of typing in Python 3.10, not of anybody's
                continue
            have, want = parameters(mine), parameters(function)
            more = {key for key in have if key not in want}
            if more - MORE_PARAMETERS.get(member, set()):
                different.append((member, "has more", more))
            for key, (kind, default) in want.items():
                if key not in have:
                    different.append((member, "lacks", key))
                elif key != "exit_barrier_timeout" and have[key] != (kind, default):
                    different.append((member, key, have[key], (kind, default)))
            kept = [key for key in have if key in want]
            if kept != list(want):
                different.append((member, "order", list(have), list(want)))
    assert not different, "\n".join(map(str, different))


@pytest.mark.parametrize("name", ["WorkerSpec", "RunResult"])
def test_fields_are_the_same(name):
    from torch.distributed.elastic.agent.server import api as theirs

    from phalanx.elastic.agent.server import api as ours

    def fields(module):
        return [field.name for field in dataclasses.fields(getattr(module, name))]

    assert fields(ours) == fields(theirs)
    assert sorted(ours.Worker.__slots__) == sorted(theirs.Worker.__slots__)
    assert sorted(ours.WorkerGroup.__slots__) == sorted(theirs.WorkerGroup.__slots__)


def test_torchs_errors_are_recognised():
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

    assert is_signal(SignalException("x", signal.SIGTERM))
    assert is_graceful_exit(RendezvousGracefulExitError())
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError) as caught:
        store.get("nothing")
    assert is_store_error(caught.value)


@pytest.mark.parametrize("make", [dist.HashStore, InProcessStore])
def test_stores_agree(make):
    store = make()
    store.set_timeout(timedelta(milliseconds=10))
    told = [store.timeout]
    store.set("a", "1")
    told += [store.add("a", 2), store.get("a"), store.check(["a", "b"]), store.num_keys()]
    told += [store.compare_set("a", "3", "4"), store.compare_set("a", "9", "5")]
    told += [store.compare_set("b", "", "new"), store.compare_set("c", "old", "new")]
    store.multi_set(["x", "y"], ["1", "2"])
    store.append("x", "+")
    told += [store.multi_get(["x", "y"]), store.delete_key("x"), store.delete_key("x")]
    for call in (lambda: store.get("z"), lambda: store.wait(["z"], timedelta(milliseconds=5))):
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(is_store_error(caught.value))
    assert told == [
        timedelta(milliseconds=10), 3, b"3", False, 1, b"4", b"4", b"new", b"old",
        [b"1+", b"2"], True, False, True, True,
    ]  # fmt: skip


class Agent(SimpleElasticAgent):
    def _start_workers(self, worker_group):
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group):
        pass

    def _monitor_workers(self, worker_group):
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        pass


def test_torchs_rendezvous_in_our_agent():
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    from phalanx.elastic.utils import get_socket_with_port

    with contextlib.closing(get_socket_with_port()) as held:
        port = held.getsockname()[1]
    params = RendezvousParameters(
        "c10d", f"localhost:{port}", "run", 1, 1, local_addr="127.0.0.1", is_host=True
    )
    handler = registry.get_rendezvous_handler(params)
    agent = Agent(WorkerSpec("trainer", 2, handler, entrypoint="prog", monitor_interval=0.001))
    try:
        assert sorted(agent.run().return_values) == [0, 1]
        assert agent._worker_group.master_addr == "127.0.0.1"
        store_util.barrier(agent._store, 1, "again", 5)
    finally:
        handler.shutdown()


@pytest.mark.parametrize("served", [True, False])
def test_torchs_store_on_our_socket(served):
    handler = LocalRendezvousHandler("c10d", "run")
    try:
        where = handler.next_rendezvous().bootstrap_store_info
        options = {"wait_for_workers": False, "timeout": timedelta(seconds=10)}
        if served:
            listener = handler.claim_listener()
            options.update(master_listen_fd=listener.dup().detach(), use_libuv=False)
        host = dist.TCPStore(where.master_addr, where.master_port, None, True, **options)
        options = {"wait_for_workers": False, "timeout": timedelta(seconds=10)}
        client = dist.TCPStore(where.master_addr, where.master_port, None, False, **options)
        host.set("k", "v")
        assert client.get("k") == b"v"
    finally:
        handler.shutdown()


def test_torchs_worker_server_is_used_when_torch_is_there(tmp_path, monkeypatch):
    from phalanx.elastic.control_plane import worker_main

    path = tmp_path / "worker.sock"
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(path))
    with worker_main():
        assert path.exists()


def test_create_c10d_store():
    from phalanx.elastic.utils.distributed import create_c10d_store

    store = create_c10d_store(True, "127.0.0.1", timeout=10)
    store.set("k", "v")
    assert store.get("k") == b"v"
    with pytest.raises(RuntimeError, match=f"port: {store.port} already in use"):
        create_c10d_store(True, "127.0.0.1", store.port, timeout=10)
    with pytest.raises(ValueError, match="server_port"):
        create_c10d_store(True, "127.0.0.1", world_size=2)
