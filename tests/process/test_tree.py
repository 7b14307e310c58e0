"""Reading the process tree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from phalanx.process import tree
from phalanx.process.page import ProgressPage


@pytest.mark.parametrize("name", ["python", "a) b", ") S 1", "((", "x\ny", ""])
def test_stat_with_any_command_name(name):
    text = f"42 ({name}) Z 7 8 9 0 -1 4194564 " + " ".join(str(n) for n in range(10, 53))
    entry = tree.parse_stat(text.encode())
    assert entry.name == name
    assert (entry.pid, entry.state, entry.ppid, entry.session) == (42, "Z", 7, 9)
    assert entry.flags & tree.PF_EXITING
    assert entry.threads == 20
    assert entry.start == 22
    assert entry.exit_code == 52
    assert entry.zombie


def test_ourselves():
    entry = tree.stat(os.getpid())
    assert entry is not None
    assert entry.ppid == os.getppid()
    assert entry.session == os.getsid(0)
    assert not entry.zombie
    assert tree.death_status(os.getpid(), entry.start) is None
    assert tree.stat(2**22 + 1) is None
    assert os.getpid() in {other.pid for other in tree.everybody()}


@pytest.mark.process
@pytest.mark.parametrize("files", [True, False])
def test_descendants_are_found_with_and_without_the_kernels_list(monkeypatch, files):
    if not files:
        read = tree._read

        def without(path):
            if path.endswith("/children"):
                raise FileNotFoundError(path)
            return read(path)

        monkeypatch.setattr(tree, "_read", without)
        monkeypatch.setattr(tree, "_has_children_files", lambda: False)
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, env={"MARK": "here"}
    ) as shell:
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        found = [entry.pid for entry in tree.descendants(os.getpid())]
        assert shell.pid in found and grandchild in found
        assert found.index(shell.pid) < found.index(grandchild)
        rest = [entry.pid for entry in tree.descendants(os.getpid(), without=[shell.pid])]
        assert shell.pid not in rest and grandchild not in rest
        assert tree.environment_value(grandchild, "MARK") == "here"
        assert tree.environment_value(grandchild, "MAR") is None
        for entry in tree.descendants(shell.pid):
            assert tree.kill(entry)
        shell.kill()


@pytest.mark.process
def test_only_the_process_that_is_meant_is_killed():
    with subprocess.Popen(["sleep", "60"]) as process:
        entry = tree.stat(process.pid)
        assert entry is not None
        entry.start += 1
        assert tree.kill(entry) is False
        assert process.poll() is None
        entry.start -= 1
        assert tree.kill(entry, signal.SIGTERM) is True
        assert process.wait(timeout=20) == -signal.SIGTERM
        assert tree.kill(entry) is False


def test_whoever_maps_a_page_or_has_it_open_is_known_by_its_name():
    page = ProgressPage.create("phalanx-test-tree.17")
    me = os.getpid()
    try:
        assert tree.holds_page(me, "phalanx-test-tree.") == ["phalanx-test-tree.17"]
        assert tree.holds_page(me, "phalanx-test-tree.17x") == []
    finally:
        page.close()
    assert tree.holds_page(me, "phalanx-test-tree.") == ["phalanx-test-tree.17"]  # mapped still
    del page
    assert tree.holds_page(me, "phalanx-test-tree.") == []


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_exit_code_that_may_not_be_read_is_a_doubt():
    """The kernel shows 0 then: that must not be taken for success."""
    code = """
import os, sys
from phalanx.process import tree
child = int(sys.argv[1])
os.setresuid(65534, 65534, 65534)
entry = tree.stat(child)
print(tree.death_status(child, entry.start))
"""
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    entry = tree.stat(pid)
    assert entry is not None
    assert tree.death_status(pid, entry.start) == 7 << 8
    answer = subprocess.run(
        [sys.executable, "-c", code, str(pid)], capture_output=True, text=True, timeout=60
    )
    os.waitpid(pid, 0)
    assert answer.stdout == "None\n", answer.stderr
