"""Everything but the replacement of a dead rank: retry, snapshots, checkpoints, stop, bugs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from phalanx.process.slate import Slate
from phalanx.recovery.ladder import Kind, Policy, Strategy

pytestmark = [pytest.mark.process, pytest.mark.torch]


def strategies(run) -> list[Strategy]:
    return [decision.strategy for decision in run.agent.decisions]


@pytest.mark.parametrize(
    ("kind", "where", "model"),
    [
        ("device", "backward", "ddp"),
        ("network", "forward", "ddp"),
        ("device", "backward", "hybrid"),
    ],
)
def test_retry_ends_no_process(train, undisturbed, kind, where, model):
    for _ in range(3):
        run = train(model=model, faults=[{"rank": 1, "step": 4, "where": where, "kind": kind}])
        run.same_as(undisturbed(model=model))
        if strategies(run) == [Strategy.RETRY]:
            break  # else gloo kept a rank, which gave itself up (docs/training.md, Limits)
    assert strategies(run) == [Strategy.RETRY]
    assert len(run.agent.everyone) == 4


def test_retry_after_the_update_of_one_rank(train, undisturbed):
    """The faulty rank has its update behind it, and half of another: it gets the state anew."""
    run = train(faults=[{"rank": 1, "step": 4, "where": "update", "kind": "device"}])
    run.same_as(undisturbed())
    assert strategies(run) == [Strategy.RETRY]


def test_retries_at_one_step_are_bounded(train, undisturbed):
    """A fault that comes again and again at one step falls to the next rungs of the ladder."""
    again = {"rank": 1, "step": 4, "where": "forward", "kind": "device", "always": True}
    policy = Policy(same_step=2, enabled=frozenset({Strategy.RETRY, Strategy.IN_PLACE}))
    run = train(faults=[again], policy=policy)
    assert strategies(run)[:2] == [Strategy.RETRY, Strategy.RETRY]
    assert strategies(run)[-1] is Strategy.EXIT
    # What the program sees in the end is its own exception.
    assert "DeviceFault: UCE ERROR" in (run.folder / "log-1-0").read_text()


def test_a_bug_is_raised_unchanged(train):
    run = train(
        faults=[{"rank": 2, "step": 3, "where": "forward", "kind": "bug", "always": True}],
        policy=Policy(enabled=frozenset()),
    )
    assert strategies(run) == [Strategy.EXIT]
    log = (run.folder / "log-2-0").read_text()
    assert 'KeyError: "a mistake of the program\'s own"' in log
    # another rank may be heard first, of a peer it lost
    assert Kind.BUG in [fault.kind for fault in run.agent.faults]


def test_a_rank_that_ends_by_a_bug_is_replaced(train, undisturbed):
    run = train(faults=[{"rank": 2, "step": 3, "where": "forward", "kind": "bug"}])
    run.same_as(undisturbed())
    # another rank may be heard first, of a peer it lost
    assert Kind.BUG in [fault.kind for fault in run.agent.faults]
    (dead,) = (one for one in run.agent.everyone if one.rank == 2 and one.incarnation == 0)
    assert not dead.finished, "it has not finished: the agent may go on in place"


def test_out_of_memory_is_told_and_the_rank_replaced(train, undisturbed):
    run = train(faults=[{"rank": 2, "step": 3, "where": "forward", "kind": "memory"}])
    run.same_as(undisturbed())
    assert run.agent.faults[0].kind is Kind.MEMORY
    assert strategies(run) == [Strategy.IN_PLACE]


@pytest.mark.parametrize(("copies", "steps"), [("1", {1}), ("0", {5, 7})])
def test_no_snapshot_is_taken_before_all_ranks_last_ones_are_copied(train, copies, steps):
    """Else there might be no step of which every rank has one at another node. This agent never
    says that one has arrived."""
    kind = {"model": "bare", "session": {"snapshot_every": 2}}
    run = train(2, **kind, env={"PHALANX_COPIES": copies})
    assert set(run.ends) == {0, 1}
    for kept in run.agent.kept.values():
        slate = Slate.attach(os.dup(kept["snapshots"]))
        assert set(slate.steps()) == steps
        slate.close()


def test_no_replica_snapshot(train, undisturbed):
    """Fully sharded: the lost shard is nowhere but in the memory kept by the agent."""
    kind = {"model": "fsdp", "session": {"snapshot_every": 2}}
    run = train(faults=[{"rank": 3, "step": 5, "where": "backward", "kind": "kill"}], **kind)
    run.same_as(undisturbed(**kind))
    report = run.agent.reports(2)[0]
    assert report["origin"] == "snapshot"
    assert report["step"] == 4
    assert report["lost_steps"] == 1


def test_no_replica_nothing_kept(train, undisturbed):
    """Nothing to go on with: told by every rank, and the whole group starts again."""
    run = train(model="fsdp", faults=[{"rank": 3, "step": 5, "where": "backward", "kind": "kill"}])
    assert strategies(run) == [Strategy.IN_PLACE, Strategy.RESTART]
    run.same_as(undisturbed(model="fsdp"))


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_checkpoint_is_resumed_after_a_restart(train, undisturbed, model):
    policy = Policy(enabled=frozenset({Strategy.RESTART}))
    fault = {"rank": 1, "step": 5, "where": "backward", "kind": "kill"}
    run = train(model=model, checkpoint=2, faults=[fault], policy=policy)
    run.same_as(undisturbed(model=model))
    steps = [line["step"] for line in run.traces[0]]
    assert steps == [0, 1, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.parametrize("model", ["ddp", "hybrid"])
def test_dump_and_resume(train, undisturbed, model):
    """Those that hold the state write it down before the whole group starts again."""
    policy = Policy(enabled=frozenset({Strategy.DUMP, Strategy.RESTART}))
    fault = {"rank": 1, "step": 5, "where": "mid-backward", "kind": "kill"}
    for _ in range(3):
        run = train(model=model, checkpoint=100, faults=[fault], policy=policy)
        if run.agent.dumped is not None:
            break
        # gloo kept the only other holder of a shard in its collective (docs/training.md, Limits):
        # it gave itself up, and rightly nothing was dumped
    assert strategies(run) == [Strategy.RESTART]
    assert run.agent.dumped.step == 4
    assert run.agent.dumped.writers == ((0,) if model == "ddp" else (0, 3))
    run.same_as(undisturbed(model=model))
    assert [line["step"] for line in run.traces[0]] == list(range(8))
    assert [entry.name for entry in (run.folder / "checkpoints").iterdir()] == ["step-0000000004"]


@pytest.mark.parametrize("model", ["ddp", "hybrid"])
def test_a_dump_has_what_was_the_own_of_dead_ranks(train, undisturbed, model):
    """The next run has nothing but the checkpoint: random states and data of rank 1 are in it."""
    policy = Policy(enabled=frozenset({Strategy.DUMP}))
    fault = {"rank": 1, "step": 5, "where": "mid-backward", "kind": "kill"}
    kind = {"model": model, "checkpoint": 100}
    first = train(faults=[fault], policy=policy, **kind)
    assert strategies(first) == [Strategy.EXIT] and first.agent.dumped.step == 4
    again = train(folder=first.folder, **kind)
    again.same_as(undisturbed(model=model))
    assert [line["step"] for line in again.traces[1]] == list(range(8))


def test_no_dump_of_half_a_state(train):
    policy = Policy(enabled=frozenset({Strategy.DUMP}))
    fault = {"rank": 1, "step": 5, "where": "backward", "kind": "kill"}
    run = train(model="fsdp", checkpoint=100, faults=[fault], policy=policy)
    assert strategies(run) == [Strategy.EXIT]
    assert run.agent.dumped is None
    assert not (run.folder / "checkpoints").exists()


@pytest.mark.parametrize("where", ["save", "commit"])
def test_killed_while_saving(train, undisturbed, where):
    fault = {"rank": 0, "step": 3, "where": where, "kind": "kill"}
    run = train(checkpoint=2, faults=[fault])
    run.same_as(undisturbed())
    marks = sorted(entry.name for entry in (run.folder / "checkpoints").iterdir())
    assert marks == ["step-0000000005", "step-0000000007"]
    mark = json.loads((run.folder / "checkpoints" / marks[-1] / "commit.json").read_text())
    assert mark["generation"] == 2


def test_all_stop_after_the_same_step(train):
    def drive(agent):
        agent.run_until(
            lambda: all((worker.page.read().step or 0) >= 2 for worker in agent.living())
        )
        step = max(worker.page.read().step for worker in agent.living()) + 2
        for worker in agent.living():
            worker.channel.send("stop_at", step=step)
        agent.wanted = step

    run = train(steps=1000, pause=0.01, drive=drive)
    assert {lines[-1]["step"] for lines in run.traces.values()} == {run.agent.wanted}
    assert all(end["stopped"] for end in run.ends.values())
    answers = [m.fields for w in run.agent.everyone for m in w.said if m.type == "stopped_at"]
    assert [answer["step"] for answer in answers] == [run.agent.wanted] * 4


def test_a_stopped_rank_is_killed_and_replaced(train, undisturbed):
    """A hung peer: the others leave by the agent's word, not by a time limit."""

    def drive(agent):
        mark = agent.folder / "fault-2-0"
        agent.run_until(mark.exists)
        os.kill(agent.workers[2].pid, signal.SIGKILL)

    run = train(faults=[{"rank": 2, "step": 4, "where": "backward", "kind": "stop"}], drive=drive)
    run.same_as(undisturbed())


