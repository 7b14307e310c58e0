"""Nodes that answer as agents do, on a perfect network and under a virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.rendezvous import job
from phalanx.rendezvous.model import (
    Assign,
    Assignment,
    Event,
    Failed,
    Join,
    Kill,
    Leave,
    Lost,
    Node,
    Note,
    Offer,
    Options,
    Over,
    Park,
    Refuse,
    Regroup,
    Said,
    Saying,
    Stop,
    Stopped,
    Succeeded,
    Telling,
    Tick,
    Took,
    WorkerEvent,
)


@dataclass
class Agent:
    node: Node
    told: list[Telling] = field(default_factory=list)
    held: Assignment | None = None
    last: Assignment | None = None
    stops: bool = True  # answers Stop at once
    promised: tuple[str, ...] = ()  # whom it may have made coordinator
    dead: set[int] = field(default_factory=set)

    def of(self, kind: type) -> list[Any]:
        return [what for what in self.told if isinstance(what, kind)]

    @property
    def parked(self) -> bool:
        return bool(self.told) and isinstance(self.told[-1], Park)


class Cluster:
    """The machine and its nodes. Whatever the machine says arrives before anything else."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(**{"last_call": 5.0, "join": 60.0, "rejoin": 20.0, **options})
        self.state = job.State.fresh()
        self.now = 0.0
        self.agents: dict[str, Agent] = {}
        self.notes: list[Note] = []
        self._queue: deque[Event] = deque()
        self.leader = "a"
        self.speaks = False  # the workers say hello
        self.resizes = False  # and that they can go on in another world
        self.steps = True  # they come together again and finish a step

    def feed(self, event: Event) -> None:
        self._queue.append(event)
        while self._queue:
            self.state, effects = job.advance(
                self.state, self._queue.popleft(), self.now, self.options
            )
            for effect in effects:
                if isinstance(effect, Note):
                    self.notes.append(effect)
                else:
                    self._tell(effect.node, effect.what)

    def _tell(self, name: str, what: Telling) -> None:
        agent = self.agents.get(name)
        if agent is None:
            return
        agent.told.append(what)
        if isinstance(what, Assign):
            agent.held = agent.last = what.assignment
            self._queue.append(Said(name, Took(what.assignment.generation)))
            if what.assignment.host_of_store == name:
                self._queue.append(Said(name, self._offer(name)))
            if self.speaks:
                self._work(agent, what.assignment)
        elif isinstance(what, Regroup):
            agent.held = agent.last = what.assignment
            self._queue.append(Said(name, Took(what.assignment.generation)))
            if what.assignment.host_of_store == name:
                self._queue.append(Said(name, self._offer(name)))
            self._work(agent, what.assignment)
        elif isinstance(what, Kill):
            self._event(agent, what.rank, "died", how=what.why, hung=True)
        elif isinstance(what, Stop) and agent.stops:
            self._queue.append(self._stopped(agent))
        elif isinstance(what, Over | Refuse):
            agent.held = None

    def _work(self, agent: Agent, held: Assignment) -> None:
        for local, rank in enumerate(held.seat.ranks):
            if held.fresh is None:
                self._event(agent, rank, "hello", resizes=self.resizes)
                continue
            if local in held.fresh:
                self._event(agent, rank, "hello", waiting=True, resizes=self.resizes)
            else:
                self._event(agent, rank, "left")
            if self.steps:
                self._event(agent, rank, "good_step", step=10, report={"lost_steps": 0})

    def _event(self, agent: Agent, rank: int, kind: str, **data: Any) -> None:
        assert agent.held is not None
        what = WorkerEvent(agent.held.generation, rank, kind, data)
        self._queue.append(Said(agent.node.id, what))

    def _offer(self, name: str) -> Offer:
        return Offer(f"{self.agents[name].node.address}:{4000 + self.state.generation}")

    def _stopped(self, agent: Agent) -> Said:
        generation = agent.held.generation if agent.held else self.state.generation
        agent.held = None
        return Said(agent.node.id, Stopped(generation))

    # ------------------------------------------------------------------ what may happen

    def join(self, *names: str, epoch: int = 0, offer: bool = True, **node: Any) -> None:
        for name in names:
            agent = self.agents.setdefault(
                name, Agent(Node(name, f"10.0.0.{name}", f"10.0.0.{name}:29400", host=name, **node))
            )
            store = f"10.0.0.{name}:4000" if offer else ""
            join = Join(agent.node, epoch, agent.held, store, None, agent.last)
            join = replace(join, promised=agent.promised, leads=name == self.leader)
            self.feed(Said(name, join))

    def say(self, name: str, what: Saying) -> None:
        self.feed(Said(name, what))

    def lose(self, name: str, how: str = "closed its connection") -> Agent:
        agent = self.agents.pop(name)
        self.feed(Lost(name, how))
        return agent

    def leave(self, name: str) -> None:
        self.say(name, Leave("SIGTERM"))
        del self.agents[name]

    def stop_now(self, name: str) -> None:
        self.feed(self._stopped(self.agents[name]))

    def fail(self, name: str, **more: Any) -> None:
        held = self.agents[name].held
        assert held is not None
        rank = held.seat.ranks[0]
        what = {"reason": f"rank {rank} exited with code 7", "returncode": 7, **more}
        self.say(name, Failed(held.generation, rank, **what))

    def event(self, name: str, rank: int, kind: str, /, **data: Any) -> None:
        held = self.agents[name].held
        assert held is not None
        self.say(name, WorkerEvent(held.generation, rank, kind, data))

    def die(self, rank: int, **more: Any) -> None:
        name = next(n for n, ranks in self.ranks.items() if rank in ranks)
        self.event(name, rank, "died", how="was killed by SIGKILL", **more)

    def succeed(self, *names: str) -> None:
        for name in names:
            held = self.agents[name].held
            assert held is not None
            self.say(name, Succeeded(held.generation))

    def pass_time(self, seconds: float) -> None:
        """Up to then every deadline is met in time."""
        end = self.now + seconds
        while (due := job.next_deadline(self.state)) is not None and due <= end:
            self.now = max(self.now, due)
            self.feed(Tick())
            again = job.next_deadline(self.state)
            assert again is None or again > due, "a deadline that a Tick does not meet"
        self.now = end

    # ------------------------------------------------------------------ what is seen

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Who holds which ranks of the generation that runs."""
        return {
            name: agent.held.seat.ranks
            for name, agent in self.agents.items()
            if agent.held is not None and agent.held.generation == self.state.generation
        }

    @property
    def attempt(self) -> int:
        found = {
            a.held.attempt
            for a in self.agents.values()
            if a.held is not None and a.held.generation == self.state.generation
        }
        assert len(found) == 1, found
        return found.pop()
