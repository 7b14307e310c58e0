"""Stopping workers, and sweeping what they leave behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from phalanx.process import stop as stop_module
from phalanx.process import tree
from phalanx.process.preload import PreloadPlan
from phalanx.process.program import Program
from phalanx.process.supervisor import Woken

pytestmark = pytest.mark.process

WARM = PreloadPlan()
BOTH = pytest.mark.parametrize("warm", [False, True], ids=["exec", "warm"])

TELLS_SIGNALS = """
    import os, signal, sys, time

    def tell(who):
        def handler(signum, _):
            os.write(1, f"{who} {signum}\\n".encode())
            if signum == signal.SIGUSR1:
                os._exit(0)
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(s, handler)

    tell("leader")
    if os.fork() == 0:
        tell("child")
        os.write(1, b"ready\\n")
    while True:  # short: a signal just before a sleep does not end it
        time.sleep(0.02)
"""


@pytest.fixture
def quick(monkeypatch):
    """Shorter waits between the stages."""
    monkeypatch.setattr(stop_module, "GROUP_SECONDS", 0.05)
    monkeypatch.setattr(stop_module, "UNKILLABLE_SECONDS", 0.2)


def test_first_the_leader_alone_then_the_group(scene, quick):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    (worker,) = supervisor.start([scene.order(scene.program(TELLS_SIGNALS), stdout=write)])
    assert scene.line(read) == "ready"
    report = supervisor.stop([worker], signum=signal.SIGINT, grace=0.3)
    assert scene.line(read) == "leader 2"
    assert {scene.line(read), scene.line(read)} == {"leader 15", "child 15"}
    assert report.killed == (worker,)
    assert report.stopped == report.unkillable == ()
    assert report.swept >= 1
    assert worker.gone and worker.returncode == -signal.SIGKILL
    assert worker.signalled_by_us == {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}


def test_one_that_ends_by_itself_gets_no_other_signal(scene):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    (worker,) = supervisor.start([scene.order(scene.program(TELLS_SIGNALS), stdout=write)])
    assert scene.line(read) == "ready"
    report = supervisor.stop([worker], signum=signal.SIGUSR1, grace=20.0)
    assert scene.line(read) == f"leader {int(signal.SIGUSR1)}"
    assert report.stopped == (worker,)
    assert report.swept == 1  # its child
    assert worker.returncode == 0
    assert worker.signalled_by_us == {signal.SIGUSR1}
    again = supervisor.stop([worker])
    assert again.stopped == (worker,) and again.seconds < 5


def test_hurry_cuts_the_grace(scene, quick):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    (worker,) = supervisor.start([scene.order(scene.program(TELLS_SIGNALS), stdout=write)])
    assert scene.line(read) == "ready"
    asked = threading.Event()

    def hurry():
        asked.set()
        supervisor.wake()

    threading.Timer(0.05, hurry).start()
    report = supervisor.stop([worker], grace=1000.0, hurry=asked.is_set)
    assert report.killed == (worker,)
    assert Woken() in supervisor.wait(0)


def test_a_stopped_process_is_killed(scene, quick):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    (worker,) = supervisor.start([scene.order(scene.program(TELLS_SIGNALS), stdout=write)])
    assert scene.line(read) == "ready"
    supervisor.signal([worker], signal.SIGSTOP)
    report = supervisor.stop([worker], grace=0.05)
    assert report.killed == (worker,)


@BOTH
@pytest.mark.parametrize("how", ["stopped", "killed", "exits", "dies"])
def test_nothing_of_it_outlives_a_worker(scene, family, ends, how, warm):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    in_r, _ = scene.pipe()
    code = family + "sys.stdin.readline()\nos._exit(3) if 'hard' in sys.argv else sys.exit(3)\n"
    order = scene.order(scene.program(code), stdin=in_r, stdout=write, warm=warm)
    bystander = scene.order(scene.program(code), rank=1, stdin=in_r, stdout=write, warm=not warm)
    # The other one keeps what it has.
    (other,) = supervisor.start([bystander])
    others = [int(pid) for pid in scene.line(read).split()]
    (worker,) = supervisor.start([order])
    below = [int(pid) for pid in scene.line(read).split()]
    assert len(below) == 5 and all(tree.stat(pid) is not None for pid in below)
    if how == "stopped":
        supervisor.stop([worker], grace=20.0)
    elif how == "killed":
        supervisor.stop([worker], signum=signal.SIGKILL)
    else:
        os.kill(worker.pid, signal.SIGTERM if how == "exits" else signal.SIGKILL)
        scene.until_gone(supervisor, [worker])
    assert worker.gone
    assert [pid for pid in below if (e := tree.stat(pid)) is not None and not e.zombie] == []
    assert worker.swept == 5 and worker.left == ()
    assert other.alive
    assert all((e := tree.stat(pid)) is not None and not e.zombie for pid in others)
    supervisor.stop([other], grace=20.0)
    ends(others, limit=0)


def test_an_orphan_without_any_mark_goes_with_the_last_worker(scene, lives, ends):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    # Another session, another parent, another environment, no page.
    script = "(setsid env -i sh -c 'echo $$; exec sleep 300' 3>&- 4>&- 5>&- 6>&- &); exec sleep 300"
    program = Program(argv=("bash", "-c", script))
    workers = supervisor.start([scene.order(program, rank=r, stdout=write) for r in range(2)])
    orphans = [int(scene.line(read)) for _ in workers]
    os.kill(workers[0].pid, signal.SIGKILL)
    scene.until_gone(supervisor, workers[:1])
    assert any(lives(pid) for pid in orphans)  # whose is it? wait
    os.kill(workers[1].pid, signal.SIGKILL)
    scene.until_gone(supervisor, workers[1:])
    ends(orphans, limit=0)


def test_a_replacement_starts_after_what_the_dead_one_left_has_gone(scene, ends):
    """Its descendants are killed as soon as the death is known, not when memory is free."""
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
            time.sleep(300)
        time.sleep(300)
    """
    order = scene.order(scene.program(code), stdout=write, warm=True)
    (worker,) = supervisor.start([order])
    child = int(scene.line(read))
    os.kill(worker.pid, signal.SIGKILL)
    scene.until(supervisor, lambda seen: not worker.alive)
    supervisor.start([order])
    ends([child], limit=5.0)


