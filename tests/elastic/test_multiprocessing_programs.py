"""SubprocessContext: programs as workers, with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    Std,
    start_processes,
)
from phalanx.elastic.multiprocessing.errors import first_failure
from phalanx.elastic.multiprocessing.subprocess_context import SubprocessContext
from phalanx.process import oom, tree
from phalanx.process.logs import OutputRelay
from phalanx.process.preload import PreloadPlan
from phalanx.process.program import Program
from phalanx.process.supervisor import KeeperLost, Supervisor, WorkerDied

pytestmark = pytest.mark.process

LIMIT = 20.0  # seconds; what is waited for takes milliseconds
ONE_FAILS = 'if [ "$RANK" = 1 ]; then echo "it broke" >&2; exit 138; fi; exec sleep 600'


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test ends with the children, descriptors and threads it began with."""
    children, fds = tree.children(os.getpid()), descriptors()
    threads = set(threading.enumerate())
    yield
    gc.collect()  # pages and wake-ups live as long as their objects
    assert tree.children(os.getpid()) == children
    assert descriptors() == fds
    assert set(threading.enumerate()) <= threads  # an earlier test's may have been ending


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contexts: list[PContext] = []
        os.mkfifo(folder / "up")
        self._up = os.open(folder / "up", os.O_RDONLY | os.O_NONBLOCK)

    def close(self) -> None:
        for context in self.contexts:
            context.close(signal.SIGKILL, 0)
        self.contexts.clear()
        os.close(self._up)

    def start(self, script: str, workers: int = 1, logs=None, **more) -> SubprocessContext:
        logs = logs or DefaultLogsSpecs(str(self.folder / "logs"))
        envs = {rank: {"RANK": str(rank), "DIR": str(self.folder)} for rank in range(workers)}
        context = start_processes(
            "trainer",
            "/bin/sh",
            dict.fromkeys(range(workers), ("-c", script)),
            envs,
            logs,
            **more,
        )
        assert isinstance(context, SubprocessContext)
        self.contexts.append(context)
        return context

    def result(self, script: str, workers: int = 1, **more) -> RunProcsResult:
        result = self.start(script, workers, **more).wait(LIMIT)
        assert result is not None
        return result

    def wait_for_line(self) -> str:
        """What a worker writes to ``$DIR/up``."""
        assert select.select([self._up], [], [], LIMIT)[0]
        return os.read(self._up, 1000).decode().strip()


@pytest.fixture
def scene(tmp_path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def gone(pid: int) -> bool:
    entry = tree.stat(pid)
    return entry is None or entry.zombie


# ------------------------------------------------------------------ ends


def test_success(scene):
    logs = DefaultLogsSpecs(str(scene.folder), redirects=Std.ALL)
    context = scene.start('echo "out $RANK"; echo "err $RANK" >&2', 2, logs)
    pids = context.pids()
    assert sorted(pids) == [0, 1]
    result = context.wait(LIMIT)
    assert result is not None and not result.is_failed()
    assert result.return_values == {0: None, 1: None}
    assert [Path(result.stdouts[r]).read_text() for r in (0, 1)] == ["out 0\n", "out 1\n"]
    assert [Path(result.stderrs[r]).read_text() for r in (0, 1)] == ["err 0\n", "err 1\n"]
    assert all(gone(pid) for pid in pids.values())
    assert all(tail.stopped() for tail in context._tail_logs)
    assert context.wait(0) is result  # it stays so
    context.close()


def test_running_then_closed(scene):
    context = scene.start("exec sleep 600", 2)
    assert context.wait(0) is None
    assert context.wait(0.05, 0.01) is None
    with pytest.raises(ValueError, match="already"):
        context.start()
    pids = context.pids()
    context.close()
    context.close()
    assert all(gone(pid) for pid in pids.values())
    result = context.wait(0)
    assert result is not None
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: -15, 1: -15}
    assert all(f.stopped_by_agent for f in result.failures.values())


