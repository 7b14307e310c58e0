"""The health server: one thread, one selector, a fixed number of connections.

Nothing that a client does or leaves undone holds up another: a connection has a deadline from
its first to its last byte, a request a size limit, and when all places are taken the one that
has waited longest without having asked anything gives its place up. And nothing at all harms
the training: a server that cannot start says so in one line and stays away.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from phalanx.health.http import REQUEST_LIMIT, BadRequest, Request, parse, response
from phalanx.health.source import HealthSource

__all__ = ["DEFAULT_HOST", "HOST_ENV", "HealthServer"]

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
#: Overrides ``DEFAULT_HOST`` (a kubelet asks the pod's address, not loopback).
HOST_ENV = "PHALANX_HEALTH_HOST"

_CONNECTIONS = 64
_PATIENCE = 5.0  # seconds from accept to the end of the answer
_LINGER = 1.0  # seconds for the client to close after the answer


class HealthServer:
    """Serves what ``source`` answers. ``port`` 0: any free one, see ``port`` after the start.

    ``host``: numeric address or name, IPv6 with or without brackets, ``""`` for all
    addresses; None: ``PHALANX_HEALTH_HOST`` or loopback. There is no access control: what is
    served is for whoever reaches the address.
    """

    def __init__(self, source: HealthSource, port: int | str, host: str | None = None) -> None:
        self._source = source
        self._wanted_port = port
        self._host = os.environ.get(HOST_ENV, DEFAULT_HOST) if host is None else host
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._address: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port it listens at; None when it does not."""
        return self._address

    @property
    def port(self) -> int | None:
        """The port it listens at; None when it does not."""
        return self._address[1] if self._address else None

    def start(self) -> bool:
        """Listen and serve until ``stop``; true if it runs (already).

        Whatever is wrong (port in use, not allowed, no port at all, unknown host) is said in
        one warning, and false.
        """
        with self._lock:
            if self._thread is not None:
                return True
            try:
                listener = _listen(self._host, _port_number(self._wanted_port))
            except Exception as e:
                logger.warning(
                    "no health server at %s port %s: %s", self._host or "*", self._wanted_port, e
                )
                return False
            wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            address = listener.getsockname()[:2]
            loop = _Loop(listener, wake, self._answer)
            thread = threading.Thread(target=loop.run, name="health-server", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:
                loop.close()
                os.close(wake)
                logger.warning("no health server at %s port %s: %s", *address, e)
                return False
            self._wake, self._address, self._thread = wake, address, thread
        logger.info("health server at %s port %s", *self._address)
        return True

    def stop(self) -> None:
        """Close the port and all connections; nothing happens if it does not run."""
        with self._lock:
            thread, self._thread, self._address = self._thread, None, None
            if thread is None:
                return
            os.eventfd_write(self._wake, 1)
            thread.join(2.0)
            if thread.is_alive():
                logger.warning("the health server is busy; it will end on its own")
            else:
                os.close(self._wake)
            self._wake = -1

    def _answer(self, request: Request) -> bytes:
        """The whole response to a request; never raises."""
        head = request.method == "HEAD"
        if request.method not in ("GET", "HEAD"):
            return response(405, b"only GET and HEAD\n")
        if request.path in ("/livez", "/readyz"):
            try:
                ask = self._source.alive if request.path == "/livez" else self._source.ready
                good, why = ask()
            except Exception as e:
                good, why = False, f"{type(e).__name__}: {e}"
            body = "ok\n" if good else f"{why}\n"
            return response(200 if good else 503, body.encode("utf-8", "replace"), head=head)
        try:
            if request.path == "/status":
                text = json.dumps(self._source.status(), default=str, indent=1) + "\n"
                return response(200, text.encode(), "application/json", head)
            if request.path == "/metrics":
                from phalanx.health.metrics import CONTENT_TYPE, render

                return response(200, render(self._source.metrics()), CONTENT_TYPE, head)
        except Exception as e:
            logger.debug("health: %s failed", request.path, exc_info=True)
            why = f"{type(e).__name__}: {e}\n"
            return response(500, why.encode("utf-8", "replace"), head=head)
        return response(404, b"there are /livez /readyz /status /metrics\n", head=head)


def _port_number(port: object) -> int:
    try:
        if isinstance(port, (bool, float)):
            raise ValueError
        number = int(port)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError("the port is not a whole number") from None
    if not 0 <= number <= 65535:
        raise ValueError("a port is from 0 to 65535")
    return int(number)


def _listen(host: str, port: int) -> socket.socket:
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    # As bytes: text would load the codec of international names.
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    if not host:
        # One socket for both families, where there are both.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET6)
    error: OSError | None = None
    for family, kind, proto, _, address in found:
        try:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
        except OSError as e:
            error = e
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if host else 0)
            sock.bind(address)
            sock.listen(128)
            return sock
        except OSError as e:
            sock.close()
            error = e
    raise error or OSError("the host has no address")


