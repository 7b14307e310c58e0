"""Builds and runs the gRPC server around a hub."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from phalanx.controller import access
from phalanx.controller.hub import Hub
from phalanx.controller.service import Services
from phalanx.proto import MAX_MESSAGE_BYTES

log = logging.getLogger("phalanx.controller")


@dataclass(frozen=True)
class Tls:
    """PEM files of the server; ``client_ca`` asks every client for a certificate (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> Any:
        """Raises AccessError when a file cannot be read."""
        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            ca = self.client_ca.read_bytes() if self.client_ca else None
        except OSError as error:
            raise access.AccessError(f"cannot read {error.filename}: {error.strerror}") from None
        return grpc.ssl_server_credentials(
            [pair], root_certificates=ca, require_client_auth=ca is not None
        )


def options(max_streams: int) -> list[tuple[str, Any]]:
    """Channel arguments: ClusterD's message sizes, no surprise for any shipped client."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", max_streams),
        # Old clients ping every 3 s and must not be dropped for it.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.so_reuseport", 0),
    ]


class Server:
    """One listening controller."""

    def __init__(self, hub: Hub, services: Services) -> None:
        self.hub = hub
        self.services = services
        self.address = ""
        self._server: Any = None

    async def start(self, listen: str, tls: Tls | None = None) -> str:
        """Reads the journal and listens; returns ``HOST:PORT`` with the real port.

        Raises AccessError (certificates) or RuntimeError (the address cannot be bound).
        """
        self.hub.open()
        server = grpc.aio.server(options=options(self.hub.options.max_streams + 100))
        server.add_generic_rpc_handlers(tuple(self.services.handlers()))
        try:
            if tls is not None:
                port = server.add_secure_port(listen, tls.credentials())
            else:
                port = server.add_insecure_port(listen)
        except RuntimeError as error:
            raise RuntimeError(f"cannot listen on {listen}: {error}") from None
        if not port:
            raise RuntimeError(f"cannot listen on {listen}")
        await server.start()
        self._server = server
        self.address = (
            listen if listen.startswith("unix:") else (f"{listen.rpartition(':')[0]}:{port}")
        )
        return self.address

    async def stop(self, grace: float = 1.0) -> None:
        """Ends all streams, answers what is under way, closes."""
        await self.hub.close()
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
