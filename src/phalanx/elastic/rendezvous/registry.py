"""Which backends there are."""

from __future__ import annotations

import logging

from .api import (
    RendezvousHandler,
    RendezvousParameters,
)
from .api import (
    rendezvous_handler_registry as handler_registry,
)

__all__ = ["get_rendezvous_handler"]

log = logging.getLogger(__name__)


def _create_static_handler(params: RendezvousParameters) -> RendezvousHandler:
    from . import static_tcp_rendezvous

    return static_tcp_rendezvous.create_rdzv_handler(params)


def _create_local_handler(params: RendezvousParameters) -> RendezvousHandler:
    from . import local

    return local.create_handler(params)


def _refuse_etcd(params: RendezvousParameters) -> RendezvousHandler:
    from . import local

    raise local.RendezvousBackendUnavailableError(
        f"the rendezvous backend '{params.backend}' is not part of phalanx. For one node use c10d; "
        "else pass torch's own handler as WorkerSpec.rdzv_handler, or register a creator for it "
        "under another name with rendezvous_handler_registry.register"
    )


def _register_default_handlers() -> None:
    handler_registry.register("static", _create_static_handler)
    handler_registry.register("c10d", _create_local_handler)
    handler_registry.register("phalanx", _create_local_handler)
    handler_registry.register("etcd", _refuse_etcd)
    handler_registry.register("etcd-v2", _refuse_etcd)
    handler_registry._discover = _register_out_of_tree_handlers


def _register_out_of_tree_handlers() -> None:
    """Register what installed packages offer in the entry point group ``torchrun.handlers``.

    Such an entry point is a function without arguments that returns a creator. One that
    fails is logged and left out.
    """
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="torchrun.handlers"):
        if entry_point.value.startswith("phalanx."):
            continue  # ours for stock torchrun
        try:
            get_creator = entry_point.load()
            handler_registry.register(entry_point.name, get_creator())
        except Exception:
            log.warning(
                "Exception while registering out of tree plugin %s: ",
                entry_point.name,
                exc_info=True,
            )


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for ``params.backend``; raises as ``create_handler`` of the registry."""
    return handler_registry.create_handler(params)