@pytest.fixture
def freezer():
    """A freezer control group: a frozen process does not die of SIGKILL."""
    group = Path("/sys/fs/cgroup/freezer") / f"phalanx-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and a version 1 freezer control group")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        end = time.monotonic() + 10
        while (group / "tasks").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        group.rmdir()


def freeze(group: Path, pid: int) -> None:
    (group / "tasks").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    end = time.monotonic() + 10
    while (group / "freezer.state").read_text() != "FROZEN\n":
        assert time.monotonic() < end


def test_what_cannot_be_killed_is_reported_and_blocks_nobody(scene, quick, freezer):
    supervisor = scene.supervisor()
    program = Program(argv=("sleep", "300"))
    workers = supervisor.start([scene.order(program, rank=r) for r in range(2)])
    freeze(freezer, workers[0].pid)
    report = supervisor.stop(workers, grace=0.05)
    assert report.unkillable == (workers[0],)
    assert report.stopped == (workers[1],)
    assert report.seconds < 5
    (third,) = supervisor.start([scene.order(program, rank=2)])
    assert third.alive
    (freezer / "freezer.state").write_text("THAWED")
    scene.until_gone(supervisor, [workers[0]])
    assert workers[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_descendant_that_cannot_be_killed_is_reported(scene, freezer, monkeypatch):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    program = Program(argv=("sh", "-c", "sleep 300 & echo $!; wait"))
    (worker,) = supervisor.start([scene.order(program, stdout=write)])
    child = int(scene.line(read))
    freeze(freezer, child)
    os.kill(worker.pid, signal.SIGKILL)
    scene.until_gone(supervisor, [worker])
    assert worker.left == (child,)
    # The next one does not have to wait for it.
    (second,) = supervisor.start([scene.order(Program(argv=("true",)))])
    begin = time.monotonic()
    scene.until_gone(supervisor, [second])
    assert time.monotonic() - begin < 1.5
    (freezer / "freezer.state").write_text("THAWED")
