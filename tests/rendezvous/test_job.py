"""The life of a job of several nodes: who takes part, what a fault and a loss lead to."""

from __future__ import annotations

import pytest
from tests.rendezvous.cluster import Cluster

from phalanx.agent import exit_codes
from phalanx.rendezvous import budgets, forming, job
from phalanx.rendezvous.job import Phase
from phalanx.rendezvous.model import (
    Assign,
    Commit,
    Join,
    Lost,
    Over,
    Park,
    Refuse,
    Refused,
    Roster,
    Said,
    Stop,
    Tick,
    WorkerEvent,
)


def test_the_exit_codes_are_the_agents() -> None:
    assert forming.NO_RENDEZVOUS == exit_codes.RENDEZVOUS
    assert budgets.HUNG == exit_codes.HUNG
    assert budgets.NO_ONE_TO_BLAME == exit_codes.KEEPER


# --- forming --------------------------------------------------------------------------------


def test_all_there_form_at_once() -> None:
    c = Cluster(least=3, most=3)
    c.join("a", "b", slots=2)
    assert c.ranks == {}
    c.join("c", slots=2)
    assert c.ranks == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    held = c.agents["b"].held
    assert held is not None
    assert (held.generation, held.attempt, held.world) == (1, 0, 6)
    assert (held.group, held.groups) == (1, 3)
    assert held.store == "10.0.0.a:4000"
    assert held.previous == (None, None)


def test_the_last_call_waits_for_more_only_at_first() -> None:
    c = Cluster(least=1, most=3)
    c.join("a")
    c.pass_time(4)
    c.join("b")
    assert c.ranks == {}
    c.pass_time(1)
    assert c.ranks == {"a": (0,), "b": (1,)}
    c.lose("a")
    assert c.ranks == {"b": (0,)}


def test_too_few_nodes_end_the_job_in_words() -> None:
    c = Cluster(least=2, most=2)
    c.join("a")
    c.pass_time(61)
    (over,) = c.agents["a"].of(Over)
    assert over.verdict.status == exit_codes.RENDEZVOUS
    assert "1 of at least 2 nodes" in over.verdict.reason


def test_a_surplus_node_waits_and_takes_the_place_of_one_that_is_lost() -> None:
    c = Cluster(least=2, most=2, spares=1)
    c.join("a", "b", "c")
    assert c.agents["c"].of(Park)
    assert c.ranks == {"a": (0,), "b": (1,)}
    c.lose("a")
    assert c.ranks == {"c": (0,), "b": (1,)}
    assert c.attempt == 1


def test_a_spare_takes_part_only_in_place_of_another() -> None:
    c = Cluster(least=1, most=3)
    c.join("s", spare=True)
    c.join("a", "b")
    c.pass_time(6)
    assert c.ranks == {"a": (0,), "b": (1,)}
    c.lose("a")
    assert c.ranks == {"s": (0,), "b": (1,)}
    c.join("c")  # an ordinary node is welcome beside them
    assert c.ranks == {"s": (0,), "b": (1,), "c": (2,)}


def test_node_ranks_are_honoured_and_duplicates_refused() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", rank=1)
    c.join("x", rank=1)
    (refuse,) = c.agents["x"].of(Refuse)
    assert "--node-rank 1 is given to" in refuse.reason
    c.join("b", rank=0)
    assert c.ranks == {"b": (0,), "a": (1,)}


def test_the_store_is_served_where_a_listener_was_offered() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", offer=False)
    c.join("b")
    held = c.agents["a"].held
    assert held is not None
    assert held.host_of_store == "b"


def test_without_any_listener_the_wait_ends() -> None:
    c = Cluster(least=1, most=1)
    c.join("a", offer=False)
    c.pass_time(21)
    assert c.agents["a"].of(Over)


# --- growing and shrinking ------------------------------------------------------------------


def test_a_newcomer_is_taken_in_by_a_new_attempt() -> None:
    c = Cluster(least=1, most=2, max_restarts=0)
    c.join("a")
    c.pass_time(6)
    c.join("b")
    assert c.ranks == {"a": (0,), "b": (1,)}
    assert c.attempt == 1
    held = c.agents["a"].held
    assert held is not None
    assert held.previous == (0,)
    assert held.restarts_left == 0


@pytest.mark.parametrize("how", ["lost", "leaves"])
def test_without_one_in_reserve_the_world_shrinks(how: str) -> None:
    c = Cluster(least=2, most=3, max_restarts=0)
    c.join("a", "b", "c")
    if how == "lost":
        c.lose("a")
    else:
        c.leave("a")
    assert c.ranks == {"c": (0,), "b": (1,)}
    assert c.state.phase is Phase.RUNNING
    c.join("a2")
    assert c.ranks == {"c": (0,), "b": (1,), "a2": (2,)}


