"""Out of memory, or not: what the kernel's counters and its log say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.process import oom
from phalanx.process.oom import Cgroup, Counters, Mark, OomWatch, cgroups_of, killed_pid

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("record", "pid"),
    [
        (
            b"3,100,5,-;Memory cgroup out of memory: Killed process 123 (py) total-vm:1kB\n S=x\n",
            123,
        ),
        (b"3,100,5,-;Out of memory: Killed process 7 (a b) (c) total-vm:1kB", 7),
        (b"6,1,5,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/x,task=py,pid=42,uid=0", 42),
        (b"6,1,5,-;eth0: link up pid=42", None),
        (b"6,1,5,-;said\n Killed process 9 (x)", None),
        (b"Killed process 9 (x)", None),
        (b"", None),
    ],
)
def test_kernel_log(record, pid):
    assert killed_pid(record) == pid


# ------------------------------------------------------------------ where the cgroup is


@pytest.mark.parametrize(
    ("membership", "mount", "folders", "version"),
    [
        # Version 2, on the machine itself.
        ("0::/job/worker", "/ {}/cg rw - cgroup2 cgroup2 rw", ["cg/job/worker", "cg/job", "cg"], 2),
        # Version 2 in a container that sees only its own part.
        ("0::/pods/a/worker", "/pods/a {}/cg rw - cgroup2 cgroup rw", ["cg/worker", "cg"], 2),
        ("0::/", "/ {}/cg rw - cgroup2 cgroup rw", ["cg"], 2),
        # Version 1 beside an empty version 2.
        (
            "0::/\n4:cpu,memory:/job\n",
            "/ {}/v2 rw - cgroup2 cgroup2 rw\n31 1 0:1 / {}/cg rw - cgroup cgroup rw,cpu,memory",
            ["cg/job", "cg"],
            1,
        ),
        # Nothing mounted; a mount without what we look for.
        ("0::/", "/ {}/cg rw - tmpfs tmpfs rw", [], 2),
    ],
)
def test_where_the_cgroup_is(tmp_path, membership, mount, folders, version):
    (tmp_path / "cg/job/worker").mkdir(parents=True)
    (tmp_path / "cg/worker").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "7/cgroup").write_text(membership)
    (tmp_path / "self/mountinfo").write_text("30 1 0:1 " + mount.replace("{}", str(tmp_path)))
    found = cgroups_of(7, str(tmp_path))
    assert [group.folder for group in found] == [str(tmp_path / name) for name in folders]
    assert all(group.version == version for group in found)
    assert cgroups_of(8, str(tmp_path)) == []


def test_counters_of_both_versions(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    (two / "memory.events").write_text("low 0\nmax 5\noom 2\noom_kill 1\n")
    (two / "memory.max").write_text("1048576\n")
    (two / "memory.peak").write_text("1048000\n")
    assert Cgroup(str(two), "/two", 2).read() == Counters(1, 5, 1048576, 1048000)
    (two / "memory.max").write_text("max\n")
    assert Cgroup(str(two), "/two", 2).read().limit is None
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (one / "memory.failcnt").write_text("9\n")
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert Cgroup(str(one), "/one", 1).read() == Counters(3, 9, None, None)
    assert Cgroup(str(tmp_path / "gone"), "/gone", 2).read() == Counters()


# ------------------------------------------------------------------ what is said


class Told:
    """A watch without a log, and counters that the test sets."""

    def __init__(self, monkeypatch, before: Counters, above: Counters | None = None) -> None:
        self.now = {"/job": before, "/": above or Counters()}
        self.machine = 4
        monkeypatch.setattr(Cgroup, "read", lambda group: self.now[group.path])
        monkeypatch.setattr(oom, "_machine_kills", lambda: self.machine)
        self.watch = OomWatch(kmsg=None)
        groups = tuple((Cgroup("x", path, 2), value) for path, value in self.now.items())
        self.mark = Mark(100, groups, self.machine)

    def says(self, returncode: int = -9, max_rss: int | None = None) -> str | None:
        return self.watch.explain(self.mark, returncode, max_rss)


def test_nothing_points_to_memory(monkeypatch):
    told = Told(monkeypatch, Counters(1, 5, 64 * MIB, MIB))
    assert told.says() is None
    told.now["/job"] = Counters(1, 50, 64 * MIB, MIB)  # at the limit, but nobody was killed
    assert told.says() is None
    told.machine += 1  # somebody else's
    assert told.says() is None


def test_a_kill_in_the_cgroup_is_probable(monkeypatch):
    told = Told(monkeypatch, Counters(1, 5, 64 * MIB, MIB))
    told.now["/job"] = Counters(2, 6, 64 * MIB, 63 * MIB)
    text = told.says(max_rss=60 * MIB)
    assert text is not None
    assert text.startswith("probably out of memory")
    assert "cgroup /job" in text
    assert "limit 64 MiB, peak 63 MiB, its own peak 60 MiB" in text
    # It was not killed itself: perhaps its data loader was.
    child = told.says(returncode=1)
    assert child is not None and child.startswith("possibly") and "perhaps a child" in child


def test_the_log_makes_it_certain(monkeypatch, tmp_path):
    told = Told(monkeypatch, Counters(0, 0, None, None), Counters(0, 0, 64 * MIB, 64 * MIB))
    log = tmp_path / "kmsg"
    log.write_bytes(b"")
    told.watch = OomWatch(kmsg=str(log))
    log.write_bytes(b"3,1,5,-;Memory cgroup out of memory: Killed process 100 (python3) x")
    # A pid in the log without a kill in the cgroup is another pid namespace's.
    assert told.says() is None
    told.now["/job"] = Counters(1, 0, None, None)
    text = told.says()
    assert text is not None and text.startswith("out of memory: the kernel's OOM killer chose it")
    assert "limit 64 MiB" in text  # of the cgroup above
    told.watch.close()


def test_old_kernels_only_allow_a_guess(monkeypatch):
    told = Told(monkeypatch, Counters(None, 5, 64 * MIB, None))
    assert told.says() is None
    told.now["/job"] = Counters(None, 8, 64 * MIB, None)
    text = told.says()
    assert text is not None and text.startswith("possibly out of memory") and "3 times" in text
    assert told.says(returncode=1) is None
    told.now["/job"] = Counters()
    told.machine += 2
    text = told.says()
    assert text is not None and "on this machine (2 since" in text


def test_no_cgroup_at_all(monkeypatch):
    monkeypatch.setattr(oom, "cgroups_of", lambda pid: [])
    watch = OomWatch(kmsg="/no/such/log")
    assert watch.explain(watch.mark(os.getpid()), 1) is None
    watch.close()
    watch.close()


# ------------------------------------------------------------------ for real

EATER = """
import sys
sys.stdin.readline()
data = bytearray()
while True:
    data += b"x" * 1048576
