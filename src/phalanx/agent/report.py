"""What a person reads about a failure: the root cause first, its victims in one line. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.recovery import blame, policy


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker of the group ended.

    ``dead_ns`` is when its death was known (monotonic nanoseconds), None while it lives.
    ``returncode`` as subprocess has it. ``stopped`` says that we signalled it before it
    died. ``raised_ns`` is when its exception was raised by the worker's own clock
    (wall nanoseconds); only the order of two workers of one machine is read from it.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    returncode: int | None
    dead_ns: int | None
    stopped: bool = False
    exception: str | None = None
    traceback: str = ""
    stderr_tail: Sequence[str] = field(default_factory=tuple)
    log_file: str = ""
    step: int | None = None
    lasted: float = 0.0
    memory: str | None = None
    hung: str | None = None

    @property
    def failed(self) -> bool:
        return self.returncode not in (0, None) or self.hung is not None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def looks_like_victim(end: WorkerEnd) -> bool:
    """Whether its exception is what a rank raises when another one is gone."""
    return policy.is_echo(end.returncode, end.exception)


def root_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """The worker to blame, of those that failed and were not stopped by us. None: no worker is."""
    failed = [e for e in ends if e.failed and not e.stopped]

    def order(end: WorkerEnd) -> tuple[int, int, int]:
        return blame.order(
            blame.Failure(
                end.returncode, end.dead_ns or 0, hung=bool(end.hung), exception=end.exception
            )
        )

    return min(failed, key=order, default=None)


def how(end: WorkerEnd) -> str:
    """``was killed by SIGKILL``, ``exited with code 7``, ``raised ValueError: x``."""
    if end.hung:
        return end.hung
    code = end.returncode
    if code is None:
        return "is still running"
    if code < 0:
        by_us = " sent by phalanx" if end.stopped else ""
        return f"was killed by {signal_name(-code)}{by_us}"
    if end.exception and code != 0:
        first = end.exception.strip().splitlines()[0] if end.exception.strip() else "an exception"
        return f"raised {first[:300]}"
    return f"exited with code {code}"


def describe(end: WorkerEnd) -> str:
    """One line for the root cause."""
    where = f", at step {end.step}" if end.step is not None else ""
    line = (
        f"rank {end.rank} (local rank {end.local_rank}, pid {end.pid}, {end.host}) {how(end)}"
        f"{where}, {end.lasted:.1f} s after its start"
    )
    return line + (f"; {end.memory}" if end.memory else "")


def victims(ends: Sequence[WorkerEnd], root: WorkerEnd | None) -> str | None:
    """One line for the others, or None when there is nothing to say."""
    others = [e for e in ends if e is not root]
    if not others:
        return None
    parts = []
    for label, group in (
        ("stopped", [e for e in others if e.stopped]),
        ("lost their peer", [e for e in others if not e.stopped and looks_like_victim(e)]),
        (
            "failed too",
            [e for e in others if e.failed and not e.stopped and not looks_like_victim(e)],
        ),
        ("had finished", [e for e in others if e.returncode == 0 and not e.stopped]),
    ):
        if group:
            parts.append(f"{ranges([e.rank for e in group])} {label}")
    return "other ranks: " + ", ".join(parts) if parts else None


def ranges(numbers: Sequence[int]) -> str:
    """``0-2, 5`` for [0, 1, 2, 5]."""
    out: list[str] = []
    run: list[int] = []
    for number in sorted(set(numbers)):
        if run and number == run[-1] + 1:
            run.append(number)
            continue
        if run:
            out.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
        run = [number]
    if run:
        out.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(out)


def evidence(end: WorkerEnd, lines: int = 12) -> list[str]:
    """The last lines that say why: the traceback's end, else what it wrote to stderr."""
    source = end.traceback.splitlines() if end.traceback.strip() else list(end.stderr_tail)
    shown = [line.rstrip() for line in source if line.strip()][-lines:]
    if end.returncode is not None and end.returncode < 0 and end.stopped:
        return []
    return [f"  | {line[:500]}" for line in shown]
