"""The agent's handle on a store server. Not a worker: it has no rank and no channel."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.process.supervisor import Supervisor

_CLOSE_SECONDS = 5.0


class StoreProcess:
    """A store that serves, or will when the first client connects."""

    def __init__(
        self, supervisor: Supervisor, id: int, listener: socket.socket, host: str | None
    ) -> None:
        self._supervisor = supervisor
        name = listener.getsockname()
        self.id = id
        self.host = host or _reachable(str(name[0]))
        self.port = int(name[1])
        self.pid: int | None = None  # None: not started yet
        self.gone = False
        self.returncode: int | None = None
        self.closing = False

    def mark_gone(self, returncode: int | None) -> None:
        """For the supervisor: the server has ended."""
        self.gone = True
        self.returncode = returncode

    def close(self) -> None:
        """End the server; returns when it no longer takes connections, 5 s at most."""
        if self.gone:
            return
        self.closing = True
        self._supervisor.order({"op": "store_close", "id": self.id})
        end = time.monotonic() + _CLOSE_SECONDS
        while not self.gone and (left := end - time.monotonic()) > 0:
            self._supervisor.pump(left)


def _reachable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(address, address)
