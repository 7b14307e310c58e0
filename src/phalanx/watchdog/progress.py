"""What is behind ``phalanx.progress``: the worker's side of its progress page."""

from __future__ import annotations

import logging
import operator
import os
from typing import TYPE_CHECKING, SupportsIndex

if TYPE_CHECKING:
    from phalanx.process.page import ProgressPage

__all__ = ["beat"]

logger = logging.getLogger(__name__)

_pid = 0  # the process that looked for its page
_page: ProgressPage | None = None


def beat(step: SupportsIndex | None = None, phase: str | None = None) -> None:
    """See ``phalanx.progress``."""
    global _pid, _page
    if step is not None:
        step = operator.index(step)
        if not 0 <= step < 2**63:
            raise ValueError(f"step {step} is not a step: it must be 0 or more")
    if _pid != os.getpid():
        _page = _attach() if _pid == 0 else None  # a fork of the worker is not the worker
        _pid = os.getpid()
    if _page is not None:
        _page.beat(step, phase)


def _attach() -> ProgressPage | None:
    """The page, ready to be written; None where there is none for this process."""
    if "PHALANX_PROGRESS_FD" not in os.environ:
        return None
    try:
        from phalanx.process.page import ProgressPage

        page = ProgressPage.from_environment()
        if page is None:
            return None
        owner = page.read().pid
        if owner not in (0, os.getpid()):
            return None  # a child of the worker that inherited the descriptor
        if owner == 0:
            _take(page)
        return page
    except Exception as e:
        logger.warning("no progress page, progress is not seen by the agent: %s", e)
        return None


def _take(page: ProgressPage) -> None:
    """First word of a process that was not prepared: make its death known early, too."""
    import threading

    from phalanx.process.armed import arm
    from phalanx.process.channel import HELD, Channel

    arm()
    if threading.current_thread() is not threading.main_thread():
        return  # the mutex tells of the death of the thread that holds it
    if page.hold() and os.environ.get("PHALANX_CHANNEL_FD", "").isdigit():
        # A copy: whoever else uses the channel in this process keeps the descriptor.
        channel = Channel.attach(os.dup(int(os.environ["PHALANX_CHANNEL_FD"])))
        try:
            channel.send(HELD)
        finally:
            channel.close()