def test_fewer_than_the_least_wait_for_more() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.lose("b")
    assert c.ranks == {}
    assert c.state.phase is Phase.GATHERING
    c.pass_time(30)
    c.join("b2")
    assert c.ranks == {"a": (0,), "b2": (1,)}


def test_workers_are_stopped_before_others_start() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    c.agents["a"].stops = False
    c.lose("c")
    assert c.state.phase is Phase.STOPPING
    assert c.ranks == {"a": (0,)}  # b has stopped
    c.pass_time(10)
    assert c.state.phase is Phase.STOPPING
    c.stop_now("a")
    assert c.ranks == {"a": (0,), "b": (1,)}


def test_who_does_not_stop_is_left_behind_and_comes_back() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    c.agents["a"].stops = False
    c.lose("c")
    c.pass_time(21)
    assert c.state.generation == 2
    assert c.ranks == {"b": (0,)} or c.ranks == {"b": (1,)}
    c.stop_now("a")
    assert set(c.ranks) == {"a", "b"}


# --- faults ----------------------------------------------------------------------------------


def test_a_fault_starts_all_again_with_one_attempt_number() -> None:
    c = Cluster(least=2, most=2, max_restarts=3)
    c.join("a", "b")
    c.fail("b")
    assert c.attempt == 1
    assert c.agents["a"].of(Stop)[-1].reason == "rank 1 exited with code 7 on b"
    held = c.agents["a"].held
    assert held is not None
    assert held.restarts_left == 2
    c.fail("a")
    c.pass_time(5)
    assert c.attempt == 2


def test_the_budget_is_the_jobs() -> None:
    c = Cluster(least=2, most=2, max_restarts=1)
    c.join("a", "b")
    c.fail("a")
    c.fail("b")
    for agent in c.agents.values():
        (over,) = agent.of(Over)
        assert over.verdict.status == 7
        assert over.verdict.culprit == "b"
        assert "all 1 restarts are used" in over.verdict.reason


def test_membership_costs_no_fault_budget() -> None:
    c = Cluster(least=1, most=2, max_restarts=1)
    c.join("a", "b")
    for name in ("c", "d", "e"):
        c.lose(next(n for n in c.agents if n != "a"))
        c.join(name)
    assert c.attempt == 6
    c.fail("a")
    assert c.state.phase is Phase.RUNNING
    c.fail("a")
    assert c.state.phase is Phase.OVER


def test_a_mistake_of_the_program_is_not_tried_again() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.fail("b", returncode=1, end={"exception": "SyntaxError: invalid syntax"})
    (over,) = c.agents["a"].of(Over)
    assert over.verdict.status == 1
    assert "SyntaxError before any progress" in over.verdict.reason


def test_a_signal_is_told_as_the_shell_does() -> None:
    c = Cluster(least=1, most=1, max_restarts=0)
    c.join("a")
    c.fail("a", returncode=-9)
    assert c.agents["a"].of(Over)[0].verdict.status == 137


# --- the end ---------------------------------------------------------------------------------


def test_success_is_when_all_are_done() -> None:
    c = Cluster(least=2, most=2, spares=1)
    c.join("a", "b", "s")
    c.succeed("a")
    assert c.state.phase is Phase.RUNNING
    c.succeed("b")
    for agent in c.agents.values():
        (over,) = agent.of(Over)
        assert over.verdict.success
    for name in ("a", "b", "s"):
        c.leave(name)
    assert c.state.settled


def test_one_that_is_done_may_go() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.succeed("a")
    c.lose("a")
    assert c.state.phase is Phase.RUNNING
    c.succeed("b")
    assert c.agents["b"].of(Over)[0].verdict.success


def test_one_that_is_done_starts_again_with_the_others() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.succeed("a")
    c.fail("b")
    assert c.ranks == {"a": (0,), "b": (1,)}
    assert c.attempt == 1


def test_late_comers_are_told_of_the_end_and_a_higher_epoch_starts_fresh() -> None:
    c = Cluster(least=1, most=1)
    c.join("a")
    c.succeed("a")
    c.join("late")
    assert c.agents["late"].of(Over)[0].verdict.success
    c.join("next", epoch=1)
    assert c.ranks == {"next": (0,)}
    assert c.attempt == 0
    c.join("old", epoch=0)
    assert "epoch 1" in c.agents["old"].of(Refuse)[0].reason


# --- connections -----------------------------------------------------------------------------


