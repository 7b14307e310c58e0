"""Lines, tails and the relay between the workers and the console."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.process.logs import (
    LineCutter,
    OutputRelay,
    Tail,
    free_suffix,
    line_text,
    render_prefix,
    tail_of_file,
)

LIMIT = 20.0  # seconds; nothing below should come near

# ------------------------------------------------------------------ lines


@given(st.lists(st.binary(max_size=40)), st.integers(4, 30))
def test_cutter_loses_and_invents_nothing(chunks, longest):
    cutter = LineCutter(longest)
    pieces = [piece for chunk in chunks for piece in cutter.feed(chunk)]
    assert len(cutter.pending) <= longest
    pieces.append(cutter.flush())
    assert b"".join(pieces) == b"".join(chunks)
    assert all(len(piece) <= longest for piece in pieces)
    for piece in pieces:
        assert b"\n" not in piece[:-1]


@given(st.lists(st.text(alphabet="aé€😀\r\n", max_size=12)), st.integers(4, 30))
def test_cutter_keeps_characters_whole(texts, longest):
    cutter = LineCutter(longest)
    data = "".join(texts).encode()
    pieces = [p for i in range(0, len(data), 3) for p in cutter.feed(data[i : i + 3])]
    pieces.append(cutter.flush())
    for piece in pieces:
        piece.decode()  # strict


@given(st.binary(max_size=60), st.integers(0, 60))
def test_cutter_does_not_care_how_the_bytes_arrive(data, where):
    whole, halves = LineCutter(), LineCutter()
    expected = [*whole.feed(data), whole.flush()]
    assert [*halves.feed(data[:where]), *halves.feed(data[where:]), halves.flush()] == expected


@given(st.lists(st.text(alphabet="ab\n\r", max_size=12)), st.integers(4, 30))
def test_cutter_fed_in_whole_says_the_same(texts, longest):
    one, other = LineCutter(longest), LineCutter(longest)
    expected, seen = b"", b""
    for data in (text.encode() for text in texts):
        expected += b"".join(one.feed(data))
        whole = other.feed_whole(data)
        seen += b"".join(other.feed(data)) if whole is None else whole
        assert other.pending == one.pending or len(one.pending) < len(other.pending) <= longest
    assert seen + other.flush() == expected + one.flush()


@pytest.mark.parametrize(
    ("data", "lines", "rest"),
    [
        (b"a\nb", [b"a\n"], b"b"),
        (b"a\r\nb\n", [b"a\r\n", b"b\n"], b""),
        (b"1%\r2%\r", [b"1%\r"], b"2%\r"),
        (b"\n\n", [b"\n", b"\n"], b""),
        (b"", [], b""),
    ],
)
def test_cutter_table(data, lines, rest):
    cutter = LineCutter()
    assert cutter.feed(data) == lines
    assert cutter.pending == rest


@given(st.lists(st.binary(max_size=300)), st.integers(1, 10), st.integers(80, 1000))
def test_tail_is_bounded(lines, most, size):
    tail = Tail(most, size)
    for line in lines:
        tail.add(line + b"\n")
    assert len(tail.lines()) <= most
    assert sum(len(line.encode()) for line in tail.lines()) <= 3 * size  # U+FFFD is three bytes


def test_tail_keeps_the_last_lines_and_one_line_of_a_progress_bar():
    tail = Tail(3)
    for line in (b"one\n", b"two\n", b"10%\r", b"20%\r", b"30%\r"):
        tail.add(line)
    assert tail.lines(b"unfinished") == ["two", "30%", "unfinished"]


def test_tail_of_file(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(10000)) + b"last\xff")
    assert tail_of_file(path, lines=3) == ["line 9998", "line 9999", "last\ufffd"]
    assert tail_of_file(tmp_path / "none") == []
    assert tail_of_file(os.devnull) == []
    os.mkfifo(tmp_path / "fifo")
    assert tail_of_file(tmp_path / "fifo") == []
    path.write_bytes(b"x" * 1_000_000)
    assert len(tail_of_file(path, size=8000)[0]) <= 8000


def test_free_suffix(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert free_suffix([a, b]) == ""
    (tmp_path / "a").touch()
    assert free_suffix([a, b]) == ".1"
    (tmp_path / "b.1").touch()
    assert free_suffix([a, b]) == ".2"


def test_render_prefix():
    values = {"role_name": "trainer", "rank": 3, "local_rank": 1, "host": "n1", "attempt": 2}
    template = "[${host} ${role_name} ${rank}/${local_rank} #${attempt} ${time} ${what}] "
    assert render_prefix(template, values) == "[n1 trainer 3/1 #2 ${time} ${what}] "


# ------------------------------------------------------------------ the relay


class Console:
    """A pipe in the console's place, read by a thread unless it is to be slow."""

    def __init__(self, read: bool = True) -> None:
        self.reader, self.writer = os.pipe()
        self.data = b""
        self._grown = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        if read:
            self._thread.start()

    def start_reading(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self.reader, 65536):
            with self._grown:
                self.data += data
                self._grown.notify_all()

    def wait_for(self, text: bytes) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.data, LIMIT), self.data[-500:]

    def end(self) -> bytes:
        """Everything that was written. Call it after the relay has been closed."""
        os.close(self.writer)
        if not self._thread.ident:
            self._thread.start()
        self._thread.join(LIMIT)
        os.close(self.reader)
        return self.data


@pytest.fixture
def console():
    return Console()


