"""``phalanx run`` with streams, folders and memory that are not as they should be."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import phalanx
from phalanx import cli
from phalanx.agent.console import Console, Patient
from phalanx.elastic.utils import hostname
from phalanx.events import EventLog
from phalanx.health import HealthServer, LoopHealth
from phalanx.process.logs import OutputRelay
from phalanx.process.page import ProgressPage
from phalanx.process.supervisor import _KEEPER_CODE


def shell(folder: Path, text: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``text`` with ``$@`` for a run of ``script`` on two workers."""
    (folder / "script.py").write_text(script)
    run = ["run", "--nproc-per-node", "2", "--max-restarts", "0", str(folder / "script.py")]
    return subprocess.run(
        ["sh", "-c", text, "sh", sys.executable, "-m", "phalanx", *run],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        cwd=folder,
    )


@pytest.mark.process
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_workers_have_streams_even_if_we_were_started_without(tmp_path, closed: str) -> None:
    script = f"""
import os, sys
print("out"); print("err", file=sys.stderr)
kinds = [os.path.basename(os.readlink(f"/proc/self/fd/{{n}}")) for n in range(3)]
with open({str(tmp_path)!r} + "/kinds" + os.environ["RANK"], "w") as file:
    print(*kinds, file=file)
"""
    assert shell(tmp_path, f'exec "$@" {closed}', script).returncode == 0
    for rank in "01":
        kinds = (tmp_path / f"kinds{rank}").read_text().split()
        assert kinds[0] == "null"
        assert not any("eventfd" in kind or "socket" in kind for kind in kinds)
        if ">" in closed:
            assert kinds[1] == "null"


@pytest.mark.process
@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0 itself cannot import socket there"
)
@pytest.mark.parametrize("what", ["script.py", "-m this"])
def test_a_removed_current_directory(tmp_path, what: str) -> None:
    whole = str(tmp_path / "script.py") if what == "script.py" else what
    text = f'mkdir gone && cd gone && rmdir ../gone && exec "$1" -m phalanx run {whole}'
    done = shell(tmp_path, text, "print('here')")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("status", [0, 3])
def test_a_console_that_nobody_reads_does_not_hold_the_job_up(tmp_path, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nprint('x' * 200000, file=sys.stderr)\nsys.exit({status})\n")
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "run", "--max-restarts", "0", str(script)],
            stderr=writer,
            timeout=40,
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == status


def test_the_console_shows_late_what_was_not_taken_and_says_how_much_is_lost() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(reader, "rb") as pipe, os.fdopen(writer, "w") as stream:
        patient = Patient.over(stream)
        assert isinstance(patient, Patient)
        console = Console(patient, colour=False)
        begin = time.monotonic()
        for number in range(40):
            console.say(f"line {number} " + "x" * 10_000)
        assert time.monotonic() - begin < 10  # one patience, not forty
        got = b""
        while b"again" not in got:
            got += os.read(pipe.fileno(), 65536)
            if got.endswith(b"x\n"):
                console.say("again")
            console.catch_up()
        patient.close()
    text = got.decode()
    shown = text.count("phalanx: line ")
    assert 5 < shown < 40
    assert f"[phalanx: {40 - shown} lines not shown" in text


def test_an_interrupt_before_the_job_runs_is_no_traceback(monkeypatch, capsys) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["run", "x.py"]) == 130
    assert capsys.readouterr().err == "phalanx: stopped by SIGINT\n"


@pytest.mark.process
def test_a_keeper_whose_agent_is_gone_already_leaves_without_a_word() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = os.path.dirname(os.path.dirname(phalanx.__file__))
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", _KEEPER_CODE, str(theirs.fileno()), str(gone.pid), root],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=30,
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.process
def test_a_program_that_writes_over_its_page_makes_no_nonsense_of_the_report(job) -> None:
    run = job(
        "--max-restarts 1",
        """
        import mmap
        with mmap.mmap(int(os.environ["PHALANX_PROGRESS_FD"]), 4096) as page:
            page[192:] = b"\\x7f" * (4096 - 192)
        os._exit(3)
        """,
    )
    assert run.wait() == 3
    assert "at step" not in run.err
    assert " h " not in run.err
    assert "done again" not in run.err


