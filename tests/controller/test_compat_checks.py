"""The compatibility checks of ``python -m compat``, without the two that take their time."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("grpc")

from compat import checks, fuzz
from compat.harness import Controller

pytestmark = [pytest.mark.process]

SLOW = {"pings_every_three_seconds_are_no_offence", "too_many_pings_of_ours_are_survived"}


@pytest.mark.parametrize(
    "check", [c for c in checks.CHECKS if c.__name__ not in SLOW], ids=lambda c: c.__name__
)
def test_check(check):
    if check is checks.secure_connections and shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    assert check()


def test_malformed_messages():
    with Controller("--calls-per-second", "1000000") as controller:
        report = fuzz.run(controller, 2500)
    assert report.lost == 0 and report.codes + report.errors == 2500
    assert report.codes > 100 and report.errors > 100 and report.bystander_rounds > 0
    assert report.memory_after - report.memory_before < 32 << 20
