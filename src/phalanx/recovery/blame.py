"""Which of several failed workers was the cause. Pure; whoever blames one asks here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.recovery.policy import is_echo

NOTICED_LATE_NS = 100_000_000
"""By how much the death of a crash may be known later than what it causes, nanoseconds."""

# By number: the signals of Linux, on every architecture.
_CRASHES = frozenset((9, 11, 7, 4, 8, 31))  # KILL SEGV BUS ILL FPE SYS
"""They hardly ever follow from another worker's failure. What they cause does follow within
microseconds, and may be noted before the death itself has been noticed."""
_REQUESTS = frozenset((15, 2, 1))  # TERM INT HUP


class Failure(NamedTuple):
    """One worker that failed.

    ``returncode`` as subprocess has it; ``at_ns``: when it failed, as well as it is known, in
    nanoseconds of a clock that all of them share; ``stopped``: it was signalled by us before;
    ``hung``: we found it hanging; ``exception``: the last line of its traceback.
    """

    returncode: int | None
    at_ns: int
    stopped: bool = False
    hung: bool = False
    exception: str | None = None


def order(failure: Failure) -> tuple[int, int, int]:
    """A key by which the cause is the smallest.

    First one that hung; then those whose end is not the echo of another's, then those whose is;
    last whoever we stopped. Among equals the earliest, a crash being noticed a little late. At
    the same time a crash is a cause, an exception may be its consequence, and an ending on
    request is one.
    """
    if failure.hung:
        group = 0
    elif failure.stopped:
        group = 3
    else:
        group = 2 if is_echo(failure.returncode, failure.exception) else 1
    code = failure.returncode
    if code is None or code >= 0:
        return group, failure.at_ns, 1
    if -code in _CRASHES:
        return group, failure.at_ns - NOTICED_LATE_NS, 0
    return group, failure.at_ns, 2 if -code in _REQUESTS else 0


_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*")


def exception_in(lines: Sequence[str]) -> str | None:
    """The exception that the last traceback in these lines ends with, if there is one."""
    at = max((i for i, line in enumerate(lines) if line.startswith("Traceback (")), default=None)
    if at is None:
        return None
    for line in lines[at + 1 :]:
        if line and not line.startswith(" ") and _EXCEPTION.match(line):
            return line
    return None
