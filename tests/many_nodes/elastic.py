"""A program whose world may change: ``python elastic.py [STATE STEPS]``. Trains until there is a
file ``enough``; tells of each step its loss and samples, of each change of the world, and writes
down its state after each step. With STATE it goes on from one of those (-: from the beginning), for
so many steps."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from phalanx import training

OUT = Path(os.environ["TEST_OUT"])
HOST = os.uname().nodename
MODE = os.environ.get("TEST_ELASTIC", "step")
SAMPLES, BATCH = 997, 2


def say(*words: object) -> None:
    fd = os.open(OUT / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


with training.session(backend="gloo", elastic=MODE) as job:
    torch.manual_seed(1)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    sampler = DistributedSampler(range(SAMPLES), job.world, job.rank, seed=3)
    batches = job.batches(DataLoader(range(SAMPLES), BATCH, sampler=sampler))

    def resized(before: int, now: int) -> None:
        say("resized", before, now, job.rank)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * now / 3 if MODE == "step" else 0.01

    job.protect(model=net, optim=optimizer, on_resize=resized)
    start, steps = 0, 1_000_000
    if len(sys.argv) > 1 and sys.argv[1] == "-":
        steps = int(sys.argv[2])
    elif len(sys.argv) > 1:
        saved = torch.load(sys.argv[1])
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optim"])
        batches.load_state_dict(saved["batches"])
        start = saved["step"] + 1
        steps = start + int(sys.argv[2])
        resized(saved["world"], job.world)
    for step in job.steps(steps, start):
        with step:
            optimizer.zero_grad()
            ids, total = [], 0.0
            for some, weight in job.parts(batches):
                loss = net(points[some]).square().mean() * weight
                time.sleep(0.01)
                loss.backward()
                ids.append(some.tolist())
                total += loss.item()
            enough = torch.tensor([float((OUT / "enough").exists())])
            dist.all_reduce(enough)
            optimizer.step()
        if not step.done:
            continue
        say(
            *(int(step), job.rank, job.world, os.environ["TORCHELASTIC_RESTART_COUNT"]),
            *(job.generation, os.getpid(), HOST, time.monotonic(), total),
        )
        say("ids", int(step), job.rank, job.world, json.dumps(ids).replace(" ", ""))
        if job.rank == 0 and len(sys.argv) == 1:
            state = {"model": net.state_dict(), "optim": optimizer.state_dict()}
            more = {"batches": batches.state_dict(), "step": int(step), "world": job.world}
            torch.save({**state, **more}, OUT / "state.new")
            os.replace(OUT / "state.new", OUT / f"state-{int(step)}")
        if enough.item():
            break
