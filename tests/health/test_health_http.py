from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.health.http import REQUEST_LIMIT, BadRequest, Request, parse, response


@pytest.mark.parametrize(
    ("data", "request_"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", Request("GET", "/livez")),
        (b"GET /livez HTTP/1.0\n\n", Request("GET", "/livez")),
        (b"\r\nHEAD /a?b=c HTTP/1.1\r\n\r\nmore", Request("HEAD", "/a")),
        (b"DELETE * HTTP/1.1\r\n\r\n", Request("DELETE", "*")),
        (b"", None),
        (b"GET /livez HTTP/1.1", None),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n", None),
        (b"\x16\x03\x01", None),
    ],
)
def test_parse(data: bytes, request_: Request | None) -> None:
    assert parse(data) == request_


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /livez\r\n", 400),
        (b"get / HTTP/1.1\r\n", 400),
        (b"GET / a HTTP/1.1\r\n", 400),
        (b"\x16\x03\x01\x00\n", 400),
        (b"SSH-2.0-OpenSSH\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n", 400),
        (b"x" * (REQUEST_LIMIT + 1), 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * REQUEST_LIMIT, 431),
    ],
)
def test_bad_requests(data: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(data)
    assert caught.value.status == status


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_not(data: bytes) -> None:
    try:
        parse(data)
    except BadRequest:
        pass


def test_responses() -> None:
    assert response(200, b"ok\n") == (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 3\r\n"
        b"Cache-Control: no-store\r\nConnection: close\r\n\r\nok\n"
    )
    assert response(200, b"ok\n", head=True).endswith(b"close\r\n\r\n")
    assert b"Allow: GET, HEAD\r\n" in response(405, b"")
