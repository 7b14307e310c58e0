"""A data-parallel loop by hand; the last rank kills itself at a step of the first attempts.

No torch.optim: its first step imports dynamo, about 2 s, which a fresh worker would pay
at every restart; that would make the peer look worse than it need be.
"""

import os
import signal
import time

import stamps
import torch
import torch.distributed as dist

import phalanx

dist.init_process_group("gloo")
stamps.stamp("group_ready")
world = dist.get_world_size()
kills, at = int(os.environ["BENCH_KILLS"]), int(os.environ.get("BENCH_KILL_STEP", "50"))
ballast = bytearray(int(os.environ.get("BENCH_BALLAST_MB", "0")) << 20)
for page in range(0, len(ballast), 4096):
    ballast[page] = 1

torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
x, y = torch.randn(8, 16), torch.randn(8, 16)
pause = float(os.environ.get("BENCH_STEP_MS", "20")) / 1e3
steps = at + 1 if stamps.ATTEMPT < kills else 5
due = time.monotonic()
for step in range(steps):
    if stamps.ATTEMPT < kills and step == at and stamps.RANK == world - 1:
        stamps.stamp("kill", step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    model.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p -= 0.01 * p.grad / world
    stamps.stamp("step", step=step)
    # further than any attempt before, so that ours does not wait before the next restart
    phalanx.progress(1000 * stamps.ATTEMPT + step)
    due += pause
    time.sleep(max(0.0, due - time.monotonic()))
dist.destroy_process_group()
