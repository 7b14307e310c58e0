"""Random faults at random moments of small training jobs under ``phalanx run``.

    python bench/chaos.py [--minutes 10] [--seed 1] [--job N]

Workers are killed, stopped (the agent has to find out that they hang), made to raise errors
that a new try may cure and ones that it may not; in each part of a step, at any moment, and in
the recovery from another fault; rank 0 like any other, two at once too. Each job must end with
the losses, gradients and weights of a run that nothing happened to, bit for bit, and leave no
process, no file and no shared memory behind.

The same seed gives the same jobs and the same faults: ``--job N`` makes one of them again.
Exit status 1 if anything is wrong; the folder of a bad job is kept and named.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

import jobs

WORLD, STEPS = 4, 16
IN_STEP = ["data", "forward", "mid-backward", "backward", "before-update", "update"]
AROUND = ["after-update", "between"]
IN_RECOVERY = ["join", "repair", "receive", "send"]
ENDS = ["kill", "kill", "kill", "stop", "bug", "memory"]
CURED = ["device", "network"]
WORDS = ("--max-restarts", "12", "--hang-timeout", "4", "--shutdown-timeout", "5")


def job(number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is trained in this job, and what goes wrong. Depends on the number only."""
    chance = random.Random(number)
    spec: dict[str, Any] = {
        "model": chance.choice(["ddp", "hybrid"]),
        "cap": chance.choice([25, 0.001]),
        "steps": STEPS,
        "pause": 0.01,
    }
    spec |= chance.choice([{}, {"checkpoint": 4}, {"session": {"snapshot_every": 3}}])
    faults = [fault for _ in range(chance.randint(1, 4)) for fault in some(chance)]
    for index, fault in enumerate(faults):
        fault |= {"once": str(index)}
    return spec, faults


def some(chance: random.Random) -> list[dict[str, Any]]:
    """One fault; two when two ranks are hit at once, or one in the recovery from another."""
    step = chance.randrange(STEPS)
    first, second = chance.sample(range(WORLD), 2)
    shape = chance.choice(["place", "place", "moment", "moment", "both", "recovery"])
    fault: dict[str, Any] = {"rank": first, "step": step, "incarnation": "any"}
    if shape == "moment":
        kind = chance.choice(["kill-soon", "kill-soon", "stop-soon"])
        after = round(chance.uniform(0, 0.05), 4)
        return [fault | {"where": "data", "kind": kind, "seconds": after}]
    where = chance.choice(IN_STEP if shape == "recovery" else IN_STEP + AROUND)
    kinds = ENDS + CURED if where in IN_STEP else ["kill", "stop"]
    if shape == "recovery":
        rank = chance.choice([first, second])
        meanwhile = {"rank": rank, "step": 0, "incarnation": "any", "kind": "kill"}
        fault |= {"where": where, "kind": "kill"}
        return [fault, meanwhile | {"where": chance.choice(IN_RECOVERY)}]
    fault |= {"where": where, "kind": chance.choice(kinds)}
    if shape == "both":
        return [fault, fault | {"rank": second, "kind": "kill"}]
    return [fault]


def words_of(faults: list[dict[str, Any]]) -> str:
    parts = []
    for f in faults:
        when = f"+{1e3 * f['seconds']:.0f} ms" if "seconds" in f else f["where"]
        place = f"{f['where']} in recovery" if f["where"] in IN_RECOVERY else f"{f['step']} {when}"
        parts.append(f"{f['kind'].removesuffix('-soon')} rank {f['rank']} at {place}")
    return ", ".join(parts)


def wrong(ended: jobs.Ended, calm: jobs.Outcome) -> list[str]:
    """What is not as it should be."""
    if ended.status is None:
        return ["it did not end"]
    found = [*ended.left]
    if ended.status:
        return [f"exit status {ended.status}", *found]
    try:
        like = jobs.Outcome.of(ended.folder, WORLD).like(calm)
    except OSError as error:
        return [f"a rank did not come to its end: {error}", *found]
    return [f"{what} differ" for what, same in like.items() if not same] + found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", type=int, help="only this one")
    options = parser.parse_args()
    calm = jobs.Undisturbed(WORLD)
    end = time.monotonic() + 60 * options.minutes
    number = options.seed * 100_000
    total: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    slowest = 0.0
    while time.monotonic() < end:
        number = options.job if options.job is not None else number + 1
        spec, faults = job(number)
        plain = {k: v for k, v in spec.items() if k not in ("checkpoint", "session")}
        expected = calm.get(plain)
        ended = jobs.run({**spec, "faults": faults}, WORLD, words=WORDS)
        bad = wrong(ended, expected)
        happened = len(list(ended.folder.glob("once-*")))
        done = Counter(ended.strategies)
        total += done
        total["jobs"] += 1
        total["bad"] += bool(bad)
        total["faults"] += happened
        struck += Counter(f["kind"].removesuffix("-soon") for f in faults)
        slowest = max(slowest, ended.seconds)
        print(
            f"job {number} {spec['model']:6} {ended.seconds:5.1f} s  "
            f"{'BAD' if bad else 'same'}  {happened} of {len(faults)} faults: {words_of(faults)}  "
            f"-> {', '.join(f'{n} {name}' for name, n in sorted(done.items())) or 'nothing'}",
            flush=True,
        )
        if bad:
            print(f"  {'; '.join(bad)}\n  {spec}\n  {faults}\n  {ended.folder}", flush=True)
        else:
            ended.tidy()
        if options.job is not None:
            break
    print(f"\nseed {options.seed}: {total['jobs']} jobs, {total['faults']} faults happened")
    print(f"planned: {', '.join(f'{n} {kind}' for kind, n in sorted(struck.items()))}")
    for name in ("retry", "recover-in-place", "restart", "exit"):
        print(f"{name:18} {total[name]:5}")
    print(f"slowest job        {slowest:5.0f} s")
    print(f"not as the undisturbed run, or something left behind: {total['bad']}")
    return 1 if total["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