"""


def small_cgroup(limit: int) -> Path | None:
    """A cgroup of our own with a memory limit; None where we may not make one."""
    here = cgroups_of(os.getpid())
    if not here:
        return None
    folder = Path(here[-1].folder) / f"phalanx-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if here[-1].version == 1:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            try:
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limit))
            except OSError:
                pass
        else:
            (folder / "memory.max").write_text(str(limit))
            (folder / "memory.swap.max").write_text("0")
        return folder
    except OSError:
        folder.rmdir()
        return None


@pytest.mark.process
@pytest.mark.parametrize("kmsg", ["/dev/kmsg", None])
def test_a_real_kill(kmsg):
    folder = small_cgroup(48 * MIB)
    if folder is None:
        pytest.skip("no memory cgroup can be made here")
    watch = OomWatch(kmsg=kmsg)
    try:
        worker = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE)
        (folder / "cgroup.procs").write_text(str(worker.pid))
        mark = watch.mark(worker.pid)
        assert mark.groups[0][0].folder == str(folder)
        worker.communicate(b"go\n", timeout=60)
        assert worker.returncode == -signal.SIGKILL
        text = watch.explain(mark, worker.returncode, 47 * MIB)
        assert text is not None
        assert "out of memory" in text and not text.startswith("possibly")
        assert "limit 48 MiB" in text
        if kmsg is None:
            assert text.startswith("probably")
    finally:
        watch.close()
        folder.rmdir()


@pytest.mark.process
def test_a_real_kill_that_has_nothing_to_do_with_memory():
    watch = OomWatch()
    worker = subprocess.Popen(["sleep", "600"])
    mark = watch.mark(worker.pid)
    worker.kill()
    assert worker.wait(60) == -signal.SIGKILL
    assert watch.explain(mark, worker.returncode) is None
    watch.close()
