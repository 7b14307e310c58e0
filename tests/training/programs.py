"""Training programs for the tests, and faults at chosen points of them.

The model's modules are defined in another order than they run in; it has a buffer that changes
(batch norm), uses random numbers (dropout) and shuffled data. Each finished step is written
down with its loss and a digest of the gradients.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from phalanx import training
from phalanx.training import state


class Net(nn.Module):
    def __init__(self, width: int = 32, norm: bool = True) -> None:
        super().__init__()
        self.last = nn.Linear(width, 4)
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.third = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        #: called in the middle of the backward pass
        self.strike: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)))
        if self.strike is not None:
            x.register_hook(self.strike)
        x = functional.dropout(functional.relu(self.second(x)), 0.1)
        return self.last(functional.relu(self.third(x)))


class Numbers(Dataset):
    def __init__(self, spec: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(512, 8, generator=generator)
        self.y = torch.randn(512, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        # Augmentation in the training process: uses the global generators.
        return self.x[index] + 0.01 * random.random(), self.y[index]


def warm() -> None:
    """Import what a step imports lazily, before workers are forked."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    model = Net()
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optim.step()


class Faults:
    """``{"rank", "step", "where", "kind", "incarnation"}``: what goes wrong, once each
    (``"incarnation": "any"`` with ``"once": NAME``: once in all lives of the rank; ``"always"``:
    each time; ``"attempt"``: only in that start of the whole group)."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.incarnation = int(os.environ.get("INCARNATION", "0"))
        self.folder = Path(spec["folder"])
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.faults = [
            fault
            for fault in spec.get("faults", [])
            if fault["rank"] == self.rank
            and fault.get("incarnation", 0) in (self.incarnation, "any")
            and fault.get("attempt", attempt) == attempt
        ]
        self.step = -1

    def due(self, where: str, step: int | None = None) -> dict[str, Any] | None:
        step = self.step if step is None else step
        for fault in list(self.faults):
            if fault["where"] == where and fault.get("step", step) == step:
                if not fault.get("always"):
                    self.faults.remove(fault)
                if self._struck(fault):  # in an earlier life: what prepares it does harm too
                    continue
                return fault
        return None

    def _struck(self, fault: dict[str, Any]) -> bool:
        return "once" in fault and (self.folder / f"once-{fault['once']}").exists()

    def at(self, where: str, step: int | None = None) -> None:
        fault = self.due(where, step)
        if fault is not None:
            self.strike(fault)

    def strike(self, fault: dict[str, Any]) -> None:
        kind = fault["kind"]
        if "once" in fault:  # in whichever life of the rank it comes first
            try:
                (self.folder / f"once-{fault['once']}").touch(exist_ok=False)
            except FileExistsError:
                return
        (self.folder / f"fault-{self.rank}-{self.incarnation}").write_text(str(time.monotonic()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind in ("kill-soon", "stop-soon"):
            number = signal.SIGKILL if kind == "kill-soon" else signal.SIGSTOP
            threading.Timer(fault.get("seconds", 0.03), os.kill, (os.getpid(), number)).start()
        elif kind == "stop-job":  # under `phalanx run`: the agent is the parent of our keeper
            keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGTERM)
        elif kind == "sleep":
            time.sleep(fault["seconds"])
        elif kind == "device":
            raise training.DeviceFault("UCE ERROR at device 0")
        elif kind == "network":
            raise training.NetworkFault("link down")
        elif kind == "bug":
            raise KeyError("a mistake of the program's own")
        elif kind == "memory":
            raise MemoryError("out of memory")


def resources() -> dict[str, int]:
    """What this process holds: memory of its own in kB, descriptors, threads."""
    own = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Dirty:", "Private_Clean:")):
            own += int(line.split()[1])
    return {
        "own": own,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            total.update(state.local(tensor).contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def build(spec: dict[str, Any], job: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1234 + (job.rank if spec.get("uneven") else 0))
    if spec.get("model", "ddp") == "ddp":
        model: nn.Module = Net(spec.get("width", 32), spec.get("norm", True))
        if job.world > 1:
            model = nn.parallel.DistributedDataParallel(
                model,
                bucket_cap_mb=spec.get("cap", 25),
                gradient_as_bucket_view=spec.get("view", False),
            )
    elif spec["model"] == "bare":
        model = Net(spec.get("width", 32), False)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = Net(spec.get("width", 32), False)
        shape, names = ((2, job.world // 2), ("replicate", "shard"))
        if spec["model"] == "fsdp":
            shape, names = ((job.world,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optim


def run(spec: dict[str, Any]) -> None:
    program = globals()["program_" + spec.get("program", "train")]
    program(spec)


def program_train(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    faults = Faults(spec)
    folder = Path(spec["folder"])
    _patch(faults)
    options = {
        "timeout": spec.get("timeout", 60),
        "regroup_timeout": 30,
        "decision_timeout": spec.get("decision_timeout", 30),
        **spec.get("session", {}),
    }
    if spec.get("checkpoint"):
        options["checkpoint"] = folder / "checkpoints"
        options["checkpoint_every"] = spec["checkpoint"]
    with training.session(**options) as job:
        faults.at("build")
        model, optim = build(spec, job)
        torch.manual_seed(77 + job.rank)
        random.seed(99 + job.rank)
        data = Numbers(spec)
        sampler = DistributedSampler(data, job.world, job.rank, shuffle=True, seed=3)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 3, 0.9)
        batches = job.batches(loader)
        job.protect(model=model, optim=optim, schedule=schedule)
        if spec.get("hello"):
            (folder / f"loop-{job.rank}-{faults.incarnation}").touch()
        for step in job.steps(spec.get("steps", 8)):
            faults.step = int(step)
            if int(step) == spec.get("gate"):
                _await(folder / "ready")
            with step:
                faults.at("data")
                x, y = next(batches)
                optim.zero_grad()
                faults.at("forward")
                bare = model.module if hasattr(model, "module") else model
                bare.strike = None
                if (due := faults.due("mid-backward")) is not None:
                    bare.strike = lambda grad, due=due: faults.strike(due)
                output = model(x)
                if (due := faults.due("backward")) is not None:
                    output.register_hook(lambda grad, due=due: faults.strike(due))
                loss = (output - y).square().mean()
                faults.at("collective")
                loss.backward()
                grads = digest(p.grad for p in model.parameters())
                faults.at("before-update")
                if (due := faults.due("update")) is not None:
                    _strike_in_update(optim, faults, due)
                optim.step()
                faults.at("after-update")
                if spec.get("tail"):
                    shared = loss.detach().clone()
                    torch.distributed.all_reduce(shared)
                schedule.step()
                if spec.get("pause"):
                    time.sleep(spec["pause"])
            if step.done:
                line = {"step": int(step), "loss": loss.item().hex(), "grads": grads}
                if spec.get("resources"):
                    line |= resources()
                with (folder / f"trace-{job.rank}.jsonl").open("a") as trace:
                    trace.write(json.dumps(line) + "\n")
            faults.at("between", int(step) + 1 if step.done else int(step))
        (folder / f"end-{job.rank}").write_text(
            json.dumps(
                {
                    "weights": digest([*model.parameters(), *model.buffers()]),
                    "rate": optim.param_groups[0]["lr"],
                    "stopped": job.stopped,
                    "recoveries": [vars(r) for r in job.recoveries],
                    "pid": os.getpid(),
                }
            )
        )


def _await(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)


def _strike_in_update(optim: Any, faults: Faults, due: dict[str, Any]) -> None:
    parameters = [p for group in optim.param_groups for p in group["params"]]

    def half(*_: Any) -> None:
        handle.remove()
        with torch.no_grad():
            state.local(parameters[0]).add_(1.0)  # an update that got half way
        faults.strike(due)

    handle = optim.register_step_pre_hook(half)


def _patch(faults: Faults) -> None:
    """Faults at points inside the session."""
    send, receive = state.send, state.receive

    def slow_send(*args: Any) -> Any:
        faults.at("send", 0)
        return send(*args)

    def cut_receive(group: Any, source: int, protected: Any) -> Any:
        if (due := faults.due("receive", 0)) is not None:
            length = torch.zeros(1, dtype=torch.int64)
            group.recv([length], source, 0).wait()
            faults.strike(due)
        return receive(group, source, protected)

    state.send, state.receive = slow_send, cut_receive
    from phalanx.training.session import Job

    for name, where in (("_take", "join"), ("_repair", "repair")):
        real = getattr(Job, name)

        def wrapped(self: Any, *args: Any, real: Any = real, where: str = where) -> Any:
            if self.generation > 1 or where == "join":
                faults.at(where, 0)
            return real(self, *args)

        setattr(Job, name, wrapped)
    from phalanx.training import checkpoint
    from phalanx.training.checkpoint import Checkpoints

    commit, save, write = Checkpoints._commit, Checkpoints.save, checkpoint._write

    def striking_commit(self: Any, *args: Any) -> None:
        faults.at("commit", args[2])
        commit(self, *args)

    def striking_save(self: Any, step: int, *args: Any) -> None:
        faults.at("save", step)
        save(self, step, *args)

    def striking_write(path: Path, data: bytes) -> None:
        write(path, data)
        if path.name == f"own-{faults.rank}.bin":  # the last that a rank writes of a step
            faults.at("written", int(path.parent.name.split("-")[1]))

    Checkpoints._commit, Checkpoints.save = striking_commit, striking_save
    checkpoint._write = striking_write
