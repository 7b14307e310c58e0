"""The same training as train.py, with ``phalanx.training``: a dead rank is replaced in place.

Compare with train.py: the loop is the same, the checkpoint code is gone. ``--shard`` shards the
model with FSDP2 on a hybrid mesh, two replicas of it, in place of DDP; nothing else changes.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train import CharModel, Corpus, arguments, fault

from phalanx import training


def hybrid(bare: CharModel, world: int) -> CharModel:
    """Each half of the ranks holds the model once, in shards."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for block in bare.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(bare, mesh=mesh)


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    with training.session(
        backend="gloo",
        checkpoint=options.out / "checkpoints",
        checkpoint_every=options.save_every,
    ) as job:
        torch.manual_seed(options.seed)
        corpus = Corpus(options.batch, options.context, options.seed)
        bare = CharModel(
            corpus.vocabulary, options.context, options.width, options.layers, options.heads
        )
        model: nn.Module = (
            hybrid(bare, job.world) if options.shard else DistributedDataParallel(bare)
        )
        optim = torch.optim.AdamW(bare.parameters(), lr=options.lr)
        job.protect(model=model, optim=optim)

        losses = (options.out / "losses.jsonl").open("a") if job.rank == 0 else None
        for step in job.steps(options.steps):
            with step:
                inputs, targets = corpus.at(step, job.rank)
                fault(options, step, job.rank)
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                optim.zero_grad(set_to_none=True)
                loss.backward()
                optim.step()
            if losses:
                print(json.dumps({"step": step, "loss": loss.item()}), file=losses, flush=True)
                if step % options.print_every == 0 or step == options.steps - 1:
                    print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
