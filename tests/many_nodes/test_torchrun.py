"""Stock torchrun on our rendezvous."""

from __future__ import annotations

import os
import signal
import time

import pytest
from cluster import DDP, PORT, Agent

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: set PHALANX_SLOW_TESTS=1"
    ),
]


def test_stock_torchrun_with_our_backend_goes_on_without_a_host_that_is_killed(cluster) -> None:
    made = cluster(3)
    endpoint = f"{made.hosts[0].address}:{PORT}"
    conf = "last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = ["--nnodes", "2:3", "--rdzv-backend", "phalanx", "--rdzv-endpoint", endpoint]
    words += ["--rdzv-id", "job", "--max-restarts", "3", "--rdzv-conf", conf]
    words.append(str(DDP))
    for n in range(3):
        made.agents.append(Agent(made.hosts[n], n, made.folder, words, torchrun=True))
    made.trains(3)
    at = time.monotonic()
    made.hosts[2].kill()
    made.trains(2, after=at)
    made.finish()
    assert [a.wait() for a in made.agents] == [0, 0, -signal.SIGKILL]
