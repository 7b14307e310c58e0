"""A small regression with Lightning's DDP, shuffled data, a scheduler; two epochs of 12 steps."""

import os
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.training.integrations.lightning import PhalanxCallback

OUT = Path(os.environ["TEST_OUT"])
FAULT = os.environ.get("FAULT", "").split(":")  # what:rank:step


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        fault(self.global_step, self.global_rank)
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        with (OUT / f"steps-{self.global_rank}").open("a") as file:
            file.write(f"{self.global_step} {loss.item().hex()}\n")
        return loss

    def configure_optimizers(self):
        optim = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 5, 0.9)
        return [optim], [{"scheduler": schedule, "interval": "step"}]


def fault(step: int, rank: int) -> None:
    if FAULT[1:] != [str(rank), str(step)]:
        return
    try:
        (OUT / "fault-happened").touch(exist_ok=False)
    except FileExistsError:
        return
    if FAULT[0] == "notice":
        (OUT / "reached").touch()
        time.sleep(1.5)  # the signal comes, to the agent first
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[FAULT[0]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 8, generator=source), torch.randn(96, 1, generator=source))
    callback = PhalanxCallback(OUT / "checkpoints", save_every=5)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=callback.newest())
    if callback.stopped:
        print(f"stopped at {trainer.global_step}", flush=True)
    else:
        total = sum(p.double().sum() for p in net.parameters())
        (OUT / f"end-{trainer.global_rank}").write_text(total.item().hex())
