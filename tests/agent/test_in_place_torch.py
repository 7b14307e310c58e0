"""Recovery in place by ``phalanx run``: real torch, real kills, the same losses as without."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = """
    import json, torch
    from torch import nn
    from phalanx import training

    FAULT = dict(json.loads(os.environ.get("FAULT", "{}")))
    def happens(name):
        try:
            os.close(os.open(os.environ["TEST_OUT"] + "/" + name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    with training.session(backend="gloo", checkpoint=os.environ.get("CHECKPOINTS")) as job:
        torch.manual_seed(1)
        net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        optim = torch.optim.SGD(net.parameters(), lr=0.1)
        job.protect(model=net, optim=optim)
        lost = []
        say("up", job.rank, os.getpid())
        for step in job.steps(int(os.environ.get("STEPS", 12))):
            with step:
                data = torch.Generator().manual_seed(100 * int(step) + job.rank)
                loss = net(torch.randn(4, 8, generator=data)).square().mean()
                what = FAULT.get(f"{job.rank}.{int(step)}")
                if what in ("kill", "device") and happens(f"fault-{job.rank}-{int(step)}"):
                    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
                    if what == "device": raise training.DeviceFault("injected")
                if what == "always" and ATTEMPT == 0: raise training.DeviceFault("injected")
                optim.zero_grad(); loss.backward(); optim.step()
                if int(step) == 1: say("in", job.rank, 0)
            lost.append((int(step), loss.item()))
        say("end", job.rank, os.getpid(), json.dumps(dict(lost[-20:])))
"""


def ends(run) -> dict[int, dict[str, float]]:
    """The losses by step of each rank that saw all steps."""
    out = {}
    for line in run.said():
        word, rank, _, *rest = line.split(" ", 3)
        if word == "end":
            out[int(rank)] = json.loads(rest[0])
    return out


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> dict[int, dict[str, float]]:
    """The losses of a run without a fault."""
    import importlib.util
    import textwrap
    from pathlib import Path

    spec = importlib.util.spec_from_file_location(
        "agent_conftest", Path(__file__).parent / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    folder = tmp_path_factory.mktemp("calm")
    script = folder / "script.py"
    script.write_text(conftest.HEAD + textwrap.dedent(SCRIPT))
    run = conftest.Job(folder, ["--nproc-per-node", "4", str(script)])
    assert run.wait() == 0, run.err
    losses = ends(run)
    assert sorted(losses) == [0, 1, 2, 3]
    return losses


@pytest.mark.parametrize(
    ("fault", "replaced", "strategy"),
    [
        ({"2.5": "kill"}, {2}, "recover-in-place"),
        ({"0.5": "kill"}, {0}, "recover-in-place"),
        ({"1.5": "kill", "3.5": "kill"}, {1, 3}, "recover-in-place"),
        ({"2.5": "device"}, set(), "retry"),
    ],
    ids=["rank 2", "rank 0", "two at once", "device fault"],
)
def test_the_others_keep_their_processes_and_the_losses_are_the_same(
    job, calm, fault: dict[str, str], replaced: set[int], strategy: str
) -> None:
    run = job("--nproc-per-node 4", SCRIPT, env={"FAULT": json.dumps(fault)})
    assert run.wait() == 0, run.err
    starts: dict[int, list[str]] = {}
    for line in run.said():
        if line.startswith("up "):
            _, rank, pid = line.split()
            starts.setdefault(int(rank), []).append(pid)
    assert {rank for rank, pids in starts.items() if len(pids) > 1} == replaced, run.err
    for rank, losses in ends(run).items():
        # a replacement has seen the later steps only
        assert losses == {s: calm[rank][s] for s in losses}
        assert "11" in losses
    recovered = run.events("recovered")
    assert recovered
    assert {e["data"]["strategy"] for e in recovered} == {strategy}
    assert not run.events("restart_group")
    assert "in place" in run.err.splitlines()[-1]


def test_a_fault_that_no_try_cures_is_dumped_and_the_restart_goes_on_from_there(
    job, calm, tmp_path
) -> None:
    env = {"FAULT": json.dumps({"1.5": "always"}), "CHECKPOINTS": str(tmp_path / "checkpoints")}
    run = job("--nproc-per-node 4", SCRIPT, env=env)
    assert run.wait(90) == 0, run.err
    (given_up,) = run.events("restart_group")
    why = given_up["data"]["why"]
    # ranks that gloo kept make further rounds
    assert "recover-in-place: tried 3 times at step 5" in why or "rounds" in why
    if given_up["data"]["dumped"] is None:
        # a rank that gloo kept gave itself up, and that at the moment when nothing was left
        return
    assert given_up["data"]["dumped"] == 4
    for rank, losses in ends(run).items():
        assert min(map(int, losses)) == 5, "nothing was done again"
        assert losses == {s: calm[rank][s] for s in losses}
    assert "0 finished steps done again" in run.err


def test_told_to_stop_it_is_saved_and_the_next_run_goes_on(job, calm, tmp_path) -> None:
    env = {"CHECKPOINTS": str(tmp_path / "checkpoints"), "STEPS": "100000000"}
    run = job("--nproc-per-node 2", SCRIPT, env=env)
    run.until(lambda: sum(line.startswith("in") for line in run.said()) == 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.err
    (stopped,) = run.events("stopped")
    last = stopped["data"]["step"]
    assert stopped["data"]["saved"]
    assert sorted((tmp_path / "checkpoints").glob("step-*"))[-1].name == f"step-{last:010d}"
    again = job("--nproc-per-node 2", SCRIPT, env={**env, "STEPS": str(last + 3)})
    assert again.wait() == 0, again.err
    assert {min(map(int, losses)) for losses in ends(again).values()} == {last + 1}


def test_a_standby_takes_a_rank_and_the_losses_are_the_same(job, calm) -> None:
    # rank 0 dies at step 6, when there is a standby; another step later the next
    waits = "if int(step) == 5: wait_for('one')\n                if int(step) == 8: wait_for('two')"
    script = SCRIPT.replace("what = FAULT", f"{waits}\n                what = FAULT")
    run = job(
        "--nproc-per-node 4 --standby 1",
        script,
        env={"FAULT": json.dumps({"0.6": "kill", "2.9": "kill"})},
    )

    def pids(kind: str) -> set[int]:
        return {e["data"]["pid"] for e in run.events(kind)}

    for recovered, name in enumerate(("one", "two")):
        run.until(lambda n=recovered: len(run.events("recovered")) >= n)
        run.until(lambda: pids("standby_ready") - pids("worker_replaced") - pids("standby_died"))
        (run.folder / name).touch()
    assert run.wait() == 0, run.err
    # others may be lost beside them (docs/training.md, limits)
    seated = [e for e in run.events("worker_replaced") if e["data"]["standby"]]
    assert len(seated) >= 2, run.err
    losses = ends(run)
    assert sorted(losses) == [0, 1, 2, 3]
    for rank, found in losses.items():
        assert found == {step: calm[rank][step] for step in found}
