"""A world that shrinks and grows in place, over several nodes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rendezvous.cluster import Cluster

from phalanx.rendezvous import job
from phalanx.rendezvous.job import Phase
from phalanx.rendezvous.model import (
    Assign,
    Join,
    Lost,
    Progress,
    Recovered,
    Regroup,
    Roster,
    Said,
    Share,
    Stop,
    WorkerEvent,
)


def running(nodes: str = "abc", slots: int = 2, **options: Any) -> Cluster:
    c = Cluster(**{"least": 2, "most": 3, **options})
    c.speaks = c.resizes = True
    c.join(*nodes, slots=slots)
    c.pass_time(5)
    assert c.state.phase is Phase.RUNNING
    return c


def test_a_lost_node_leaves_a_smaller_world() -> None:
    c = running()
    c.lose("c")
    assert c.ranks == {"a": (0, 1), "b": (2, 3)}
    assert c.attempt == 0
    for name in "ab":
        (regroup,) = c.agents[name].of(Regroup)
        assert regroup.assignment.world == 4
        assert regroup.assignment.groups == 2
        assert regroup.assignment.fresh == ()
        assert regroup.strategy == "elastic-training"
        assert regroup.cause == "c closed its connection: going on with 4 of 6 ranks"
        assert not c.agents[name].of(Stop)
        (told,) = c.agents[name].of(Recovered)
        assert (told.strategy, told.replaced) == ("elastic-training", ())
        assert c.agents[name].of(Roster)[-1].members == 2
    (note,) = [n for n in c.notes if n.kind == "resized"]
    assert note.data == {"ranks": 4, "before": 6, "nodes": ["a", "b"], "moved": 0}


def test_the_highest_node_moves_into_the_hole() -> None:
    c = running()
    c.lose("a")
    assert c.ranks == {"c": (0, 1), "b": (2, 3)}
    (regroup,) = c.agents["c"].of(Regroup)
    assert regroup.assignment.previous == (4, 5)
    (regroup,) = c.agents["b"].of(Regroup)
    assert regroup.assignment.previous == (2, 3)


def test_it_grows_again_after_a_step_that_all_finish() -> None:
    c = running()
    c.lose("b")
    c.say("a", Progress(2, 100))
    c.now += 1
    c.say("a", Progress(2, 110))
    c.join("d", slots=2)
    assert c.ranks == {"a": (0, 1), "c": (2, 3), "d": (4, 5)}
    assert c.attempt == 0
    for name in "ac":
        assert not c.agents[name].of(Stop)
        assert c.agents[name].of(Regroup)[-1].at == 125
        assert "going on with 6 instead of 4 ranks" in c.agents[name].of(Regroup)[-1].cause
    (assign,) = c.agents["d"].of(Assign)
    assert assign.assignment.fresh == (0, 1)
    assert len(c.agents["a"].of(Recovered)) == 2


def test_the_time_for_that_step_is_no_hang() -> None:
    c = running("ab")
    c.say("a", Progress(1, 100))
    c.now += 60
    c.say("a", Progress(1, 101))  # a minute each
    c.steps = False
    real, c._work = c._work, lambda agent, held: None  # type: ignore[method-assign]
    c.join("c", slots=2)
    assert c.agents["a"].of(Regroup)[-1].at == 103
    machine = c.state.machine
    assert machine is not None and machine.episode is not None
    assert machine.episode.left_by is not None
    assert machine.episode.left_by >= c.now + 2 * 60
    c._work = real  # type: ignore[method-assign]


def test_two_are_lost_one_after_the_other() -> None:
    c = running("abcd", least=1, most=4)
    c.steps = False
    c.lose("a")
    c.steps = True
    c.lose("b")
    assert c.ranks == {"d": (0, 1), "c": (2, 3)}
    assert c.attempt == 0
    (told,) = c.agents["c"].of(Recovered)
    assert told.generation == 3


def test_fewer_than_the_least_stop_and_wait() -> None:
    c = running("ab")
    c.lose("b")
    assert c.state.phase is Phase.GATHERING
    (stop,) = c.agents["a"].of(Stop)
    assert "1 of at least 2 nodes are left" in stop.reason


def test_a_spare_is_better_than_a_smaller_world() -> None:
    c = running("abcd", spares=1)
    c.lose("b")
    assert c.ranks == {"a": (0, 1), "d": (2, 3), "c": (4, 5)}


def test_a_spare_of_another_size_makes_a_world_of_its_own() -> None:
    c = running("abc")
    c.join("d", slots=1)
    c.lose("b")
    assert c.ranks == {"a": (0, 1), "c": (2, 3), "d": (4,)}
    assert c.attempt == 0


def test_one_that_cannot_is_enough_to_start_again() -> None:
    c = Cluster(least=2, most=3)
    c.speaks = c.resizes = True
    c.join("a", "b", slots=2)
    c.join("c", slots=2)
    c.event("b", 2, "hello", resizes=False)
    c.lose("c")
    assert c.attempt == 1
    assert c.ranks == {"a": (0, 1), "b": (2, 3)}


def test_a_death_said_under_the_old_number_is_that_of_the_same_process() -> None:
    c = running()
    c.steps = False
    c.lose("a")
    assert c.ranks == {"c": (0, 1), "b": (2, 3)}
    c.say("c", WorkerEvent(1, 5, "died", {"how": "was killed"}))  # on its way before
    (_, regroup) = c.agents["c"].of(Regroup)
    assert regroup.assignment.fresh == (1,)
    assert regroup.assignment.previous == (0, None)
    before = c.state
    c.say("c", WorkerEvent(1, 1, "died", {"how": "was another's"}))
    assert c.state == before


def test_who_missed_that_its_ranks_have_moved_is_told_again() -> None:
    c = running()
    old = c.agents["c"].held
    c.lose("a")
    c.agents["c"].held = old
    c.join("c", slots=2)
    again = c.agents["c"].of(Regroup)[-1]
    assert again.assignment.seat.ranks == (0, 1)
    assert again.assignment.previous == (4, 5)
    assert c.attempt == 0


def test_what_a_cut_hides_is_not_left_out_by_a_minority() -> None:
    c = running("ab", least=1, most=2)
    c.agents.pop("b")
    c.feed(Lost("b", "was silent for 5 s", certain=False))
    assert c.agents["a"].of(Stop)
    assert not c.agents["a"].of(Regroup)


def come_back(c: Cluster, name: str) -> None:
    agent = c.agents[name]
    assert agent.held is not None
    known = Share(in_loop=agent.held.seat.ranks, resizes=agent.held.seat.ranks)
    join = Join(agent.node, 0, agent.held, f"10.0.0.{name}:5000", known)
    c.feed(Said(name, join))


def test_a_new_coordinator_knows_the_smaller_world_and_can_go_on() -> None:
    c = running("abcd", least=1, most=4)
    c.lose("b")
    assert c.ranks == {"a": (0, 1), "d": (2, 3), "c": (4, 5)}
    del c.agents["a"]
    roster = c.agents["d"].of(Roster)[-1]
    lost = frozenset({"a"})
    c.state = job.State.recall(2, c.now, c.options, lost, lost, roster)
    come_back(c, "c")
    come_back(c, "d")
    assert c.ranks == {"c": (0, 1), "d": (2, 3)}
    assert c.attempt == 0
    assert not c.agents["c"].of(Stop)


@pytest.mark.parametrize("who", ["c", "d"])
def test_ranks_of_an_older_deal_are_not_taken_for_those_of_now(who: str) -> None:
    """One node was not told that the ranks were dealt out anew."""
    c = running("abcd", least=1, most=4)
    old = c.agents[who].held
    c.lose("b")
    c.agents[who].held = old
    roster = c.agents["a"].of(Roster)[-1]
    c.state = job.State.recall(2, c.now, c.options, roster=roster)
    for name in "acd":
        come_back(c, name)
    c.pass_time(10)
    held: dict[int, str] = {}
    for name, ranks in c.ranks.items():
        for rank in ranks:
            assert held.setdefault(rank, name) == name
    assert c.state.phase is Phase.RUNNING


def test_a_node_that_is_told_to_go_leaves_a_smaller_world() -> None:
    c = running()
    c.leave("b")
    assert c.ranks == {"a": (0, 1), "c": (2, 3)}
    assert "b left: SIGTERM: going on with 4 of 6 ranks" in c.agents["a"].of(Regroup)[-1].cause
