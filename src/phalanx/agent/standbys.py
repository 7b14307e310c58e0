"""Replacements that are built before anything has happened (``--standby N``).

A standby is a worker like any other, started with ``PHALANX_JOIN=1``: it runs the program until
its session waits to be let in (docs/training.md, "A standby"). No rank is its own until one has to
be replaced. It is started when all ranks have said that they are in their loops and that any
process could be any of them: before that nobody knows whether the program has a session at all.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.agent import report
from phalanx.process import pause, priority
from phalanx.process.supervisor import SupervisorError, WorkerDied
from phalanx.recovery import blame

if TYPE_CHECKING:
    from phalanx.agent.console import Console
    from phalanx.agent.streams import Streams
    from phalanx.events import EventLog
    from phalanx.process.channel import Message
    from phalanx.process.supervisor import WorkerProcess

NOBODY = -1
"""The local rank of a process that has none yet."""

DEATHS = 3
"""That many in a row (without a rank taken in between), and there are no more standbys."""

BUILD_SECONDS = 600.0
"""How long one may take to be ready."""

SILENCE_SECONDS = 60.0
"""After the start without any session: it is said that there is no standby."""

OWN = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "TORCHELASTIC_ERROR_FILE"})
"""Variables that differ from rank to rank, which a standby is told when it takes one."""


@dataclass(eq=False)
class Standby:
    """One process. ``slot`` names its streams; ``hello`` is what it said when it was ready."""

    worker: WorkerProcess
    env: Mapping[str, str]
    slot: int
    since: float
    hello: Message | None = None


class Standbys:
    """Up to ``count`` idle replacements. Everything but ``facts`` is for the loop's own thread."""

    def __init__(
        self,
        count: int,
        start: Callable[[int], tuple[WorkerProcess, Mapping[str, str]] | None],
        streams: Streams,
        console: Console,
        events: EventLog,
    ) -> None:
        """``start(slot)`` starts one: its process and its environment; None: the job is being
        stopped. It raises RuntimeError when it cannot.
        """
        self._count = count
        self._start = start
        self._streams = streams
        self._console = console
        self._events = events
        self._idle: list[Standby] = []
        self._able: set[int] = set()  # workers (by id) that are in their loop
        self._deaths = 0
        self._began = 0.0
        self._heard = False  # any session, of this attempt
        self._said_none = False
        self.seated: set[int] = set()  # ids of workers that were standbys

    def begin(self, differ: str) -> None:
        """A new attempt. ``differ``: what the ranks differ in that is fixed at a start, if any."""
        self._able.clear()
        self.seated.clear()
        self._began, self._heard = pause.now(), False
        if self._count and differ:
            self._give_up(f"the ranks differ in {differ}")

    @property
    def ready(self) -> int:
        """How many could take a rank now."""
        return sum(s.hello is not None and s.worker.alive for s in self._idle)

    def on_message(self, worker: WorkerProcess, message: Message) -> bool:
        """What any worker said. True: it came from a standby, and there is no more to it."""
        idle = worker.local_rank == NOBODY
        if message.type != "hello" or not self._count:
            return idle
        if message.fields.get("any_rank") is not True:
            self._give_up(
                "not every process can be any rank (sharded parameters, groups of some ranks, "
                "or devices)"
            )
            return idle
        self._heard = True
        if not idle:
            self._able.add(worker.id)
        for standby in self._idle:
            if standby.worker is worker and standby.hello is None:
                standby.hello = message
                priority.restore(worker.pid)
                self._events.record(
                    "standby_ready", pid=worker.pid, seconds=pause.now() - standby.since
                )
        return idle

    def note(self, happening: Any) -> None:
        """Something has happened to a process that has no rank."""
        if not isinstance(happening, WorkerDied):
            return
        worker = happening.worker
        for standby in [s for s in self._idle if s.worker is worker]:
            self._idle.remove(standby)
            self._deaths += 1
            lines = self._streams.apart(standby.slot, drain=True)[1]
            how = _how(worker.returncode, lines)
            self._events.record("standby_died", pid=worker.pid, returncode=worker.returncode)
            if self._deaths >= DEATHS:
                self._give_up(f"{self._deaths} in a row died, the last one {how}")
                self._console.quote(lines[-5:])

    def due(self) -> float | None:
        """When the next ``tick`` has something to do, in seconds of ``pause.now``."""
        if not self._count:
            return None
        due = [s.since + BUILD_SECONDS for s in self._idle if s.hello is None]
        if not self._heard and not self._said_none:
            due.append(self._began + SILENCE_SECONDS)
        return min(due, default=None)

    def tick(self, now: float, workers: Sequence[WorkerProcess]) -> bool:
        """Start the next one, if there is one to start; whether it was. ``workers`` hold the
        ranks.
        """
        if not self._count:
            return False
        if not self._heard and not self._said_none and now >= self._began + SILENCE_SECONDS:
            self._said_none = True
            self._console.say(
                "no standby so far: --standby is for programs with a session of phalanx.training"
            )
        building = [s for s in self._idle if s.hello is None]
        for standby in building:
            if now >= standby.since + BUILD_SECONDS:
                standby.worker.signal(signal.SIGKILL)
        able = workers and all(w.alive and w.id in self._able for w in workers)
        if building or not able or len(self._idle) >= self._count:
            return False
        slot = min(set(range(self._count)) - {s.slot for s in self._idle})
        try:
            started = self._start(slot)
        except SupervisorError:
            return False  # the keeper is lost: the next wait tells
        except RuntimeError as error:
            self._give_up(str(error))
            return False
        if started is not None:
            worker, env = started
            priority.lower(worker.pid)
            self._idle.append(Standby(worker, env, slot, now))
            self._events.record("standby_started", pid=worker.pid, warm=worker.warm)
        return started is not None

    def take(self, world: str) -> Standby | None:
        """One that is ready to take a rank in a world of that size, if there is one."""
        for standby in list(self._idle):
            if standby.hello is None or not standby.worker.alive:
                continue
            self._idle.remove(standby)
            if standby.env.get("WORLD_SIZE") == world:
                self._deaths = 0
                self.seated.add(standby.worker.id)
                return standby
            standby.worker.signal(signal.SIGKILL)  # it was built for another
        return None

    def resized(self, world: str) -> None:
        """The ranks are so many now: those that were built for another world go."""
        for standby in self._idle:
            if standby.env.get("WORLD_SIZE") != world:
                standby.worker.signal(signal.SIGKILL)
        self._idle = [s for s in self._idle if s.env.get("WORLD_SIZE") == world]

    def hand_over(self, standby: Standby, streams: Mapping[str, int]) -> None:
        """Put what it has written so far where its rank's output goes."""
        said = dict(zip(("stdout", "stderr"), self._streams.apart(standby.slot), strict=True))
        for name, fd in streams.items():
            if said[name]:
                _write("".join(f"{line}\n" for line in said[name]).encode(), fd)

    def end(self) -> list[WorkerProcess]:
        """Kill them all: they hold nothing. Those that were there."""
        ended, self._idle = [s.worker for s in self._idle], []
        self._able.clear()
        for worker in ended:
            worker.signal(signal.SIGKILL)
        return ended

    def _give_up(self, why: str) -> None:
        if self._count:
            self._count = 0
            self._events.record("no_standby", why=why)
            self._console.warn(f"no standby is kept any more: {why}")
        self.end()

    def facts(self) -> list[dict[str, Any]]:
        """For ``/status``. From any thread."""
        return [
            {"pid": s.worker.pid, "ready": s.hello is not None, "alive": s.worker.alive}
            for s in list(self._idle)
        ]


def fixed_differences(
    envs: Mapping[int, Mapping[str, str]], commands: Mapping[int, Sequence[str]]
) -> str:
    """In what the ranks differ that a process cannot change once it runs; "" if in nothing."""
    first = min(envs, default=0)
    if any(command != commands[first] for command in commands.values()):
        return "their command lines"
    names = {
        name
        for env in envs.values()
        for name in {*env, *envs[first]} - OWN
        if env.get(name) != envs[first].get(name)
    }
    return ", ".join(sorted(names))


def _how(returncode: int | None, lines: Sequence[str]) -> str:
    if (text := blame.exception_in(lines)) is not None:
        return f"raised {text[:300]}"
    if returncode is not None and returncode < 0:
        return f"was killed by {report.signal_name(-returncode)}"
    return f"exited with code {returncode}"


def _write(data: bytes, fd: int) -> None:
    """As much as goes out without waiting for a slow reader."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data and poll.poll(0):
        try:
            data = data[os.write(fd, data[: select.PIPE_BUF]) :]
        except OSError:
            return


__all__ = ["NOBODY", "Standby", "Standbys", "fixed_differences"]
