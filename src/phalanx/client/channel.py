"""gRPC channels and calls, synchronous and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from phalanx.client import certs
from phalanx.proto import MAX_MESSAGE_BYTES, control_pb2, recover_pb2
from phalanx.proto._pool import Method

PORT = 8899
METHODS: dict[str, Method] = {
    **recover_pb2.SERVICES["Recover"],
    **control_pb2.SERVICES["phalanx.Control"],
}


@dataclass(frozen=True)
class Credentials:
    """How to reach a server that does not speak clear text.

    ``root`` is the PEM file of the certificate the server's is signed by; ``certificate`` and
    ``key`` are the client's own, for mutual TLS; ``token`` goes with every call.
    """

    root: str = ""
    certificate: str = ""
    key: str = ""
    token: str = ""
    strict: bool = True  # the vendor's rules for the root certificate (certs.check_root)
    server_name: str = ""  # "": the root certificate's common name, as the vendor's client does

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("a client certificate and its key go together; give both or neither")


def options(name: str = "") -> list[tuple[str, Any]]:
    """Channel arguments; pings every 10 s, which no known server minds."""
    made: list[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
    ]
    if name:
        made.append(("grpc.ssl_target_name_override", name))
    return made


def with_port(address: str) -> str:
    """``HOST`` gets ClusterD's port; ``HOST:PORT`` stays."""
    if address.startswith("unix:"):
        return address
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and not (":" in host and not host.startswith("[")):
        return address
    return f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"


def connect(address: str, credentials: Credentials | None) -> Any:
    """A channel. Raises ValueError for certificates that cannot be used."""
    if credentials is None or not credentials.root:
        return grpc.insecure_channel(with_port(address), options())
    root, name = (
        certs.check_root(credentials.root)
        if credentials.strict
        else (_read(credentials.root), credentials.server_name)
    )
    tls = grpc.ssl_channel_credentials(
        root,
        _read(credentials.key) if credentials.key else None,
        _read(credentials.certificate) if credentials.certificate else None,
    )
    return grpc.secure_channel(with_port(address), tls, options(credentials.server_name or name))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(1 << 20)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def metadata(credentials: Credentials | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    if credentials is None or not credentials.token:
        return ()
    return (("authorization", f"Bearer {credentials.token}"),)


class Stub:
    """Calls of Recover and Control on one channel."""

    def __init__(self, channel: Any, extra: Iterable[tuple[str, str]] = ()) -> None:
        self.channel = channel
        self._extra = tuple(extra)
        self._calls: dict[str, Callable[..., Any]] = {}

    def __call__(self, name: str, request: Any, timeout: float | None) -> Any:
        """Runs one call, or opens one stream. Raises grpc.RpcError."""
        call = self._calls.get(name)
        if call is None:
            method = METHODS[name]
            make = self.channel.unary_stream if method.server_streams else self.channel.unary_unary
            call = self._calls[name] = make(
                method.path, method.request.SerializeToString, method.response.FromString
            )
        return call(request, timeout=timeout, metadata=self._extra)
