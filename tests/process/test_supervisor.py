"""Starting and watching workers, with real processes."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.process import syscalls, tree
from phalanx.process.preload import PreloadPlan
from phalanx.process.program import Program
from phalanx.process.supervisor import (
    KeeperLost,
    KeeperReady,
    SupervisorError,
    Woken,
    WorkerDied,
    WorkerGarbled,
    WorkerGone,
    WorkerSpoke,
)
from phalanx.watchdog import stacks

pytestmark = pytest.mark.process

WARM = PreloadPlan()
BOTH = pytest.mark.parametrize("warm", [False, True], ids=["exec", "warm"])

DESCRIBE = """
    import json, os, signal, sys
    print(json.dumps({
        "argv": sys.argv[1:],
        "pid": os.getpid(),
        "sid": os.getsid(0),
        "ppid": os.getppid(),
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "stdin": sys.stdin.readline(),
        "ignored": [s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN],
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "fds": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")},
    }), flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    sys.exit(int(sys.argv[1]))
"""


@BOTH
def test_a_worker_gets_what_was_ordered(scene, tmp_path, warm):
    supervisor = scene.supervisor(WARM)
    (out, out_w), (err, err_w), (in_r, in_w) = scene.pipe(), scene.pipe(), scene.pipe()
    os.write(in_w, b"a line\n")
    order = scene.order(
        scene.program(DESCRIBE, "3", "--log=x"),
        rank=5,
        env={"COLOUR": "blue \udcff"},
        stdin=in_r,
        stdout=out_w,
        stderr=err_w,
        cwd=str(tmp_path),
        warm=warm,
    )
    before = time.monotonic_ns()
    (worker,) = supervisor.start([order])
    said = json.loads(scene.line(out))
    assert scene.line(err) == "on stderr"
    seen = scene.until_gone(supervisor, [worker])
    assert said["argv"] == ["3", "--log=x"]
    assert said["pid"] == said["sid"] == worker.pid
    assert said["cwd"] == str(tmp_path)
    assert said["stdin"] == "a line\n"
    assert said["env"]["COLOUR"] == "blue \udcff"
    added = {"PHALANX_WORKER", "PHALANX_CHANNEL_FD", "PHALANX_PROGRESS_FD"}
    assert set(said["env"]) - {*order.env, "LC_CTYPE"} == added
    assert set(said["ignored"]) <= {signal.SIGPIPE, signal.SIGXFSZ}
    assert said["blocked"] == []
    # Its own three, the channel, the page (warm: mapped, which Python does by another one).
    assert len(said["fds"]) <= 7, said["fds"]
    assert worker.local_rank == 5 and worker.incarnation == 0
    assert worker.warm is warm
    assert worker.returncode == 3 and worker.gone
    assert worker.max_rss is not None and 1 << 20 < worker.max_rss < 1 << 33
    assert worker.signalled_by_us == set()
    assert before < worker.started_ns < worker.dead_ns < time.monotonic_ns()
    assert worker.page.read().finished == (3 if warm else None)
    order_of_news = [type(h) for h in seen if isinstance(h, (WorkerDied, WorkerGone))]
    assert order_of_news == [WorkerDied, WorkerGone]


def test_the_agents_own_streams_are_the_default(scene, capfd):
    supervisor = scene.supervisor()
    workers = supervisor.start([scene.order(scene.program("print('here')"))])
    scene.until_gone(supervisor, workers)
    assert capfd.readouterr().out == "here\n"


def test_a_program_that_is_not_python(scene):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    program = Program(argv=("sh", "-c", "echo $0 $COLOUR; kill -9 $$", "name"))
    order = scene.order(program, env={"COLOUR": "red"}, stdout=write, warm=True)
    (worker,) = supervisor.start([order])
    assert scene.line(read) == "name red"
    seen = scene.until_gone(supervisor, [worker])
    assert worker.returncode == -signal.SIGKILL
    assert worker.warm is False  # there is nothing to be warm with
    # Without the mutex both are known at the same time.
    at = [i for i, h in enumerate(seen) if isinstance(h, (WorkerDied, WorkerGone))]
    assert at[1] == at[0] + 1


@BOTH
def test_an_environment_larger_than_a_packet(scene, warm):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    large = {f"V{i}": "x" * 1000 for i in range(500)}
    code = "import os; print(sum(len(v) for k, v in os.environ.items() if k[0] == 'V'))"
    order = scene.order(scene.program(code), env=large, stdout=write, warm=warm)
    order.env.pop("VIRTUAL_ENV", None)
    supervisor.start([order])
    assert int(scene.line(read)) >= 500_000


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (FileNotFoundError, "/nowhere/program"),
        (FileNotFoundError, "no-such-program-on-the-path"),
        (PermissionError, "not_executable"),
        (FileNotFoundError, "no_interpreter"),
        (OSError, "not_a_program"),
    ],
)
def test_what_cannot_be_executed(scene, tmp_path, error, name):
    if name in ("not_executable", "no_interpreter", "not_a_program"):
        path = tmp_path / name
        path.write_bytes(b"#!/nowhere/python\n" if name == "no_interpreter" else b"\0\1\2\3")
        path.chmod(0o600 if name == "not_executable" else 0o700)
        name = str(path)
    supervisor = scene.supervisor()
    good = scene.order(Program(argv=("sleep", "300")), rank=0)
    bad = scene.order(Program(argv=(name, "x")), rank=1)
    with pytest.raises(error) as caught:
        supervisor.start([good, bad])
    assert caught.value.filename == name
    assert supervisor.wait(0) == []
    keeper = supervisor._keeper.pid
    assert [e for e in tree.descendants(keeper) if not e.zombie] == []
    (worker,) = supervisor.start([good])  # still usable, and nothing was counted
    assert worker.incarnation == 0


@BOTH
def test_a_directory_that_is_not_there(scene, warm):
    supervisor = scene.supervisor(WARM)
    order = scene.order(scene.program("pass"), cwd="/nowhere/at/all", warm=warm)
    with pytest.raises(FileNotFoundError) as caught:
        supervisor.start([order])
    assert caught.value.filename == "/nowhere/at/all"


def test_an_argument_with_a_null_character(scene):
    supervisor = scene.supervisor()
    with pytest.raises(ValueError, match="null"):
        supervisor.start([scene.order(Program(argv=("echo", "a\0b")))])


@pytest.mark.parametrize("prepared", [0, 2, 5])
def test_prepared_or_not_warm_workers_are_alike(scene, prepared):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    if prepared:
        supervisor.prepare(prepared)
    program = scene.program("import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    for round in range(2):
        orders = [scene.order(program, rank=r, stdout=write, warm=True) for r in range(3)]
        workers = supervisor.start(orders)
        assert {int(scene.line(read)) for _ in workers} == {w.pid for w in workers}
        assert all(w.warm for w in workers)
        assert [w.incarnation for w in workers] == [round] * 3
        for worker in workers:
            entry = tree.stat(worker.pid)
            assert entry is not None
            assert entry.ppid == supervisor._keeper.pid
            assert entry.session == worker.pid
        report = supervisor.stop(workers, grace=10.0)
        assert len(report.stopped) == 3 and report.killed == ()
        assert {w.returncode for w in workers} == {-signal.SIGTERM}


@BOTH
def test_a_death_is_known_before_the_memory_is_free(scene, warm):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    code = """
        import sys, time
        if sys.argv[1:]:
            from phalanx.process.worker import attach
            assert attach() is not None
        memory = bytearray(256 << 20)
        memory[::4096] = b"x" * (len(memory) // 4096)
        print("ready", flush=True)
        time.sleep(300)
    """
    program = scene.program(code, *([] if warm else ["attach"]))
    for _ in range(5):  # on a machine that has no time for us we may be told of both at once
        (worker,) = supervisor.start([scene.order(program, stdout=write, warm=warm)])
        scene.line(read)
        os.kill(worker.pid, signal.SIGKILL)
        died = scene.until(supervisor, lambda seen: any(isinstance(h, WorkerDied) for h in seen))
        assert worker.returncode == -signal.SIGKILL
        early = not any(isinstance(h, WorkerGone) for h in died)
        if early:
            assert not worker.gone and not worker.alive
            scene.until_gone(supervisor, [worker])
        assert worker.max_rss is not None and worker.max_rss > 256 << 20
        if early:
            break
    assert early


def test_a_warm_program_that_execs_is_a_worker_still(scene):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    code = "import os; os.execvp('sh', ['sh', '-c', 'echo shell; read x; exit 4'])"
    in_r, in_w = scene.pipe()
    order = scene.order(scene.program(code), stdin=in_r, stdout=write, warm=True)
    (worker,) = supervisor.start([order])
    assert scene.line(read) == "shell"
    assert not any(isinstance(h, WorkerDied) for h in supervisor.wait(0.05))
    os.write(in_w, b"\n")
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 4


def test_a_warm_worker_of_a_plain_program_writes_its_stacks_itself(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_find_py_spy", lambda: None)
    supervisor = scene.supervisor(WARM)
    code = """
        import sys
        def the_place_where_it_hangs():
            print("here", flush=True)
            sys.stdin.read()
        the_place_where_it_hangs()
    """
    (stdin, hold), (out, stdout) = scene.pipe(), scene.pipe()
    (worker,) = supervisor.start(
        [scene.order(scene.program(code), warm=True, stdin=stdin, stdout=stdout)]
    )
    assert scene.line(out) == "here"
    (path,) = stacks.save_stacks({worker.pid: "it"}, tmp_path, 60)
    text = path.read_text()
    assert "method: faulthandler" in text
    assert "in the_place_where_it_hangs" in text
    os.close(hold)
    os.close(stdin)
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 0


def test_messages_both_ways(scene):
    supervisor = scene.supervisor(WARM)
    code = """
        from phalanx.process.worker import attach
        page, channel = attach()
        page.beat(step=12, phase="train")
        channel.send("hello", capabilities=["join"])
        assert channel.wait(60)
        message = channel.receive()
        channel.send("left", step=message.fields["generation"], clean=True)
        channel._socket.send(b"garbage")
        channel.send("fault", kind="test", text="the last word")
    """
    program = scene.program(code)
    for warm in (False, True):
        (worker,) = supervisor.start([scene.order(program, warm=warm)])

        def spoke(seen, kind, worker=worker):
            return any(
                isinstance(h, WorkerSpoke) and h.worker is worker and h.message.type == kind
                for h in seen
            )

        scene.until(supervisor, lambda seen: spoke(seen, "hello"))
        progress = worker.page.read()
        assert (progress.pid, progress.step, progress.phase) == (worker.pid, 12, "train")
        worker.channel.send("leave", generation=7)
        seen = scene.until_gone(supervisor, [worker])
        mine = [h for h in seen if getattr(h, "worker", None) is worker]
        assert [type(h) for h in mine] == [
            WorkerSpoke,
            WorkerGarbled,
            WorkerSpoke,
            WorkerDied,
            WorkerGone,
        ]
        assert mine[0].message.fields == {"step": 7, "clean": True}
        assert mine[2].message.fields["text"] == "the last word"
        assert worker.returncode == 0


def test_nobody_is_told_of_an_effect_ahead_of_its_cause(scene, tmp_path):
    """What several workers said and did before the agent looks comes in the order of time."""
    supervisor = scene.supervisor()
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)
    out, done = scene.pipe()
    code = """
        import os, signal, sys
        from phalanx.process.channel import Channel
        channel = Channel.from_environment()
        if sys.argv[1] == "one":
            channel.send("first")
            open("a", "w").close()
            open("b").close()
            channel.send("third")
            print("done", flush=True)
        else:
            open("a").close()
            channel.send("second")
            open("b", "w").close()
            signal.pause()
    """
    orders = [
        scene.order(scene.program(code, name), rank, stdout=done, cwd=str(tmp_path))
        for rank, name in enumerate(("other", "one"))
    ]
    workers = supervisor.start(orders)
    assert scene.line(out) == "done"
    seen = scene.until_gone(supervisor, workers[1:])
    said = [h.message.type for h in seen if isinstance(h, WorkerSpoke)]
    assert said == ["first", "second", "third"]
    died = next(i for i, h in enumerate(seen) if isinstance(h, WorkerDied))
    assert all(not isinstance(h, WorkerSpoke) for h in seen[died:])


def test_wake_from_a_thread_and_from_a_signal_handler(scene):
    supervisor = scene.supervisor()
    supervisor.wake()
    supervisor.wake()
    assert supervisor.wait(20) == [Woken()]
    threading.Timer(0.01, supervisor.wake).start()
    assert scene.until(supervisor, bool) == [Woken()]
    old = signal.signal(signal.SIGUSR2, lambda *_: supervisor.wake())
    try:
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        assert scene.until(supervisor, bool) == [Woken()]
    finally:
        signal.signal(signal.SIGUSR2, old)
    assert supervisor.wait(0) == []


def test_other_descriptors_in_the_same_selector(scene):
    supervisor = scene.supervisor()
    read, write = scene.pipe()
    got = []
    supervisor.watch(read, lambda: got.append(os.read(read, 100)))
    os.write(write, b"x")
    assert supervisor.wait(20) == []
    assert got == [b"x"]
    supervisor.unwatch(read)
    os.write(write, b"y")
    assert supervisor.wait(0) == []
    assert got == [b"x"]


def test_wait_waits_no_longer_than_it_is_told(scene):
    supervisor = scene.supervisor()
    begin = time.monotonic()
    assert supervisor.wait(0.05) == []
    assert time.monotonic() - begin >= 0.05


def module(directory, name: str, code: str) -> PreloadPlan:
    (directory / f"{name}.py").write_text(code)
    return PreloadPlan(modules=(name,), first_path=str(directory))


def ready(seen) -> bool:
    return any(isinstance(h, KeeperReady) for h in seen)


def test_imports_are_done_once_and_workers_have_them(scene, tmp_path):
    plan = module(tmp_path, "heavy", "import os\nwhere = os.getpid()\n")
    supervisor = scene.supervisor(plan)
    seen = scene.until(supervisor, ready)
    assert seen[0].report.imported == ("heavy",)
    read, write = scene.pipe()
    program = scene.program("import heavy; print(heavy.where, flush=True)")
    orders = [scene.order(program, rank=r, stdout=write, warm=True) for r in range(2)]
    workers = supervisor.start(orders)
    where = {int(scene.line(read)) for _ in workers}
    assert len(where) == 1 and not where & {w.pid for w in workers}


@pytest.mark.parametrize(
    "code", ["import phalanx", "from phalanx import progress", "import phalanx.events.log"]
)
def test_what_is_preloaded_has_the_same_package_as_the_program(scene, tmp_path, code):
    """Two copies of it would be two of each class: what one raises the other does not catch."""
    supervisor = scene.supervisor(module(tmp_path, "helper", code))
    program = scene.program(
        "import sys, phalanx, helper\n"
        "ours = [v for v in vars(helper).values() if v in (phalanx, phalanx.progress)]\n"
        "sys.exit(7 if ours and sys.modules['phalanx'] is phalanx else 1)"
    )
    (worker,) = supervisor.start([scene.order(program, warm=True)])
    scene.until_gone(supervisor, [worker])
    assert worker.warm and worker.returncode == 7


def test_exec_starts_do_not_wait_for_imports(scene, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    supervisor = scene.supervisor(module(tmp_path, "slow", f"open({str(gate)!r}).read()\n"))
    program = scene.program("import sys; sys.exit(6)")
    (cold,) = supervisor.start([scene.order(program)])
    scene.until_gone(supervisor, [cold])
    assert cold.returncode == 6
    with pytest.raises(TimeoutError, match=r"local ranks have not started: \[1\]"):
        supervisor.start([scene.order(program, rank=1, warm=True)], timeout=0.05)
    with open(gate, "w"):
        pass
    scene.until(supervisor, ready)
    (warm,) = supervisor.start([scene.order(program, rank=2, warm=True)])
    assert warm.warm
    scene.until_gone(supervisor, [warm])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()", "thr"),
        ("import os\nos.kill(os.getpid(), 11)", "died during the imports"),
        ("import os\nos._exit(0)", "died during the imports"),
    ],
)
def test_where_forking_is_not_safe_warm_orders_start_fresh(scene, tmp_path, code, why):
    supervisor = scene.supervisor(module(tmp_path, "bad", code))
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(5)"), warm=True)])
    assert worker.warm is False
    seen = scene.until_gone(supervisor, [worker])
    assert worker.returncode == 5
    (report,) = [h.report for h in seen if isinstance(h, KeeperReady)]
    assert report.safe is False and why in report.why_not
    supervisor.prepare(3)  # nothing to prepare with: no matter
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(6)"), warm=True)])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 6


def test_an_import_that_fails_is_the_programs_to_report(scene, tmp_path):
    supervisor = scene.supervisor(module(tmp_path, "wrong", "1 / 0"))
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(5)"), warm=True)])
    assert worker.warm is True
    seen = scene.until_gone(supervisor, [worker])
    (report,) = [h.report for h in seen if isinstance(h, KeeperReady)]
    assert "division" in report.failed["wrong"]


def test_a_nursery_that_is_killed_takes_no_worker_with_it_and_comes_back(scene):
    supervisor = scene.supervisor(WARM)
    program = scene.program("import time; time.sleep(300)")
    (first,) = supervisor.start([scene.order(program, warm=True)])
    scene.until(supervisor, ready)
    (nursery,) = [
        e.pid
        for e in tree.descendants(supervisor._keeper.pid)
        if e.ppid == supervisor._keeper.pid and e.pid != first.pid
    ]
    os.kill(nursery, signal.SIGKILL)
    scene.until(supervisor, ready)
    (second,) = supervisor.start([scene.order(program, rank=1, warm=True)])
    assert second.warm
    assert first.alive and second.alive
    assert supervisor.wait(0) == []


def test_a_stopped_nursery_does_not_stop_the_keeper(scene):
    supervisor = scene.supervisor(WARM)
    scene.until(supervisor, ready)
    (nursery,) = tree.children(supervisor._keeper.pid)
    stopped: set[int] = set()
    limit = time.monotonic() + 60
    while not stopped >= {nursery, *(e.pid for e in tree.descendants(nursery))}:
        assert time.monotonic() < limit
        for pid in {nursery, *(e.pid for e in tree.descendants(nursery))} - stopped:
            os.kill(pid, signal.SIGSTOP)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                stopped.add(pid)  # it forks no more
    program = scene.program("raise SystemExit(3)")
    with pytest.raises(TimeoutError):
        supervisor.start([scene.order(program, warm=True)], timeout=0.1)
    (worker,) = supervisor.start([scene.order(program)])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 3


def test_in_another_thread_and_two_at_once(scene):
    program = scene.program("raise SystemExit(3)")
    results: list[object] = []

    def run(warm):
        try:
            supervisor = scene.supervisor(WARM)
            workers = supervisor.start([scene.order(program, rank=r, warm=warm) for r in range(2)])
            scene.until_gone(supervisor, workers)
            supervisor.close()
            results.append([w.returncode for w in workers])
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(warm,)) for warm in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert results == [[3, 3], [3, 3]]


def test_nothing_is_left_open_after_many_rounds(scene):
    program = scene.program("import time; time.sleep(300)")
    assert not syscalls.is_subreaper()

    def descriptors() -> dict[str, str]:
        gc.collect()
        found = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                pass
        return found

    supervisor = scene.supervisor(WARM)
    assert syscalls.is_subreaper()
    before = None
    for round in range(20):
        workers = supervisor.start(
            [scene.order(program, rank=r, warm=(r + round) % 2 == 0) for r in range(2)]
        )
        supervisor.stop(workers, grace=10.0)
        supervisor.wait(0)
        del workers
        if before is None:
            before = descriptors()
    after = descriptors()
    assert len(after) == len(before), (before, after)
    keeper = f"/proc/{supervisor._keeper.pid}/fd"
    assert len(os.listdir(keeper)) < 14
    supervisor.close()
    assert not syscalls.is_subreaper()
    threads = [t.name for t in threading.enumerate()]
    assert "phalanx-death" not in threads


@pytest.mark.parametrize("end", ["taken back", "closed"])
def test_descriptors_that_nobody_was_told_of_are_closed(scene, tmp_path, end):
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(300)\n")
    plan = PreloadPlan(modules=("slow_to_import",), first_path=str(tmp_path))
    supervisor = scene.supervisor(plan)
    speaker = scene.program("""
        import os, time
        from phalanx.process.worker import attach
        attach()[1].send("keep", (os.memfd_create("a note for nobody"),), name="note", size=0)
        time.sleep(300)
    """)

    def notes() -> int:
        links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return sum("a note for nobody" in os.readlink(p) for p in links if p.is_symlink())

    def heard() -> bool:
        return any(isinstance(h, WorkerSpoke) for h in supervisor._pending)

    class Enough(Exception):
        pass

    def turn() -> None:
        if heard():
            assert notes() == 1
            supervisor.on_turn = None
            raise Enough

    if end == "taken back":
        never = scene.order(scene.program("pass"), rank=1, warm=True)
        supervisor.on_turn = turn
        with pytest.raises(Enough):  # while it waits for the import
            supervisor.start([scene.order(speaker), never])
        assert supervisor.running() == []
    else:
        supervisor.start([scene.order(speaker)])
        limit = time.monotonic() + 60
        while not heard():
            assert time.monotonic() < limit
            supervisor.pump(1.0)
        supervisor.close(grace=0)
    assert notes() == 0


def test_before_open_and_after_close():
    from phalanx.process.supervisor import Supervisor

    supervisor = Supervisor(job="test")
    supervisor.wake()  # kept until there is a wait
    supervisor.close()
    with pytest.raises(SupervisorError, match="not open"):
        supervisor.wait(0)
    with pytest.raises(SupervisorError, match="not open"):
        supervisor.start([])
    before = len(os.listdir("/proc/self/fd"))
    for round in range(2):
        supervisor.open()
        with pytest.raises(SupervisorError, match="open already"):
            supervisor.open()
        assert supervisor.wait(0) == ([Woken()] if round == 0 else [])
        supervisor.close()
        supervisor.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interpreter_that_is_not_there():
    from phalanx.process.supervisor import Supervisor

    supervisor = Supervisor(job="test", python=("/nowhere/python",))
    with pytest.raises(FileNotFoundError) as caught:
        supervisor.open()
    assert caught.value.filename == "/nowhere/python"
    assert not syscalls.is_subreaper()


def test_a_keeper_that_cannot_start_is_a_lost_one(scene):
    supervisor = scene.supervisor(python=("false",))
    (lost,) = scene.until(supervisor, bool)
    assert isinstance(lost, KeeperLost)
    assert lost.returncode == 1 and "exit status 1" in lost.reason
    with pytest.raises(SupervisorError, match="keeper is lost"):
        supervisor.start([scene.order(scene.program("pass"))])


# -- the death of keeper and agent


def test_when_the_keeper_is_killed_all_goes_and_another_takes_over(scene, family, ends):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    program = scene.program(family + "time.sleep(300)\n")
    orders = [scene.order(program, rank=r, stdout=write, warm=r < 2) for r in range(4)]
    workers = supervisor.start(orders)
    below = [int(pid) for _ in workers for pid in scene.line(read).split()]
    supervisor.prepare(1)
    assert len(below) == 20
    keeper = supervisor._keeper.pid
    everybody = [e.pid for e in tree.descendants(keeper)]
    os.kill(keeper, signal.SIGKILL)
    seen = scene.until_gone(supervisor, workers)
    (lost,) = [h for h in seen if isinstance(h, KeeperLost)]
    assert lost.returncode == -signal.SIGKILL
    assert f"keeper (pid {keeper}) is lost" in lost.reason
    assert {w.returncode for w in workers} == {-signal.SIGKILL}
    with pytest.raises(SupervisorError, match="keeper is lost"):
        supervisor.start(orders)
    supervisor.open()
    ends([*everybody, *below], limit=1.0)
    assert [e.pid for e in tree.descendants(os.getpid()) if e.pid in below] == []  # reaped
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(2)"), warm=True)])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 2


def test_a_start_that_meets_a_dead_keeper_leaves_nothing_behind(scene):
    supervisor = scene.supervisor()
    keeper = supervisor._keeper.pid
    os.kill(keeper, signal.SIGKILL)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
    order = scene.order(Program(argv=("sleep", "300")))
    with pytest.raises(SupervisorError, match="keeper is lost"):
        supervisor.start([order])
    (lost,) = supervisor.wait(0)
    assert isinstance(lost, KeeperLost) and lost.returncode == -signal.SIGKILL
    supervisor.open()
    (worker,) = supervisor.start([order])
    assert worker.alive and worker.incarnation == 0


AGENT = """
import json, os, sys
from phalanx.process.preload import PreloadPlan
from phalanx.process.program import Program
from phalanx.process.supervisor import StartOrder, Supervisor

supervisor = Supervisor(job="test", plan=PreloadPlan())
supervisor.open()
supervisor.prepare(1)
program = Program(argv=(sys.executable, sys.argv[1]), script=sys.argv[1])
workers = supervisor.start(
    [StartOrder(r, program, dict(os.environ), warm=r % 2 == 0) for r in range(4)]
)
if os.fork() == 0:  # holds a copy of all our descriptors
    import time
    print("fork", os.getpid(), flush=True)
    time.sleep(300)
while True:
    supervisor.wait(300)
"""


def test_when_the_agent_is_killed_nothing_is_left(scene, family, ends):
    program = scene.program(family + "time.sleep(300)\n")
    read, write = scene.pipe()
    syscalls.set_subreaper(True)  # what escapes comes to us and fails the test
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, program.script],
        stdout=write,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    try:
        below: list[int] = []
        fork = 0
        while len(below) < 20 or not fork:
            words = scene.line(read).split()
            if words[0] == "fork":
                fork = int(words[1])
            else:
                below += map(int, words)
        everybody = [e.pid for e in tree.descendants(agent.pid) if e.pid != fork]
        assert set(below) <= set(everybody) and len(everybody) >= 26
        agent.kill()
        agent.wait()
        ends(everybody, limit=1.0)
    finally:
        agent.kill()
        for entry in tree.descendants(os.getpid()):
            tree.kill(entry)
        agent.wait()
        syscalls.set_subreaper(False)
        for entry in tree.descendants(os.getpid()):
            os.waitpid(entry.pid, 0)


def test_signals_of_the_terminal_do_not_reach_the_keeper(scene):
    supervisor = scene.supervisor()
    (worker,) = supervisor.start([scene.order(Program(argv=("sleep", "300")))])
    keeper = supervisor._keeper.pid
    assert os.getsid(keeper) == keeper
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(keeper, signum)
    (second,) = supervisor.start([scene.order(Program(argv=("sleep", "300")), rank=1)])
    assert worker.alive and second.alive


def test_a_busy_port_of_a_dead_worker_is_free_when_it_is_gone(scene):
    supervisor = scene.supervisor(WARM)
    read, write = scene.pipe()
    code = """
        import os, socket, time
        s = socket.create_server(("127.0.0.1", 0))
        os.set_inheritable(s.fileno(), True)
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "300"])
        print(s.getsockname()[1], flush=True)
        time.sleep(300)
    """
    (worker,) = supervisor.start([scene.order(scene.program(code), stdout=write, warm=True)])
    port = int(scene.line(read))
    os.kill(worker.pid, signal.SIGKILL)
    scene.until_gone(supervisor, [worker])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
