"""The check that a node has to pass before it takes part in a job (``--node-check``).

The command is a process of the supervisor's like any worker: it dies with the agent, and what
it leaves behind is swept.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from phalanx.agent.console import seconds
from phalanx.process.program import Program
from phalanx.process.supervisor import (
    KeeperLost,
    StartOrder,
    Supervisor,
    SupervisorError,
    WorkerProcess,
)

_NO_RANK = -1
_KEPT = 8192  # bytes of its output
_LINES = 10
_GRACE = 2.0


class NodeUnfit(RuntimeError):
    """The node stays out; the text says why. ``lines``: the last ones the check wrote."""

    def __init__(self, text: str, lines: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.lines = lines


class _Tail:
    """The end of what comes out of a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.data = b""

    def read(self) -> bool:
        """Take what is there. False: nothing more will come."""
        try:
            while piece := os.read(self.fd, 65536):
                self.data = (self.data + piece)[-_KEPT:]
        except BlockingIOError:
            return True
        return False

    def lines(self) -> tuple[str, ...]:
        rows = self.data.decode("utf-8", "replace").splitlines()
        return tuple(row.rstrip() for row in rows if row.strip())[-_LINES:]


def check(supervisor: Supervisor, command: str, timeout: float, env: Mapping[str, str]) -> float:
    """Run ``command`` by the shell; returns the seconds it took.

    Raises:
        NodeUnfit: it ended with another status than 0, or not within ``timeout`` seconds.
    """
    began = time.monotonic()
    out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(into, True)
    tail = _Tail(out)
    worker = None
    try:
        try:
            order = StartOrder(
                _NO_RANK,
                Program(("/bin/sh", "-c", command)),
                env,
                stdout=into,
                stderr=into,
                warm=False,
            )
            (worker,) = supervisor.start([order], max(timeout, _GRACE))
        except (OSError, SupervisorError) as error:
            raise NodeUnfit(f"the node check {command!r} cannot be run: {error}") from error
        finally:
            os.close(into)

        def read() -> None:
            if not tail.read():
                supervisor.unwatch(out)  # else its end would be told over and over

        supervisor.watch(out, read)
        end = began + timeout
        while not worker.gone and (left := end - time.monotonic()) > 0:
            for happening in supervisor.wait(left):
                if isinstance(happening, KeeperLost):
                    raise NodeUnfit(f"the node check {command!r} was cut off: {happening.reason}")
    finally:
        if worker is not None:
            supervisor.unwatch(out)
            if not worker.gone:
                supervisor.stop([worker], signal.SIGTERM, _GRACE)
            tail.read()
        os.close(out)
    if why := _verdict(worker, time.monotonic() - began, timeout):
        raise NodeUnfit(f"the node check {command!r} {why}", tail.lines())
    return time.monotonic() - began


def _verdict(worker: WorkerProcess, took: float, timeout: float) -> str:
    """What is wrong with its end; "": nothing."""
    code = worker.returncode
    if worker.signalled_by_us or code is None:
        return f"did not end within {seconds(timeout)}"
    if code == 0:
        return ""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code} after {seconds(took)}"
