"""Recovery in place: what the workers say becomes events, what is decided becomes deeds.

``event_of`` turns a worker's message into an event of ``phalanx.recovery.episode``. ``Hands``
carry out on one node what was decided, whoever decided it. ``InPlace`` is both with the machine
between them, for a job that is on one machine.

Ranks are the job's (global) ones throughout; ``Hands`` know which are this node's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.agent import report
from phalanx.agent.crew import CannotStart, Crew
from phalanx.agent.story import Story, plain
from phalanx.process import pause
from phalanx.process.supervisor import SupervisorError, WorkerSpoke

if TYPE_CHECKING:
    import socket

    from phalanx.process.channel import Message
    from phalanx.process.supervisor import WorkerProcess
    from phalanx.recovery import episode as ep


def episodes() -> Any:
    """The recovery machine, imported when the first worker can be recovered in place."""
    from phalanx.recovery import episode

    return episode


def event_of(rank: int, message: Message, generation: int) -> ep.Event | None:
    """What a worker's message (docs/training.md) means to the machine; None: nothing.

    ``generation`` is that of a message that names none. Nothing a worker says may harm.
    """
    say = message.fields
    generation = _whole(say.get("generation"), generation)
    step = _whole(say.get("step"), None)
    from phalanx.recovery import episode as ep

    if message.type == "hello":
        able = say.get("capabilities")
        able = able if isinstance(able, list) else []
        return ep.Hello(
            rank, generation, bool(say.get("waiting")), "dump" in able, "resize" in able
        )
    if message.type == "left":
        shard, shards = _whole(say.get("shard"), 0), _whole(say.get("shards"), 0)
        return ep.Left(rank, generation, step, say.get("clean") is True, shard, shards)
    if message.type == "fault":
        kind, text = str(say.get("kind", ""))[:40], str(say.get("text", ""))[:2000]
        return ep.Fault(rank, generation, kind, text, step)
    if message.type == "good_step":
        told = say.get("report")
        return ep.GoodStep(rank, generation, step or 0, told if isinstance(told, dict) else {})
    if message.type == "finished":
        return ep.Finished(rank)
    if message.type == "dumped" and step is not None:
        complete = say.get("complete") is True
        text = str(say.get("path" if complete else "text", ""))[:2000]
        return ep.Dumped(rank, generation, step, say.get("commit") is True, complete, text)
    return None


def is_hello(happening: Any) -> bool:
    """Whether a worker has said that it is in its loop. Of all that has happened that is to be
    known first: without it a fault that came later is one that cannot be recovered in place.
    """
    return isinstance(happening, WorkerSpoke) and happening.message.type == "hello"


class Hands:
    """Carries out on this node what was decided for the job. Ranks of other nodes are ignored."""

    def __init__(self, crew: Crew, interruptible: Callable[[], AbstractContextManager[None]]):
        """``interruptible``: a context in which a stop signal is raised at once."""
        self.crew = crew
        self._interruptible = interruptible

    def local(self, ranks: Iterable[int]) -> dict[int, int]:
        """Rank to local rank, for those that are here."""
        own = {rank: local for local, rank in enumerate(self.crew.ranks)}
        return {rank: own[rank] for rank in ranks if rank in own}

    def replace(self, rank: int, generation: int, env: Mapping[str, str] | None = None) -> int:
        """Start a replacement; its pid, 0 when the rank is not of this node.

        Raises CannotStart, SupervisorError.
        """
        pid = 0
        for local_rank in self.local([rank]).values():
            with self._interruptible():
                pid = self.crew.replace(local_rank, generation, env).pid
        return pid

    def leave(self, ranks: Iterable[int], generation: int) -> None:
        """Have them leave whatever step of ``generation`` they are in."""
        self.crew.forgive()
        for local_rank in self.local(ranks).values():
            self.crew.tell(local_rank, "leave", generation=generation)

    def join(
        self,
        members: Iterable[int],
        survivors: Iterable[int],
        *,
        generation: int,
        world: int,
        store: str,
    ) -> None:
        """Have them come together again. ``store``: ``"host:port"``; the survivors of the
        last generation keep their rank, the other members are new.
        """
        kept = set(survivors)
        self.crew.generation = generation
        for rank, local_rank in self.local(members).items():
            self.crew.tell(
                local_rank,
                "join",
                generation=generation,
                rank=rank,
                world=world,
                store=store,
                previous_rank=rank if rank in kept else None,
            )
        self.crew.prepare_later()

    def stop_at(self, ranks: Iterable[int], step: int) -> None:
        """Have them end their loops after this step."""
        for local_rank in self.local(ranks).values():
            self.crew.tell(local_rank, "stop_at", step=step)

    def dump(self, ranks: Iterable[int], **order: Any) -> None:
        """Have them write a last checkpoint; ``order`` are the message's fields."""
        self.crew.dump(self.local(ranks).values(), **order)

    def exit(self, ranks: Iterable[int], code: int) -> None:
        """Have them end, with an exception of their own if they have one."""
        for local_rank in self.local(ranks).values():
            self.crew.tell(local_rank, "exit", code=code)

    def kill(self, rank: int, why: str) -> None:
        """End a rank's process; ``why`` is a clause for a person."""
        for local_rank in self.local([rank]).values():
            self.crew.events.record("worker_killed", local_rank=local_rank, why=why)
            self.crew.kill(local_rank, why)


