"""The agent's health check (PyTorch's ``elastic.agent.server.health_check_server``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.health import HealthServer, Metric

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

log = logging.getLogger(__name__)


class HealthCheckServer:
    """Base of health check servers; serves nothing itself, as PyTorch's.

    ``alive_callback`` gives the Unix time, in whole seconds, of the last progress; whoever
    asks is told "unhealthy" when that is more than ``timeout`` seconds ago.
    """

    _alive_callback: Callable[[], int]
    _port: int
    _timeout: int

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout

    def start(self) -> None:
        """Serve; may be called again. This base only says that it does not."""
        log.warning("No health check server started")

    def stop(self) -> None:
        """Stop serving; may be called again."""
        log.info("Stopping noop health check server.")

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback


class _ServingHealthCheckServer(HealthCheckServer):
    """Serves ``/livez`` and the other paths of ``phalanx.health`` on ``port``.

    A port that cannot be had costs one warning and nothing else.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        super().__init__(alive_callback, port, timeout)
        self._server: HealthServer | None = None

    def start(self) -> None:
        from phalanx.health import HealthServer

        if self._server is None:
            server = HealthServer(_CallbackSource(self), self._port)
            if server.start():
                self._server = server

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()


class _CallbackSource:
    """The one fact that a callback knows, in the words of ``phalanx.health.HealthSource``."""

    def __init__(self, server: HealthCheckServer) -> None:
        self._server = server

    def alive(self) -> tuple[bool, str]:
        from phalanx.health.source import stale

        why = stale(self._server._alive_callback, self._server._timeout)
        return not why, why

    ready = alive

    def status(self) -> Mapping[str, Any]:
        alive, why = self.alive()
        return {"alive": alive, "why_not": why, "timeout_seconds": self._server._timeout}

    def metrics(self) -> Iterable[Metric]:
        from phalanx.health import Metric

        yield Metric("phalanx_alive", float(self.alive()[0]), "1 if progress is recent")


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """A health check server that, other than PyTorch's, serves once it is started.

    ``port`` 1 to 65535 (0: any); ``timeout`` in seconds. Listens on loopback unless
    ``PHALANX_HEALTH_HOST`` says otherwise.
    """
    return _ServingHealthCheckServer(alive_callback, port, timeout)
