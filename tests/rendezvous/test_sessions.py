"""Recovery in place over several nodes: survivors keep their processes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rendezvous.cluster import Cluster

from phalanx.rendezvous import job
from phalanx.rendezvous.job import Phase
from phalanx.rendezvous.model import (
    Assign,
    Away,
    Commit,
    Kill,
    Lost,
    Over,
    Park,
    Progress,
    Recovered,
    Refused,
    Regroup,
    Roster,
    Share,
    Stop,
    WorkerEvent,
)
from phalanx.rendezvous.sessions import event_of


def running(nodes: str = "abc", **options: Any) -> Cluster:
    c = Cluster(**{"least": 2, "most": 2, "spares": 1, **options})
    c.speaks = True
    c.join(*nodes, slots=2)
    c.pass_time(5)
    assert c.state.phase is Phase.RUNNING
    return c


def test_a_rank_is_replaced_where_it_was() -> None:
    c = running()
    c.die(1)
    (on_a,) = c.agents["a"].of(Regroup)
    (on_b,) = c.agents["b"].of(Regroup)
    assert on_a.assignment.fresh == (1,)
    assert on_a.assignment.previous == (0, None)
    assert on_b.assignment.fresh == ()
    assert on_a.assignment.generation == on_b.assignment.generation == 2
    assert on_a.assignment.attempt == 0
    assert on_a.assignment.store == on_b.assignment.store != ""
    (told,) = c.agents["b"].of(Recovered)
    assert told.replaced == (1,)
    assert told.strategy == "recover-in-place"
    assert told.lost_steps == 0
    assert not c.agents["c"].of(Regroup)


def test_a_new_try_starts_no_process() -> None:
    c = running()
    c.event("b", 2, "fault", kind="network", text="cable")
    for name in "ab":
        (regroup,) = c.agents[name].of(Regroup)
        assert regroup.assignment.fresh == ()
        assert regroup.strategy == "retry"


def test_a_spare_takes_the_ranks_of_a_lost_node_in_one_episode() -> None:
    c = running()
    c.lose("b")
    assert c.ranks == {"a": (0, 1), "c": (2, 3)}
    (assign,) = c.agents["c"].of(Assign)
    assert assign.assignment.fresh == (0, 1)
    assert assign.assignment.attempt == 0
    assert assign.assignment.previous == (None, None)
    (regroup,) = c.agents["a"].of(Regroup)
    assert regroup.assignment.previous == (0, 1)
    assert regroup.strategy == "recover"
    assert "b closed its connection" in regroup.cause
    assert not c.agents["a"].of(Stop)
    (told,) = c.agents["a"].of(Recovered)
    assert (told.strategy, told.replaced) == ("recover", (2, 3))


def test_the_node_with_the_store_and_rank_0_is_no_other() -> None:
    c = running()
    c.lose("a")
    assert c.ranks == {"c": (0, 1), "b": (2, 3)}
    held = c.agents["b"].held
    assert held is not None
    assert held.host_of_store == "b"
    c.join("d", slots=2)
    c.lose("b")
    assert c.ranks == {"c": (0, 1), "d": (2, 3)}


def test_the_spare_is_lost_while_it_moves_in() -> None:
    c = running("abcd")
    c.steps = False
    c.lose("b")
    c.steps = True
    c.lose("c")
    assert c.ranks == {"a": (0, 1), "d": (2, 3)}
    assert c.attempt == 0
    (told,) = c.agents["a"].of(Recovered)
    assert told.generation == 3


def test_without_a_spare_all_start_again() -> None:
    c = running("ab", least=1)
    c.lose("b")
    assert c.ranks == {"a": (0, 1)}
    assert c.attempt == 1


def test_a_spare_of_another_size_cannot_move_in() -> None:
    c = running("ab")
    c.join("c", slots=1)
    c.lose("b")
    assert c.attempt == 1
    assert c.ranks == {"a": (0, 1), "c": (2,)}


def test_what_cannot_be_recovered_in_place_starts_all_again_from_the_budget() -> None:
    c = running(in_place=False, max_restarts=1)
    c.die(1, returncode=-9)
    assert c.attempt == 1
    c.die(1, returncode=-9)
    (over,) = c.agents["b"].of(Over)
    assert over.verdict.status == 137
    assert "rank 1 was killed by SIGKILL on a" in over.verdict.reason
    assert over.verdict.culprit == "a"


def test_a_worker_that_hangs_is_killed_by_its_node() -> None:
    c = running()
    c.steps = False
    quiet = c.agents["b"]
    real = c._work
    c._work = lambda agent, held: None if agent is quiet else real(agent, held)  # type: ignore[method-assign]
    c.die(0)
    c.steps, c._work = True, real  # type: ignore[method-assign]
    c.pass_time(11)
    assert {k.rank for k in quiet.of(Kill)} == {2, 3}
    assert c.agents["a"].of(Recovered)


def test_growth_waits_for_a_step_that_all_finish() -> None:
    c = running("ab", least=2, most=3)
    c.now = 10
    c.say("a", Progress(1, 100))
    c.now = 11
    c.say("b", Progress(1, 110))
    c.now = 11.5
    for agent in c.agents.values():
        agent.stops = False
    c.join("c", slots=2)
    (stop,) = c.agents["a"].of(Stop)
    assert stop.at == 130  # 110, half a second later 115, and 1.5 s ahead
    c.stop_now("a")
    assert c.state.phase is Phase.STOPPING
    c.stop_now("b")
    assert c.ranks == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


def test_a_step_that_cannot_be_finished_is_not_waited_for() -> None:
    c = running("ab", least=2, most=3)
    c.say("a", Progress(1, 100))
    c.now += 1
    c.say("a", Progress(1, 110))
    for agent in c.agents.values():
        agent.stops = False
    c.join("c", slots=2)
    c.event("b", 2, "died", how="was killed")
    assert [stop.at for stop in c.agents["a"].of(Stop)] == [pytest.approx(125), None]


def test_growth_waits_for_the_end_of_an_episode() -> None:
    c = running("ab", least=2, most=3)
    c.steps = False
    c.die(0)
    c.join("c", slots=2)
    assert c.agents["c"].of(Park)
    assert not c.agents["a"].of(Stop)
    for name, ranks in list(c.ranks.items()):
        for rank in ranks:
            c.event(name, rank, "good_step", step=3)
    assert set(c.ranks) == {"a", "b", "c"}
    assert c.attempt == 1


def test_events_of_a_process_that_was_replaced_change_nothing() -> None:
    c = running()
    c.die(1)
    before = c.state
    c.say("a", WorkerEvent(1, 1, "died", {"how": "was killed"}))
    assert c.state == before
    c.say("b", WorkerEvent(2, 1, "died", {"how": "not on this node"}))
    assert c.state == before


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("hello", {"waiting": 1}),
        ("died", {}),
        ("died", {"how": 3}),
        ("fault", {"kind": "network"}),
        ("good_step", {"step": True}),
        ("good_step", {"step": 1, "report": [1]}),
        ("no such", {}),
    ],
)
def test_data_that_are_not_what_they_should_be_are_nothing(kind: str, data: dict[str, Any]) -> None:
    assert event_of(WorkerEvent(1, 0, kind, data)) is None


# --- connections and takeovers ----------------------------------------------------------------


def test_who_missed_a_regroup_is_told_again() -> None:
    c = running()
    old = c.agents["b"].held
    c.die(1)
    c.agents["b"].held = old
    c.join("b", slots=2)
    regroups = c.agents["b"].of(Regroup)
    assert [r.assignment.generation for r in regroups] == [2, 2]
    assert regroups[-1].assignment.fresh == ()


def test_who_comes_back_without_workers_takes_its_own_seat() -> None:
    c = running("ab", spares=0)
    c.agents["b"].held = None
    c.join("b", slots=2)
    assert c.ranks == {"a": (0, 1), "b": (2, 3)}
    assert c.attempt == 0
    assert not c.agents["a"].of(Stop)


def come_back(c: Cluster, name: str, **share: Any) -> None:
    from phalanx.rendezvous.model import Join, Said

    agent = c.agents[name]
    ranks = agent.held.seat.ranks if agent.held else ()
    known = Share(**{"in_loop": ranks, **share})
    c.feed(Said(name, Join(agent.node, 0, agent.held, f"10.0.0.{name}:5000", known)))


def test_a_new_coordinator_goes_on_in_place() -> None:
    c = running()
    c.die(1)
    c.state = job.State.recall(2, c.now, c.options)
    for name in "cab":
        come_back(c, name)
    assert c.state.generation == 2
    assert not c.agents["a"].of(Stop)
    c.lose("b")
    assert c.ranks == {"a": (0, 1), "c": (2, 3)}
    assert c.attempt == 0
    assert c.agents["a"].held is not None
    assert c.agents["a"].held.term == 2


def test_a_death_that_the_old_coordinator_took_with_it() -> None:
    c = running()
    c.state = job.State.recall(2, c.now, c.options)
    come_back(c, "a", in_loop=(0,), dead=(1,))
    come_back(c, "b")
    (regroup,) = c.agents["a"].of(Regroup)
    assert regroup.assignment.fresh == (1,)


def test_the_old_coordinator_told_only_some_of_a_generation() -> None:
    c = running()
    old = c.agents["b"].held
    c.die(1)
    c.agents["b"].held = old
    c.state = job.State.recall(2, c.now, c.options)
    come_back(c, "a")
    come_back(c, "b")
    assert c.ranks == {"a": (0, 1), "b": (2, 3)}
    assert c.agents["b"].of(Regroup)[-1].assignment.generation == 2
    assert not c.agents["a"].of(Stop)


@pytest.mark.parametrize("before", [0, 2])
def test_the_old_coordinators_node_is_replaced_by_a_spare_in_place(before: int) -> None:
    c = running()
    for _ in range(before):  # generations of the same members: who was in them is known too
        c.die(1)
    del c.agents["a"]
    roster = c.agents["b"].of(Roster)[-1]
    lost = frozenset({"a"})
    c.state = job.State.recall(2, c.now, c.options, lost, lost, roster)
    come_back(c, "c")
    come_back(c, "b")
    assert c.ranks == {"c": (0, 1), "b": (2, 3)}
    assert c.attempt == 0
    assert not c.agents["b"].of(Stop)


def silent(c: Cluster, name: str) -> None:
    del c.agents[name]
    c.feed(Lost(name, "was silent for 5 s", certain=False))


def test_the_old_coordinators_node_was_silent_and_is_replaced_in_place_after_the_fence() -> None:
    c = running("abcd", least=3, most=3)
    del c.agents["a"]
    roster = c.agents["b"].of(Roster)[-1]
    c.state = job.State.recall(2, c.now, c.options, absent=frozenset({"a"}), roster=roster)
    for name in "dbc":
        come_back(c, name)
    assert c.state.phase is Phase.RUNNING
    assert not c.agents["d"].of(Assign)  # what it was allowed before may still count
    c.event("b", 2, "fault", kind="network", text="connection closed by peer")
    assert not c.agents["b"].of(Regroup)
    c.pass_time(c.options.commit_within)
    assert c.ranks == {"d": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert c.attempt == 0
    assert not c.agents["b"].of(Stop) and not c.agents["c"].of(Stop)
    (told,) = c.agents["b"].of(Recovered)
    assert told.replaced == (0, 1)


def test_a_silent_node_is_replaced_in_place_after_the_fence() -> None:
    c = running("abcd", least=3, most=3)
    c.event("a", 0, "prepared", step=7)
    assert c.agents["a"].of(Commit)
    silent(c, "b")
    c.event("a", 0, "prepared", step=8)
    assert "a node is lost" in c.agents["a"].of(Refused)[0].reason
    assert not c.agents["d"].of(Assign)
    c.pass_time(c.options.commit_within)
    assert c.ranks == {"a": (0, 1), "d": (2, 3), "c": (4, 5)}
    assert c.attempt == 0 and not c.agents["a"].of(Stop)


def test_a_silent_node_comes_back_before_the_fence() -> None:
    c = running("abc", least=3, most=3)
    c.event("a", 0, "prepared", step=7)
    c.join("d", slots=2)
    b = c.agents["b"]
    silent(c, "b")
    c.agents["b"] = b
    c.join("b", slots=2)
    assert b.of(Stop)  # its workers: the others have waited for them long enough
    c.pass_time(c.options.commit_within)
    assert sorted(c.ranks.values()) == [(0, 1), (2, 3), (4, 5)]
    assert c.attempt == 0


def test_nothing_is_waited_for_that_cannot_be_made_good_in_place() -> None:
    c = running("abc", least=2, most=3)
    c.event("a", 0, "prepared", step=7)
    silent(c, "b")  # there is no spare
    assert c.agents["a"].of(Stop)
    c.pass_time(c.options.commit_within)
    assert set(c.ranks) == {"a", "c"}


def test_two_seats_of_a_lost_coordinator_are_taken_by_two_spares() -> None:
    c = running("abcde", least=3, most=3, spares=2)
    for name in "ab":
        del c.agents[name]
    roster = c.agents["c"].of(Roster)[-1]
    gone = frozenset("ab")
    c.state = job.State.recall(2, c.now, c.options, gone, gone, roster)
    for name in "dec":
        come_back(c, name)
    assert set(c.ranks) == {"c", "d", "e"}
    assert c.attempt == 0 and not c.agents["c"].of(Stop)


# --- connections that close, and why is not known yet ------------------------------------------


def test_who_is_away_is_not_counted_on() -> None:
    c = running("ab", spares=0)
    c.feed(Away("b"))
    c.event("a", 0, "prepared", step=7)
    assert "cannot be reached" in c.agents["a"].of(Refused)[0].reason
    assert not c.agents["a"].of(Stop)
    c.join("b", slots=2)
    c.event("a", 0, "prepared", step=7)
    assert c.agents["a"].of(Commit)


def test_two_connections_close_at_once() -> None:
    c = running("abcd", least=3, most=3, spares=2)
    c.join("e", slots=2)
    for name in "bc":
        del c.agents[name]
        c.feed(Away(name))
    c.feed(Lost("b", "closed its connection"))
    assert not c.agents["a"].of(Stop)  # it may be a minority, or not
    c.feed(Lost("c", "closed its connection"))
    assert sorted(c.ranks) == ["a", "d", "e"]
    assert c.attempt == 0 and not c.agents["a"].of(Stop)


def test_who_was_away_does_not_come_back() -> None:
    c = running("ab", spares=0)
    del c.agents["b"]
    c.feed(Away("b"))
    c.feed(Lost("b", "closed its connection, and did not come back", certain=False))
    assert c.agents["a"].of(Stop)
    c.pass_time(c.options.commit_within)
    assert c.ranks == {}
