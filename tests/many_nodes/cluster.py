"""Agents of one job on several hosts (``hosts.py``), and what is known of them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hosts import Host, Hosts

HERE = Path(__file__).resolve().parent
DDP = HERE / "ddp.py"
PORT = 29400
LIMIT = 200.0  # a machine may be very busy


class Agent:
    """One agent process. Its events, stdout and stderr are files of ``folder``."""

    def __init__(
        self, host: Host, number: int, folder: Path, words: Sequence[str], torchrun: bool = False
    ) -> None:
        self.host = host
        self.name = f"{host.name}.{number}"
        self.folder = folder
        self.began = time.monotonic()
        self._events = folder / f"{self.name}.events"
        self._err = folder / f"{self.name}.err"
        own = ("PET_", "TORCHELASTIC_", "PHALANX_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        (folder / "temporary").mkdir(exist_ok=True)
        env.update(TMPDIR=str(folder / "temporary"), TEST_OUT=str(folder), OMP_NUM_THREADS="1")
        argv = [sys.executable, "-m", "phalanx", "run", "--events", str(self._events), *words]
        if torchrun:
            argv = [sys.executable, "-m", "torch.distributed.run", *words]
        with self._err.open("ab") as err:
            self.process = host.start(argv, env, stdout=err, stderr=err, cwd=folder)
        self.pid = self.process.pid

    @property
    def err(self) -> str:
        """All that it has written so far."""
        return self._err.read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self._events.exists():
            return []
        rows = [json.loads(r) for r in self._events.read_text().splitlines() if r.endswith("}")]
        return [r for r in rows if kind is None or r["kind"] == kind]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status; a failed wait says what the agent wrote."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end:\n{self.err[-4000:]}") from None


class Step:
    """A line of the program: one rank has finished a step."""

    __slots__ = ("at", "attempt", "generation", "host", "loss", "pid", "rank", "step", "world")

    def __init__(self, line: str) -> None:
        words = line.split()
        self.step, self.rank, self.world, self.attempt, self.generation, self.pid = map(
            int, words[:6]
        )
        self.host, self.at, self.loss = words[6], float(words[7]), words[8]


class Cluster:
    """Hosts and the agents on them; a context manager that leaves nothing behind."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self.hosts = Hosts(count)
        self.agents: list[Agent] = []

    def start(
        self, number: int, words: str, program: Path = DDP, args: Sequence[str] = ()
    ) -> Agent:
        """An agent on that host; ``words`` are its options without the endpoint (host 0)."""
        endpoint = f"{self.hosts[0].address}:{PORT}"
        options = words.split()
        if not any(o.startswith(("--rdzv-endpoint", "--master")) for o in options):
            options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *options]
        agent = Agent(
            self.hosts[number], len(self.agents), self.folder, [*options, str(program), *args]
        )
        self.agents.append(agent)
        return agent

    def steps(self) -> list[Step]:
        """All steps that the program has told of, oldest first."""
        path = self.folder / "said"
        if not path.exists():
            return []
        return [Step(line) for line in path.read_text().splitlines() if len(line.split()) == 9]

    def until(self, true: Callable[[], Any], what: str = "", limit: float = LIMIT) -> Any:
        """Wait until something is so; fails with what the agents wrote."""
        end = time.monotonic() + limit
        while not (value := true()):
            if time.monotonic() > end:
                said = "\n".join(
                    f"--- {a.name} ({a.process.poll()})\n{a.err[-3000:]}" for a in self.agents
                )
                raise AssertionError(f"not so within {limit} s: {what}\n{said}")
            select.select([], [], [], 0.02)
        return value

    def trains(self, world: int, after: float = 0.0, limit: float = LIMIT) -> Step:
        """Wait until a step of a world of that size is done that began after that time
        (monotonic); the first one."""

        def found() -> Step | None:
            return next((s for s in self.steps() if s.world == world and s.at > after), None)

        step: Step = self.until(found, f"a step with a world of {world}", limit)
        return step

    def finish(self) -> None:
        """Let the program come to its end."""
        (self.folder / "enough").touch()

    def close(self) -> None:
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGCONT)
                agent.process.kill()
        self.hosts.close()
        for agent in self.agents:
            agent.process.wait(20)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