def test_one_fails_the_others_are_stopped(scene):
    logs = DefaultLogsSpecs(str(scene.folder), redirects={1: Std.ERR})
    result = scene.result(ONE_FAILS, 3, logs=logs)
    assert result.is_failed() and not result.return_values
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: -15, 1: 138, 2: -15}
    assert {r: f.stopped_by_agent for r, f in result.failures.items()} == {
        0: True,
        1: False,
        2: True,
    }
    failed = result.failures[1]
    assert failed.error_file == "<N/A>" and failed.error_file_data["message"] == "<NONE>"
    assert failed.stderr_tail == ("it broke",)
    assert failed.log_files == (result.stderrs[1],)
    assert first_failure(result.failures) == 1


def test_signal_death(scene):
    failure = scene.result("kill -SEGV $$").failures[0]
    assert (failure.exitcode, failure.signal_name()) == (-11, "SIGSEGV")
    assert failure.explanation is None


def test_a_death_is_noticed_without_looking(scene):
    os.mkfifo(scene.folder / "go")
    context = scene.start('read line < "$DIR/go"; exit 3')
    with open(scene.folder / "go", "w") as file:
        file.write("on with it\n")
    assert context.wait_event(LIMIT)
    assert context.wait(LIMIT, period=LIMIT) is not None


def test_wait_event_comes_back_at_the_timeout_and_when_woken(scene):
    context = scene.start("exec sleep 600")
    assert context.wait_event(0.01) is False
    timer = threading.Timer(0.05, context.wake)
    timer.start()
    assert context.wait_event(LIMIT) is True
    timer.join()
    context.close()


def test_an_event_before_the_wait_is_not_lost(scene):
    context = scene.start("exit 1", 2)
    while context.wait(0) is None:
        context.wait_event(LIMIT)
    assert context.wait(0) is not None


def test_nobody(scene):
    result = start_processes("t", "/bin/true", {}, {}, DefaultLogsSpecs(str(scene.folder))).wait(0)
    assert result is not None and result.return_values == {} and not result.is_failed()


def test_ranks_must_be_complete(scene):
    logs = DefaultLogsSpecs(str(scene.folder))
    for args, envs in (({0: ()}, {0: {}, 1: {}}), ({0: (), 2: ()}, {0: {}, 2: {}})):
        with pytest.raises(RuntimeError, match="local rank mapping mismatch"):
            start_processes("t", "/bin/true", args, envs, logs)


def test_missing_program(scene):
    args: dict = {0: (), 1: ()}
    envs: dict = {0: {}, 1: {}}
    with pytest.raises(FileNotFoundError, match="does-not-exist"):
        start_processes("t", "does-not-exist", args, envs, DefaultLogsSpecs(str(scene.folder)))


def test_the_workers_environment(scene, monkeypatch):
    monkeypatch.setenv("FROM_AGENT", "a")
    monkeypatch.setenv("MASTER_ADDR", "agent's")
    context = start_processes(
        "t",
        "/bin/sh",
        {0: ("-c", 'echo "$FROM_AGENT $FROM_ENV ${MASTER_ADDR-unset}"; echo $0 $1', 7, [1, 2])},
        {0: {"FROM_ENV": "e", "MASTER_ADDR": None}},  # type: ignore[dict-item]
        DefaultLogsSpecs(str(scene.folder), redirects=Std.OUT),
    )
    result = context.wait(LIMIT)
    assert result is not None
    assert Path(result.stdouts[0]).read_text() == "a e unset\n7 [1, 2]\n"


def test_broken_error_file_is_no_reason_to_fall_over(scene):
    for content in ("", "{", '{"message": {"mess'):
        script = f"printf '%s' '{content}' > $TORCHELASTIC_ERROR_FILE; kill -9 $$"
        failure = scene.result(script).failures[0]
        assert failure.exitcode == -9 and failure.error_file == "<N/A>"


def test_an_error_file_that_was_there_before_is_not_this_workers(scene):
    class Same(LogsSpecs):
        """The same path for every attempt."""

        @property
        def root_log_dir(self):
            return str(scene.folder)

        def reify(self, envs):
            path = str(scene.folder / "error.json")
            none = dict.fromkeys(envs, "")
            return LogsDest(stdouts=none, stderrs=dict(none), error_files={0: path})

    path = scene.folder / "error.json"
    path.write_text('{"message": "of long ago"}')
    assert scene.result("exit 1", logs=Same()).failures[0].error_file == "<N/A>"
    script = f"""echo '{{"message": "of now"}}' > {path}; exit 1"""
    assert scene.result(script, logs=Same()).failures[0].message == "of now"


