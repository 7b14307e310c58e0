"""The rendezvous interface, its registry, its parsers, one node's rounds (T121 to T134)."""

from __future__ import annotations

import socket
from typing import Any

from harness import (
    Diary,
    DictStore,
    Impl,
    case,
    env,
    fake_handler,
    free_port,
    outcome,
    plain,
    raised,
    threads,
)


@case("T132.endpoints")
def endpoints(impl: Impl) -> Any:
    """Endpoints as text."""
    parse = impl.get("elastic.rendezvous.utils:parse_rendezvous_endpoint")
    table = [
        None,
        "",
        " ",
        "h",
        "h:1",
        "[::1]",
        "[::1]:90",
        "::1",
        "h:1:2",
        "h:",
        "h:65536",
        "h:-1",
        "a b",
        "http://h:1",
        "h:x",
        "127.0.0.1:0",
        "a-b.c:65535",
        "[::1]:",
        ":5",
    ]
    return {str(t): outcome(lambda t=t: list(parse(t, 7))) for t in table}


@case("T132.config")
def config(impl: Impl) -> Any:
    """Configurations as text."""
    parse = impl.get("elastic.rendezvous.utils:_parse_rendezvous_config")
    table = [
        "",
        " ",
        "a=1",
        "a=1,b=2",
        " a = 1 , b = 2 ",
        "a=1=2",
        "a",
        "a=",
        "=1",
        "a=1,",
        ",",
        "a=1,,b=2",
    ]
    return {t: outcome(lambda t=t: parse(t)) for t in table}


@case("T132.parameters")
def parameters(impl: Impl) -> Any:
    """RendezvousParameters: what it refuses, get, get_as_bool, get_as_int."""
    make = impl.rdzv.RendezvousParameters

    def of(**config: Any) -> Any:
        return make("b", "e", "r", 1, 2, **config)

    good = of(local_addr="addr", one="1")
    bools = [
        "1",
        "true",
        "True",
        "t",
        "yes",
        "y",
        "0",
        "false",
        "F",
        "no",
        "n",
        "x",
        "",
        1,
        0,
        True,
        2,
        None,
    ]
    ints = ["1", "-3", " 4 ", "x", "1.5", "", 5, None]
    return {
        "attributes": [
            good.backend,
            good.endpoint,
            good.run_id,
            good.min_nodes,
            good.max_nodes,
            good.local_addr,
            good.config,
        ],
        "get": [good.get("one"), good.get("two"), good.get("two", 2)],
        "bools": {repr(b): outcome(lambda b=b: of(k=b).get_as_bool("k")) for b in bools},
        "bool default": [good.get_as_bool("no"), good.get_as_bool("no", True)],
        "ints": {repr(i): outcome(lambda i=i: of(k=i).get_as_int("k")) for i in ints},
        "int default": [good.get_as_int("no"), good.get_as_int("no", 3)],
        "empty backend": outcome(lambda: make("", "e", "r", 1, 1), text=True),
        "min 0": outcome(lambda: make("b", "e", "r", 0, 1), text=True),
        "max < min": outcome(lambda: make("b", "e", "r", 2, 1), text=True),
        "None backend": raised(lambda: make(None, "e", "r", 1, 1)),
    }


@case("T133.registry")
def registry(impl: Impl) -> Any:
    """Registering and creating."""
    reg = impl.rdzv.RendezvousHandlerRegistry()
    handler = fake_handler(impl, backend="mine")

    def creator(_params: Any) -> Any:
        return handler

    def other(_params: Any) -> Any:
        return handler

    reg.register("mine", creator)
    reg.register("theirs", creator)
    params = impl.rdzv.RendezvousParameters("mine", "", "r", 1, 1)
    return {
        "created": reg.create_handler(params) is handler,
        "empty": raised(lambda: reg.register("", creator)),
        "same again": raised(lambda: reg.register("mine", creator)),
        "other creator": raised(lambda: reg.register("mine", other)),
        "unknown": raised(
            lambda: reg.create_handler(impl.rdzv.RendezvousParameters("none", "", "r", 1, 1))
        ),
        "mismatch": raised(
            lambda: reg.create_handler(impl.rdzv.RendezvousParameters("theirs", "", "r", 1, 1))
        ),
    }


