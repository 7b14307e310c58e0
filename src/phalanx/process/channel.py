"""The worker channel: small JSON messages between the agent and one worker.

A SEQPACKET socket pair: message boundaries are kept, descriptors can travel with a
message, and the end of one side is end of file for the other.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MAX_BYTES = 64 * 1024
MAX_FDS = 16
FD_VARIABLE = "PHALANX_CHANNEL_FD"

# From the worker, for the supervisor itself: "my main thread holds the page's mutex".
HELD = "held"


class ChannelClosed(ConnectionError):
    """The other side is gone (or this side has been closed)."""


class MalformedMessage(ValueError):
    """What arrived is not a message; the channel stays usable."""


class ChannelFull(BlockingIOError):
    """The other side does not read: there is no room for another message."""


@dataclass(frozen=True)
class Message:
    """One message. Whoever receives it owns the descriptors in ``fds``."""

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()
    sent_ns: int = field(default=0, compare=False)  # CLOCK_MONOTONIC of the sender; 0: not told


class Channel:
    """One end. Usable from several threads at a time for sending, from one for receiving."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends. Raises OSError."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    @classmethod
    def attach(cls, fd: int) -> Channel:
        """The end behind ``fd``, which becomes close-on-exec. Raises OSError."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    @classmethod
    def from_environment(cls) -> Channel | None:
        """The end that ``PHALANX_CHANNEL_FD`` names; None where there is none."""
        value = os.environ.get(FD_VARIABLE, "")
        return cls.attach(int(value)) if value.isdigit() else None

    def fileno(self) -> int:
        """The descriptor, for a selector; -1 once closed."""
        return self._socket.fileno()

    def send(self, type: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """Send one message; never blocks.

        Raises ChannelClosed, ChannelFull, and ValueError for a message that is too large
        or is not JSON.
        """
        body = json.dumps(
            {**fields, "v": VERSION, "type": type, "sent_ns": time.monotonic_ns()},
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(f"message {type!r} has {len(body)} bytes; {MAX_BYTES} are allowed")
        if len(fds) > MAX_FDS:
            raise ValueError(f"message {type!r} has {len(fds)} descriptors; {MAX_FDS} are allowed")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        if self._socket.fileno() < 0:
            raise ChannelClosed("the channel is closed")
        try:
            self._socket.sendmsg([body], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise ChannelFull("the other side of the channel does not read") from None
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError):
            raise ChannelClosed("the other side of the channel is gone") from None

    def receive(self) -> Message | None:
        """The next message, or None if none is there; never blocks.

        Raises ChannelClosed at end of file, MalformedMessage for what is no message.
        """
        if self._socket.fileno() < 0:
            raise ChannelClosed("the channel is closed")
        try:
            body, ancillary, flags, _ = self._socket.recvmsg(
                MAX_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise ChannelClosed("the other side of the channel is gone") from None
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        try:
            if not body and not ancillary and self._hung_up():
                raise ChannelClosed("the other side of the channel is gone")
            return _parse(body, flags, tuple(fds))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds; True when `receive` has something to say."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            if poll.poll(max(0, left) * 1000):
                return True
            if left <= 0:
                return False

    def detach(self) -> int:
        """Give the descriptor away, open; this object is closed then."""
        return self._socket.detach()

    def close(self) -> None:
        """Close this end; the other one reads end of file."""
        self._socket.close()

    def _hung_up(self) -> bool:
        # An empty message reads like end of file; only the latter is a hang-up.
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))


def _parse(body: bytes, flags: int, fds: tuple[int, ...]) -> Message:
    if flags & socket.MSG_TRUNC:
        raise MalformedMessage(f"a message of more than {MAX_BYTES} bytes")
    if flags & socket.MSG_CTRUNC:
        raise MalformedMessage(f"a message with more than {MAX_FDS} descriptors")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not JSON ({error}): {body[:80]!r}") from None
    if not isinstance(value, dict):
        raise MalformedMessage(f"not a JSON object: {body[:80]!r}")
    version = value.pop("v", None)
    if version != VERSION or isinstance(version, bool):
        raise MalformedMessage(f"version {version!r}; this side speaks {VERSION}")
    kind = value.pop("type", None)
    if not isinstance(kind, str) or not kind:
        raise MalformedMessage(f"no type: {body[:80]!r}")
    sent = value.pop("sent_ns", 0)
    if not isinstance(sent, int) or isinstance(sent, bool):
        sent = 0
    return Message(kind, value, fds, sent)
