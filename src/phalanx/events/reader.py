"""Reading the events record: one stream from the files of all processes."""

from __future__ import annotations

import glob
import heapq
import json
import os
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["files", "read"]

_LINE_LIMIT = 1 << 20


def files(path: str | os.PathLike[str]) -> list[str]:
    """``path`` and the files that other processes wrote beside it (``path.<host>.<pid>``)."""
    base = os.fspath(path)
    # The same agent's forks add their own suffix to an own suffix: any number of them.
    beside = re.compile(re.escape(base) + r"\..+\.\d+")
    found = [name for name in glob.glob(glob.escape(base) + ".*") if beside.fullmatch(name)]
    return ([base] if os.path.exists(base) else []) + sorted(found)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of ``path`` and of the files beside it, by wall time.

    Within one file the order is that of the file, even if the clock was set back. Lines that
    are no events (the last one of a process that was killed while writing) are left out.
    Raises FileNotFoundError if there is no such file at all, OSError if one cannot be read.
    """
    names = files(path)
    if not names:
        raise FileNotFoundError(f"no events record at {os.fspath(path)!r}")
    for _, _, _, event in heapq.merge(*(_numbered(i, name) for i, name in enumerate(names))):
        yield event


def _numbered(number: int, name: str) -> Iterator[tuple[float, int, int, dict[str, Any]]]:
    latest = float("-inf")
    with open(name, "rb") as f:
        index = 0
        while line := f.readline(_LINE_LIMIT):
            try:
                event = json.loads(line)
                wall = float(event["wall"])
                if wall != wall:
                    raise ValueError("NaN is no time")
                latest = max(latest, wall)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            index += 1
            yield latest, number, index, event
