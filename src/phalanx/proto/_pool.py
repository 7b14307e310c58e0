"""Builds message classes from serialized descriptors, in a pool of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_POOL = descriptor_pool.DescriptorPool()
_FILES: dict[str, bytes] = {}


@dataclass(frozen=True)
class Method:
    """One rpc: its full path, its two message classes, and whether it streams."""

    path: str
    name: str
    request: Any
    response: Any
    client_streams: bool
    server_streams: bool


def load(serialized: bytes) -> dict[str, Any]:
    """Adds one file to the pool; returns its messages by name and ``SERVICES``.

    ``SERVICES`` maps the full name of each service to its methods by name.
    """
    proto = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    _FILES[proto.name] = serialized
    _POOL.AddSerializedFile(serialized)
    file = _POOL.FindFileByName(proto.name)
    found: dict[str, Any] = {
        name: message_factory.GetMessageClass(descriptor)
        for name, descriptor in file.message_types_by_name.items()
    }
    services: dict[str, dict[str, Method]] = {}
    for service, service_proto in zip(file.services_by_name.values(), proto.service, strict=True):
        services[service.full_name] = {
            method.name: Method(
                f"/{service.full_name}/{method.name}",
                method.name,
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
                method_proto.client_streaming,
                method_proto.server_streaming,
            )
            for method, method_proto in zip(service.methods, service_proto.method, strict=True)
        }
    found["SERVICES"] = services
    return found


def files() -> dict[str, bytes]:
    """The serialized descriptors of all files loaded so far, by file name."""
    return dict(_FILES)


def file_of(symbol: str) -> str | None:
    """The name of the file that defines a message, service or method; None: nobody does."""
    try:
        name: str = _POOL.FindFileContainingSymbol(symbol).name
    except KeyError:
        return None
    return name
