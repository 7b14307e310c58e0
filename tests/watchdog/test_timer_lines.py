"""What comes out of the pipe: pure parsing."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic.timer.file_based_local_timer import (
    LINE_LIMIT,
    FileTimerRequest,
    LineReader,
    parse_request,
)

GOOD = {"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 5.5, "signal": 9}
REQUEST = FileTimerRequest(7, "s", 5.5, 9)
LINE = REQUEST.to_json().encode() + b"\n"

requests = st.builds(
    FileTimerRequest,
    st.integers(-(2**31) + 1, 2**31 - 1),
    st.text(max_size=60),
    st.floats(allow_nan=False) | st.integers(-(2**60), 2**60),
    st.integers(-10, 64),
)


def test_exact_bytes() -> None:
    request = FileTimerRequest(15256, "sc", 1795976331.355546, 9)
    assert request.to_json() == (
        '{"version": 1, "pid": 15256, "scope_id": "sc", '
        '"expiration_time": 1795976331.355546, "signal": 9}'
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pid": None}, "pid"),
        ({"pid": True}, "pid"),
        ({"pid": 1.0}, "pid"),
        ({"pid": 2**31}, "pid"),
        ({"scope_id": 3}, "scope_id"),
        ({"expiration_time": "5"}, "expiration_time"),
        ({"expiration_time": math.nan}, "expiration_time"),
        ({"expiration_time": 10**400}, "expiration_time"),
        ({"expiration_time": True}, "expiration_time"),
        ({"signal": "9"}, "signal"),
        ({"signal": 5000}, "signal"),
    ],
)
def test_wrong_field_is_named(change: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_request({**GOOD, **change})


@pytest.mark.parametrize("key", ["pid", "scope_id", "expiration_time", "signal"])
def test_missing_field_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is missing"):
        parse_request({k: v for k, v in GOOD.items() if k != key})


def test_extra_fields_and_no_version_are_fine() -> None:
    assert parse_request({**{k: v for k, v in GOOD.items() if k != "version"}, "x": 1}) == REQUEST


@pytest.mark.parametrize("value", [None, 3, [], "x"])
def test_not_an_object(value: object) -> None:
    with pytest.raises(ValueError, match="object"):
        parse_request(value)


def test_never_ends_is_a_deadline() -> None:
    assert parse_request({**GOOD, "expiration_time": math.inf}).expiration_time == math.inf


@pytest.mark.parametrize(
    "junk",
    [
        b"junk\n",
        b"\xff\xfe\x00\n",
        b"{}\n",
        b'{"pid": 1}\n',
        b"[" * 5000 + b"\n",
        b'{"a":' * 1500 + b"\n",
        b"9" * 6000 + b"\n",
        b'{"version": 1, "pid": 7, "scope_id": "half',  # and then another's whole line
        b"x" * (3 * LINE_LIMIT),
        b"x" * (3 * LINE_LIMIT) + b"\n",
    ],
    ids=lambda junk: repr(junk[:12]),
)
def test_requests_around_junk_count(junk: bytes) -> None:
    reader = LineReader()
    assert reader.feed(LINE + junk + LINE) == [REQUEST, REQUEST]
    assert reader.dropped == 1
    assert reader.why


def test_two_requests_without_a_newline_between() -> None:
    assert LineReader().feed(LINE.strip() + LINE) == [REQUEST, REQUEST]


def test_what_is_kept_of_an_endless_line_is_bounded() -> None:
    reader = LineReader()
    for _ in range(100):
        assert reader.feed(b"y" * 65536) == []
    assert len(reader._rest) <= LINE_LIMIT


@given(st.lists(requests, max_size=8), st.data())
def test_any_cut_gives_the_same_requests(
    wanted: list[FileTimerRequest], data: st.DataObject
) -> None:
    stream = "".join(r.to_json() + "\n" for r in wanted).encode()
    reader, got, at = LineReader(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[at : at + step])
        at += step
    assert got == wanted
    assert reader.dropped == 0


@given(st.binary(max_size=300), requests)
def test_no_bytes_do_harm(junk: bytes, request: FileTimerRequest) -> None:
    reader = LineReader()
    reader.feed(junk)
    assert request in reader.feed(b"\n" + request.to_json().encode() + b"\n")


@given(requests)
def test_json_round_trip(request: FileTimerRequest) -> None:
    assert parse_request(json.loads(request.to_json())) == request
