"""What the benchmarks share: run a launcher, read its workers' time stamps, print one table.

Workers write JSON lines with ``time.time_ns()`` into ``$BENCH_OUT``; a launcher's own
lines come from the same folder. Ours and the peer's runs alternate, so that both meet the
same machine. Results go to ``bench/results/NAME.json``: rows of what, unit, ours, peer,
ratio, samples.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
PHALANX = [sys.executable, "-m", "phalanx", "run"]
TORCHRUN = [sys.executable, str(HERE / "peers" / "torchrun_stamped.py")]


@dataclass
class Run:
    """One finished command: its exit status, when it began and ended, what was written."""

    returncode: int
    began: int
    ended: int
    events: list[dict[str, Any]]
    cpu: float
    folder: Path

    def first(self, name: str, **where: Any) -> int | None:
        """Wall time in ns of the first such event, None if there is none."""
        for event in self.events:
            if event["ev"] == name and all(event.get(k) == v for k, v in where.items()):
                return int(event["t"])
        return None

    def all(self, name: str, **where: Any) -> list[dict[str, Any]]:
        return [
            e
            for e in self.events
            if e["ev"] == name and all(e.get(k) == v for k, v in where.items())
        ]


def _own_events(path: Path) -> list[dict[str, Any]]:
    """Lines of ``--events`` in the workers' form."""
    out = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            out.append({"ev": record["kind"], "t": int(record["wall"] * 1e9), **record["data"]})
    return out


def run(
    command: Sequence[str],
    worker: str,
    nproc: int,
    *,
    limit: float = 120,
    during: Callable[[int, Path], None] | None = None,
    **env: Any,
) -> Run:
    """Run ``command --nproc-per-node N worker`` and collect what it wrote.

    Raises:
        RuntimeError: it was still running after ``limit`` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment.update({k: str(v) for k, v in env.items()}, BENCH_OUT=str(folder))
    environment["TMPDIR"] = str(folder)  # torchrun leaves its log folder behind
    environment.setdefault("OMP_NUM_THREADS", "1")
    # with its defaults torchrun's restarts hang in two of five runs (stale store keys)
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = [*command]
    if words[: len(PHALANX)] == PHALANX:
        words += ["--events", str(folder / "phalanx.events")]
    words += ["--nproc-per-node", str(nproc), str(HERE / "workers" / worker)]
    with (folder / "log").open("wb") as log:
        began = time.time_ns()
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            if during:
                during(process.pid, folder)
            deadline = time.monotonic() + limit
            usage = None
            handle = os.pidfd_open(process.pid)
            import select

            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            os.close(handle)
            if not ready:
                raise RuntimeError(f"still running after {limit} s: {' '.join(words)}")
            ended = time.time_ns()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
    events: list[dict[str, Any]] = _own_events(folder / "phalanx.events")
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                pass
    events.sort(key=lambda e: e["t"])
    cpu = usage.ru_utime + usage.ru_stime if usage else 0.0
    result = Run(process.returncode, began, ended, events, cpu, folder)
    if process.returncode != 0:
        print((folder / "log").read_text()[-2000:], file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    return result


@dataclass
class Row:
    """One line of a table: samples of ours and of the peer, in ``unit``."""

    what: str
    unit: str
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    target: str = ""

    def as_json(self) -> dict[str, Any]:
        mine, theirs = median(self.ours), median(self.peer)
        return {
            "what": self.what,
            "unit": self.unit,
            "ours": mine,
            "peer": theirs,
            "ratio": round(theirs / mine, 2) if mine and theirs else None,
            "target": self.target,
            "samples": {"ours": self.ours, "peer": self.peer},
        }


def median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, mid, high = min(values), statistics.median(values), max(values)
    digits = 0 if mid >= 100 else 1 if mid >= 10 else 2
    return f"{low:.{digits}f} / {mid:.{digits}f} / {high:.{digits}f}"


def table(
    name: str, peer: str, rows: Sequence[Row], notes: Mapping[str, Any] | None = None
) -> None:
    """Print the rows (min / median / max) and write ``bench/results/NAME.json``."""
    widths = (max(len(r.what) for r in rows), 26, 26)
    print(f"\n{name}: min / median / max; {platform.machine()}, {os.cpu_count()} cores")
    head = f"{'':{widths[0]}}  unit  {'phalanx':>{widths[1]}}  {peer:>{widths[2]}}  ratio"
    print(head + "   target")
    for row in rows:
        ratio = row.as_json()["ratio"]
        print(
            f"{row.what:{widths[0]}}  {row.unit:<4}  {_shown(row.ours):>{widths[1]}}  "
            f"{_shown(row.peer):>{widths[2]}}  {f'{ratio:.1f}x' if ratio else '-':>6}  {row.target}"
        )
    out = HERE / "results" / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    body = {
        "name": name,
        "peer": peer,
        "machine": {"cores": os.cpu_count(), "arch": platform.machine()},
        "python": platform.python_version(),
        "notes": dict(notes or {}),
        "rows": [row.as_json() for row in rows],
    }
    out.write_text(json.dumps(body, indent=1) + "\n")
    print(f"written: bench/results/{out.name}")


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports on which nobody listens now."""
    import socket

    for first in range(20000 + os.getpid() * 41 % 9000, 32000, count):
        opened = []
        try:
            for port in range(first, first + count):
                opened.append(socket.socket())
                opened[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in opened:
                one.close()
    raise RuntimeError(f"no {count} free ports side by side")


def tree(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    found = [pid]
    for at in found:
        for path in Path("/proc").glob(f"{at}/task/*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:
                pass
    return found


def proportional_mb(pids: Sequence[int]) -> float:
    """Sum of the proportional set sizes in MB: shared pages counted once."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        except OSError:
            pass
    return total / 1024
