"""The interface between the agent and a rendezvous backend."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.elastic.utils.distributed import get_free_port
from phalanx.elastic.utils.store import Store

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


class RendezvousError(Exception):
    """Any failure of a rendezvous."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job is over."""


class RendezvousTimeoutError(RendezvousError):
    """Too few nodes came in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """What the backend holds makes no sense."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and leaves. Not a failure."""


@dataclass
class RendezvousStoreInfo:
    """Where the workers find their store."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Store, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree on the address through ``store``: rank 0 tells, everybody reads.

        Rank 0 tells ``local_addr`` or its full host name, and ``server_port`` or a port that
        is free at this moment.
        """
        addr_key = RendezvousStoreInfo.MASTER_ADDR_KEY
        port_key = RendezvousStoreInfo.MASTER_PORT_KEY
        if rank == 0:
            store.set(addr_key, (local_addr or socket.getfqdn()).encode())
            store.set(port_key, str(server_port or get_free_port()).encode())
        return RendezvousStoreInfo(
            master_addr=store.get(addr_key).decode(), master_port=int(store.get(port_key))
        )


class RendezvousInfo:
    """The outcome of one round: a store for the agents, this node's rank, and who is in."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Store:
        """The store of the agents of this round."""
        return self._store

    @property
    def rank(self) -> int:
        """This node among the nodes."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many nodes take part."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers find their store."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """What a backend must do. A handler need not derive from this class, only look like it."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name under which it is registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether somebody other than a worker serves the workers' store.

        It becomes ``TORCHELASTIC_USE_AGENT_STORE``: with True no worker opens a server.
        """
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; returns when it is complete.

        Raises :class:`RendezvousClosedError`, :class:`RendezvousConnectionError`,
        :class:`RendezvousStateError`, :class:`RendezvousTimeoutError` or, when this node
        is not needed, :class:`RendezvousGracefulExitError`.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the job is over, as far as this node has heard."""

    @abstractmethod
    def set_closed(self) -> None:
        """Say that the job is over."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes would join a next round. The agent asks at each tick."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The name of the job."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Let go of everything; whether that went well."""


class RendezvousParameters:
    """What a handler is made from; ``kwargs`` are the backend's own options (``config``).

    Raises ``ValueError`` for an empty backend name and for ``min_nodes`` and ``max_nodes`` that do
    not fit.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        if min_nodes < 1:
            raise ValueError(
                f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero."
            )
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or "
                f"equal to the minimum number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """An option, or ``default``."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """An option as truth: 1, true, t, yes, y or 0, false, f, no, n; else ``ValueError``."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, str)):
            word = str(value).lower()
            if word in ("1", "true", "t", "yes", "y"):
                return True
            if word in ("0", "false", "f", "no", "n"):
                return False
        raise ValueError(
            f"The rendezvous configuration option '{key}' does not represent a valid boolean value."
        )

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """An option as a whole number; else ``ValueError``."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The rendezvous configuration option '{key}' does not represent a valid integer "
                "value."
            ) from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        # Asked once, for a name that nobody registered: reading all entry points of an
        # environment takes longer than the rest of the start.
        self._discover: Callable[[], None] | None = None

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend; ``ValueError`` when the name is empty or means another one already."""
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        present = self._registry.get(backend)
        if present is not None and present != creator:
            raise ValueError(
                f"The rendezvous backend '{backend}' cannot be registered with '{creator}' as it "
                f"is already registered with '{present}'."
            )
        self._registry[backend] = creator

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make a handler.

        ``ValueError`` for a name that nobody registered, ``RuntimeError`` when the handler calls
        itself something else; whatever the backend raises passes through.
        """
        if params.backend not in self._registry and self._discover is not None:
            discover, self._discover = self._discover, None
            discover()
        try:
            creator = self._registry[params.backend]
        except KeyError as error:
            raise ValueError(
                f"The rendezvous backend '{params.backend}' is not registered. Did you forget to "
                "call `register`?"
            ) from error
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"The rendezvous backend '{handler.get_backend()}' does not match the requested "
                f"backend '{params.backend}'."
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
