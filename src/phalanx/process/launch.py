"""The child's side of a start: from fork to the user's program.

Everything here runs in a fresh child, single threaded, and ends in exec, in the program's
end, or in ``os._exit``.
"""

from __future__ import annotations

import errno
import json
import os
import signal

from phalanx.process import syscalls

TYPE_CHECKING = False  # the keeper imports this module and can do without ``typing``
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

CHANNEL_FD = "PHALANX_CHANNEL_FD"
PROGRESS_FD = "PHALANX_PROGRESS_FD"
WORKER = "PHALANX_WORKER"
KEEPER = "PHALANX_KEEPER"

_UNBORN = "phx-"
_ADOPTION_SECONDS = 30.0
# Only told to us: any signal that nobody else sends would do.
ADOPTED = signal.SIGUSR1


def unborn_name(token: str) -> str:
    """What the processes of a keeper are named that are no worker yet.

    Of a zombie nothing else is left by which the agent could know that it is one of them.
    """
    return (_UNBORN + token)[:15]


def reset_signals(blocked: Iterable[int] = ()) -> None:
    """Default action for every signal, and none blocked but those."""
    for signum in range(1, signal.NSIG):
        if signum in (signal.SIGKILL, signal.SIGSTOP) or 32 <= signum <= 33:
            continue
        try:
            signal.signal(signum, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def python_signals() -> None:
    """What a starting interpreter sets: it ignores two signals and handles SIGINT."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with(parent: int) -> None:
    """Die when ``parent`` does; at once if it is dead already."""
    syscalls.set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)


def expect_adoption(parent: int) -> None:
    """Begin to listen for our passing from whoever forked us to ``parent``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {ADOPTED})
    syscalls.set_death_signal(ADOPTED)


def await_adoption(parent: int) -> None:
    """Wait until ``parent`` is ours, then die with it. Needs `expect_adoption` before.

    The kernel sends the death signal when it hands us on, so there is nothing to poll.
    """
    if os.getppid() != parent:
        signal.sigtimedwait({ADOPTED}, _ADOPTION_SECONDS)
    die_with(parent)
    signal.sigtimedwait({ADOPTED}, 0)  # it may have come after the look above
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ADOPTED})


def take_stdio(fds: dict[str, int]) -> None:
    """Put the order's three descriptors where a program expects them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        fd = fds.get(name)
        if fd is None:
            fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(fd, number)  # makes it inheritable


def environment(order: dict[str, Any], fds: dict[str, int]) -> dict[str, str]:
    """The order's environment and what Phalanx adds to it."""
    env = dict(order["env"])
    env[WORKER] = order["mark"]
    env[CHANNEL_FD] = str(fds["channel"])
    env[PROGRESS_FD] = str(fds["page"])
    return env


def exec_program(order: dict[str, Any], fds: dict[str, int], errors: int, parent: int) -> NoReturn:
    """Become the order's command; what goes wrong is written to ``errors``."""
    name = order["argv"][0]
    try:
        os.setsid()
        die_with(parent)
        take_stdio(fds)
        reset_signals()
        for kept in ("channel", "page"):
            os.set_inheritable(fds[kept], True)
        if order["cwd"] is not None:
            name = order["cwd"]
            os.chdir(name)
            name = order["argv"][0]
        os.execvpe(order["argv"][0], order["argv"], environment(order, fds))
    except OSError as error:
        report(errors, error.errno or errno.EIO, name)
    except BaseException as error:
        report(errors, errno.EINVAL, name, str(error))
    os._exit(127)


def report(errors: int, code: int, name: str, text: str = "") -> None:
    """Tell the keeper why there will be no program."""
    os.write(errors, json.dumps({"errno": code, "file": name, "text": text}).encode())


class Become(BaseException):
    """Unwinds the keeper's stack in a forked worker; then its program begins.

    A program must be able to come to its end like any other, through the end of the main
    module; so it cannot run inside the keeper's loop.
    """

    def __init__(
        self, order: dict[str, Any], env: dict[str, str], finish: Callable[[int], None]
    ) -> None:
        super().__init__("a forked worker leaves the keeper's loop")
        self.order = order
        self.env = env
        self.finish = finish


def warm_worker(order: dict[str, Any], fds: dict[str, int], keeper: int, name: str) -> NoReturn:
    """All of a warm start but the program itself: raises `Become`.

    Runs in a fork of the forker that has called `expect_adoption`. ``name`` is what the
    process is to be called, that is as the interpreter's file.
    """
    from phalanx.process import armed
    from phalanx.process.channel import HELD, Channel, ChannelClosed
    from phalanx.process.page import ProgressPage

    take_stdio(fds)
    close_all(fds[name] for name in ("stdin", "stdout", "stderr") if name in fds)
    page = ProgressPage.attach(fds["page"])
    if page.hold():
        channel = Channel.attach(fds["channel"])
        try:
            channel.send(HELD)
        except ChannelClosed:
            pass
        channel.detach()  # the program makes its own object if it wants one
    await_adoption(keeper)
    python_signals()
    armed.arm()
    syscalls.set_name(name)
    raise Become(order, environment(order, fds), page.finish)


def become(order: dict[str, Any], env: dict[str, str], finish: Callable[[int], None]) -> NoReturn:
    """Run the order's program; called from the end of the main module, see `Become`."""
    from phalanx.process import bootstrap
    from phalanx.process.program import Program

    program = Program(
        argv=tuple(order["argv"]),
        script=order["script"],
        module=order["module"],
        args=tuple(order["args"]),
    )
    bootstrap.become(program, env, order["cwd"], finish)


def close_all(fds: Iterable[int]) -> None:
    """Close each of them; one that is closed already is no matter."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def close_others(keep: Iterable[int]) -> None:
    """Close every descriptor from 3 up except those."""
    kept = {0, 1, 2, *keep}
    close_all(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in kept)
