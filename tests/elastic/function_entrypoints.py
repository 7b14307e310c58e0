"""Functions that workers of the tests run; importable by a spawned process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

SEEN_AT_IMPORT = os.environ.get("SEEN_AT_IMPORT")


def double(value):
    print(f"stdout of {os.environ['RANK']}")
    print(f"stderr of {os.environ['RANK']}", file=sys.stderr)
    return value * 2


def nothing():
    pass


def large(size):
    return {i: f"test{i}" for i in range(size)}


def seen_at_import():
    return SEEN_AT_IMPORT


def fail_on_rank(rank):
    if os.environ["RANK"] == str(rank):
        raise RuntimeError("oh no")
    time.sleep(600)


def leave(code):
    os._exit(code)


def sys_exit(code):
    sys.exit(code)


def crash():
    ctypes.string_at(0)


def signal_myself(number):
    os.kill(os.getpid(), number)
    time.sleep(600)


def unpicklable():
    return lambda: None


class Unreadable:
    """Can be sent, but not received."""

    def __reduce__(self):
        return int, ("not a number",)


def unreadable():
    return Unreadable()


def handlers():
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [signal.getsignal(n) is signal.SIG_DFL for n in numbers], len(blocked)


def session():
    return os.getpid(), os.getsid(0), os.getpgid(0)


def stubborn(path):
    """Ignores SIGTERM, has children in its own session and in another one; says so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
    ]
    with open(path, "w") as file:
        file.write(" ".join(str(pid) for pid in (os.getpid(), *(c.pid for c in children))))
    time.sleep(600)


def leave_children(path, code):
    """Ends and leaves its children behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    one = subprocess.Popen(["sleep", "600"])
    two = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(path, "w") as file:
        file.write(f"{one.pid} {two.pid}")
    os._exit(code)


def variables():
    return {k: v for k, v in os.environ.items() if k.startswith(("RANK", "PHALANX_"))}


def agent_within(folder):
    """Starts a worker of its own, and gets a signal while waiting for it."""
    from phalanx.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    context = start_processes("inner", "sleep", {0: (600,)}, {0: {}}, DefaultLogsSpecs(folder))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        context.wait(60)
    except SignalException as error:
        return error.sigval.name
    finally:
        context.close()
    return None