class _Connection:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.received = b""
        self.to_send: bytes | None = None  # None: the request has not come yet
        self.sent = False  # all of it: waiting for the client to close


class _Loop:
    """The thread's loop. Owns the listener and every connection."""

    def __init__(
        self, listener: socket.socket, wake: int, answer: Callable[[Request], bytes]
    ) -> None:
        self._listener = listener
        self._wake = wake
        self._answer = answer
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while self._turn():
                pass
        except Exception:
            logger.warning("the health server ends after an error", exc_info=True)
        finally:
            self.close()

    def close(self) -> None:
        """Close everything; after, or instead of, ``run``."""
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()
        self._selector.close()

    def _turn(self) -> bool:
        timeout = None
        if self._connections:
            first = min(c.deadline for c in self._connections.values())
            timeout = max(0.0, first - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._connections:
                self._serve(self._connections[key.fd])
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            if connection.received and connection.to_send is None:
                # It had begun to ask: say what happened, if it listens.
                self._try_send(connection, response(408, b"too slow\n"))
            self._close(connection)
        return True

    def _accept(self) -> None:
        # A few at a time, so that those that have asked are served in between.
        for _ in range(16):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                # Out of descriptors: the listener stays readable; an old one makes room.
                logger.debug("health: accept: %s", e)
                if self._connections:
                    self._close(next(iter(self._connections.values())))
                else:
                    time.sleep(0.1)  # back off: nothing here can make room
                return
            sock.setblocking(False)
            if len(self._connections) >= _CONNECTIONS:
                idle = (c for c in self._connections.values() if c.to_send is None)
                self._close(next(idle, next(iter(self._connections.values()))))
            connection = _Connection(sock, time.monotonic() + _PATIENCE)
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ)
            # Most have asked by now; and it must not lose its place before it was looked at.
            self._serve(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.to_send is None:
                self._receive(connection)
            elif connection.sent:
                # What else it says is thrown away: closing before reading it would be a
                # reset that may destroy the answer on its way.
                if not connection.sock.recv(65536):
                    self._close(connection)
            else:
                self._send(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(REQUEST_LIMIT)
        if not data:
            self._close(connection)
            return
        connection.received += data
        try:
            request = parse(connection.received)
        except BadRequest as e:
            connection.to_send = response(e.status, f"{e}\n".encode())
        else:
            if request is None:
                return
            connection.to_send = self._answer(request)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        assert connection.to_send is not None
        try:
            sent = connection.sock.send(connection.to_send)
            connection.to_send = connection.to_send[sent:]
        except BlockingIOError:
            pass
        if connection.to_send:
            self._selector.modify(connection.sock, selectors.EVENT_WRITE)
            return
        connection.sent = True
        connection.sock.shutdown(socket.SHUT_WR)
        connection.deadline = time.monotonic() + _LINGER
        self._selector.modify(connection.sock, selectors.EVENT_READ)

    def _try_send(self, connection: _Connection, data: bytes) -> None:
        try:
            connection.sock.send(data)
        except OSError:
            pass

    def _close(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()
