"""The coordinator is lost, and another agent takes its place."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from phalanx.coordinator import words
from phalanx.health.metrics import render
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m


class Real:
    """The real machine."""

    events: tuple[()] = ()
    advance = staticmethod(job.advance)
    next_deadline = staticmethod(job.next_deadline)
    fresh = staticmethod(job.State.fresh)


def options(least: int, most: int, **more: Any) -> m.Options:
    return m.Options(least, most, join=60.0, last_call=0.2, rejoin=5.0, recall=2.0, **more)


SILENCE = 2.0  # seconds: more than a busy machine makes a thread wait
COORDINATOR = """
    import select, sys
    from phalanx.coordinator.node import CoordinatorNode, Plan
    from phalanx.rendezvous import job, model as m
    endpoint, most = sys.argv[1], int(sys.argv[2])
    options = m.Options(most, most, join=60.0, last_call=0.2, rejoin=5.0, recall=2.0)
    node = CoordinatorNode(Plan("job", m.Node("a", ""), endpoint, options, silence=2.0),
                           machine=job, fresh=job.State.fresh)
    node.attend()
    while True:
        select.select([node.fd], [], [])
        for telling in node.take():
            print(type(telling).__name__, flush=True)
            if type(telling).__name__ == "Reached":
                node.say(m.Join(telling.node, offer="h:1"))
"""


@pytest.fixture
def coordinator(port: int) -> Any:
    """Starts the first coordinator in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(most: int) -> subprocess.Popen[str]:
        code = textwrap.dedent(COORDINATOR)
        command = [sys.executable, "-c", code, f"127.0.0.1:{port}", str(most)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "Reached\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.process
@pytest.mark.parametrize("members", [2, 3])
def test_the_first_one_is_killed(
    agents: Any, port: int, coordinator: Any, wait: Any, members: int
) -> None:
    process = coordinator(members)
    others = [
        agents(name, f"127.0.0.1:{port}", Real(), is_host=False, options=options(members, members))
        for name in ("b", "c")[: members - 1]
    ]
    for agent in others:
        agent.until(m.Assign)
        agent.until(m.Roster)
    process.kill()
    for agent in others:
        agent.until(words.Alone)
        reached = agent.until(words.Reached)
        assert reached.term == 2
    (leader,) = [a for a in others if a.node.is_coordinator]
    hub = leader.node._server.hub
    wait(lambda: hub.state.generation == 1)
    assert hub.term == 2
    assert any("coordinates the job now (term 2)" in line for line in leader.lines)


@pytest.mark.process
def test_the_first_one_starts_again_and_is_told_who_leads(
    agents: Any, port: int, coordinator: Any, wait: Any
) -> None:
    process = coordinator(3)
    others = [
        agents(name, f"127.0.0.1:{port}", Real(), is_host=False, options=options(3, 3))
        for name in ("b", "c")
    ]
    for agent in others:
        agent.until(m.Assign)
        agent.until(m.Roster)
    process.kill()
    process.wait()
    for agent in others:
        agent.until(words.Alone)
        agent.until(words.Reached)
    again = agents("a2", f"127.0.0.1:{port}", Real(), options=options(3, 3))
    reached = again.until(words.Reached)
    while reached.term != 2:
        reached = again.until(words.Reached)
    assert not again.node.is_coordinator
    (leader,) = [a for a in others if a.node.is_coordinator]
    assert again.node._server.status()["moved"] == leader.node.facts()["listens"]


@pytest.mark.process
def test_the_first_one_is_stopped_and_wakes_up(
    agents: Any, port: int, coordinator: Any, wait: Any
) -> None:
    process = coordinator(3)
    others = [
        agents(
            name,
            f"127.0.0.1:{port}",
            Real(),
            is_host=False,
            options=options(3, 3),
            silence=SILENCE,
        )
        for name in ("b", "c")
    ]
    for agent in others:
        agent.until(m.Assign)
        agent.until(m.Roster)
    process.send_signal(signal.SIGSTOP)
    for agent in others:
        assert "no sign of life" in agent.until(words.Alone).how
        assert agent.until(words.Reached).term >= 2  # some ask before others know
    (leader,) = [a for a in others if a.node.is_coordinator]
    process.send_signal(signal.SIGCONT)
    # It is told that it leads no more, and joins the one that does.
    wait(lambda: "a" in leader.node._server.hub.chairs)


def test_who_has_heard_the_end_elects_nobody(agents: Any, port: int) -> None:
    first = agents("a", f"127.0.0.1:{port}", linger=0.1)
    first.until(m.Park)
    second = agents("b", f"127.0.0.1:{port}")
    second.until(m.Park)
    second.node._roster = m.Roster(1, 1, (("a", f"127.0.0.1:{port}"), ("b", "h:1")), 2)
    second.node.say(m.Succeeded(1))
    second.until(m.Over)
    first.until(m.Over)
    first.close()
    second.until(words.Alone)
    assert not second.node.is_coordinator
    second.close()


def test_a_lower_term_steps_down(agents: Any, port: int, wait: Any) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    second = agents("b", f"127.0.0.1:{port}")
    second.until(m.Park)
    second.node._saw(5)  # as if it had promised that
    second.node._thread.submit(second.node._connection.close())
    second.until(words.Alone)
    first.until(words.Alone)
    assert not first.node.is_coordinator
    assert any("term 5" in line for line in first.lines)


def test_numbers(agents: Any, port: int) -> None:
    pair = [
        agents(n, f"127.0.0.1:{port}", Real(), options=options(2, 2), linger=0.1)
        for n in ("a", "b")
    ]
    for agent in pair:
        agent.until(m.Assign)
    (leader,) = [a for a in pair if a.node.is_coordinator]
    found = {(n.name, *n.labels.values()): n.value for n in leader.node.numbers()}
    assert found["phalanx_coordinator_here",] == 1
    assert found["phalanx_coordinator_connected",] == 2
    assert found["phalanx_coordinator_events", "node_joined"] == 2
    assert found["phalanx_coordinator_events", "generation"] == 1
    assert found["phalanx_coordinator_seconds", "gathering"] > 0
    assert leader.node._server.status()["phase"] == "running"
    for agent in pair:
        numbers = list(agent.node.numbers())
        assert b"phalanx_coordinator_term" in render(numbers)
