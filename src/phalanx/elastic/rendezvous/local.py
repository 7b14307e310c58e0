"""Rendezvous of one node: nobody to wait for, a fresh store and port for each round."""

from __future__ import annotations

import os
import socket
import threading

from phalanx.elastic.events import NodeState, construct_and_record_rdzv_event
from phalanx.elastic.utils.logging import get_logger

from .api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from .ports import PortInUseError, hold, owners
from .store import InProcessStore, PrefixStore
from .utils import parse_rendezvous_endpoint

__all__ = [
    "LocalRendezvousHandler",
    "LocalRendezvousInfo",
    "RendezvousBackendUnavailableError",
    "create_handler",
    "require_one_node",
]

logger = get_logger(__name__)

_DEFAULT_TIMEOUT = 600  # seconds
_BACKLOG = 4096  # the kernel cuts it to what it allows

_TIMEOUTS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
OPTIONS = frozenset(
    (
        *_TIMEOUTS,
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "store_type",
        "read_timeout",
        "is_host",
        "timeout",
        "rank",
        "master_port",
    )
)


class RendezvousBackendUnavailableError(RendezvousError, ImportError):
    """The backend is known by name, but not part of phalanx."""


class LocalRendezvousInfo(RendezvousInfo):
    """The outcome of a round on one node, with the socket for the workers' store."""

    def __init__(
        self,
        store: PrefixStore,
        bootstrap_store_info: RendezvousStoreInfo,
        round: int,
        listener: socket.socket,
    ) -> None:
        super().__init__(store, 0, 1, bootstrap_store_info)
        self._round = round
        self._listener = listener

    @property
    def round(self) -> int:
        """Which round it is, from 0."""
        return self._round

    @property
    def listener(self) -> socket.socket:
        """As :attr:`LocalRendezvousHandler.listener`."""
        return self._listener


class LocalRendezvousHandler(RendezvousHandler):
    """The rendezvous of a job that has one node.

    Each round has a store of its own for the agents and a bound socket for the store of the
    workers. With ``port`` 0 each round's socket has a new port, and the last round's is
    closed after the new one is bound; any other port is bound once and kept until
    :meth:`shutdown`. A port is never released and bound again.

    The socket does not listen at first. Either the agent serves the workers' store: it takes
    the socket with :meth:`claim_listener`, and ``use_agent_store`` is True until the next round.
    Or it does not: then worker 0 serves the store on that port, and holding the socket keeps the
    port from everybody who asks for any free one.
    """

    def __init__(
        self,
        backend: str,
        run_id: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = _DEFAULT_TIMEOUT,
        share_store: bool = True,
    ) -> None:
        """``host`` is bound and told to the workers; ``timeout`` (seconds) is the agents' store's.

        With ``share_store`` False the agent is never offered the socket.
        """
        self._backend = backend
        self._run_id = run_id
        self._host = host
        self._port = port
        self._timeout = timeout
        self._share_store = share_store
        self._lock = threading.Lock()
        self._round = -1
        self._listener: socket.socket | None = None
        self._claimed = False
        self._closed = False

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent has taken the socket of this round to serve the store."""
        return self._claimed

    @property
    def round(self) -> int:
        """The number of the current round; -1 before the first."""
        return self._round

    @property
    def listener(self) -> socket.socket | None:
        """The bound socket of the current round, owned by this handler; None when there is none.

        It is good until the next round (any free port) or until :meth:`shutdown` (a given port).
        """
        return self._listener

    @property
    def offers_listener(self) -> bool:
        """Whether the agent may serve the workers' store in this round."""
        return self._share_store and self._listener is not None

    def next_rendezvous(self) -> LocalRendezvousInfo:
        """Start the next round; there is nobody to wait for.

        Raises ``RendezvousClosedError`` after :meth:`set_closed` or :meth:`shutdown`,
        :class:`~.ports.PortInUseError` for a port that somebody else has, ``RendezvousError``
        for an address that is not of this machine.
        """
        with self._lock:
            if self.is_closed():
                raise RendezvousClosedError(f"the rendezvous of {self._run_id!r} is closed")
            if self._listener is None:
                self._listener = hold(self._host, self._port)
            elif self._port == 0:
                last, self._listener = self._listener, hold(self._host, 0)
                last.close()
            self._round += 1
            self._claimed = False
            where = RendezvousStoreInfo(self._host, int(self._listener.getsockname()[1]))
            store = PrefixStore(f"{self._run_id}.{self._round}", InProcessStore(self._timeout))
            info = LocalRendezvousInfo(store, where, self._round, self._listener)
        construct_and_record_rdzv_event(
            run_id=self._run_id,
            message=f"round {self._round} is complete: one node",
            node_state=NodeState.SUCCEEDED,
            master_endpoint=f"{where.master_addr}:{where.master_port}",
            rank=0,
        )
        return info

    def claim_listener(self) -> socket.socket:
        """Take over the workers' store for this round: the socket, listening from now on.

        The handler keeps owning the socket; whoever serves uses a duplicate of its descriptor.
        Raises ``RendezvousStateError`` when there is no round or the store is not to be shared,
        :class:`~.ports.PortInUseError` when somebody began to listen in the meantime.
        """
        with self._lock:
            if self._listener is None or not self._share_store:
                raise RendezvousStateError("there is no socket to serve the workers' store on")
            try:
                self._listener.listen(_BACKLOG)
            except OSError as error:
                port = int(self._listener.getsockname()[1])
                raise PortInUseError(self._host, port, owners(port)) from error
            self._claimed = True
            return self._listener

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """0: nobody else can join."""
        return 0

    def shutdown(self) -> bool:
        """Close, and let the port go. Always True; may be called again."""
        self.set_closed()
        with self._lock:
            listener, self._listener = self._listener, None
            self._claimed = False
        if listener is not None:
            listener.close()
        return True