COLLATERAL = """
import os, sys
from phalanx.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    assert os.read(5, 1) == b""  # end of file: the other one is dead
    raise ConnectionError("peer is gone")

main()
"""


def test_sigkill_then_collateral_exception_within_a_second(scene):
    (scene.folder / "go").write_text(COLLATERAL)
    os.mkfifo(scene.folder / "pipe")
    # Rank 0 dies of rank 1's death; it is polled first.
    script = (
        f'if [ "$RANK" = 1 ]; then exec {sys.executable} "$DIR/go" 5> "$DIR/pipe"; fi;'
        f' exec {sys.executable} "$DIR/go" 5< "$DIR/pipe"'
    )
    context = scene.start(script, 2)
    deadline = time.monotonic() + LIMIT
    while any(worker.alive for worker in context.workers.values()):
        assert time.monotonic() < deadline
        context._take(1)  # both have ended by themselves before anybody looks
    result = context.wait(LIMIT)
    assert result is not None
    assert result.failures[0].message["message"] == "ConnectionError: peer is gone"
    assert result.failures[1].exitcode == -9
    assert first_failure(result.failures) == 1


# ------------------------------------------------------------------ stops


STUBBORN = 'trap "" TERM; echo > "$DIR/go"; while :; do sleep 0.1; done'
ONE_STUBBORN = f'if [ "$RANK" = 1 ]; then cat "$DIR/go"; exit 4; fi; {STUBBORN}'


def test_one_grace_on_the_path_of_a_failure(scene):
    os.mkfifo(scene.folder / "go")
    started = time.monotonic()
    context = scene.start(ONE_STUBBORN, 2, shutdown_timeout=0.2)
    result = context.wait(LIMIT)
    assert time.monotonic() - started < LIMIT / 2  # not 30 s, nor twice
    assert result is not None
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: -9, 1: 4}
    assert result.failures[0].stopped_by_agent


def test_hurry_cuts_the_grace_short(scene):
    script = STUBBORN.replace("go", "up")
    context = scene.start(script, shutdown_timeout=600, hurry=lambda: True)
    scene.wait_for_line()
    context.close()
    result = context.wait(0)
    assert result is not None and result.failures[0].exitcode == -9


def test_close_sends_the_signal_it_is_given(scene):
    script = 'trap "exit 7" HUP; echo > "$DIR/up"; while :; do sleep 0.01; done'
    context = scene.start(script)
    scene.wait_for_line()
    context.close(signal.SIGHUP, 10)
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode == 7 and result.failures[0].stopped_by_agent


def test_grandchildren_of_a_crashed_worker_are_swept(scene):
    script = 'sleep 600 & one=$!; setsid sleep 600 & two=$!; echo "$one $two" > "$DIR/up"; exit 3'
    context = scene.start(script)
    pids = [int(pid) for pid in scene.wait_for_line().split()]
    result = context.wait(LIMIT)
    assert result is not None and result.failures[0].exitcode == 3
    assert all(gone(pid) for pid in pids)


# ------------------------------------------------------------------ output


def test_tee_filters_and_prefixes(scene, capfd):
    logs = DefaultLogsSpecs(
        str(scene.folder),
        redirects=Std.OUT,
        tee={0: Std.ERR, 2: Std.ERR},
        local_ranks_filter={0, 1},
    )
    script = 'for w in good bad; do echo "$w $RANK"; echo "$w $RANK" >&2; done'
    context = scene.start(
        script,
        3,
        logs,
        log_line_prefixes={0: "zero|"},
        duplicate_stdout_filters=["good"],
        duplicate_stderr_filters=["good", "ugly"],
    )
    assert len(context._tail_logs) == 4
    result = context.wait(LIMIT)
    assert result is not None
    assert Path(result.stderrs[2]).read_text() == "good 2\nbad 2\n"
    assert result.stderrs[1] == ""
    attempt = Path(result.stdouts[0]).parent.parent
    assert (attempt / "filtered_stdout.log").read_text() == ""  # stdout is not tee'd
    assert (attempt / "filtered_stderr.log").read_text() == "zero|good 0\n"
    err = capfd.readouterr().err
    assert "good 1" in err and "good 2" not in err


