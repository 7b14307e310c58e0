"""A real ``phalanx run`` in a process of its own, bounded, with nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60.0

HEAD = """
import os, signal, sys, time
RANK = int(os.environ["RANK"]); ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def say(*words):
    line = " ".join(map(str, words)) + "\\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    fd = os.open(os.environ["TEST_OUT"] + "/said", flags)
    os.write(fd, line.encode()); os.close(fd)
def wait_for(name, limit=50):
    end = time.monotonic() + limit
    while not os.path.exists(os.environ["TEST_OUT"] + "/" + name):
        if time.monotonic() > end: sys.exit(99)
        time.sleep(0.01)
"""

MEMBER = """
import select, socket, phalanx
from phalanx.process.channel import Channel
JOIN = "PHALANX_JOIN" in os.environ
end = Channel(socket.socket(fileno=os.dup(int(os.environ["PHALANX_CHANNEL_FD"]))))
generation = int(os.environ["PHALANX_GENERATION"])
def hear(limit=50):
    end.wait(limit)
    return end.receive()
def begin():
    note = os.memfd_create("note")
    end.send("keep", (note,), name="note", size=0)
    os.close(note)
    phalanx.progress(generation)
    end.send("hello", generation=generation, rank=RANK, capabilities=[], waiting=JOIN)
def follow(message):
    # True: a generation begins
    global generation
    if message.type == "leave":
        told = message.fields["generation"]
        end.send("left", generation=told, step=told, clean=True, shard=0, shards=1)
    if message.type == "kept":
        for fd in message.fds: os.close(fd)
    if message.type == "join" and message.fields["generation"] > generation - JOIN:
        generation = message.fields["generation"]
        phalanx.progress(generation)
        end.send("good_step", generation=generation, step=generation, report={"lost_steps": 0})
        return True
"""


class Job:
    """One ``phalanx run``. Its workers write lines into ``folder`` with ``say``."""

    def __init__(self, folder: Path, words: list[str], env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.events_file = folder / "events.jsonl"
        environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PET_", "TORCHELASTIC_", "PHALANX_"))
        }
        # an agent that is killed cannot tidy up: what it leaves goes with the test's folder
        (folder / "temporary").mkdir(exist_ok=True)
        environment["TMPDIR"] = str(folder / "temporary")
        environment.update(env or {}, TEST_OUT=str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "run", "--events", str(self.events_file), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        self.pid = self.process.pid
        self.out = self.err = ""

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status; ``out`` and ``err`` are known afterwards."""
        self.out, self.err = self.process.communicate(timeout=limit)
        return self.process.returncode

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        rows = [json.loads(r) for r in self.events_file.read_text().splitlines() if r.endswith("}")]
        return [r for r in rows if kind is None or r["kind"] == kind]

    def said(self) -> list[str]:
        path = self.folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, true: Callable[[], Any], limit: float = LIMIT) -> Any:
        """Wait until something is so, looking whenever the folder may have changed."""
        end = time.monotonic() + limit
        while not (value := true()):
            assert time.monotonic() < end, f"not so within {limit} s"
            if self.process.poll() is not None:
                value = true()
                assert value, (
                    f"the job ended first: {self.process.returncode}\n{self.process.communicate()}"
                )
                return value
            select.select([], [], [], 0.01)
        return value

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``job("options", "source of the script", env={}, args=[])`` starts one."""
    jobs: list[Job] = []

    def start(
        options: str, source: str, env: dict[str, str] | None = None, args: list[str] | None = None
    ) -> Job:
        if not {"--no-warm", "--preload"} & set(options.split()):
            options = f"--preload colorsys {options}"  # else a script so small starts fresh
        script = tmp_path / "script.py"
        script.write_text(HEAD + textwrap.dedent(source))
        jobs.append(Job(tmp_path, [*options.split(), str(script), *(args or [])], env))
        return jobs[-1]

    def raw(words: list[str], env: dict[str, str] | None = None) -> Job:
        jobs.append(Job(tmp_path, words, env))
        return jobs[-1]

    start.raw = raw  # type: ignore[attr-defined]
    yield start
    for one in jobs:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
        one.process.communicate(timeout=20)


@pytest.fixture
def member(job: Callable[..., Job]) -> Callable[..., Job]:
    """A job whose workers speak the messages of a session and do nothing else."""

    def start(options: str, body: str, **more: Any) -> Job:
        return job(options, MEMBER + body, **more)

    return start


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
