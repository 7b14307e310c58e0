"""Around a worker's main function: errors are recorded, and torch's worker server runs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from phalanx.elastic.multiprocessing.errors import get_error_handler, record
from phalanx.elastic.utils.logging import get_logger

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"

logger = get_logger(__name__)


@contextmanager
def _worker_server(socket_path: str) -> Iterator[None]:
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or not hasattr(c10d, "_WorkerServer"):
        logger.warning(
            "%s is set, but the worker server is torch's: import torch before worker_main",
            TORCH_WORKER_SERVER_SOCKET,
        )
        yield
        return
    server = c10d._WorkerServer(socket_path)
    try:
        yield
    finally:
        # torch's server never ends when it is stopped before its thread has begun to serve.
        _await_answer(socket_path)
        server.shutdown()


def _await_answer(socket_path: str) -> None:
    """Wait until somebody answers there, for five seconds at most."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        client.connect(socket_path)
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.recv(1)


@contextmanager
def worker_main() -> Iterator[None]:
    """Wrap a worker's main function: ``@worker_main()``, or ``with worker_main():``.

    An exception of the body goes to the worker's error file, as by ``record``. With
    ``TORCH_WORKER_SERVER_SOCKET`` set torch's worker server listens there meanwhile.
    """
    get_error_handler().initialize()
    with ExitStack() as stack:
        socket_path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
        if socket_path is not None:
            stack.enter_context(_worker_server(socket_path))
        try:
            yield
        except BaseException as error:
            # What becomes of each kind of exception is for record to say.
            _raise_recorded(error)


def _raise_recorded(error: BaseException) -> None:
    def fail() -> None:
        raise error

    record(fail)()
