"""What a controller costs and how fast it is, with 10,000 jobs on one machine.

``python bench/bench_controller.py [--jobs N] [--quick]`` starts a controller with a journal and
a client process in one, opens a stream per job (100 per connection), prints one table and
writes bench/results/controller.json: rows of what, unit, ours, peer, ratio, samples. The
peer's figures are ClusterD's documented ones (its source's constants), not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from phalanx.client.channel import METHODS  # noqa: E402
from phalanx.proto import recover_pb2 as pb  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "controller.json"
PER_CONNECTION = 100


class Rows:
    """The table."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        what: str,
        unit: str,
        ours: float,
        peer: float | None,
        samples: int,
        more: bool = False,
    ) -> None:
        """``more``: the greater figure is the better one."""
        ratio = None
        if peer and ours:
            ratio = round(ours / peer if more else peer / ours, 2)
        self.rows.append(
            {
                "what": what,
                "unit": unit,
                "ours": round(ours, 3),
                "peer": peer,
                "ratio": ratio,
                "samples": samples,
            }
        )
        print(f"  {what}: {ours:.3f} {unit}", flush=True)

    def table(self) -> str:
        out = [f"{'what':<62}{'unit':>8}{'ours':>12}{'peer':>10}{'ratio':>9}{'samples':>9}"]
        for row in self.rows:
            peer = "-" if row["peer"] is None else f"{row['peer']:g}"
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:g}x"
            out.append(
                f"{row['what']:<62}{row['unit']:>8}{row['ours']:>12g}{peer:>10}{ratio:>9}"
                f"{row['samples']:>9}"
            )
        return "\n".join(out)


