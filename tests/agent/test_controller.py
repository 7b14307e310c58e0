"""``phalanx run --controller``: a real controller, real agents, kills in between."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from compat.doubles.server import OldServer  # noqa: E402
from compat.harness import Controller  # noqa: E402

pytestmark = pytest.mark.process

# rank 1 dies when it is told to; all end after the generation they are told to reach
SESSION = """
begin()
say("up", RANK, os.getpid(), JOIN)
seen = 0
while not os.path.exists(os.environ["TEST_OUT"] + "/end"):
    if RANK == 1 and not JOIN and not ATTEMPT and os.path.exists(os.environ["TEST_OUT"] + "/die"):
        os.kill(os.getpid(), signal.SIGKILL)
    end.wait(0.02)
    message = end.receive()
    if message is not None:
        if message.type == "leave" and RANK == 0:
            say("leave")
            if os.path.exists(os.environ["TEST_OUT"] + "/hold"): wait_for("release")
        follow(message)
"""


def jobs_view(controller: Controller):
    """What the controller says of the job."""
    import grpc
    from compat.harness import Raw

    from phalanx.proto import control_pb2

    with grpc.insecure_channel(controller.address) as channel:
        answer = Raw(channel)("Jobs", control_pb2.Query(jobId="j"))
        return answer.jobs[0] if answer.jobs else None


def connected(run) -> bool:
    return any(e["data"]["state"] == "connected" for e in run.events("controller"))


def start(member, controller: Controller, options: str = "", body: str = SESSION):
    run = member(
        f"--nproc-per-node 2 --rdzv-id j --controller {controller.address} {options}", body
    )
    run.until(lambda: len([s for s in run.said() if s.startswith("up")]) == 2)
    run.until(lambda: connected(run))
    return run


def finish(run, controller: Controller, outcome: str, *, alone: bool = False) -> None:
    """The job ends well, and so does the controller's episode."""
    run.until(lambda: (v := jobs_view(controller)) and v.state == "idle" and v.lastOutcome)
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert jobs_view(controller).lastOutcome == outcome
    by = {e["data"]["by"] for e in run.events("decided")}
    assert by == ({"agent"} if alone else {"controller"}), run.err
    assert "Traceback" not in run.err


def pids(run) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in run.said():
        if line.startswith("up "):
            out.setdefault(line.split()[1], []).append(line.split()[2])
    return out


def test_in_place_when_the_controller_says_so(member) -> None:
    with Controller("--strategies", "recover-in-place,dump") as controller:
        run = start(member, controller, "--controller-timeout 30 --max-restarts 0")
        (run.folder / "die").touch()
        run.until(lambda: run.events("recovered"))
        finish(run, controller, "recover-in-place succeeded")
    assert len(pids(run)["0"]) == 1 and len(pids(run)["1"]) == 2
    assert "decided by the controller: recover-in-place" in run.err
    assert "leave" in run.said()


@pytest.mark.parametrize("restarts", [1, 0])
def test_exit_when_the_controller_says_so(member, restarts: int) -> None:
    with Controller("--strategies", "exit") as controller:
        run = start(member, controller, f"--controller-timeout 30 --max-restarts {restarts}")
        (run.folder / "die").touch()
        if restarts:
            run.until(lambda: len([s for s in run.said() if s.startswith("up")]) == 4)
            finish(run, controller, "exit")
            assert all(len(found) == 2 for found in pids(run).values())
        else:
            assert run.wait() == 137, run.err
            assert jobs_view(controller).lastOutcome == "exit"
    assert "decided by the controller: exit" in run.err


@pytest.mark.parametrize("writes", [True, False])
def test_dump_when_the_controller_says_so(member, writes: bool) -> None:
    body = SESSION.replace(
        "begin()",
        "begin()\n"
        "end.send('hello', generation=generation, rank=RANK, capabilities=['dump'], waiting=JOIN)",
        1,
    )
    body += f"""
        if message.type == "dump":
            told = {{k: message.fields[k] for k in ("generation", "step", "commit")}}
            say("dump", RANK, told["step"], told["commit"])
            end.send("dumped", **told, complete={writes}, text="disk full", path="/checkpoints")
"""
    with Controller("--strategies", "dump") as controller:
        run = start(member, controller, "--controller-timeout 30 --max-restarts 1", body)
        (run.folder / "die").touch()
        run.until(lambda: len([s for s in run.said() if s.startswith("up")]) == 4)
        finish(run, controller, "dump and exit")
    assert {e["data"]["strategy"] for e in run.events("decided")} == {"dump"}, run.err
    assert ("was dumped to /checkpoints" if writes else "no dump: rank 0 could not") in run.err
    wanted = ["dump 0 1 False", "dump 0 1 True"] if writes else ["dump 0 1 False"]
    assert [line for line in run.said() if line.startswith("dump")] == wanted


def test_a_plain_program_starts_anew_and_the_reason_is_told(job) -> None:
    with Controller() as controller:
        run = job(
            f"--nproc-per-node 2 --rdzv-id j --controller {controller.address} "
            "--controller-timeout 30 --max-restarts 1",
            """
say("up", RANK, os.getpid())
if RANK == 1 and not ATTEMPT:
    wait_for("die")
    sys.exit(3)
wait_for("end")
""",
        )
        run.until(lambda: connected(run) and len(run.said()) == 2)
        (run.folder / "die").touch()
        run.until(lambda: len(run.said()) == 4)
        finish(run, controller, "exit")
        assert "did not offer recover" in jobs_view(controller).lastReason


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_controller_that_does_not_answer_changes_nothing(member, tmp_path, how: str) -> None:
    state = tmp_path / "state"
    with Controller("--strategies", "recover-in-place", state=state) as controller:
        run = start(member, controller, "--controller-timeout 1 --max-restarts 0")
        assert controller.process is not None
        if how == "killed":
            controller.kill()
        else:
            controller.process.send_signal(signal.SIGSTOP)
        (run.folder / "die").touch()
        run.until(lambda: run.events("recovered"))
        if how == "killed":
            controller.restart()
        else:
            controller.process.send_signal(signal.SIGCONT)
        finish(run, controller, "recover-in-place succeeded", alone=True)
    assert "decided without the controller" in run.err
    assert len(pids(run)["0"]) == 1 and len(pids(run)["1"]) == 2