@case("T133.known_backends")
def known(impl: Impl) -> Any:
    """Which names are known; an unknown one."""
    reg = impl.rdzv.rendezvous_handler_registry
    get = impl.get("elastic.rendezvous.registry:get_rendezvous_handler")

    def unknown(_params: Any) -> Any:
        raise AssertionError

    shown = {}
    for name in ("static", "c10d", "etcd", "etcd-v2"):
        # A second creator under a known name is refused.
        shown[name] = raised(lambda name=name: reg.register(name, unknown))
    shown["nonsense"] = raised(
        lambda: get(impl.rdzv.RendezvousParameters("nonsense", "", "r", 1, 1))
    )
    return shown


@case("T133.entry_points")
def entry_points(impl: Impl) -> Any:
    """A backend from the entry point group torchrun.handlers; one that cannot be loaded."""
    import sys
    from unittest import mock

    from harness import folder

    module = impl.mod("elastic.rendezvous.registry")
    with folder() as d:
        info = d / "plug-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[torchrun.handlers]\nplugged = plug:factory\nbroken = plug:missing\n"
        )
        (d / "plug.py").write_text(
            "def factory():\n    return creator\n"
            "class Handler:\n    def get_backend(self): return 'plugged'\n"
            "def creator(params): return Handler()\n"
        )
        with mock.patch.object(sys, "path", [str(d), *sys.path]):
            again = outcome(module._register_out_of_tree_handlers)
            params = impl.rdzv.RendezvousParameters("plugged", "", "r", 1, 1)
            return [again, type(module.get_rendezvous_handler(params)).__name__]


@case("T124.info")
def info(impl: Impl) -> Any:
    """RendezvousInfo is read-only; RendezvousStoreInfo.build by rank."""
    rdzv = impl.rdzv
    boot = rdzv.RendezvousStoreInfo("h", 5)
    one = rdzv.RendezvousInfo("store", 1, 2, boot)
    store = DictStore()
    zero = rdzv.RendezvousStoreInfo.build(0, store, "addr", server_port=99)
    seen = threads([lambda: vars(rdzv.RendezvousStoreInfo.build(1, store, None))])
    free = rdzv.RendezvousStoreInfo.build(0, DictStore(), None)
    return {
        "values": [one.store, one.rank, one.world_size, one.bootstrap_store_info is boot],
        "read only": raised(lambda: setattr(one, "rank", 3)),
        "built": [zero.master_addr, zero.master_port, seen],
        "keys": dict(sorted(store._data.items())),
        "free": [free.master_addr == socket.getfqdn(), 0 < free.master_port < 65536],
    }


@case("T121.handler_defaults")
def handler_defaults(impl: Impl) -> Any:
    """What a handler gets without writing it."""

    class Minimal(impl.rdzv.RendezvousHandler):  # type: ignore[misc, name-defined]
        def get_backend(self) -> str:
            return "x"

        def next_rendezvous(self) -> Any: ...
        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None: ...
        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "r"

        def shutdown(self) -> bool:
            return True

    return {
        "use_agent_store": Minimal().use_agent_store,
        "incomplete": raised(impl.rdzv.RendezvousHandler),
    }


def c10d(impl: Impl, **options: Any) -> Any:
    options = {"is_host": True, "join_timeout": 10, "last_call_timeout": 1, **options}
    nodes = options.pop("nodes", (1, 1))
    params = impl.rdzv.RendezvousParameters(
        "c10d",
        options.pop("endpoint", "localhost:0"),
        options.pop("run_id", "job"),
        *nodes,
        local_addr=options.pop("local_addr", None),
        **options,
    )
    return impl.get("elastic.rendezvous.registry:get_rendezvous_handler")(params)


