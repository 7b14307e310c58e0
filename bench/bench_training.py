"""What `phalanx.training` costs when nothing happens, and how long a recovery in place takes.

    python bench/bench_training.py [--kills 7] [--workers 2,4] [--out FILE]

Cost: processor time of a step's bookkeeping, in one process, for models with and without
batch norm. Recovery: SIGKILL of one rank in its backward pass to the first good step of all
ranks, the workers started by the small agent of tests/training (which learns of a death by
its pidfd); with a replacement forked after the fault, and with a standby.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "training"))

import small_agent  # noqa: E402

from phalanx.recovery.ladder import Policy  # noqa: E402


def recovery(nursery: Any, world: int, kills: int, standby: bool) -> dict[str, Any]:
    """Each kill in a job of its own, so that each has a standby that is ready."""
    seconds, phases = [], []
    for _ in range(kills):
        folder = Path(tempfile.mkdtemp(prefix="phalanx-bench-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        victim = world - 1
        fault = {"rank": victim, "step": 12, "where": "mid-backward", "kind": "kill"}
        spec = {"width": 256, "norm": False, "cap": 0.2, "steps": 16, "pause": 0.02, "gate": 10}
        agent = small_agent.Agent(
            nursery, world, {**spec, "faults": [fault]}, folder, policy=Policy(), standby=standby
        )
        try:
            agent.start()
            if standby:
                agent.run_until(lambda agent=agent: agent.spare.hello)
            (folder / "ready").touch()
            agent.run(120)
        finally:
            agent.close()
        struck = float((folder / f"fault-{victim}-0").read_text())
        seconds.append(agent.good_at[2] - struck)
        survivor = agent.reports(2)[0]["times"]
        phases.append(
            {
                "decided": agent.decided_at[2] - struck,
                **{name: survivor.get(name) for name in ("left", "regrouped", "restored")},
            }
        )
    return {
        "workers": world,
        "standby": standby,
        "seconds": [round(s, 4) for s in sorted(seconds)],
        "median": round(statistics.median(seconds), 4),
        "phases": {
            name: round(statistics.median(p[name] for p in phases if p[name] is not None), 4)
            for name in phases[0]
        },
    }


def cost() -> dict[str, float]:
    """Microseconds of processor time a step, by model."""
    import torch
    import torch.distributed as dist

    from phalanx.process.channel import Channel
    from phalanx.process.page import ProgressPage
    from phalanx.training import Job, session

    torch.set_num_threads(1)
    _agent_end, worker_end = Channel.pair()
    page = ProgressPage.create("phalanx-bench")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        PHALANX_GENERATION="1",
        PHALANX_CHANNEL_FD=str(worker_end.fileno()),
        PHALANX_PROGRESS_FD=str(page.fd),
    )
    spent = 0.0

    def timed(real: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            nonlocal spent
            begun = time.thread_time()
            try:
                return real(self, *args)
            finally:
                spent += time.thread_time() - begun

        return call

    for name in ("_begin", "_commit", "_forward_ended", "_update_begins", "_update_ends"):
        setattr(Job, name, timed(getattr(Job, name)))
    found = {}
    for title, norms in (("12 linear layers", 0), ("12 linear layers, 12 batch norms", 12)):
        layers: list[Any] = [torch.nn.Linear(64, 64) for _ in range(12)]
        layers += [torch.nn.BatchNorm1d(64) for _ in range(norms)]
        model = torch.nn.Sequential(*layers)
        optim = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000)
        with session() as job:
            job.protect(model=model, optim=optim, schedule=schedule)
            best = []
            for step in job.steps(400):
                spent = 0.0
                with step:
                    model(torch.ones(2, 64)).sum().backward()
                    optim.step()
                    optim.zero_grad()
                best.append(spent)
        found[title] = round(statistics.median(best) * 1e6, 1)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=7)
    options.add_argument("--workers", default="2,4")
    options.add_argument("--out", default=str(ROOT / "bench" / "results" / "training.json"))
    options = options.parse_args()
    nursery = small_agent.Nursery()
    results: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count()}
    results["recovery"] = []
    for world in map(int, options.workers.split(",")):
        for standby in (False, True):
            row = recovery(nursery, world, options.kills, standby)
            results["recovery"].append(row)
            how = "standby" if standby else "forked after the fault"
            print(f"{world} workers, {how}: {row['median'] * 1e3:.0f} ms  {row['phases']}")
    nursery.close()
    results["load"] = os.getloadavg()[0]
    results["microseconds_a_step"] = cost()
    for title, micro in results["microseconds_a_step"].items():
        print(f"{title}: {micro} us a step ({micro / 200:.2f} % of 20 ms)")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
