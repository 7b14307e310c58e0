"""Does training go on as if nothing had happened? A table.

Each row runs a small training job on 4 workers under ``phalanx run`` with a fault at one place,
and compares with the same job without a fault, bit for bit: the loss of every step on every rank,
the gradients of every step (that of the first common step among them), the final weights and
buffers; each fault must have come to pass (a row whose fault never struck proves nothing), and
nothing may be left behind. The model's modules run in another order than they are
defined in, it has batch norm and dropout, and its data is shuffled and augmented with random
numbers.

    python bench/proof.py [--only TEXT] [--jobs 2] [--out bench/results/proof.json]

Lightning and Hugging Face need their libraries (``make .venv-libraries/.made``); without, their
rows are left out and it says so. Exit status 1 if any row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs

ROOT = jobs.HERE.parent
LIBRARIES = ROOT / ".venv-libraries" / "bin" / "python"
WORLD = 4
STEP = 4
RETRY, IN_PLACE, RESTART = "retry", "recover-in-place", "restart"
# What is done last, in words of `jobs.Ended.strategies`. After the latter two a second run goes on.
DUMP_RESTART, DUMP_EXIT, STOP = "dump restart", "dump exit", "stop"
DDP = {"model": "ddp"}
BUCKETS = {"model": "ddp", "cap": 0.001}
HYBRID = {"model": "hybrid"}
FULL = {"model": "fsdp"}


@dataclass(frozen=True)
class Row:
    """``like``: what is different in the undisturbed run (None: left out of it). ``again``: the
    job ends by its fault, and a second run without one goes on."""

    model: str
    what: str
    spec: dict[str, Any]
    faults: tuple[dict[str, Any], ...]
    strategy: str = IN_PLACE
    words: tuple[str, ...] = ()
    like: dict[str, Any] = field(default_factory=dict)
    again: bool = False


def kill(rank: int, where: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": STEP, "where": where, "kind": "kill", **more}


def rows() -> Iterator[Row]:
    places = ["data", "forward", "mid-backward", "backward", "before-update", "update"]
    places += ["after-update", "between"]
    for name, spec in (("DDP", DDP), ("DDP, several buckets", BUCKETS), ("FSDP2 2x2", HYBRID)):
        for rank in (2,) if spec is BUCKETS else (0, 2):
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
                RETRY,
            )
        yield Row(
            name,
            "SIGSTOP, backward, rank 3",
            spec,
            ({"rank": 3, "step": STEP, "where": "backward", "kind": "stop"},),
            words=("--hang-timeout", "step=3"),
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
                RESTART if gone else IN_PLACE,
            )
        for where, rank in (("save", 0), ("save", 2), ("written", 2), ("commit", 0)):
            yield Row(
                name,
                f"SIGKILL of rank {rank} in a checkpoint ({where})",
                {**spec, "checkpoint": 2},
                ({"rank": rank, "step": 3, "where": where, "kind": "kill"},),
                like={"checkpoint": None},
            )
        if spec is not BUCKETS:
            yield from _resumed(name, spec)
    yield Row(
        "DDP",
        "SIGKILL, after-update, collective after it",
        {**DDP, "tail": True},
        (kill(1, "after-update"),),
    )
    yield Row(
        "FSDP2 1x4",
        "device error, backward, rank 1",
        FULL,
        ({"rank": 1, "step": STEP, "where": "backward", "kind": "device"},),
        RETRY,
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
        RESTART,
    )
    yield Row(
        "DDP",
        "endless forward, rank 1 (no signal stops it)",
        DDP,
        ({"rank": 1, "step": STEP, "where": "forward", "kind": "sleep", "seconds": 600},),
        words=("--hang-timeout", "step=3"),
    )
    for name, spec in (("DDP", DDP), ("FSDP2 2x2", HYBRID)):
        yield Row(
            name,
            "SIGKILL of all 4, from the checkpoint",
            {**spec, "checkpoint": 2},
            tuple(kill(rank, "backward") for rank in range(WORLD)),
            RESTART,
            like={"checkpoint": None},
        )


def _resumed(name: str, spec: dict[str, Any]) -> Iterator[Row]:
    """The state is written down when nothing else is left, or when the job is told to stop."""
    kept = {**spec, "checkpoint": 1000}
    fault = {"rank": 1, "step": STEP, "where": "forward", "kind": "device", "always": True}
    fault |= {"incarnation": "any"}
    like = {"checkpoint": None}
    yield Row(
        name,
        "device error that no try cures, dump, restart",
        kept,
        ({**fault, "attempt": 0},),
        DUMP_RESTART,
        like=like,
    )
    yield Row(
        name,
        "the same, dump, exit, another run",
        kept,
        (fault,),
        DUMP_EXIT,
        ("--max-restarts", "0"),
        like,
        again=True,
    )
    yield Row(
        name,
        "SIGTERM of the agent, stop, another run",
        {**kept, "steps": 80, "pause": 0.05},
        ({"rank": 0, "step": STEP, "where": "forward", "kind": "stop-job"},),
        STOP,
        like={**like, "pause": None},
        again=True,
    )


class Bench:
    """Runs rows; several at once, and each kind of undisturbed run only once."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._calm = jobs.Undisturbed(WORLD)

    def calm(self, spec: dict[str, Any]) -> jobs.Outcome:
        lock = self._locks.setdefault(json.dumps(spec, sort_keys=True), threading.Lock())
        with lock:
            return self._calm.get(spec)

    def run(self, row: Row) -> dict[str, Any]:
        expected = self.calm({k: v for k, v in {**row.spec, **row.like}.items() if v is not None})
        result: dict[str, Any] = {"model": row.model, "fault": row.what}
        faults = [dict(fault) for fault in row.faults]
        ended = jobs.run({**row.spec, "faults": faults}, WORLD, words=row.words)
        result["left"] = ended.left
        result["strategies"] = taken = ended.strategies
        due = {(fault["rank"], fault.get("incarnation", 0)) for fault in faults}
        wanted = {(rank, 0 if life == "any" else life) for rank, life in due}
        result["never_struck"] = sorted(wanted - ended.struck())
        last = " ".join(taken[-len(row.strategy.split()) :])
        result["as_expected"] = (
            last == row.strategy and not ended.left and not result["never_struck"]
        )
        try:
            if (ended.status == 0) is row.again:
                raise OSError(f"exit status {ended.status}")
            if row.again:
                ended = jobs.run(row.spec, WORLD, folder=ended.folder)
                result["left"] += ended.left
                result["as_expected"] &= not ended.left
                if ended.status != 0:
                    raise OSError(f"exit status {ended.status} of the second run")
            result |= jobs.Outcome.of(ended.folder, WORLD).like(expected)
        except OSError as error:
            result["error"] = f"{error}\n{ended.text[-4000:]}"
            return result
        result["seconds"] = ended.after_fault()
        reports = ended.reports()
        result["lost_steps"] = max((r["lost_steps"] for r in reports), default=None)
        result["origin"] = sorted({r["origin"] for r in reports})
        ended.tidy()
        return result