@case("T124.one_node")
def one_node(impl: Impl) -> Any:
    """One node's rounds with backend c10d."""
    handler = c10d(impl, local_addr="127.0.0.1")
    first = handler.next_rendezvous()
    second = handler.next_rendezvous()
    first.store.set("key", "one")
    shown = {
        "backend": handler.get_backend(),
        "run_id": handler.get_run_id(),
        "rank, world": [[i.rank, i.world_size] for i in (first, second)],
        "address": {i.bootstrap_store_info.master_addr for i in (first, second)},
        "port type": type(first.bootstrap_store_info.master_port).__name__,
        "store works": first.store.get("key"),
        "rounds apart": not _has(second.store, "key"),
        "use_agent_store": handler.use_agent_store,
        "waiting": handler.num_nodes_waiting(),
        "closed": handler.is_closed(),
    }
    handler.set_closed()
    handler.set_closed()
    shown["after set_closed"] = [handler.is_closed(), raised(handler.next_rendezvous)]
    shown["shutdown"] = [handler.shutdown(), handler.shutdown()]
    return shown


def _has(store: Any, key: str) -> bool:
    import datetime

    try:
        store.wait([key], datetime.timedelta(milliseconds=50))
    except Exception:
        return False
    return True


@case("T128.sharing_off")
def sharing_off(impl: Impl) -> Any:
    """TORCH_DISABLE_SHARE_RDZV_TCP_STORE: workers host the store themselves."""
    shown = {}
    for value in ("1", "0"):
        with env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=value):
            handler = c10d(impl)
            shown[value] = [
                handler.use_agent_store,
                0 < handler.next_rendezvous().bootstrap_store_info.master_port,
            ]
            handler.shutdown()
    return shown


@case("T129.min_never_reached")
def min_never_reached(impl: Impl) -> Any:
    """Two nodes needed, one there."""

    def go() -> Any:
        handler = c10d(impl, nodes=(2, 2), join_timeout=1, run_id="lonely")
        return handler.next_rendezvous()

    try:
        go()
    except impl.rdzv.RendezvousError as error:
        return ["RendezvousError", type(error).__name__]
    return "no error"


@case("T127.bad_options")
def bad_options(impl: Impl) -> Any:
    """Options a backend refuses."""
    return {
        "join_timeout": raised(lambda: c10d(impl, join_timeout=0)),
        "text": raised(lambda: c10d(impl, join_timeout="x")),
        "close_timeout": raised(lambda: c10d(impl, close_timeout=-1)),
        "run_id": raised(lambda: c10d(impl, run_id="")),
        "store_type": raised(lambda: c10d(impl, store_type="paper")),
    }


@case("T131.static_refusals")
def static_refusals(impl: Impl) -> Any:
    """What the static backend refuses."""
    get = impl.get("elastic.rendezvous.registry:get_rendezvous_handler")
    make = impl.rdzv.RendezvousParameters
    port = free_port()
    return {
        "no rank": raised(lambda: get(make("static", f"localhost:{port}", "r", 1, 1))),
        "no endpoint": raised(lambda: get(make("static", "", "r", 1, 1, rank=0))),
        "no port": raised(lambda: get(make("static", "localhost", "r", 1, 1, rank=0))),
        "good": raised(lambda: get(make("static", f"localhost:{port}", "r", 1, 1, rank=0))),
    }


@case("T131.static_rounds")
def static_rounds(impl: Impl) -> Any:
    """One static node: two rounds in a row."""
    get = impl.get("elastic.rendezvous.registry:get_rendezvous_handler")
    port = free_port()
    params = impl.rdzv.RendezvousParameters(
        "static", f"127.0.0.1:{port}", "job", 1, 1, rank=0, timeout=10
    )
    handler = get(params)
    infos = [handler.next_rendezvous() for _ in range(2)]
    infos[0].store.set("k", "v")
    return {
        "backend": handler.get_backend(),
        "run_id": handler.get_run_id(),
        "ranks": [[i.rank, i.world_size] for i in infos],
        "master": [
            [i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port == port]
            for i in infos
        ],
        "store": infos[0].store.get("k"),
        "agent store": handler.use_agent_store,
        "waiting, closed": [handler.num_nodes_waiting(), handler.is_closed()],
        "set_closed": [handler.set_closed(), handler.is_closed()],
        "shutdown": handler.shutdown(),
    }


