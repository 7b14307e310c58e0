"""A plain DDP program: trains until there is a file ``enough``, goes on from its checkpoint.

On the host whose name is in the file ``fail`` it raises, each time, and tells when it did."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

OUT = Path(os.environ["TEST_OUT"])
RANK = int(os.environ["RANK"])
HOST = os.uname().nodename


def say(*words: object) -> None:
    fd = os.open(OUT / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, step = OUT / "checkpoint", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        step = state["step"]
    world, attempt = dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    while True:
        enough = torch.tensor([float((OUT / "enough").exists())])
        dist.all_reduce(enough)
        if enough.item():
            break
        if (OUT / "fail").exists() and (OUT / "fail").read_text() == HOST:
            say("failed", RANK, time.monotonic())
            raise RuntimeError("this host is broken")
        step += 1
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), float(step))).square().mean()
        loss.backward()
        optimizer.step()
        if RANK == 0:
            torch.save({"model": model.state_dict(), "step": step}, OUT / "checkpoint.new")
            os.replace(OUT / "checkpoint.new", saved)
        say(
            *(step, RANK, world, attempt, os.environ.get("PHALANX_GENERATION", 0), os.getpid()),
            *(HOST, time.monotonic(), loss.item()),
        )
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
