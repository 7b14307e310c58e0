"""What the tests of real processes share."""

from __future__ import annotations

import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.process import tree
from phalanx.process.preload import PreloadPlan
from phalanx.process.program import Program
from phalanx.process.supervisor import (
    Happening,
    StartOrder,
    Supervisor,
    WorkerGone,
    WorkerProcess,
)

LIMIT = 20.0  # seconds; for what takes milliseconds when nothing is wrong


class Scene:
    """Supervisors, programs and pipes of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.supervisors: list[Supervisor] = []
        self.fds: list[int] = []
        self.buffers: dict[int, bytes] = {}
        self._programs = 0

    def supervisor(self, plan: PreloadPlan | None = None, **options: Any) -> Supervisor:
        """An open one; closed when the test ends."""
        supervisor = Supervisor(job="test", plan=plan, **options)
        self.supervisors.append(supervisor)
        supervisor.open()
        return supervisor

    def program(self, code: str, *args: str) -> Program:
        """A Python script with this code."""
        self._programs += 1
        path = self.directory / f"program{self._programs}.py"
        path.write_text(textwrap.dedent(code))
        return Program(argv=(sys.executable, str(path), *args), script=str(path), args=tuple(args))

    def order(self, program: Program, rank: int = 0, **options: Any) -> StartOrder:
        """A start order with this process's environment."""
        env = {**os.environ, **options.pop("env", {})}
        env.pop("PYTHONUNBUFFERED", None)  # a line would be two writes
        return StartOrder(local_rank=rank, program=program, env=env, **options)

    def pipe(self) -> tuple[int, int]:
        """Both are closed when the test ends."""
        ends = os.pipe()
        self.fds += ends
        return ends

    def line(self, fd: int) -> str:
        """The next line that comes out of a pipe."""
        buffer = self.buffers.get(fd, b"")
        end = time.monotonic() + LIMIT
        while b"\n" not in buffer:
            left = end - time.monotonic()
            assert left > 0, f"no line within {LIMIT} s; so far {buffer!r}"
            if select.select([fd], [], [], left)[0]:
                chunk = os.read(fd, 65536)
                assert chunk, f"end of file; so far {buffer!r}"
                buffer += chunk
        line, _, self.buffers[fd] = buffer.partition(b"\n")
        return line.decode()

    def until(
        self, supervisor: Supervisor, done: Callable[[list[Happening]], bool]
    ) -> list[Happening]:
        """Collect happenings until ``done`` says so of all of them."""
        end = time.monotonic() + LIMIT
        seen: list[Happening] = []
        while not done(seen):
            left = end - time.monotonic()
            assert left > 0, f"not within {LIMIT} s; so far {seen}"
            seen += supervisor.wait(left)
        return seen

    def until_gone(
        self, supervisor: Supervisor, workers: Sequence[WorkerProcess]
    ) -> list[Happening]:
        """Collect happenings until all of these are gone."""

        def done(seen: list[Happening]) -> bool:
            gone = {h.worker.id for h in seen if isinstance(h, WorkerGone)}
            return gone >= {worker.id for worker in workers}

        return self.until(supervisor, done)

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.close(grace=0.0)
        for fd in self.fds:
            try:
                os.close(fd)
            except OSError:
                pass


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """See `Scene`. Fails the test if it leaves a process behind."""
    before = {entry.pid for entry in tree.descendants(os.getpid())}
    scene = Scene(tmp_path)
    try:
        yield scene
    finally:
        scene.close()
    left = [e.pid for e in tree.descendants(os.getpid()) if e.pid not in before]
    assert left == [], f"left behind: {left}"


def wait_for_end(pids: Sequence[int], limit: float = LIMIT) -> None:
    """Wait until none of these processes lives (a zombie does not)."""
    end = time.monotonic() + limit
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            left = end - time.monotonic()
            ready, _, _ = select.select([pidfd], [], [], max(0.0, left))
            assert ready, f"{pid} lives: {tree.environment_value(pid, 'PHALANX_WORKER')}"
        finally:
            os.close(pidfd)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    entry = tree.stat(pid)
    return entry is not None and not entry.zombie


@pytest.fixture
def ends() -> Callable[..., None]:
    """`wait_for_end`."""
    return wait_for_end


@pytest.fixture
def lives() -> Callable[[int], bool]:
    """`is_alive`."""
    return is_alive


# A program that starts children in all the ways that escape a careless parent, prints
# their pids in one line, and sleeps.
FAMILY = """
    import os, subprocess, sys, time

    def nap():
        time.sleep(300)
        os._exit(0)

    def fork(own_session=False, twice=False, run=nap):
        read, write = os.pipe()
        if os.fork() == 0:
            if own_session:
                os.setsid()
            if twice and os.fork():
                os._exit(0)
            os.write(write, b"%d\\n" % os.getpid())
            run()
        os.close(write)
        if twice:
            os.wait()
        with os.fdopen(read) as file:
            return int(file.readline())

    def execed():
        os.execvp("sleep", ["sleep", "300"])

    pids = {
        "child": fork(),
        "own_session": fork(own_session=True),
        "daemon": fork(own_session=True, twice=True),
        "daemon_exec": fork(own_session=True, twice=True, run=execed),
        "orphan": fork(twice=True),
    }
    print(*pids.values(), flush=True)
"""


@pytest.fixture
def family() -> str:
    """`FAMILY`, without indentation, to be continued."""
    return textwrap.dedent(FAMILY)
