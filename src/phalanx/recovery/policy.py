"""Whether and when the whole group is started again after a fault. Pure.

``phalanx run`` and the coordinator of several nodes use it; the bare agent API restarts
``max_restarts`` times at once, as PyTorch's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEVER_COMES_RIGHT = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError"})
NEVER_COMES_RIGHT |= {"ModuleNotFoundError"}
"""Exceptions that a second try before any progress does not cure."""


_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "peer closed",
    "remote peer",
    "gloo",
    "nccl",
    "hccl",
    "socket",
)


def is_echo(returncode: int | None, exception: str | None) -> bool:
    """Whether a worker ended as one does whose peer is gone: it is not to blame."""
    if returncode is None or returncode < 0:
        return False
    text = (exception or "").lower()
    return any(sign in text for sign in _PEER_LOST)


@dataclass(frozen=True)
class Attempt:
    """How one attempt of the group ended.

    ``lasted`` is in seconds from the start of its workers to the first death.
    ``first_step`` and ``last_step`` are the smallest and largest number of finished steps
    the workers told of, None where the program tells nothing.
    ``returncode`` is that of the root cause as subprocess has it; ``exception`` the name of
    the Python exception, None when it is not known.
    """

    lasted: float
    returncode: int | None
    exception: str | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def knows_progress(self) -> bool:
        return self.last_step is not None


@dataclass(frozen=True)
class Policy:
    """The bounds.

    ``max_restarts`` counts faults. ``stuck_limit`` attempts in a row that end without a
    step further than any before end the job, where progress is known. ``settled`` seconds
    count as "it had got going" where progress is unknown. Back-off in seconds: none for
    the first restart after progress, then ``backoff``, doubled each time up to
    ``backoff_limit``. A status of ``never`` (as a shell tells it: 137 for SIGKILL) is not
    tried again; one of ``always`` is, even where it would not come right by itself.
    """

    max_restarts: int = 3
    stuck_limit: int = 3
    settled: float = 30.0
    backoff: float = 1.0
    backoff_limit: float = 60.0
    never: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """``restart`` after ``delay`` seconds, or not; ``reason`` is a clause for a person."""

    restart: bool
    delay: float = 0.0
    reason: str = ""


def _progressed(attempt: Attempt, best_before: int | None, policy: Policy) -> bool:
    if attempt.last_step is not None:
        return best_before is None or attempt.last_step > best_before
    return attempt.lasted >= policy.settled


def decide(policy: Policy, attempts: Sequence[Attempt]) -> Verdict:
    """Decide after the last of ``attempts`` (all attempts of the job, oldest first).

    Raises:
        ValueError: there is no attempt.
    """
    if not attempts:
        raise ValueError("nothing has failed yet: there is no attempt to judge")
    last = attempts[-1]
    restarts = len(attempts) - 1

    moved = last.last_step is not None or last.lasted >= policy.settled
    code = last.returncode
    status = 128 - code if code is not None and code < 0 else code
    if status in policy.never:
        return Verdict(False, reason=f"exit code {status} is not retried (--no-retry-exit-codes)")
    if not moved and status not in policy.always:
        if last.exception in NEVER_COMES_RIGHT:
            return Verdict(False, reason=f"{last.exception} before any progress is not retried")
        if last.returncode == 2:
            return Verdict(False, reason="exit code 2 before any progress is not retried")
        if last.returncode in (126, 127):
            return Verdict(False, reason="the program cannot be run")

    if restarts >= policy.max_restarts:
        if policy.max_restarts == 0:
            return Verdict(False, reason="no restarts are allowed (--max-restarts 0)")
        return Verdict(False, reason=f"all {policy.max_restarts} restarts are used")

    best: int | None = None
    idle = 0  # attempts in a row, up to the last, that got no further
    for attempt in attempts:
        if _progressed(attempt, best, policy):
            idle = 0
        else:
            idle += 1
        if attempt.last_step is not None:
            best = attempt.last_step if best is None else max(best, attempt.last_step)
    if best is not None and idle >= policy.stuck_limit:
        return Verdict(False, reason=f"{idle} attempts in a row got no further than step {best}")
    if idle <= 1:
        return Verdict(True)
    return Verdict(True, min(policy.backoff * 2 ** (idle - 2), policy.backoff_limit))