def test_relay_copies_and_remembers(console):
    relay = OutputRelay(lines=2)
    fd = relay.attach(0, "stderr", console=console.writer)
    os.write(fd, b"one\ntwo\nthree")
    console.wait_for(b"three")  # an unfinished line is shown as well
    assert relay.tail(0) == ["two", "three"]
    assert relay.tail(1) == []
    os.close(fd)
    relay.close()
    assert console.end() == b"one\ntwo\nthree\n"
    assert relay.tail(0) == ["two", "three"]  # the report is made after the end


def test_relay_prefixes_whole_lines_of_several_workers(console):
    relay = OutputRelay()
    fds = [relay.attach(i, "stdout", console=console.writer, prefix=f"[{i}] ") for i in range(3)]
    for step in range(50):
        for i, fd in enumerate(fds):
            os.write(fd, b"rank %d" % i)
            os.write(fd, b" step %d\n" % step)
    for fd in fds:
        os.close(fd)
    relay.close()
    lines = console.end().decode().splitlines()
    assert sorted(lines) == sorted(
        f"[{i}] rank {i} step {step}" for i in range(3) for step in range(50)
    )


def test_relay_prefix_with_time(console):
    relay = OutputRelay()
    fd = relay.attach(0, console=console.writer, prefix="${time}|")
    os.write(fd, b"hello\n")
    os.close(fd)
    relay.close()
    stamp, text = console.end().decode().rstrip().split("|")
    assert text == "hello"
    time.strptime(stamp[:19], "%Y-%m-%d %H:%M:%S")


def test_unfinished_line_of_one_worker_is_not_continued_by_another(console):
    relay = OutputRelay()
    one, two = (relay.attach(i, console=console.writer) for i in range(2))
    os.write(one, b"downloading ")
    console.wait_for(b"downloading ")
    os.write(two, b"other\n")
    console.wait_for(b"other\n")
    os.write(one, b"done\n")
    for fd in (one, two):
        os.close(fd)
    relay.close()
    assert console.end() == b"downloading \nother\ndone\n"


def test_hidden_worker_is_remembered_only(console):
    relay = OutputRelay()
    fd = relay.attach(0, console=console.writer, show=False)
    os.write(fd, b"secret\n")
    os.close(fd)
    relay.close()
    assert console.end() == b""
    assert relay.tail(0) == ["secret"]


def test_both_streams_of_one_terminal_share_its_queue(console):
    relay = OutputRelay()
    other = os.dup(console.writer)
    out = relay.attach(0, "stdout", console=console.writer)
    err = relay.attach(0, "stderr", console=other)
    os.close(other)
    os.write(out, b"begin ")
    console.wait_for(b"begin ")
    os.write(err, b"error\n")
    console.wait_for(b"begin \nerror\n")
    for fd in (out, err):
        os.close(fd)
    relay.close()
    console.end()


@pytest.mark.process
def test_drain_takes_the_last_words_though_a_child_holds_the_pipe(console):
    relay = OutputRelay()
    fd = relay.attach(0, console=console.writer)
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "os.write(2, b'x' * 100000 + b'\\nlast words')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=fd)
    os.close(fd)
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    try:
        assert worker.wait(LIMIT) == -9
        relay.drain(0, LIMIT)
        assert relay.tail(0)[-1] == "last words"
    finally:
        os.kill(child, 9)
        worker.stdout.close()
    relay.close()
    assert console.end().endswith(b"x\nlast words\n")


def test_stuck_console_costs_lines_not_time():
    console = Console(read=False)
    relay = OutputRelay()
    fd = relay.attach(0, console=console.writer, prefix="> ")
    line = b"y" * 1000 + b"\n"
    started = time.monotonic()
    for _ in range(6000):  # far more than pipes and queue hold
        os.write(fd, line)
    assert time.monotonic() - started < LIMIT  # the pipe was read all the time but a second
    os.write(fd, b"the end\n")
    os.close(fd)
    relay.drain(0, LIMIT)
    assert relay.tail(0)[-1] == "the end"
    console.start_reading()
    console.wait_for(b"lines not shown")
    relay.close()
    data = console.end()
    assert data.startswith(b"> " + line)


def test_console_that_goes_away_does_not_stop_the_relay():
    console = Console(read=False)
    relay = OutputRelay()
    fd = relay.attach(0, console=console.writer)
    os.close(console.reader)
    os.close(console.writer)
    for _ in range(1000):
        os.write(fd, b"z" * 1000 + b"\n")
    os.close(fd)
    relay.drain(0, LIMIT)
    assert relay.tail(0)[-1] == "z" * 1000
    relay.close()


def test_relay_on_a_regular_file_and_a_socket(tmp_path):
    import socket

    mine, other = socket.socketpair()
    with open(tmp_path / "out", "wb") as file:
        relay = OutputRelay()
        one = relay.attach(0, console=file.fileno())
        two = relay.attach(1, console=other.fileno())
        for fd in (one, two):
            os.write(fd, b"hello\n" * 1000)
            os.close(fd)
        relay.close()
    other.close()
    assert (tmp_path / "out").read_bytes() == b"hello\n" * 1000
    with mine, mine.makefile("rb") as stream:
        assert stream.read() == b"hello\n" * 1000


def test_relay_misuse():
    relay = OutputRelay()
    with pytest.raises(ValueError, match="stdout or stderr"):
        relay.attach(0, "stdlog")
    relay.close()
    relay.close()
    relay.drain(0)
    with pytest.raises(RuntimeError, match="closed"):
        relay.attach(0)


def test_relay_leaves_no_descriptor_and_no_thread(console):
    before = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    relay = OutputRelay()
    for rank in range(3):
        os.close(relay.attach(rank, console=console.writer))
    relay.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert set(threading.enumerate()) <= threads
    console.end()


def test_line_text():
    assert line_text(b"caf\xc3\xa9 \xff\r\n") == "café \ufffd"
