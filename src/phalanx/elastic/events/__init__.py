"""Events of the agent, through Python's logging.

Each destination of :mod:`.handlers` has a logger of its own,
``torchelastic-events-<destination>``; what is logged is one JSON object.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from .api import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent
from .handlers import get_logging_handler

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]

_events_loggers: dict[str, logging.Logger] = {}


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    """The logger of a destination. It does not propagate: an event is logged once."""
    logger = _events_loggers.get(destination)
    if logger is None:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        try:
            logger.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
        except ValueError:
            logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(handler)
        _events_loggers[destination] = logger
    return logger


def record(event: Event, destination: str = "null") -> None:
    """Send an event to a destination; an unknown one is a ``KeyError``."""
    _get_or_create_logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send a rendezvous event to the destination ``dynamic_rendezvous``."""
    _get_or_create_logger("dynamic_rendezvous").info(event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Record what a rendezvous did, unless ``dynamic_rendezvous`` goes nowhere.

    What is not given is filled in: this host, this process, the function that calls.
    """
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    from phalanx.elastic.utils.hostname import fq_hostname

    code = sys._getframe(1).f_code
    event = RdzvEvent(
        name=f"{os.path.basename(code.co_filename)}:{name or code.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or fq_hostname(),
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
    )
    record_rdzv_event(event)
