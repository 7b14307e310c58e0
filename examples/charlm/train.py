"""Train a small transformer on the characters of Python's own manual: plain PyTorch DDP.

Nothing here knows of Phalanx except the two lines around ``progress``, which are optional.
Run it with ``phalanx run --nproc-per-node 4 examples/charlm/train.py`` or with ``torchrun``.

The text is the help of ``pydoc`` that every Python ships, so nothing is downloaded. The
run is deterministic: the batch of a step depends on the seed, the step and the rank only,
so a run that was interrupted and resumed prints the losses of one that was not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from phalanx import progress
except ImportError:  # torchrun without phalanx installed

    def progress(step: int) -> None:
        """Without phalanx nobody asks how far we are."""


def text() -> str:
    """About 700 kB of English: the topics of ``help()``."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class Corpus:
    """Batches by number: the same (seed, step, rank) is the same batch, always."""

    def __init__(self, batch: int, context: int, seed: int) -> None:
        body = text()
        letters = sorted(set(body))
        code = {c: i for i, c in enumerate(letters)}
        self.data = torch.tensor([code[c] for c in body])
        self.vocabulary = len(letters)
        self.batch, self.context, self.seed = batch, context, seed

    def at(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(hash((self.seed, step, rank)) % 2**63)
        starts = torch.randint(
            len(self.data) - self.context - 1, (self.batch,), generator=source
        ).tolist()
        rows = torch.stack([self.data[s : s + self.context + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]


def save(path: Path, model: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
    """Write the whole file beside the old one, then put it in its place."""
    half = path.with_suffix(".half")
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": step}, half)
    os.replace(half, path)


def fault(options: argparse.Namespace, step: int, rank: int) -> None:
    """The fault that was asked for, once: a marker file remembers that it happened."""
    if rank != options.fault_rank or step != options.fault_step or not options.fault:
        return
    marker = options.out / "fault-happened"
    if marker.exists():
        return
    marker.touch()
    if options.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.fault == "raise":
        raise RuntimeError(f"the fault asked for: rank {rank}, step {step}")
    elif options.fault == "exit":
        os._exit(7)
    elif options.fault == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/charlm"), help="folder of results")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP (session.py)")
    parser.add_argument("--fault", choices=["kill", "raise", "exit", "hang"])
    parser.add_argument("--fault-rank", type=int, default=2)
    parser.add_argument("--fault-step", type=int, default=90)
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    if options.shard:
        raise SystemExit("--shard is for session.py: this one saves whole models")
    options.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(options.seed)
    corpus = Corpus(options.batch, options.context, options.seed)
    bare = CharModel(
        corpus.vocabulary, options.context, options.width, options.layers, options.heads
    )
    model = DistributedDataParallel(bare)
    optim = torch.optim.AdamW(bare.parameters(), lr=options.lr)

    checkpoint = options.out / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        bare.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
        start = state["step"]
        if rank == 0:
            print(f"resumed at step {start}", flush=True)
    losses = (options.out / "losses.jsonl").open("a") if rank == 0 else None

    began = time.monotonic()
    for step in range(start, options.steps):
        inputs, targets = corpus.at(step, rank)
        fault(options, step, rank)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()

        progress(step + 1)
        if losses:
            print(json.dumps({"step": step, "loss": loss.item()}), file=losses, flush=True)
            if step % options.print_every == 0 or step == options.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
        if rank == 0 and (step + 1) % options.save_every == 0:
            save(checkpoint, bare, optim, step + 1)

    if rank == 0:
        took = time.monotonic() - began
        print(f"done: {options.steps - start} steps in {took:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
