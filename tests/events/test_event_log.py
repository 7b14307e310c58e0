from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.events import CONTEXT, EVENTS_ENV, EventLog, files, read
from phalanx.events.log import _encode

FIELDS = ["wall", "mono", *CONTEXT, "source", "kind", "data"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "events"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- writing --------------------------------------------------------------------------------------


def test_one_line_with_all_fields(path: Path) -> None:
    log = EventLog(path, "agent", run_id="j", node=1, epoch=0)
    log.record("worker_died", rank=3, signal="SIGKILL")
    (event,) = lines(path)
    assert list(event) == FIELDS
    assert event["host"] == os.uname().nodename
    assert (event["run_id"], event["node"], event["rank"]) == ("j", 1, None)
    assert (event["source"], event["kind"]) == ("agent", "worker_died")
    assert event["data"] == {"rank": 3, "signal": "SIGKILL"}
    assert isinstance(event["mono"], int)


def test_context_is_updated_and_bound(path: Path) -> None:
    log = EventLog(path, "agent", generation=1)
    worker = log.bind(rank=3, incarnation=2)
    log.update(generation=2, episode="e1")
    log.record("a")
    worker.record("b")
    log.update(episode=None)
    log.record("c", kind="data may be called so", self=1)
    seen = [(e["generation"], e["episode"], e["rank"], e["incarnation"]) for e in lines(path)]
    assert seen == [(2, "e1", None, None), (1, None, 3, 2), (2, None, None, None)]
    assert lines(path)[2]["data"] == {"kind": "data may be called so", "self": 1}


def test_unknown_context_is_an_error(path: Path) -> None:
    with pytest.raises(TypeError, match="rang"):
        EventLog(path, "agent", rang=3)
    with pytest.raises(TypeError, match="kind"):
        EventLog(None, "agent").bind(kind=3)


def test_no_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = EventLog(None, "agent")
    log.record("a")
    log.bind(rank=1).record("b")
    log.close()
    assert (log.lost, log.path) == (0, None)
    monkeypatch.delenv(EVENTS_ENV, raising=False)
    EventLog.from_environment("worker").record("c")
    assert list(tmp_path.iterdir()) == []


class Nasty:
    def __str__(self) -> str:
        raise RuntimeError


def test_odd_data(path: Path) -> None:
    log = EventLog(path, "agent")
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    log.record("a", nan=math.nan, inf=[math.inf], path=Path("x"), keys={(1, 2): b"\xff"})
    log.record("b", cycle=cycle, lone="\ud800", deep=json.loads("[" * 400 + "]" * 400))
    log.record("c", big="x" * 200_000)
    log.record("d", nasty=Nasty())
    log.record("e")
    a, b, c, e = lines(path)
    assert a["data"] == {
        "nan": "nan", "inf": ["inf"], "path": "x", "keys": {"(1, 2)": "b'\\xff'"}
    }  # fmt: skip
    assert b["data"]["lone"] == "\ud800"
    assert c["data"]["bytes"] > 200_000
    assert len(json.dumps(c)) < 65536
    assert e["kind"] == "e"
    assert log.lost == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
def test_everything_is_one_line_of_json(value: Any) -> None:
    line = _encode({"data": value})
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    log = EventLog("/dev/full", "agent")
    for _ in range(5):
        log.record("a")
    assert log.lost == 5
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "training goes on" in caplog.text
    log.close()


def test_impossible_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path, tmp_path / "file" / "events", "nul\0byte"):
        caplog.clear()
        log = EventLog(bad, "agent")
        log.record("a")
        log.bind(rank=1).record("a")
        assert log.lost == 2
        assert len(caplog.records) == 1


def test_appends_and_repairs_a_torn_end(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"wall": 1, "torn')
    log = EventLog(path, "agent")
    log.record("a")
    log.record("b")
    assert [e["kind"] for e in read(path)] == ["a", "b"]


def test_write_in_part_does_not_spoil_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, "agent")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
    log.record("torn")
    monkeypatch.setattr(os, "write", real)
    log.record("whole")
    assert [e["kind"] for e in read(path)] == ["whole"]
    assert log.lost == 1


