"""The main job on real input: train on 4 workers, lose one to SIGKILL, go on to the end.

Runs ``phalanx run`` on examples/charlm/train.py in a folder of its own, shows its output
as it comes, and checks the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, FAULT_STEP = 200, 110


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="phalanx-demo-") as folder:
        out = Path(folder)
        command = [
            *(sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "4"),
            str(Path(__file__).parent / "charlm" / "train.py"),
            *("--out", str(out), "--steps", str(STEPS)),
            *("--fault", "kill", "--fault-rank", "2", "--fault-step", str(FAULT_STEP)),
        ]
        print("$ phalanx " + " ".join(command[3:]).replace(folder, "OUT"), flush=True)
        status = subprocess.run(command, timeout=600).returncode
        if status:
            print(f"the job failed with exit status {status}")
            return status
        rows = [json.loads(row) for row in (out / "losses.jsonl").read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows}
        assert (out / "fault-happened").exists(), "no worker was killed"
        assert sorted(losses) == list(range(STEPS)), "steps are missing"
        assert losses[STEPS - 1] < 0.6 * losses[0], "the loss did not fall"
        print(
            f"demo: rank 2 was killed at step {FAULT_STEP}; all {STEPS} steps were made; "
            f"loss {losses[0]:.2f} -> {losses[STEPS - 1]:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
