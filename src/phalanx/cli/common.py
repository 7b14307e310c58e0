"""What several verbs have in common: their parser, values, credentials, and asking a controller."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.coordinator.security import Security


def parser(prog: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """One that takes no half of an option's name for the whole."""
    return argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False, usage=f"{prog} [options]", **more
    )


def complain(prog: str, what: object, status: int) -> int:
    """Say what is wrong; gives ``status`` back."""
    print(f"{prog}: {what}", file=sys.stderr)
    return status


def lacks_grpc(prog: str) -> bool:
    """Whether gRPC is not installed, which is said then."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        complain(prog, f"{error}; pip install grpcio protobuf", 1)
        return True
    return False


def seconds(text: str) -> float:
    """For ``type``: more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds more than 0")
    return value


def address(text: str) -> str:
    """For ``type``: HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdigit() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


def identity(
    to: Any, ca: str = "speak TLS, with whom this one has signed", ca_name: str = "ca"
) -> None:
    """``--tls-cert``, ``--tls-key``, and ``--tls-ca`` or what it is called."""
    to.add_argument("--tls-cert", metavar="PEM", help="our own certificate")
    to.add_argument("--tls-key", metavar="PEM", help="and its key")
    to.add_argument(f"--tls-{ca_name}", metavar="PEM", help=ca)


def agents(to: argparse.ArgumentParser) -> None:
    """How to be let in among the agents of a job; the same as for ``phalanx run``."""
    group = to.add_argument_group("to be let in, as phalanx run has it")
    group.add_argument(
        "--token-file", metavar="FILE", help="the secret of the job (default: $PHALANX_TOKEN)"
    )
    identity(group)
    group.add_argument(
        "--tls-name", default="", metavar="NAME", help="the name in the others' certificates"
    )


def security(args: argparse.Namespace) -> Security:
    """What `agents` has taken. Raises phalanx.coordinator.security.SecurityError."""
    from phalanx.coordinator.security import load

    return load(
        token_file=args.token_file,
        certificate=args.tls_cert,
        key=args.tls_key,
        ca=args.tls_ca,
        name=args.tls_name,
    )


def controller(to: argparse.ArgumentParser) -> None:
    """Which controller is asked, and how to be let in there; for `ask`."""
    to.add_argument(
        "--controller",
        default=os.environ.get("PHALANX_CONTROLLER", "127.0.0.1:8899"),
        metavar="HOST:PORT",
        help="default: $PHALANX_CONTROLLER or 127.0.0.1:8899",
    )
    to.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="S", help="default: %(default)s s"
    )
    group = to.add_argument_group("to be let in (a token: $PHALANX_CONTROLLER_TOKEN)")
    identity(group)


def ask(
    prog: str, args: argparse.Namespace, work: Callable[[Callable[[str, Any], Any]], int]
) -> int:
    """Calls ``work(call)``; says in a sentence why a call failed. 1: it did."""
    if lacks_grpc(prog):
        return 1
    import grpc

    from phalanx.client.channel import Credentials, Stub, connect, metadata

    token = os.environ.get("PHALANX_CONTROLLER_TOKEN", "")
    files = (args.tls_ca or "", args.tls_cert or "", args.tls_key or "")
    try:
        credentials = Credentials(*files, token)
        channel = connect(args.controller, credentials)
    except ValueError as error:
        return complain(prog, error, 1)
    stub = Stub(channel, metadata(credentials))
    try:
        return work(lambda name, request: stub(name, request, args.timeout))
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            # what gRPC says of it ends with the reason
            why = str(error.details()).rpartition(": ")[2].rstrip("]")
            return complain(prog, f"no controller answers at {args.controller}: {why}", 1)
        return complain(
            prog, f"{args.controller} refused ({error.code().name}): {error.details()}", 1
        )
    finally:
        channel.close()
