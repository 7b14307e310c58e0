"""One rank of the jobs of proof.py and chaos.py: a program of tests/training, as a script.

``$JOB_SPEC`` names the file that says what is trained and what goes wrong. Which life of its
rank this is, it finds out by making a file, so that each fault happens in the life it is for.
"""

import json
import os
from pathlib import Path

import programs

# What a step imports late: workers are forked from a process that has it.
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim  # noqa: F401


def life(folder: Path, rank: str) -> int:
    number = 0
    while True:
        try:
            os.close(os.open(folder / f"life-{rank}-{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            number += 1


if __name__ == "__main__":
    spec = json.loads(Path(os.environ["JOB_SPEC"]).read_text())
    os.environ["INCARNATION"] = str(life(Path(spec["folder"]), os.environ["RANK"]))
    programs.run(spec)
