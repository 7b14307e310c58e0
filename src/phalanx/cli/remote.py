"""What the verbs that ask a controller have in common: address, credentials, one call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--controller`` and how to be let in."""
    add = parser.add_argument
    add(
        "--controller",
        default=os.environ.get("PHALANX_CONTROLLER", "127.0.0.1:8899"),
        metavar="HOST:PORT",
        help="default: $PHALANX_CONTROLLER or 127.0.0.1:8899",
    )
    add("--tls-ca", default="", metavar="PEM", help="speak TLS; trust this root certificate")
    add("--tls-cert", default="", metavar="PEM", help="the caller's own certificate")
    add("--tls-key", default="", metavar="PEM")
    add("--timeout", type=float, default=5.0, metavar="S")


def run(
    prog: str, args: argparse.Namespace, work: Callable[[Callable[[str, Any], Any]], int]
) -> int:
    """Calls ``work(call)``; says in a sentence why a call failed. 1: it did."""
    try:
        import grpc

        from phalanx.client.channel import Credentials, Stub, connect, metadata
    except ImportError as error:
        print(f"{prog}: {error}; pip install grpcio protobuf", file=sys.stderr)
        return 1
    token = os.environ.get("PHALANX_CONTROLLER_TOKEN", "")
    try:
        credentials = Credentials(args.tls_ca, args.tls_cert, args.tls_key, token)
        channel = connect(args.controller, credentials)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    stub = Stub(channel, metadata(credentials))
    try:
        return work(lambda name, request: stub(name, request, args.timeout))
    except grpc.RpcError as error:
        what = (
            "no controller answers"
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            else f"refused ({error.code().name})"
        )
        print(f"{prog}: {args.controller}: {what}: {error.details()}", file=sys.stderr)
        return 1
    finally:
        channel.close()