def test_the_agent_goes_away(train):
    """End of file on the channel is no fault as long as nothing else happens."""

    def drive(agent):
        agent.run_until(lambda: all(worker.hello for worker in agent.living()))
        for worker in agent.living():
            worker.channel._socket.shutdown(2)

    run = train(drive=drive, pause=0.01)
    assert len(run.ends) == 4


@pytest.mark.parametrize("world", [1, 2])
def test_without_an_agent_the_same_results(nursery, undisturbed, tmp_path, world):
    """Under torchrun, or alone: no channel, no recovery, the same numbers."""
    import select

    import torch.distributed as dist

    expected = undisturbed(world)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    poll = select.poll()
    for rank in range(world):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        order = {
            "env": env,
            "unset": ["PHALANX_CHANNEL_FD", "PHALANX_JOIN"],
            "spec": {"folder": str(tmp_path)},
            "log": str(tmp_path / f"log-{rank}"),
            "status": str(tmp_path / f"status-{rank}"),
        }
        pidfd = os.pidfd_open(nursery.fork(order, []))
        poll.register(pidfd, select.POLLIN)
    left = world
    while left:
        events = poll.poll(30000)
        assert events, (tmp_path / "log-0").read_text()
        for fd, _ in events:
            poll.unregister(fd)
            os.close(fd)
            left -= 1
    for rank in range(world):
        assert (tmp_path / f"status-{rank}").read_text() == "0", (tmp_path / "log-0").read_text()
        end = json.loads((tmp_path / f"end-{rank}").read_text())
        assert end["weights"] == expected.ends[rank]["weights"]
