"""Snapshots at another node: what an agent holds for its neighbours, and how they travel.

A snapshot is a record of a `phalanx.process.slate.Slate`. It goes to the node after the one whose
rank took it, by a call of its own to that node's listener (token and certificates as everywhere),
in pieces, with a checksum. The next process of a lost node's rank, wherever it starts, is given
what the neighbour holds. Training never waits for any of this: of the snapshots that come while
one still travels only the newest follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from phalanx.coordinator import wire, words
from phalanx.process.slate import Slate, Writing
from phalanx.proto import coordinator_pb2 as pb

PIECE = 512 << 10
"""Bytes of one piece."""

STALL = 20.0
"""Seconds without a piece after which a transfer is given up."""


class NotHeld(Exception):
    """A snapshot was not taken in; the text says why."""


def memory_free() -> int:
    """Bytes that the kernel says can be had without swapping; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


@dataclass
class _Copies:
    """What is held of one rank."""

    generation: int
    world: int
    slate: Slate | None = None
    busy: bool = False
    told: int = -1  # the generation of which a snapshot was last told


class Held:
    """The copies that this agent holds. On the loop's thread, but for `count`."""

    def __init__(self, run_id: str, free: Callable[[], int] = memory_free) -> None:
        """``free()``: bytes of memory; no snapshot may need more than half of it."""
        self._run_id = run_id
        self._free = free
        #: called with rank and step of the first snapshot of a rank in each generation
        self.on_first: Callable[[int, int], object] = lambda rank, step: None
        self._ranks: dict[int, _Copies] = {}
        self.bytes = 0

    @property
    def count(self) -> int:
        """Ranks of which a snapshot is held."""
        return sum(held.slate is not None for held in self._ranks.copy().values())

    def begin(self, head: words.Copy) -> Incoming | None:
        """A snapshot is announced; None: nothing more belongs to it.

        :raises NotHeld: it is not wanted.
        """
        if head.run_id != self._run_id:
            raise NotHeld(f"the job here is {self._run_id!r}, not {head.run_id!r}")
        if not 0 <= head.rank < head.world or head.length < 0 or head.step < -1:
            raise NotHeld("a rank, step or length that cannot be")
        held = self._ranks.get(head.rank)
        if held is not None and head.generation < held.generation:
            raise NotHeld(f"generation {head.generation} is over")
        if held is not None and held.busy:
            raise NotHeld("another of that rank is on its way")
        if held is None or held.world != head.world:
            if held is not None:
                self._drop(held)
            held = self._ranks[head.rank] = _Copies(head.generation, head.world)
        held.generation = head.generation
        if held.slate is not None:
            held.slate.forget_after(head.step)
        if head.forget:
            return None
        self._make_room(held, head)
        return Incoming(self, held, head)

    def tell(self, held: _Copies, head: words.Copy) -> None:
        """One has come whole."""
        if held.told < head.generation:
            held.told = head.generation
            self.on_first(head.rank, head.step)

    def _make_room(self, held: _Copies, head: words.Copy) -> None:
        if held.slate is not None and held.slate.capacity >= head.length:
            return
        need, free = 2 * head.length, self._free()
        if need > free // 2:
            raise NotHeld(
                f"two snapshots of {head.length} bytes are more than half of what is free"
            )
        try:
            slate = Slate.create(f"phalanx-copies-{head.rank}", head.length)
        except OSError as error:
            raise NotHeld(f"no memory: {error.strerror}") from None
        self._drop(held)
        held.slate = slate
        self.bytes += slate.size

    def _drop(self, held: _Copies) -> None:
        if held.slate is not None:
            self.bytes -= held.slate.size
            held.slate.close()
            held.slate = None

    def of(self, wanted: words.Wanted) -> list[tuple[int, Slate, int]]:
        """(rank, slate, generation) of those that are here."""
        if wanted.run_id != self._run_id:
            return []
        found = []
        for rank in wanted.ranks:
            held = self._ranks.get(rank)
            if held is not None and held.slate is not None and held.world == wanted.world:
                found.append((rank, held.slate, held.generation))
        return found

    def close(self) -> None:
        for held in self._ranks.values():
            self._drop(held)
        self._ranks.clear()


class Incoming:
    """A snapshot on its way in. What breaks off is void, and the one before it is still there."""

    def __init__(self, all_: Held, held: _Copies, head: words.Copy) -> None:
        assert held.slate is not None
        self._all, self._held, self._head = all_, held, head
        held.busy = True
        self._writing: Writing = held.slate.put(head.step, head.length, head.kind)
        self._checksum = 0

    def add(self, piece: bytes) -> None:
        """:raises ValueError: more than was announced."""
        self._checksum = zlib.crc32(piece, self._checksum)
        self._writing.add(piece)

    def end(self, checksum: int) -> None:
        """:raises ValueError: it is not what was sent."""
        if checksum != self._checksum:
            raise ValueError("the checksum is another")
        self._writing.done()
        self._all.tell(self._held, self._head)

    def close(self) -> None:
        self._held.busy = False


async def take_in(
    held: Held, read: Callable[[], Awaitable[Any]], count: Callable[[str], object]
) -> int:
    """Take in what ``read()`` gives, message by message, until its end; how many snapshots.

    :raises NotHeld: one that cannot be held. :raises WireError: what does not fit.
    """
    taken = 0
    while True:
        data = await read()
        if data is None:
            return taken
        head = _decode(data, count)
        if not isinstance(head, words.Copy):
            raise wire.WireError("a snapshot begins with Copy")
        incoming = held.begin(head)
        if incoming is None:
            continue
        try:
            while True:
                data = await read()
                if data is None:
                    raise wire.WireError("a snapshot that breaks off")
                part = _decode(data, count)
                if isinstance(part, bytes):
                    incoming.add(part)
                elif isinstance(part, words.CopyEnd):
                    incoming.end(part.checksum)
                    break
                else:
                    raise wire.WireError("a snapshot within another")
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        finally:
            incoming.close()
        taken += 1


def _decode(data: bytes, count: Callable[[str], object]) -> words.Copy | words.CopyEnd | bytes:
    try:
        envelope = wire.unseal(data)
        if envelope.kind == "Piece":
            return envelope.body
        known: words.Copy | words.CopyEnd
        known = wire.decode(envelope.kind, envelope.body, wire.COPIES, wire.MAX_SAYING)
        return known
    except wire.WireError as error:
        count("oversized" if "more than" in str(error) else "garbage")
        raise


async def give_out(slate: Slate, head: words.Copy) -> AsyncIterator[bytes]:
    """The messages of one snapshot; none if it is not there.

    :raises Overwritten: it was, meanwhile; the other end knows by the missing CopyEnd.
    """
    seal = slate.seal(head.step)
    if seal is None:
        return
    start, length, kind, _ = seal
    yield wire.seal(replace(head, length=length, kind=kind), term=0)
    checksum = 0
    for at in range(start, start + length, PIECE):
        piece = slate.buffer[at : min(at + PIECE, start + length)]
        checksum = zlib.crc32(piece, checksum)
        yield pb.Envelope(kind="Piece", body=piece).SerializeToString()
        await asyncio.sleep(0)  # others are on this thread too
        if slate.seal(head.step) != seal:
            raise Overwritten
    yield wire.seal(words.CopyEnd(checksum), term=0)


class Overwritten(Exception):
    """The worker has gone on to a newer snapshot in the same place."""
