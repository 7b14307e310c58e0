"""A warm program has children as a fresh one has: by every start method."""

from __future__ import annotations

import pytest

from phalanx.process.preload import PreloadPlan

pytestmark = pytest.mark.process

CHILDREN = """
import multiprocessing, os, sys

def work(n):
    return [n * n, __name__, multiprocessing.current_process().name, os.getpid() != MAIN]

MAIN = os.getpid()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print([found[:2] for found in pool.map(work, range(3))])
    queue = context.Queue()
    child = context.Process(target=queue.put, args=("said",))
    child.start()
    print(queue.get(timeout=30), child.name)
    child.join(30)
    print(child.exitcode)
    failing = context.Process(target=sys.exit, args=(3,))
    failing.start()
    failing.join(30)
    print(failing.exitcode, len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(method, run_both, tmp_path):
    (tmp_path / "program.py").write_text(CHILDREN)
    fresh, warm = run_both(["program.py", method])
    assert (warm.status, warm.out, warm.err) == (fresh.status, fresh.out, fresh.err)
    assert warm.status == 0
    assert warm.finish == "0\n"


def test_spawn_from_a_module(run_both, tmp_path):
    (tmp_path / "program.py").write_text(CHILDREN)
    fresh, warm = run_both(["-m", "program", "spawn"])
    assert (warm.status, warm.out, warm.err) == (fresh.status, fresh.out, fresh.err)
    assert warm.status == 0


LOADING = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        return torch.full((2,), float(at))

if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, timeout=60)
    print([batch.sum().item() for batch in loader])
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300, 300)).sum().backward()
    optimizer.step()
    print(torch.isfinite(model.weight).all().item(), torch.get_num_threads())
"""


@pytest.mark.torch
def test_data_loaders(run_both, tmp_path):
    (tmp_path / "program.py").write_text(LOADING)
    plan = PreloadPlan(("torch", "numpy"), optimizer_step=True)
    _, warm = run_both(["program.py"], plan=plan, only="warm")
    assert (warm.status, warm.err) == (0, "")
    assert warm.out == "[12.0, 44.0]\nTrue 2\n"
