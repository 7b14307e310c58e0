"""The process tree, as ``/proc`` shows it. Reads only; whoever kills does it by pidfd."""

from __future__ import annotations

import os
import signal

from phalanx.process import syscalls

TYPE_CHECKING = False  # the keeper imports this module and can do without ``typing``
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PF_EXITING = 0x4


class Stat:
    """Part of ``/proc/<pid>/stat``.

    ``start`` is in clock ticks since boot: with the pid it says who this is.
    ``exit_code`` is a wait status, and 0 also when we may not know it.
    """

    __slots__ = (
        "exit_code",
        "flags",
        "name",
        "pid",
        "ppid",
        "session",
        "start",
        "state",
        "threads",
    )

    def __init__(
        self,
        pid: int,
        name: str,
        state: str,
        ppid: int,
        session: int,
        flags: int,
        threads: int,
        start: int,
        exit_code: int,
    ) -> None:
        self.pid = pid
        self.name = name
        self.state = state
        self.ppid = ppid
        self.session = session
        self.flags = flags
        self.threads = threads
        self.start = start
        self.exit_code = exit_code

    @property
    def zombie(self) -> bool:
        """Dead, but not reaped."""
        return self.state in "ZX"


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        chunks = []
        while chunk := file.read(1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)


def parse_stat(text: bytes) -> Stat:
    """Parse one line of ``/proc/<pid>/stat``; a command name may hold anything, even ``)``."""
    close = text.rindex(b")")
    start = text.index(b"(")
    pid = int(text[:start])
    name = text[start + 1 : close].decode("utf-8", "replace")
    rest = text[close + 2 :].split()
    return Stat(
        pid,
        name,
        rest[0].decode(),
        int(rest[1]),
        int(rest[3]),
        int(rest[6]),
        int(rest[17]),
        int(rest[19]),
        int(rest[49]),
    )


def stat(pid: int) -> Stat | None:
    """What ``pid`` is now; None if there is no such process."""
    try:
        return parse_stat(_read(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return None


def children(pid: int) -> list[int]:
    """Its children, zombies too; empty if it is gone."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
        except FileNotFoundError:
            if not _has_children_files():
                return [entry.pid for entry in everybody() if entry.ppid == pid]
        except OSError:
            pass
    return found


def _has_children_files() -> bool:
    me = os.getpid()
    return os.path.exists(f"/proc/{me}/task/{me}/children")


def everybody() -> Iterator[Stat]:
    """All processes that can be seen."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := stat(int(name))) is not None:
            yield entry


def descendants(pid: int, without: Iterable[int] = ()) -> list[Stat]:
    """Everything below ``pid``, parents first; ``without`` and what is below those left out."""
    seen = {pid, *without}
    found: list[Stat] = []
    todo = [pid]
    while todo:
        for child in children(todo.pop()):
            if child not in seen:
                seen.add(child)
                entry = stat(child)
                if entry is not None:
                    found.append(entry)
                    todo.append(child)
    return found


def environment_value(pid: int, name: str) -> str | None:
    """A variable in the environment that ``pid`` was exec'ed with."""
    try:
        text = _read(f"/proc/{pid}/environ")
    except OSError:
        return None
    start = name.encode() + b"="
    for entry in text.split(b"\0"):
        if entry.startswith(start):
            return entry[len(start) :].decode("utf-8", "replace")
    return None


def holds_page(pid: int, prefix: str) -> list[str]:
    """Names of the memfds beginning with ``prefix`` that ``pid`` has mapped or open."""
    found: set[str] = set()
    start = f"/memfd:{prefix}"
    try:
        for line in _read(f"/proc/{pid}/maps").decode("utf-8", "replace").splitlines():
            at = line.find(start)
            if at >= 0:
                found.add(line[at + 7 :].removesuffix(" (deleted)"))
    except OSError:
        pass
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith(start):
                found.add(target[7:].removesuffix(" (deleted)"))
    except OSError:
        pass
    return sorted(found)


def kill(entry: Stat, signum: int = signal.SIGKILL) -> bool:
    """Signal exactly this process, not one that got its pid later. False: it is gone."""
    try:
        pidfd = syscalls.pidfd_open(entry.pid)
    except OSError:
        return False
    try:
        now = stat(entry.pid)
        if now is None or now.start != entry.start or now.zombie:
            return False
        syscalls.pidfd_send_signal(pidfd, signum)
        return True
    except OSError:
        return False
    finally:
        os.close(pidfd)


def expects(pid: int, signum: int) -> bool:
    """Whether this process has said what it does with a signal: it handles or ignores it."""
    try:
        lines = _read(f"/proc/{pid}/status").splitlines()
    except OSError:
        return False
    told = dict(line.split(b":", 1) for line in lines if line.startswith((b"SigIgn", b"SigCgt")))
    return any(int(mask, 16) & (1 << (signum - 1)) for mask in told.values())


def death_status(pid: int, start: int) -> int | None:
    """The wait status of a process whose main thread has just ended; None if in doubt.

    Meant for the moment at which the robust mutex of the main thread changes hands: the
    kernel has then set the exit code, but not yet freed the memory. In doubt are: a
    process that exec'ed, one whose main thread alone has ended while other threads live,
    one whose exit code we may not read (the kernel then shows 0), and one that has been
    reaped meanwhile (``start`` is `Stat.start` of the process that is meant).
    """
    entry = stat(pid)
    if entry is None or entry.start != start:
        return None
    if not (entry.zombie or entry.flags & PF_EXITING):
        return None
    code = entry.exit_code
    if code & 0x7F:
        return code  # by a signal: that always takes the whole process
    if code == 0 and not _may_read_exit_code(pid):
        return None
    if entry.threads > 1 and not _whole_process_exits(pid):
        return None
    return code


def _may_read_exit_code(pid: int) -> bool:
    try:
        text = _read(f"/proc/{pid}/status").decode("utf-8", "replace")
    except OSError:
        return False
    ours = {"Uid:": str(os.geteuid()), "Gid:": str(os.getegid())}
    seen = 0
    for line in text.splitlines():
        name, _, rest = line.partition("\t")
        if name in ours:
            seen += 1
            if set(rest.split()[:3]) != {ours[name]}:
                return False
    return seen == 2


def _whole_process_exits(pid: int) -> bool:
    """Whether every other thread is on its way out too: exiting, or told to by the kernel."""
    try:
        tasks = [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    for task in tasks:
        if task == pid:
            continue
        try:
            thread = parse_stat(_read(f"/proc/{pid}/task/{task}/stat"))
            if thread.zombie or thread.flags & PF_EXITING:
                continue
            status = _read(f"/proc/{pid}/task/{task}/status")
        except (OSError, ValueError):
            continue  # it has gone meanwhile
        pending = 0
        for line in status.splitlines():
            if line.startswith(b"SigPnd:"):
                pending = int(line.split()[1], 16)
        if not pending >> (signal.SIGKILL - 1) & 1:
            return False
    return True
