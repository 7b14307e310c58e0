"""A small process that outlives the agent, to end what the agent's function workers started.

Function workers are the agent's own children: the kernel kills them when it dies, but not
their children. This script waits for the agent's death (or for being killed, which is how
the agent dismisses it) and then kills every process in the workers' sessions and every one
that has their mark in its environment.

It is started as a script, ``undertaker.py <agent's pid> <mark>``, without ``site`` and
without anything of ours, to be there in milliseconds. The pids of the workers, which lead
their sessions, come on standard input, one a line.
"""

import os
import select
import signal
import sys

VARIABLE = b"PHALANX_WORKER="
_ROUNDS = 50  # one that forks while we look is found the next time


def main(agent: int, mark: str) -> None:
    """Wait, then sweep."""
    os.setsid()
    os.set_blocking(0, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        pidfd = os.pidfd_open(agent)
        poll.register(pidfd, select.POLLIN)
    except ProcessLookupError:
        pidfd = -1
    sessions: set[int] = set()
    # Parent no longer: it died before we could look.
    alive = pidfd >= 0 and os.getppid() == agent
    while True:
        ready = dict(poll.poll()) if alive else {}
        alive = alive and pidfd not in ready
        try:
            data = os.read(0, 65536)
            sessions.update(int(line) for line in data.split())
            if not data:
                poll.unregister(0)
        except (BlockingIOError, KeyError):
            pass
        if not alive:
            break
    for _ in range(_ROUNDS):
        if not sweep(sessions, VARIABLE + mark.encode() + b"."):
            return


def sweep(sessions: set[int], mark: bytes) -> int:
    """Kill what belongs to the workers; returns how many processes were found."""
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                rest = file.read().rpartition(b")")[2].split()
            if rest[0] in (b"Z", b"X"):
                continue
            if int(rest[3]) not in sessions:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if not any(entry.startswith(mark) for entry in file.read().split(b"\0")):
                        continue
            os.kill(int(name), signal.SIGKILL)
            found += 1
        except (OSError, ValueError, IndexError):  # it has gone, or is not for us
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
