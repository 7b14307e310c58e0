"""Hosts in network namespaces: ``cluster(3)`` makes three."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hosts


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """``cluster(3)``: three hosts, taken away at the end."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    from cluster import Cluster

    made: list[Cluster] = []

    def make(count: int) -> Cluster:
        made.append(Cluster(count, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()
