"""Phalanx keeps distributed training running when parts of it fail."""

from __future__ import annotations

from phalanx._version import __version__

TYPE_CHECKING = False  # importing ``typing`` here would cost every command its time
if TYPE_CHECKING:
    from typing import SupportsIndex

__all__ = ["__version__", "progress"]


def progress(step: SupportsIndex | None = None, phase: str | None = None) -> None:
    """Tell the agent that this worker gets on: call it once per training step.

    Costs a few microseconds and never blocks, so call it as often as you
    like. ``step``: the step just begun or done, 0 or more; ``phase``: what the worker does
    ("checkpoint"), 32 bytes at most count. What is left out stays as it was. Without an
    agent, and in children of the worker, it does nothing.

    Raises TypeError for a step that is no integer, ValueError for a negative one.
    """
    from phalanx.watchdog.progress import beat

    beat(step, phase)
