from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.watchdog import stacks

pytestmark = pytest.mark.process

HUNG = """
import sys, threading
from phalanx.process.armed import arm
armed = len(sys.argv) > 1 and arm()
def inner_of_the_hang():
    print(armed, flush=True)
    sys.stdin.read()
threading.Thread(target=threading.Event().wait, daemon=True).start()
inner_of_the_hang()
"""

needs_py_spy = pytest.mark.skipif(stacks._find_py_spy() is None, reason="py-spy is not installed")


@pytest.fixture
def no_py_spy() -> Iterator[None]:
    with mock.patch.object(stacks, "_find_py_spy", return_value=None):
        yield


def hang(python: Any, *args: object, **options: Any) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = python(HUNG, *args, **options)
    assert process.stdout is not None
    process.armed = process.stdout.readline() == "True\n"  # type: ignore[attr-defined]
    return process


def method(path: Path) -> str:
    return path.read_text().split("method: ")[1].splitlines()[0]


@needs_py_spy
def test_py_spy_of_several(python: Any, tmp_path: Path) -> None:
    hung = [hang(python) for _ in range(2)]
    names = {process.pid: f"rank/{i}" for i, process in enumerate(hung)}
    paths = stacks.save_stacks(names, tmp_path / "new" / "folder", timeout=20)
    assert [p.name for p in paths] == ["stacks_rank_0.txt", "stacks_rank_1.txt"]
    for path, process in zip(paths, hung, strict=True):
        text = path.read_text()
        if "method: /proc" in text and "ermission" in text:
            pytest.skip("py-spy may not look into processes here")
        assert method(path).startswith("py-spy")
        assert "inner_of_the_hang" in text
        assert f"process {process.pid}, state " in text
        assert "-- /proc --" in text
        assert process.poll() is None
    assert sorted(os.listdir(paths[0].parent)) == [p.name for p in paths]


@needs_py_spy
def test_stopped_process(python: Any, tmp_path: Path, wait_for: Any) -> None:
    process = hang(python)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: (stacks._state(process.pid) or "").startswith("T"))
    (path,) = stacks.save_stacks([process.pid], tmp_path, timeout=20)
    text = path.read_text()
    if "ermission" in text:
        pytest.skip("py-spy may not look into processes here")
    assert method(path) == "py-spy"
    assert "inner_of_the_hang" in text
    assert (stacks._state(process.pid) or "").startswith("T")


@needs_py_spy
def test_python_behind_a_shell(tmp_path: Path) -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} -c '{HUNG}'; true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert shell.stdout is not None
        shell.stdout.readline()
        (path,) = stacks.save_stacks([shell.pid], tmp_path, timeout=20)
        text = path.read_text()
        if "inner_of_the_hang" not in text and "ermission" in text:
            pytest.skip("py-spy may not look into processes here")
        assert "inner_of_the_hang" in text
        assert "descendants" in text
    finally:
        shell.communicate(timeout=20)


@pytest.mark.usefixtures("no_py_spy")
def test_armed_process_writes_itself(python: Any, tmp_path: Path) -> None:
    process = hang(python, "arm")
    assert process.armed  # type: ignore[attr-defined]
    for _ in range(2):
        (path,) = stacks.save_stacks([process.pid], tmp_path, timeout=20)
        text = path.read_text()
        assert method(path) == "faulthandler"
        assert text.count("in inner_of_the_hang") == 1
        assert "py-spy is not installed" in text
    assert process.poll() is None


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "not prepared"),
        ("arm()\npid = os.fork()\nif pid: os.waitpid(pid, 0); os._exit(0)", "not prepared"),
        ("arm(); os.closerange(3, 100)", "not prepared"),
        ("arm(); faulthandler.unregister(armed.STACKS_SIGNAL)", "no signal"),
    ],
    ids=["never armed", "a child of one", "has closed the file", "has let go of the signal"],
)
def test_unarmed_process_gets_no_signal(python: Any, tmp_path: Path, code: str, why: str) -> None:
    source = f"""
import faulthandler, os, sys
from phalanx.process import armed
from phalanx.process.armed import arm
{code}
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    process = python(source)
    pid = int(process.stdout.readline())
    (path,) = stacks.save_stacks([pid], tmp_path, 10)
    assert method(path) == "/proc"
    assert why in path.read_text()
    assert process.poll() is None
    os.kill(pid, 0)
    process.communicate("", timeout=20)


@pytest.mark.usefixtures("no_py_spy")
def test_program_that_has_the_signal_keeps_it(python: Any) -> None:
    code = """
import signal
from phalanx.process.armed import STACKS_SIGNAL, arm
signal.signal(STACKS_SIGNAL, lambda *a: None)
print(arm(), flush=True)
"""
    assert python(code).communicate(timeout=20)[0] == "False\n"


@pytest.mark.usefixtures("no_py_spy")
def test_kernel_view_of_what_is_not_python(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            (path,) = stacks.save_stacks(iter([process.pid]), tmp_path)
        finally:
            process.kill()
    assert method(path) == "/proc"
    assert f"thread {process.pid} 'sleep' state" in path.read_text()


def test_py_spy_that_hangs_costs_bounded_time(
    python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(stacks, "_find_py_spy", lambda: str(fake))
    monkeypatch.setattr(stacks, "_SHARE", 0.01)
    process = hang(python, "arm")
    (path,) = stacks.save_stacks([process.pid], tmp_path, timeout=60)
    text = path.read_text()
    assert method(path) == "faulthandler"
    assert "timed out" in text


def test_never_raises(tmp_path: Path) -> None:
    assert stacks.save_stacks([2**22 + 1, -5, 0], tmp_path) == []
    (tmp_path / "file").write_text("")
    assert stacks.save_stacks([os.getpid()], tmp_path / "file") == []
    assert len(stacks.save_stacks([os.getpid()], tmp_path, timeout=-1)) <= 1
    assert stacks.save_stacks([], tmp_path) == []


def test_py_spy_is_found_beside_the_interpreter(tmp_path: Path) -> None:
    found = stacks._find_py_spy()
    with mock.patch.object(shutil, "which", return_value="elsewhere"):
        beside = Path(sys.executable).parent / "py-spy"
        assert found == str(beside) if beside.exists() else stacks._find_py_spy() == "elsewhere"
