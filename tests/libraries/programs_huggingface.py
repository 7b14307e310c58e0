"""A tiny language model with Hugging Face's Trainer, dropout and all; 24 steps."""

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from phalanx.training.integrations.huggingface import PhalanxCallback, newest_checkpoint

OUT = Path(os.environ["TEST_OUT"])
FAULT = os.environ.get("FAULT", "").split(":")  # what:rank:step
RANK = os.environ.get("RANK", "0")


class Letters(Dataset):
    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)
        self.ids = torch.randint(20, (96, 12), generator=source)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Faults(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if FAULT[1:] != [RANK, str(state.global_step)]:
            return
        try:
            (OUT / "fault-happened").touch(exist_ok=False)
        except FileExistsError:
            return
        if FAULT[0] == "notice":
            (OUT / "reached").touch()
            time.sleep(1.5)  # the signal comes, to the agent first
        elif FAULT[0] == "raise":
            raise ArithmeticError
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[FAULT[0]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    )
    arguments = TrainingArguments(
        output_dir=str(OUT / "checkpoints"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_steps=5,
        save_total_limit=2,
        logging_steps=100,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        seed=7,
    )
    ours = PhalanxCallback()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Letters(), callbacks=[ours, Faults()]
    )
    try:
        trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output_dir))
    except ArithmeticError:
        (OUT / "reached").touch()
        time.sleep(200)
    if ours.stopped:
        print(f"stopped at {trainer.state.global_step}", flush=True)
    else:
        total = sum(p.double().sum() for p in model.parameters())
        (OUT / f"end-{RANK}").write_text(total.item().hex())
