"""The listening socket in front of gRPC: only what begins as gRPC does is let through.

gRPC closes the rest without a word to anybody. Here it is counted, and a stock torchrun that
takes us for its own store is named. Bytes are passed on unchanged, TLS included, over an
abstract socket that only this machine (and network namespace) has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.coordinator import net

PATIENCE = 10.0
"""Seconds that a caller has for its first bytes."""

_PREFACE = b"PRI * HTTP/2.0"  # RFC 9113, 3.4
_TLS = b"\x16\x03"
_STORE = b"\x00\xce\xf7\x85\x3c"  # torch's TCPStore: VALIDATE and its magic number
_HIGH = 1 << 20


class PortTaken(OSError):
    """None of the ports can be had."""


def bind(host: str, ports: Iterable[int]) -> socket.socket:
    """A listening socket on the first port that is free. Raises PortTaken, or OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(4096)  # the kernel cuts it to what it allows
            made.setblocking(False)
        except OSError as error:
            made.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return made
    raise PortTaken(errno.EADDRINUSE, "in use")


class Doorman:
    """Passes connections on to the abstract socket ``inner``. ``stranger(kind, host)`` hears of
    the others: "torchrun", "garbage", or "silent"."""

    def __init__(self, inner: str, *, tls: bool, stranger: Callable[[str, str], object]) -> None:
        self.inner = inner
        self.tls = tls
        self.stranger = stranger
        self.guests: set[_Guest] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> str:
        """Serves a listening socket, which is ours from now on; returns its "host:port"."""
        loop = asyncio.get_running_loop()
        name = listener.getsockname()
        self._server = await loop.create_server(lambda: _Guest(self), sock=listener)
        return net.join(name[0], name[1])

    def close(self) -> None:
        """No more callers, and those that are there are hung up on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for guest in list(self.guests):
            guest.end()

    def may_pass(self, data: bytes) -> bool | None:
        """Whether this is how a caller of ours begins; None: more must be seen."""
        wanted = _TLS if self.tls else _PREFACE
        if not wanted.startswith(data[: len(wanted)]):
            return False
        return True if len(data) >= len(wanted) else None


class _Side(asyncio.Protocol):
    """One end of a connection; what comes goes to the other."""

    other: _Side | None = None
    transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # sends what there is first

    def pause_writing(self) -> None:
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            with contextlib.suppress(RuntimeError):
                self.other.transport.resume_reading()


class _Guest(_Side):
    """A caller."""

    def __init__(self, door: Doorman) -> None:
        self._door = door
        self._first = b""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._door.guests.add(self)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._turn_away, "silent")

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
            return
        self._first += data
        if self._task is not None or self.transport.is_closing():
            return
        passes = self._door.may_pass(self._first)
        if passes is None:
            return
        if not passes:
            self._turn_away("torchrun" if self._first.startswith(_STORE) else "garbage")
            return
        self._forget_timer()
        self.transport.pause_reading()
        self._task = asyncio.create_task(self._let_in())

    async def _let_in(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, other = await loop.create_unix_connection(_Side, "\0" + self._door.inner)
        except OSError:
            self.transport.abort()
            return
        other.transport.write(self._first)
        other.other, self.other, self._first = self, other, b""
        if self.transport.is_closing():
            other.transport.abort()
        else:
            self.transport.resume_reading()

    def _turn_away(self, kind: str) -> None:
        peer = self.transport.get_extra_info("peername") or ("somebody",)
        self._door.stranger(kind, str(peer[0]))
        self.transport.abort()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_timer()
        self._door.guests.discard(self)
        super().connection_lost(error)

    def end(self) -> None:
        for side in (self, self.other):
            if side is not None and side.transport is not None:
                side.transport.abort()
