"""Ports, and torch's store for those who already have torch."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import closing
from datetime import timedelta
from typing import Any

from .api import get_socket_with_port as _get_socket_with_port
from .logging import get_logger
from .store import barrier

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

logger = get_logger(__name__)

_TCP_STORE_INIT = "_tcp_store/num_members"


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of localhost; the caller closes it."""
    return _get_socket_with_port()


def get_free_port() -> int:
    """A port of localhost that was free a moment ago, and may be taken by now.

    Where it matters keep the socket instead: :func:`get_socket_with_port`.
    """
    with closing(get_socket_with_port()) as held:
        return int(held.getsockname()[1])


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 60 * 10,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """A ``torch.distributed.TCPStore``, for a program that has imported torch.

    Phalanx itself never imports torch: without it this raises ``RuntimeError``. A port
    of -1 means any free one (one member only); a taken one is tried again ``retries``
    times. ``timeout`` is in seconds. Raises ``TimeoutError`` when not all members come.
    """
    if server_port == -1 and world_size > 1:
        raise ValueError(
            "server_port must be specified when world_size > 1, got "
            f"server_port={server_port}, world_size={world_size}"
        )
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        raise RuntimeError(
            "create_c10d_store makes a torch.distributed.TCPStore, and phalanx does not import "
            "torch: import torch.distributed before you call it"
        )
    if use_libuv is not None:
        logger.warning("use_libuv is ignored: set the environment variable USE_LIBUV to 0 or 1")
    tries = 1 if server_port != -1 else max(1, retries)
    for left in range(tries - 1, -1, -1):
        port = server_port if server_port != -1 else get_free_port()
        try:
            store = dist.TCPStore(
                host_name=server_addr,
                port=port,
                world_size=world_size,
                is_master=is_server,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=wait_for_workers,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        except RuntimeError as error:
            if "address already in use" not in str(error).lower():
                raise
            if left:
                logger.warning("port %s already in use, %s tries left", port, left)
                continue
            raise RuntimeError(f"on {server_addr}, port: {port} already in use") from error
        if wait_for_workers:
            _check_full_rank(store, world_size, timeout=timeout)
        return store
    raise AssertionError("not reached")


def _check_full_rank(store: Any, world_size: int, timeout: float) -> None:
    try:
        barrier(store, world_size, key_prefix=_TCP_STORE_INIT, barrier_timeout=timeout)
    except RuntimeError as error:
        raise TimeoutError(f"timed out waiting for all {world_size} members to join") from error
