"""Stock torchrun's rendezvous handler over our coordinator (``torchrun --rdzv-backend phalanx``).

torchrun's agent asks ``num_nodes_waiting`` at each turn and starts its workers anew when that is
not zero; so that is how it is told of every change, of a lost node too. It has no way to tell how
a round of its workers ended: one that comes for the next round unasked has had a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import sys
import threading
import time

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined,unused-ignore]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from phalanx.rendezvous import model as m
from phalanx.rendezvous.bond import Bond

CONNECT_SECONDS = 30.0
"""How long a node tries to reach the store of a round."""

STORE_SECONDS = 300.0
"""How long the store's ``get`` and ``wait`` wait, as torch's."""

GOODBYE_SECONDS = 10.0
"""How long ``shutdown`` waits for the verdict."""


class PhalanxRendezvous(RendezvousHandler):
    """One node of a job, for torch's elastic agent."""

    def __init__(self, bond: Bond, run_id: str, join_seconds: float) -> None:
        self._bond = bond
        self._run_id = run_id
        self._join_seconds = join_seconds
        self._changed = threading.Condition()
        self._attending = False
        self._closed = False
        self._running = False  # workers of ``held`` may run here
        self._held: m.Assignment | None = None
        self._next: m.Assignment | None = None
        self._stop: int | None = None  # the generation that is to be left
        self._verdict: m.Verdict | None = None
        self._refused = ""
        self._parked = ""
        self._server: TCPStore | None = None
        self._pumping: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # ------------------------------------------------------------------ what torch asks

    def get_backend(self) -> str:
        return "phalanx"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._verdict is not None or self._closed

    def num_nodes_waiting(self) -> int:
        """1 when the workers have to be started anew, because a node came or went or failed."""
        with self._changed:
            left = self._held is not None and self._stop is not None
            return int(left or self._verdict is not None)

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round. Whatever ran here has been stopped by torch's agent.

        Raises the errors of torch's rendezvous: closed, graceful exit, timeout, connection.
        """
        if not self._attending:
            self._attending = True
            self._bond.attend()
            self._pumping = threading.Thread(
                target=self._pump, name="phalanx-rendezvous", daemon=True
            )
            self._pumping.start()
        with self._changed:
            held, self._running = self._held, False
            self._bond.hold(None)
            if held is not None and self._next is None:
                if self._stop is None:
                    self._bond.say(
                        m.Failed(
                            held.generation,
                            None,
                            f"workers on {socket.gethostname()} (node {held.group}) failed",
                        )
                    )
                else:
                    self._bond.say(m.Stopped(self._stop))
        while True:
            a = self._await_seat()
            store = self._store_of(a)
            if store is not None:
                host, port = _split(a.store)
                return RendezvousInfo(
                    PrefixStore(f"phalanx/{self._run_id}/{a.generation}", store),
                    a.group,
                    a.groups,
                    RendezvousStoreInfo(host, port),
                )

    def set_closed(self) -> None:
        """No further round on this node."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def shutdown(self) -> bool:
        """The end of torch's agent: its workers ended well, or it is raising an error."""
        failed = sys.exc_info()[1]
        held = self._held
        if self._attending and held is not None and self._verdict is None:
            if failed is None:
                self._bond.say(m.Succeeded(held.generation))
            else:
                where = f"node {held.group} ({socket.gethostname()})"
                reason = f"torchrun on {where} gave up: {failed}"[:2000]
                self._bond.say(m.Failed(held.generation, None, reason, retryable=False))
            self._running = False
            with self._changed:
                self._changed.wait_for(lambda: self._verdict is not None, GOODBYE_SECONDS)
        self.set_closed()
        if self._pumping is not None:
            self._pumping.join(GOODBYE_SECONDS)
            if not self._pumping.is_alive():
                os.close(self._wake)
            self._pumping = None
            self._bond.close("done" if failed is None else "failed")
        self._server = None
        return True

    # ------------------------------------------------------------------ what the coordinator tells

    def _pump(self) -> None:
        poll = select.poll()
        poll.register(self._bond.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._closed:
                poll.poll()
                told = self._bond.take()
                with self._changed:
                    for telling in told:
                        self._hear(telling)
                    self._changed.notify_all()  # also of a coordinator lost or found
        except Exception as error:
            # Whoever waits would wait for ever.
            with self._changed:
                self._refused = f"the rendezvous failed on this node: {error!r}"
                self._changed.notify_all()
            raise

    def _hear(self, telling: m.Telling) -> None:
        if isinstance(telling, m.Assign):
            highest = max(
                (a.generation for a in (self._held, self._next) if a is not None), default=0
            )
            if telling.assignment.generation > highest:
                self._next = telling.assignment
        elif isinstance(telling, m.Stop):
            if self._held is None or not self._running:
                self._bond.say(m.Stopped(telling.generation))
            elif telling.generation >= self._held.generation:
                self._stop = telling.generation
        elif isinstance(telling, m.Park):
            self._parked = telling.reason
        elif isinstance(telling, m.Refuse):
            self._refused = telling.reason
        elif isinstance(telling, m.Over):
            self._verdict = telling.verdict

    def _await_seat(self) -> m.Assignment:
        began = time.monotonic()
        with self._changed:
            while True:
                if self._refused:
                    raise RendezvousConnectionError(self._refused)
                if self._verdict is not None:
                    if self._verdict.success:
                        raise RendezvousGracefulExitError("the job is done")
                    raise RendezvousClosedError(self._verdict.reason)
                if self._closed:
                    raise RendezvousClosedError("the rendezvous was closed on this node")
                if self._next is not None:
                    self._held, self._next = self._next, None
                    self._stop = None
                    self._running = True
                    self._bond.hold(self._held)
                    return self._held
                alone = self._bond.alone_since()
                left = None  # the coordinator has its own bound
                if alone is not None:
                    left = max(alone, began) + self._join_seconds - time.monotonic()
                    if left <= 0:
                        raise RendezvousTimeoutError(
                            f"no coordinator was found within {self._join_seconds:g} s"
                        )
                self._changed.wait(left)

    def _store_of(self, a: m.Assignment) -> Store | None:
        """The store of a round; None when the node that was to serve it is gone already."""
        host, port = _split(a.store)
        self._server = None  # that of the last round
        listener = self._bond.claim(a.store)
        connect = datetime.timedelta(seconds=CONNECT_SECONDS)
        try:
            if listener is not None:
                store = TCPStore(
                    host,
                    port,
                    None,
                    is_master=True,
                    timeout=connect,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
                self._server = store
                if offer := self._bond.offer():
                    self._bond.say(m.Offer(offer))
            else:
                store = TCPStore(host, port, None, is_master=False, timeout=connect)
        except RuntimeError as error:
            with self._changed:
                self._running = False
                self._bond.hold(None)
                if self._stop is not None:
                    self._bond.say(m.Stopped(self._stop))
                    return None
            reason = f"{socket.gethostname()} cannot reach the store at {a.store}: {error}"
            self._bond.say(m.Failed(a.generation, None, reason[:2000]))
            return None
        store.set_timeout(datetime.timedelta(seconds=STORE_SECONDS))
        return store


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
