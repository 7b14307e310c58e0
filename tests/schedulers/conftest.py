"""A real Slurm, once for all tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import slurm_cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_cluster.Slurm]:
    """Three nodes and a controller."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.Slurm() as cluster:
        yield cluster
