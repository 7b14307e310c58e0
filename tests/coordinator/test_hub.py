"""The hub: whose connection closes, what is remembered, and epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("grpc")

from phalanx.coordinator.hub import _REMEMBERED, Chair, Facts, Hub
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

OPTIONS = m.Options(1, 2, join=60.0, last_call=0.0)


class Recorded:
    """The real machine, and what it hears."""

    def __init__(self) -> None:
        self.events: list[m.Event] = []

    def advance(self, state: Any, event: m.Event, now: float, options: m.Options) -> Any:
        self.events.append(event)
        return job.advance(state, event, now, options)

    next_deadline = staticmethod(job.next_deadline)


def sit(hub: Hub, name: str, epoch: int = 0, endpoint: str = "h:1") -> Chair:
    chair = Chair(name, lambda _: None, lambda _: None)
    hub.sit(chair)
    hub.hears(chair, m.Join(m.Node(name, "h", endpoint, host=name), epoch, offer="h:2"))
    return chair


@pytest.mark.parametrize(
    ("answer", "certain"),
    [(True, True), (None, False), (False, False)],
    ids=["refused", "no word", "answers, and stays away"],
)
def test_a_closed_connection_is_an_end_only_if_nobody_listens_any_more(
    answer: bool | None, certain: bool
) -> None:
    async def play() -> list[m.Event]:
        machine = Recorded()
        asked: list[str] = []

        async def probe(node: m.Node) -> bool | None:
            asked.append(node.id)
            return answer

        lost = asyncio.Event()
        hub = Hub(machine, job.State.fresh(), OPTIONS, probe=probe, silence=0.01)
        real = hub.feed

        def feed(event: m.Event) -> None:
            real(event)
            if isinstance(event, m.Lost):
                lost.set()

        hub.feed = feed  # type: ignore[method-assign]
        hub.rises(sit(hub, "a"), "its connection closed")
        await asyncio.wait_for(lost.wait(), 30)
        assert asked == ["a"]
        hub.stop("done")
        return machine.events

    *_, away, last = asyncio.run(play())
    assert away == m.Away("a")
    assert isinstance(last, m.Lost) and last.certain is certain


def test_who_comes_back_was_never_lost() -> None:
    async def play() -> list[m.Event]:
        machine = Recorded()
        asking = asyncio.Event()

        async def probe(_: m.Node) -> bool | None:
            asking.set()
            await asyncio.Event().wait()
            return None

        hub = Hub(machine, job.State.fresh(), OPTIONS, probe=probe)
        hub.rises(sit(hub, "a"), "its connection closed")
        await asyncio.wait_for(asking.wait(), 30)
        sit(hub, "a")
        await asyncio.sleep(0)
        assert not hub._away
        hub.stop("done")
        return machine.events

    kinds = [type(e.what if isinstance(e, m.Said) else e) for e in asyncio.run(play())]
    assert kinds == [m.Join, m.Away, m.Join]


@pytest.mark.parametrize(
    ("leave", "silent", "endpoint", "certain"),
    [(True, False, "h:1", True), (False, True, "h:1", False), (False, False, "", False)],
    ids=["said goodbye", "was silent", "cannot be asked"],
)
def test_who_is_not_asked(leave: bool, silent: bool, endpoint: str, certain: bool) -> None:
    async def play() -> list[m.Event]:
        async def probe(_: m.Node) -> bool | None:
            raise AssertionError("it was asked")

        machine = Recorded()
        hub = Hub(machine, job.State.fresh(), OPTIONS, probe=probe)
        chair = sit(hub, "a", endpoint=endpoint)
        if leave:
            hub.hears(chair, m.Leave("done"))
        hub.rises(chair, "its connection closed", silent=silent)
        hub.stop("done")
        return machine.events

    last = asyncio.run(play())[-1]
    assert isinstance(last, m.Lost) and last.certain is certain


def in_loop(work: Callable[[], None]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


def test_of_nodes_that_are_gone_only_so_many_are_remembered() -> None:
    def play() -> None:
        hub = Hub(job, job.State.fresh(), OPTIONS)
        stays = sit(hub, "stays")
        for number in range(3 * _REMEMBERED):
            chair = sit(hub, f"n{number}")
            hub.hears(chair, m.Progress(1, number))
            hub.rises(chair, "its connection closed", silent=True)
        tables = (hub.nodes, hub.assigned, hub.progress, hub.parked, hub.gone)
        assert max(map(len, tables)) <= _REMEMBERED + 1
        shown = {n["id"] for n in hub.status()["nodes"]}
        assert "stays" in shown and f"n{3 * _REMEMBERED - 1}" in shown and "n0" not in shown
        hub.rises(stays, "its connection closed", silent=True)
        hub.stop("done")

    in_loop(play)


def test_a_new_epoch_begins_with_nothing_of_the_last() -> None:
    def play() -> None:
        kept: list[Facts] = []
        hub = Hub(job, job.State.fresh(), m.Options(2, 2), commit=kept.append)
        for name in "ab":
            sit(hub, name)
        for name in "ab":
            hub.hears(hub.chairs[name], m.Succeeded(1))
        assert hub.verdict is not None and kept[-1].verdict == hub.verdict
        sit(hub, "c", epoch=1)
        assert hub.verdict is None and hub.status()["verdict"] is None
        assert kept[-1].verdict is None
        sit(hub, "d", epoch=1)
        assert (hub.generation, kept[-1].generation) == (1, 1)
        assert {n["id"] for n in hub.status()["nodes"] if n["ranks"]} == {"c", "d"}
        hub.stop("done")

    in_loop(play)
