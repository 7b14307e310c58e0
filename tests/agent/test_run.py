"""``phalanx run`` on real processes: exit codes, restarts, signals, who is left."""

from __future__ import annotations

import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def gone(pids: list[int]) -> bool:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    return not any(runs(pid) for pid in pids)


def test_a_command_that_exits_7(job) -> None:
    run = job.raw(["--nproc-per-node", "2", "--no-python", "sh", "-c", "exit 7"])
    assert run.wait() == 7
    last = run.err.splitlines()
    assert any(re.search(r"rank \d .*exited with code 7", line) for line in last)
    assert "failed after" in last[-1]


def test_a_command_that_is_killed(job) -> None:
    run = job.raw(["--max-restarts", "0", "--no-python", "sh", "-c", "kill -9 $$"])
    assert run.wait() == 137
    assert "was killed by SIGKILL" in run.err
    assert "--max-restarts 0" in run.err


@pytest.mark.parametrize("warm", ["", "--no-warm "])
def test_a_killed_worker_costs_one_restart(job, warm: str) -> None:
    run = job(
        f"{warm}--nproc-per-node 2 --max-restarts 1",
        """
        say("start", RANK, ATTEMPT, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
        if ATTEMPT == 0:
            if RANK == 1:
                wait_for("zero")
                os.kill(os.getpid(), signal.SIGKILL)
            open(os.environ["TEST_OUT"] + "/zero", "w").close()
            wait_for("never")
        """,
    )
    assert run.wait() == 0, run.err
    assert sorted(run.said()) == [
        "start 0 0 2 0",
        "start 0 1 2 0",
        "start 1 0 2 1",
        "start 1 1 2 1",
    ]
    assert "rank 1 (local rank 1" in run.err
    assert "was killed by SIGKILL" in run.err
    assert "restart 1 of 1" in run.err
    assert "other ranks: 0 stopped" in run.err
    ends = [e["data"] for e in run.events("worker_died") if e["attempt"] == 0]
    assert {e["local_rank"]: (e["returncode"], e["stopped"]) for e in ends} == {
        0: (-15, True),
        1: (-9, False),
    }
    assert [e["attempt"] for e in run.events("workers_started")] == [0, 1]


def test_the_python_exception_is_the_reason_without_a_decorator(job) -> None:
    run = job("--max-restarts 0", "raise ValueError('the number is wrong')")
    assert run.wait() == 1
    assert "raised ValueError: the number is wrong" in run.err
    assert "  | ValueError: the number is wrong" in run.err
    assert "rank 0" in run.err


@pytest.mark.parametrize(
    ("source", "status", "word"),
    [
        ("import no_such_module_anywhere", 1, "ModuleNotFoundError before any progress"),
        ("x = = 1", 1, "SyntaxError before any progress"),
        ("sys.exit(2)", 2, "exit code 2 before any progress"),
    ],
)
def test_what_never_comes_right_is_not_retried(job, source: str, status: int, word: str) -> None:
    run = job("--max-restarts 3", source)
    assert run.wait() == status
    assert word in run.err
    assert len(run.events("workers_started")) == 1


def test_a_missing_script_is_not_retried(job) -> None:
    run = job.raw(["no_such_script.py"])
    assert run.wait() == 2
    assert "no_such_script.py" in run.err
    assert len(run.events("workers_started")) <= 1


def test_a_missing_command_is_127_and_one_that_cannot_run_126(job, tmp_path) -> None:
    assert job.raw(["--no-python", "no-such-command-anywhere"]).wait() == 127
    data = tmp_path / "data"
    data.write_text("x")
    data.chmod(stat.S_IRUSR)
    run = job.raw(["--no-python", str(data)])
    assert run.wait() == 126
    assert "cannot be run" in run.err
    data.chmod(stat.S_IRWXU)  # no program and no first line that names one
    run = job.raw(["--no-python", str(data)])
    assert run.wait() == 126
    assert "cannot be run: Exec format error" in run.err
    assert "Traceback" not in run.err


def test_sigterm_ends_the_job_with_143_and_no_traceback(job) -> None:
    run = job("--nproc-per-node 2", "say('up', os.getpid()); wait_for('never')")
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert "stopped by SIGTERM" in run.err
    assert "Traceback" not in run.err
    assert gone([int(line.split()[1]) for line in lines])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_each_stop_signal(job, number: int) -> None:
    run = job("", "say('up'); wait_for('never')")
    run.until(run.said)
    run.signal(number)
    assert run.wait() == 128 + number


