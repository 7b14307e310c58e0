"""The progress page, and what the end of its holder says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.process import tree
from phalanx.process.page import ProgressPage


@pytest.fixture
def page():
    page = ProgressPage.create("phalanx-test-page.1")
    yield page
    page.close()


def in_child(action: Callable[[], object]) -> int:
    """Fork; the child does this and ends with status 9 if it returns."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(9)
    return pid


def test_a_new_page_says_nothing(page):
    progress = page.read()
    assert progress.pid == 0
    assert progress.step is None
    assert progress.phase == ""
    assert progress.beat_ns == progress.beats == progress.generation == 0
    assert progress.finished is None


@given(
    beats=st.lists(
        st.tuples(
            st.none() | st.integers(0, 2**53 - 1),
            st.none() | st.text(max_size=8),
            st.none() | st.integers(0, 2**63),
        ),
        max_size=5,
    )
)
@settings(max_examples=50, deadline=None)
def test_the_reader_sees_the_last_of_each(beats):
    page = ProgressPage.create("phalanx-test-page.2")
    try:
        step, phase, generation = None, "", 0
        for new_step, new_phase, new_generation in beats:
            page.beat(new_step, new_phase, new_generation)
            step = step if new_step is None else new_step
            phase = phase if new_phase is None else new_phase
            generation = generation if new_generation is None else new_generation
        progress = page.read()
        assert (progress.step, progress.generation) == (step, generation)
        assert progress.phase == phase.encode()[:32].rstrip(b"\0").decode("utf-8", "replace")
        assert progress.beats == len(beats)
    finally:
        page.close()


def test_what_one_process_writes_another_reads(page):
    def child():
        mine = ProgressPage.attach(page.fd)
        mine.hold()
        mine.beat(step=7, phase="forward")
        ProgressPage.attach(os.dup(page.fd)).beat(generation=3)  # goes on from there
        mine.finish(5)
        os._exit(5)

    before = time.monotonic_ns()
    pid = in_child(child)
    os.waitpid(pid, 0)
    progress = page.read()
    assert progress.pid == pid
    assert (progress.step, progress.phase, progress.generation) == (7, "forward", 3)
    assert before < progress.beat_ns < time.monotonic_ns()
    assert progress.finished == 5


def test_only_a_page_is_a_page(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        with pytest.raises(ValueError, match="not a progress page"):
            ProgressPage.attach(file.fileno())


def test_nobody_can_cut_it_short(page):
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)


def test_nobody_held_it(page):
    assert page.await_death() is False
    assert page.await_death() is False


def hold_and_tell(page: ProgressPage, write: int) -> None:
    assert page.hold()
    os.write(write, b"!")


def held_by(page: ProgressPage, then: Callable[[], object]) -> int:
    read, write = os.pipe()

    def child():
        hold_and_tell(page, write)
        then()

    pid = in_child(child)
    assert os.read(read, 1) == b"!"
    os.close(read)
    os.close(write)
    return pid


def exit_with_threads(code: int) -> None:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os._exit(code)


def exit_in_thread(code: int) -> None:
    threading.Thread(target=os._exit, args=(code,), daemon=True).start()
    time.sleep(60)


def kill_self(signum: int) -> None:
    import faulthandler
    import resource

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signum)


ENDS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -9),
    "SIGSEGV": (lambda: kill_self(signal.SIGSEGV), -11),
    "abort": (lambda: kill_self(signal.SIGABRT), -6),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), -15),
    "exit 0": (lambda: os._exit(0), 0),
    "exit 7": (lambda: os._exit(7), 7),
    "exit 7 with threads": (lambda: exit_with_threads(7), 7),
    "exit 0 with threads": (lambda: exit_with_threads(0), 0),
    "exit 7 in a thread": (lambda: exit_in_thread(7), 7),
    "exit 0 in a thread": (lambda: exit_in_thread(0), 0),
}


@pytest.mark.process
@pytest.mark.parametrize("way", ENDS)
def test_the_status_is_known_when_the_mutex_changes_hands(page, way):
    action, expected = ENDS[way]
    read, write = os.pipe()
    pid = held_by(page, lambda: (os.read(read, 1), action()))
    entry = tree.stat(pid)
    assert entry is not None
    os.write(write, b"!")
    assert page.await_death() is True
    status = tree.death_status(pid, entry.start)
    os.close(read)
    os.close(write)
    _, real = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(real) == expected
    assert status is not None
    assert os.waitstatus_to_exitcode(status) == expected


@pytest.mark.process
def test_a_core_dump_makes_no_difference(page, tmp_path):
    def crash():
        import faulthandler
        import resource

        faulthandler.disable()
        os.chdir(tmp_path)
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        os.kill(os.getpid(), signal.SIGABRT)

    pid = held_by(page, crash)
    entry = tree.stat(pid)
    assert page.await_death() is True
    if entry is not None:  # it may have been quicker than us
        status = tree.death_status(pid, entry.start)
        assert status is not None and os.waitstatus_to_exitcode(status) == -6
    os.waitpid(pid, 0)


@pytest.mark.process
def test_a_process_that_execs_is_not_dead(page):
    pid = held_by(page, lambda: os.execvp("sleep", ["sleep", "60"]))
    entry = tree.stat(pid)
    assert entry is not None
    assert page.await_death() is True
    assert tree.death_status(pid, entry.start) is None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


MAIN_THREAD_ENDS = """
import ctypes, os, sys, threading, time
from phalanx.process.page import ProgressPage

page = ProgressPage.attach(int(sys.argv[1]))
assert page.hold()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
# exit, not exit_group: this thread alone, as pthread_exit does it
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), int(sys.argv[2]))
"""


@pytest.mark.process
@pytest.mark.parametrize("code", ["0", "7"])
def test_a_main_thread_that_ends_alone_is_no_death(page, code):
    with subprocess.Popen(
        [sys.executable, "-c", MAIN_THREAD_ENDS, str(page.fd), code],
        pass_fds=[page.fd],
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            entry = tree.stat(process.pid)
            assert entry is not None
            assert page.await_death() is True
            assert tree.death_status(process.pid, entry.start) is None
        finally:
            process.kill()


@pytest.mark.process
def test_an_interpreter_ends_with_the_page_still_mapped(page):
    """At its end an interpreter frees objects before it ends the thread."""
    code = (
        "import sys; from phalanx.process.page import ProgressPage\n"
        "page = ProgressPage.attach(int(sys.argv[1])); assert page.hold(); del page"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(page.fd)], pass_fds=[page.fd])
    assert process.wait(timeout=20) == 0
    died = []
    thread = threading.Thread(target=lambda: died.append(page.await_death()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert died == [True]


@pytest.mark.process
def test_a_waiter_is_freed_when_the_holder_had_unmapped_the_page(page):
    def unmap():
        import ctypes
        import mmap

        address = ctypes.addressof(page._mutex._memory) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
        os._exit(0)

    pid = held_by(page, unmap)
    os.waitpid(pid, 0)
    died = []
    thread = threading.Thread(target=lambda: died.append(page.await_death()), daemon=True)
    thread.start()
    page.abandon(pid + 1)  # not its holder: no effect
    assert died == []
    page.abandon(pid)
    thread.join(timeout=20)
    assert died == [True]
