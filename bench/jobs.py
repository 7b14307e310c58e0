"""Small training jobs under ``phalanx run``, with faults: run one, and compare it with another.

The program is that of tests/training/programs.py; ``bench/workers/session.py`` makes a script
of it. Every job has a temporary folder, a token in its environment and an event record of its
own, so what it leaves behind can be told from what others do on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parent / "tests" / "training"
TOKEN = "PHALANX_BENCH_JOB"
_OWN = ("PET_", "TORCHELASTIC_", "PHALANX_")


@dataclass
class Ended:
    """A job that is over. ``status`` None: it had to be ended after its time limit."""

    status: int | None
    seconds: float
    folder: Path
    text: str
    events: list[dict[str, Any]]
    left: list[str]

    def tidy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def strategies(self) -> list[str]:
        """What was done about the faults, in order."""
        done = []
        for event in self.events:
            data = event["data"]
            if event["kind"] == "stopped" and data["saved"]:
                done.append("stop")
            if event["kind"] == "restart_group" and data.get("dumped") is not None:
                done.append("dump")
            if event["kind"] == "recovered" and data["strategy"] != "restart":
                done.append(data["strategy"])
            elif event["kind"] == "attempt_failed":
                done.append("restart" if data["restart"] else "exit")
        return done

    def after_fault(self) -> float | None:
        """Seconds from the last fault to the good step that ended its recovery."""
        marks = [float(path.read_text()) for path in self.folder.glob("fault-*")]
        good = [event["mono"] / 1e9 for event in self.of("recovered")]
        return round(good[-1] - max(marks), 4) if marks and good else None

    def struck(self) -> set[tuple[int, int]]:
        """The (rank, life of that rank) of the faults that came to pass."""
        marks = [path.name.split("-") for path in self.folder.glob("fault-*")]
        return {(int(rank), int(life)) for _, rank, life in marks}

    def reports(self) -> list[dict[str, Any]]:
        """The workers' reports of their last recovery in place."""
        for event in reversed(self.of("recovered")):
            if event["data"].get("reports"):
                return list(event["data"]["reports"].values())
        return []


def environment(folder: Path, token: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("OMP_NUM_THREADS", "1")
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    # torch makes this folder when it is imported, and would in TMPDIR
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")
    return {**env, "TMPDIR": str(temporary), TOKEN: token}


def run(
    spec: dict[str, Any],
    world: int = 4,
    *,
    words: tuple[str, ...] = (),
    limit: float = 180.0,
    folder: Path | None = None,
) -> Ended:
    """Train what ``spec`` says, with its ``faults``. Nothing stays running."""
    folder = folder or Path(tempfile.mkdtemp(prefix="phalanx-job-"))
    path = folder / "spec.json"
    path.write_text(json.dumps({**spec, "folder": str(folder)}))
    token = secrets.token_hex(8)
    env = environment(folder, token)
    env |= {"JOB_SPEC": str(path), "PYTHONPATH": str(PROGRAMS)}
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(world)]
    command += ["--events", str(folder / "events.jsonl"), "--log-dir", str(folder / "logs")]
    command += ["--preload", "programs", *words, str(HERE / "workers" / "session.py")]
    return watch(command, env, folder, token, limit)


def watch(command: list[str], env: dict[str, str], folder: Path, token: str, limit: float) -> Ended:
    """Run a ``phalanx run`` to its end, or to the end of its time."""
    shared = _shared()
    began = time.monotonic()
    out = folder / "output"
    with out.open("ab") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=folder)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    left = [] if status is None else _left(token, folder, shared)
    for pid in _processes(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return Ended(status, seconds, folder, out.read_text(errors="replace"), _events(folder), left)


def _events(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("events.jsonl*"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the writer was killed
    return sorted(found, key=lambda event: event["mono"])


def _processes(token: str) -> list[int]:
    """Living processes with the job's token in the environment they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            marked = f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marked and state not in "ZX":
            found.append(int(entry.name))
    return found


def _shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("phalanx*")}


def _left(token: str, folder: Path, shared: set[str]) -> list[str]:
    left = [f"process {pid}" for pid in _processes(token)]
    left += [f"file {path.name}" for path in (folder / "temporary").iterdir()]
    left += [f"shared memory {name}" for name in sorted(_shared() - shared)]
    return left


# -- comparing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of each rank: the (loss, gradients) of each step, as often as it was done; the weights."""

    traces: dict[int, dict[int, list[tuple[str, str]]]]
    weights: dict[int, str]

    @classmethod
    def of(cls, folder: Path, world: int = 4) -> Outcome:
        """:raises OSError: a rank has not come to its end."""
        traces: dict[int, dict[int, list[tuple[str, str]]]] = {}
        weights: dict[int, str] = {}
        for rank in range(world):
            traces[rank] = {}
            for text in (folder / f"trace-{rank}.jsonl").read_text().splitlines():
                line = json.loads(text)
                steps = traces[rank].setdefault(line["step"], [])
                steps.append((line["loss"], line["grads"]))
            weights[rank] = json.loads((folder / f"end-{rank}").read_text())["weights"]
        return cls(traces, weights)

    def like(self, other: Outcome) -> dict[str, bool]:
        """What is the same to the last bit, each step that was done included."""
        losses = gradients = True
        for rank, steps in other.traces.items():
            for step, done in steps.items():
                for loss, grads in self.traces[rank].get(step, []):
                    losses &= loss == done[0][0]
                    gradients &= grads == done[0][1]
        return {
            "losses": losses,
            "gradients": gradients,
            "weights": self.weights == other.weights,
        }


class Undisturbed:
    """Runs without a fault, each kind made once."""

    def __init__(self, world: int = 4) -> None:
        self._world = world
        self._known: dict[str, Outcome] = {}

    def get(self, spec: dict[str, Any]) -> Outcome:
        """:raises RuntimeError: the run without a fault has failed."""
        spec = {k: v for k, v in spec.items() if v is not None and k != "faults"}
        key = json.dumps(spec, sort_keys=True)
        if key not in self._known:
            ended = run(spec, self._world)
            if ended.status != 0 or ended.left:
                raise RuntimeError(
                    f"without a fault: status {ended.status}, left {ended.left}\n{ended.text}"
                )
            self._known[key] = Outcome.of(ended.folder, self._world)
            ended.tidy()
        return self._known[key]
