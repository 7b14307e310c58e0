"""Ranks die; the others keep their processes; the result is that of a run without a fault."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch]

KILL = {"step": 4, "kind": "kill"}


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (2, "data"),
        (0, "forward"),
        (2, "mid-backward"),
        (0, "backward"),
        (1, "before-update"),
        (3, "update"),
        (0, "after-update"),
        (2, "between"),
    ],
)
def test_killed_rank_is_replaced(train, undisturbed, rank, where):
    faults = [{**KILL, "rank": rank, "where": where}]
    run = train(faults=faults)
    run.same_as(undisturbed())
    assert run.agent.generation == 2
