"""Store servers: lazily, eagerly, again on the same socket."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from phalanx.process import tree
from phalanx.process.preload import PreloadPlan
from phalanx.process.supervisor import KeeperReady, StoreLost, SupervisorError

pytestmark = pytest.mark.process


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        yield sock


def below(supervisor) -> list[int]:
    return [e.pid for e in tree.descendants(supervisor._keeper.pid) if not e.zombie]


def await_start(supervisor, store) -> None:
    end = time.monotonic() + 20
    while store.pid is None:
        assert time.monotonic() < end
        supervisor.pump(1.0)


def test_a_store_that_nobody_connects_to_costs_nothing(scene, listener):
    supervisor = scene.supervisor()
    store = supervisor.start_store(listener)
    assert (store.host, store.port) == listener.getsockname()
    assert supervisor.wait(0.05) == []
    assert below(supervisor) == []
    store.close()
    assert store.gone and store.pid is None
    store.close()
    assert supervisor.wait(0) == []
    assert listener.fileno() >= 0  # the listener stays ours


@pytest.fixture
def server(tmp_path):
    """A folder with a torch whose server says what it was made with."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(
        "class ones:\n"
        "    def __init__(self, *shape): pass\n"
        "    def __matmul__(self, other): return self\n"
        "class default_generator:\n"
        "    seed = lambda: 0\n"
    )
    (package / "__init__.py").write_text(
        "import socket\n"
        "class TCPStore:\n"
        "    def __init__(self, *a, master_listen_fd, **k):\n"
        "        s = socket.socket(fileno=master_listen_fd)\n"
        "        s.accept()[0].send(repr((a, k['is_master'])).encode())\n"
        "        s.detach()\n"
    )
    return str(tmp_path)


def test_an_idle_warm_process_becomes_the_store(scene, listener, server):
    env = {**os.environ, "PYTHONPATH": server, "PHALANX_REHEARSE": "0"}
    supervisor = scene.supervisor(PreloadPlan(modules=("torch",)), env=env)
    supervisor.prepare(2)
    end = time.monotonic() + 60
    while len(supervisor._sessions) < 3:  # the second is forked when the first is ready
        assert time.monotonic() < end
        supervisor.pump(1.0)
    _, idle, _ = supervisor._sessions
    store = supervisor.start_store(listener, eager=True)
    await_start(supervisor, store)
    assert store.pid == idle
    with socket.create_connection(listener.getsockname(), timeout=20) as client:
        host, port = listener.getsockname()
        assert client.recv(1000).decode() == repr(((host, port, None), True))
    store.close()
    assert store.gone
    (worker,) = supervisor.start([scene.order(scene.program("raise SystemExit(3)"), warm=True)])
    scene.until_gone(supervisor, [worker])
    assert worker.returncode == 3


def test_the_first_connection_starts_it(scene, listener, server):
    """With a server that is no real one: what is started, and what becomes of it."""
    supervisor = scene.supervisor(env={**os.environ, "PYTHONPATH": server})
    store = supervisor.start_store(listener)
    host, port = listener.getsockname()

    def ask() -> str:
        with socket.create_connection((host, port), timeout=20) as client:
            while not (data := client.recv(1000)):
                pass
            return data.decode()

    assert ask() == repr((("127.0.0.1", port, None), True))
    await_start(supervisor, store)
    assert below(supervisor) == [store.pid]
    # Closed and started anew on the same socket.
    first = store.pid
    store.close()
    assert store.gone and below(supervisor) == []
    assert supervisor.wait(0) == []
    store = supervisor.start_store(listener, eager=True)
    ask()
    await_start(supervisor, store)
    assert store.pid not in (None, first)
    os.kill(store.pid, signal.SIGKILL)
    assert scene.until(supervisor, bool) == [StoreLost(store)]
    assert store.gone and store.returncode == -signal.SIGKILL
    # One is left for close to end; see the fixture.
    supervisor.start_store(listener, eager=True)
    ask()


def test_only_a_listening_socket_will_do(scene):
    supervisor = scene.supervisor()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match="listen"):
            supervisor.start_store(sock)
    supervisor.close()
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(SupervisorError):
        supervisor.start_store(sock)


@pytest.mark.torch
def test_it_serves_torch_clients(scene, listener):
    pytest.importorskip("torch")
    supervisor = scene.supervisor(PreloadPlan(modules=("torch",)))
    store = supervisor.start_store(listener)
    host, port = listener.getsockname()
    from torch import distributed  # while the other one imports it too

    ready = time.monotonic() + 60
    while not any(isinstance(h, KeeperReady) for h in supervisor.wait(5)):
        assert time.monotonic() < ready
    client = distributed.TCPStore(host, port, None, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    other = distributed.TCPStore(host, port, None, is_master=False, wait_for_workers=False)
    assert other.get("key") == b"value"
    assert other.add("count", 2) == 2
    await_start(supervisor, store)
    # Forked from what has imported torch.
    with open(f"/proc/{store.pid}/cmdline", "rb") as command:
        assert b"store_server" not in command.read()
    del client, other
    store.close()
    again = supervisor.start_store(listener)
    client = distributed.TCPStore(host, port, None, is_master=False, wait_for_workers=False)
    assert client.check(["key"]) is False  # a fresh one
    assert store.gone and again is not store