def share_store_by_environment() -> bool:
    """False when ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` is 1."""
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def require_one_node(params: RendezvousParameters, port: int) -> None:
    """Refuse what one node alone cannot be: ``RendezvousError`` says what to do."""
    # Nobody else can find an endpoint without a port: "1:4 at localhost:0" is one node.
    alone = params.max_nodes == 1 or (params.min_nodes == 1 and port == 0)
    if not alone:
        raise RendezvousError(
            f"the rendezvous backend '{params.backend}' serves one node so far, and nnodes is "
            f"{params.min_nodes}:{params.max_nodes}. For more, pass a handler that can, for "
            "instance torch's own, as WorkerSpec.rdzv_handler, or register a creator for it with "
            "rendezvous_handler_registry.register"
        )


def check_options(params: RendezvousParameters) -> None:
    """Warn of options that nobody knows; ``ValueError`` for a bad timeout or kind of store."""
    for key in _TIMEOUTS:
        seconds = params.get_as_int(key)
        if seconds is not None and seconds <= 0:
            raise ValueError(f"The rendezvous option '{key}' must be above 0, got {seconds}.")
    store = params.get("store_type", "tcp")
    if str(store).strip().lower() not in ("tcp", "file"):
        raise ValueError(f"The rendezvous option 'store_type' is tcp or file, not {store!r}.")
    unknown = sorted(set(params.config) - OPTIONS)
    if unknown:
        logger.warning(
            "the rendezvous options %s are not known and do nothing; known are %s",
            ", ".join(unknown),
            ", ".join(sorted(OPTIONS)),
        )


def create_handler(params: RendezvousParameters) -> LocalRendezvousHandler:
    """The handler for the backends ``c10d`` and ``phalanx`` with one node.

    The endpoint matters only for telling that there is one node. The store's port is the
    option ``master_port`` or any free one, at ``local_addr`` or 127.0.0.1.
    """
    if not params.run_id:
        raise ValueError("The rendezvous needs a run id that is not empty.")
    _, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
    require_one_node(params, port)
    check_options(params)
    return LocalRendezvousHandler(
        params.backend,
        params.run_id,
        host=params.local_addr or "127.0.0.1",
        port=params.get_as_int("master_port", 0) or 0,
        timeout=params.get_as_int("timeout", _DEFAULT_TIMEOUT) or _DEFAULT_TIMEOUT,
        share_store=share_store_by_environment(),
    )
