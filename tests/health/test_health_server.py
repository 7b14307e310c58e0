"""The health server on real sockets."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.health import HealthServer, LoopHealth, Metric
from phalanx.health import server as module


@pytest.fixture
def source() -> LoopHealth:
    return LoopHealth(limit=60)


@pytest.fixture
def server(source: LoopHealth) -> Iterator[HealthServer]:
    server = HealthServer(source, 0)
    assert server.start()
    yield server
    server.stop()
    assert not [t for t in threading.enumerate() if t.name == "health-server"]


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, str, Any]:
    host, port = server.address  # type: ignore[misc]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode(), e.headers


def connect(server: HealthServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=20)  # type: ignore[arg-type]


def everything(sock: socket.socket) -> bytes:
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


# -- what it says ---------------------------------------------------------------------------------


def test_alive_and_ready(server: HealthServer, source: LoopHealth) -> None:
    assert get(server, "/livez")[:2] == (200, "ok\n")
    assert get(server, "/readyz")[:2] == (503, "starting\n")
    source.set_ready(True)
    assert get(server, "/readyz?verbose=1")[:2] == (200, "ok\n")
    source.set_ready(False, "rank 3 is being replaced")
    assert get(server, "/readyz")[:2] == (503, "rank 3 is being replaced\n")
    assert get(server, "/livez")[0] == 200


def test_stuck_loop(server: HealthServer, source: LoopHealth) -> None:
    source.limit = 0.0
    status, text, _ = get(server, "/livez")
    assert status == 503
    assert text.startswith("main loop: last turn")
    source.limit = 60.0
    source.tick()
    assert get(server, "/livez")[0] == 200


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (lambda: time.time() - 100, "watchdog: last progress 100"),
        (lambda: math.nan, "gave nan"),
        (lambda: None, "gave None"),
        (lambda: True, "gave True"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_watch(server: HealthServer, source: LoopHealth, last: Callable[[], Any], why: str) -> None:
    source.watch("watchdog", last, 60)
    status, text, _ = get(server, "/livez")
    assert status == 503
    assert why in text
    assert get(server, "/status")[0] == 200
    source.watch("watchdog", lambda: time.time() + 1000, 60)
    assert get(server, "/livez")[0] == 200
    source.watch("watchdog", last, 60)
    source.unwatch("watchdog")
    assert get(server, "/livez")[0] == 200


def test_status(server: HealthServer, source: LoopHealth) -> None:
    source.facts = lambda: {"ranks": {0: "healthy"}, "where": object}
    status, text, headers = get(server, "/status")
    assert (status, headers["content-type"]) == (200, "application/json")
    said = json.loads(text)
    assert (said["alive"], said["ready"], said["why_not"]) == (True, False, "starting")
    assert said["ranks"] == {"0": "healthy"}
    assert said["uptime_seconds"] >= 0


def test_metrics(server: HealthServer, source: LoopHealth) -> None:
    source.numbers = lambda: [
        Metric("phalanx_restarts", 2, "Restarts", "counter"),
        Metric("phalanx_step", 7, labels={"rank": "0"}),
        Metric("phalanx_step", 8, labels={"rank": '1"\n'}),
    ]
    status, text, headers = get(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    assert "phalanx_alive 1.0" in lines
    assert "# TYPE phalanx_restarts_total counter" in lines
    assert "phalanx_restarts_total 2.0" in lines
    assert 'phalanx_step{rank="0"} 7.0' in lines
    assert 'phalanx_step{rank="1\\"\\n"} 8.0' in lines
    assert not any(line.startswith(("python_", "process_")) for line in lines)


@pytest.mark.parametrize("bad", [[Metric("no spaces", 1)], [Metric("a", 1, kind="x")], None, [3]])
def test_wrong_metrics_harm_nobody(server: HealthServer, source: LoopHealth, bad: Any) -> None:
    source.numbers = lambda: bad
    assert get(server, "/metrics")[0] == 500
    assert get(server, "/livez")[0] == 200


def test_failing_source() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken")

    server = HealthServer(Broken(), 0)
    assert server.start()
    try:
        assert get(server, "/livez")[:2] == (503, "RuntimeError: broken\n")
        assert [get(server, p)[0] for p in ("/readyz", "/status", "/metrics")] == [503, 500, 500]
    finally:
        server.stop()


def test_other_paths_and_methods(server: HealthServer) -> None:
    assert get(server, "/")[0] == 404
    assert get(server, "/livez/")[0] == 404
    assert get(server, "/../livez")[0] == 404
    status, _, headers = get(server, "/livez", "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, text, headers = get(server, "/livez", "HEAD")
    assert (status, text, headers["content-length"]) == (200, "", "3")


# -- who misbehaves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x00\xff\n" * 10, b"400"),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"A" * 300000, b"431"),
        (b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 40000, b"431"),
    ],
)
def test_garbage_gets_an_error(server: HealthServer, said: bytes, status: bytes) -> None:
    with connect(server) as sock:
        try:
            sock.sendall(said)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            assert everything(sock).startswith(b"HTTP/1.1 " + status)
        except ConnectionResetError:
            assert len(said) > 65536  # it said more than anybody listens to
    assert get(server, "/livez")[0] == 200


def test_request_byte_by_byte(server: HealthServer) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /livez HTTP/1.1\r\n\r\n":
            sock.send(bytes([byte]))
        assert everything(sock).endswith(b"ok\n")


def test_half_requests_run_out_of_time(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    with connect(server) as silent, connect(server) as half, connect(server) as gone:
        half.send(b"GET /livez HT")
        gone.send(b"GET")
        gone.close()
        assert everything(silent) == b""
        assert everything(half).startswith(b"HTTP/1.1 408 ")


def test_answer_that_nobody_reads(
    server: HealthServer, source: LoopHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    source.facts = lambda: {"much": "x" * 20_000_000}
    with connect(server) as sock:
        sock.send(b"GET /status HTTP/1.1\r\n\r\n")
        assert get(server, "/livez")[0] == 200
        threading.Event().wait(1.0)
        # What the system holds of the answer comes, then nothing: the server gave up.
        assert len(everything(sock)) < 20_000_000


def test_idle_connections_take_nobodys_place(server: HealthServer) -> None:
    idle = [connect(server) for _ in range(200)]
    try:
        for _ in range(3):
            assert get(server, "/livez")[0] == 200
        held = sum(not select.select([sock], [], [], 0)[0] for sock in idle)
        assert 0 < held <= module._CONNECTIONS
    finally:
        for sock in idle:
            sock.close()


def test_many_at_once(server: HealthServer) -> None:
    answers: list[int] = []

    def ask() -> None:
        for _ in range(10):
            answers.append(get(server, "/livez")[0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [200] * 80


# -- start and stop -------------------------------------------------------------------------------


def test_start_twice_stop_twice(source: LoopHealth) -> None:
    server = HealthServer(source, 0)
    server.stop()
    assert server.start()
    assert server.start()
    port = server.port
    assert port
    server.stop()
    server.stop()
    assert server.port is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    again = HealthServer(source, port)
    assert again.start()
    again.stop()


def test_stop_with_open_connections_leaves_no_descriptor(source: LoopHealth) -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = HealthServer(source, 0)
    assert server.start()
    with connect(server), connect(server):
        assert get(server, "/livez")[0] == 200
        server.stop()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("port", [-1, 65536, 10**30, math.nan, 80.0, True, "x", "", None, "8 0"])
def test_what_is_no_port(source: LoopHealth, port: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = HealthServer(source, port)
    assert not server.start()
    assert server.port is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "port" in record.getMessage()


def test_port_in_use(source: LoopHealth, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = HealthServer(source, str(port))
        assert not server.start()
    (record,) = caplog.records
    assert "in use" in record.getMessage()
    assert server.start()
    server.stop()


def test_port_that_needs_rights() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to give rights up")
    code = """
