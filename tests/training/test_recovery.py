"""Ranks die; the others keep their processes; the result is that of a run without a fault."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch]

KILL = {"step": 4, "kind": "kill"}


def pids(run) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for worker in run.agent.everyone:
        found.setdefault(worker.rank, []).append(worker.pid)
    return found


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (0, "forward"),
        (2, "mid-backward"),
        (1, "before-update"),
        (3, "update"),
        (2, "between"),
    ],
)
def test_killed_rank_is_replaced(train, undisturbed, rank, where):
    run = train(faults=[{**KILL, "rank": rank, "where": where}])
    run.same_as(undisturbed())
    assert run.agent.generation == 2
    assert [len(started) for _, started in sorted(pids(run).items())] == [
        2 if other == rank else 1 for other in range(4)
    ]
    report = run.agent.reports(2)[rank]
    assert report["origin"] == "replica"
    assert report["lost_steps"] == 0
    assert report["local_state"] == "kept"


@pytest.mark.parametrize(
    ("step", "kind", "where"),
    [(0, "kill", "mid-backward"), (1, "kill", "mid-backward"), (1, "device", "data")],
)
def test_first_two_steps(train, undisturbed, step, kind, where):
    """In the second DDP moves its buckets to execution order: some ranks have, some have not."""
    run = train(faults=[{"step": step, "kind": kind, "rank": 0, "where": where}])
    run.same_as(undisturbed())


def test_several_buckets_as_views(train, undisturbed):
    kind = {"cap": 0.001, "view": True}
    run = train(faults=[{**KILL, "rank": 0, "where": "mid-backward"}], **kind)
    run.same_as(undisturbed(**kind))


def test_killed_while_blocked_in_a_collective(train, undisturbed):
    faults = [
        {"rank": 2, "step": 4, "where": "collective", "kind": "kill-soon"},
        {"rank": 1, "step": 4, "where": "collective", "kind": "sleep", "seconds": 0.2},
    ]
    train(faults=faults).same_as(undisturbed())


def test_a_standby_takes_any_rank(train, undisturbed):
    """Built before the fault, as rank 0; becomes the one that died."""

    def drive(agent):
        agent.run_until(lambda: agent.spare.hello)
        (agent.folder / "ready").touch()

    run = train(
        faults=[{**KILL, "rank": 2, "where": "mid-backward"}], standby=True, drive=drive, gate=3
    )
    run.same_as(undisturbed())
    assert len(run.agent.everyone) == 5
    assert run.agent.reports(2)[2]["local_state"] == "kept"


def test_two_at_once(train, undisturbed):
    faults = [
        {**KILL, "rank": 0, "where": "mid-backward"},
        {**KILL, "rank": 3, "where": "mid-backward"},
    ]
    train(faults=faults).same_as(undisturbed())


@pytest.mark.parametrize(("rank", "where"), [(1, "repair"), (2, "join")])
def test_another_during_the_recovery(train, undisturbed, rank, where):
    faults = [
        {**KILL, "rank": 2, "where": "mid-backward"},
        {"rank": rank, "step": 0, "where": where, "kind": "kill", "incarnation": int(rank == 2)},
    ]
    run = train(faults=faults)
    run.same_as(undisturbed())
    assert run.agent.generation >= 3


@pytest.mark.parametrize(("rank", "where", "life"), [(2, "receive", 1), (0, "send", 0)])
def test_another_during_the_transfer(train, undisturbed, rank, where, life):
    faults = [
        {**KILL, "rank": 2, "where": "mid-backward"},
        {"rank": rank, "step": 0, "where": where, "kind": "kill", "incarnation": life},
    ]
    run = train(faults=faults)
    run.same_as(undisturbed())
    assert run.agent.generation >= 3


def test_what_comes_after_the_update_is_cut_off(train, undisturbed):
    """A collective after optim.step(): the update stands and is not done twice."""
    run = train(faults=[{**KILL, "rank": 1, "where": "after-update"}], tail=True)
    run.same_as(undisturbed(tail=True))


def test_ranks_that_were_built_unequal(train, undisturbed):
    """DDP's constructor makes them equal; the replacement's runs alone and is given the state."""
    run = train(faults=[{"step": 0, "kind": "kill", "rank": 2, "where": "forward"}], uneven=True)
    run.same_as(undisturbed(uneven=True))


@pytest.mark.parametrize(("rank", "where"), [(3, "mid-backward")])
def test_hybrid_sharded(train, undisturbed, rank, where):
    run = train(model="hybrid", faults=[{**KILL, "rank": rank, "where": where}])
    run.same_as(undisturbed(model="hybrid"))
    assert run.agent.reports(2)[rank]["source"] == (rank + 2) % 4
