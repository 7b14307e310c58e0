"""A port that is held from the moment it is chosen, and who has it when it is taken."""

from __future__ import annotations

import errno
import os
import socket

from .api import RendezvousError

__all__ = ["PortInUseError", "hold", "owners"]

_LISTEN = "0A"


class PortInUseError(RendezvousError):
    """Somebody else listens on the port. ``holders`` is a list of (pid, command), perhaps empty."""

    def __init__(self, host: str, port: int, holders: list[tuple[int, str]]) -> None:
        self.host = host
        self.port = port
        self.holders = holders
        # The first is the one that made it; the others are its children.
        who = " and ".join(f"process {pid} ({command})" for pid, command in holders[:1])
        super().__init__(
            f"port {port} on {host} is in use by {who or 'a process that could not be found'}; "
            "choose another port (--master-port), or 0 for any free one"
        )


def hold(host: str, port: int) -> socket.socket:
    """A TCP socket bound to ``host`` and ``port`` (0: any free one), which does not listen yet.

    While it is held nobody gets the port by chance. Whoever is told the number can still
    listen on it, because the address is marked as reusable: that is how a worker serves its store
    on a port that the agent chose. Call ``listen`` on it and nobody else can.

    Raises :class:`PortInUseError`, or ``RendezvousError`` for a host that has no address here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RendezvousError(f"the address {host!r} cannot be resolved: {error}") from error
    # IPv4 first: a name such as localhost has both, and clients try both.
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    held = socket.socket(family, kind, proto)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port, owners(port)) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise RendezvousError(
                f"{host} ({address[0]}) is not an address of this machine: with one node the "
                "master address must be one of its own, such as 127.0.0.1"
            ) from error
        raise RendezvousError(f"cannot bind {host}:{port}: {error.strerror}") from error
    return held


def listening_inodes(table: str, port: int) -> set[str]:
    """The sockets that listen on ``port``, from the text of ``/proc/net/tcp`` or ``tcp6``."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        _, _, port_hex = fields[1].rpartition(":")
        if port_hex and int(port_hex, 16) == port:
            found.add(fields[9])
    return found


def owners(port: int) -> list[tuple[int, str]]:
    """The processes that listen on a port of this machine, as far as this user may see them."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                inodes |= listening_inodes(file.read(), port)
        except OSError:
            continue
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if not wanted:
        return []
    return [
        (pid, _command(pid))
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        if _has_one_of(pid, wanted)
    ]


def _has_one_of(pid: int, targets: set[str]) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") in targets:
                return True
        except OSError:
            continue
    return False


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    words = " ".join(words.split())  # a program given with -c has lines
    return (words if len(words) <= 100 else f"{words[:97]}...") or "command unknown"
