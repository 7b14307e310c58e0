"""A node is lost whose state no other rank holds: its neighbour has the snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parent / "snapshots.py"
CONF = "--rdzv-conf last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
HOLD = 10  # snapshots are there after steps 3 and 7


def test_a_spare_goes_on_with_the_snapshots_that_the_neighbour_holds(cluster) -> None:
    made = cluster(3)
    words = f"--nnodes 2 --spares 1 --rdzv-id job --shutdown-timeout 5 {CONF}"
    (made.folder / "hold").touch()
    agents = [made.start(n, words, PROGRAM, ["20", "0.02", str(HOLD)]) for n in range(3)]
    made.until(lambda: sum(s.step == HOLD for s in made.steps()) == 2)
    before = {s.rank: s for s in made.steps()}
    seated = {s.host for s in before.values()}
    (spare,) = (a for a in agents if a.host.name not in seated)
    made.until(lambda: "waiting: this" in spare.err or "waiting: all" in spare.err)
    gone = next(rank for rank, s in before.items() if s.host != "host0")
    lost = next(n for n, a in enumerate(agents) if a.host.name == before[gone].host)
    # nobody else would tell when a copy has come to its end
    holder = next(a for a in agents if a.host.name == before[1 - gone].host)
    made.until(lambda: holder.events("snapshot_held"), "a snapshot at the neighbour")
    made.hosts[lost].kill()
    (made.folder / "hold").unlink()
    assert [a.wait() for n, a in enumerate(agents) if n != lost] == [0, 0], spare.err
    steps = made.steps()
    assert {s.attempt for s in steps} == {0}, spare.err
    assert {s.pid for s in steps if s.rank == 1 - gone} == {before[1 - gone].pid}
    again = [s.step for s in steps if s.host == spare.host.name]
    assert again[0] in (4, 8) and again == list(range(again[0], 20))
    losses: dict[tuple[int, int], set[str]] = {}
    for s in steps:
        losses.setdefault((s.rank, s.step), set()).add(s.loss)
    assert set(losses) == {(rank, step) for rank in (0, 1) for step in range(20)}
    assert all(len(of_step) == 1 for of_step in losses.values())  # done again, the same
    told = {"ranks": [gone], "holders": [holder.host.address]}
    assert spare.events("snapshots_fetched")[0]["data"] == told
    been = json.loads((made.folder / f"been-{gone}").read_text())
    assert [(r["origin"], r["holder"]) for r in been] == [("snapshot", holder.host.address)]
