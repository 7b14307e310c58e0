"""The step that idle warm processes make: nobody can tell, and it is made."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import gc, json, os, random, signal, sys, threading, time, warnings
import numpy, torch, torch.distributed, phalanx.training
from phalanx.process import preload
from phalanx.torch_bridge import rehearsal
preload._optimizer_step()

def shown():
    # what a program could see
    caught = []
    thread = threading.Thread(target=lambda: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.warn("seen?")
        caught = [str(w.message) for w in told]
    return {
        "random": [random.random() for _ in range(3)],
        "numpy": numpy.random.rand(3).tolist(),
        "torch": torch.rand(3).tolist(),
        "seed": torch.initial_seed(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                  str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled()],
        "filters": [repr(f) for f in warnings.filters],
        "warned": caught,
        "modules": sorted(sys.modules),
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "environment": sorted(os.environ),
        "group": torch.distributed.is_initialized(),
        "collecting": [gc.isenabled(), gc.get_threshold()],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)],
        "thread": int(thread.name.split("-")[1].split()[0]),
    }

def child(prepare):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        random.seed(1); numpy.random.seed(2); torch.manual_seed(3)
        made = prepare()
        os.write(write, json.dumps([made, shown()]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)

print(json.dumps([child(lambda: None), child(rehearsal.rehearse)]))
"""


def test_a_program_cannot_tell_that_a_step_was_rehearsed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    (_, plain), (made, rehearsed) = json.loads(done.stdout)
    assert made is True
    assert rehearsed == plain
    assert "Gloo" not in done.stdout + done.stderr
