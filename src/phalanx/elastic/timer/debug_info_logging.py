"""What is logged when timers run out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

__all__ = ["log_debug_info_for_expired_timers"]

logger = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(
    run_id: str, expired_timers: Mapping[int, Sequence[str]]
) -> None:
    """Log the expired timers (pid to JSON texts) of a run; silent when there are none.

    The server looks this name up in its own module at each evaluation, as PyTorch's does, so
    that it can be replaced there.
    """
    if expired_timers:
        logger.info("run %r: timers expired: %s", run_id, dict(expired_timers))
