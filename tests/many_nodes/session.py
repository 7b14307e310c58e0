"""A program with a session: its losses depend on steps and ranks alone, so that two runs can be
compared. ``python session.py STEPS [PAUSE [HOLD]]``, seconds between two steps. At step HOLD (10)
it waits for as long as there is a file ``hold``. Where there is a file ``raise-HOST`` one worker
there takes it away and raises. As long as there is a file ``slow`` it makes five steps a second."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from phalanx import training

OUT = Path(os.environ["TEST_OUT"])
HOST = os.uname().nodename
STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
HOLD = int(sys.argv[3]) if len(sys.argv) > 3 else 10


def say(*words: object) -> None:
    fd = os.open(OUT / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


def may_raise() -> None:
    try:
        (OUT / f"raise-{HOST}").unlink()
    except FileNotFoundError:
        return
    raise ValueError("raised by request")


kept = os.environ.get("TEST_KEPT")  # a folder for checkpoints
with training.session(backend="gloo", checkpoint=kept, checkpoint_every=10 if kept else 0) as job:
    torch.manual_seed(1)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    job.protect(model=net, optim=optimizer)
    losses = {}
    for step in job.steps(STEPS):
        with step:
            may_raise()
            data = torch.Generator().manual_seed(100 * int(step) + job.rank)
            loss = net(torch.randn(4, 8, generator=data)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not step.done:  # broken off: it comes again, and the loss may be an older one
            continue
        losses[int(step)] = loss.item()
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        say(
            *(int(step), job.rank, job.world, attempt, 0, os.getpid()),
            *(HOST, time.monotonic(), loss.item()),
        )
        time.sleep(0.2 if (OUT / "slow").exists() else PAUSE)
        while int(step) == HOLD and (OUT / "hold").exists():
            time.sleep(0.01)
    say("end", job.rank, os.getpid(), json.dumps(losses).replace(" ", ""))
