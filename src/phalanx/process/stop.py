"""Stopping workers, in stages, each with a bound.

1. the signal, to each worker's own process alone: its program saves what it wants;
2. after the grace SIGTERM to its process group, and a moment for that;
3. SIGKILL to it and to all below it;
4. what it left behind, in sessions of its own too, is swept by the keeper before the
   worker counts as gone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.process import pause

if TYPE_CHECKING:
    from phalanx.process.supervisor import Supervisor, WorkerProcess

GROUP_SECONDS = 0.5  # after SIGTERM to the group
KILL_SECONDS = 10.0  # after SIGKILL: freeing memory takes about 0.1 s per GB
UNKILLABLE_SECONDS = 3.0  # after SIGKILL, for one that shows no sign of dying
_HURRY_TICK = 0.25  # how often ``hurry`` is asked when nobody wakes us


@dataclass(frozen=True)
class StopReport:
    """What it took. A worker is in one of the first three."""

    stopped: tuple[WorkerProcess, ...]  # ended by itself after the signal, or before
    killed: tuple[WorkerProcess, ...]  # needed SIGKILL
    unkillable: tuple[WorkerProcess, ...]  # not gone after SIGKILL and a bounded wait
    swept: int  # descendants that outlived their worker and were killed
    seconds: float


def stop_workers(
    supervisor: Supervisor,
    workers: Sequence[WorkerProcess],
    signum: int,
    grace: float,
    hurry: Callable[[], bool],
) -> StopReport:
    """See the module. ``hurry`` is asked whenever anything happens, `Supervisor.wake` too."""
    begin = time.monotonic()

    def left() -> list[WorkerProcess]:
        return [worker for worker in workers if not worker.gone]

    def wait(seconds: float, end_early: Callable[[], bool]) -> None:
        end = pause.now() + seconds
        while left() and not end_early():
            rest = end - pause.now()
            if rest <= 0:
                return
            supervisor.pump(min(rest, _HURRY_TICK))

    if signum != signal.SIGKILL and grace > 0:
        supervisor.signal((w for w in workers if w.alive), signum)
        wait(grace, hurry)
        if still := [worker for worker in left() if worker.alive]:
            for worker in still:
                worker.signalled_by_us.add(int(signal.SIGTERM))
            ids = [worker.id for worker in still]
            supervisor.order({"op": "signal", "ids": ids, "signum": int(signal.SIGTERM)})
            wait(min(GROUP_SECONDS, grace), hurry)

    killed = [worker for worker in left() if worker.alive]
    if remaining := left():
        for worker in killed:
            worker.signalled_by_us.add(int(signal.SIGKILL))
        supervisor.order({"op": "kill", "ids": [worker.id for worker in remaining]})
        at = time.monotonic()
        wait(
            KILL_SECONDS,
            lambda: (
                time.monotonic() - at > UNKILLABLE_SECONDS
                and not any(not worker.alive for worker in left())
            ),
        )
    unkillable = left()
    return StopReport(
        stopped=tuple(w for w in workers if w not in killed and w not in unkillable),
        killed=tuple(w for w in killed if w not in unkillable),
        unkillable=tuple(unkillable),
        swept=sum(worker.swept for worker in workers),
        seconds=time.monotonic() - begin,
    )
