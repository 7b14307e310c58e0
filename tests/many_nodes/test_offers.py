"""Listeners for the workers' stores, offered before they are needed."""

from __future__ import annotations

import socket

import pytest

from phalanx.agent.offers import Offers
from phalanx.elastic.rendezvous.api import RendezvousError


def free(count: int) -> int:
    """The first of so many ports in a row that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            first = one.getsockname()[1]
        held = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server(("127.0.0.1", port)))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for listener in held:
                listener.close()


def test_what_is_offered_takes_connections_before_anybody_serves_it() -> None:
    offers = Offers("127.0.0.1")
    where = offers.next()
    host, port = where.rsplit(":", 1)
    socket.create_connection((host, int(port)), 5).close()
    assert offers.take("127.0.0.1:1") is None
    taken = offers.take(where)
    assert taken is not None and taken.getsockname()[1] == int(port)
    assert offers.take(where) is None
    taken.close()
    offers.close()


def test_ports_come_from_the_range_the_named_one_first() -> None:
    first = free(3)
    offers = Offers("127.0.0.1", (first, first + 1), first + 2)
    got = [int(offers.next().rsplit(":", 1)[1]) for _ in range(3)]
    assert got == [first + 2, first, first + 1]
    with pytest.raises(RendezvousError, match=f"--port-range {first}-{first + 1}"):
        offers.next()
    offers.close()
    assert offers.next().endswith(f":{first + 2}")
    offers.close()


def test_an_ipv6_address_has_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    offers = Offers("::1")
    assert offers.next().startswith("[::1]:")
    offers.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1"):
        Offers("192.0.2.1").next()
