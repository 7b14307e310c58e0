"""As much of HTTP/1 as a health endpoint needs, pure: bytes in, request; answer, bytes out."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["REQUEST_LIMIT", "BadRequest", "Request", "parse", "response"]

#: Longest request line with headers, in bytes.
REQUEST_LIMIT = 8192

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([\x21-\x7e]{1,4096}) HTTP/1\.\d")


class Request(NamedTuple):
    method: str
    path: str  # without the query


class BadRequest(Exception):
    """Not a request; ``status`` is what to answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def parse(data: bytes) -> Request | None:
    """The request that ``data`` begins with; None: not all of its head has come yet.

    Raises BadRequest as soon as it cannot become one.
    """
    data = data.lstrip(b"\r\n")  # old clients; RFC 9112 2.2
    line, newline, _ = data.partition(b"\n")
    if newline:
        match = _REQUEST_LINE.fullmatch(line.rstrip(b"\r"))
        if match is None:
            raise BadRequest(400, "not an HTTP request")
        if b"\n\r\n" in data or b"\n\n" in data:
            path = match[2].partition(b"?")[0].decode("ascii")
            return Request(match[1].decode("ascii"), path)
    if len(data) > REQUEST_LIMIT:
        raise BadRequest(431, "the request is too long")
    return None


def response(
    status: int, body: bytes, content_type: str = "text/plain; charset=utf-8", head: bool = False
) -> bytes:
    """A whole answer after which the connection is closed; ``head``: without its body."""
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status == 405:
        lines.append("Allow: GET, HEAD")
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (b"" if head else body)
