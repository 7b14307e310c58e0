"""torchft: a replica group of one rank; the others go on without the one that died."""

import logging
import os
import time
from datetime import timedelta
from pathlib import Path

import stamps
import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

logging.disable(logging.INFO)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = stamps.RANK
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
x, y = torch.randn(8, 16), torch.randn(8, 16)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda s: model.load_state_dict(s["model"]),
    state_dict=lambda: {"model": model.state_dict()},
    replica_id=f"group_{group}",
    timeout=timedelta(seconds=30),
)
stop = Path(os.environ["BENCH_OUT"], "stop")
due = time.monotonic()
while not stop.exists():
    try:
        manager.start_quorum()
        model.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()
        good = manager.should_commit()
    except Exception as error:
        print(repr(error), flush=True)
        continue
    if good:
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        stamps.stamp("step", step=manager.current_step(), n=manager.num_participants())
    due += 0.02
    time.sleep(max(0.0, due - time.monotonic()))
os._exit(0)
