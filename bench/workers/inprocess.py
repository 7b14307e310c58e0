"""NVIDIA's in-process restart: the survivors go on without the rank that died.

Its own wrapper with its smallest intervals. Started once per rank, without a launcher.
"""

import datetime
import os
import signal
import time

import stamps
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


FIRST_RANK = stamps.RANK
KILL_RANK, KILL_STEP = int(os.environ["BENCH_KILL_RANK"]), int(os.environ["BENCH_KILL_STEP"])
PORT = int(os.environ["MASTER_PORT"])


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},
    monitor_thread_interval=seconds(0.05),
    monitor_process_interval=seconds(0.05),
    heartbeat_interval=seconds(0.1),
    progress_watchdog_interval=seconds(0.1),
    heartbeat_timeout=seconds(1),
    last_call_wait=seconds(0),
)
def main(call_wrapper: inprocess.CallWrapper = None) -> None:
    life = call_wrapper.iteration
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        host_name="127.0.0.1",
        port=PORT + 2 + life,
        world_size=world,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds(10))
    model = torch.nn.Linear(16, 16)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    due = time.monotonic()
    for step in range(KILL_STEP + 30 if life == 0 else 10):
        if life == 0 and step == KILL_STEP and FIRST_RANK == KILL_RANK:
            stamps.stamp("kill", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad / world
        stamps.stamp("step", step=step, life=life)
        due += 0.02
        time.sleep(max(0.0, due - time.monotonic()))


main()
