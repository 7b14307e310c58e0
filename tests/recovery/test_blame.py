"""Which of several failures was the cause, by a table and by what must always hold."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.recovery.blame import _CRASHES, _REQUESTS, NOTICED_LATE_NS, Failure, order

PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:29500"


@pytest.mark.parametrize(
    ("cause", "other"),
    [
        (Failure(1, 5), Failure(1, 6)),
        (Failure(-9, 5 + NOTICED_LATE_NS), Failure(1, 6)),
        (Failure(1, 6), Failure(-9, 7 + NOTICED_LATE_NS)),
        (Failure(1, 9, exception="ValueError: x"), Failure(1, 5, exception=PEER)),
        (Failure(-9, 10**12), Failure(1, 5, exception=PEER)),
        (Failure(-9, 9, stopped=True, hung=True), Failure(1, 5)),
        (Failure(1, 9, exception=PEER), Failure(-15, 5, stopped=True)),
        (Failure(-6, 5), Failure(1, 5)),
        (Failure(1, 5), Failure(-15, 5)),
    ],
    ids=[
        "the earlier",
        "a crash that is noticed late",
        "not if much later",
        "not an echo",
        "an echo never",
        "who hung",
        "whom we stopped never",
        "abort before exception",
        "request last",
    ],
)
def test_who_is_to_blame(cause: Failure, other: Failure) -> None:
    assert order(cause) < order(other)


failures = st.builds(
    Failure,
    st.sampled_from([None, 1, 7, -6, -9, -11, -15]),
    st.integers(0, 10**9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, PEER, "ValueError: x"]),
)


@given(failures, failures)
def test_nobody_we_stopped_or_who_lost_its_peer_is_blamed_beside_another(a: Failure, b: Failure):
    first = min((a, b), key=order)
    assert not first.stopped or first.hung or (a.stopped and b.stopped)


def test_the_signals_are_those_of_this_system() -> None:
    assert {signal.Signals(n).name for n in _CRASHES} == {
        "SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"
    }  # fmt: skip
    assert {signal.Signals(n).name for n in _REQUESTS} == {"SIGTERM", "SIGINT", "SIGHUP"}
