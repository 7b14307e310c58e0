"""What holds an agent to its coordinator, as the agent sees it. Pure: a protocol, no code.

``phalanx.torch_bridge.rendezvous`` uses it, which must know nothing of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from phalanx.rendezvous.model import Assignment, Saying, Telling


class Bond(Protocol):
    """The coordinator, wherever that is, and whether or not it is in this process. It joins by
    itself, again after a loss too, with the seat that it was told to ``hold``.
    """

    @property
    def fd(self) -> int:
        """Readable when ``take`` has something."""

    def attend(self) -> None:
        """Begin: find the coordinator, or be it, and join."""

    def say(self, what: Saying) -> None:
        """Tell the coordinator; never waits."""

    def take(self) -> list[Telling]:
        """What it has told since."""

    def hold(self, assignment: Assignment | None) -> None:
        """Whose workers may run here, for the next Join."""

    def offer(self) -> str:
        """Bind a listener for a store of ours; its "host:port", "" if none can be had."""

    def claim(self, where: str) -> Any:
        """The listening socket at that address, the caller's from now on; None: it is not ours."""

    def alone_since(self) -> float | None:
        """Since when (monotonic seconds) there is no coordinator; None: there is one."""

    def close(self, goodbye: str) -> None:
        """Leave; whoever needs this agent's coordinator is served for a bounded time."""

    def facts(self) -> Mapping[str, Any]:
        """For ``/status``. From any thread."""