class Clients:
    """Many jobs' clients over few connections, in one event loop."""

    def __init__(self, address: str, jobs: int) -> None:
        count = -(-jobs // PER_CONNECTION)
        self.channels = [
            grpc.aio.insecure_channel(
                address,
                [("grpc.use_local_subchannel_pool", 1), ("grpc.max_concurrent_streams", 1000)],
            )
            for _ in range(count)
        ]
        self.calls: list[dict[str, Any]] = []
        for channel in self.channels:
            self.calls.append(
                {
                    name: (channel.unary_stream if m.server_streams else channel.unary_unary)(
                        m.path, m.request.SerializeToString, m.response.FromString
                    )
                    for name, m in METHODS.items()
                }
            )
        self.jobs = [f"job-{n:05}" for n in range(jobs)]
        self.waiting: dict[tuple[str, str], asyncio.Future[float]] = {}
        self.streams: dict[str, Any] = {}
        self.keep_alives = 0
        self.tasks: list[asyncio.Task[None]] = []

    def call(self, index: int, name: str, request: Any) -> Any:
        return self.calls[index % len(self.calls)][name](request)

    async def open(self, index: int, keep_alive: int) -> None:
        job = self.jobs[index]
        info = pb.ClientInfo(
            jobId=job, role="bench", clientId=job, incarnation=1, keyed=True, keepAlive=keep_alive
        )
        for name in ("Init", "Register"):
            answer = await self.call(index, name, info)
            assert answer.code == 0, answer
        stream = self.call(index, "SubscribeProcessManageSignal", info)
        await stream.initial_metadata()
        self.streams[job] = stream
        self.tasks.append(asyncio.create_task(self.read(job, stream)))

    async def read(self, job: str, stream: Any) -> None:
        async for signal in stream:
            if signal.signalType == "keep-alive":
                self.keep_alives += 1
                continue
            future = self.waiting.pop((job, signal.signalType), None)
            if future is not None and not future.done():
                future.set_result((time.perf_counter(), signal))

    def expect(self, job: str, signal: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self.waiting[job, signal] = future
        return future

    async def fault(self, index: int) -> tuple[float, Any]:
        """(seconds from the report's start to the stop signal, the signal)."""
        job = self.jobs[index]
        got = self.expect(job, "stopTrain")
        rank = [pb.FaultRank(rankId="1", faultType="1", incarnation=time.time_ns() % 2**31)]
        started = time.perf_counter()
        answer = self.call(
            index, "ReportProcessFault", pb.ProcessFaultRequest(jobId=job, faultRanks=rank)
        )
        at, signal = await asyncio.wait_for(got, 60)
        await answer
        return at - started, signal

    async def rest(self, index: int, signal: Any, finish: bool = True) -> float:
        """From the stop signal on to the decided strategy, and to the end; when it was decided."""
        job = self.jobs[index]

        def key(s: Any) -> Any:
            return pb.SignalKey(
                uuid=s.uuid, signalType=s.signalType, changeStrategy=s.changeStrategy, round=s.round
            )

        agree = self.expect(job, "globalFault")
        await self.call(
            index, "ReportStopComplete", pb.StopCompleteRequest(jobId=job, key=key(signal))
        )
        _, signal = await asyncio.wait_for(agree, 60)
        decided = self.expect(job, "changeStrategy")
        await self.call(
            index,
            "ReportRecoverStrategy",
            pb.RecoverStrategyRequest(jobId=job, strategies=["recover", "exit"], key=key(signal)),
        )
        at, signal = await asyncio.wait_for(decided, 60)
        if finish:
            answer = await self.call(
                index,
                "ReportRecoverStatus",
                pb.RecoverStatusRequest(jobId=job, strategy="recover", key=key(signal)),
            )
            assert answer.code == 0, answer
        return float(at)

    async def close(self) -> None:
        for stream in self.streams.values():
            stream.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for channel in self.channels:
            await channel.close()


def rss(pid: int) -> float:
    """Resident MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu(pid: int) -> float:
    """CPU seconds so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(process: subprocess.Popen[str], address: str, args: Any, rows: Rows) -> None:
    jobs, pid = args.jobs, process.pid
    rnd = random.Random(1)
    empty = rss(pid)
    rows.add("memory with no job", "MB", empty, None, 1)
    clients = Clients(address, jobs)
    started = time.perf_counter()
    gate = asyncio.Semaphore(200)

    async def opened(index: int) -> None:
        async with gate:
            await clients.open(index, args.keep_alive)

    await asyncio.gather(*(opened(n) for n in range(jobs)))
    took = time.perf_counter() - started
    rows.add("jobs served at once, each with its stream open", "jobs", jobs, 1024, 1, more=True)
    rows.add("Init, Register and Subscribe", "jobs/s", jobs / took, None, jobs)
    await asyncio.sleep(2)
    before, at, beats = cpu(pid), time.perf_counter(), clients.keep_alives
    await asyncio.sleep(args.idle)
    spent, span = cpu(pid) - before, time.perf_counter() - at
    full = rss(pid)
    rows.add(f"memory with {jobs} idle jobs", "MB", full, None, 1)
    rows.add("memory per idle job and stream", "kB", (full - empty) * 1024 / jobs, None, jobs)
    beat = f"keep-alive every {args.keep_alive or 5} s" if args.keep_alive >= 0 else "no keep-alive"
    rows.add(f"CPU, idle ({beat})", "% of 1", 100 * spent / span, None, 1)
    print(f"  ({(clients.keep_alives - beats) / span:.0f} keep-alives/s)")

    stops, rounds = [], []
    for _ in range(args.samples):
        index = rnd.randrange(jobs)
        started = time.perf_counter()
        seconds, signal = await clients.fault(index)
        stops.append(seconds * 1000)
        decided = await clients.rest(index, signal)
        rounds.append((decided - started) * 1000)
    rows.add(
        "fault on one job to its client, median", "ms", statistics.median(stops), None, len(stops)
    )
    rows.add("fault on one job to its client, p99", "ms", percentile(stops, 0.99), None, len(stops))
    # The original sleeps 1 s (flush) and 10 s (release), and up to 15 s more.
    rows.add(
        "report of a fault to the decided strategy, median",
        "ms",
        statistics.median(rounds),
        11_000,
        len(rounds),
    )
    rows.add(
        "report of a fault to the decided strategy, p99",
        "ms",
        percentile(rounds, 0.99),
        26_000,
        len(rounds),
    )

    many = min(1000, jobs)
    lasts, shares = [], []
    for _ in range(args.repeats):
        chosen = rnd.sample(range(jobs), many)
        started = time.perf_counter()
        results = await asyncio.gather(*(clients.fault(n) for n in chosen))
        lasts.append((time.perf_counter() - started) * 1000)
        shares.append(percentile([s * 1000 for s, _ in results], 0.5))
        await asyncio.gather(
            *(clients.rest(n, s) for n, (_, s) in zip(chosen, results, strict=True))
        )
    rows.add(
        f"{many} jobs stopped at once: until the last client knows",
        "ms",
        statistics.median(lasts),
        None,
        len(lasts),
    )
    rows.add(
        f"{many} jobs stopped at once: the median client",
        "ms",
        statistics.median(shares),
        None,
        len(shares),
    )
    rows.add("memory after all that", "MB", rss(pid), None, 1)
    await clients.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=15.0, help="seconds to watch it idle")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--keep-alive", type=int, default=0, help="seconds; 0: the server's 5; -1: none"
    )
    parser.add_argument(
        "--quick", action="store_true", help="500 jobs, few samples, writes nothing"
    )
    args = parser.parse_args()
    if args.quick:
        args.jobs, args.idle, args.samples, args.repeats = 500, 2.0, 20, 1
    need = args.jobs // PER_CONNECTION + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), hard))
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "phalanx",
                "controller",
                "--listen",
                "127.0.0.1:0",
                "--state-dir",
                folder,
                "--calls-per-second",
                "1000000",
                "--strategies",
                "recover,dump",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split("listens on ")[1].strip()
            asyncio.run(measure(process, address, args, rows))
        finally:
            process.terminate()
            process.wait(30)
    print()
    print(rows.table())
    if not args.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(
            json.dumps(
                {
                    "bench": "controller",
                    "machine": {
                        "cpus": os.cpu_count(),
                        "kernel": platform.release(),
                        "python": platform.python_version(),
                    },
                    "peer": "ClusterD, from its documented constants; not run here",
                    "rows": rows.rows,
                },
                indent=1,
            )
            + "\n"
        )
        print(f"\nwritten: {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
