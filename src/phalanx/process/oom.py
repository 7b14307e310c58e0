"""Was a worker killed because memory ran out? Says so only where the kernel does.

Take a `Mark` of a worker right after its start and ask `OomWatch.explain` after its death.
Sources, the surest first: the kernel's log (``/dev/kmsg``), which names the process; the
kill counter of the worker's cgroup (``memory.events``; ``memory.oom_control`` of version
1); its counter of failed allocations; the kill counter of the whole machine.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import NamedTuple

_MAX_RECORDS = 5000  # of the kernel's log, per question
_MAX_LEVELS = 16
_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63

_KILLED = re.compile(rb"Killed process (\d+) \(|^oom-kill:.*\bpid=(\d+)\b")


def killed_pid(record: bytes) -> int | None:
    """The process that a record of ``/dev/kmsg`` says was killed for want of memory."""
    _, semicolon, text = record.partition(b";")
    match = _KILLED.search(text.split(b"\n", 1)[0]) if semicolon else None
    return int(match.group(1) or match.group(2)) if match else None


class Counters(NamedTuple):
    """One cgroup. None: the kernel does not say."""

    kills: int | None = None  # processes of it that were killed for want of memory
    failures: int | None = None  # how often it was at its limit
    limit: int | None = None  # bytes
    peak: int | None = None  # bytes


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup: where it is mounted, and its path as the kernel prints it."""

    folder: str
    path: str
    version: int

    def read(self) -> Counters:
        """What it counts now; all None once it is gone."""
        if self.version == 2:
            events = _table(os.path.join(self.folder, "memory.events"))
            return Counters(
                events.get("oom_kill"),
                events.get("max"),
                _limit(_number(os.path.join(self.folder, "memory.max"))),
                _number(os.path.join(self.folder, "memory.peak")),
            )
        return Counters(
            _table(os.path.join(self.folder, "memory.oom_control")).get("oom_kill"),
            _number(os.path.join(self.folder, "memory.failcnt")),
            _limit(_number(os.path.join(self.folder, "memory.limit_in_bytes"))),
            _number(os.path.join(self.folder, "memory.max_usage_in_bytes")),
        )


def cgroups_of(pid: int, proc: str = "/proc") -> list[Cgroup]:
    """The memory cgroup of a process, then those above it; [] if it cannot be told."""
    memberships = _text(f"{proc}/{pid}/cgroup")
    mounts = _text(f"{proc}/self/mountinfo")
    if memberships is None or mounts is None:
        return []
    one: str | None = None
    two: str | None = None
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            one = path
        elif number == "0" and not controllers:
            two = path
    # A version 1 memory hierarchy, where there is one, is the one that counts.
    version = 1 if one is not None else 2
    own = one if one is not None else two
    if own is None:
        return []
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 1 and "memory" not in kind[2].split(","):
            continue
        root, mount = _unescape(fields[3]), _unescape(fields[4])
        inner = own if root == "/" else own[len(root) :] if own.startswith(root) else "/"
        return _chain(mount, inner.strip("/"), own, version)
    return []


def _chain(mount: str, inner: str, path: str, version: int) -> list[Cgroup]:
    found = []
    for _ in range(_MAX_LEVELS):
        folder = os.path.join(mount, inner) if inner else mount
        if os.path.isdir(folder):
            found.append(Cgroup(folder, path or "/", version))
        if not inner:
            break
        inner, path = os.path.dirname(inner), os.path.dirname(path)
    return found


@dataclass(frozen=True)
class Mark:
    """What the counters of a worker's cgroups were when it started."""

    pid: int
    groups: tuple[tuple[Cgroup, Counters], ...]
    machine: int | None


class OomWatch:
    """Follows the kernel's log where that may be read. `close` it in the end."""

    def __init__(self, *, kmsg: str | None = "/dev/kmsg") -> None:
        """``kmsg`` None: do without the log."""
        self._killed: set[int] = set()
        self._kmsg = -1
        if kmsg is not None:
            try:
                self._kmsg = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._kmsg, 0, os.SEEK_END)
            except OSError:  # not for us, or no such thing
                pass

    def mark(self, pid: int) -> Mark:
        """To be called while the process lives."""
        groups = tuple((group, group.read()) for group in cgroups_of(pid))
        return Mark(pid, groups, _machine_kills())

    def explain(self, mark: Mark, returncode: int, max_rss: int | None = None) -> str | None:
        """A sentence about memory, or None if nothing points there.

        ``returncode`` as subprocess has it, ``max_rss`` in bytes. Not for workers that were
        killed on purpose. The kernel counts a kill before it sends the signal, so the
        question does not come too early.
        """
        killed = returncode == -signal.SIGKILL
        self._read_log()
        leaf = mark.groups[0] if mark.groups else None
        now = leaf[0].read() if leaf else Counters()
        kills = _grown(leaf[1].kills if leaf else None, now.kills)
        counted = now.kills is not None
        if killed and mark.pid in self._killed and (kills or not counted):
            return f"out of memory: the kernel's OOM killer chose it{_figures(mark, max_rss)}"
        if leaf is not None and kills:
            who = "it" if killed else "a process of its cgroup, perhaps a child of it,"
            sure = "probably out of memory" if killed else "possibly out of memory"
            return (
                f"{sure}: {who} died when the OOM killer struck in cgroup {leaf[0].path}"
                f" ({kills} since its start){_figures(mark, max_rss)}"
            )
        if not killed:
            return None
        for group, before in mark.groups:
            after = group.read()
            failures = _grown(before.failures, after.failures)
            # With a counter of kills at hand, that of failed allocations proves nothing.
            if failures and after.kills is None and after.limit is not None:
                return (
                    f"possibly out of memory: cgroup {group.path} was at its limit"
                    f" {failures} times since its start{_figures(mark, max_rss)}"
                )
        machine = _grown(mark.machine, _machine_kills())
        if machine and not counted:
            return (
                "possibly out of memory: the OOM killer struck on this machine"
                f" ({machine} since its start){_figures(mark, max_rss)}"
            )
        return None

    def close(self) -> None:
        """Close the kernel's log."""
        if self._kmsg >= 0:
            os.close(self._kmsg)
            self._kmsg = -1

    def _read_log(self) -> None:
        if self._kmsg < 0:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._kmsg, 8192)
            except BrokenPipeError:  # records were overwritten before we read them
                continue
            except OSError:
                return
            if not record:
                return
            pid = killed_pid(record)
            if pid is not None:
                self._killed.add(pid)


def _figures(mark: Mark, max_rss: int | None) -> str:
    """Limit and peak of the nearest cgroup that has a limit, and the worker's own peak."""
    parts = []
    for group, _ in mark.groups:
        counters = group.read()
        if counters.limit is not None:
            parts.append(f"limit {_size(counters.limit)}")
            if counters.peak is not None:
                parts.append(f"peak {_size(counters.peak)}")
            break
    if max_rss:
        parts.append(f"its own peak {_size(max_rss)}")
    return f"; {', '.join(parts)}" if parts else ""


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _grown(before: int | None, after: int | None) -> int:
    return max(0, after - before) if before is not None and after is not None else 0


def _machine_kills() -> int | None:
    return _table("/proc/vmstat").get("oom_kill")


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _limit(value: int | None) -> int | None:
    return value if value is not None and value < _UNLIMITED else None


def _table(path: str) -> dict[str, int]:
    """Lines of ``name number``."""
    found = {}
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)
