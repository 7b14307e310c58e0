"""What others see of a running job: health paths, events, watchdog, stacks."""

from __future__ import annotations

import http.client
import json
import select
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from phalanx.events import read

pytestmark = pytest.mark.process


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_four_paths_answer_truly_in_every_phase(job) -> None:
    port = free_port()
    run = job(
        f"--nproc-per-node 2 --max-restarts 1 --health-check-port {port} --shutdown-timeout 40",
        """
        import phalanx
        def slow_end(*_):
            say("stopping"); wait_for("stopped"); sys.exit(0)
        phalanx.progress(10 * ATTEMPT + 1)
        if RANK == 0 and ATTEMPT == 0: signal.signal(signal.SIGTERM, slow_end)
        say("up", ATTEMPT)
        if ATTEMPT == 0:
            wait_for("fall")
            if RANK == 1: os._exit(5)
        wait_for("end")
        """,
    )
    run.until(lambda: run.said().count("up 0") == 2)
    assert ask(port, "/livez")[0] == 200
    run.until(lambda: ask(port, "/readyz")[0] == 200)  # they may be up before we are told
    status = json.loads(ask(port, "/status")[1])
    assert [w["rank"] for w in status["workers"]] == [0, 1]
    assert [w["step"] for w in status["workers"]] == [1, 1]
    assert (status["attempt"], status["generation"]) == (0, 1)
    code, text = ask(port, "/metrics")
    assert code == 200
    assert "phalanx_alive 1.0" in text
    assert "phalanx_workers_alive 2.0" in text
    assert "phalanx_step 1.0" in text

    (run.folder / "fall").touch()
    run.until(lambda: "stopping" in run.said())  # the group is being stopped, in its grace
    assert ask(port, "/livez")[0] == 200
    assert ask(port, "/readyz")[0] == 503
    (run.folder / "stopped").touch()
    run.until(lambda: run.said().count("up 1") == 2)
    status = json.loads(ask(port, "/status")[1])
    assert (status["attempt"], status["generation"]) == (1, 2)
    run.until(lambda: ask(port, "/readyz")[0] == 200)
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err


