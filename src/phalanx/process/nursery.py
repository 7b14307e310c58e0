"""The nursery: a child of the keeper that has imported what programs import, and forks.

It always has one child, the forker, that waits for orders, forks the workers and leaves; so
their parent is the keeper, which never runs anybody's imports: whatever an import does
(hang, crash, start threads), the keeper goes on reaping and killing.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from phalanx.process import launch, syscalls, wire

TYPE_CHECKING = False  # the keeper imports this module and can do without ``typing``
if TYPE_CHECKING:
    from typing import Any, NoReturn


_HANGUP = 3

REHEARSE = "PHALANX_REHEARSE"
"""0 in the keeper's environment: idle warm processes make no step (docs/warm-workers.md)."""


def main(sock: socket.socket, plan: str, keeper: int) -> NoReturn:
    """Import, say so, then fork as told until the keeper hangs up.

    Runs in a fork of the keeper. In a worker it raises `launch.Become`.
    """
    launch.close_others([sock.fileno()])
    os.setsid()
    launch.die_with(keeper)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open("/proc/self/comm") as comm:
        name = comm.read().rstrip("\n")
    syscalls.set_name(launch.unborn_name(os.environ[launch.KEEPER]))
    news = _prepare(plan)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever an import did
    wire.send(sock, {**news, "ev": "preloaded"})
    if not news["safe"]:
        os._exit(0)
    gc.collect()
    gc.freeze()  # so that no collection in a worker writes to what they share
    nursery = os.getpid()
    while True:
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(sock, error)
            continue
        if pid == 0:
            try:
                _forker(sock, nursery, keeper, name)
            except launch.Become:
                raise
            except wire.Hangup:
                os._exit(_HANGUP)
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            # The keeper is gone, or the forker has died: the keeper sees us leave, and
            # orders again what was not done.
            os._exit(0 if os.waitstatus_to_exitcode(status) == _HANGUP else 1)


def _refuse(sock: socket.socket, error: OSError) -> None:
    """Without memory for a forker, tell who asks; we try again for the next."""
    try:
        order, fds = _receive(sock)
    except wire.Hangup:
        os._exit(0)
    wire.send(sock, {"ev": "fork_failed", "key": order["key"], "errno": error.errno})
    launch.close_all(fds)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    order = wire.receive(sock, block=True)
    assert order is not None  # it blocks
    return order


def _prepare(plan: str) -> dict[str, Any]:
    # What every child needs, imported once here. The order matters: bootstrap registers
    # its end before anything that a program imports does.
    from phalanx.process import bootstrap, channel, page, preload

    del channel, page
    syscalls.is_subreaper()  # loads the C library
    report = preload.perform(preload.PreloadPlan.from_json(plan))
    if "torch" in sys.modules and os.environ.get(REHEARSE) != "0":
        import phalanx.torch_bridge.rehearsal  # noqa: F401
    bootstrap.our_modules()
    return {
        "report": report.to_json(),
        "safe": report.safe,
        "torch": "torch" in sys.modules,
    }


def _forker(sock: socket.socket, nursery: int, keeper: int, name: str) -> NoReturn:
    """Wait for an order, carry out what has come, leave. In a worker it raises `Become`."""
    # We ignore what the workers must not: held back, it waits until they can take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    launch.die_with(nursery)
    item: tuple[dict[str, Any], list[int]] | None = _receive(sock)
    while item is not None:
        _fork_one(sock, *item, keeper, name)
        item = wire.receive(sock)
    os._exit(0)


def _fork_one(
    sock: socket.socket, order: dict[str, Any], fds: list[int], keeper: int, name: str
) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        wire.send(sock, {"ev": "fork_failed", "key": order["key"], "errno": error.errno})
        launch.close_all(fds)
        return
    if pid == 0:
        try:
            launch.expect_adoption(keeper)
            os.setsid()
            sock.close()
            _live(order, fds, keeper, name)
        except launch.Become:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    pidfd = syscalls.pidfd_open(pid)
    try:
        wire.send(sock, {"ev": "forked", "key": order["key"], "pid": pid}, [pidfd])
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # nobody would know of it
        raise
    finally:
        launch.close_all((pidfd, *fds))


def _live(order: dict[str, Any], fds: list[int], keeper: int, name: str) -> NoReturn:
    signal.set_wakeup_fd(-1)
    launch.reset_signals(blocked={launch.ADOPTED})
    if order["op"] == "standby":
        launch.await_adoption(keeper)
        line = socket.socket(fileno=fds[0])
        rehearsal = sys.modules.get("phalanx.torch_bridge.rehearsal")
        if rehearsal is not None:
            rehearsal.rehearse()
        try:
            wire.send(line, {"ev": "ready"})
            order, fds = _receive(line)
        except wire.Hangup:
            os._exit(1)  # should an order have been lost with the line, this was no success
        line.close()
        launch.expect_adoption(keeper)  # it is: the next look finds the keeper at once
    if order["op"] == "store":
        launch.await_adoption(keeper)
        from phalanx.torch_bridge import store_server

        store_server.serve(fds[0], order["host"], order["port"])
        os._exit(0)
    launch.warm_worker(order, dict(zip(order["fds"], fds, strict=True)), keeper, name)
