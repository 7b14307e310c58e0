"""What ``phalanx run`` is asked to do, in values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.process.program import Program
from phalanx.recovery.deadlines import Limits

if TYPE_CHECKING:
    from phalanx.elastic.rendezvous.api import RendezvousParameters


@dataclass(frozen=True)
class NodesConfig:
    """What a job on several nodes is told besides. Times in seconds.

    ``least`` to ``most`` nodes and ``spares`` more. ``endpoint`` is where the first coordinator
    listens; ``is_host``: whether that is in this agent, None: if the address is this machine's
    and the port free. ``node_rank``: honoured or refused, None: any. ``store_port``: of the
    workers' store where rank 0 is, 0: any. ``ports``: from which all others are taken.
    ``silence``: how long a connection may say nothing before it counts as lost. ``coordinator``:
    there is one of its own (``phalanx coordinator``), and no agent takes over. ``copies``:
    a session's snapshots are copied to the next node.
    """

    least: int
    most: int
    endpoint: tuple[str, int]
    spares: int = 0
    backend: str = "phalanx"
    is_host: bool | None = None
    node_rank: int | None = None
    store_port: int = 0
    coordinator_port: int = 0
    ports: tuple[int, int] | None = None
    epoch: int = 0
    join: float = 600.0
    last_call: float = 30.0
    rejoin: float = 60.0
    close: float = 30.0
    silence: float = 5.0
    isolation: float = 60.0
    on_split: str = "wait"
    copies: bool = True
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    etcd: Mapping[str, str] = field(default_factory=dict, repr=False)  # ETCD_KEYS that were given


ETCD_KEYS = frozenset(("protocol", "cacert", "cert", "key", "username", "password"))
"""Keys of ``--rdzv-conf`` with the backend etcd; the first four are torchrun's of etcd-v2."""


def timing(conf: RendezvousParameters) -> dict[str, Any]:
    """The times of a ``NodesConfig`` that torchrun's ``--rdzv-conf`` names.

    Raises ValueError for what is no number.
    """
    found = {
        "join": conf.get_as_int("join_timeout") or conf.get_as_int("timeout"),
        "last_call": conf.get_as_int("last_call_timeout"),
        "close": conf.get_as_int("close_timeout"),
    }
    interval = conf.get_as_int("keep_alive_interval")
    attempts = conf.get_as_int("keep_alive_max_attempt")
    if interval is not None or attempts is not None:
        found["silence"] = (interval or 5) * (attempts or 3)
    return {name: float(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Controller:
    """A controller to be asked: its addresses, the seconds a decision may take, and the PEM
    files and the token with which it is reached (none: clear text, no token). ``job`` is the
    job's name there; none: its run id."""

    addresses: tuple[str, ...]
    timeout: float = 2.0
    root: str = ""
    certificate: str = ""
    key: str = ""
    token: str = ""
    job: str = ""


@dataclass(frozen=True)
class JobConfig:
    """One job on one machine. Times in seconds; ``nproc`` workers.

    ``redirects`` and ``tee`` are masks as torchrun has them (a mask for all or one per
    local rank); ``master_port`` 0 takes any free port. ``nodes``: it is one of several.
    ``standby``: so many idle replacements are kept built.
    """

    program: Program
    nproc: int = 1
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 3
    never_retried: frozenset[int] = frozenset()
    always_retried: frozenset[int] = frozenset()
    monitor_interval: float = 0.1
    start_timeout: float = 600.0
    shutdown_timeout: int = 30
    signals: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    warm: bool = True
    preload: Sequence[str] = ()
    python: Sequence[str] = ()
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: frozenset[int] = frozenset()
    stdout_filters: Sequence[str] = ()
    stderr_filters: Sequence[str] = ()
    logs_specs: str | None = None
    prefix_template: str | None = None
    events: str | None = None
    health_host: str = "127.0.0.1"
    health_port: str | None = None
    event_log_handler: str = "null"
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    local_addr: str | None = None
    hang_limits: Limits | None = None
    standby: int = 0
    controller: Controller | None = None
    node_check: str | None = None
    node_check_timeout: float = 300.0
    nodes: NodesConfig | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def starts_warm(self) -> bool:
        """Whether workers may be forked from a preloaded process."""
        return self.warm and self.program.warmable and self.numa_binding is None
