"""The same DDP loop, bare or in a session (``$BENCH_BARE``): how long a step takes.

In the session each step is followed by one of a twin model that is not protected and outside of the
session's step, so that both meet the same machine. (The twin's group is the session's too.)
"""

import os
import time

import stamps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import training

torch.set_num_threads(1)
STEPS = 60
BATCH = int(os.environ["BENCH_BATCH"])


def build(protect=None):
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(384, 384), nn.BatchNorm1d(384))]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optim = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, 384)

    def train() -> None:
        optim.zero_grad()
        model(x).square().mean().backward()
        optim.step()

    if protect is not None:
        protect(model=model, optim=optim)
    return train


def told(what: str, step: int, began: float, cpu: float) -> None:
    wall, used = time.monotonic() - began, time.thread_time() - cpu
    stamps.stamp(what, step=step, wall=round(wall * 1e9), cpu=round(used * 1e9))


if os.environ.get("BENCH_BARE"):
    dist.init_process_group("gloo")
    train = build()
    for number in range(STEPS):
        began, cpu = time.monotonic(), time.thread_time()
        train()
        told("timed", number, began, cpu)
    dist.destroy_process_group()
else:
    with training.session(backend="gloo") as job:
        train, twin = build(job.protect), build()
        began, cpu = time.monotonic(), time.thread_time()
        for step in job.steps(STEPS):
            with step:
                train()
            told("timed", int(step), began, cpu)
            began, cpu = time.monotonic(), time.thread_time()
            twin()
            told("twin", int(step), began, cpu)
            began, cpu = time.monotonic(), time.thread_time()
