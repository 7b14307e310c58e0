"""What the health server asks, and the usual answerer for a process with one main loop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["HealthSource", "LoopHealth", "Metric"]


@dataclass(frozen=True)
class Metric:
    """One number for ``/metrics``. ``kind`` is "gauge" or "counter" (whose exposed name ends
    in ``_total``)."""

    name: str
    value: float
    help: str = ""
    kind: str = "gauge"
    labels: Mapping[str, str] = field(default_factory=dict)


class HealthSource(Protocol):
    """Where the health server has its answers from.

    Called in the server's thread: answer from memory, wait for nothing. One that raises is
    answered for with status 503 (500 for ``status`` and ``metrics``).
    """

    def alive(self) -> tuple[bool, str]:
        """Whether the process does its work, and why not. False gets it restarted by others."""

    def ready(self) -> tuple[bool, str]:
        """Whether it is in the state it should be in (workers run), and why not."""

    def status(self) -> Mapping[str, Any]:
        """What a person wants to know; must be JSON."""

    def metrics(self) -> Iterable[Metric]:
        """The numbers of now."""


def stale(last: Callable[[], object], timeout: float) -> str:
    """Why the time (Unix seconds) that ``last()`` gives means unhealthy; "" if it does not.

    The contract of PyTorch's health check: unhealthy when ``now - last() > timeout``. A
    callback that raises or gives no time is unhealthy, too. Never raises.
    """
    try:
        when = last()
    except Exception as e:
        return f"failed: {type(e).__name__}: {e}"
    if isinstance(when, bool) or not isinstance(when, (int, float)) or math.isnan(when):
        return f"gave {when!r:.80}, not a time"
    age = time.time() - when
    return f"last progress {age:.1f} s ago, limit {timeout:g} s" if age > timeout else ""


class LoopHealth:
    """``HealthSource`` of a process with a main loop that calls ``tick`` at each turn.

    Alive: the last tick is at most ``limit`` seconds old, and so says every watch that was
    added. Before the first tick it is alive for ``limit`` seconds. Usable from any thread.
    """

    def __init__(
        self,
        limit: float = 60.0,
        *,
        facts: Callable[[], Mapping[str, Any]] | None = None,
        numbers: Callable[[], Iterable[Metric]] | None = None,
    ) -> None:
        self.limit = limit
        self.facts = facts
        self.numbers = numbers
        self.lacks: Callable[[], str] | None = None  # what is not as it should be; "": nothing
        self._lock = threading.Lock()
        self._started = self._ticked = time.monotonic()
        self._ticked_wall = time.time()
        self._ready = (False, "starting")
        self._watches: dict[str, tuple[Callable[[], float], float]] = {}

    def tick(self) -> None:
        """The loop has come round."""
        self._ticked = time.monotonic()
        self._ticked_wall = time.time()

    def last_tick(self) -> int:
        """When, in Unix seconds: the ``alive_callback`` of a ``HealthCheckServer``."""
        return int(self._ticked_wall)

    def set_ready(self, ready: bool, why_not: str = "") -> None:
        self._ready = (ready, why_not)

    def watch(self, name: str, last: Callable[[], float], timeout: float) -> None:
        """Also demand that ``last()`` (Unix seconds) is at most ``timeout`` seconds ago.

        A watch of the same name is replaced.
        """
        with self._lock:
            self._watches[name] = (last, timeout)

    def unwatch(self, name: str) -> None:
        with self._lock:
            self._watches.pop(name, None)

    def alive(self) -> tuple[bool, str]:
        age = time.monotonic() - self._ticked
        if age > self.limit:
            return False, f"main loop: last turn {age:.1f} s ago, limit {self.limit:g} s"
        with self._lock:
            watches = list(self._watches.items())
        for name, (last, timeout) in watches:
            why = stale(last, timeout)
            if why:
                return False, f"{name}: {why}"
        return True, ""

    def ready(self) -> tuple[bool, str]:
        alive, why = self.alive()
        if not alive:
            return False, why
        ready, why = self._ready
        if ready and self.lacks is not None:
            why = self.lacks()
        return ready and not why, why

    def status(self) -> Mapping[str, Any]:
        alive, why = self.alive()
        ready, why_not = self.ready()
        now = time.monotonic()
        return {
            "alive": alive,
            "ready": ready,
            "why_not": why or why_not,
            "uptime_seconds": round(now - self._started, 3),
            "loop_age_seconds": round(now - self._ticked, 3),
            **(self.facts() if self.facts else {}),
        }

    def metrics(self) -> Iterable[Metric]:
        now = time.monotonic()
        yield Metric("phalanx_alive", float(self.alive()[0]), "1 if the main loop turns")
        yield Metric("phalanx_ready", float(self.ready()[0]), "1 if it is as it should be")
        yield Metric("phalanx_uptime_seconds", now - self._started, "Since the start")
        yield Metric("phalanx_loop_age_seconds", now - self._ticked, "Since the last turn")
        if self.numbers:
            yield from self.numbers()
