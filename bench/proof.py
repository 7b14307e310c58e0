"""Does training go on as if nothing had happened? A table.

Each row runs a small training job on 4 real worker processes with a fault at one place, and
compares with the same job without a fault, bit for bit: the loss of every step on every rank,
the gradients of every step, the final weights and buffers. The model's modules run in another
order than they are defined in, it has batch norm and dropout, and its data is shuffled and
augmented with random numbers.

    python bench/proof.py [--only TEXT] [--out bench/results/proof.json]

The workers are started by the small agent of tests/training (the messages are those of
docs/training.md). Exit status 1 if any row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "training"))

import small_agent  # noqa: E402

from phalanx.recovery.ladder import Policy, Strategy  # noqa: E402

WORLD = 4
STEP = 4
DDP = {"model": "ddp"}
BUCKETS = {"model": "ddp", "cap": 0.001}
HYBRID = {"model": "hybrid"}
FULL = {"model": "fsdp"}


@dataclass(frozen=True)
class Row:
    model: str
    what: str
    spec: dict[str, Any]
    faults: tuple[dict[str, Any], ...]
    strategy: str = Strategy.IN_PLACE.value
    drive: Callable[[Any], None] | None = None
    policy: Policy | None = None
    like: dict[str, Any] = field(default_factory=dict)


def kill(rank: int, where: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": STEP, "where": where, "kind": "kill", **more}


def stopped(rank: int) -> Callable[[Any], None]:
    """The rank is stopped, not dead: the order to kill it comes from outside."""

    def drive(agent: Any) -> None:
        agent.run_until((agent.folder / f"fault-{rank}-0").exists)
        os.kill(agent.workers[rank].pid, signal.SIGKILL)

    return drive


def rows() -> Iterator[Row]:
    places = ["data", "forward", "mid-backward", "backward", "before-update", "update"]
    places += ["after-update", "between"]
    for name, spec in (("DDP", DDP), ("DDP, several buckets", BUCKETS), ("FSDP2 2x2", HYBRID)):
        for rank in (0, 2):
            for where in places:
                yield Row(name, f"SIGKILL, {where}, rank {rank}", spec, (kill(rank, where),))
        yield Row(
            name,
            "SIGKILL, in the collective, rank 2",
            spec,
            (
                {"rank": 2, "step": STEP, "where": "collective", "kind": "kill-soon"},
                {"rank": 1, "step": STEP, "where": "collective", "kind": "sleep", "seconds": 0.2},
            ),
        )
        for kind in ("device", "network"):
            yield Row(
                name,
                f"{kind} error, backward, rank 1",
                spec,
                ({"rank": 1, "step": STEP, "where": "backward", "kind": kind},),
                Strategy.RETRY.value,
            )
        yield Row(
            name,
            "SIGSTOP, backward, rank 3",
            spec,
            ({"rank": 3, "step": STEP, "where": "backward", "kind": "stop"},),
            drive=stopped(3),
        )
        yield Row(
            name,
            "SIGKILL, first step, rank 1",
            spec,
            ({"rank": 1, "step": 0, "where": "mid-backward", "kind": "kill"},),
        )
        yield Row(
            name,
            "SIGKILL, second step, data, rank 1",
            spec,
            ({"rank": 1, "step": 1, "where": "data", "kind": "kill"},),
        )
        yield Row(
            name,
            "SIGKILL, 2 ranks at once",
            spec,
            (kill(0, "mid-backward"), kill(3, "mid-backward")),
        )
        for where, life, rank in (
            ("join", 1, 2),
            ("repair", 1, 2),
            ("repair", 0, 1),
            ("receive", 1, 2),
            ("send", 0, 0),
        ):
            who = "replacement" if life else f"rank {rank}"
            # On the 2x2 mesh ranks 0 and 2 are the only holders of their shard: nothing is left.
            gone = name.startswith("FSDP2") and where == "send"
            yield Row(
                name,
                f"SIGKILL, then {who} in recovery ({where})",
                spec,
                (
                    kill(2, "mid-backward"),
                    {"rank": rank, "step": 0, "where": where, "kind": "kill", "incarnation": life},
                ),
                (Strategy.RESTART if gone else Strategy.IN_PLACE).value,
            )
        yield Row(
            name,
            "SIGKILL of rank 0 while it saves",
            {**spec, "checkpoint": 2},
            ({"rank": 0, "step": 3, "where": "commit", "kind": "kill"},),
            like={"checkpoint": None},
        )
    yield Row(
        "DDP",
        "SIGKILL, after-update, collective after it",
        {**DDP, "tail": True},
        (kill(1, "after-update"),),
    )
    yield Row(
        "FSDP2 1x4",
        "SIGKILL, no replica, snapshot each 2 steps",
        {**FULL, "session": {"snapshot_every": 2}},
        (kill(3, "backward"),),
    )
    yield Row(
        "FSDP2 1x4",
        "SIGKILL, no replica, nothing kept",
        FULL,
        (kill(3, "backward"),),
        Strategy.RESTART.value,
    )
    for name, spec in (("DDP", DDP), ("FSDP2 2x2", HYBRID)):
        yield Row(
            name,
            "SIGKILL, restart from the checkpoint",
            {**spec, "checkpoint": 2},
            (kill(1, "backward"),),
            Strategy.RESTART.value,
            policy=Policy(enabled=frozenset({Strategy.RESTART})),
            like={"checkpoint": None},
        )


def outcome(folder: Path) -> tuple[dict[int, dict[int, Any]], dict[int, str]]:
    traces: dict[int, dict[int, Any]] = {}
    weights: dict[int, str] = {}
    for rank in range(WORLD):
        lines = (folder / f"trace-{rank}.jsonl").read_text().splitlines()
        traces[rank] = {}
        for line in map(json.loads, lines):
            traces[rank].setdefault(line["step"], []).append((line["loss"], line["grads"]))
        weights[rank] = json.loads((folder / f"end-{rank}").read_text())["weights"]
    return traces, weights


def same(mine: Any, other: Any) -> dict[str, bool]:
    traces, weights = mine
    losses = gradients = True
    for rank, steps in other[0].items():
        for step, done in steps.items():
            for loss, grads in traces[rank].get(step, []):
                losses &= loss == done[0][0]
                gradients &= grads == done[0][1]
    return {"losses": losses, "gradients": gradients, "weights": weights == other[1]}


def run(nursery: Any, row: Row | None, spec: dict[str, Any]) -> tuple[Any, Path]:
    folder = Path(tempfile.mkdtemp(prefix="phalanx-proof-"))
    faults = [] if row is None else [dict(fault) for fault in row.faults]
    policy = None if row is None else row.policy
    agent = small_agent.Agent(nursery, WORLD, {**spec, "faults": faults}, folder, policy=policy)
    try:
        agent.start()
        if row is not None and row.drive is not None:
            row.drive(agent)
        agent.run(120)
    finally:
        agent.close()
    return agent, folder


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="rows whose name has this text")
    options.add_argument("--out", default=str(ROOT / "bench" / "results" / "proof.json"))
    options = options.parse_args()
    nursery = small_agent.Nursery()
    undisturbed: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    print(f"{'model':22} {'fault':46} {'strategy':26} loss grad weights  lost  seconds")
    for row in rows():
        if options.only not in f"{row.model} {row.what}":
            continue
        spec = {k: v for k, v in {**row.spec, **row.like}.items() if v is not None}
        key = json.dumps(spec, sort_keys=True)
        if key not in undisturbed:
            _, folder = run(nursery, None, spec)
            undisturbed[key] = outcome(folder)
            shutil.rmtree(folder)
        result: dict[str, Any] = {"model": row.model, "fault": row.what}
        try:
            agent, folder = run(nursery, row, row.spec)
        except TimeoutError as error:
            result["error"] = str(error)[:4000]
            print(f"{row.model:22} {row.what:46} DID NOT END")
        else:
            taken = [decision.strategy.value for decision in agent.decisions]
            result |= same(outcome(folder), undisturbed[key])
            result["strategies"] = taken
            result["as_expected"] = bool(taken) and taken[-1] == row.strategy
            marks = [float(p.read_text()) for p in folder.glob("fault-*")]
            last = max(agent.good_at, default=None)
            result["seconds"] = round(agent.good_at[last] - min(marks), 4) if last else None
            reports = agent.reports(last) if last else {}
            result["lost_steps"] = max((r["lost_steps"] for r in reports.values()), default=None)
            result["origin"] = sorted({r["origin"] for r in reports.values()})
            shutil.rmtree(folder)
            words = [
                "same" if result[part] else "DIFF" for part in ("losses", "gradients", "weights")
            ]
            print(
                f"{row.model:22} {row.what:46} {' '.join(taken):26} {words[0]:4} {words[1]:4} "
                f"{words[2]:7} {result['lost_steps']!s:>5}  {result['seconds']!s:>7}"
                + ("" if result["as_expected"] else f"  expected {row.strategy}"),
                flush=True,
            )
        results.append(result)
    nursery.close()
    good = sum(
        bool(r.get("losses") and r.get("gradients") and r.get("weights") and r["as_expected"])
        for r in results
    )
    print(f"\n{good} of {len(results)} rows as an undisturbed run")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(
        json.dumps(
            {"when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), "rows": results},
            indent=1,
        )
    )
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
