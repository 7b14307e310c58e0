from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx

pytestmark = pytest.mark.process

page_module = pytest.importorskip("phalanx.process.page")


@pytest.fixture
def page() -> Iterator[Any]:
    page = page_module.ProgressPage.create("test")
    yield page
    page.close()


def run(python: Any, page: Any, code: str, **env: str) -> tuple[int, str]:
    process = python(
        code,
        env={**os.environ, "PHALANX_PROGRESS_FD": str(page.fd), **env},
        pass_fds=[page.fd, *(int(v) for k, v in env.items() if k.endswith("_FD"))],
    )
    out, _ = process.communicate(timeout=30)
    return process.pid, out


def test_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    phalanx.progress(3)
    phalanx.progress(phase="checkpoint")


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError)])
def test_bad_steps(step: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        phalanx.progress(step)


def test_step_and_phase_reach_the_page(python: Any, page: Any) -> None:
    code = """
import phalanx
class Seven:
    def __index__(self): return 7
phalanx.progress(0)
phalanx.progress(Seven(), "checkpoint")
phalanx.progress()
"""
    pid, _ = run(python, page, code)
    seen = page.read()
    assert (seen.pid, seen.step, seen.phase, seen.beats) == (pid, 7, "checkpoint", 3)
    assert seen.beat_ns > 0


def test_first_call_makes_the_death_known(python: Any, page: Any) -> None:
    channel = pytest.importorskip("phalanx.process.channel")
    ours, theirs = channel.Channel.pair()
    died = threading.Event()
    code = "import sys, phalanx; phalanx.progress(1); print('up', flush=True); sys.stdin.read()"
    fds = {"PHALANX_PROGRESS_FD": str(page.fd), "PHALANX_CHANNEL_FD": str(theirs.fileno())}
    process = python(code, env={**os.environ, **fds}, pass_fds=[int(fd) for fd in fds.values()])
    try:
        assert process.stdout.readline() == "up\n"
        message = ours.receive()
        assert message is not None
        assert message.type == channel.HELD

        def wait() -> None:
            if page.await_death():
                died.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not died.is_set()
        process.kill()
        thread.join(20)
        assert died.is_set()
    finally:
        ours.close()
        theirs.close()


def test_process_that_was_attached_before(python: Any, page: Any) -> None:
    code = """
import os, phalanx
from phalanx.process.page import ProgressPage
first = ProgressPage.attach(int(os.environ["PHALANX_PROGRESS_FD"]))
first.hold()
first.beat(step=5, phase="start", generation=3)
phalanx.progress(6)
"""
    pid, _ = run(python, page, code)
    seen = page.read()
    assert (seen.pid, seen.step, seen.phase) == (pid, 6, "start")
    assert (seen.generation, seen.beats) == (3, 2)


def test_children_of_the_worker_say_nothing(python: Any, page: Any) -> None:
    code = """
import os, phalanx
phalanx.progress(1)
if os.fork() == 0:
    phalanx.progress(99)
    os._exit(0)
os.wait()
"""
    run(python, page, code)
    assert page.read().step == 1


def test_stale_environment_harms_nobody(python: Any) -> None:
    code = "import phalanx; phalanx.progress(1); phalanx.progress(2); print('fine')"
    for value in ("77", "0", "x", ""):
        env = {**os.environ, "PHALANX_PROGRESS_FD": value}
        assert python(code, env=env).communicate(timeout=20)[0] == "fine\n"


def test_light(python: Any) -> None:
    code = "import sys, phalanx; print([m for m in ('typing', 'logging') if m in sys.modules])"
    process = python(code, env={**os.environ, "PYTHONNOUSERSITE": "1"})
    assert process.communicate(timeout=20)[0] in ("[]\n", "['typing']\n")  # site may import it
