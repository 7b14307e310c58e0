"""Error files: atomic writing, reading that believes nothing."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.process import errorfile

SECOND = 1_000_000_000


def raised() -> ValueError:
    try:
        raise ValueError("too small")
    except ValueError as error:
        return error


def test_round_trip_and_shape(tmp_path):
    path = str(tmp_path / "error.json")
    now = 1_700_000_000_123_456_789
    errorfile.write(path, errorfile.describe(raised(), now_ns=now))
    data = json.loads((tmp_path / "error.json").read_text())
    extra = data["message"]["extraInfo"]
    assert data["message"]["message"] == "ValueError: too small"
    assert extra["timestamp"] == "1700000000"
    assert extra["timestamp_ns"] == str(now)
    assert 'raise ValueError("too small")' in extra["py_callstack"]
    found = errorfile.read(path)
    assert found is not None
    assert (found.data, found.timestamp, found.time_ns) == (data, 1_700_000_000, now)
    assert found.text == extra["py_callstack"]
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_second_write_replaces_the_first(tmp_path):
    path = str(tmp_path / "error.json")
    for text in ("one", "two"):
        errorfile.write(path, {"message": text})
    found = errorfile.read(path)
    assert found is not None
    assert found.message == "two"


def test_what_is_no_regular_file_is_never_replaced(tmp_path):
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        errorfile.write(fifo, {"message": "hello"})
        assert json.loads(os.read(reader, 1000)) == {"message": "hello"}
        assert stat.S_ISFIFO(os.stat(fifo).st_mode)
    finally:
        os.close(reader)
    errorfile.write(os.devnull, {"message": "hello"})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(OSError):
        errorfile.write(str(tmp_path / "none" / "error.json"), {})
    with pytest.raises(TypeError):
        errorfile.write(str(tmp_path / "error.json"), {"message": object()})
    assert os.listdir(tmp_path) == []


NESTED = {"message": {"message": "m", "extraInfo": {"py_callstack": "t", "timestamp": "10"}}}


@pytest.mark.parametrize(
    ("data", "changed_ns", "timestamp", "time_ns"),
    [
        # A whole second only: the file's own time, if it was written in that second or the next.
        (NESTED, 10 * SECOND + 5, 10, 10 * SECOND + 5),
        (NESTED, 11 * SECOND + 5, 10, 11 * SECOND + 5),
        (NESTED, 500 * SECOND, 10, 10 * SECOND),
        ({"message": "m", "timestamp": 10}, 10 * SECOND + 7, 10, 10 * SECOND + 7),
        ({"message": "m", "timestamp": "10"}, 0, 10, 10 * SECOND),
        ({"message": "m"}, 7 * SECOND + 1, 7, 7 * SECOND + 1),
        ({"message": "m", "timestamp": "soon"}, 7 * SECOND, 7, 7 * SECOND),
        ({"message": {"message": "m"}}, 7 * SECOND, 7, 7 * SECOND),
        ({"message": {"message": "m", "extraInfo": []}}, 7 * SECOND, 7, 7 * SECOND),
        # Nanoseconds that contradict the second are not believed.
        ({"message": "m", "timestamp": 10, "timestamp_ns": "99"}, 0, 10, 10 * SECOND),
        ({"message": "m", "timestamp_ns": "12000000001"}, 0, 12, 12 * SECOND + 1),
    ],
)
def test_times(data, changed_ns, timestamp, time_ns):
    found = errorfile.parse(data, changed_ns)
    assert found is not None
    assert (found.timestamp, found.time_ns) == (timestamp, time_ns)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        json.dumps(NESTED).encode()[:-5],
        b'{"unknown_key": "unknown_value"}',
        b"[]",
        b"null",
        b'{"message": 7}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_garbage_is_no_file(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert errorfile.read(path) is None


def test_other_things_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(errorfile.MAX_BYTES + 1)
    for name in ("fifo", "huge", "none", "."):
        assert errorfile.read(tmp_path / name) is None
    assert errorfile.read(os.devnull) is None
    assert errorfile.read("nul\0byte") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "timestamp", "timestamp_ns", "py_callstack"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(JSON, st.integers(0, 1 << 62))
def test_any_json_is_survived(data, changed_ns):
    found = errorfile.parse(data, changed_ns)
    if found is not None:
        assert isinstance(found.text, str)
        assert 0 <= found.time_ns < 1 << 63 and found.timestamp >= 0
