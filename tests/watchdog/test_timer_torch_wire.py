"""Our clients with PyTorch's server and the other way round."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.process]

# Both in one process each, so that torch is imported only twice.
TORCH_CLIENT = """
import sys
from torch.distributed.elastic import timer
client = timer.FileTimerClient(sys.argv[1])
client.acquire("sc\\u00e9", 1795976331.355546)
client.acquire("other", 1795976331)
client.release("sc\\u00e9")
sys.stdin.readline()
timer.configure(client)
with timer.expires(after=0.1):
    sys.stdin.read()
"""

TORCH_SERVER = """
import json, sys
from torch.distributed.elastic import timer
server = timer.FileTimerServer(sys.argv[1], "run", 0.05)
server.start()
print("ready", flush=True)
sys.stdin.readline()
server.run_once()
print(json.dumps([server._request_count] + [
    [r.worker_pid, r.scope_id, r.expiration_time, r.signal, r.version]
    for r in server._timers.values()]))
"""


def test_both_ways(tmp_path: Path, python: Any) -> None:
    pytest.importorskip("torch")
    from phalanx.elastic import timer

    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    server = timer.FileTimerServer(ours, "run", 0.05)
    # The two start at the same time: importing torch is what takes long.
    client = python(TORCH_CLIENT, ours)
    other = python(TORCH_SERVER, theirs)
    raw = b""
    os.set_blocking(server._fd, True)
    while raw.count(b"\n") < 3:
        raw += os.read(server._fd, 65536)
    os.set_blocking(server._fd, False)
    pid = client.pid
    expected = [
        timer.FileTimerRequest(pid, "scé", 1795976331.355546, 9),
        timer.FileTimerRequest(pid, "other", 1795976331, 9),
        timer.FileTimerRequest(pid, "scé", -1, 0),
    ]
    assert raw.decode() == "".join(r.to_json() + "\n" for r in expected)
    try:
        server.start()
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.wait(60) == -9
    finally:
        server.stop()

    assert other.stdout.readline() == "ready\n"
    mine = timer.FileTimerClient(theirs, 15)
    mine.acquire("sc\n", 4795976331.5)
    mine.acquire("gone", 4795976331.5)
    mine.release("gone")
    out, _ = other.communicate("\n", timeout=60)
    assert json.loads(out) == [3, [os.getpid(), "sc\n", 4795976331.5, 15, 1]]
