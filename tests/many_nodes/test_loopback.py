"""Agents of several nodes on loopback: real processes, no root, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

import grpc.aio

from phalanx.agent import exit_codes
from phalanx.coordinator import link, loop, net, wire, words
from phalanx.coordinator.security import OPEN, Security
from phalanx.coordinator.server import METHODS
from phalanx.rendezvous import model as m

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LIMIT = 120.0
PROGRAM = """
import os, sys, time
with open(os.environ["TEST_OUT"] + "/said", "a") as out:
    out.write(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
while not os.path.exists(os.environ["TEST_OUT"] + "/enough"):
    time.sleep(0.01)
"""


class Machine:
    """Processes of one test, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "program.py").write_text(PROGRAM)

    def start(self, verb: str, *options: str) -> subprocess.Popen[bytes]:
        program = [str(self.folder / "program.py")] if verb == "run" else []
        command = [sys.executable, "-m", "phalanx", verb, *options, *program]
        with self.err(len(self.started)).open("ab") as err:
            process = subprocess.Popen(
                command,
                stdout=err,
                stderr=err,
                env={**os.environ, "TEST_OUT": str(self.folder)},
                cwd=self.folder,
            )
        self.started.append(process)
        return process

    def err(self, number: int) -> Path:
        return self.folder / f"{number}.err"

    def wrote(self, process: subprocess.Popen[bytes]) -> str:
        return self.err(self.started.index(process)).read_text(errors="replace")

    def said(self) -> list[tuple[int, int]]:
        """(pid, attempt) of each start of the program, oldest first."""
        file = self.folder / "said"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(pid), int(attempt)) for pid, attempt in map(str.split, lines)]

    def until(self, true: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + LIMIT
        while not (value := true()):
            assert time.monotonic() < end, f"not so: {what}\n{self.all()}"
            time.sleep(0.02)
        return value

    def ends(self, process: subprocess.Popen[bytes]) -> int:
        self.until(lambda: process.poll() is not None, "it ends")
        return int(process.returncode)

    def all(self) -> str:
        return "\n".join(f"--- {p.args}\n{self.wrote(p)[-3000:]}" for p in self.started)

    def finish(self) -> None:
        (self.folder / "enough").touch()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        process.kill()
        process.wait(20)


@pytest.fixture
def free() -> Callable[[], int]:
    """A port below the range from which the kernel hands them out."""

    def find() -> int:
        while True:
            number = random.randint(20000, 32000)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
                return number

    return find


def job(nnodes: str, port: int, conf: str = "") -> list[str]:
    keys = ",".join(k for k in ("last_call_timeout=1", conf) if k)
    return [
        *("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "job", "--no-warm"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", keys, "--shutdown-timeout", "5"),
    ]


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_first_agent_is_lost_before_the_job_has_formed(
    machine: Machine, free: Callable[[], int]
) -> None:
    port = free()
    first = machine.start("run", *job("3", port))
    machine.until(lambda: "1 of at least 3" in machine.wrote(first), "the first one waits")
    other = machine.start("run", *job("3", port, "join_timeout=3"))
    machine.until(lambda: "2 of at least 3" in machine.wrote(other), "the other one too")
    first.kill()
    assert machine.ends(other) == exit_codes.RENDEZVOUS
    text = machine.wrote(other)
    assert "nobody can take its place before the job's first generation" in text
    assert f"127.0.0.1:{port}" in text and "start that agent again" in text
    assert not machine.said()


def test_nobody_is_there_at_all(machine: Machine, free: Callable[[], int]) -> None:
    port = free()
    alone = machine.start("run", *job("2", port, "join_timeout=1,is_host=0"))
    assert machine.ends(alone) == exit_codes.RENDEZVOUS
    assert "there was no coordinator at" in machine.wrote(alone)


def test_workers_end_when_no_coordinator_is_heard_and_start_again_with_it(
    machine: Machine, free: Callable[[], int]
) -> None:
    port = free()
    listen = ["--listen", f"127.0.0.1:{port}", "--state-dir", str(machine.folder / "state")]
    coordinator = machine.start("coordinator", *listen)
    machine.until(lambda: "listens on" in machine.wrote(coordinator), "it listens")
    agent = machine.start("run", "--isolation-timeout", "1", *job("1:2", port, "is_host=0"))
    ((pid, _),) = machine.until(machine.said, "the program runs")
    coordinator.kill()
    machine.until(lambda: "--isolation-timeout" in machine.wrote(agent), "it says so")
    assert "no coordinator for 1" in machine.wrote(agent)
    machine.until(lambda: not lives(pid), "the worker ends")
    assert agent.poll() is None
    coordinator.wait()
    machine.start("coordinator", *listen)
    machine.until(lambda: len(machine.said()) == 2, "the program runs again")
    assert machine.said()[1][1] == 1
    machine.finish()
    assert machine.ends(agent) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_one_certificate_for_all_with_a_name_of_its_own(
    machine: Machine, free: Callable[[], int]
) -> None:
    key, certificate = (str(machine.folder / name) for name in ("job.key", "job.pem"))
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key} -out {certificate} -subj /CN=job -addext subjectAltName=DNS:job"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    files = ["--tls-cert", certificate, "--tls-key", key, "--tls-ca", certificate]
    port = free()
    named = [*job("2", port), *files, "--tls-name", "job"]
    agents = [machine.start("run", *named) for _ in range(2)]
    machine.until(lambda: len(machine.said()) == 2, "both run")
    stranger = machine.start("run", *job("2", port, "join_timeout=2,is_host=0"), *files)
    assert machine.ends(stranger) == exit_codes.RENDEZVOUS  # 127.0.0.1 is not in it
    machine.finish()
    assert [machine.ends(agent) for agent in agents] == [0, 0]


