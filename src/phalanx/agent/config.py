"""What ``phalanx run`` is asked to do, in values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.process.program import Program
from phalanx.recovery.deadlines import Limits


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
    local rank); ``master_port`` 0 takes any free port.
    """

    program: Program
    nproc: int = 1
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 3
    monitor_interval: float = 0.1
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
    controller: Controller | None = None
    node_check: str | None = None
    node_check_timeout: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def starts_warm(self) -> bool:
        """Whether workers may be forked from a preloaded process."""
        return self.warm and self.program.warmable and self.numa_binding is None
