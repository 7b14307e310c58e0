"""The timer and the delay that rendezvous handlers written for PyTorch build on."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest

from phalanx.elastic.rendezvous.utils import _delay, _PeriodicTimer


def names():
    return [t.name for t in threading.enumerate()]


def test_calls_again_and_again_until_cancelled():
    calls = []
    enough = threading.Event()

    def call(value, *, key):
        calls.append((value, key))
        if len(calls) == 3:
            enough.set()

    timer = _PeriodicTimer(timedelta(milliseconds=10), call, 1, key=2)
    timer.set_name("the timer")
    timer.start()
    assert "the timer" in names()
    assert enough.wait(10)
    timer.cancel()
    timer.cancel()
    assert "the timer" not in names()
    count = len(calls)
    assert set(calls) == {(1, 2)}
    time.sleep(0.05)
    assert len(calls) == count


def test_starts_once():
    timer = _PeriodicTimer(timedelta(seconds=60), print)
    timer.start()
    for again in (timer.start, lambda: timer.set_name("x")):
        with pytest.raises(RuntimeError, match="already started"):
            again()
    timer.cancel()


def test_a_forgotten_timer_ends():
    timer = _PeriodicTimer(timedelta(seconds=60), print)
    timer.set_name("forgotten")
    timer.start()
    del timer
    gc.collect()
    assert "forgotten" not in names()


def test_may_cancel_itself():
    done = threading.Event()
    timer = _PeriodicTimer(timedelta(milliseconds=1), lambda: (timer.cancel(), done.set()))
    timer.start()
    assert done.wait(10)


@pytest.mark.parametrize("seconds", [0.02, (0.02, 0.03)])
def test_delay(seconds):
    began = time.monotonic()
    _delay(seconds)
    assert time.monotonic() - began >= 0.02
