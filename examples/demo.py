"""The main job on real input: training on 4 workers loses one to SIGKILL and goes on.

Three runs of examples/charlm under ``phalanx run``, each shown as it comes:

1. train.py, plain PyTorch, loses rank 2: the whole group starts again, warm;
2. session.py, with a ``phalanx.training`` session, loses nobody: for comparison;
3. session.py loses rank 2: only that rank is replaced, and the losses are those of run 2, bit
   for bit. The line of the recovery says when each of its phases was over.

``--shard`` shards the model of 2 and 3 with FSDP2 on a hybrid mesh, in place of DDP.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS, FAULT_STEP = 160, 110


def run(
    title: str, script: str, out: Path, how: Sequence[str], fault: Sequence[str] = ()
) -> dict[int, float]:
    """Run the job; the loss of rank 0 by step. Raises SystemExit if it fails."""
    words = ["--nproc-per-node", "4", f"examples/charlm/{script}", "--steps", str(STEPS)]
    words += [*how, *fault]
    print(f"\n== {title}\n$ phalanx run {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "phalanx", "run", *words, "--out", str(out)]
    status = subprocess.run(command, cwd=HERE.parent, timeout=300).returncode
    if status:
        raise SystemExit(f"the job failed with exit status {status}")
    assert (out / "fault-happened").exists() == bool(fault), "the fault did not happen"
    rows = [json.loads(row) for row in (out / "losses.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows}
    assert sorted(losses) == list(range(STEPS)), "steps are missing"
    assert losses[STEPS - 1] < 0.6 * losses[0], "the loss did not fall"
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", action="store_true", help="FSDP2 on a hybrid mesh, not DDP")
    how = ["--shard"] if parser.parse_args().shard else []
    kill = ("--fault", "kill", "--fault-rank", "2", "--fault-step", str(FAULT_STEP))
    with tempfile.TemporaryDirectory(prefix="phalanx-demo-") as folder:
        out = Path(folder)
        run("a plain script loses a rank: all start again, warm", "train.py", out / "1", (), kill)
        calm = run("a script with a session, undisturbed", "session.py", out / "2", how)
        hit = run("the same loses a rank: only it is replaced", "session.py", out / "3", how, kill)
    if hit != calm:
        raise SystemExit("the losses differ from the run without a fault")
    print(
        f"\ndemo: rank 2 was killed at step {FAULT_STEP} in two of three runs; all {STEPS} steps "
        f"were made in each; with the session the losses are those of the undisturbed run, bit "
        f"for bit ({calm[0]:.2f} -> {calm[STEPS - 1]:.2f})"
    )


if __name__ == "__main__":
    main()