# --- bytes that do not belong -------------------------------------------------------------------

TOKEN = "swordfish"
SHOWN = (("authorization", f"Bearer {TOKEN}"),)
WRONG_TOKEN = (("authorization", "Bearer sesame"),)


async def throw(endpoint: str, frames: list[bytes], metadata: Any) -> grpc.StatusCode:
    """The status with which a stream ends that says these frames."""
    reached = await net.reach(endpoint, 30.0)
    async with link.channel(reached, endpoint, OPEN, 30.0) as made:
        stream = made.stream_stream(METHODS["Attend"].path)(metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await stream.write(frame)
            while await stream.read() is not grpc.aio.EOF:
                pass
        return await stream.code()


def metrics(port: int) -> dict[str, float]:
    """``phalanx_coordinator_refused`` by why."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("phalanx_coordinator_refused"):
            found[name.partition('why="')[2].partition('"')[0]] = float(value)
    return found


def test_bytes_that_do_not_belong_are_refused_counted_and_nobody_else_notices(
    machine: Machine, free: Callable[[], int]
) -> None:
    port, health, other_health = free(), free(), free()
    token = machine.folder / "token"
    token.write_text(TOKEN)
    options = [*job("2", port), "--token-file", str(token)]
    first = machine.start("run", "--health-check-port", str(health), *options)
    second = machine.start("run", "--health-check-port", str(other_health), *options)
    before = machine.until(lambda: s if len(s := machine.said()) == 2 else None, "both run")
    where = f"127.0.0.1:{port}"
    hello = wire.seal(words.Hello("job", "x"), term=0)
    join = wire.seal(m.Join(m.Node("x", "127.0.0.1")), term=1, seq=1)
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    thrown: list[tuple[str, list[bytes], Any, grpc.StatusCode]] = [
        ("garbage", [b"\xff\xfe garbage"], SHOWN, wrong),
        ("oversized", [hello, b"\x0a" * (wire.MAX_BODY + 2000)], SHOWN, wrong),
        ("replayed", [hello, join, join], SHOWN, wrong),
        # refused before it has said a word
        ("unauthenticated", [], WRONG_TOKEN, grpc.StatusCode.UNAUTHENTICATED),
        ("term", [hello, wire.seal(m.Leave("x"), term=0, seq=1)], SHOWN, wrong),
    ]
    thread = loop.acquire()
    try:
        secure = Security(TOKEN)
        agents = thread.call(link.status(where, secure, 30.0), 60)["nodes"]
        mine = (health, other_health)
        coordinator = next(h for h in mine if _is_coordinator(h))
        for number, (why, frames, metadata, status) in enumerate(thrown):
            assert thread.call(throw(where, frames, metadata), 60) is status
            assert metrics(coordinator) == {w: 1.0 for w, *_ in thrown[: number + 1]}, why
        # each of the five to another agent as well, which is no coordinator
        (away,) = {a["endpoint"] for a in agents} - {where}
        for why, frames, metadata, status in thrown[:1] + thrown[3:4]:
            assert thread.call(throw(away, frames, metadata), 60) is status, why
        follower = next(h for h in mine if h != coordinator)
        assert metrics(follower) == {"garbage": 1.0, "unauthenticated": 1.0}
        after = thread.call(link.status(where, secure, 30.0), 60)
    finally:
        loop.release()
    connected = [n["id"] for n in after["nodes"] if n["connected"]]
    assert sorted(connected) == sorted(a["id"] for a in agents) and after["generation"] == 1
    assert machine.said() == before and all(lives(pid) for pid, _ in before)
    machine.finish()
    assert [machine.ends(first), machine.ends(second)] == [0, 0]
    assert machine.said() == before
    assert "lost" not in machine.wrote(first) + machine.wrote(second)


def _is_coordinator(health: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{health}/metrics", timeout=30) as answer:
        return "\nphalanx_coordinator_here 1" in answer.read().decode()