import os
from phalanx.health import HealthServer, LoopHealth
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(HealthServer(LoopHealth(), 81).start())
"""
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start") as f:
        if int(f.read()) <= 81:
            pytest.skip("every port is free to all here")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "False\n"
    assert "ermission denied" in done.stderr


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", ""])
def test_hosts(source: LoopHealth, host: str) -> None:
    if ":" in host and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    server = HealthServer(source, 0, host)
    assert server.start()
    try:
        port = server.port
        if not host:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
        assert get(server, "/livez")[0] == 200
    finally:
        server.stop()


def test_host_from_environment(source: LoopHealth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.HOST_ENV, "127.0.0.2")
    server = HealthServer(source, 0)
    assert server.start()
    assert server.address is not None
    assert server.address[0] == "127.0.0.2"
    server.stop()


@pytest.mark.parametrize("host", ["256.1.1.1", "203.0.113.7", "no.such.host.invalid", "a b"])
def test_host_that_is_not_ours(
    source: LoopHealth, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not HealthServer(source, 0, host).start()
    assert len(caplog.records) == 1


def test_imports_stay_light() -> None:
    code = """
import sys
from phalanx.health import HealthServer, LoopHealth
server = HealthServer(LoopHealth(), 0)
assert server.start()
server.stop()
print([m for m in ("prometheus_client", "http.server", "http", "torch") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"
