"""DDP and AdamW in a session; the last rank dies (or stops) at given steps, each time once.

Three layers of 256 by 256 in several buckets, a pause after each step as in train.py.
"""

import os
import signal
import time
from pathlib import Path

import stamps
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import training

KILLS = int(os.environ.get("BENCH_KILLS", "0"))
GAP = int(os.environ.get("BENCH_KILL_STEP", "30"))
STOPS = os.environ.get("BENCH_FAULT") == "stop"
pause = float(os.environ.get("BENCH_STEP_MS", "20")) / 1e3
out = Path(os.environ["BENCH_OUT"])


def strike(rank: int, world: int, step: int) -> None:
    if rank != world - 1 or step % GAP or not 0 < step <= KILLS * GAP:
        return
    try:
        (out / f"struck-{step}").touch(exist_ok=False)
    except FileExistsError:
        return
    stamps.stamp("kill", step=step, of=rank)
    os.kill(os.getpid(), signal.SIGSTOP if STOPS else signal.SIGKILL)


torch.set_num_threads(1)
with training.session(backend="gloo") as job:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
    optim = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optim=optim)
    x = torch.randn(8, 256)
    due = time.monotonic()
    for step in job.steps((KILLS + 1) * GAP):
        with step:
            optim.zero_grad()
            loss = model(x).square().mean()
            strike(job.rank, job.world, int(step))
            loss.backward()
            optim.step()
        if step.done:
            stamps.stamp("step", step=int(step), of=job.rank)
        due = max(due, time.monotonic() - pause) + pause
        time.sleep(max(0.0, due - time.monotonic()))
