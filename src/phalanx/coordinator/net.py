"""Addresses: who owns an endpoint, by which of our addresses a peer is reached, and why not."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from dataclasses import dataclass

from phalanx.elastic.rendezvous.utils import parse_rendezvous_endpoint

DEFAULT_PORT = 29400
"""torchrun's, of its c10d backend."""


REFUSED = "refused"
"""Why, when the machine answers that nobody listens there."""


class Unreachable(Exception):
    """Nothing can be had from an endpoint now; the text is a clause: refused, cannot be
    resolved, no answer, or the system's words."""


@dataclass(frozen=True)
class Reached:
    """A numeric address where something accepted a connection, and ours as that peer sees it."""

    address: str
    port: int
    ours: str


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ValueError."""
    return parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)


def join(host: str, port: int) -> str:
    """ "host:port"; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def reach(endpoint: str, timeout: float, local: str = "") -> Reached:
    """Connects once and hangs up. ``local``: the address of ours to connect from.

    Raises Unreachable.
    """
    host, port = split(endpoint)
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), timeout
        )
    except (TimeoutError, asyncio.TimeoutError):
        raise Unreachable("cannot be resolved in time") from None
    except (OSError, UnicodeError):
        raise Unreachable("cannot be resolved") from None
    reason = "no answer"
    # IPv4 first: a name such as localhost has both, and a listener often only that.
    for family, _, _, _, address in sorted(found, key=lambda e: e[0] != socket.AF_INET)[:4]:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                if local:
                    probe.bind((local, 0))
                await asyncio.wait_for(loop.sock_connect(probe, address), timeout)
                return Reached(str(address[0]), port, str(probe.getsockname()[0]).split("%")[0])
        except (TimeoutError, asyncio.TimeoutError):
            reason = "no answer"
        except ConnectionRefusedError:
            reason = REFUSED
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT and reason != "no answer":
                continue  # what its other address said counts
            reason = (error.strerror or str(error)).lower()
    raise Unreachable(reason)


def own_address(host: str) -> str | None:
    """The numeric address of this machine that ``host`` stands for; None: it is not ours, or
    cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, address in sorted(found, key=lambda e: e[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address[0], 0, *address[2:]))
                return str(address[0]).split("%")[0]
        except OSError:
            continue
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