def library(name: str) -> dict[str, Any]:
    """SIGKILL of rank 1 in a library's own loop: final weights as without."""
    weights, taken, seconds = [], [], None
    for fault in ("", "kill:1:8"):
        folder = Path(tempfile.mkdtemp(prefix="phalanx-job-"))
        env = jobs.environment(folder, "")
        env |= {"TEST_OUT": str(folder), "FAULT": fault, "HF_HUB_OFFLINE": "1"}
        command = [str(LIBRARIES), "-m", "phalanx", "run", "--nproc-per-node", "2"]
        command += ["--events", str(folder / "events.jsonl"), "--log-dir", str(folder / "logs")]
        command += [str(ROOT / "tests" / "libraries" / f"programs_{name}.py")]
        ended = jobs.watch(command, env, folder, "", 300)
        taken = ended.strategies
        again = [event["data"]["seconds"] for event in ended.of("recovered")]
        seconds = round(again[-1], 4) if again else None
        weights.append([(folder / f"end-{rank}").read_text() for rank in (0, 1)])
        ended.tidy()
    return {
        "model": name,
        "fault": "SIGKILL, step 8, rank 1",
        "weights": weights[0] == weights[1],
        "strategies": taken,
        "as_expected": taken == [IN_PLACE if name == "accelerate" else RESTART],
        "seconds": seconds,
    }


def line(result: dict[str, Any]) -> str:
    words = [
        {True: "same", False: "DIFF", None: "-"}[result.get(part)]
        for part in ("losses", "gradients", "weights")
    ]
    return (
        f"{result['model']:22} {result['fault']:46} {' '.join(result['strategies']):26} "
        f"{words[0]:4} {words[1]:4} {words[2]:7} {result.get('lost_steps')!s:>5}  "
        f"{result.get('seconds')!s:>7}"
        + ("" if result["as_expected"] else "  NOT AS EXPECTED")
        + (f" left: {result['left']}" if result.get("left") else "")
        + (f" never struck: {result['never_struck']}" if result.get("never_struck") else "")
        + (f"  {result['error']}" if "error" in result else "")
    )


def good(result: dict[str, Any]) -> bool:
    parts = [result.get(part) for part in ("losses", "gradients", "weights")]
    return bool(parts[2]) and False not in parts and result["as_expected"]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="rows whose name has this text")
    options.add_argument("--jobs", type=int, default=2, help="so many at once")
    options.add_argument("--out", default=str(ROOT / "bench" / "results" / "proof.json"))
    options = options.parse_args()
    results: list[dict[str, Any]] = []
    print(f"{'model':22} {'fault':46} {'strategy':26} loss grad weights  lost  seconds")
    chosen = [row for row in rows() if options.only in f"{row.model} {row.what}"]
    bench = Bench()
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(bench.run, chosen):
            results.append(result)
            print(line(result), flush=True)
    for name in ("accelerate", "lightning", "huggingface"):
        if options.only not in f"{name} SIGKILL, step 8, rank 1":
            continue
        if not LIBRARIES.exists():
            print(f"{name:22} left out: not installed (make .venv-libraries/.made)")
            continue
        results.append(library(name))
        print(line(results[-1]), flush=True)
    count = sum(map(good, results))
    print(f"\n{count} of {len(results)} rows as an undisturbed run")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    body = {"when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), "rows": results}
    Path(options.out).write_text(json.dumps(body, indent=1))
    return 0 if count == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
