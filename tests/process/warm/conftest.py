"""Programs run twice: by a fresh interpreter, and warm by a small keeper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.process.preload import PreloadPlan, PreloadReport

# Another interpreter to try the same with; it needs PYTHONPATH=src.
PYTHON = os.environ.get("PHALANX_TEST_PYTHON", sys.executable)
NOTHING = PreloadPlan()
KEEPER = Path(__file__).with_name("mini_keeper.py")


@dataclass
class Outcome:
    status: int
    out: str
    err: str
    finish: str = ""  # what `on_finish` was told, a line each


class MiniKeeper:
    """`mini_keeper.py` in a process; one program at a time."""

    def __init__(self, plan: PreloadPlan, env: Mapping[str, str]) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.process = subprocess.Popen(
            [
                *(PYTHON, "-u", str(KEEPER), str(orders), str(answers)),
                json.dumps(plan.to_json()),
            ],
            pass_fds=(orders, answers),
            # Pipes, as an agent may have: none of an import's making.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
        )
        os.close(orders)
        os.close(answers)
        self._reader = open(self._answers)
        self.report = PreloadReport.from_json(json.loads(self._reader.readline()))

    def order(self, **order: object) -> int:
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise AssertionError(f"the keeper died: {self.process.wait(10)}") from None
        line = self._reader.readline()
        assert line, f"the keeper died: {self.process.wait(10)}"
        return int(line)

    def sweep(self) -> None:
        """End the processes that imports started."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        os.close(self._orders)
        self._reader.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def base_env() -> dict[str, str]:
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")
    return {n: os.environ[n] for n in names if n in os.environ} | {"OMP_NUM_THREADS": "2"}


@pytest.fixture(scope="module")
def keepers(base_env: dict[str, str]) -> Iterator[Callable[[PreloadPlan], MiniKeeper]]:
    """One keeper per plan for all tests of a file."""
    made: dict[PreloadPlan, MiniKeeper] = {}

    def get(plan: PreloadPlan) -> MiniKeeper:
        if plan not in made:
            made[plan] = MiniKeeper(plan, base_env)
        return made[plan]

    yield get
    for keeper in made.values():
        keeper.close()


@pytest.fixture
def mini_keeper() -> Iterator[Callable[..., MiniKeeper]]:
    made: list[MiniKeeper] = []

    def make(plan: PreloadPlan, env: Mapping[str, str]) -> MiniKeeper:
        made.append(MiniKeeper(plan, env))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()


def _redirections(folder: Path, stdio: Sequence[str | None]) -> list[tuple[str | None, int]]:
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    return [(p and str(folder / p), f) for p, f in zip(stdio, flags, strict=True)]


@pytest.fixture
def run_both(
    tmp_path: Path,
    base_env: dict[str, str],
    keepers: Callable[[PreloadPlan], MiniKeeper],
) -> Callable[..., tuple[Outcome, Outcome]]:
    """``run_both(words, plan=..., env=..., cwd=..., stdio=...)``: (fresh, warm) outcomes.

    ``words`` are those after ``python -u``.
    """
    count = 0

    def run(
        words: Sequence[str],
        *,
        plan: PreloadPlan = NOTHING,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdio: Sequence[str | None] = ("/dev/null", "out", "err"),
        flags: Sequence[str] = ("-u",),
        only: str | None = None,
    ) -> tuple[Outcome, Outcome]:
        nonlocal count
        count += 1
        complete = {**base_env, **(env or {})}
        where = cwd or tmp_path
        argv = [PYTHON, *flags, *words]
        results = []
        for kind in ("fresh", "warm"):
            folder = tmp_path / f".{kind}{count}"
            folder.mkdir()
            redirections = _redirections(folder, stdio)
            finish = folder / "finish"
            if only not in (None, kind):
                status = 0
            elif kind == "fresh":
                status = _fresh(argv, complete, where, redirections)
            else:
                module = words[0] == "-m"
                program = {
                    "argv": argv,
                    "script": None if module else words[0],
                    "module": words[1] if module else None,
                    "args": list(words[2 if module else 1 :]),
                }
                status = keepers(plan).order(
                    program=program,
                    env=complete,
                    cwd=str(where),
                    stdio=redirections,
                    finish=str(finish),
                )
            results.append(
                Outcome(
                    status,
                    *(
                        (folder / name).read_text(errors="surrogateescape")
                        if (folder / name).exists()
                        else ""
                        for name in ("out", "err", "finish")
                    ),
                )
            )
        return results[0], results[1]

    return run


def _fresh(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    redirections: Sequence[tuple[str | None, int]],
) -> int:
    def redirect() -> None:
        for fd, (path, flags) in enumerate(redirections):
            if path is None:
                os.close(fd)
            else:
                opened = os.open(path, flags, 0o600)
                if opened != fd:
                    os.dup2(opened, fd)
                    os.close(opened)
                os.set_inheritable(fd, True)

    return subprocess.run(
        argv, env=dict(env), cwd=cwd, start_new_session=True, timeout=100, preexec_fn=redirect
    ).returncode
