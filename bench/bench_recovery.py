"""A worker is killed: how long until all that are left (or all again) have done a step?

    make bench-recovery        (python bench/bench_recovery.py [--workers 2,4,8] [--samples 6])

In one run, on the same machine, steps of 20 ms, the last rank killed by SIGKILL:

* ours in place: only the dead rank is replaced, state handed over, nobody else's process ends;
* ours, whole group: a plain program; all processes anew, forked from the warm parent;
* torchrun: all processes anew;
* NVIDIA's in-process restart, its smallest intervals: the survivors go on without the dead rank;
* torchft, its lighthouse's defaults: the same.

The last two are measured where `make .venv-peers/.made` could install them; what they do is
less, since nobody takes the dead rank's place within that time. The session's program is also a
heavier one (DDP, AdamW, several buckets) than the peers' (one layer, gradients reduced by hand).

Also: what a session costs a step, and the time to find a rank that stopped. Results are written
after each size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import PHALANX, TORCHRUN, Run, run

ROOT = harness.HERE.parent
PEERS = ROOT / ".venv-peers" / "bin"
LIMIT = 120.0


def in_place(world: int, kills: int, *words: str) -> list[float]:
    command = [*PHALANX, *words]
    # a standby has to be built again before the next kill
    gap = 60 if words else 25
    result = run(command, "in_place.py", world, limit=LIMIT, BENCH_KILLS=kills, BENCH_KILL_STEP=gap)
    return _after_kills(result, world)


def _after_kills(result: Run, world: int) -> list[float]:
    found = []
    for kill in result.all("kill"):
        done = {e["of"]: e["t"] for e in result.all("step", step=kill["step"])}
        if len(done) == world:
            found.append((max(done.values()) - kill["t"]) / 1e6)
    return found


def whole_group(world: int, kills: int, command: list[str]) -> list[float]:
    result = run(
        [*command, "--max-restarts", str(kills)],
        "train.py",
        world,
        limit=LIMIT,
        BENCH_KILLS=kills,
        BENCH_KILL_STEP=20,
    )
    found = []
    for kill in result.all("kill"):
        steps = result.all("step", attempt=kill["attempt"] + 1, step=0)
        if len(steps) == world:
            found.append((max(e["t"] for e in steps) - kill["t"]) / 1e6)
    return found


class Peer:
    """Processes of one peer that has no launcher, with their time stamps."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], rank: int | None = None, **env: Any) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {k: str(v) for k, v in env.items()}
        environment |= {"BENCH_OUT": str(self.folder), "OMP_NUM_THREADS": "1"}
        if rank is not None:
            environment |= {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
        with (self.folder / "log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def events(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return sorted(found, key=lambda e: e["t"])

    def until(self, true: Callable[[list[dict[str, Any]]], Any], limit: float) -> bool:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if true(self.events()):
                return True
            time.sleep(0.1)
        return False

    def close(self) -> None:
        import shutil

        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def in_process(world: int) -> list[float]:
    """NVIDIA's wrapper; one sample."""
    peer = Peer(world)
    port = harness.free_ports(40)
    worker = [str(PEERS / "python"), str(harness.HERE / "workers" / "inprocess.py")]
    try:
        for rank in range(world):
            peer.start(
                worker,
                rank,
                WORLD_SIZE=world,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                BENCH_KILL_RANK=world - 1,
                BENCH_KILL_STEP=20,
            )

        def again(events: list[dict[str, Any]]) -> list[int]:
            """When each survivor did its first step in the last life that has one."""
            life = max((e["life"] for e in events if e["ev"] == "step"), default=0)
            first = {}
            for e in events:
                if e["ev"] == "step" and e["life"] == life and life > 0:
                    first.setdefault(e["rank"], e["t"])
            return list(first.values())

        if not peer.until(lambda events: len(again(events)) == world - 1, 60):
            return []
        kill = next(e["t"] for e in peer.events() if e["ev"] == "kill")
        return [(max(again(peer.events())) - kill) / 1e6]
    finally:
        peer.close()


def torchft(world: int) -> list[float]:
    """torchft with its lighthouse; one sample: the longest gap of a survivor."""
    peer = Peer(world)
    port = harness.free_ports(1)
    try:
        peer.start(
            [str(PEERS / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "1"]
        )
        worker = [str(PEERS / "python"), str(harness.HERE / "workers" / "replica_group.py")]
        for rank in range(world):
            peer.start(worker, rank, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}")

        def together(events: list[dict[str, Any]], count: int, after: int, steps: int) -> bool:
            done: dict[int, int] = {}
            for e in events:
                if e["ev"] == "step" and e["n"] == count and e["t"] > after:
                    done[e["rank"]] = done.get(e["rank"], 0) + 1
            return sum(n >= steps for n in done.values()) >= count

        if not peer.until(lambda events: together(events, world, 0, 20), 60):
            return []
        kill = time.time_ns()
        os.killpg(peer.processes[-1].pid, signal.SIGKILL)
        if not peer.until(lambda events: together(events, world - 1, kill, 5), 60):
            return []
        gaps = []
        for rank in range(world - 1):
            at = [e["t"] for e in peer.events() if e["ev"] == "step" and e["rank"] == rank]
            at = [t for t in at if t >= max(x for x in at if x <= kill)]
            gaps.append(max(b - a for a, b in itertools.pairwise(at)) / 1e6)
        return [max(gaps)]
    finally:
        peer.close()


def hang(world: int) -> dict[str, list[float]]:
    """SIGSTOP of a rank in its step, of which 2 s are allowed; stacks are saved in between."""
    result = run(
        [*PHALANX, "--hang-timeout", "step=2"],
        "in_place.py",
        world,
        limit=LIMIT,
        BENCH_KILLS=2,
        BENCH_KILL_STEP=25,
        BENCH_FAULT="stop",
    )
    found, good = [], _after_kills(result, world)
    for kill in result.all("kill"):
        hung = [e["t"] for e in result.all("worker_hung") if e["t"] > kill["t"]]
        if hung:
            found.append((hung[0] - kill["t"]) / 1e6)
    return {"found": found, "good": good}


def overhead(reps: int) -> dict[str, float]:
    """What a session adds to a step of about 20 ms, in percent. Within one run: its step against
    that of a twin outside of it. Between runs, taking turns: against the loop without a session
    (all there is in it, but as unsteady as the machine)."""
    batch = 64
    bare: list[float] = []
    ours: list[float] = []
    within: dict[str, list[float]] = {"wall": [], "cpu": []}

    def measured(what: str, result: Run, key: str) -> float:
        timed = [e[key] for e in result.all(what) if e["step"] >= 10]
        return statistics.median(timed) / 1e6

    first = run(PHALANX, "overhead.py", 2, BENCH_BATCH=batch, BENCH_BARE=1)
    batch = max(8, round(batch * 20 / measured("timed", first, "wall")))
    for _ in range(reps):
        result = run(PHALANX, "overhead.py", 2, BENCH_BATCH=batch, BENCH_BARE=1)
        bare.append(measured("timed", result, "wall"))
        result = run(PHALANX, "overhead.py", 2, BENCH_BATCH=batch)
        ours.append(measured("timed", result, "wall"))
        for key, found in within.items():
            mine, twin = measured("timed", result, key), measured("twin", result, key)
            found.append(100 * (mine / twin - 1))
    return {
        "step_ms": round(statistics.median(bare), 2),
        "within_run_wall_percent": round(statistics.median(within["wall"]), 2),
        "within_run_cpu_percent": round(statistics.median(within["cpu"]), 2),
        "between_runs_percent": round(
            100 * (statistics.median(ours) / statistics.median(bare) - 1), 2
        ),
    }


def has_standby() -> bool:
    helped = subprocess.run([*PHALANX, "--help-all"], capture_output=True, text=True, check=False)
    return "--standby" in helped.stdout


def shown(values: list[float]) -> str:
    if not values:
        return "not to be had"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low:7.0f} / {middle:7.0f} / {high:7.0f}   ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--samples", type=int, default=6, help="of ours; half of it of each peer")
    parser.add_argument("--minutes", type=float, default=8.0, help="after that no more rows")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--out", default=str(harness.HERE / "results" / "recovery.json"))
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    body: dict[str, Any] = {
        "name": "recovery",
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "machine": {"cores": os.cpu_count(), "arch": platform.machine()},
        "python": platform.python_version(),
        "unit": "ms, SIGKILL to the first good step of all",
        "load": {},
        "rows": [],
    }

    def write() -> None:
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n")

    def row(world: int, what: str, measure: Callable[[], list[float]]) -> None:
        if options.only not in what or time.monotonic() > end:
            return
        try:
            values = measure()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{world} workers, {what}: {error}", file=sys.stderr)
            values = []
        print(f"{world} workers  {what:34} {shown(values)}", flush=True)
        middle = round(statistics.median(values), 1) if values else None
        samples = [round(v, 1) for v in values]
        entry = {"workers": world, "what": what, "unit": "ms", "samples": samples}
        if what.startswith("ours"):
            entry |= {"ours": middle, "peer": None, "ratio": None}
        else:  # beside ours in place, the first row of this size
            first = (r["ours"] for r in body["rows"] if r["workers"] == world)
            ours = next(first, None)
            ratio = round(middle / ours, 1) if middle and ours else None
            entry |= {"ours": ours, "peer": middle, "ratio": ratio}
        body["rows"].append(entry)

    kills, few = options.samples, max(1, options.samples // 2)
    peers = (PEERS / "python").exists()
    if not peers:
        print("torchft and NVIDIA's restart: not installed, see make .venv-peers/.made")
    print(f"{'':10} {'SIGKILL to first good step':34} {'min / median / max ms':>27}   (samples)")
    for world in map(int, options.workers.split(",")):
        body["load"][str(world)] = os.getloadavg()[0]
        row(world, "ours in place", lambda n=world: in_place(n, kills))
        if has_standby():
            row(
                world,
                "ours in place, --standby",
                lambda n=world: in_place(n, kills, "--standby", "1"),
            )
        row(world, "ours whole group, warm", lambda n=world: whole_group(n, kills, PHALANX))
        write()
        row(world, "torchrun", lambda n=world: whole_group(n, few, TORCHRUN))
        for name, measure in (("NVIDIA in-process", in_process), ("torchft", torchft)):
            if peers:
                row(
                    world,
                    f"{name} (without the dead rank)",
                    lambda n=world, m=measure: [v for _ in range(few) for v in m(n)],
                )
        write()
    if "hang" in options.only or not options.only:
        body["hang"] = hang(4)
        print(f"4 workers  SIGSTOP found (2 s allowed)        {shown(body['hang']['found'])}")
        print(f"4 workers  SIGSTOP to first good step         {shown(body['hang']['good'])}")
        write()
    if "overhead" in options.only or not options.only:
        body["overhead"] = cost = overhead(3)
        print(
            f"a step of {cost['step_ms']} ms: {cost['within_run_wall_percent']:+} % of its time, "
            f"{cost['within_run_cpu_percent']:+} % of processor time; against runs without a "
            f"session {cost['between_runs_percent']:+} %"
        )
        write()
    print(f"load at the start of each size: {body['load']}; written: {options.out}")


if __name__ == "__main__":
    main()
