"""What a survivor holds after many recoveries."""

from __future__ import annotations

import os
import statistics

import pytest

from phalanx.recovery.ladder import Policy

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(
        os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: PHALANX_SLOW_TESTS=1 runs it"
    ),
]
COUNT = 100


@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["ddp", "hybrid"])
def test_memory_descriptors_and_threads_stay_flat(train, model: str) -> None:
    """Rank 1 is killed at every step; rank 0 goes through all of it."""
    faults = [
        {
            "rank": 1,
            "step": step,
            "where": "backward",
            "kind": "kill",
            "incarnation": "any",
            "once": str(step),
        }
        for step in range(1, COUNT + 1)
    ]
    world = 4 if model == "hybrid" else 2
    run = train(
        world,
        timeout=300,
        policy=Policy(in_place=10 * COUNT),
        model=model,
        steps=COUNT + 2,
        resources=True,
        faults=faults,
    )
    assert len(run.ends[0]["recoveries"]) == COUNT
    lines = [line for line in run.traces[0] if line["step"] > COUNT // 3]
    early, late = lines[: len(lines) // 3], lines[-len(lines) // 3 :]

    def grown(what: str) -> float:
        middle = [statistics.median(line[what] for line in part) for part in (early, late)]
        return middle[1] - middle[0]

    assert grown("descriptors") <= 0
    assert grown("threads") <= 0
    each = grown("own") / (late[0]["step"] - early[0]["step"])
    print(f"{model}: {each:.1f} kB more for each recovery, {late[-1]['own']} kB after {COUNT}")
    assert each < 64, "kB for each recovery"
