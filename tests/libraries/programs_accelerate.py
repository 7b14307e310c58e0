"""A loop of one's own with Accelerate, inside a session: ranks are replaced in place."""

import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import training

OUT = Path(os.environ["TEST_OUT"])
FAULT = os.environ.get("FAULT", "").split(":")  # what:rank:step

if __name__ == "__main__":
    torch.set_num_threads(1)
    with training.session(backend="gloo") as job:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(3)
        source = torch.Generator().manual_seed(5)
        x, y = torch.randn(96, 8, generator=source), torch.randn(96, 1, generator=source)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        optim = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(
            net, optim, DataLoader(TensorDataset(x, y), batch_size=4)
        )
        batches = job.batches(loader)
        job.protect(model=model, optim=optim)
        for step in job.steps(24):
            with step:
                inputs, targets = next(batches)
                if FAULT[1:] == [str(job.rank), str(int(step))]:
                    try:
                        (OUT / "fault-happened").touch(exist_ok=False)
                        os.kill(os.getpid(), signal.SIGKILL)
                    except FileExistsError:
                        pass
                loss = (model(inputs) - targets).square().mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
        total = sum(p.double().sum() for p in net.parameters())
        (OUT / f"end-{job.rank}").write_text(total.item().hex())
