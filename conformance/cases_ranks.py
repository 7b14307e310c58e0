"""Who gets which rank (T20 to T22, T43, T44): several agents on one store."""

from __future__ import annotations

from typing import Any

from harness import DictStore, Impl, case, env, fake_agent, fake_handler, plain, threads

A = [
    ("parameter_server", 4),
    ("trainer", 1),
    ("trainer", 2),
    ("trainer", 3),
    ("parameter_server", 5),
]
SEVEN = [
    ("trainer", 8),
    ("evaluator", 1),
    ("trainer", 2),
    ("evaluator", 3),
    ("master", 4),
    ("evaluator", 5),
    ("master", 2),
]


def table(impl: Impl, nodes: list[tuple[str, int]], store: Any = None) -> Any:
    """The rank tables that agents on one store come to, agent by agent."""
    stores = store if callable(store) else lambda: common
    common = DictStore() if store is None else store

    def assign(rank: int, role: str, size: int) -> Any:
        shared = stores()
        handler = fake_handler(impl, store=shared, rank=rank, world_size=len(nodes))
        agent = fake_agent(impl, ["SUCCEEDED"], handler=handler, role=role, local_world_size=size)
        spec = agent.get_worker_group().spec

        def go() -> Any:
            workers = agent._assign_worker_ranks(shared, rank, len(nodes), spec)
            return [
                [w.local_rank, w.role_rank, w.global_rank, w.world_size, w.role_world_size]
                for w in workers
            ]

        return go

    return threads([assign(i, r, n) for i, (r, n) in enumerate(nodes)])


@case("T20.two_roles")
def two_roles(impl: Impl) -> Any:
    """Example A: five agents, two roles, and what goes through the store."""
    store = DictStore()
    seen = table(impl, A, store)
    return {
        "ranks": seen,
        "keys": dict(sorted(store._data.items())),
        "calls": dict(sorted(store.calls.items())),
    }


@case("T21.three_nodes")
def three_nodes(impl: Impl) -> Any:
    """Example B."""
    return table(impl, [("t", 8)] * 3)


@case("T21.one_node")
def one_node(impl: Impl) -> Any:
    """Example C."""
    return table(impl, [("t", 8)])


@case("T22.identical")
def identical(impl: Impl) -> Any:
    """With TORCH_ELASTIC_WORKER_IDENTICAL=1 nothing goes through the store."""
    shown = {}
    for value in ("1", "0", "true"):
        with env(TORCH_ELASTIC_WORKER_IDENTICAL=value):
            store = DictStore()
            shown[value] = [table(impl, [("t", 2)] * 3, store), dict(sorted(store.calls.items()))]
    return shown


@case("T43.seven_nodes")
def seven(impl: Impl) -> Any:
    """Unequal nodes in three roles."""
    return table(impl, SEVEN)


@case("T44.alternating")
def alternating(impl: Impl) -> Any:
    """Roles that repeat and interleave."""
    return table(impl, [("a", 1), ("b", 4), ("b", 4), ("a", 3), ("b", 4), ("b", 4), ("c", 3)])


@case("T20.torch_stores", batch="torch_things")
def torch_stores(impl: Impl) -> Any:
    """The same through torch's own stores."""
    import datetime

    import torch.distributed as dist

    limit = datetime.timedelta(seconds=10)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)

    def client() -> Any:  # one connection each: a blocking call occupies it
        return dist.TCPStore("127.0.0.1", tcp.port, is_master=False, timeout=limit)

    return {
        "hash": table(impl, A, dist.HashStore()),
        "tcp": table(impl, A, client),
        "prefix": table(impl, A, lambda: dist.PrefixStore("some/prefix", client())),
        "tcp keys": sorted(plain(k) for k in ["torchelastic/role_info/0"] if tcp.check([k])),
    }


@case("T20.missing_peer")
def missing_peer(impl: Impl) -> Any:
    """An agent that never shows up: the others' store timeout comes out, as a RuntimeError."""
    store = DictStore(timeout=0.3)
    handler = fake_handler(impl, store=store, rank=0, world_size=2)
    agent = fake_agent(impl, ["SUCCEEDED"], handler=handler)
    try:
        agent._rendezvous(agent.get_worker_group())
    except Exception as error:
        return {"RuntimeError": isinstance(error, RuntimeError)}
    return "no error"