@case("T124.torch_worker_connects", batch="torch_things")
def torch_worker_connects(impl: Impl) -> Any:
    """A worker with torch finds its peers by what the agent tells it (env://, two workers)."""
    import sys

    from cases_launcher import config as launch_config
    from harness import folder

    with folder() as d:
        script = d / "train.py"
        script.write_text(
            "import os, sys, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "t = torch.ones(1) * (dist.get_rank() + 1)\n"
            "dist.all_reduce(t)\n"
            "open(sys.argv[1] + '/' + os.environ['RANK'], 'w').write(str(int(t.item())))\n"
            "dist.destroy_process_group()\n"
        )
        launcher = impl.launcher
        seen = outcome(
            lambda: launcher.elastic_launch(launch_config(impl, nproc_per_node=2), sys.executable)(
                str(script), str(d)
            )
        )
        return {
            "end": seen,
            "sums": {p.name: p.read_text() for p in sorted(d.iterdir()) if p.name.isdigit()},
        }


@case("T125.torch_handler", batch="torch_things")
def torch_handler(impl: Impl) -> Any:
    """torch's own handlers (c10d, static) given to this implementation's agent."""
    import entrypoints
    from cases_local import local_agent, run
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    names = (
        "RANK",
        "WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    )
    shown = {}
    for backend, endpoint, more in (
        ("c10d", "localhost:0", {"is_host": True}),
        ("static", f"127.0.0.1:{free_port()}", {"rank": 0, "timeout": 10}),
    ):
        params = RendezvousParameters(
            backend, endpoint, "job", 1, 1, local_addr="127.0.0.1", **more
        )
        handler = get_rendezvous_handler(params)
        agent = local_agent(impl, entrypoints.variables, names, 2, handler=handler)
        shown[backend] = run(agent)
        agent = local_agent(impl, entrypoints.fail_first, (1,), 2, handler=handler, max_restarts=1)
        shown[backend + ", restart"] = run(agent)
        shown[backend + ", shutdown"] = handler.shutdown()
    return shown


@case("T125.torch_signals", batch="torch_things")
def torch_signals(impl: Impl) -> Any:
    """torch's own exceptions out of a handler or a monitor, in this implementation's agent."""
    import signal

    from cases_agent import _end, _run
    from harness import fake_agent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

    stopped = fake_agent(impl, ["HEALTHY", SignalException("stop", signal.SIGINT)])
    left = fake_agent(
        impl, ["SUCCEEDED"], handler=fake_handler(impl, fail_next=RendezvousGracefulExitError())
    )
    return {"signal": _end(stopped, _run(stopped)), "graceful": _end(left, _run(left))}


@case("T121.diary_of_a_user_handler")
def user_handler(impl: Impl) -> Any:
    """A handler without base class (duck typed) and which of its members an agent uses."""
    from harness import fake_agent

    diary = Diary()
    info_type = impl.rdzv.RendezvousInfo
    boot = impl.rdzv.RendezvousStoreInfo("h", 1)

    class Duck:
        use_agent_store = False

        def get_backend(self) -> str:
            return "duck"

        def next_rendezvous(self) -> Any:
            diary.note("next_rendezvous")
            return info_type(DictStore(), 0, 1, boot)

        def num_nodes_waiting(self) -> int:
            diary.note("num_nodes_waiting")
            return 0

        def get_run_id(self) -> str:
            return "job"

    agent = fake_agent(impl, ["HEALTHY", "SUCCEEDED"], handler=Duck())
    result = agent.run()
    return [result.state.name, plain(list(diary))]
