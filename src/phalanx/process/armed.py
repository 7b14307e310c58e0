"""A process that writes the stacks of its own threads when a signal asks it to.

The interpreter does it, on the signal itself, even while a thread sits in native code with the
lock of the interpreter. What it writes goes into memory that others find under the process's
descriptors, so nothing has to be made ready or tidied away, and a process that has closed that
descriptor is not asked any more.
"""

from __future__ import annotations

import os
import signal

from phalanx.process import syscalls, tree

__all__ = ["STACKS_SIGNAL", "arm", "catches", "file_of"]

#: The signal that asks. A real-time one, since programs use SIGUSR1 and SIGUSR2 themselves.
STACKS_SIGNAL = signal.SIGRTMIN + 11

_NAME = "phalanx-stacks"


def arm() -> bool:
    """Have this worker write its stacks on ``STACKS_SIGNAL``, into the file of `file_of`.

    Its parent's parent (the agent) and what that starts may look into it from then on, also
    where the kernel restricts that to ancestors. False, and nothing changed, if the program
    has taken the signal or this was done before. Never raises.
    """
    try:
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL or catches(os.getpid()):
            return False
        import faulthandler

        fd = os.memfd_create(_NAME)  # open as long as the process lives
        os.write(fd, mark(os.getpid()))
        faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
    except Exception:
        return False
    try:
        keeper = tree.stat(os.getppid())
        if keeper is not None:
            syscalls.set_tracer(keeper.ppid)
    except OSError:
        pass  # a kernel without such a restriction
    return True


def mark(pid: int) -> bytes:
    """The first line of the file of this process, and of no other that has inherited it."""
    return b"pid %d writes its stacks here on signal %d\n" % (pid, STACKS_SIGNAL)


def file_of(pid: int) -> str | None:
    """Where the process writes its stacks when it gets ``STACKS_SIGNAL``; None: nowhere."""
    folder = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            path = f"{folder}/{fd}"
            if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                with open(path, "rb") as file:
                    if file.readline(200) == mark(pid):
                        return path
    except OSError:
        pass
    return None


def catches(pid: int) -> bool:
    """Whether the process has a handler for the signal: without one it would die of it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    except OSError:
        pass
    return False
