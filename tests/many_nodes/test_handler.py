"""Torch's rendezvous handler over a coordinator: whoever waits there never waits in vain."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from phalanx.agent.offers import Offers
from phalanx.agent.torchrun import JoiningBond
from phalanx.coordinator.words import Alone, Reached
from phalanx.elastic.rendezvous.ports import hold
from phalanx.rendezvous import model as m
from phalanx.torch_bridge.rendezvous import PhalanxRendezvous

pytestmark = pytest.mark.torch
BOUND = 60.0


class Node:
    """A coordinator's end that tells what the test says."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.said: list[Any] = []
        self.closed = ""
        self.alone: float | None = None
        self._told: list[Any] = []
        self.taken = threading.Semaphore(0)

    def tell(self, *what: Any) -> None:
        self._told += what
        os.eventfd_write(self.fd, 1)

    def attend(self) -> None:
        pass

    def say(self, what: Any) -> None:
        self.said.append(what)

    def take(self) -> list[Any]:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        told, self._told = self._told, []
        self.taken.release()
        return told

    def alone_since(self) -> float | None:
        return self.alone

    def close(self, goodbye: str) -> None:
        self.closed = goodbye


def waiting(handler: PhalanxRendezvous) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            handler.next_rendezvous()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, raised


def ended(thread: threading.Thread, raised: list[BaseException]) -> BaseException:
    thread.join(BOUND)
    assert not thread.is_alive(), "it waits in vain"
    return raised[0]


def handler_of(node: Any, make_offers: Any, join: float = BOUND) -> PhalanxRendezvous:
    return PhalanxRendezvous(JoiningBond(node, make_offers), "job", join)


REACHED = Reached(m.Node("a", "127.0.0.1", "127.0.0.1:1"), 1)


def test_a_node_without_a_free_port_takes_part_and_serves_no_store() -> None:
    node = Node()
    with hold("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        handler = handler_of(node, lambda address: Offers(address, (port, port)))
        thread, raised = waiting(handler)
        node.tell(REACHED)
        assert node.taken.acquire(timeout=BOUND)
        node.tell(m.Refuse("not today"))
        assert "not today" in str(ended(thread, raised))
    (join,) = node.said
    assert isinstance(join, m.Join) and join.offer == ""


def test_what_goes_wrong_there_is_told_to_whoever_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    node = Node()

    def broken(_: str) -> Offers:
        raise OSError("no such luck")

    thread, raised = waiting(handler_of(node, broken))
    node.tell(REACHED)
    error = ended(thread, raised)
    assert isinstance(error, RendezvousConnectionError) and "no such luck" in str(error)


def test_it_is_closed_while_somebody_waits_and_its_thread_ends() -> None:
    node = Node()
    handler = handler_of(node, lambda address: Offers(address))
    thread, raised = waiting(handler)
    node.tell(REACHED)
    assert node.taken.acquire(timeout=BOUND)
    pump = handler._pumping
    assert pump is not None
    handler.set_closed()
    assert isinstance(ended(thread, raised), RendezvousClosedError)
    assert handler.shutdown()
    assert not pump.is_alive() and node.closed == "done"


def test_the_coordinator_is_lost_while_somebody_waits() -> None:
    node = Node()
    thread, raised = waiting(handler_of(node, lambda address: Offers(address), join=0.2))
    node.tell(REACHED)
    assert node.taken.acquire(timeout=BOUND)
    node.alone = time.monotonic()
    node.tell(Alone("the connection closed"))
    error = ended(thread, raised)
    assert isinstance(error, RendezvousTimeoutError)