def test_the_grace_is_one_option_and_a_second_signal_cuts_it_short(job) -> None:
    source = """
    signal.signal(signal.SIGTERM, lambda *_: say("asked"))
    say("up")
    while True: signal.pause()
    """
    run = job("--shutdown-timeout 50", source)
    run.until(lambda: "up" in run.said())
    run.signal(signal.SIGTERM)
    run.until(lambda: "asked" in run.said())
    run.signal(signal.SIGTERM)
    assert run.wait(20) == 143


def test_user_signals_are_passed_on(job) -> None:
    run = job(
        "--nproc-per-node 2",
        """
        signal.signal(signal.SIGUSR1, lambda *_: (say("usr1"), sys.exit(0)))
        say("up")
        while True: signal.pause()
        """,
    )
    run.until(lambda: len(run.said()) == 2)
    run.signal(signal.SIGUSR1)
    assert run.wait() == 0
    assert run.said().count("usr1") == 2


def test_an_ignored_hangup_stays_ignored(tmp_path, job) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        "import os, pathlib, time\nout = pathlib.Path(os.environ['OUT'])\n(out / 'up').touch()\n"
        "end = time.monotonic() + 50\n"
        "while not (out / 'go').exists() and time.monotonic() < end: time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' HUP; exec {sys.executable} -m phalanx run {script}"],
        env={**os.environ, "OUT": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    try:
        while not (tmp_path / "up").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_grandchildren_go_with_their_worker(job) -> None:
    run = job(
        "--max-restarts 0 --nproc-per-node 2",
        """
        import subprocess
        a = subprocess.Popen(["sleep", "333"])
        b = subprocess.Popen(["sleep", "333"], start_new_session=True)
        say("children", a.pid, b.pid)
        wait_for("go")
        if RANK == 0: sys.exit(3)
        wait_for("never")
        """,
    )
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    (run.folder / "go").touch()
    assert run.wait() == 3
    assert gone([int(p) for line in lines for p in line.split()[1:]])


def test_kill_9_of_the_agent_leaves_nothing(job) -> None:
    run = job(
        "--nproc-per-node 4",
        """
        import subprocess
        child = subprocess.Popen(["sleep", "333"], start_new_session=True)
        say(os.getpid(), child.pid)
        wait_for("never")
        """,
    )
    lines = run.until(lambda: len(run.said()) == 4 and run.said())
    pids = [int(p) for line in lines for p in line.split()]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    killed = time.monotonic()
    run.signal(signal.SIGKILL)
    for pid, pidfd in zip(pids, pidfds, strict=True):
        assert select.select([pidfd], [], [], 60)[0], pid
        os.close(pidfd)
    print(f"the last of {len(pids)} ended {time.monotonic() - killed:.3f} s after the agent")
    run.process.communicate(timeout=60)


def test_kill_9_of_the_keeper_costs_one_restart(job) -> None:
    run = job(
        "--nproc-per-node 2 --max-restarts 1",
        "say(os.getpid(), os.getppid(), ATTEMPT)\nif ATTEMPT == 0: wait_for('never')",
    )
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    os.kill(int(lines[0].split()[1]), signal.SIGKILL)
    assert run.wait() == 0, run.err
    assert "keeper" in run.err
    assert gone([int(line.split()[0]) for line in lines])
    assert len(run.said()) == 4


def test_script_arguments_arrive_untouched(job) -> None:
    words = ["--log=x", "--r=16", "-m", "--nnodes", "", "a b", "$local_rank", "${local_rank}", "$$"]
    run = job("--standalone --nproc-per-node 1", "say(repr(sys.argv[1:]))", args=words)
    assert run.wait() == 0
    expected = [w.replace("${local_rank}", "0").replace("$local_rank", "0") for w in words]
    assert run.said() == [repr(expected)]


def test_tee_and_log_dir(job, tmp_path) -> None:
    logs = tmp_path / "logs"
    run = job(
        f"--nproc-per-node 2 --tee 3 --rdzv-id myjob --log-dir {logs}",
        "print('out', RANK); print('err', RANK, file=sys.stderr)",
    )
    assert run.wait() == 0
    for rank in (0, 1):
        assert re.search(rf"^\[default{rank}\]:out {rank}$", run.out, re.M)
        assert re.search(rf"^\[default{rank}\]:err {rank}$", run.err, re.M)
        (file,) = logs.glob(f"myjob*/attempt_0/{rank}/stdout.log")
        assert file.read_text() == f"out {rank}\n"


def test_redirected_stderr_is_quoted_at_failure_and_its_file_named(job, tmp_path) -> None:
    run = job(
        f"--max-restarts 0 -r 3 --log-dir {tmp_path / 'logs'}",
        "print('the last words', file=sys.stderr); os._exit(5)",
    )
    assert run.wait() == 5
    assert "  | the last words" in run.err
    assert "stderr.log" in run.err


def test_no_temporary_folder_is_left(job, tmp_path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = job("--max-restarts 0", "sys.exit(1)", env={"TMPDIR": str(temporary)})
    assert run.wait() == 1
    assert list(temporary.iterdir()) == []


def test_a_wrong_option_is_named_and_nothing_starts(job) -> None:
    run = job("--nproc 2", "say('started')")
    assert run.wait() == 2
    assert "--nproc-per-node" in run.err
    assert run.said() == []
    run = job("--nnodes 2 --rdzv-backend nonsense", "say('started')")
    assert run.wait() == 2
    assert "--rdzv-backend" in run.err


def test_imports_that_hang_end_the_start(job, tmp_path) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(300)\n")
    run = job("--start-timeout 0.5 --preload hangs", "import hangs")
    assert run.wait() == 126
    assert "after 0.5 s these local ranks have not started: [0]; --start-timeout" in run.err


def test_no_progress_for_ever_ends(job) -> None:
    run = job(
        "--max-restarts 50",
        """
        import phalanx
        for step in (1, 2, 3): phalanx.progress(step)
        sys.exit(9)
        """,
    )
    assert run.wait() == 9
    assert "got no further than step 3" in run.err
    assert len(run.events("workers_started")) <= 5


def test_restarts_without_a_step_are_in_the_summary(job) -> None:
    run = job("--max-restarts 2", "sys.exit(5 if ATTEMPT < 2 else 0)")
    assert run.wait() == 0
    assert "recovering (2 restarts)" in run.err.splitlines()[-1]


@pytest.mark.torch  # the store is torch's
def test_a_lost_store_is_the_reason_and_no_worker_is_blamed(job) -> None:
    run = job(
        "--nproc-per-node 2 --max-restarts 0",
        """
        import socket
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        line = socket.create_connection(where)  # it starts with the first connection
        say("up", os.getppid())
        wait_for("never")
        """,
    )
    lines = run.until(lambda: len(run.said()) == 2 and run.said())
    keeper = lines[0].split()[1]

    def store() -> list[int]:
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        return [
            int(p) for p in children if b"store_server" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]

    (pid,) = run.until(store)
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 123, run.err
    assert "the workers' store was lost" in run.err
    assert "was killed by" not in run.err


def test_a_sigkill_that_was_not_ours_is_blamed_though_we_were_stopping(job) -> None:
    script = (
        "if [ $RANK = 0 ]; then exit 3; fi; trap 'kill -9 $$' TERM; while :; do sleep 0.01; done"
    )
    run = job.raw(
        ["--nproc-per-node", "2", "--max-restarts", "0", "--no-python", "sh", "-c", script]
    )
    assert run.wait() == 3, run.err
    assert "other ranks: 1 failed too" in run.err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--numa-binding node", "NUMA binding is not possible"),
        ("--event-log-handler nope", "no event log handler is called 'nope'"),
        ("--logs-specs nope", "--logs-specs nope"),
        ("--log-dir /proc/nope", "--log-dir /proc/nope cannot be made"),
        ("--signals-to-handle SIGNOPE", "--signals-to-handle"),
    ],
)
def test_what_cannot_be_is_a_usage_error_and_leaves_nothing(job, tmp_path, option, says) -> None:
    if "numa" in option and Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this machine has a GPU")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = job(option, "say('started')", env={"TMPDIR": str(temporary)})
    assert run.wait() == 2
    assert says in run.err
    assert "Traceback" not in run.err
    assert run.said() == []
    assert list(temporary.iterdir()) == []


def test_a_worker_with_another_environment_at_start_is_not_warm(job, tmp_path) -> None:
    plug = tmp_path / "plug"
    (plug / "plug-1.dist-info").mkdir(parents=True)
    (plug / "plug-1.dist-info" / "METADATA").write_text("Name: plug\nVersion: 1\n")
    (plug / "plug-1.dist-info" / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nother = plug:Specs\n"
    )
    (plug / "plug.py").write_text(
        "from phalanx.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Specs(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        for env in envs.values(): env['OMP_WAIT_POLICY'] = 'passive'\n"
        "        return super().reify(envs)\n"
    )
    run = job(
        f"--nproc-per-node 2 --max-restarts 1 --logs-specs other --log-dir {tmp_path / 'logs'}",
        "say(os.environ['OMP_WAIT_POLICY']); sys.exit(4 if ATTEMPT == 0 else 0)",
        env={"PYTHONPATH": str(plug)},
    )
    assert run.wait() == 0, run.err
    assert set(run.said()) == {"passive"}
    assert run.err.count("fresh interpreter: OMP_WAIT_POLICY is not as in") == 1
    assert [e["data"]["warm"] for e in run.events("workers_started")] == [False, False]