def test_relay_shows_and_remembers(scene):
    reader, writer = os.pipe()
    saved = os.dup(2)
    os.dup2(writer, 2)
    relay = OutputRelay(lines=2)
    try:
        logs = DefaultLogsSpecs(str(scene.folder), local_ranks_filter={1})
        script = 'for w in 1 2 3; do echo "line $w of $RANK" >&2; done; exit 3'
        context = scene.start(script, 2, logs, relay=relay, relay_prefixes={0: "[r0] ", 1: "[r1] "})
        result = context.wait(LIMIT)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        relay.close()
        os.close(writer)
    with open(reader, "rb") as file:
        shown = file.read().decode()
    assert result is not None
    # A rank that is not shown is remembered all the same.
    for rank, failure in result.failures.items():
        if not failure.stopped_by_agent:
            assert failure.stderr_tail == (f"line 2 of {rank}", f"line 3 of {rank}")
    assert "of 0" not in shown
    if not result.failures[1].stopped_by_agent:
        assert "[r1] line 1 of 1\n[r1] line 2 of 1\n[r1] line 3 of 1\n" in shown


def test_logs_specs_of_the_users_own(scene):
    class Together(LogsSpecs):
        """Both streams of a worker in one file."""

        @property
        def root_log_dir(self):
            return str(scene.folder)

        def reify(self, envs):
            files = {rank: str(scene.folder / f"{rank}.log") for rank in envs}
            return LogsDest(stdouts=files, stderrs=dict(files))

    result = scene.result("echo one; echo two >&2; echo three; exit 1", logs=Together())
    assert (scene.folder / "0.log").read_text() == "one\ntwo\nthree\n"
    assert result.failures[0].log_files == (str(scene.folder / "0.log"),)


def test_incomplete_logs_specs_are_named(scene):
    class Incomplete(LogsSpecs):
        @property
        def root_log_dir(self):
            return ""

        def reify(self, envs):
            return LogsDest(stdouts=dict.fromkeys(envs, ""))

    with pytest.raises(RuntimeError, match="stderrs"):
        scene.start("true", 1, Incomplete())


# ------------------------------------------------------------------ what is ours


@contextlib.contextmanager
def shared(plan: PreloadPlan | None = None) -> Iterator[Supervisor]:
    supervisor = Supervisor(job="shared", plan=plan)
    supervisor.open()
    try:
        yield supervisor
    finally:
        supervisor.close()


