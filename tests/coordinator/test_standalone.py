"""``phalanx coordinator`` and ``phalanx status``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.coordinator import link, loop, words
from phalanx.coordinator.hub import CommitFailed, Facts
from phalanx.coordinator.server import CoordinatorError
from phalanx.coordinator.standalone import Journal, Remembered, Standalone
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

PHALANX = [sys.executable, "-m", "phalanx"]


class Real:
    advance = staticmethod(job.advance)
    next_deadline = staticmethod(job.next_deadline)
    fresh = staticmethod(job.State.fresh)


class Process:
    """``phalanx coordinator``; ``start`` again comes back to the same port."""

    def __init__(self, port: int, folder: Path) -> None:
        self.endpoint = f"127.0.0.1:{port}"
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [*PHALANX, "coordinator", "--listen", self.endpoint, "--silence", "2"]
        command += ["--state-dir", str(self.folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        assert self.endpoint in self.process.stdout.readline()

    def end(self, signum: int = signal.SIGKILL) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(signum)
        self.process.stdout.close()
        return self.process.wait(30)

    def status(self, *args: str) -> str:
        command = [*PHALANX, "status", "--endpoint", self.endpoint, "--timeout", "20", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def coordinator(port: int, tmp_path: Path) -> Any:
    made = Process(port, tmp_path / "state")
    made.start()
    yield made
    assert made.process is not None
    if made.process.poll() is None:
        made.end()


@pytest.mark.process
def test_no_worker_stops_when_it_does(agents: Any, coordinator: Any) -> None:
    options = m.Options(2, 2, join=60.0, last_call=0.2, rejoin=10.0, recall=10.0)
    pair = [
        agents(n, coordinator.endpoint, Real(), is_host=False, options=options, silence=2.0)
        for n in ("a", "b")
    ]
    for agent in pair:
        agent.until(m.Assign)
        agent.until(m.Roster)
        agent.node.say(m.Progress(1, 7))

    def back(term: int) -> None:
        for agent in pair:
            while agent.until(words.Reached, 60).term < term:
                pass
        for agent in pair:
            agent.until(m.Roster, 60)  # it has taken them for what they are
            assert not [t for t in agent.told if isinstance(t, m.Stop | m.Assign | m.Over)]

    coordinator.end()
    for agent in pair:
        agent.until(words.Alone)
    coordinator.start()
    back(2)
    coordinator.process.send_signal(signal.SIGSTOP)
    for agent in pair:
        assert "no sign of life" in agent.until(words.Alone).how
    coordinator.process.send_signal(signal.SIGCONT)
    back(2)
    assert not any(a.node.is_coordinator for a in pair)

    status = json.loads(coordinator.status("--json"))
    assert (status["generation"], status["world"], status["run_id"]) == (1, 2, "job")
    assert [n["ranks"] for n in status["nodes"]] == [[0], [1]]
    assert "generation 1, attempt 0, world 2" in coordinator.status()

    for agent in pair:
        agent.node.say(m.Succeeded(1))
    for agent in pair:
        assert agent.until(m.Over).verdict.success
        agent.close()
    assert coordinator.end(signal.SIGTERM) == 0
    coordinator.start()
    late = agents("c", coordinator.endpoint, Real(), is_host=False, options=options)
    assert late.until(m.Over).verdict.success
    assert "succeeded" in coordinator.status()


def test_the_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "a" / "b")
    assert first.read() is None
    what = Remembered("job", 2, m.Options(2, 3), Facts(4, 5, 1, m.Verdict(False, 3, "x", "n")))
    first.write(what)
    assert first.read() == what
    with pytest.raises(CoordinatorError, match="--state-dir"):
        Journal(tmp_path / "a" / "b")
    first.close()
    second = Journal(tmp_path / "a" / "b")
    assert second.read() == what
    (tmp_path / "a" / "b" / "job.json").write_bytes(b'{"run_id":')
    with pytest.raises(CoordinatorError, match="restore it"):
        second.read()
    (tmp_path / "a" / "b" / "job.json").unlink()
    (tmp_path / "a" / "b" / "job.new").mkdir()
    with pytest.raises(CommitFailed, match="cannot write"):
        second.write(what)
    second.close()


@pytest.mark.parametrize(
    ("hello", "refused"),
    [
        (words.Hello("job", "x", version=words.VERSION + 1, options=m.Options(1, 1)), "version"),
        (words.Hello("job", "x"), "--rdzv-id"),
    ],
    ids=["another version", "no options"],
)
def test_whoever_cannot_take_part_starts_no_job(
    tmp_path: Path, hello: words.Hello, refused: str
) -> None:
    async def play() -> None:
        lines: list[str] = []
        one = Standalone(Journal(tmp_path), line=lines.append)
        try:
            endpoint = await one.start("127.0.0.1", 0)
            with pytest.raises(link.Refused, match=refused):
                await link.attend(endpoint, hello, timeout=30.0)
            assert one.server.hub is None and lines == []
            assert one.server.refused == {"stranger": 1}
        finally:
            await one.stop()

    thread = loop.acquire()
    try:
        thread.call(play(), 60)
    finally:
        loop.release()


def test_nobody_answers(port: int) -> None:
    done = subprocess.run(
        [*PHALANX, "status", "--endpoint", f"127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and f"127.0.0.1:{port}: refused" in done.stderr
