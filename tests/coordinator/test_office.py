"""Who coordinates is agreed in etcd: a real one, which the tests start for themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compat.harness import ETCD, Etcd

from phalanx.coordinator import words
from phalanx.coordinator.hub import CommitFailed, Facts
from phalanx.coordinator.office import Office
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(ETCD is None, reason="needs the etcd program (apt-get install etcd-server)"),
]


class Real:
    advance = staticmethod(job.advance)
    next_deadline = staticmethod(job.next_deadline)
    fresh = staticmethod(job.State.fresh)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Any]:
    with Etcd() as one:
        yield one


def pair(agents: Any, address: str) -> list[Any]:
    options = m.Options(2, 2, join=60.0, last_call=0.2, rejoin=10.0, recall=5.0)
    made = [agents(n, "unused:1", Real(), etcd=address, options=options) for n in ("a", "b")]
    for agent in made:
        agent.until(m.Assign)
        agent.until(m.Roster)
    return made


def test_the_lease_goes_and_another_takes_it_up(agents: Any, etcd: Any, wait: Any) -> None:
    made = pair(agents, etcd.address)
    (leader,) = [a for a in made if a.node.is_coordinator]
    key = etcd.get("/phalanx/rendezvous/job/owner")
    assert key.value.decode() == leader.node.facts()["listens"]
    etcd.drop(key.lease)  # what time does to one that is cut off
    wait(lambda: not leader.node.is_coordinator or leader.node.facts()["term"] > 1, 60)
    for agent in made:
        while agent.until(words.Reached, 60).term < 2:
            pass
        agent.until(m.Roster, 60)
        assert not [t for t in agent.told if isinstance(t, m.Stop | m.Assign | m.Over)]
    for agent in made:
        agent.node.say(m.Succeeded(1))
    for agent in made:
        assert agent.until(m.Over).verdict.success
    for agent in sorted(made, key=lambda a: a.node.is_coordinator):  # which waits for the others
        agent.close()
    assert etcd.get("/phalanx/rendezvous/job/owner") is None
    # The same id again, and the same epoch: nothing is in the way.
    assert pair(agents, etcd.address)[0].held.attempt == 0


def test_who_has_lost_the_lease_commits_nothing(etcd: Any) -> None:
    import asyncio

    async def both() -> None:
        first = Office(etcd.address, "x", 30.0, 20.0)
        second = Office(etcd.address, "x", 30.0, 20.0)
        assert await first.holder() == ""
        assert (await first.take("one:1", lambda: None)).term == 1
        first.commit(Facts(1, 7, 2, m.Verdict(True)))
        assert await second.holder() == "one:1"
        etcd.drop(etcd.get("/phalanx/rendezvous/x/owner").lease)
        assert await second.take("two:2", lambda: None) == Facts(2, 7, 2)
        with pytest.raises(CommitFailed, match="another"):
            first.commit(Facts(1, 8, 2))
        first.leave()
        second.leave()
        with pytest.raises(CommitFailed):
            second.commit(Facts(2, 8, 2))

    asyncio.run(both())


def test_a_job_by_etcd(etcd: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os; print(f'world {os.environ[\"WORLD_SIZE\"]}')")
    command = [sys.executable, "-m", "phalanx", "run", "--nnodes", "2", "--rdzv-backend", "etcd"]
    command += ["--rdzv-endpoint", etcd.address, "--rdzv-id", "run", "--no-warm", str(program)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        for process in started:
            out, _ = process.communicate(timeout=90)
            assert process.returncode == 0 and "world 2" in out, out
    finally:
        for process in started:
            process.kill()
            process.wait()
