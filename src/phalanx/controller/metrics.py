"""Counters, and ``/metrics`` and ``/healthz`` over plain HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

_HELP = {
    "jobs": "Jobs that the controller knows.",
    "streams": "Open signal streams.",
    "device_faults": "Device faults that have not been cleared.",
    "busy_jobs": "Jobs with an episode or maintenance in progress.",
}


class Metrics:
    """Named counters with labels, and gauges that are asked for when somebody looks."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self.gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Adds to a counter (``by`` may be a fraction for sums of seconds)."""
        self.counters[name, tuple(labels.items())] += by  # type: ignore[assignment]

    def text(self) -> str:
        """The Prometheus text format."""
        out: list[str] = []
        for name, ask in self.gauges.items():
            full = f"phalanx_controller_{name}"
            out += [f"# HELP {full} {_HELP.get(name, name)}", f"# TYPE {full} gauge"]
            out.append(f"{full} {ask():g}")
        last = ""
        for (name, labels), value in sorted(self.counters.items()):
            full = f"phalanx_controller_{name}"
            if name != last:
                out.append(f"# TYPE {full} counter")
                last = name
            shown = ",".join(f'{k}="{_escape(v)}"' for k, v in labels)
            out.append(f"{full}{{{shown}}} {value:g}" if shown else f"{full} {value:g}")
        return "\n".join(out) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


async def serve(metrics: Metrics, host: str, port: int) -> asyncio.Server:
    """Answers GET /metrics and /healthz; one request per connection, 5 s each."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), 5)
            parts = line.split()
            path = parts[1] if len(parts) > 1 and parts[0] == b"GET" else b""
            if path == b"/metrics":
                status, body = "200 OK", metrics.text()
            elif path == b"/healthz":
                status, body = "200 OK", "ok\n"
            else:
                status, body = "404 Not Found", "try /metrics or /healthz\n"
            data = body.encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
                + data
            )
            await asyncio.wait_for(writer.drain(), 5)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=8192)
