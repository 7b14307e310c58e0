"""A keeper that is there and does nothing."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx.process import supervisor as module
from phalanx.process.preload import PreloadPlan
from phalanx.process.supervisor import KeeperLost, SupervisorError

pytestmark = pytest.mark.process


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)


def test_a_stopped_keeper_is_lost_and_another_takes_over(scene, impatient):
    supervisor = scene.supervisor()
    (worker,) = supervisor.start([scene.order(scene.program("import time; time.sleep(300)"))])
    os.kill(supervisor._keeper.pid, signal.SIGSTOP)
    seen = scene.until_gone(supervisor, [worker])
    (lost,) = [h for h in seen if isinstance(h, KeeperLost)]
    assert "did not answer" in lost.reason
    assert worker.returncode == -signal.SIGKILL
    supervisor.open()
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(2)"))])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 2


def test_a_start_does_not_wait_for_a_stopped_keeper(scene, impatient):
    supervisor = scene.supervisor()
    os.kill(supervisor._keeper.pid, signal.SIGSTOP)
    with pytest.raises(SupervisorError, match="lost"):
        supervisor.start([scene.order(scene.program("pass"))], timeout=15.0)


def test_a_keeper_with_nothing_to_say_is_not_lost(scene, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.01)
    supervisor = scene.supervisor()
    program = scene.program("import time; time.sleep(0.5)")
    (worker,) = supervisor.start([scene.order(program)])
    assert not any(isinstance(h, KeeperLost) for h in scene.until_gone(supervisor, [worker]))
    assert worker.returncode == 0


def test_without_threads_left_the_keeper_tells_of_a_death(scene, monkeypatch):
    supervisor = scene.supervisor(PreloadPlan())

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.threading.Thread, "start", start)
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(4)"), warm=True)])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 4
    assert worker.warm
