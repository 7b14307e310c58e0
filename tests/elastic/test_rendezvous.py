"""Rendezvous: parameters, registry, parsers, and the handler for one node."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx.elastic.rendezvous as rdzv
from phalanx.elastic.rendezvous import registry, static_tcp_rendezvous
from phalanx.elastic.rendezvous.local import (
    LocalRendezvousHandler,
    RendezvousBackendUnavailableError,
)
from phalanx.elastic.rendezvous.ports import PortInUseError, hold, listening_inodes, owners
from phalanx.elastic.rendezvous.store import InProcessStore
from phalanx.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)


def parameters(backend="c10d", endpoint="localhost:0", nodes=(1, 1), **options):
    return rdzv.RendezvousParameters(backend, endpoint, "run", *nodes, **options)


@pytest.fixture
def handler():
    made = registry.get_rendezvous_handler(parameters())
    yield made
    made.shutdown()


# Parameters and registry.


@pytest.mark.parametrize(
    ("backend", "nodes", "text"),
    [
        ("", (1, 1), "non-empty"),
        ("b", (0, 1), r"\(0\) must be greater"),
        ("b", (3, 2), r"\(2\).*\(3\)"),
    ],
)
def test_parameters_are_checked(backend, nodes, text):
    with pytest.raises(ValueError, match=text):
        parameters(backend, nodes=nodes)


def test_parameters_have_attributes_and_options():
    params = parameters(local_addr="a", x=1, y="2")
    assert (params.backend, params.endpoint, params.run_id) == ("c10d", "localhost:0", "run")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 1, "a")
    assert params.config == {"x": 1, "y": "2"}
    assert params.get("x") == 1 and params.get("z") is None and params.get("z", 4) == 4
    assert params.get_as_int("y") == 2 and params.get_as_int("z") is None
    assert params.get_as_int("z", 4) == 4


@pytest.mark.parametrize("value", ["1", "True", "tRue", "T", "t", "yEs", "Y", 1, True])
def test_true(value):
    assert parameters(flag=value).get_as_bool("flag") is True


@pytest.mark.parametrize("value", ["0", "False", "faLse", "F", "f", "nO", "N", 0, False])
def test_false(value):
    assert parameters(flag=value).get_as_bool("flag") is False


@pytest.mark.parametrize("value", ["01", "Flse", "Ture", "g", "4", "_", "", 2, {}, []])
def test_neither(value):
    with pytest.raises(ValueError, match="'flag' does not represent a valid boolean"):
        parameters(flag=value).get_as_bool("flag")


@pytest.mark.parametrize("value", ["a", "0a", "3b", "_", "", {}])
def test_no_number(value):
    with pytest.raises(ValueError, match="'n' does not represent a valid integer"):
        parameters(n=value).get_as_int("n")


class Handler(rdzv.RendezvousHandler):
    def __init__(self, params):
        self.params = params

    def get_backend(self):
        return "mine"

    def next_rendezvous(self):
        raise NotImplementedError

    is_closed = set_closed = num_nodes_waiting = get_run_id = shutdown = next_rendezvous


def test_registry():
    names = rdzv.RendezvousHandlerRegistry()
    names.register("mine", Handler)
    names.register("mine", Handler)
    assert names.create_handler(parameters("mine")).params.run_id == "run"
    assert names.create_handler(parameters("mine")).use_agent_store is False
    with pytest.raises(ValueError, match="already registered"):
        names.register("mine", lambda params: Handler(params))
    with pytest.raises(ValueError, match="non-empty"):
        names.register("", Handler)
    with pytest.raises(ValueError, match=r"'other' is not registered"):
        names.create_handler(parameters("other"))
    names.register("alias", Handler)
    with pytest.raises(RuntimeError, match=r"'mine' does not match.*'alias'"):
        names.create_handler(parameters("alias"))


def test_a_handler_must_be_complete():
    with pytest.raises(TypeError):
        rdzv.RendezvousHandler()


@pytest.fixture
def entry_points(monkeypatch):
    offered = EntryPoints(
        [
            EntryPoint("mine", f"{__name__}:give_creator", "torchrun.handlers"),
            EntryPoint("broken", "no_such_module:x", "torchrun.handlers"),
            EntryPoint("elsewhere", f"{__name__}:give_creator", "torchrun.logs_specs"),
        ]
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: offered.select(**by))
    monkeypatch.setattr(
        registry.handler_registry, "_registry", dict(registry.handler_registry._registry)
    )


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.give_creator = give_creator
    return module


def give_creator():
    return Handler


def test_entry_points_are_found_when_a_name_is_unknown(entry_points, monkeypatch, caplog):
    monkeypatch.setattr(
        registry.handler_registry, "_discover", registry._register_out_of_tree_handlers
    )
    assert isinstance(registry.get_rendezvous_handler(parameters("mine")), Handler)
    assert "broken" in caplog.text
    assert "elsewhere" not in registry.handler_registry._registry


def test_entry_points_can_be_registered_at_once(entry_points):
    rdzv._register_out_of_tree_handlers()
    assert rdzv.rendezvous_handler_registry._registry["mine"] is Handler


def test_known_backends():
    assert {"static", "c10d", "etcd", "etcd-v2", "phalanx"} <= set(
        rdzv.rendezvous_handler_registry._registry
    )


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_is_refused_in_words(backend):
    with pytest.raises(
        RendezvousBackendUnavailableError, match=f"'{backend}' is not part"
    ) as caught:
        registry.get_rendezvous_handler(parameters(backend, "h:2379"))
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, rdzv.RendezvousError)


# Parsers.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("localhost", 7)),
        ("", ("localhost", 7)),
        ("  \t", ("localhost", 7)),
        ("h", ("h", 7)),
        (" h ", ("h", 7)),
        ("h:1", ("h", 1)),
        ("h:0", ("h", 0)),
        ("h:65535", ("h", 65535)),
        ("192.168.0.1:9", ("192.168.0.1", 9)),
        ("dash-ed.example:9", ("dash-ed.example", 9)),
        ("[::1]", ("::1", 7)),
        ("[::1]:90", ("::1", 90)),
        ("::1", ("::1", 7)),
        ("2001:db8::7", ("2001:db8::7", 7)),
        ("h:1:2", ("h:1", 2)),
    ],
)
def test_endpoints(text, expected):
    assert parse_rendezvous_endpoint(text, 7) == expected


@pytest.mark.parametrize(
    "text", ["h:", "h:65536", "h:-1", "h:a", "a b", "a b:1", "http://h:1", "~"]
)
def test_no_endpoints(text):
    with pytest.raises(ValueError, match="endpoint"):
        parse_rendezvous_endpoint(text, 7)


@given(
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z0-9]{1,5}){0,2}", fullmatch=True),
    st.integers(0, 65535),
)
def test_endpoints_round_trip(host, port):
    assert parse_rendezvous_endpoint(f"{host}:{port}", 7) == (host, port)


@given(st.text(max_size=30))
def test_any_text_is_an_endpoint_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        host, port = parse_rendezvous_endpoint(text, 7)
        assert host and 0 <= port < 65536


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 , b = x y ", {"a": "1", "b": "x y"}),
        ("a=1=2", {"a": "1=2"}),
    ],
)
def test_configs(text, expected):
    assert _parse_rendezvous_config(text) == expected


@pytest.mark.parametrize("text", ["=1", "a=1,,b=2", ",", "a", "a=", "a=1,b", "a= ,b=2"])
def test_no_configs(text):
    with pytest.raises(ValueError):
        _parse_rendezvous_config(text)


def test_own_hostname():
    assert _matches_machine_hostname("localhost")
    assert _matches_machine_hostname("127.0.0.1") and _matches_machine_hostname("::1")
    assert _matches_machine_hostname(socket.gethostname())
    assert not _matches_machine_hostname("192.0.2.1")


# Stores and addresses.


def test_store_info_is_agreed_through_the_store():
    store = InProcessStore()
    build = rdzv.RendezvousStoreInfo.build
    first = build(0, store, "10.1.1.1", 77)
    assert first == build(1, store, "10.2.2.2") == rdzv.RendezvousStoreInfo("10.1.1.1", 77)
    assert store.get("MASTER_ADDR") == b"10.1.1.1" and store.get("MASTER_PORT") == b"77"
    fresh = build(0, InProcessStore(), None)
    assert fresh.master_addr == socket.getfqdn() and fresh.master_port > 0


# One node.


@pytest.mark.parametrize("backend", ["c10d", "phalanx"])
def test_one_node_gets_a_round_at_once(backend):
    handler = registry.get_rendezvous_handler(parameters(backend))
    try:
        info = handler.next_rendezvous()
        assert (handler.get_backend(), handler.get_run_id()) == (backend, "run")
        assert (info.rank, info.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert info.bootstrap_store_info.master_port == info.listener.getsockname()[1] > 0
        assert not handler.is_closed()
    finally:
        assert handler.shutdown()
    assert handler.is_closed() and handler.listener is None
    with pytest.raises(rdzv.RendezvousClosedError):
        handler.next_rendezvous()
    assert handler.shutdown()


def test_each_round_is_fresh(handler):
    first = handler.next_rendezvous()
    first.store.set("k", "stale")
    second = handler.next_rendezvous()
    assert (first.round, second.round, handler.round) == (0, 1, 1)
    assert not second.store.check(["k"])
    assert (first.store.prefix, second.store.prefix) == ("run.0", "run.1")
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert first.listener.fileno() == -1 and second.listener is handler.listener


def test_a_worker_can_serve_on_the_held_port_and_nobody_gets_it_by_chance(handler):
    port = handler.next_rendezvous().bootstrap_store_info.master_port
    assert handler.use_agent_store is False
    with contextlib.closing(socket.socket()) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    with contextlib.closing(socket.socket()) as greedy, pytest.raises(OSError) as caught:
        greedy.bind(("127.0.0.1", port))
    assert caught.value.errno == errno.EADDRINUSE
    for host in ("127.0.0.1", ""):
        with contextlib.closing(socket.socket()) as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.bind((host, port))
            worker.listen()


def test_the_agent_can_serve_instead(handler):
    handler.next_rendezvous()
    assert handler.offers_listener
    listener = handler.claim_listener()
    assert handler.use_agent_store is True and listener is handler.listener
    with contextlib.closing(socket.create_connection(listener.getsockname(), 5)):
        accepted, _ = listener.accept()
        accepted.close()
    handler.next_rendezvous()
    assert handler.use_agent_store is False


def test_nothing_to_serve(handler):
    assert not handler.offers_listener
    with pytest.raises(rdzv.RendezvousStateError):
        handler.claim_listener()


def test_sharing_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = registry.get_rendezvous_handler(parameters())
    handler.next_rendezvous()
    with contextlib.closing(handler.listener):
        assert not handler.offers_listener
        with pytest.raises(rdzv.RendezvousStateError):
            handler.claim_listener()


def test_a_given_port_is_bound_once_and_kept():
    with contextlib.closing(hold("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    handler = registry.get_rendezvous_handler(parameters(master_port=str(port)))
    try:
        first, second = handler.next_rendezvous(), handler.next_rendezvous()
        assert first.listener is second.listener
        assert second.bootstrap_store_info.master_port == port
        handler.claim_listener()
        with pytest.raises(PortInUseError):
            hold("127.0.0.1", port)
    finally:
        handler.shutdown()
    hold("127.0.0.1", port).close()


def test_two_jobs_with_one_port():
    one = LocalRendezvousHandler("c10d", "one")
    port = one.next_rendezvous().bootstrap_store_info.master_port
    two = LocalRendezvousHandler("c10d", "two", port=port)
    try:
        two.next_rendezvous()  # nobody listens yet
        one.claim_listener()
        with pytest.raises(PortInUseError, match=f"port {port} .* process {os.getpid()}"):
            two.claim_listener()
        assert two.use_agent_store is False
    finally:
        one.shutdown()
        two.shutdown()


@pytest.mark.process
def test_a_busy_port_names_its_owner():
    code = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        port = int(other.stdout.readline())
        with pytest.raises(PortInUseError) as caught:
            LocalRendezvousHandler("c10d", "run", port=port).next_rendezvous()
        assert [pid for pid, _ in caught.value.holders] == [other.pid]
        assert f"port {port} on 127.0.0.1 is in use by process {other.pid}" in str(caught.value)
        assert "--master-port" in str(caught.value)
        other.stdin.close()
        other.wait(10)
    assert owners(port) == []


def test_the_kernels_table_is_read():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
        " inode\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0"
        " 123 1 0000000000000000 100 0 0 10 0\n"
        "   1: 0100007F:1F90 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0"
        " 124 1 0000000000000000 100 0 0 10 0\n"
        "   2: 00000000000000000000000001000000:1F91 00000000000000000000000000000000:0000 0A"
        " 00000000:00000000 00:00000000 00000000     0        0 125 1 0 100 0 0 10 0\n"
        "garbage\n"
    )
    assert listening_inodes(table, 0x1F90) == {"123"}
    assert listening_inodes(table, 0x1F91) == {"125"}
    assert listening_inodes(table, 80) == set()


@pytest.mark.parametrize(
    ("host", "text"),
    [("192.0.2.1", "not an address of this machine"), ("no.such.host.invalid", "resolved")],
)
def test_addresses_that_are_not_ours(host, text):
    with pytest.raises(rdzv.RendezvousError, match=text):
        LocalRendezvousHandler("c10d", "run", host=host).next_rendezvous()


@pytest.mark.parametrize(
    ("endpoint", "nodes"),
    [("localhost:29400", (1, 1)), ("node7:1234", (1, 1)), ("", (1, 1)), ("localhost:0", (1, 4))],
)
def test_what_is_one_node(endpoint, nodes):
    assert registry.get_rendezvous_handler(parameters("c10d", endpoint, nodes)).get_run_id()


@pytest.mark.parametrize(
    ("endpoint", "nodes"),
    [("localhost:0", (2, 2)), ("node7:1234", (1, 2)), ("node7", (1, 2)), ("", (2, 4))],
)
@pytest.mark.parametrize("backend", ["c10d", "phalanx"])
def test_what_is_not(backend, endpoint, nodes):
    with pytest.raises(rdzv.RendezvousError, match=r"one node so far.*WorkerSpec\.rdzv_handler"):
        registry.get_rendezvous_handler(parameters(backend, endpoint, nodes))


def test_options_are_checked(caplog):
    caplog.set_level("WARNING")
    with pytest.raises(ValueError, match="join_timeout"):
        registry.get_rendezvous_handler(parameters(join_timeout=0))
    registry.get_rendezvous_handler(parameters(timeout=900, is_host="1", rank=0))
    assert not caplog.records
    registry.get_rendezvous_handler(parameters(join_timout=5))
    assert "join_timout" in caplog.text and "join_timeout" in caplog.text


def test_local_addr_is_the_master():
    handler = registry.get_rendezvous_handler(parameters(local_addr="localhost"))
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info.master_addr == "localhost"
    assert info.listener.getsockname()[0] == "127.0.0.1"
    handler.shutdown()


def test_rounds_from_many_threads_are_all_different(handler):
    rounds = []

    def join():
        rounds.append(handler.next_rendezvous().round)

    threads = [threading.Thread(target=join) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(rounds) == list(range(8))


# static


@pytest.mark.parametrize(
    ("endpoint", "options", "text"),
    [
        ("h:1", {}, "rank is absent"),
        ("", {"rank": 0}, "endpoint is absent"),
        ("h", {"rank": 0}, "Port is absent"),
    ],
)
def test_static_needs(endpoint, options, text):
    with pytest.raises(ValueError, match=text):
        registry.get_rendezvous_handler(parameters("static", endpoint, **options))


@pytest.mark.parametrize(("nodes", "rank"), [((2, 2), 0), ((1, 1), 1)])
def test_static_is_one_node(nodes, rank):
    with pytest.raises(rdzv.RendezvousError, match="one node so far"):
        registry.get_rendezvous_handler(parameters("static", "h:1", nodes, rank=rank))


def test_static_can_be_used_again_and_again():
    handler = registry.get_rendezvous_handler(
        parameters("static", "127.0.0.1:0", rank=0, timeout="9")
    )
    assert isinstance(handler, static_tcp_rendezvous.StaticTCPRendezvous)
    assert (handler.master_addr, handler.rank, handler.world_size) == ("127.0.0.1", 0, 1)
    try:
        for _ in range(2):
            info = handler.next_rendezvous()
            assert (info.rank, info.world_size) == (0, 1)
            assert info.store.timeout.total_seconds() == 9
            assert handler.get_backend() == "static"
            handler.set_closed()
            assert not handler.is_closed() and handler.num_nodes_waiting() == 0
            assert handler.shutdown()
    finally:
        handler.shutdown()