def test_a_page_full_of_anything_can_be_read() -> None:
    for byte in (b"\x00", b"\x7f", b"\xff", b"\x80", b"\x01"):
        page = ProgressPage.create("phalanx-test-break.1")
        try:
            page._map[192:] = byte * (len(page._map) - 192)
            told = page.read()
            assert told.step is None or 0 <= told.step < 2**53
            assert told.beat_ns <= time.monotonic_ns()
            assert told.first_beat_ns <= time.monotonic_ns()
        finally:
            page.close()


@pytest.mark.process
@pytest.mark.parametrize("option", ["", "-t2"])
def test_tee_to_a_console_that_nobody_reads(tmp_path, option: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nfor _ in range(4000): print('x' * 100, file=sys.stderr)\n")
    reader, writer = os.pipe()
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "run", *option.split(), str(script)],
            stderr=writer,
            timeout=40,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0
    assert time.monotonic() - begin < 9  # less than TailLog's own patience


@pytest.mark.process
def test_a_log_folder_in_which_nothing_can_be_made(job) -> None:
    run = job("--log-dir /proc/self", "print('never')")
    assert run.wait() == 126
    assert "there can be no log files in /proc/self" in run.err
    assert "Traceback" not in run.err


@pytest.mark.process
def test_a_restart_goes_on_when_the_log_folder_is_lost(job, tmp_path) -> None:
    run = job(
        f"--log-dir {tmp_path}/logs -t3",
        """
        import shutil
        logs = os.environ["TEST_OUT"] + "/logs"
        if ATTEMPT == 0:
            shutil.rmtree(logs)
            open(logs, "w").close()
            os._exit(3)
        print("second", file=sys.stderr)
        """,
    )
    assert run.wait() == 0, run.err
    assert "no log files from here on" in run.err
    assert "second" in run.err
    assert "Traceback" not in run.err


@pytest.mark.process
def test_whatever_a_worker_says_is_recorded_and_harms_nobody(job) -> None:
    run = job(
        "--max-restarts 0",
        """
        import json, socket
        line = socket.socket(fileno=int(os.environ["PHALANX_CHANNEL_FD"]))
        line.setblocking(True)
        for kind in ("hello", "left", "fault", "good_step", "finished", "keep", "odd"):
            for name in ("generation", "step", "kind", "type", "local_rank", "name", "self"):
                for value in (None, True, 1.5, 10**30, "\\ud800", [], {}):
                    said = {"v": 1, "type": kind, name: value}
                    line.sendall(json.dumps(said).encode())
        line.sendall(b'{"v": 1, "type": "odd", "local_rank": 7, "wall": NaN}')
        for _ in range(3000): line.sendall(b"no message")
        """,
    )
    assert run.wait() == 0, run.err
    odd = [e["data"] for e in run.events("worker_said")]
    assert odd
    assert {e["local_rank"] for e in odd} == {0}
    assert 100 < len(run.events("worker_garbled")) <= 1000


def test_events_into_a_pipe_that_nobody_reads_are_lost(tmp_path, caplog) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = EventLog(path, "agent")
    log.record("anything")
    assert "events are lost" in caplog.text
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0):
        heard = EventLog(path, "agent")
        for _ in range(1000):
            heard.record("anything", text="x" * 1000)  # more than the pipe holds
        heard.close()


def test_without_threads_left_a_host_still_has_a_name(monkeypatch) -> None:
    monkeypatch.setattr(hostname, "_known", {})
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    assert hostname.fq_hostname() == socket.gethostname()


def test_without_threads_left_there_is_no_relay_and_nothing_stays_open(monkeypatch) -> None:
    relay = OutputRelay()
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="ulimit -u"):
        relay.attach(0, show=False)
    assert os.listdir("/proc/self/fd") == before
    relay.close()


def test_without_threads_left_there_is_no_health_server_and_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    before = os.listdir("/proc/self/fd")
    assert not HealthServer(LoopHealth(), 0).start()
    assert "no health server" in caplog.text
    assert os.listdir("/proc/self/fd") == before


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
