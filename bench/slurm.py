"""The recipe for Slurm on a real one: three nodes, training on two of them, and one is killed.

    python bench/slurm.py [--steps 300]

A ``slurmctld`` and three ``slurmd`` are started on this machine, each in a network namespace
of its own; examples/slurm/train.sbatch trains examples/charlm/train.py there. In the middle
the slurmd of one of the two nodes that train dies with all its steps. Nothing of it is left.
Needs root and Debian's packages; says so and exits with 0 where they cannot be had. Exit status 1
if the job does not end well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "schedulers"))
import slurm_cluster

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 180.0


def steps(folder: Path) -> list[int]:
    """The steps whose loss is written, in order of time."""
    path = folder / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def training_on(slurm: slurm_cluster.Slurm, number: int) -> list[str]:
    """The hosts whose agents have workers now, by what these agents have recorded."""
    found = []
    for path in (slurm.shared / f"phalanx-{number}" / "0").glob("events.*"):
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines() if line]
        if "workers_started" in kinds:
            found.append(path.name.partition(".")[2])
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if reason := slurm_cluster.why_not():
        print(f"skipped: {reason}")
        return 0
    with slurm_cluster.Slurm() as slurm:
        print(slurm.command("sinfo", "--version").strip(), "with", *(n.name for n in slurm.nodes))
        out = slurm.shared / "out"
        number = slurm.submit(
            "--nodes=3",
            str(ROOT / "examples" / "slurm" / "train.sbatch"),
            str(ROOT / "examples" / "charlm" / "train.py"),
            *("--steps", str(options.steps), "--out", str(out), "--print-every", "100"),
            env={"WORKERS": "1", "LATE": "5", "OMP_NUM_THREADS": "1"},
        )
        slurm.until(lambda: len(steps(out)) >= options.steps // 4, "a quarter of the way", LIMIT)
        busy = training_on(slurm, number)
        batch = slurm.job(number)["BatchHost"]
        victim = next(n for n in slurm.nodes if n.name in busy and n.name != batch)
        before, at = len(steps(out)), time.monotonic()
        slurm.kill_node(victim)
        print(f"{victim.name} killed at step {steps(out)[-1]} (of {', '.join(busy)} that trained)")
        slurm.until(lambda: len(steps(out)) > before, "a step", LIMIT)
        print(f"next step after {time.monotonic() - at:.1f} s, on {training_on(slurm, number)}")
        job = slurm.ended(number, LIMIT)
        made = steps(out)
        print(slurm.output(number).rstrip())
        words = {key: job[key] for key in ("JobState", "ExitCode", "Restarts", "NodeList")}
        print("slurm:", *(f"{key}={value}" for key, value in words.items()))
        well = job["ExitCode"] == "0:0" and sorted(set(made)) == list(range(options.steps))
        again = len(made) - len(set(made))
        print(f"{'well' if well else 'NOT WELL'}: {len(set(made))} steps, {again} of them twice")
        return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