def test_a_broken_connection_costs_nothing_when_it_is_back_before_the_loss_is_seen() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    before = c.state.generation
    c.join("b")
    assert c.state.generation == before
    assert len(c.agents["b"].of(Assign)) == 1


def test_who_comes_back_without_workers_starts_again_with_all() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.agents["b"].held = None
    c.join("b")
    assert c.state.generation == 2
    assert set(c.ranks) == {"a", "b"}


def test_workers_of_an_old_generation_are_stopped() -> None:
    c = Cluster(least=1, most=2)
    c.join("a", "b")
    b = c.lose("b")
    assert c.ranks == {"a": (0,)}
    c.agents["b"] = b
    c.join("b")
    assert b.of(Stop)[-1].generation == 1
    assert c.ranks == {"a": (0,), "b": (1,)}


# --- a new coordinator -----------------------------------------------------------------------


def takeover(c: Cluster, gone: frozenset[str] = frozenset()) -> None:
    roster = c.agents["c" if "c" in c.agents else "a"].of(Roster)[-1]
    c.state = job.State.recall(2, c.now, c.options, gone, roster=roster)


def test_a_new_coordinator_stops_no_worker() -> None:
    c = Cluster(least=3, most=3)
    c.join("a", "b", "c")
    c.fail("a")
    takeover(c)
    c.join("c", "a", "b")
    assert c.state.phase is Phase.RUNNING
    assert (c.state.generation, c.state.attempt) == (2, 1)
    assert c.ranks == {"a": (0,), "b": (1,), "c": (2,)}
    roster = c.agents["b"].of(Roster)[-1]
    assert (roster.term, roster.members) == (2, 3)
    c.fail("a")
    c.pass_time(5)
    assert c.attempt == 2
    held = c.agents["a"].held
    assert held is not None
    assert held.restarts_left == 1


def test_the_old_coordinators_node_is_replaced_without_a_wait() -> None:
    c = Cluster(least=2, most=3)
    c.join("a", "b", "c")
    del c.agents["a"]
    takeover(c, gone=frozenset({"a"}))
    c.join("b", "c")
    assert c.ranks == {"c": (0,), "b": (1,)}


def test_who_does_not_come_to_the_new_coordinator_is_lost() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    takeover(c)
    c.join("b", "c")
    assert c.state.phase is Phase.RECALL
    c.pass_time(6)
    assert set(c.ranks) == {"b", "c"}
    assert c.state.generation == 2


def test_what_happened_meanwhile_is_heard_when_all_are_there() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    takeover(c)
    c.join("a")
    c.succeed("a")
    assert c.state.phase is Phase.RECALL
    c.join("b")
    c.succeed("b")
    assert c.agents["a"].of(Over)[0].verdict.success


def test_a_coordinator_started_again_asks_what_runs() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    c.state = job.State.fresh(term=2)
    c.join("b")
    assert c.state.phase is Phase.RECALL
    c.join("a")
    assert c.ranks == {"a": (0,), "b": (1,)}
    assert c.state.generation == 1


def test_the_newest_generation_counts() -> None:
    """The old coordinator died while it told of a new one."""
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    held = c.agents["c"].held
    c.lose("b")
    assert c.state.generation == 2
    c.agents["c"].held = held  # did not hear of the second
    takeover(c)
    c.join("a", "c")
    c.pass_time(6)
    assert set(c.ranks) == {"a", "c"}


# --- cost ------------------------------------------------------------------------------------


def test_messages_grow_with_the_nodes_and_not_with_their_square() -> None:
    size = 0
    c = Cluster(least=300, most=300)
    c.join(*(f"n{i}" for i in range(300)))
    for agent in c.agents.values():
        assert len(agent.told) <= 3
        size += sum(len(r.nodes) for r in agent.of(Roster))
    assert size <= 2 * 32 * 300


def test_an_early_tick_changes_nothing() -> None:
    c = Cluster(least=1, most=2)
    c.join("a")
    before = c.state
    c.feed(Tick())
    assert c.state is before


def test_one_node_cannot_speak_for_another() -> None:
    c = Cluster(least=1, most=2)
    c.join("a")
    c.feed(Said("b", Join(c.agents["a"].node)))
    assert "b" not in c.state.peers


# --- two sides of a cut ------------------------------------------------------------------------


def cut(c: Cluster, *names: str) -> None:
    for name in names:
        del c.agents[name]
        c.feed(Lost(name, "was silent for 5 s", certain=False))


def test_less_than_a_majority_forms_nothing() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    cut(c, "b", "c")
    assert c.ranks == {}
    assert c.state.phase is Phase.GATHERING
    c.feed(Lost("b", "nobody listens there"))  # certain now
    assert c.ranks == {}
    c.feed(Lost("c", "nobody listens there"))
    assert c.ranks == {"a": (0,)}


