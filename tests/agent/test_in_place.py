"""Recovery in place under ``phalanx run``, with a worker that only speaks the messages."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def keeper_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_thirty_recoveries_leak_nothing_and_are_all_told(member) -> None:
    run = member(
        "--nproc-per-node 2 --max-restarts 0",
        """
begin()
if not JOIN:
    say("up", RANK)
    if RANK == 1: wait_for("began")
recovered = 0
while True:
    if RANK == 1 and generation < 31 and (generation == 1 or recovered == generation):
        if generation > 1: wait_for(f"good{generation}")
        os.kill(os.getpid(), signal.SIGKILL)
    if follow(hear()):
        recovered = generation
        if RANK == 0:
            held = len(os.listdir(f"/proc/{os.environ['AGENT']}/fd"))
            threads = len(os.listdir(f"/proc/{os.environ['AGENT']}/task"))
            say("held", generation, held, threads)
            open(os.environ["TEST_OUT"] + f"/good{generation}", "w").close()
        if generation == 31:
            wait_for("end")
            sys.exit(0)
""".replace("os.environ['AGENT']", "open(os.environ['TEST_OUT'] + '/agent').read()"),
    )
    (run.folder / "agent").write_text(str(run.pid))
    run.until(lambda: len([s for s in run.said() if s.startswith("up")]) == 2)
    (run.folder / "began").touch()
    run.until(lambda: len(run.events("recovered")) == 30)
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err
    assert "(30 in place)" in run.err
    counts = {}
    for line in run.said():
        if line.startswith("held"):
            generation, held, threads = map(int, line.split()[1:])
            counts[generation] = (held, threads)
    early = [counts[g] for g in range(4, 9)]
    late = [counts[g] for g in range(27, 32)]
    # of an earlier process some descriptors may still be on their way out
    assert min(h for h, _ in late) <= max(h for h, _ in early), counts
    assert min(t for _, t in late) <= max(t for _, t in early), counts


def test_a_stop_signal_while_a_replacement_is_being_started(member) -> None:
    run = member(
        "--nproc-per-node 2 --shutdown-timeout 20",
        """
begin()
say("up", RANK, os.getpid(), os.getppid())
if RANK == 0: signal.signal(signal.SIGTERM, lambda *_: (say("asked"), sys.exit(0)))
while True: follow(hear())
""",
    )
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    pids = {int(w[1]): int(w[2]) for w in map(str.split, lines)}
    keeper = int(lines[0].split()[3])
    os.kill(keeper, signal.SIGSTOP)  # nothing is started now
    try:
        os.kill(pids[1], signal.SIGKILL)
        run.until(lambda: run.events("episode_began"))
        run.signal(signal.SIGTERM)
        run.until(lambda: "asked" in run.said(), 20)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert run.wait() == 143, run.err
    assert "Traceback" not in run.err


def test_the_keeper_dies_as_the_ranks_come_together_again(member) -> None:
    run = member(
        "--nproc-per-node 2 --max-restarts 1",
        """
begin()
say("up", RANK, ATTEMPT, os.getppid())
if ATTEMPT: sys.exit(0)
if RANK == 1:
    wait_for("go")
    end.send("fault", generation=generation, kind="network", text="x", step=1)
    say("sent")
while True: follow(hear())
""",
    )
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    run.signal(signal.SIGSTOP)
    run.until(lambda: state_of(run.pid) == "T")
    (run.folder / "go").touch()
    run.until(lambda: "sent" in run.said())
    os.kill(int(lines[0].split()[3]), signal.SIGKILL)
    run.signal(signal.SIGCONT)
    assert run.wait() == 0, run.err
    assert "keeper" in run.err
    assert "Traceback" not in run.err


def test_with_a_given_port_the_old_store_has_gone_before_the_new_one_serves(member) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run = member(
        f"--nproc-per-node 2 --max-restarts 0 --master-port {port}",
        """
begin()
say("up", RANK)
if RANK == 1 and not JOIN:
    wait_for("go")
    os.kill(os.getpid(), signal.SIGKILL)
while not follow(hear()): pass
wait_for("end")
""",
    )
    run.until(lambda: len(run.said()) == 2)
    (run.folder / "go").touch()
    run.until(lambda: run.events("recovered"))
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err


def test_told_to_stop_the_ranks_end_after_one_step(member) -> None:
    run = member(
        "--nproc-per-node 2 --shutdown-timeout 40",
        """
phalanx.progress(3)
end.send("hello", generation=1, rank=RANK, capabilities=["stop_at"], waiting=False)
say("up", RANK)
while True:
    message = hear()
    if message.type == "stop_at":
        say("stop", message.fields["step"])
        end.send("stopped_at", step=message.fields["step"], saved=True)
        sys.exit(0)
""",
    )
    run.until(lambda: len(run.said()) == 2)
    run.until(lambda: run.events("workers_started"))
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.err
    (step,) = {line for line in run.said() if line.startswith("stop")}
    assert int(step.split()[1]) >= 5, "two steps ahead at least"
    assert f"step {step.split()[1]} was the last and was saved" in run.err


def test_a_second_signal_does_not_wait_for_the_step(member) -> None:
    run = member(
        "--nproc-per-node 2 --shutdown-timeout 1000",
        """
phalanx.progress(3)
end.send("hello", generation=1, rank=RANK, capabilities=["stop_at"], waiting=False)
say("up", RANK)
while True:
    if hear().type == "stop_at": say("stop")
""",
    )
    run.until(lambda: len(run.said()) == 2)
    run.until(lambda: run.events("workers_started"))
    run.signal(signal.SIGTERM)
    run.until(lambda: run.said().count("stop") == 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.err
    assert "was the last" not in run.err


def test_when_nothing_else_is_left_the_state_is_dumped_before_the_restart(member) -> None:
    run = member(
        "--nproc-per-node 2 --max-restarts 1",
        """
if ATTEMPT: say("again", RANK); sys.exit(0)
phalanx.progress(5)
end.send("hello", generation=generation, rank=RANK, capabilities=["dump"], waiting=JOIN)
if RANK == 1 and not JOIN: os.kill(os.getpid(), signal.SIGKILL)
while True:
    message = hear()
    told = message.fields
    if message.type == "leave":
        end.send("left", generation=told["generation"], step=4, clean=True, shard=0, shards=1)
    if message.type == "join":
        generation = told["generation"]
        end.send("good_step", generation=generation, step=4, report={"lost_steps": 0})
        if RANK == 1:
            wait_for(f"good{generation}")
            os.kill(os.getpid(), signal.SIGKILL)
        open(os.environ["TEST_OUT"] + f"/good{generation}", "w").close()
    if message.type == "dump":
        say("dump", told["step"], told["writers"], told["commit"])
        end.send("dumped", generation=told["generation"], step=told["step"], complete=True,
                 commit=told["commit"], text="", path="/checkpoints")
""",
    )
    assert run.wait() == 0, run.err
    assert [s for s in run.said() if s.startswith("dump")] == [
        "dump 4 [0] False",
        "dump 4 [0] True",
    ]
    assert "step 4 was dumped to /checkpoints first" in run.err
    assert "recover-in-place: tried 3 times at step 5 without a good step since" in run.err
    (event,) = run.events("restart_group")
    assert event["data"]["dumped"] == 4
    assert {"again 0", "again 1"} <= set(run.said())
