"""Nodes on which one fault follows another are left out for a while."""

from __future__ import annotations

from tests.rendezvous.cluster import Cluster

from phalanx.rendezvous.job import Phase
from phalanx.rendezvous.model import Over, Park


def test_a_node_that_keeps_failing_is_left_out_and_let_in_again() -> None:
    c = Cluster(least=2, most=2, spares=1, max_restarts=9, node_failures=3, quarantine=600.0)
    c.join("a", "b", "c")
    for _ in range(3):
        assert set(c.ranks) == {"a", "b"}
        c.fail("b", end={"step": c.state.generation})
        c.pass_time(1)
    assert c.ranks == {"a": (0,), "c": (1,)}
    assert "failed too often" in c.agents["b"].of(Park)[-1].reason
    c.pass_time(601)
    c.lose("c")
    assert c.ranks == {"a": (0,), "b": (1,)}


def test_its_agent_started_again_is_no_other_node() -> None:
    c = Cluster(least=1, most=2, max_restarts=9, node_failures=1, quarantine=600.0)
    c.join("a", "b")
    c.fail("b", end={"step": 1})
    assert c.ranks == {"a": (0,)}
    node = c.lose("b").node
    c.join("b2")
    assert set(c.ranks) == {"a", "b2"}
    c.lose("b2")
    c.agents["again"] = type(c.agents["a"])(type(node)("again", node.address, host=node.host))
    from phalanx.rendezvous.model import Join, Said

    c.feed(Said("again", Join(c.agents["again"].node)))
    assert c.ranks == {"a": (0,)}
    assert "failed too often" in c.agents["again"].of(Park)[-1].reason


def test_a_bad_node_is_better_than_none() -> None:
    c = Cluster(least=2, most=2, spares=1, max_restarts=9, node_failures=1)
    c.join("a", "b", "c")
    c.fail("b", end={"step": 1})
    assert set(c.ranks) == {"a", "c"}
    c.lose("c")
    assert set(c.ranks) == {"a", "b"}


def test_a_node_that_cannot_start_its_workers_costs_no_restart() -> None:
    c = Cluster(least=2, most=2, spares=1, max_restarts=0)
    c.join("a", "b", "c")
    c.fail("b", retryable=False, returncode=126)
    assert set(c.ranks) == {"a", "c"}
    assert c.state.phase is Phase.RUNNING


def test_without_another_the_job_ends_with_what_it_said() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.fail("b", retryable=False, returncode=127, reason="there is no program x")
    (over,) = c.agents["a"].of(Over)
    assert over.verdict.status == 127
    assert over.verdict.culprit == "b"
    assert "there is no program x on b" in over.verdict.reason