class Onlooker(threading.Thread):
    """Asks all four paths again and again, from the first answer until there is none."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.live: set[tuple[int, str]] = set()
        self.status: list[dict] = []
        self.metrics: list[str] = []
        self.ready: list[tuple[int, str]] = []
        self.wrong: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        began = False
        while True:
            try:
                self.live.add(ask(self.port, "/livez"))
                began = True
                self.ready.append(ask(self.port, "/readyz"))
                code, text = ask(self.port, "/status")
                if code == 200:
                    self.status.append(json.loads(text))
                else:
                    self.wrong.append(text)
                code, text = ask(self.port, "/metrics")
                (self.metrics if code == 200 else self.wrong).append(text)
            except (OSError, http.client.HTTPException) as error:
                assert self.process is not None
                if began or self.process.poll() is not None:
                    self.last = repr(error)
                    return
                select.select([], [], [], 0.01)


def test_whoever_asks_all_the_time_is_always_told_the_truth(job) -> None:
    port = free_port()
    onlooker = Onlooker(port)
    run = job(
        f"--nproc-per-node 2 --max-restarts 2 --health-check-port {port} --preload ctypes",
        """
        import phalanx
        say("up", ATTEMPT, RANK, os.getpid())
        phalanx.progress(10 * ATTEMPT + 1)
        if ATTEMPT < 2:
            wait_for(f"fall {ATTEMPT}")
            if RANK == 1: os._exit(5)
        wait_for(f"end {RANK}")
        """,
    )
    onlooker.process = run.process
    onlooker.start()

    def told(what: str, values: list) -> None:
        def so() -> bool:
            (s,) = onlooker.status[-1:] or [{"ready": False}]
            return s["ready"] and [w[what] for w in s["workers"]] == values

        run.until(so)

    for attempt in range(2):
        told("step", [10 * attempt + 1] * 2)
        (run.folder / f"fall {attempt}").touch()
    told("step", [21, 21])
    (run.folder / "end 0").touch()  # rank 1 is still at work: it waits for nothing but us
    told("alive", [False, True])
    assert onlooker.is_alive(), onlooker.last
    (run.folder / "end 1").touch()
    assert run.wait() == 0, run.err
    onlooker.join(60)
    assert not onlooker.is_alive()
    assert not onlooker.wrong
    assert onlooker.live == {(200, "ok\n")}
    assert {code for code, _ in onlooker.ready} <= {200, 503}
    processes = {tuple(map(int, line.split()[1:])) for line in run.said()}
    seen = set()
    for status in onlooker.status:
        workers = status.get("workers", ())
        assert status["ready"] <= (len(workers) == 2), status
        seen |= {(status["attempt"], w["rank"], w["pid"]) for w in workers}
        for worker in workers:
            assert worker["alive"] == (worker["returncode"] is None), status
            assert worker["step"] in (None, 10 * status["attempt"] + 1), status
    assert seen == processes
    restarts = [float(line.split()[1]) for text in onlooker.metrics for line in text.splitlines()
                if line.startswith("phalanx_restarts_total ")]  # fmt: skip
    assert restarts == sorted(restarts) and set(restarts) == {0.0, 1.0, 2.0}


def test_a_health_port_in_use_costs_a_line_and_no_training(job) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = job(f"--health-check-port {taken.getsockname()[1]}", "say('ran')")
        assert run.wait() == 0
    assert run.said() == ["ran"]
    assert run.err.count("health") == 1


@pytest.mark.parametrize("port", ["abc", "-1", "99999"])
def test_a_health_port_that_is_none(job, port: str) -> None:
    run = job(f"--health-check-port={port}", "say('ran')")
    assert run.wait() == 0
    assert run.said() == ["ran"]
    assert port in run.err


def test_an_expired_timer_is_a_worker_failure_with_stacks(job, tmp_path) -> None:
    logs = tmp_path / "logs"
    run = job(
        f"--nproc-per-node 2 --max-restarts 1 --log-dir {logs}",
        """
        from phalanx.elastic import timer
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        if ATTEMPT == 0:
            if RANK == 1:
                with timer.expires(after=0.2, scope="the step"): wait_for("never")
            wait_for("never")
        """,
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    )
    assert run.wait() == 0, run.err
    assert "rank 1" in run.err
    assert "did not end the step before its timer ran out" in run.err
    stacks = sorted(p.name for p in logs.glob("**/stacks/attempt_0/*"))
    assert stacks == ["stacks_rank_0.txt", "stacks_rank_1.txt"]
    (one,) = logs.glob("**/stacks/attempt_0/stacks_rank_1.txt")
    assert "wait_for" in one.read_text() or "/proc" in one.read_text()
    (event,) = run.events("timer_expired")
    assert event["data"]["local_rank"] == 1


def test_a_hung_worker_that_used_up_the_restarts_is_121(job) -> None:
    run = job(
        "--max-restarts 0",
        """
        from phalanx.elastic import timer
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=0.1, scope="x"): wait_for("never")
        """,
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    )
    assert run.wait() == 121


def test_the_timers_of_strangers_do_nothing(job, tmp_path) -> None:
    run = job(
        "",
        "say(os.environ['TORCHELASTIC_TIMER_FILE']); wait_for('end')",
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    )
    (path,) = run.until(run.said)
    import os
    import subprocess
    import sys

    stranger = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                                stdin=subprocess.PIPE)  # fmt: skip
    try:
        line = {"version": 1, "pid": stranger.pid, "scope_id": "x", "expiration_time": 1.0,
                "signal": 9}  # fmt: skip
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"garbage\n" + json.dumps(line).encode() + b"\n")
        os.close(pipe)
        (run.folder / "end").touch()
        assert run.wait() == 0
        assert stranger.poll() is None
        assert not Path(path).exists()
    finally:
        stranger.communicate()


def test_events_tell_the_story_in_order(job) -> None:
    run = job("--max-restarts 1", "sys.exit(4 if ATTEMPT == 0 else 0)")
    assert run.wait() == 0
    kinds = [e["kind"] for e in run.events()]
    story = [
        "run_began", "workers_started", "worker_died", "attempt_failed",
        "workers_started", "worker_died", "run_ended",
    ]  # fmt: skip
    assert [k for k in kinds if k in story] == story
    assert len({e["run_id"] for e in run.events()}) == 1
    (failed,) = run.events("attempt_failed")
    assert failed["data"]["root"]["returncode"] == 4
    assert run.events("run_ended")[0]["data"] == {"status": 0}


def test_a_worker_adds_to_the_record_in_a_file_beside(job, tmp_path) -> None:
    run = job(
        "",
        """
        from phalanx.events import EventLog
        os.chdir("/")
        EventLog.from_environment("worker").record("greeting", to="you")
        """,
    )
    assert run.wait() == 0, run.err
    (event,) = [e for e in read(run.events_file) if e["kind"] == "greeting"]
    (began,) = run.events("run_began")
    assert event["data"] == {"to": "you"}
    assert (event["source"], event["rank"], event["run_id"]) == ("worker", 0, began["run_id"])


def test_a_full_disk_for_events_does_not_harm(job) -> None:
    run = job("--events /dev/full", "say('ran')")
    assert run.wait() == 0
    assert run.said() == ["ran"]


def test_a_stopped_reader_of_our_stderr_does_not_stop_training(job) -> None:
    run = job(
        "",
        """
        for _ in range(2000): print("x" * 1000, file=sys.stderr)
        say("written")
        """,
    )
    run.until(lambda: "written" in run.said())  # nobody reads our pipe meanwhile
    run.signal(signal.SIGCONT)
    assert run.wait() == 0
