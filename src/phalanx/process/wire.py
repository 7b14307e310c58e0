"""Orders and news between agent, keeper and nursery: JSON and descriptors over SEQPACKET.

The sockets stay blocking; who must not block says so. Both ends are our own processes,
so the only concern here is size: a message that does not fit a packet travels in a memfd,
whose descriptor is then the first one.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct

TYPE_CHECKING = False  # the keeper imports this module and can do without ``typing``
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_INLINE = 16 * 1024
_MAX_FDS = 32


class Hangup(ConnectionError):
    """The other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def limit_sending(sock: socket.socket, seconds: int) -> None:
    """Have a blocking `send` give up after that long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


def send(
    sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = (), *, block: bool = True
) -> None:
    """Send one message.

    Raises Hangup, and BlockingIOError when there is no room, at once unless ``block``,
    else when the time of `limit_sending` is over.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    spill = -1
    try:
        if len(body) > _INLINE:
            spill = os.memfd_create("phalanx-order", os.MFD_CLOEXEC)
            view = memoryview(body)
            while view:
                view = view[os.write(spill, view) :]
            fds = (spill, *fds)
            body = b"+"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        flags = socket.MSG_NOSIGNAL if block else socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        sock.sendmsg([body], rights, flags)
    except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError):
        raise Hangup("the other end is gone") from None
    finally:
        if spill >= 0:
            os.close(spill)


def receive(sock: socket.socket, *, block: bool = False) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which the caller owns.

    None if none is there yet (never with ``block``). Raises Hangup at end of file.
    """
    flags = socket.MSG_CMSG_CLOEXEC if block else socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    try:
        body, ancillary, _, _ = sock.recvmsg(_INLINE, socket.CMSG_SPACE(_MAX_FDS * 4), flags)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        raise Hangup("the other end is gone") from None
    if not body:
        raise Hangup("the other end is gone")
    rights = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
    fds = list(rights)
    if body == b"+":
        spill = fds.pop(0)
        try:
            size = os.fstat(spill).st_size
            chunks = []
            at = 0
            while at < size and (chunk := os.pread(spill, size - at, at)):
                chunks.append(chunk)
                at += len(chunk)
            body = b"".join(chunks)
        finally:
            os.close(spill)
    return json.loads(body), fds
