"""Agents and their coordinator, in this process and over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import grpc.aio
import pytest
from compat.harness import Cable

from phalanx.agent import exit_codes
from phalanx.coordinator import link, loop, net, takeover, wire, words
from phalanx.coordinator.security import OPEN
from phalanx.coordinator.server import METHODS
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m


def test_one_is_the_coordinator_and_the_other_finds_it(agents: Any, port: int) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    assert first.until(words.Reached).node.endpoint == f"127.0.0.1:{port}"
    assert first.until(m.Park).reason == "wait"
    second = agents("b", f"127.0.0.1:{port}")
    reached = second.until(words.Reached)
    assert reached.node.address == "127.0.0.1"
    assert reached.node.endpoint not in ("", f"127.0.0.1:{port}")
    second.until(m.Park)
    assert first.node.is_coordinator and not second.node.is_coordinator
    assert first.node.alone_since() is None and second.node.alone_since() is None
    second.node.say(m.Succeeded(1))
    for agent in (first, second):
        assert agent.until(m.Over).verdict.success


def test_a_closed_connection_is_known_at_once(agents: Any, port: int, wait: Any) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    second = agents("b", f"127.0.0.1:{port}")
    second.until(m.Park)
    second.close()
    wait(lambda: any(isinstance(e, m.Lost) and e.node == "b" for e in first.machine.events))
    said = [e.what for e in first.machine.events if isinstance(e, m.Said) and e.node == "b"]
    assert said[-1] == m.Leave("done")


def test_what_is_said_meanwhile_is_said_after_the_join(agents: Any, port: int, wait: Any) -> None:
    second = agents("b", f"127.0.0.1:{port}", is_host=False)
    second.node.say(m.Progress(1, 5))
    second.node.say(m.Succeeded(7))
    wait(lambda: second.lines, 30)
    assert f"waiting for 127.0.0.1:{port} (refused), " in second.lines[0]
    assert " of 60 s" in second.lines[0]
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    second.until(m.Over)
    kinds = [type(e.what) for e in first.machine.events if isinstance(e, m.Said) and e.node == "b"]
    assert kinds == [m.Join, m.Succeeded]


def test_a_name_that_means_nothing(agents: Any) -> None:
    agent = agents("a", "no-such-host.invalid:29400", options=m.Options(join=0.3))
    refusal = agent.until(m.Refuse)
    assert "cannot be resolved" in refusal.reason and "--rdzv-endpoint" in refusal.reason
    assert refusal.status == exit_codes.RENDEZVOUS
    agent = agents("a", "127.0.0.1:1", local="no-such-host.invalid")
    assert "--local-addr" in agent.until(m.Refuse).reason


def test_agents_of_another_job_are_told_so(agents: Any, port: int) -> None:
    first = agents("a", f"127.0.0.1:{port}", options=m.Options(2, 3))
    first.until(m.Park)
    other = agents("b", f"127.0.0.1:{port}", options=m.Options(2, 2))
    assert "--nnodes 2:2" in other.until(m.Refuse).reason
    assert first.node._server.refused["stranger"] == 1


def test_the_coordinator_comes_back(agents: Any, port: int) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    second = agents("b", f"127.0.0.1:{port}")
    second.until(m.Park)
    first.close()
    second.until(words.Alone)
    assert second.node.alone_since() is not None
    agents("a2", f"127.0.0.1:{port}").until(m.Park)
    second.until(words.Reached)
    second.until(m.Park)


# --- connections that close ---------------------------------------------------------------------


class Real:
    """The real machine, and what it hears."""

    def __init__(self) -> None:
        self.events: list[m.Event] = []

    def advance(self, state: Any, event: m.Event, now: float, options: m.Options) -> Any:
        self.events.append(event)
        return job.advance(state, event, now, options)

    next_deadline = staticmethod(job.next_deadline)
    fresh = staticmethod(job.State.fresh)


def test_a_connection_is_cut_on_the_way_and_nobody_is_lost(
    agents: Any, port: int, wait: Any
) -> None:
    options = m.Options(2, 2, join=60.0, last_call=0.2)
    first = agents("a", f"127.0.0.1:{port}", Real(), options=options)
    first.until(words.Reached)
    with Cable(f"127.0.0.1:{port}") as cable:
        second = agents("b", cable.address, Real(), options=options, is_host=False)
        for agent in (first, second):
            agent.until(m.Assign)
            agent.until(m.Roster)
        cable.cut()
        second.until(words.Alone)
        second.until(words.Reached)
        second.until(m.Roster)
        assert first.node.is_coordinator and first.node.facts()["term"] == 1
        assert not [e for e in first.machine.events if isinstance(e, m.Lost)]
        for agent in (first, second):
            assert not [t for t in agent.told if isinstance(t, m.Stop | m.Assign | m.Over)]
        for agent in (first, second):
            agent.node.say(m.Succeeded(1))
        for agent in (first, second):
            assert agent.until(m.Over).verdict.success


@pytest.mark.parametrize(
    ("there", "ended"),
    [("nobody", True), ("it", False), ("another", True), ("somebody who is silent", None)],
)
def test_whether_an_agent_has_ended(agents: Any, port: int, there: str, ended: Any) -> None:
    node = m.Node("a", "127.0.0.1", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        if there in ("it", "another"):
            agents("a" if there == "it" else "a2", node.endpoint).until(m.Park)
        elif there != "nobody":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        thread = loop.acquire()
        try:
            assert thread.call(takeover.ended(node, "job", OPEN), 60) is ended
        finally:
            loop.release()


# --- bytes that do not belong -------------------------------------------------------------------


async def _throw(endpoint: str, *frames: bytes, metadata: Any = None) -> grpc.StatusCode:
    reached = await net.reach(endpoint, 5.0)
    async with link.channel(reached, endpoint, link.OPEN, 5.0) as made:
        stream = made.stream_stream(METHODS["Attend"].path)(metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await stream.write(frame)
            while await stream.read() is not grpc.aio.EOF:
                pass
        return await stream.code()


def hello(node: str = "x", term: int = 0) -> bytes:
    return wire.seal(words.Hello("job", node), term=term)


JOIN = m.Join(m.Node("x", "127.0.0.1"))


@pytest.mark.parametrize(
    ("count", "frames"),
    [
        ("garbage", [b"\xff\xfe garbage"]),
        ("garbage", [wire.seal(m.Leave(""), term=1)]),
        ("garbage", [hello(), b"\x00" * 50]),
        ("garbage", [hello(), wire.seal(m.Park("mine"), term=1, seq=1)]),
        ("oversized", [hello(), b"\x0a" * (wire.MAX_BODY + 2000)]),
        ("oversized", [hello(), wire.seal(m.Leave("x" * (wire.MAX_SAYING + 1)), term=1, seq=1)]),
        ("replayed", [hello(), *[wire.seal(JOIN, term=1, seq=1)] * 2]),
        ("term", [hello(), wire.seal(JOIN, term=0, seq=1)]),
        ("stranger", [hello(), wire.seal(m.Join(m.Node("y", "")), term=1, seq=1)]),
    ],
)
def test_bytes_that_do_not_fit_cost_their_sender_alone(
    agents: Any, port: int, count: str, frames: list[bytes]
) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    second = agents("b", f"127.0.0.1:{port}")
    second.until(m.Park)
    thread = loop.acquire()
    try:
        code = thread.call(_throw(f"127.0.0.1:{port}", *frames), 30)
    finally:
        loop.release()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert first.node._server.refused[count] == 1
    assert first.node.facts()["refused"] == {count: 1}
    second.node.say(m.Succeeded(1))
    assert first.until(m.Over) and second.until(m.Over)
    assert not [e for e in first.machine.events if isinstance(e, m.Lost) and e.node != "x"]


def test_raw_bytes_on_the_port(agents: Any, port: int) -> None:
    first = agents("a", f"127.0.0.1:{port}")
    first.until(m.Park)
    for data in (b"\x00\xce\xf7\x85\x3c" * 3, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04junk" * 99):
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.settimeout(30)
            raw.sendall(data)
            with contextlib.suppress(ConnectionError):
                while raw.recv(4096):
                    pass
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"PRI")  # as gRPC begins; it may still become one
        second = agents("b", f"127.0.0.1:{port}")
        second.until(m.Park)
    assert first.node._server.refused == {"torchrun": 1, "garbage": 2}
    assert [line for line in first.lines if "stock torchrun on 127.0.0.1" in line]


def test_a_port_in_use(agents: Any, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        agent = agents("a", f"127.0.0.1:{port}", is_host=True)
        assert f"port {port}: in use by process" in agent.until(m.Refuse).reason
        range_ = (port, port + 20)
        first = agents("b", "127.0.0.1:0", is_host=True, ports=range_)
        where = first.until(words.Reached).node.endpoint
        second = agents("c", where, is_host=False, ports=range_)
        own = int(second.until(words.Reached).node.endpoint.rpartition(":")[2])
        assert port < own <= port + 20


def test_ipv6(agents: Any, port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    first = agents("a", f"[::1]:{port}")
    assert first.until(words.Reached).node.endpoint == f"[::1]:{port}"
    second = agents("b", f"[::1]:{port}")
    reached = second.until(words.Reached)
    assert reached.node.address == "::1" and reached.node.endpoint.startswith("[::1]:")
    second.until(m.Park)
