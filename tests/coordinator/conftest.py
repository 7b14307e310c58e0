"""A machine small enough to see through, and agents in threads."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("grpc")

from phalanx.coordinator.node import CoordinatorNode, Plan
from phalanx.rendezvous import model as m


class Echo:
    """Parks who joins; tells Over to all when somebody says that it succeeded."""

    def __init__(self) -> None:
        self.events: list[m.Event] = []

    def fresh(self, term: int) -> frozenset[str]:
        return frozenset()

    def next_deadline(self, state: Any) -> float | None:
        return None

    def advance(
        self, state: Any, event: m.Event, now: float, options: m.Options
    ) -> tuple[Any, list[m.Effect]]:
        self.events.append(event)
        if isinstance(event, m.Said) and isinstance(event.what, m.Join):
            return state | {event.node}, [m.To(event.node, m.Park("wait"))]
        if isinstance(event, m.Said) and isinstance(event.what, m.Succeeded):
            return state, [m.To(n, m.Over(m.Verdict(True))) for n in sorted(state)]
        if isinstance(event, m.Lost):
            return state - {event.node}, [m.Note("lost", {"node": event.node})]
        return state, []


ALIVE: list[Agent] = []


def pump(timeout: float) -> None:
    """What has come for any agent is taken by it."""
    fds = {agent.node.fd: agent for agent in ALIVE}
    for fd in select.select(list(fds), [], [], timeout)[0]:
        fds[fd].pump()


class Agent:
    """A node that answers ``Reached`` and keeps what it is told."""

    def __init__(self, name: str, endpoint: str, machine: Any = None, **plan: Any) -> None:
        self.machine = machine or Echo()
        self.lines: list[str] = []
        self.told: list[Any] = []
        self.held: m.Assignment | None = None
        options = plan.pop("options", m.Options(join=60.0))
        self.node = CoordinatorNode(
            Plan("job", m.Node(name, ""), endpoint, options, **plan),
            machine=self.machine,
            fresh=self.machine.fresh,
            line=self.lines.append,
        )
        self.node.attend()
        ALIVE.append(self)

    def pump(self) -> None:
        for telling in self.node.take():
            if type(telling) is m.Assign:
                self.held = telling.assignment
            if type(telling).__name__ == "Reached":
                self.node.say(m.Join(telling.node, held=self.held, offer="h:1"))
            self.told.append(telling)

    def until(self, kind: type, timeout: float = 30.0) -> Any:
        """The next telling of this kind; those before it are kept in ``told``."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for at, telling in enumerate(self.told):
                if type(telling) is kind:
                    del self.told[: at + 1]
                    return telling
            pump(max(0.0, min(1.0, end - time.monotonic())))
        raise AssertionError(f"{kind.__name__} never came; there were {self.told} {self.lines}")

    def close(self) -> None:
        if self in ALIVE:
            ALIVE.remove(self)
        self.node.close("done")


@pytest.fixture
def wait() -> Any:
    """``wait(condition)``: until it is true."""

    def until(condition: Any, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "it never came true"
            pump(0.01)

    return until


@pytest.fixture
def agents() -> Iterator[Any]:
    made: list[Agent] = []

    def make(*args: Any, **kwargs: Any) -> Agent:
        made.append(Agent(*args, **kwargs))
        return made[-1]

    yield make
    for agent in reversed(made):
        agent.node.plan = replace(agent.node.plan, linger=0.1)
        agent.close()


@pytest.fixture
def port() -> int:
    """Free just now; below the range from which the kernel hands out ports."""
    import random
    import socket

    for _ in range(200):
        number = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", number))
                return number
            except OSError:
                continue
    raise AssertionError("no port is free")
