"""The edge towards PyTorch: ``elastic.agent.server.health_check_server``."""

from __future__ import annotations

import importlib.util
import logging
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import phalanx


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    # By its path: the package around it is not needed for this one.
    path = Path(phalanx.__path__[0]) / "elastic/agent/server/health_check_server.py"
    name = "phalanx.elastic.agent.server.health_check_server"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: loaded}):
        spec.loader.exec_module(loaded)
        yield loaded


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def livez(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code


def test_base_serves_nothing(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    callback = mock.Mock()
    server = module.HealthCheckServer(callback, 8080, 60)
    assert (server._alive_callback, server._port, server._timeout) == (callback, 8080, 60)
    assert server.alive_callback is callback
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            server.start()
            server.stop()
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.INFO] * 2
    callback.assert_not_called()


def test_factory(module: ModuleType) -> None:
    callback = mock.Mock()
    server = module.create_healthcheck_server(alive_callback=callback, port=1, timeout=2)
    assert isinstance(server, module.HealthCheckServer)
    assert (server.alive_callback, server._port, server._timeout) == (callback, 1, 2)
    server.stop()
    callback.assert_not_called()


def test_really_serves(module: ModuleType) -> None:
    progress = [time.time()]
    port = free_port()
    server = module.create_healthcheck_server(lambda: int(progress[0]), port, 60)
    for _ in range(2):  # it can be started again
        server.start()
        server.start()
        try:
            assert livez(port) == 200
            progress[0] -= 70
            assert livez(port) == 503
            progress[0] += 70
            for path in ("readyz", "status", "metrics"):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as a:
                    assert a.status == 200
        finally:
            server.stop()
            server.stop()
        with pytest.raises(urllib.error.URLError):
            livez(port)


def test_failing_callback_is_unhealthy(module: ModuleType) -> None:
    port = free_port()
    server = module.create_healthcheck_server(mock.Mock(side_effect=OSError), port, 60)
    server.start()
    try:
        assert livez(port) == 503
    finally:
        server.stop()


def test_port_in_use_is_one_warning(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = module.create_healthcheck_server(time.time, other.getsockname()[1], 60)
        server.start()
        server.stop()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
