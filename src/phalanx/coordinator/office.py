"""The office of coordinator in etcd (``--rdzv-backend etcd``): instead of promises, a lease.

Who holds the key ``/phalanx/rendezvous/<run id>/owner`` coordinates; its value is where. Each
generation is written in a transaction that asks for the key first, so whoever has lost the lease
can agree on nothing more. Terms only rise. Nothing else lasts: what a dead incarnation of the
job has left is no obstacle to the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import grpc

from phalanx.controller.etcd import OPEN, Access, EtcdJournal, owner
from phalanx.controller.journal import JournalError, StoredJob, WriteFailed
from phalanx.coordinator import wire
from phalanx.coordinator.hub import CommitFailed, Facts

log = logging.getLogger("phalanx.coordinator")

_KEY = "facts"
_KNOWN = wire.kinds(Facts)


class Office:
    """One agent's way to the office. All but ``commit`` and ``leave`` are coroutines."""

    def __init__(
        self,
        etcd: str,
        run_id: str,
        silence: float,
        timeout: float = 2.0,
        access: Access = OPEN,
    ) -> None:
        """``etcd``: "host:port[,host:port]". A lease lasts ``silence`` seconds, 2 at least."""
        self.etcd = etcd
        self.prefix = f"/phalanx/rendezvous/{run_id}"
        self._ttl = max(2, math.ceil(silence))
        self._timeout = timeout
        self._access = access
        self._held: EtcdJournal | None = None

    async def holder(self) -> str:
        """The endpoint of the coordinator, "" for none. Raises JournalError."""
        run = asyncio.get_running_loop().run_in_executor
        return await run(None, owner, self.etcd, self.prefix, self._timeout, self._access)

    async def take(self, endpoint: str, on_lost: Callable[[], object]) -> Facts:
        """Be the coordinator: what holds, in a term of our own, which is written.

        ``on_lost`` is called in another thread once the lease is lost. Raises JournalError:
        somebody else has it, or etcd does not answer.
        """
        run = asyncio.get_running_loop().run_in_executor
        return await run(None, self._take, endpoint, on_lost)

    def _take(self, endpoint: str, on_lost: Callable[[], object]) -> Facts:
        held = EtcdJournal(
            self.etcd,
            self.prefix,
            ttl=self._ttl,
            timeout=self._timeout,
            me=endpoint,
            access=self._access,
        )
        try:
            stored = held.jobs().get(_KEY)
            known = Facts()
            if stored is not None:
                known = wire.decode("Facts", stored.body.encode(), _KNOWN)
            facts = Facts(known.term + 1, known.generation, known.attempt)
            held.write({_KEY: StoredJob(wire.encode(facts).decode(), False)}, {})
        except (WriteFailed, wire.WireError, grpc.RpcError) as error:
            held.close()
            raise JournalError(f"etcd at {self.etcd}, {self.prefix}: {error}") from None
        self._held = held
        held.on_lost = on_lost
        if held.lost:
            on_lost()
        return facts

    def commit(self, facts: Facts) -> None:
        """Before anybody is told. Raises CommitFailed."""
        if self._held is None:
            raise CommitFailed("the lease in etcd is given back")
        kept = Facts(facts.term, facts.generation, facts.attempt)  # a verdict does not outlive us
        try:
            self._held.write({_KEY: StoredJob(wire.encode(kept).decode(), False)}, {})
        except WriteFailed as error:
            raise CommitFailed(str(error)) from None

    def leave(self) -> None:
        """Give the office back, so that the next need not wait for the lease to run out."""
        held, self._held = self._held, None
        if held is not None:
            held.close()