def test_threads_do_not_mix_lines(path: Path) -> None:
    log = EventLog(path, "agent")

    def work(i: int) -> None:
        for j in range(100):
            log.record("k", i=i, j=j, fill="x" * 500)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 400


@pytest.mark.process
def test_fork_writes_its_own_file(path: Path) -> None:
    log = EventLog(path, "agent", run_id="j")
    log.record("before")
    pid = os.fork()
    if pid == 0:
        log.record("child")
        os._exit(0)
    os.waitpid(pid, 0)
    log.record("after")
    beside = Path(f"{path}.{os.uname().nodename}.{pid}")
    assert [e["kind"] for e in lines(path)] == ["before", "after"]
    assert [e["kind"] for e in lines(beside)] == ["child"]
    assert [e["kind"] for e in read(path)] == ["before", "child", "after"]


@pytest.mark.process
def test_worker_writes_beside(path: Path) -> None:
    code = """
from phalanx.events import EventLog
EventLog.from_environment("worker", incarnation=1).record("hello")
"""
    env = {
        **os.environ,
        EVENTS_ENV: str(path),
        "TORCHELASTIC_RUN_ID": "j",
        "RANK": "3",
        "TORCHELASTIC_RESTART_COUNT": "x",
        "PHALANX_GENERATION": "2",
    }
    subprocess.run([sys.executable, "-c", code], env=env, timeout=30, check=True)
    assert not path.exists()
    (event,) = read(path)
    assert (event["run_id"], event["rank"], event["generation"]) == ("j", 3, 2)
    assert (event["attempt"], event["incarnation"], event["source"]) == (None, 1, "worker")


def test_close_and_go_on(path: Path) -> None:
    log = EventLog(path, "agent")
    log.close()
    log.record("a")
    log.close()
    log.record("b")
    log.close()
    assert [e["kind"] for e in read(path)] == ["a", "b"]


# -- reading --------------------------------------------------------------------------------------


def write(path: str | Path, *events: object) -> None:
    Path(path).write_text(
        "".join(e if isinstance(e, str) else json.dumps(e) + "\n" for e in events)
    )


def test_merges_by_time_and_leaves_out_what_is_no_event(tmp_path: Path) -> None:
    base = tmp_path / "ev[1]"
    write(base, {"wall": 1, "n": 1}, "junk\n", {"wall": 4, "n": 4}, "\n", [1], '{"wall": 9, "to')
    write(f"{base}.host-a.12", {"wall": 2, "n": 2}, {"wall": "x"}, {"wall": math.nan}, {"n": 0})
    write(f"{base}.host.b.3", {"wall": 3, "n": 3}, "[" * 5000 + "\n", {"wall": 5, "n": 5})
    write(f"{base}.old", {"wall": 1, "n": -1})
    write(tmp_path / "ev1.host.7", {"wall": 1, "n": -1})
    (tmp_path / "ev[1].host.4").write_bytes(b"\xff\xfe\n")
    assert [e["n"] for e in read(base)] == [1, 2, 3, 4, 5]
    assert len(files(base)) == 4


def test_order_within_a_file_stands(tmp_path: Path) -> None:
    base = tmp_path / "ev"
    write(base, {"wall": 5, "n": 1}, {"wall": 2, "n": 2}, {"wall": 6, "n": 4})
    write(f"{base}.h.1", {"wall": 5.5, "n": 3}, {"wall": 7, "n": 5})
    assert [e["n"] for e in read(base)] == [1, 2, 3, 4, 5]


def test_only_other_processes_wrote(tmp_path: Path) -> None:
    write(tmp_path / "ev.h.1", {"wall": 5})
    assert len(list(read(tmp_path / "ev"))) == 1


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no events record"):
        next(read(tmp_path / "ev"))
