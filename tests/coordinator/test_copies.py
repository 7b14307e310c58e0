"""Snapshots of other nodes' ranks: what is taken in, and what is not."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("grpc")

from phalanx.coordinator import wire, words
from phalanx.coordinator.copies import PIECE, Held, NotHeld, Overwritten, give_out, take_in
from phalanx.coordinator.courier import Courier, collect
from phalanx.coordinator.security import OPEN, Security
from phalanx.coordinator.server import Job, Server
from phalanx.process.slate import Slate
from phalanx.proto import coordinator_pb2 as pb

HEAD = words.Copy("job", 1, 3, 8, 5)
WANTED = words.Wanted("job", (3,), 8)
PLENTY = 1 << 40


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held("job", lambda: PLENTY)
    yield made
    made.close()


def messages(body: bytes, head: words.Copy = HEAD) -> list[bytes]:
    slate = Slate.create("test", len(body))
    slate.write(head.step, [body], 7)

    async def all_() -> list[bytes]:
        return [part async for part in give_out(slate, head)]

    try:
        return asyncio.run(all_())
    finally:
        slate.close()


def take(held: Held, parts: list[bytes], counts: Counter[str] | None = None) -> int:
    left = iter(parts)
    count = Counter[str]() if counts is None else counts

    async def read() -> bytes | None:
        return next(left, None)

    async def run() -> int:
        return await take_in(held, read, lambda what: count.update([what]))

    return asyncio.run(run())


def body_of(held: Held, step: int = 5, wanted: words.Wanted = WANTED) -> bytes | None:
    for _, slate, _ in held.of(wanted):
        if (record := slate.read(step)) is not None:
            return record[0]
    return None


BODY = bytes(range(256)) * ((2 * PIECE + 512) // 256)


def test_a_snapshot_comes_whole_and_the_next_takes_the_other_place(held: Held) -> None:
    told: list[tuple[int, int]] = []
    held.on_first = lambda rank, step: told.append((rank, step))
    for step, body in ((5, BODY), (6, b"six"), (7, b"seven")):
        assert take(held, messages(body, replace(HEAD, step=step))) == 1
    assert body_of(held, 7) == b"seven" and body_of(held, 6) == b"six"
    assert body_of(held, 5) is None
    assert told == [(3, 5)]
    ((rank, slate, generation),) = held.of(WANTED)
    assert (rank, generation, slate.steps()) == (3, 1, {6: 7, 7: 7})


def test_one_that_breaks_off_or_is_not_what_was_sent_leaves_the_one_before(held: Held) -> None:
    take(held, messages(b"five"))
    whole = messages(BODY, replace(HEAD, step=6))
    twisted = [*whole[:-1], wire.seal(words.CopyEnd(1), term=0)]
    longer = [*whole[:-1], pb.Envelope(kind="Piece", body=b"more").SerializeToString()]
    within = [whole[0], whole[0]]
    for bad in (whole[:-1], whole[:2], twisted, longer, within, [whole[0], whole[-1]]):
        with pytest.raises(wire.WireError):
            take(held, bad)
        assert body_of(held, 6) is None
    # a longer one needs a larger place, so what was in the smaller one is gone; not by a bad one
    # of the same size
    take(held, whole)
    with pytest.raises(wire.WireError):
        take(held, messages(BODY, replace(HEAD, step=7))[:-1])
    assert body_of(held, 6) == BODY


def test_what_does_not_belong_here_is_refused(held: Held) -> None:
    take(held, messages(b"five", replace(HEAD, generation=4)))
    for other, why in (
        (replace(HEAD, run_id="another"), "the job here"),
        (replace(HEAD, generation=3), "generation 3 is over"),
        (replace(HEAD, rank=8, generation=4), "cannot be"),
        (replace(HEAD, step=-2, generation=4), "cannot be"),
    ):
        with pytest.raises(NotHeld, match=why):
            held.begin(replace(other, length=4))
    assert body_of(held) == b"five"
    assert held.of(replace(WANTED, run_id="another")) == []
    assert held.of(replace(WANTED, world=4)) == []
    assert held.of(replace(WANTED, ranks=(2,))) == []


def test_two_at_once_of_one_rank(held: Held) -> None:
    one = held.begin(replace(HEAD, length=4))
    assert one is not None
    with pytest.raises(NotHeld, match="on its way"):
        held.begin(replace(HEAD, length=4))
    one.close()
    assert held.begin(replace(HEAD, length=4)) is not None


def test_a_world_of_another_size_begins_anew(held: Held) -> None:
    take(held, messages(b"five"))
    take(held, messages(b"six", replace(HEAD, step=6, world=4)))
    assert body_of(held) is None
    assert body_of(held, 6, replace(WANTED, world=4)) == b"six"


def test_a_rank_that_went_back_makes_later_steps_void(held: Held) -> None:
    for step in (5, 6):
        take(held, messages(b"x", replace(HEAD, step=step)))
    assert held.begin(replace(HEAD, step=5, forget=True)) is None
    assert body_of(held, 5) == b"x" and body_of(held, 6) is None


def test_no_memory_for_it() -> None:
    held = Held("job", lambda: 100)
    with pytest.raises(NotHeld, match="half of what is free"):
        held.begin(replace(HEAD, length=26))
    assert held.begin(replace(HEAD, length=25)) is not None
    held.close()
    assert held.bytes == 0


@pytest.mark.parametrize(
    "bad", [b"", b"\xff" * 40, wire.seal(words.Beat(), term=0), b"x" * (wire.MAX_BODY + 2000)]
)
def test_garbage_is_counted(held: Held, bad: bytes) -> None:
    counts = Counter[str]()
    with pytest.raises(wire.WireError):
        take(held, [bad], counts)
    assert sum(counts.values()) == 1


def test_a_snapshot_that_is_overwritten_meanwhile_has_no_end() -> None:
    slate = Slate.create("test", len(BODY))
    slate.write(5, [BODY])

    async def run() -> list[bytes]:
        async for part in give_out(slate, HEAD):
            parts.append(part)
            if len(parts) == 2:
                for step in (6, 7):
                    slate.write(step, [b"newer"])
        return parts

    parts: list[bytes] = []
    with pytest.raises(Overwritten):
        asyncio.run(run())
    slate.close()
    assert wire.unseal(parts[-1]).kind == "Piece"


# --- between two agents -----------------------------------------------------------------------


def between(work: Any, security: Security = OPEN, shown: Security | None = None) -> None:
    """``work(server, courier, endpoint)`` with a listener that holds snapshots."""

    async def run() -> None:
        server = Server(Job("job"), "me", security)
        server.held = Held("job", lambda: PLENTY)
        endpoint = await server.start("127.0.0.1")
        courier = Courier("job", shown or security, 5.0)
        courier.beside = (endpoint,)
        try:
            await asyncio.wait_for(work(server, courier, endpoint), 60)
        finally:
            courier.close()
            await server.stop()
            server.held.close()

    asyncio.run(run())


def slate_with(*steps: tuple[int, bytes]) -> Slate:
    slate = Slate.create("test", max(len(body) for _, body in steps))
    for step, body in steps:
        slate.write(step, [body])
    return slate


async def delivered(courier: Courier) -> None:
    assert courier._task is not None
    await courier._task


def test_it_travels_there_and_back() -> None:
    slate = slate_with((5, BODY))

    async def work(server: Server, courier: Courier, endpoint: str) -> None:
        courier.note(3, 8, 1, os.dup(slate.fd), 5, False)
        await delivered(courier)
        assert courier.counts == {"sent": 1}
        nobody = "127.0.0.1:9"
        found = await collect([nobody, endpoint], WANTED, Security(token="secret"), 5.0)
        assert list(found) == [3]
        fd, holder = found[3]
        assert holder == "127.0.0.1"
        copy = Slate.attach(fd)
        assert copy.read(5) == (BODY, 0)
        copy.close()
        assert (
            await collect([endpoint], replace(WANTED, ranks=(4,)), Security(token="secret"), 5.0)
            == {}
        )

    between(work, Security(token="secret"))
    slate.close()


def test_of_what_comes_meanwhile_only_the_newest_follows_and_going_back_is_not_forgotten() -> None:
    slate = slate_with((6, b"six"), (5, b"five"))

    async def work(server: Server, courier: Courier, endpoint: str) -> None:
        courier.note(3, 8, 1, os.dup(slate.fd), 6, False)
        await delivered(courier)
        assert server.held is not None and body_of(server.held, 6) == b"six"
        courier.note(3, 8, 2, os.dup(slate.fd), 4, True)
        courier.note(3, 8, 2, os.dup(slate.fd), 5, False)
        await delivered(courier)
        assert body_of(server.held, 6) is None and body_of(server.held, 5) == b"five"

    between(work)
    slate.close()


def test_a_snapshot_that_was_written_anew_meanwhile_has_no_end() -> None:
    slate = Slate.create("test", len(BODY))
    slate.write(5, [BODY])

    async def run() -> None:
        async for part in give_out(slate, HEAD):
            parts.append(part)
            slate.write(5, [BODY])  # the same step, after going back

    parts: list[bytes] = []
    with pytest.raises(Overwritten):
        asyncio.run(run())
    slate.close()


def test_the_end_of_each_way_is_told_whatever_becomes_of_it() -> None:
    slate = slate_with((5, b"five"))
    ended: list[tuple[int, int]] = []

    async def work(server: Server, courier: Courier, endpoint: str) -> None:
        courier.on_end = lambda rank, step: ended.append((rank, step))
        for step, beside in ((5, endpoint), (6, endpoint), (5, "127.0.0.1:9"), (5, "")):
            courier.beside = (beside,) if beside else ()
            courier.note(3, 8, 1, os.dup(slate.fd), step, False)
            await delivered(courier)

    between(work)
    slate.close()
    assert ended == [(3, 5), (3, 6), (3, 5), (3, 5)]


def test_nobody_there_or_no_token_costs_the_copy_alone() -> None:
    slate = slate_with((5, b"five"))

    async def work(server: Server, courier: Courier, endpoint: str) -> None:
        courier.note(3, 8, 1, os.dup(slate.fd), 5, False)
        await delivered(courier)
        courier.beside = ("127.0.0.1:9",)
        courier.note(3, 8, 1, os.dup(slate.fd), 5, False)
        await delivered(courier)
        assert courier.counts == {"failed": 2}
        assert server.refused["unauthenticated"] == 1
        assert await collect([endpoint], WANTED, Security(token="wrong"), 5.0) == {}

    between(work, Security(token="secret"), shown=Security(token="wrong"))
    slate.close()