def test_a_majority_goes_on() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    cut(c, "a")
    assert c.ranks == {"c": (0,), "b": (1,)}


def test_the_wait_for_a_majority_ends() -> None:
    c = Cluster(least=1, most=2)
    c.join("a", "b")
    cut(c, "b")
    c.pass_time(61)
    (over,) = c.agents["a"].of(Over)
    assert "--on-split continue" in over.verdict.reason


def test_a_coordinator_beside_the_members_goes_on_with_one_of_two() -> None:
    c = Cluster(least=2, most=2, spares=1)
    c.leader = "s"
    c.join("a", "b")
    c.join("s", spare=True)
    cut(c, "b")  # it cannot be elected without a
    assert set(c.ranks) == {"a", "s"}
    assert isinstance(prepared(c, "a", 2, 100), Commit)


def test_one_of_two_who_may_have_elected_another_is_not_enough() -> None:
    c = Cluster(least=2, most=2, spares=1)
    c.leader = "s"
    c.join("a", "b")
    c.join("s", spare=True)
    agent = c.agents["a"]
    agent.promised = ("x",)
    c.join("a")  # the connection was lost, and is there again
    cut(c, "b")
    assert c.ranks == {}
    c.join("x", spare=True)  # who does not coordinate, then
    assert set(c.ranks) == {"a", "s"}


def test_one_of_two_goes_on_if_it_was_told_so() -> None:
    c = Cluster(least=1, most=2, on_split="continue")
    c.join("a", "b")
    cut(c, "b")
    assert c.ranks == {"a": (0,)}


# --- who may commit ----------------------------------------------------------------------------


def prepared(c: Cluster, name: str, generation: int, step: int) -> object:
    rank = c.state.seat_of(name).ranks[0]  # type: ignore[union-attr]
    c.say(name, WorkerEvent(generation, rank, "prepared", {"step": step}))
    return c.agents[name].told[-1]


def test_the_generation_that_runs_may_commit() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    assert prepared(c, "b", 1, 100) == Commit(1, 1, 100, 5.0)
    c.fail("a")
    assert isinstance(prepared(c, "b", 1, 100), Refused)
    assert isinstance(prepared(c, "b", 2, 100), Commit)


def test_a_side_without_a_majority_may_not() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    c.agents["a"].stops = False
    cut(c, "b", "c")
    assert isinstance(prepared(c, "a", 1, 100), Refused)


def test_no_generation_forms_while_a_word_to_commit_is_good() -> None:
    c = Cluster(least=1, most=3)
    c.join("a", "b", "c")
    prepared(c, "c", 1, 100)
    cut(c, "c")
    assert c.ranks == {}
    c.pass_time(4)
    assert c.ranks == {}
    c.pass_time(1)
    assert set(c.ranks) == {"a", "b"}


def test_after_a_takeover_the_question_is_asked_again() -> None:
    c = Cluster(least=2, most=2)
    c.join("a", "b")
    takeover(c)
    c.join("a")
    c.say("a", WorkerEvent(1, 0, "prepared", {"step": 7}))
    assert not c.agents["a"].of(Commit)
    c.join("b")
    assert c.agents["a"].of(Commit)


# --- what was the cause ------------------------------------------------------------------------

ECHO = {
    "reason": "rank 0 raised RuntimeError",
    "returncode": 1,
    "end": {"exception": "RuntimeError: Connection closed by peer"},
}


def test_the_echo_of_a_loss_is_no_fault() -> None:
    c = Cluster(least=1, most=2, max_restarts=0)
    c.join("a", "b")
    c.fail("a", **ECHO)
    assert c.ranks == {}
    c.lose("b")
    assert c.ranks == {"a": (0,)}


def test_the_echo_of_a_fault_is_not_blamed() -> None:
    c = Cluster(least=2, most=2, max_restarts=0)
    c.join("a", "b")
    c.agents["b"].stops = False
    c.fail("a", **ECHO)
    c.fail("b", returncode=-9)
    (over,) = c.agents["a"].of(Over)
    assert (over.verdict.culprit, over.verdict.status) == ("b", 137)


def test_an_echo_of_nothing_is_a_fault() -> None:
    c = Cluster(least=2, most=2, max_restarts=1)
    c.join("a", "b")
    c.fail("a", **ECHO)
    c.pass_time(1)
    assert c.attempt == 1
    c.fail("a", **ECHO)
    c.pass_time(1)
    assert c.agents["b"].of(Over)[0].verdict.culprit == "a"
