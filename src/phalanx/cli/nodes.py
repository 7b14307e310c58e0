"""The options of a job on several nodes: torchrun's words to values."""

from __future__ import annotations

from phalanx.cli.options import RunArguments, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.config import NodesConfig
    from phalanx.elastic.rendezvous.api import RendezvousParameters

ENDPOINT_PORT = 29400
"""torchrun's port of a c10d endpoint without one."""

MASTER_PORT = 29500
"""torchrun's ``--master-port``."""

BACKENDS = ("static", "c10d", "phalanx", "etcd")


def nodes_from(a: RunArguments) -> NodesConfig | None:
    """What the words say of several nodes; None for a job on one.

    Raises:
        UsageError: what they ask for is not possible.
    """
    least, most = _count(str(a.nnodes))
    conf, etcd = _conf(a.rdzv_conf, a.rdzv_backend)
    if a.spares < 0:
        raise UsageError("--spares is zero or more")
    if a.epoch < 0:
        raise UsageError("--epoch is zero or more")
    if a.standalone:
        return None
    if most == 1 and not a.spares:
        if a.rdzv_backend not in BACKENDS[:3]:
            raise UsageError(
                f"--rdzv-backend {a.rdzv_backend}: one machine needs no rendezvous; leave it out"
            )
        if a.node_rank != 0:
            raise UsageError(f"--node-rank {a.node_rank}: one node has rank 0")
        return None
    if a.rdzv_backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend is one of {', '.join(BACKENDS)}, not {a.rdzv_backend!r}: "
            "phalanx has its own between nodes, and torchrun can use it (--rdzv-backend phalanx)"
        )
    from importlib.util import find_spec

    from phalanx.agent.config import NodesConfig, timing

    if find_spec("grpc") is None:
        raise UsageError(
            f"--nnodes {a.nnodes}: several nodes need grpcio and protobuf: install phalanx[control]"
        )

    static = a.rdzv_backend == "static"
    rank: int | None = a.node_rank if static or "node_rank" in a.given else None
    if rank is None:
        rank = conf.get_as_int("rank")
    if rank is not None and not 0 <= rank < most + a.spares:
        raise UsageError(f"--node-rank {rank}: with {most} nodes ranks are 0 to {most - 1}")
    store_port = a.master_port or 0
    if static:
        if a.rdzv_endpoint:
            host, store_port = endpoint_from(a.rdzv_endpoint, store_port or MASTER_PORT)
        else:
            host, store_port = a.master_addr, store_port or MASTER_PORT
        port = a.coordinator_port or store_port + 1
    else:
        default = 2379 if a.rdzv_backend == "etcd" else ENDPOINT_PORT
        host, port = endpoint_from(a.rdzv_endpoint, default)
        if not port:
            raise UsageError(
                f"--rdzv-endpoint {a.rdzv_endpoint}: nodes can only meet at a port that all know"
            )
    is_host = conf.get_as_bool("is_host")
    if static and is_host is None:
        is_host = rank == 0
    return NodesConfig(
        least=least,
        most=most,
        spares=a.spares,
        backend="etcd" if a.rdzv_backend == "etcd" else "phalanx",
        endpoint=(host, port),
        is_host=is_host,
        node_rank=rank,
        store_port=store_port,
        coordinator_port=a.coordinator_port or 0,
        ports=_ports(a.port_range),
        epoch=a.epoch,
        rejoin=a.rejoin_timeout,
        isolation=a.isolation_timeout,
        **timing(conf),
        on_split=a.on_split,
        copies=a.snapshot_copies != "0",
        token_file=a.token_file or "",
        tls_cert=a.tls_cert or "",
        tls_key=a.tls_key or "",
        tls_ca=_tls(a),
        tls_name=a.tls_name or "",
        etcd=etcd,
    )


def endpoint_from(text: str, default_port: int) -> tuple[str, int]:
    """``host:port`` of ``--rdzv-endpoint``; without a port ``default_port``.

    Raises:
        UsageError: it is none.
    """
    from phalanx.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        return parse_rendezvous_endpoint(text, default_port=default_port)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None


def _count(text: str) -> tuple[int, int]:
    parts = text.split(":")
    try:
        numbers = [int(p) for p in parts]
    except ValueError:
        raise UsageError(f"--nnodes is N or MIN:MAX, not {text!r}") from None
    if len(numbers) > 2:
        raise UsageError(f"--nnodes is N or MIN:MAX, not {text!r}")
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        raise UsageError(f"--nnodes needs 0 < MIN <= MAX, not {text!r}")
    return low, high


def _conf(text: str, backend: str) -> tuple[RendezvousParameters, dict[str, str]]:
    """``--rdzv-conf``: what is known, with its values checked, and what is for etcd alone. Keys
    are torchrun's."""
    from phalanx.agent.config import ETCD_KEYS
    from phalanx.elastic.rendezvous.api import RendezvousParameters
    from phalanx.elastic.rendezvous.local import OPTIONS, check_options
    from phalanx.elastic.rendezvous.utils import _parse_rendezvous_config

    try:
        given = _parse_rendezvous_config(text)
        known = OPTIONS | ETCD_KEYS if backend == "etcd" else OPTIONS
        if unknown := sorted(set(given) - known):
            raise ValueError(
                f"there is no option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        etcd = {key: given.pop(key) for key in ETCD_KEYS & set(given)}
        params = RendezvousParameters("phalanx", "", "none", 1, 1, **given)
        check_options(params)
        params.get_as_bool("is_host")
        for name in ("rank", "keep_alive_interval", "keep_alive_max_attempt"):
            params.get_as_int(name)
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {text}: {error}") from None
    return params, etcd


def _ports(text: str | None) -> tuple[int, int] | None:
    if not text:
        return None
    low, dash, high = text.partition("-")
    try:
        ports = int(low), int(high if dash else low)
    except ValueError:
        ports = (0, 0)
    if not 0 < ports[0] <= ports[1] <= 65535:
        raise UsageError(f"--port-range is LOW-HIGH, two ports from 1 to 65535, not {text!r}")
    return ports


def _tls(a: RunArguments) -> str:
    given = [bool(a.tls_cert), bool(a.tls_key), bool(a.tls_ca)]
    if any(given) and not all(given):
        raise UsageError(
            "--tls-cert, --tls-key and --tls-ca go together: both ends show who they are"
        )
    return a.tls_ca or ""
