"""phalanx.elastic.multiprocessing.redirects: what goes where, and back again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.elastic.multiprocessing.redirects import redirect

PROGRAM = """
import ctypes, os, subprocess, sys
from phalanx.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout

libc = ctypes.CDLL(None)
print("before", end=" ")
libc.printf(b"c-before ")
with redirect_stdout(sys.argv[1]):
    print("python")
    libc.printf(b"c\\n")
    libc.fflush(None)
    subprocess.run(["echo", "child"])
    with redirect_stderr(sys.argv[2]):
        print("error", file=sys.stderr)
        os.write(2, b"raw\\n")
    print("error outside", file=sys.stderr)
    print("unflushed", end="")
print("after")
"""


def test_everything_goes_to_the_file_and_comes_back(tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("what was there before\n" * 100)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, out, err], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "error outside\n"
    assert sorted(run.stdout.split()) == ["after", "before", "c-before"]
    assert sorted(out.read_text().splitlines()) == ["c", "child", "python", "unflushed"]
    assert err.read_text() == "error\nraw\n"


def test_the_stream_comes_back_after_an_error(tmp_path, capfd):
    def fail():
        print("inside")
        raise KeyError

    with pytest.raises(KeyError), redirect("stdout", str(tmp_path / "out")):
        fail()
    print("outside")
    os.write(1, b"raw\n")
    assert (tmp_path / "out").read_text() == "inside\n"
    assert sorted(capfd.readouterr().out.split()) == ["outside", "raw"]


def test_no_descriptor_is_left(tmp_path):
    before = os.listdir("/proc/self/fd")
    with redirect("stderr", str(tmp_path / "err")):
        pass
    with pytest.raises(FileNotFoundError), redirect("stderr", str(tmp_path / "no" / "err")):
        pass
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["stdin", "", "STDOUT", "rabbit"])
def test_unknown_stream(tmp_path, name):
    with pytest.raises(ValueError, match="unknown standard stream"):
        redirect(name, str(tmp_path / "x")).__enter__()
    assert os.listdir(tmp_path) == []
