"""Sends this node's snapshots to its neighbour, and fetches what neighbours hold
(`phalanx.coordinator.copies`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from phalanx.coordinator import link, net, wire, words
from phalanx.coordinator.copies import STALL, Held, NotHeld, Overwritten, give_out, take_in
from phalanx.coordinator.security import Security
from phalanx.coordinator.server import METHODS
from phalanx.process.slate import Slate

log = logging.getLogger("phalanx.coordinator")

REACH = 2.0
"""Seconds within which a neighbour must be reached."""


@dataclass
class _Due:
    """What is to be told of a rank next."""

    generation: int
    world: int
    fd: int
    step: int
    back: int | None = None  # the rank has gone back to the end of this step


class Courier:
    """Sends this node's snapshots to its neighbour, one after the other. On the loop's thread."""

    def __init__(self, run_id: str, security: Security, silence: float) -> None:
        self._run_id, self._security, self._silence = run_id, security, silence
        self._due: dict[int, _Due] = {}
        self._task: asyncio.Task[None] | None = None
        self.beside: tuple[str, ...] = ()
        #: called with rank and step when a snapshot is on its way no more, there or not
        self.on_end: Callable[[int, int], object] = lambda rank, step: None
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def note(self, rank: int, world: int, generation: int, fd: int, step: int, back: bool) -> None:
        """A snapshot is there, or the rank has gone ``back``. The descriptor is ours."""
        old = self._due.pop(rank, None)
        due = _Due(generation, world, fd, step)
        if back:
            due.back = step
        elif old is not None and old.back is not None:
            due.back = min(old.back, step)
        if old is not None:
            if old.back is None:
                self.counts["skipped"] += 1
            os.close(old.fd)
        self._due[rank] = due
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._due:
            rank = next(iter(self._due))
            due = self._due.pop(rank)
            try:
                if self.beside:
                    await self._send(self.beside[0], rank, due)
            except (net.Unreachable, link.Refused, NotHeld) as error:
                self.counts["failed"] += 1
                log.info("a snapshot of rank %d was not copied: %s", rank, error)
            except Overwritten:
                self.counts["skipped"] += 1
            except asyncio.CancelledError:
                raise
            except Exception:
                self.counts["failed"] += 1
                log.exception("a snapshot of rank %d was not copied", rank)
            finally:
                os.close(due.fd)
                self.on_end(rank, due.step)

    async def _send(self, endpoint: str, rank: int, due: _Due) -> None:
        slate = Slate.attach(os.dup(due.fd))
        try:
            head = words.Copy(self._run_id, due.generation, rank, due.world, due.step)
            reached = await net.reach(endpoint, REACH)
            async with link.channel(reached, endpoint, self._security, self._silence) as made:
                call = made.stream_unary(METHODS["Keep"].path)(metadata=self._security.metadata())
                await self._write(call, slate, head, due)
        finally:
            slate.close()

    async def _write(self, call: Any, slate: Slate, head: words.Copy, due: _Due) -> None:
        sent = 0
        try:
            if due.back is not None:
                word = words.Copy(
                    head.run_id, head.generation, head.rank, head.world, due.back, forget=True
                )
                await asyncio.wait_for(call.write(wire.seal(word, term=0)), STALL)
            async for data in give_out(slate, head):
                await asyncio.wait_for(call.write(data), STALL)
                sent += len(data)
            await call.done_writing()
            answer = await asyncio.wait_for(call, STALL)
            envelope = wire.unseal(answer)
            held = wire.decode(envelope.kind, envelope.body, wire.HELD)
            if held.why:
                raise NotHeld(held.why)
        except (asyncio.TimeoutError, TimeoutError):
            raise net.Unreachable("no answer") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            why = str(error)
            if call.done():
                why = link.why(await call.code(), await call.details())
            raise net.Unreachable(why) from None
        except wire.WireError as error:
            raise net.Unreachable(f"answers what makes no sense ({error})") from None
        finally:
            call.cancel()
        if sent:
            self.counts["sent"] += 1
            self.bytes += sent

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for due in self._due.values():
            os.close(due.fd)
        self._due.clear()


async def fetch(
    endpoint: str, wanted: words.Wanted, into: Held, security: Security, silence: float
) -> None:
    """Get what a neighbour holds of these ranks.

    :raises Unreachable, Refused: there is nobody who answers. :raises NotHeld: no memory.
    """
    reached = await net.reach(endpoint, REACH)
    async with link.channel(reached, endpoint, security, silence) as made:
        call = made.unary_stream(METHODS["Fetch"].path)(
            wire.seal(wanted, term=0), metadata=security.metadata()
        )

        async def read() -> bytes | None:
            data = await asyncio.wait_for(call.read(), STALL)
            return None if data is grpc.aio.EOF else data

        try:
            await take_in(into, read, lambda what: None)
        except (asyncio.TimeoutError, TimeoutError):
            raise net.Unreachable("no answer") from None
        except grpc.aio.AioRpcError as error:
            raise net.Unreachable(link.why(error.code(), error.details())) from None
        except wire.WireError as error:
            raise net.Unreachable(f"answers what makes no sense ({error})") from None
        finally:
            call.cancel()


async def collect(
    beside: Sequence[str], wanted: words.Wanted, security: Security, silence: float
) -> dict[int, tuple[int, str]]:
    """What the neighbours hold of these ranks: rank to the descriptor of a slate, the caller's,
    and the address of who held it. The first neighbour that has a rank is the one that counts."""
    found: dict[int, tuple[int, str]] = {}
    for endpoint in beside:
        ranks = tuple(rank for rank in wanted.ranks if rank not in found)
        if not ranks:
            break
        ask = words.Wanted(wanted.run_id, ranks, wanted.world)
        into = Held(wanted.run_id)
        try:
            await fetch(endpoint, ask, into, security, silence)
        except (net.Unreachable, link.Refused, NotHeld) as error:
            log.info("no copies of snapshots from %s: %s", endpoint, error)
        for rank, slate, _ in into.of(ask):
            if slate.steps():
                found[rank] = os.dup(slate.fd), net.split(endpoint)[0]
        into.close()
    return found
