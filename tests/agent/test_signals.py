"""Stop signals at the worst moment."""

from __future__ import annotations

import signal

import pytest

from phalanx.agent.signals import JobSignals
from phalanx.elastic.multiprocessing import SignalException


def signals() -> JobSignals:
    return JobSignals("SIGTERM,SIGINT", lambda: None, lambda number: None)


def test_one_that_comes_between_the_look_and_the_wait_is_not_slept_on(monkeypatch) -> None:
    ours = signals()
    look = ours.check

    def look_and_then() -> None:
        look()
        ours._on_stop(signal.SIGTERM, None)

    monkeypatch.setattr(ours, "check", look_and_then)
    with pytest.raises(SignalException) as caught, ours.interruptible():
        pytest.fail("the wait has begun")
    assert caught.value.sigval == signal.SIGTERM


def test_the_first_is_raised_once_and_the_second_hurries() -> None:
    ours = signals()
    ours._on_stop(signal.SIGINT, None)
    assert not ours.hurry()
    with pytest.raises(SignalException) as caught:
        ours.check()
    assert caught.value.sigval == signal.SIGINT
    with ours.interruptible():  # the way down is not interrupted again
        ours._on_stop(signal.SIGTERM, None)
    ours.check()
    assert ours.hurry()


@pytest.mark.parametrize("names", ["SIGNONE", "SIGTERM,SIGKILL"])
def test_wrong_names_are_refused_with_the_option(names: str) -> None:
    with pytest.raises(ValueError, match="--signals-to-handle"):
        JobSignals(names, lambda: None, lambda number: None)
