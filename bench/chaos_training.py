"""Random faults at random moments of small training jobs; each ends as the undisturbed run.

    python bench/chaos_training.py [--minutes 3] [--seed 1]

The same seed gives the same jobs with the same faults. Exit status 1 if a result differs or a
job does not end; what is needed to see it again is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from typing import Any

import proof

from phalanx.recovery.ladder import Policy

IN_STEP = ["data", "forward", "mid-backward", "backward", "before-update", "update"]
AROUND = ["after-update", "between"]
IN_RECOVERY = ["join", "repair", "receive", "send"]


def job(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is trained, and what goes wrong."""
    chance = random.Random(seed)
    spec = {
        "model": chance.choice(["ddp", "ddp", "hybrid"]),
        "cap": chance.choice([25, 0.001]),
        "steps": 10,
    }
    faults = []
    for _ in range(chance.randint(1, 4)):
        where = chance.choice(IN_STEP + AROUND + IN_RECOVERY)
        kinds = ["kill", "kill", "device"] if where in IN_STEP else ["kill"]
        faults.append(
            {
                "rank": chance.randrange(proof.WORLD),
                "step": 0 if where in IN_RECOVERY else chance.randrange(10),
                "where": where,
                "kind": chance.choice(kinds),
                "incarnation": chance.choice([0, 0, 0, 1]),
            }
        )
    return spec, faults


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=3.0)
    options.add_argument("--seed", type=int, default=1)
    options = options.parse_args()
    nursery = proof.small_agent.Nursery()
    undisturbed: dict[str, Any] = {}
    end = time.monotonic() + 60 * options.minutes
    seed, done, bad = options.seed * 100_000, 0, 0
    while time.monotonic() < end:
        seed += 1
        done += 1
        spec, faults = job(seed)
        row = proof.Row(
            spec["model"], "chaos", spec, tuple(faults), policy=Policy(same_step=8, restarts=5)
        )
        key = json.dumps(spec)
        try:
            if key not in undisturbed:
                _, folder = proof.run(nursery, None, spec)
                undisturbed[key] = proof.outcome(folder)
                shutil.rmtree(folder)
            _, folder = proof.run(nursery, row, spec)
            result = proof.same(proof.outcome(folder), undisturbed[key])
        except (OSError, TimeoutError) as error:
            result, folder = {"ended": False}, str(error)[:4000]
        if all(result.values()):
            shutil.rmtree(folder)
        else:
            bad += 1
            print(f"job {seed}: {result} {spec} {faults}\n{folder}", flush=True)
    nursery.close()
    print(f"{done} jobs, {bad} not as the undisturbed run")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
