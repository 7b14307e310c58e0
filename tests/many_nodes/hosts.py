"""Several hosts on one machine: a network namespace each, with a host name and an address of
its own, on one switch (a bridge in a namespace of its own). Needs root and iproute2.

Nothing is shared between two sets of hosts, so many may exist at once with the same addresses.
Everything goes with the namespaces; those of a process that was killed go with the next set.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "phxhost"
NETNS = Path("/etc/netns")
_sets = itertools.count()


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@cache
def why_not() -> str:
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool} command (package iproute2, util-linux)"
    try:
        with Hosts(1):
            return ""
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"no network namespace can be made: {error}"


class Host:
    """One of them. ``address`` is its IPv4 address, ``name`` its host name."""

    def __init__(self, number: int, namespace: str, switch: str) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.namespace = namespace
        self._switch = switch

    def words(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as a command that runs here, in the same process (all of them exec)."""
        name = f'hostname {self.name}; exec "$@"'
        return [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--uts", "sh", "-c", name, "sh", *argv),
        ]

    def start(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **kept: Any
    ) -> subprocess.Popen[str]:
        """Start a program on this host. Whoever runs us may ignore signals: it does not."""
        return subprocess.Popen(
            self.words(argv),
            env=dict(os.environ if env is None else env),
            text=True,
            preexec_fn=_default_signals,
            **kept,
        )

    def run(self, argv: Sequence[str], timeout: float = 60.0, **kept: Any) -> str:
        """The output of a program that ends here."""
        return subprocess.run(
            self.words(argv), capture_output=True, text=True, timeout=timeout, check=True, **kept
        ).stdout

    def pids(self) -> list[int]:
        """Every process on this host."""
        return [int(p) for p in _ip("netns", "pids", self.namespace, check=False).split()]

    def kill(self) -> None:
        """Every process on this host dies at once, as when the power goes."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def cut(self) -> None:
        """No packet comes or goes any more; nobody is told."""
        _ip("-n", self._switch, "link", "set", f"p{self.number}", "nomaster")

    def mend(self) -> None:
        """The cable is back."""
        _ip("-n", self._switch, "link", "set", f"p{self.number}", "master", "sw0")


class Hosts:
    """``count`` hosts; a context manager. ``hosts[0]`` is the first."""

    def __init__(self, count: int) -> None:
        _sweep()
        base = f"{PREFIX}-{os.getpid()}-{next(_sets)}"
        self._switch = f"{base}-sw"
        self._hosts = [Host(n, f"{base}-{n}", self._switch) for n in range(count)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "name", "sw0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "sw0", "up")
        table = "127.0.0.1 localhost\n::1 localhost\n"
        table += "".join(f"{h.address} {h.name}\n" for h in self._hosts)
        for host in self._hosts:
            own = NETNS / host.namespace
            own.mkdir(parents=True)
            (own / "hosts").write_text(table)
            port = f"p{host.number}"
            _ip("netns", "add", host.namespace)
            _ip(
                *("-n", host.namespace, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", port, "master", "sw0")
            _ip("-n", self._switch, "link", "set", port, "up")

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def left(self) -> list[int]:
        """Processes that still run on any of them."""
        return [pid for host in self._hosts for pid in host.pids()]

    def close(self) -> None:
        """Kill all that runs on them, and take them away."""
        end = time.monotonic() + 10.0
        while self.left() and time.monotonic() < end:
            for host in self._hosts:
                host.kill()
        for host in self._hosts:
            _remove(host.namespace)
        _remove(self._switch)


def _remove(namespace: str) -> None:
    _ip("netns", "del", namespace, check=False)
    shutil.rmtree(NETNS / namespace, ignore_errors=True)
    try:
        NETNS.rmdir()
    except OSError:
        pass  # somebody else has one there


def _sweep() -> None:
    """Take away what a process that was killed has left."""
    for line in _ip("netns", "list", check=False).splitlines():
        name = line.split()[0] if line.split() else ""
        parts = name.split("-")
        if parts[0] == PREFIX and len(parts) == 4 and not Path(f"/proc/{parts[1]}").exists():
            for pid in _ip("netns", "pids", name, check=False).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            _remove(name)


def _default_signals() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
