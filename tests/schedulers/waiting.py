"""How tests here wait for what no process tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT = 60.0
T = TypeVar("T")


def until(ready: Callable[[], T], what: str, words: Callable[[], str], limit: float = LIMIT) -> T:
    """Wait until ``ready()`` is true; its value. ``words()`` say more when it never is.

    Raises:
        RuntimeError: it was not within ``limit`` seconds.
    """
    end = time.monotonic() + limit
    while not (value := ready()):
        if time.monotonic() > end:
            raise RuntimeError(f"not within {limit:.0f} s: {what}\n{words()}")
        time.sleep(0.05)
    return value