class InPlace:
    """The recoveries of a job on one machine.

    ``why`` is None until the whole group has to be started again (or the job to end); then
    it is the first reason.
    """

    def __init__(
        self,
        crew: Crew,
        story: Story,
        interruptible: Callable[[], AbstractContextManager[None]],
        next_store: Callable[[], tuple[socket.socket, str]],
        replaced: Callable[[int, int], None],
    ) -> None:
        """``next_store``: a listening socket for the next generation's store and its address.
        ``replaced(rank, pid)`` is told of each replacement.
        """
        self.crew = crew
        self.story = story
        self.hands = Hands(crew, interruptible)
        self.why: str | None = None
        self.final = False  # whether not even a restart helps
        self.stop_at: int | None = None  # the step after which all were told to end
        self.stopped: Message | None = None  # the first that has
        self._stoppable: set[int] = set()  # worker ids
        self._next_store = next_store
        self._replaced = replaced
        self.ended: str | None = None  # why the job is not to be started again
        self._only: str | None = None  # the strategy that has been ordered
        # None until a worker says hello: a plain program needs no machine
        self._machine: ep.State | None = None
        crew.ask_to_leave = self._ask_to_leave

    def _ask_to_leave(self, worker: WorkerProcess, why: str) -> bool:
        """Ranks are silent in the same step: one hangs, and the others wait for it."""
        if self._machine is None or not episodes().able(self._machine):
            return False
        rank = self.crew.ranks[worker.local_rank]
        peer = episodes().Fault(rank, self._machine.generation, "peer", why, None)
        self._advance(peer, f"rank {rank} is silent like {why}")
        return True

    @property
    def episode(self) -> ep.Episode | None:
        """The recovery under way. From any thread."""
        machine = self._machine
        return machine.episode if machine else None

    def begin(self, world: int, generation: int) -> None:
        """The whole group is about to be started, as this generation."""
        self.why, self.final = None, False
        if self._machine is not None:
            self._machine = episodes().State.fresh(world, generation, self._machine)

    def give_up(self, why: str) -> None:
        """Have the whole group started again, or the job end; the first reason counts."""
        self.why = self.why or why

    def due(self) -> float | None:
        """When the next ``tick`` has something to do, in monotonic seconds."""
        return None if self._machine is None else episodes().next_deadline(self._machine)

    def tick(self, now: float) -> None:
        due = self.due()
        if due is not None and now >= due:
            self._advance(episodes().Tick())

    def on_died(self, worker: WorkerProcess) -> None:
        """A process of the crew is dead."""
        if not self.crew.is_current(worker):
            return
        rank = self.crew.ranks[worker.local_rank]
        end = self.crew.end_of(worker, light=True)
        how = report.how(end)
        if self._machine is None:
            if worker.returncode != 0:
                self.give_up(f"rank {rank} {how}")
        elif worker.returncode == 0:
            self._advance(episodes().Finished(rank))
        else:
            hung = worker.id in self.crew.hung
            step = worker.page.read().step
            self._advance(episodes().Died(rank, how, step, hung), report.describe(end))

    def on_message(self, worker: WorkerProcess, message: Message) -> None:
        """What a worker said."""
        if self.crew.kept(worker, message) or not self.crew.is_current(worker):
            return
        rank = self.crew.ranks[worker.local_rank]
        if self._machine is None:
            self._machine = episodes().State.fresh(len(self.crew.ranks), self.crew.generation)
        event = event_of(rank, message, self.crew.generation)
        able = message.fields.get("capabilities")
        if message.type == "hello" and isinstance(able, list) and "stop_at" in able:
            self._stoppable.add(worker.id)
        if message.type == "stopped_at":
            self.stopped = self.stopped or message
        if event is None:
            if self.crew.worth_recording(worker):
                said = {**plain(message.fields), "local_rank": worker.local_rank}
                self.crew.events.record("worker_said", **{**said, "type": message.type})
            return
        if isinstance(event, episodes().Fault) and self.crew.worth_recording(worker):
            self.crew.events.record(
                "worker_fault",
                local_rank=worker.local_rank,
                fault=event.kind,
                text=event.text,
                step=event.step,
            )
        self._advance(event)

    def stop(self) -> int | None:
        """Have all ranks end after the same step, with what they have in a checkpoint.

        Returns the step; None when not all can (a plain program, or one that is not in its
        loop).
        """
        machine = self._machine
        if machine is None or machine.ending is not None or self.why is not None:
            return None
        building = machine.episode.replaced if machine.episode else frozenset()
        for local_rank, worker in self.crew.workers.items():
            rank = self.crew.ranks[local_rank]
            able = worker.id in self._stoppable or rank in building
            if not worker.alive or not able or machine.members[rank].finished:
                return None
        from phalanx.recovery.ending import stop_step

        pages = [w.page.read() for w in self.crew.workers.values()]
        self.stop_at = stop_step((p.step, p.seconds_per_step) for p in pages if p.step is not None)
        if self.stop_at is not None:
            self.hands.stop_at(self.crew.ranks, self.stop_at)
        return self.stop_at

    def _advance(self, event: ep.Event, words: str | None = None) -> None:
        """Feed the machine and carry out what it says; ``words`` tell a person of the event."""
        assert self._machine is not None
        before = self._machine.episode
        self._machine, effects = episodes().advance(
            self._machine, event, pause.now(), self._bounds(self._only)
        )
        now = self._machine.episode
        if now is not None and (before is None or before.number != now.number):
            self.story.episode_began(now, words or now.cause)
        elif words:
            self.story.console.warn(words)
        if now is not None and before is not None and now.round != before.round:
            self.story.next_round(now)
        for effect in effects:
            self._carry_out(effect)

    def _bounds(self, only: str | None) -> ep.Bounds:
        """The machine's bounds; ``only``: the one strategy of the ladder that is enabled."""
        from phalanx.recovery import ending, ladder
        from phalanx.recovery import episode as ep

        bounds = ep.Bounds(ending=ending.Bounds())
        if only is None:
            return bounds
        enabled = frozenset({ladder.Strategy(only)})
        return replace(bounds, policy=replace(bounds.policy, enabled=enabled))

    def _carry_out(self, effect: ep.Effect) -> None:
        from phalanx.recovery import ending
        from phalanx.recovery import episode as ep

        if isinstance(effect, ep.Replace):
            try:
                self._replaced(effect.rank, self.hands.replace(effect.rank, effect.generation))
            except (CannotStart, SupervisorError) as error:
                self.give_up(f"no replacement for rank {effect.rank} could be started: {error}")
        elif isinstance(effect, ep.Regroup):
            self._regroup(effect)
        elif isinstance(effect, ep.Kill):
            self.hands.kill(effect.rank, effect.why)
        elif isinstance(effect, ep.GiveUp):
            self.story.giving_up(effect.why)
        elif isinstance(effect, ending.Leave):
            self.hands.leave(effect.ranks, effect.generation)
        elif isinstance(effect, ending.Dump):
            self.hands.dump(
                effect.ranks,
                generation=effect.generation,
                step=effect.step,
                writers=list(effect.writers),
                commit=effect.commit,
            )
        elif isinstance(effect, ending.Exit):
            self.hands.exit(effect.ranks, effect.code)
        elif isinstance(effect, ep.RestartGroup):
            self.story.gave_up(effect)
            self.final = effect.final
            self.give_up(effect.why)
        elif isinstance(effect, ep.Recovered):
            self.crew.close_old_stores()
            seated = self.crew.standbys.seated
            replaced = self.hands.local(effect.episode.replaced).values()
            ready = replaced and all(self.crew.workers[n].id in seated for n in replaced)
            self.story.recovered(effect, " by a standby" if ready else "")

    def _regroup(self, effect: ep.Regroup) -> None:
        if self.why is not None:
            return
        self.crew.events.update(generation=effect.generation)
        self.hands.leave(effect.survivors, effect.generation - 1)
        listener, address = self._next_store()
        try:
            self.crew.renew_store(listener)
        except SupervisorError as error:
            self.give_up(str(error))
            return
        self.hands.join(
            effect.members,
            effect.survivors,
            generation=effect.generation,
            world=len(effect.members),
            store=address,
        )
        if self.stop_at is not None:
            self.hands.stop_at(effect.members, self.stop_at)


def _whole(value: Any, default: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


__all__ = ["Hands", "InPlace", "event_of"]
