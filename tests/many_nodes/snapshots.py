"""Each rank has a model that nobody else has; a session takes snapshots.
``python snapshots.py STEPS PAUSE HOLD``: as session.py."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phalanx import training

OUT = Path(os.environ["TEST_OUT"])
STEPS, PAUSE, HOLD = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])


def say(*words: object) -> None:
    fd = os.open(OUT / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


with training.session(backend="gloo", snapshot_every=4) as job:
    torch.manual_seed(1 + job.rank)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    job.protect(model=net, optim=optimizer, replicas=[[r] for r in range(job.world)])
    for step in job.steps(STEPS):
        with step:
            data = torch.Generator().manual_seed(100 * int(step) + job.rank)
            loss = net(torch.randn(4, 8, generator=data)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            optimizer.step()
        if not step.done:  # broken off: it comes again, and the loss may be an older one
            continue
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        say(
            *(int(step), job.rank, job.world, attempt, 0, os.getpid()),
            *(os.uname().nodename, time.monotonic(), loss.item()),
        )
        time.sleep(PAUSE)
        while int(step) == HOLD and (OUT / "hold").exists():
            time.sleep(0.01)
    been = [vars(r) for r in job.recoveries]
    (OUT / f"been-{job.rank}").write_text(json.dumps(been))
