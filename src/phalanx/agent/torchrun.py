"""The plug-in for stock torchrun: ``torchrun --rdzv-backend phalanx``.

torch finds ``handlers`` by the entry point group ``torchrun.handlers``. The handler itself is in
``phalanx.torch_bridge.rendezvous``; here it gets its end of the coordination.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.rendezvous import model as m

if TYPE_CHECKING:
    import socket

    from phalanx.agent.offers import Offers
    from phalanx.coordinator.node import CoordinatorNode
    from phalanx.coordinator.words import Alone, Reached

log = logging.getLogger("phalanx.torchrun")

_ROUNDS = 1_000_000
"""torch's agent counts its restarts itself."""


class JoiningBond:
    """A bond that joins by itself, for whoever knows of no addresses: ``phalanx.rendezvous.bond``.

    ``hold`` is told which seat's workers may run here.
    """

    def __init__(
        self, node: CoordinatorNode, make_offers: Callable[[str], Offers], epoch: int = 0
    ) -> None:
        self._node = node
        self._make_offers = make_offers
        self._epoch = epoch
        self._offers: Offers | None = None
        self._held: m.Assignment | None = None
        self.fd = node.fd
        self.attend = node.attend
        self.say = node.say
        self.alone_since = node.alone_since

    def hold(self, assignment: m.Assignment | None) -> None:
        self._held = assignment

    def take(self) -> list[m.Telling]:
        out: list[m.Telling] = []
        for telling in self._node.take():
            name = type(telling).__name__
            if name == "Reached":
                self._join(telling)  # type: ignore[arg-type]
            elif name != "Alone":
                out.append(telling)  # type: ignore[arg-type]
        return out

    def _join(self, reached: Reached | Alone) -> None:
        node: m.Node = reached.node  # type: ignore[union-attr]
        if self._offers is None:
            self._offers = self._make_offers(node.address)
        held = self._held
        share = m.Share() if held is not None else None
        offer = self._offers.current_or_none(log.warning)
        self._node.say(m.Join(node, self._epoch, held, offer, share))

    def offer(self) -> str:
        """Another listener for a store; its address, "" if none can be had."""
        assert self._offers is not None
        return self._offers.current_or_none(log.warning)

    def claim(self, where: str) -> socket.socket | None:
        """The listener at an address of ours; None: it is another node's."""
        return self._offers.take(where) if self._offers is not None else None

    def close(self, goodbye: str) -> None:
        self._node.close(goodbye)
        if self._offers is not None:
            self._offers.close()

    def facts(self) -> Mapping[str, Any]:
        return self._node.facts()


def handlers() -> Callable[[Any], Any]:
    """The creator of a handler from torch's ``RendezvousParameters``."""
    return create


def create(params: Any) -> Any:
    """A handler for ``params``.

    Raises ValueError for an endpoint or option that will not do.
    """
    from phalanx.agent.config import NodesConfig, timing
    from phalanx.agent.many_main import bond_of
    from phalanx.agent.offers import Offers
    from phalanx.coordinator import net
    from phalanx.torch_bridge.rendezvous import PhalanxRendezvous

    if not params.run_id:
        raise ValueError("the rendezvous needs a name of the job: --rdzv-id")
    rank = params.get_as_int("rank")
    nodes = NodesConfig(
        least=params.min_nodes,
        most=params.max_nodes,
        endpoint=net.split(params.endpoint),
        is_host=params.get_as_bool("is_host"),
        node_rank=rank,
        token_file=params.get("token_file") or "",
        **timing(params),
    )
    bond = JoiningBond(
        bond_of(
            nodes,
            run_id=params.run_id,
            slots=1,
            max_restarts=_ROUNDS,
            local=params.local_addr or "",
            line=log.warning,
        ),
        lambda address: Offers(address, nodes.ports),
    )
    return PhalanxRendezvous(bond, params.run_id, nodes.join)
