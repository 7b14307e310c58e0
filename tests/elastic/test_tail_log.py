"""phalanx.elastic.multiprocessing.tail_log: lines of log files on the console."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from phalanx.elastic.multiprocessing.tail_log import TailLog, tail_logfile

LIMIT = 20.0


class Sink(io.StringIO):
    """A console that one can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = threading.Condition()

    def write(self, text: str) -> int:
        with self._grown:
            self._grown.notify_all()
            return super().write(text)

    def wait_for(self, text: str) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.getvalue(), LIMIT), self.getvalue()


def append(path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def test_many_files_that_appear_later(tmp_path):
    files = {rank: str(tmp_path / f"{rank}.log") for rank in range(16)}
    sink = Sink()
    tail = TailLog("writer", files, sink, interval_sec=60).start()  # only the kernel can tell

    def write(path):
        for number in range(200):
            append(path, b"%d\n" % number)

    threads = [threading.Thread(target=write, args=(path,)) for path in files.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.wait_for("[writer0]:0\n")
    assert not tail.stopped()
    tail.stop()
    assert tail.stopped()
    lines: dict[str, list[int]] = {}
    for line in sink.getvalue().splitlines():
        header, number = line.split(":")
        lines.setdefault(header, []).append(int(number))
    assert lines == {f"[writer{rank}]": list(range(200)) for rank in files}


def test_a_line_is_there_at_once(tmp_path):
    path = tmp_path / "log"
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink, interval_sec=60).start()
    for text in ("one", "two"):
        append(path, f"{text}\n".encode())
        sink.wait_for(f"[w0]:{text}\n")
    tail.stop()


def test_without_inotify_the_interval_counts(tmp_path, monkeypatch):
    from phalanx.elastic.multiprocessing import tail_log

    class Deaf(tail_log._Watcher):
        def _add(self, path, mask):
            pass

    monkeypatch.setattr(tail_log, "_Watcher", Deaf)
    path = tmp_path / "log"
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink, interval_sec=0.01).start()
    append(path, b"late\n")
    sink.wait_for("late")
    tail.stop()


def test_prefixes_filter_and_half_lines(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"keep 1\nskip\n10%\r20% keep\r\nkeep caf\xc3\xa9 \xff\nhalf ")
    sink = Sink()
    tail = TailLog(
        "w",
        {3: str(path), 4: str(tmp_path / "none")},
        sink,
        log_line_prefixes={3: "[rank3] "},
        log_line_filter=lambda line: "keep" in line or "half" in line,
    ).start()
    sink.wait_for("keep 1")
    append(path, b"of it")
    tail.stop()
    assert sink.getvalue().split("\n") == [
        "[rank3] keep 1",
        "[rank3] 20% keep",
        "[rank3] keep café \ufffd",
        "[rank3] half of it",
        "",
    ]


def test_stop_drains_what_was_just_written(tmp_path):
    path = tmp_path / "log"
    path.touch()
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink, interval_sec=60).start()
    append(path, b"x\n" * 100_000)
    tail.stop()
    assert sink.getvalue().count("\n") == 100_000


def test_stop_ends_although_somebody_writes_on(tmp_path):
    path = tmp_path / "log"
    stop = threading.Event()

    def write():
        while not stop.is_set():
            append(path, b"more\n" * 1000)

    writer = threading.Thread(target=write)
    writer.start()
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink).start()
    sink.wait_for("more")
    started = time.monotonic()
    tail.stop()
    assert time.monotonic() - started < 5  # else it gave up after ten
    stop.set()
    writer.join()
    assert tail.stopped()


def test_a_file_cut_short_is_followed_on(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"old old old\n")
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink).start()
    sink.wait_for("old")
    path.write_bytes(b"new\n")
    sink.wait_for("new")
    tail.stop()


def test_an_endless_line_is_shown_in_pieces(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"z" * 1_000_000)
    sink = Sink()
    tail = TailLog("w", {0: str(path)}, sink).start()
    sink.wait_for("z" * 60_000)
    tail.stop()
    assert sink.getvalue().count("z") == 1_000_000


def test_trouble_with_one_file_is_logged_and_leaves_the_others(tmp_path, caplog):
    path = tmp_path / "log"
    sink = Sink()
    tail = TailLog("w", {0: str(tmp_path), 1: str(path)}, sink).start()
    append(path, b"fine\n")
    sink.wait_for("[w1]:fine")
    tail.stop()
    assert tail.stopped()
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "IsADirectoryError" in errors[0].getMessage()


def test_a_console_that_is_not_utf8(tmp_path):
    path = tmp_path / "log"
    path.write_bytes("café\n".encode())
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="ascii")
    TailLog("w", {0: str(path)}, console).start().stop()
    assert raw.getvalue() == b"[w0]:caf\\xe9\n"


def test_nothing_to_follow(tmp_path):
    for files in ({}, {0: os.devnull}, {0: str(tmp_path / "none")}):
        tail = TailLog("w", files, Sink()).start()
        assert not tail.stopped()
        tail.stop()
        tail.stop()
        assert tail.stopped()


def test_no_thread_and_no_descriptor_is_left(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x\n")
    fds, threads = os.listdir("/proc/self/fd"), set(threading.enumerate())
    TailLog("w", {0: str(path), 1: str(tmp_path / "none")}, Sink()).start().stop()
    assert os.listdir("/proc/self/fd") == fds
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("wanted", "expected"), [(None, "h:a\nh:b\n"), (lambda s: "b" in s, "h:b\n")]
)
def test_tail_logfile(tmp_path, wanted, expected):
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\n")
    finished = threading.Event()
    sink = Sink()
    thread = threading.Thread(
        target=tail_logfile, args=("h:", str(path), sink, finished, 0.01, wanted)
    )
    thread.start()
    sink.wait_for("b")
    finished.set()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert sink.getvalue() == expected


def test_tail_logfile_of_a_file_that_never_comes(tmp_path):
    finished = threading.Event()
    finished.set()
    started = time.monotonic()
    tail_logfile("h", str(tmp_path / "none"), Sink(), finished, 60)
    assert time.monotonic() - started < LIMIT
