"""Getting a thread out of a blocked gloo collective.

gloo has no abort: ``backend.abort()`` and ``shutdown()`` return at once and interrupt
nothing. What does is ``shutdown(2)`` on the connected sockets that gloo opened: every
operation on them fails within milliseconds, also when the peer is stopped and not dead.

A socket is taken for gloo's only when it appeared while gloo was connecting *and* one of its
ends is the listener of a member of the group; the listener itself and the store's
connection are never touched. A descriptor number may be used again by then for something
else, so the inode is checked as well.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field


def sockets() -> dict[int, int]:
    """All open sockets of this process: descriptor to inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _ends(fd: int) -> tuple[int, int | None, str] | None:
    """Local port, peer's port (None: not connected), peer; None for what is no TCP socket."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if sock.type != socket.SOCK_STREAM:
                return None
            local = sock.getsockname()[1]
            try:
                peer = sock.getpeername()
                return local, peer[1], peer[0]
            except OSError:
                return local, None, ""
    except OSError:
        return None


def shut(fd: int, inode: int) -> bool:
    """``shutdown(2)`` for reading, if ``fd`` is still that socket. True if it was.

    For reading only: gloo's own thread then reads the end of the stream and fails whatever is
    pending. Were writing shut down too, a thread that is just beginning to send could meet the
    error first, and gloo would forget to fail that very send.
    """
    try:
        if os.fstat(fd).st_ino != inode:
            return False
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.shutdown(socket.SHUT_RD)
    except OSError:
        return False
    return True


@dataclass
class SocketRecord:
    """The sockets that belong to one generation of groups.

    ``watch()`` before something opens sockets, ``note()`` after it; ``cut()`` from any thread
    at any time, in between as well.
    """

    ports: set[int] = field(default_factory=set)
    _before: dict[int, int] | None = None
    _mine: dict[int, int] = field(default_factory=dict)
    _hosts: set[str] = field(default_factory=set)
    _cut: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, ports: Iterable[int] = ()) -> None:
        with self._lock:
            self.ports.update(ports)
            self._before = sockets()

    def note(self) -> int:
        """Take the new connections to or from ``ports``. Returns how many are held.

        After a ``cut`` the new ones are cut at once.
        """
        with self._lock:
            new = self._new()
            self._before = None
            self._mine.update(new)
            if self._cut:
                self._shut(new)
            return len(self._mine)

    def _new(self) -> dict[int, int]:
        if self._before is None:
            return {}
        new = {}
        for fd, inode in sockets().items():
            if self._before.get(fd) == inode:
                continue
            ends = _ends(fd)
            if ends is None or ends[1] is None:
                continue
            if ends[0] in self.ports or ends[1] in self.ports:
                new[fd] = inode
                self._hosts.add(ends[2])
        return new

    def _missed(self) -> dict[int, int]:
        """Connections between the same ports and hosts that were not taken when they were made."""
        found = {}
        for fd, inode in sockets().items():
            if self._mine.get(fd) == inode:
                continue
            ends = _ends(fd)
            if ends is None or ends[1] is None or ends[2] not in self._hosts:
                continue
            if ends[0] in self.ports or ends[1] in self.ports:
                found[fd] = inode
        return found

    @staticmethod
    def _shut(held: dict[int, int]) -> int:
        return sum(shut(fd, inode) for fd, inode in held.items())

    def cut(self) -> int:
        """Shut all of them down. Returns how many were still open. May be called again."""
        with self._lock:
            self._cut = True
            return self._shut({**self._mine, **self._new(), **self._missed()})


def main_thread_ticks() -> int:
    """Processor time of this process's main thread, in clock ticks; -1 if it cannot be read."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return -1


def new_listeners(before: dict[int, int]) -> set[int]:
    """Ports on which this process has begun to listen since ``before``."""
    ports = set()
    for fd, inode in sockets().items():
        if before.get(fd) == inode:
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(sock.getsockname()[1])
        except OSError:
            continue
    return ports
