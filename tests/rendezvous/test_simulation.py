"""Short runs of ``make simulate``: what must hold is checked while they play."""

from __future__ import annotations

import pytest
from tests.rendezvous.simulation import Setting, run


@pytest.mark.parametrize("kind", ["sessions", "elastic", "plain"])
@pytest.mark.parametrize("nodes", [3, 5, 8])
def test_whatever_happens(nodes: int, kind: str) -> None:
    for seed in (1, 2):
        how = {"sessions": kind != "plain", "elastic": kind == "elastic"}
        counts, _ = run(Setting(seed, nodes, 3000, slots=1 + seed % 2, **how))
        assert counts["events"] > 100
        assert kind == "elastic" or not counts["resized"]


@pytest.mark.parametrize("sessions", [True, False], ids=["sessions", "plain"])
def test_the_coordinator_dies_at_every_step(sessions: bool) -> None:
    quiet = Setting(7, 3, sessions=sessions, steps=20, only_that=True)
    counts, _ = run(quiet)
    assert counts["succeeded"] == 1
    for event in range(1, counts["events"], 12):
        run(Setting(7, 3, sessions=sessions, steps=20, only_that=True, kill_coordinator_at=event))


def test_a_seed_replays_exactly() -> None:
    setting = Setting(11, 5, 2000)
    assert run(setting) == run(setting)


def test_many_nodes() -> None:
    counts, _ = run(Setting(1, 60, 4000, spares=3, sessions=False, steps=10))
    assert counts["generation"] >= 1