def test_kill_9_in_the_middle_of_a_decision(member, tmp_path) -> None:
    """The workers are being stopped as the controller dies; its successor ends the episode."""
    with Controller("--strategies", "recover-in-place", state=tmp_path / "state") as controller:
        run = start(member, controller, "--controller-timeout 60 --max-restarts 0")
        (run.folder / "hold").touch()
        (run.folder / "die").touch()
        run.until(lambda: "leave" in run.said())  # rank 0 does not answer yet
        controller.restart()
        (run.folder / "release").touch()
        run.until(lambda: run.events("recovered"))
        finish(run, controller, "recover-in-place succeeded")
    assert len(pids(run)["0"]) == 1 and len(pids(run)["1"]) == 2


def test_a_device_fault_that_others_have_reported(member) -> None:
    import socket
    import subprocess

    def tell(*words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "phalanx", "fault", *words, "--controller", controller.address],
            check=True,
            capture_output=True,
            timeout=60,
        )

    with Controller("--strategies", "recover-in-place") as controller:
        run = start(member, controller, "--controller-timeout 60 --max-restarts 0")
        tell("report", "f", "--node", socket.gethostname(), "--device", "1", "--level",
             "RestartBusiness")  # fmt: skip
        run.until(lambda: "leave" in run.said())
        tell("clear", "f", "--node", socket.gethostname())
        run.until(lambda: run.events("recovered"))
        finish(run, controller, "recover-in-place succeeded")
    assert len(pids(run)["0"]) == 1 and len(pids(run)["1"]) == 2
    assert "reported broken" in run.err


def test_the_original_server_is_asked_as_well(member) -> None:
    with OldServer(strategies=("recover-in-place", "dump"), keep_alive=0.2, pace=0.01) as server:
        run = start(member, server, "--controller-timeout 30 --max-restarts 0")
        (run.folder / "die").touch()
        run.until(lambda: run.events("recovered"))
        server.wait_for("ReportRecoverStatus")
        (run.folder / "end").touch()
        assert run.wait() == 0, run.err
    assert [e["data"]["strategy"] for e in run.events("decided")] == ["recover-in-place"], run.err
    assert len(pids(run)["0"]) == 1 and len(pids(run)["1"]) == 2


EXAMPLE = ROOT / "examples" / "charlm" / "session.py"


@pytest.mark.torch
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: PHALANX_SLOW_TESTS=1 runs it"
)
@pytest.mark.parametrize("between", [False, True], ids=["calm", "kill -9 between"])
@pytest.mark.parametrize("strategy", ["recover-in-place", "dump", "exit"])
def test_the_example(job, tmp_path, strategy: str, between: bool) -> None:
    """A rank of the example dies twice; the controller decides, and may itself die in between."""
    pytest.importorskip("torch")
    state = tmp_path / "state"
    with Controller("--strategies", strategy, state=state) as controller:
        run = job.raw(
            ["--nproc-per-node", "4", "--rdzv-id", "j", "--controller", controller.address,
             "--controller-timeout", "30", str(EXAMPLE), "--out", str(tmp_path / "out"),
             "--steps", "200", "--save-every", "25"],
            {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        losses = tmp_path / "out" / "losses.jsonl"

        def steps() -> int:
            return len(losses.read_text().splitlines()) if losses.exists() else 0

        def pid_of(rank: int) -> int:
            started = run.events("workers_started")[-1]["data"]["pids"]
            replaced = [e["data"] for e in run.events("worker_replaced")]
            known = {int(k): v for k, v in started.items()}
            known.update({e["local_rank"]: e["pid"] for e in replaced})
            return known[rank]

        for number, rank in enumerate((1, 2), 1):
            seen = steps()
            run.until(lambda seen=seen: steps() > seen + 20 and connected(run), 120)
            os.kill(pid_of(rank), signal.SIGKILL)
            run.until(lambda n=number: len(run.events("recovered")) == n, 120)
            run.until(lambda n=number: (v := jobs_view(controller)) and v.episodes == n
                      and v.state == "idle")  # fmt: skip
            if between and number == 1:
                before = len(run.events("controller"))
                controller.restart()
                run.until(lambda n=before: connected(run) and len(run.events("controller")) > n + 1)
        assert run.wait(200) == 0, run.err
        outcome = {"dump": "dump and exit", "exit": "exit"}.get(strategy, f"{strategy} succeeded")
        assert jobs_view(controller).lastOutcome == outcome
    decided = [(e["data"]["by"], e["data"]["strategy"]) for e in run.events("decided")]
    assert decided == [("controller", strategy)] * 2, run.err
    done = {"recover-in-place": "recover-in-place"}.get(strategy, "restart")
    assert {e["data"]["strategy"] for e in run.events("recovered")} == {done}
    assert "step  199" in run.out


def test_a_job_ends_well_without_any_controller(job) -> None:
    run = job("--nproc-per-node 1 --controller 127.0.0.1:9", "say('up')")
    assert run.wait() == 0, run.err
    assert run.said() == ["up"]
