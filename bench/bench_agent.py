"""One machine, ours beside torchrun: launch, notice, restart. ``make bench``.

Usage: python bench/bench_agent.py [--reps 5] [--kills 2] [--only launch,notice,restart]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import PHALANX, TORCHRUN, Row, Run, proportional_mb, run, table, tree

ALTERNATE = ((PHALANX, "ours"), (TORCHRUN, "peer"))


def add(row: Row, side: str, value: float) -> None:
    getattr(row, side).append(round(value, 3))


def since(result: Run, moments: Sequence[int]) -> float:
    """Milliseconds from the command's start to the last of the moments."""
    return (max(moments) - result.began) / 1e6


def launch(reps: int) -> list[Row]:
    trivial = Row("command to first line, 2 workers without torch", "ms", target="10x")
    rows = [trivial]
    for rep in range(reps + 1):  # the first is warm-up
        for command, side in ALTERNATE:
            result = run(command, "trivial.py", 2)
            if rep:
                add(trivial, side, since(result, [e["t"] for e in result.all("first_line")]))
    for nproc in (1, 2, 4, 8):
        ready = Row(f"command to gloo group ready, {nproc} workers", "ms", target="> 1x")
        rows.append(ready)
        cpu = Row(f"CPU time of the whole job, {nproc} workers", "s")
        memory = Row(f"proportional memory of the whole job, {nproc} workers", "MB")
        if nproc in (1, 8):
            rows += [cpu, memory]
        for _ in range(reps):
            for command, side in ALTERNATE:
                held: list[float] = []

                def hold(pid: int, folder: Path, n: int = nproc, held: list[float] = held) -> None:
                    (folder / "hold").touch()
                    wait_for(folder, "group_ready", n)
                    held.append(proportional_mb(tree(pid)))
                    (folder / "hold").unlink()

                result = run(command, "group.py", nproc, during=hold)
                add(ready, side, since(result, [e["t"] for e in result.all("group_ready")]))
                add(cpu, side, result.cpu)
                add(memory, side, held[0])
    return rows


def wait_for(folder: Path, event: str, count: int, limit: float = 90.0) -> None:
    """Until so many workers have written the event."""
    import time

    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        seen = sum(event in path.read_text() for path in folder.glob("worker.*.jsonl"))
        if seen >= count:
            return
        time.sleep(0.02)
    raise RuntimeError(f"only {seen} of {count} workers reached {event} in {limit} s")


def notice(reps: int) -> list[Row]:
    rows = []
    for megabytes, label in ((0, "small"), (4096, "with 4 GB resident")):
        row = Row(f"worker death to the agent's knowing, {label}", "ms", target="1 ms")
        rows.append(row)
        for _ in range(reps):
            for command, side in ALTERNATE:
                result = run(
                    [*command, "--max-restarts", "1"],
                    "train.py",
                    2,
                    BENCH_KILLS=1,
                    BENCH_KILL_STEP=5,
                    BENCH_BALLAST_MB=megabytes,
                )
                killed = result.first("kill")
                known = result.first("worker_died" if side == "ours" else "noticed")
                if killed is not None and known is not None:
                    add(row, side, (known - killed) / 1e6)
    return rows


def restart(reps: int, kills: int) -> list[Row]:
    rows = []
    for nproc in (2, 4, 8):
        row = Row(f"worker death to first step of all, {nproc} workers", "ms", target="30x")
        rows.append(row)
        for _ in range(reps):
            for command, side in ALTERNATE:
                result = run(
                    [*command, "--max-restarts", str(kills)],
                    "train.py",
                    nproc,
                    limit=240,
                    BENCH_KILLS=kills,
                )
                for kill in result.all("kill"):
                    steps = result.all("step", attempt=kill["attempt"] + 1, step=0)
                    if len(steps) == nproc:
                        add(row, side, (max(e["t"] for e in steps) - kill["t"]) / 1e6)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--kills", type=int, default=1, help="restarts per run")
    parser.add_argument("--only", default="launch,notice,restart")
    options = parser.parse_args()
    parts = options.only.split(",")
    rows: list[Row] = []
    if "launch" in parts:
        rows += launch(options.reps)
    if "notice" in parts:
        rows += notice(options.reps)
    if "restart" in parts:
        rows += restart(max(1, -(-options.reps // options.kills)), options.kills)
    table("agent", "torchrun 2.13", rows, {"reps": options.reps, "kills per run": options.kills})


if __name__ == "__main__":
    main()