def test_one_supervisor_for_several_contexts(scene):
    with shared() as supervisor:
        parents, seen = set(), []
        for _ in range(2):
            context = scene.start(
                "exec sleep 600", 2, supervisor=supervisor, on_happening=seen.append
            )
            for pid in context.pids().values():
                entry = tree.stat(pid)
                assert entry is not None
                parents.add(entry.ppid)
            assert [w.incarnation for w in context.workers.values()] == [len(seen) // 4] * 2
            context.close()
            assert all(gone(pid) for pid in context.pids().values())
        assert len(parents) == 1  # one keeper
        assert sum(isinstance(happening, WorkerDied) for happening in seen) == 4


def test_warm_programs(scene):
    script = scene.folder / "program.py"
    script.write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
    with shared(PreloadPlan(modules=("json",))) as supervisor:
        context = scene.start(
            "not used",
            2,
            DefaultLogsSpecs(str(scene.folder), redirects=Std.OUT),
            supervisor=supervisor,
            warm=True,
            program_for=lambda rank: Program(
                (sys.executable, str(script), str(rank)), script=str(script), args=(str(rank),)
            ),
        )
        assert [worker.warm for worker in context.workers.values()] == [True, True]
        result = context.wait(LIMIT)
        assert result is not None and not result.is_failed()
        assert [Path(result.stdouts[r]).read_text() for r in (0, 1)] == ["0 0\n", "1 1\n"]


def test_a_lost_keeper_is_the_cause(scene):
    with shared() as supervisor:
        context = scene.start("exec sleep 600", 2, supervisor=supervisor)
        seen = []
        context._on_happening = seen.append
        entry = tree.stat(context.pids()[0])
        assert entry is not None
        os.kill(entry.ppid, signal.SIGKILL)
        result = context.wait(LIMIT)
        assert result is not None
        assert any(isinstance(happening, KeeperLost) for happening in seen)
        for failure in result.failures.values():
            assert failure.exitcode == -9 and not failure.stopped_by_agent
            assert failure.explanation is not None and "keeper" in failure.explanation
        # The next context gets a new one.
        assert not scene.result("exit 0", 2, supervisor=supervisor).is_failed()


def test_the_store_ends_with_the_context(scene):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = scene.start("exec sleep 600")
        store = context.start_store(listener)
        assert store.port == listener.getsockname()[1] and not store.gone
        context.close()
        assert store.gone


def test_out_of_memory_is_in_the_failure(scene, monkeypatch):
    asked = []

    def explain(watch, mark, returncode, max_rss=None):
        asked.append((mark.pid, returncode, max_rss))
        return "probably out of memory"

    monkeypatch.setattr(oom.OomWatch, "explain", explain)
    context = scene.start('if [ "$RANK" = 0 ]; then kill -9 $$; fi; exec sleep 600', 2)
    result = context.wait(LIMIT)
    assert result is not None
    assert result.failures[0].explanation == "probably out of memory"
    assert result.failures[1].explanation is None  # we ended it
    [(pid, code, peak)] = asked
    assert (pid, code) == (context.pids()[0], -9) and peak


def test_handles_like_pytorchs(scene):
    context = scene.start("exec sleep 600")
    handle = context.subprocess_handlers[0]
    assert handle.local_rank_id == 0
    assert handle.proc.pid == context.pids()[0]
    assert handle.proc.poll() is None
    handle.close(signal.SIGINT)
    result = context.wait(LIMIT)
    assert result is not None and handle.proc.poll() == handle.proc.returncode == -2


def test_a_context_of_the_users_own(scene):
    class Mine(PContext):
        """Written against PyTorch's class: it knows nothing of events."""

        polls = 0

        def _start(self):
            pass

        def _poll(self):
            self.polls += 1
            return RunProcsResult() if self.polls > 2 else None

        def _close(self, death_sig, timeout=30):
            self.closed = (death_sig, timeout)

        def pids(self):
            return {}

    mine = Mine("m", "x", {0: ()}, {0: {}}, DefaultLogsSpecs(str(scene.folder)))
    mine.start()
    assert mine.wait(LIMIT, 0.01) is not None
    assert mine.polls == 3
    with pytest.raises(NotImplementedError):
        mine.start_store(None)  # type: ignore[arg-type]
    timer = threading.Timer(0.05, mine.wake)
    timer.start()
    mine.wait_event(0)
    assert mine.wait_event(LIMIT)
    timer.join()
    mine.close(signal.SIGINT)
    assert mine.closed == (signal.SIGINT, 30)


def test_failures_can_be_said_in_json(scene):
    # Reports are made of them.
    result = scene.result("exit 1")
    json.dumps(dataclasses.asdict(result.failures[0]))


def test_unkillable_worker_is_given_up(scene, monkeypatch, caplog):
    context = scene.start("exec sleep 600")
    real = Supervisor.stop

    def stop(self, workers, *rest):
        report = real(self, workers, *rest)
        return dataclasses.replace(report, stopped=(), unkillable=tuple(workers))

    monkeypatch.setattr(Supervisor, "stop", stop)
    with caplog.at_level(logging.ERROR):
        context.close()
    assert "given up" in caplog.text


def test_after_a_failure_the_others_have_the_period_to_end(scene):
    script = 'if [ "$RANK" = 0 ]; then sleep 0.2; exit 3; fi; sleep 0.4; exit 0'
    result = scene.start(script, 2).wait(LIMIT, period=LIMIT)
    assert result is not None
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: 3}


def test_then_they_are_stopped(scene):
    script = 'if [ "$RANK" = 0 ]; then sleep 0.2; exit 3; fi; exec sleep 600'
    result = scene.start(script, 2).wait(LIMIT, period=0.05)
    assert result is not None
    assert {r: f.exitcode for r, f in result.failures.items()} == {0: 3, 1: -15}
