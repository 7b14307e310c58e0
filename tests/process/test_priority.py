from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.process import priority

pytestmark = pytest.mark.process

CHILD = """
import subprocess, sys, threading
inner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
threading.Thread(target=inner.wait, daemon=True).start()
print(inner.pid, flush=True)
input()
inner.communicate(b"\\n")
"""


def niceness(pid: int) -> set[int]:
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


def test_one_stands_back_only_where_that_can_be_undone(monkeypatch) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        inner = int(child.stdout.readline())
        with monkeypatch.context() as patch:
            patch.setattr(priority, "may_raise", lambda: False)
            priority.lower(child.pid)
            assert niceness(child.pid) == {own}
        priority.lower(child.pid)
        expected = min(19, own + priority.STEP) if priority.may_raise() else own
        assert niceness(child.pid) == {expected}
        os.setpriority(os.PRIO_PROCESS, inner, expected)
        priority.restore(child.pid)
        assert niceness(child.pid) | niceness(inner) == {own}
        child.communicate(b"\n")
    priority.lower(child.pid)  # it is gone: nothing happens
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
