"""How long N nodes need to agree, ours beside torch's c10d, in one run.

``python bench/bench_rendezvous.py [--quick] [--sizes 8,32,...]``. Light agents, 64 in a process,
each with a connection of its own, against one coordinator in a process of its own. All are
connected; at a signal all join at once; the time goes from there to the last one that has its
assignment. Then one says that its worker failed, and the time goes to the last one that is
told to stop. torch: the same number of ``DynamicRendezvousHandler`` in threads against one
store, connected before as well, from the signal to the last return of ``next_rendezvous``; its
larger sizes are left out once one takes more than 120 s. Writes bench/results/rendezvous.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "rendezvous.json"
PER_PROCESS = 64
LIMIT = 120.0
SIZES = (8, 32, 128, 512, 1024)
RUN = "bench"


# --- what runs in processes of their own ---------------------------------------------------------


def cpu() -> float:
    """Seconds of this process so far."""
    t = os.times()
    return t.user + t.system


async def coordinator() -> None:
    """Serves until its input ends; answers each line with its numbers."""
    from phalanx.coordinator.standalone import Journal, Standalone

    one = Standalone(Journal(None), run_id=RUN, silence=30.0, line=lambda _: None)
    address = await one.start("127.0.0.1", 0)
    print(address, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        status = one.server.status()
        numbers = {
            "cpu": cpu(),
            "told": one.server.hub.counts["told"] if one.server.hub else 0,
            "said": one.server.hub.counts["said"] if one.server.hub else 0,
            **status["bytes"],
        }
        print(json.dumps(numbers), flush=True)
    await one.stop()


async def agents(endpoint: str, total: int, first: int, count: int) -> None:
    """That many agents. Connects; at a line joins; at another the very first one fails."""
    from phalanx.coordinator import link, words
    from phalanx.rendezvous import model as m

    options = m.Options(total, total, join=600.0, last_call=600.0, rejoin=600.0)
    streams: list[Any] = []
    slots = asyncio.Semaphore(8)

    async def connect(number: int) -> None:
        async with slots:
            hello = words.Hello(RUN, f"n{number:05d}", options=options)
            streams.append((number, await link.attend(endpoint, hello, timeout=60.0)))

    began = time.monotonic()
    await asyncio.gather(*[connect(n) for n in range(first, first + count)])
    connected = time.monotonic() - began
    assigned: list[float] = []
    stopped: list[float] = []
    all_assigned, all_stopped = asyncio.Event(), asyncio.Event()

    async def listen(stream: Any) -> None:
        async for telling in stream.tellings():
            if type(telling) is m.Assign:
                assigned.append(time.monotonic())
                if len(assigned) == count:
                    all_assigned.set()
            elif type(telling) is m.Stop:
                stopped.append(time.monotonic())
                if len(stopped) == count:
                    all_stopped.set()

    listeners = [asyncio.create_task(listen(s)) for _, s in streams]
    loop = asyncio.get_running_loop()
    print(json.dumps({"connected": connected}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    before, began = cpu(), time.monotonic()
    for number, stream in streams:
        node = m.Node(f"n{number:05d}", "127.0.0.1", f"127.0.0.1:{number + 1}", slots=8)
        stream.say(m.Join(node, offer=f"127.0.0.1:{number + 1}"))
    await all_assigned.wait()
    out = {"began": began, "ended": max(assigned), "cpu": cpu() - before}
    print(json.dumps(out), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    began = time.monotonic()
    if first == 0:
        streams[0][1].say(m.Failed(1, 0, "a test", 1))
    await all_stopped.wait()
    print(json.dumps({"began": began, "ended": max(stopped)}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    del listeners
    os._exit(0)


def c10d_server() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = cpu()
    print(store.port, flush=True)
    sys.stdin.readline()
    print(json.dumps({"cpu": cpu() - before}), flush=True)
    os._exit(0)


def c10d_agents(port: int, total: int, first: int, count: int) -> None:
    import threading
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    made = []
    for _ in range(count):
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=600),
        )
        made.append(
            DynamicRendezvousHandler.from_backend(
                run_id=RUN,
                store=store,
                backend=C10dRendezvousBackend(store, RUN),
                min_nodes=total,
                max_nodes=total,
                local_addr="127.0.0.1",
            )
        )
    go = threading.Event()

    def run(handler: Any) -> None:
        go.wait()
        handler.next_rendezvous()

    threads = [threading.Thread(target=run, args=(h,)) for h in made]
    for thread in threads:
        thread.start()
    print(json.dumps({"first": first}), flush=True)
    sys.stdin.readline()
    before, began = cpu(), time.monotonic()
    go.set()
    for thread in threads:
        thread.join()
    print(
        json.dumps({"began": began, "ended": time.monotonic(), "cpu": cpu() - before}), flush=True
    )
    sys.stdin.readline()
    os._exit(0)


# --- the measuring --------------------------------------------------------------------------------


class Slow(Exception):
    """It took longer than the limit."""


class Child:
    """A process of this file that answers lines with JSON."""

    def __init__(self, *args: object) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self, until: float) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise Slow
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.process.args} ended")
        return text

    def json(self, until: float) -> Any:
        return json.loads(self.line(until))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def groups(total: int) -> list[tuple[int, int]]:
    """(first, count) for each process."""
    return [(at, min(PER_PROCESS, total - at)) for at in range(0, total, PER_PROCESS)]


def all_at_once(children: list[Child], limit: float) -> list[Any]:
    until = time.monotonic() + limit
    for child in children:
        child.go()
    return [child.json(until) for child in children]


def ours(total: int) -> dict[str, float]:
    children: list[Child] = []
    server = Child("coordinator")
    try:
        endpoint = server.line(time.monotonic() + 60).strip()
        for first, count in groups(total):
            children.append(Child("agents", endpoint, total, first, count))
        connected = [c.json(time.monotonic() + 300)["connected"] for c in children]
        before = all_at_once([server], 60)[0]
        joined = all_at_once(children, LIMIT)
        after = all_at_once([server], 60)[0]
        stopped = all_at_once(children, LIMIT)
        began = next(s["began"] for s, (first, _) in zip(stopped, groups(total), strict=True)
                     if first == 0)  # fmt: skip
        return {
            "seconds": max(j["ended"] for j in joined) - min(j["began"] for j in joined),
            "last join to all": max(j["ended"] for j in joined) - max(j["began"] for j in joined),
            "client cpu": sum(j["cpu"] for j in joined),
            "server cpu": after["cpu"] - before["cpu"],
            "messages": after["said"] - before["said"] + after["told"] - before["told"],
            "bytes": after["in"] - before["in"] + after["out"] - before["out"],
            "stop": max(s["ended"] for s in stopped) - began,
            "connect": max(connected),
        }
    finally:
        for child in (*children, server):
            child.end()


def c10d(total: int) -> dict[str, float]:
    """Raises Slow."""
    children: list[Child] = []
    server = Child("c10d-server")
    try:
        port = server.line(time.monotonic() + 120).strip()
        for first, count in groups(total):
            children.append(Child("c10d-agents", port, total, first, count))
        for child in children:
            child.json(time.monotonic() + 300)
        joined = all_at_once(children, LIMIT)
        numbers = all_at_once([server], 60)[0]
        return {
            "seconds": max(j["ended"] for j in joined) - min(j["began"] for j in joined),
            "client cpu": sum(j["cpu"] for j in joined),
            "server cpu": numbers["cpu"],
        }
    finally:
        for child in (*children, server):
            child.end()


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] in ("coordinator", "agents", "c10d-server", "c10d-agents"):
        what, *rest = sys.argv[1:]
        if what == "coordinator":
            asyncio.run(coordinator())
        elif what == "agents":
            asyncio.run(agents(rest[0], *map(int, rest[1:])))
        elif what == "c10d-server":
            c10d_server()
        else:
            first, *numbers = map(int, rest)
            c10d_agents(first, *numbers)
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one sample of the smaller sizes")
    parser.add_argument("--sizes", default="", metavar="N,...")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else SIZES
    samples = args.samples
    if args.quick:
        sizes, samples = sizes[:2], 1
    rows = []
    peer_runs = not args.no_peer
    for total in sizes:
        mine, theirs = [], []
        for number in range(samples):
            mine.append(ours(total))
            # What takes minutes is measured once.
            if peer_runs and (number == 0 or theirs[-1]["seconds"] < 20):
                try:
                    theirs.append(c10d(total))
                except Slow:
                    print(f"c10d does not end {total} nodes in {LIMIT:.0f} s", flush=True)
                    peer_runs = False
        rows.append(row(total, mine, theirs))
        print(text(rows[-1]), flush=True)
    about = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "when": time.strftime("%Y-%m-%d"),
    }
    if not args.quick:
        RESULTS.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")
    return 0


def row(total: int, mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    def three(values: list[float]) -> list[float]:
        return [round(v, 4) for v in (min(values), statistics.median(values), max(values))]

    out: dict[str, Any] = {
        "nodes": total,
        "samples": len(mine),
        "ours": {key: three([m[key] for m in mine]) for key in mine[0]},
    }
    if theirs:
        out["c10d"] = {key: three([t[key] for t in theirs]) for key in theirs[0]}
        out["c10d samples"] = len(theirs)
        out["ratio"] = round(out["c10d"]["seconds"][1] / out["ours"]["seconds"][1], 1)
    return out


def text(one: dict[str, Any]) -> str:
    o = {key: three[1] for key, three in one["ours"].items()}
    line = (
        f"{one['nodes']:5d} nodes: {o['seconds']:.3f} s (last join to all "
        f"{o['last join to all']:.3f}), cpu {o['client cpu']:.2f} + {o['server cpu']:.2f} s, "
        f"{o['messages']:.0f} messages, {o['bytes'] / 1000:.0f} kB, stop "
        f"{1000 * o['stop']:.0f} ms, connect {o['connect']:.2f} s"
    )
    if "c10d" in one:
        c = one["c10d"]
        line += (
            f"; c10d {c['seconds'][1]:.2f} s, cpu {c['client cpu'][1]:.1f} + "
            f"{c['server cpu'][1]:.1f} s: {one['ratio']}x"
        )
    return line


if __name__ == "__main__":
    raise SystemExit(main())
