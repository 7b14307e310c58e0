"""A small training step that an idle warm process makes before it is needed.

Much of torch makes itself ready when it is first used: the dispatcher's tables, autograd, the
first DDP and its reducer, gloo. A forked process pays for all of that at its first step. One that
waits for its order has nothing better to do.

The program that it becomes must not be able to tell. What a program can see is put back (random
states, modes, defaults, filters of warnings, what is printed); what cannot be put back is not
done: no accelerator is touched (a backward pass would make a context on each), no tensor is large
enough for a second compute thread, none of torch's own registers of groups is written to.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

LIMIT = 20.0
"""Seconds after which a rehearsal counts as stuck, and its process as useless."""

NICE = 10
"""Of the thread: the workers that train now come first."""

_ACCELERATED = ("torch_npu", "torch_mlu", "torch_musa", "habana_frameworks", "torch_xla")


def rehearse() -> bool:
    """Make the step, in a thread of its own and of low priority; False if it was not made.

    Raises nothing. A process in which it hangs or leaves a thread behind is not fit to become
    a worker: then this ends the process.
    """
    torch = sys.modules.get("torch")
    if torch is None or not _on_cpu(torch):
        return False
    done: list[bool] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        with ExitStack() as stack:
            try:
                for keeps in (_silent, _same_warnings, _same_random, _same_modes):
                    stack.enter_context(keeps())
                _step(torch)
                done.append(True)
            except Exception:
                done.append(False)

    before = _threads()
    # a thread's priority can be lowered by anybody, and dies with it; named: unnamed ones count
    thread = threading.Thread(target=run, name="phalanx-rehearsal", daemon=True)
    thread.start()
    thread.join(LIMIT)
    end = time.monotonic() + 2.0
    while _threads() - before and time.monotonic() < end:
        time.sleep(0.001)  # joined is not yet gone, and the kernel tells nobody when it is
    if not done or _threads() - before:
        os._exit(1)
    return done[0]


def _on_cpu(torch: Any) -> bool:
    if any(name in sys.modules for name in _ACCELERATED):
        return False
    built = torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None)
    return not built or not any(
        name.startswith(("nvidia", "nvhost", "nvmap", "dxg", "kfd", "dri", "accel", "davinci"))
        for name in os.listdir("/dev")
    )


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _step(torch: Any) -> None:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    loss_of = nn.functional.cross_entropy
    target = torch.zeros(3, dtype=torch.int64)

    def train(wrapped: Any) -> None:
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss = loss_of(wrapped(torch.randn(3, 4)), target)
            optim.zero_grad()
            loss.backward()
            optim.step()
            loss.item()

    train(model)
    if "torch.distributed" in sys.modules and torch.distributed.is_available():
        group = _alone(torch)
        train(nn.parallel.DistributedDataParallel(model, process_group=group))
        time.sleep(0.05)  # gloo's threads come to rest: as its end can lock up otherwise
        del group
    gc.collect()  # gloo's threads end with the group


def _alone(torch: Any) -> Any:
    """A group of one, made of torch's parts, and known to nobody."""
    dist = torch.distributed
    store = dist.HashStore()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo = dist.ProcessGroupGloo(store, 0, 1, options)
    group = dist.ProcessGroup(store, 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    group._set_group_name("phalanx-rehearsal")
    return group


@contextmanager
def _silent() -> Iterator[None]:
    """What is written to descriptors 1 and 2 meanwhile goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    saved = {}
    try:
        for fd in (1, 2):
            try:
                saved[fd] = os.dup(fd)
            except OSError:
                continue
            os.dup2(null, fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)


@contextmanager
def _same_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignored ones are not remembered as shown
        yield


@contextmanager
def _same_random() -> Iterator[None]:
    torch: Any = sys.modules["torch"]
    restore: list[Callable[[], Any]] = []
    own = random.getstate()
    restore.append(lambda: random.setstate(own))
    state = torch.random.default_generator.get_state()
    restore.append(lambda: torch.random.default_generator.set_state(state))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        theirs = numpy.random.get_state()
        restore.append(lambda: numpy.random.set_state(theirs))
    try:
        yield
    finally:
        for back in restore:
            back()


@contextmanager
def _same_modes() -> Iterator[None]:
    """Modes are the thread's own, and go with it. What is the whole process's:"""
    torch: Any = sys.modules["torch"]
    dtype, collecting = torch.get_default_dtype(), gc.isenabled()
    threads = torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float32)
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if collecting:
            gc.enable()
