"""Ports for the workers' stores: chosen, bound and listening before anybody is told of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

from phalanx.coordinator.net import join
from phalanx.elastic.rendezvous.api import RendezvousError
from phalanx.elastic.rendezvous.ports import PortInUseError, hold

_BACKLOG = 4096  # the kernel cuts it to what it allows


class Offers:
    """Listeners at ``address``. A store is offered before it is needed, so that a generation
    can be told in one message; those that are not taken are closed with ``close``.
    """

    def __init__(self, address: str, ports: tuple[int, int] | None = None, first: int = 0) -> None:
        """``ports``: the range to take them from, None: any free one; ``first`` is tried
        before all others (0: none is).
        """
        self._address = address
        self._ports = ports
        self._first = first
        self._held: dict[str, socket.socket] = {}

    def current(self) -> str:
        """One that nobody took yet, another one if all are taken: its ``host:port``.

        Raises as ``next``.
        """
        return next(iter(self._held)) if self._held else self.next()

    def current_or_none(self, warn: Callable[[str], object]) -> str:
        """As ``current``; "" if there is none, and ``warn`` is told why: another node serves."""
        try:
            return self.current()
        except RendezvousError as error:
            warn(str(error))
            return ""

    def next(self) -> str:
        """Another listener: its ``host:port``.

        Raises RendezvousError when there is no free port, or no such address here.
        """
        error: RendezvousError | None = None
        for port in self._candidates():
            try:
                listener = hold(self._address, port)
            except PortInUseError as taken:
                error = taken
                continue
            try:
                listener.listen(_BACKLOG)
            except OSError:  # somebody bound it as we did, and listens
                listener.close()
                continue
            where: str = join(self._address, int(listener.getsockname()[1]))
            self._held[where] = listener
            return where
        raise RendezvousError(
            f"no port is free for the workers' store on {self._address}"
            + (f" in --port-range {self._ports[0]}-{self._ports[1]}" if self._ports else "")
            + (f": {error}" if error else "")
        )

    def _candidates(self) -> Iterator[int]:
        if self._first:
            yield self._first
        own: Sequence[int] = (0,)
        if self._ports is not None:
            own = range(self._ports[0], self._ports[1] + 1)
        yield from own

    def take(self, where: str) -> socket.socket | None:
        """The listener of that address, which is the caller's from now on; None: not ours."""
        return self._held.pop(where, None)

    def close(self) -> None:
        """Let go of those that nobody took."""
        held, self._held = self._held, {}
        for listener in held.values():
            listener.close()
