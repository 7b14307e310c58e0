"""The worker's side of ``MultiprocessContext``: from the new process to the user's function."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.elastic.multiprocessing import api
from phalanx.process import launch, syscalls

HEADER = struct.Struct("<Q")


@dataclass
class Task:
    """What one worker is to do. It is pickled, unless the process is forked."""

    local_rank: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    env: dict[str, str]
    stdout: str
    stderr: str
    value: Any  # a Connection: the value goes there
    agent_pid: int
    death_signal: bool  # started by the agent's main thread, so it may be tied to it
    numa_options: Any


class EnvironmentFirst(str):
    """The name of a spawned process. Unpickling it sets the process's environment.

    It is the first thing that a spawned process unpickles, before it imports the user's
    main module; so what that reads when imported is there. It must not import anything of
    ours then, as the parent's ``sys.path`` arrives only with the rest. The bytes go from
    this process to its own child, over a pipe that has no name.
    """

    env: dict[str, str]

    def __new__(cls, name: str, env: dict[str, str]) -> EnvironmentFirst:
        self = super().__new__(cls, name)
        self.env = env
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').environ.update({self.env!r}) or {str(self)!r}",)


def main(task: Task) -> None:
    """The target of the new process."""
    _own_signals()
    api._interruptions = api._Interruptions()  # a fork has copied the agent's
    _die_with_agent(task)
    for name in (launch.CHANNEL_FD, launch.PROGRESS_FD):  # the agent's own, if it is a worker
        os.environ.pop(name, None)
    rank = task.local_rank

    def call(*args: Any) -> bytes:
        # Pickled in here, so that a value that cannot be is recorded as the worker's error.
        return pickle.dumps(task.fn(*args), pickle.HIGHEST_PROTOCOL)

    call.__qualname__ = getattr(task.fn, "__qualname__", repr(task.fn))
    try:
        api._wrap(
            local_rank=rank,
            fn=call,
            args={rank: task.args},
            envs={rank: task.env},
            stdout_redirects={rank: task.stdout},
            stderr_redirects={rank: task.stderr},
            ret_vals={rank: _Sender(task.value)},
            queue_finished_reading_event=_NoWait(),
            numa_options=task.numa_options,
        )
    except KeyboardInterrupt:
        # As any program: ended by the signal, not "exited 0" or "exited 1".
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.exit(1)  # its traceback has been printed already


def _own_signals() -> None:
    """A forked child has the agent's handlers; they are not for it."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
            continue
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _die_with_agent(task: Task) -> None:
    """Lead a session, which the undertaker ends, and have the kernel tie us to the agent."""
    try:
        os.setsid()
    except OSError:  # we lead one already
        pass
    parent = os.getppid()
    if task.death_signal or parent != task.agent_pid:  # else the parent is the fork server
        syscalls.set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)  # it died a moment ago: nobody wants what we would do


class _Sender:
    """Where `api._wrap` puts the value."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def put(self, value: bytes | None) -> None:
        if value is None:  # `record` makes it of sys.exit(0)
            value = pickle.dumps(None)
        with open(self._connection.fileno(), "wb", closefd=False) as pipe:
            pipe.write(HEADER.pack(len(value)) + value)


class _NoWait:
    """The value is in the agent's hands once it is written: nothing to wait for."""

    def wait(self) -> None:
        pass
