"""The backend ``static``: the master's address is known beforehand."""

from __future__ import annotations

from .api import RendezvousError, RendezvousParameters
from .local import (
    LocalRendezvousHandler,
    check_options,
    require_one_node,
    share_store_by_environment,
)
from .utils import parse_rendezvous_endpoint

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

_default_timeout_seconds = 600


class StaticTCPRendezvous(LocalRendezvousHandler):
    """One node at a given address; never closed, so it can be used again and again."""

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float,
    ) -> None:
        """``timeout`` in seconds. Raises ``RendezvousError`` for more than one node."""
        if rank != 0 or world_size != 1:
            raise RendezvousError(
                f"static rendezvous serves one node so far, and this is node {rank} of "
                f"{world_size}. For more, pass a handler that can, for instance torch's own, as "
                "WorkerSpec.rdzv_handler"
            )
        super().__init__(
            "static",
            run_id,
            host=master_addr,
            port=master_port,
            timeout=timeout,
            share_store=share_store_by_environment(),
        )
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timeout

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass


def create_rdzv_handler(params: RendezvousParameters) -> StaticTCPRendezvous:
    """The handler for ``static``.

    ``ValueError`` without the option ``rank`` or an endpoint with a port; ``RendezvousError`` for
    more than one node.
    """
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError(
            "rank is absent in RendezvousParameters: add --node-rank, or the option rank"
        )
    endpoint = (params.endpoint or "").strip()
    if not endpoint:
        raise ValueError(
            "endpoint is absent in RendezvousParameters: add --master-addr and --master-port"
        )
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(f"Port is absent in endpoint: {endpoint}. Try --master-port")
    require_one_node(params, -1)
    check_options(params)
    return StaticTCPRendezvous(
        host,
        port,
        rank,
        params.max_nodes,
        params.run_id,
        params.get_as_int("timeout") or _default_timeout_seconds,
    )
