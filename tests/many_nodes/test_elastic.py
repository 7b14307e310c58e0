"""A session whose world shrinks when a node is lost, and grows when it is back: no worker starts
again, no sample is lost or had twice, and the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(400)]

slow = pytest.mark.skipif(
    os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: PHALANX_SLOW_TESTS=1 runs it"
)

ELASTIC = Path(__file__).parent / "elastic.py"
CONF = "--rdzv-conf last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
JOB = f"--rdzv-id job --shutdown-timeout 5 {CONF}"


def said(made: Any, word: str) -> list[list[str]]:
    lines = (made.folder / "said").read_text().splitlines()
    return [line.split()[1:] for line in lines if line.startswith(f"{word} ")]


def orders(samples: int, seed: int, epochs: int) -> list[list[int]]:
    import torch

    made = []
    for epoch in range(epochs):
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        made.append(torch.randperm(samples, generator=generator).tolist())
    return made


def check_samples(made: Any, until: int, shares: int | None = None) -> None:
    """Each step took the next samples of the epoch's order, dealt out to the ranks there were; or
    always to so many shares, which the ranks divide among them."""
    samples, batch = 997, 2
    worlds: dict[int, int] = {}
    ids: dict[tuple[int, int], list[list[int]]] = {}
    for step, rank, world, some in said(made, "ids"):
        worlds[int(step)] = int(world)
        ids[int(step), int(rank)] = json.loads(some)
    epochs = orders(samples, 3, 100)
    epoch = at = 0
    for step in range(until):
        world = worlds[step]
        dealt = shares or world
        rest = epochs[epoch][at:]
        each = -(-len(rest) // dealt)
        padded = rest + epochs[epoch][: each * dealt - len(rest)]
        size = min(batch, each)
        for rank in range(world):
            # a rank that was killed may not have come to tell
            if (step, rank) in ids:
                parts = [padded[one : dealt * size : dealt] for one in range(rank, dealt, world)]
                assert ids[step, rank] == parts, (step, rank)
        at += dealt * size
        if at >= samples:
            epoch, at = epoch + 1, 0


def losses(made: Any) -> dict[tuple[int, int], float]:
    return {(s.step, s.rank): float(s.loss) for s in made.steps()}


@pytest.mark.parametrize(
    ("mode", "who"),
    [
        ("step", "another"),
        pytest.param("step", "the coordinator's", marks=slow),
        pytest.param("batch", "another", marks=slow),
    ],
)
def test_a_node_is_lost_and_the_others_go_on_with_their_processes(
    cluster, monkeypatch, mode, who
) -> None:
    monkeypatch.setenv("TEST_ELASTIC", mode)
    made = cluster(3)
    agents = [made.start(n, f"--nnodes 2:3 {JOB}", ELASTIC) for n in range(3)]
    made.trains(3)
    made.until(lambda: len({s.rank for s in made.steps()}) == 3 and made.steps()[-1].step >= 10)
    before = {s.rank: s for s in made.steps() if s.world == 3}
    # of those that are not the coordinator's the lower, so that ranks change where they can
    gone = min(r for r, s in before.items() if (s.host == "host0") == (who != "another"))
    lost = next(n for n, s in enumerate(agents) if s.host.name == before[gone].host)
    at = time.monotonic()
    made.hosts[lost].kill()
    shrunk = made.trains(2, after=at)
    made.until(lambda: made.steps()[-1].step >= shrunk.step + 20)
    made.finish()
    survivors = [a for n, a in enumerate(agents) if n != lost]
    assert [a.wait() for a in survivors] == [0, 0]
    steps = made.steps()
    assert {s.attempt for s in steps} == {0}
    pids = {s.pid for rank, s in before.items() if rank != gone}
    assert {s.pid for s in steps if s.world == 2} == pids
    assert {s.rank for s in steps if s.world == 2} == {0, 1}
    for agent in survivors:
        assert "going on with 2 of 3 ranks" in agent.err
    first = min(s.step for s in steps if s.world == 2)
    assert sorted(said(made, "resized")) == [["3", "2", "0"], ["3", "2", "1"]]
    assert {s.world for s in steps if s.step < first} == {3}
    check_samples(made, max(s.step for s in steps), 3 if mode == "batch" else None)
    disturbed = losses(made)
    # the same program from that state, in a world of that size, that loses nobody
    (made.folder / "said").rename(made.folder / "said.disturbed")
    (made.folder / "enough").unlink()
    args = [str(made.folder / f"state-{first - 1}"), "15"]
    calm = made.start(0, "--nproc-per-node 2", ELASTIC, args)
    assert calm.wait() == 0, calm.err
    undisturbed = losses(made)
    assert set(undisturbed) == {
        (step, rank) for step in range(first, first + 15) for rank in (0, 1)
    }
    assert {key: disturbed[key] for key in undisturbed} == undisturbed
    if mode == "batch":  # but for the order of sums, that of three that nobody left
        (made.folder / "said").rename(made.folder / "said.calm")
        calm = made.start(0, "--nproc-per-node 3", ELASTIC, ["-", str(first + 15)])
        assert calm.wait() == 0, calm.err
        whole = losses(made)
        for step in range(first, first + 15):
            mean = sum(disturbed[step, rank] for rank in range(2)) / 2
            assert mean == pytest.approx(sum(whole[step, rank] for rank in range(3)) / 3, rel=1e-3)


@slow
def test_a_node_comes_back_and_the_others_keep_their_processes(cluster) -> None:
    made = cluster(3)
    agents = [made.start(n, f"--nnodes 2:3 {JOB}", ELASTIC) for n in range(3)]
    made.trains(3)
    made.until(lambda: len({s.rank for s in made.steps()}) == 3)
    before = {s.rank: s for s in made.steps() if s.world == 3}
    gone = max(rank for rank, s in before.items() if s.host != "host0")
    lost = next(n for n, s in enumerate(agents) if s.host.name == before[gone].host)
    at = time.monotonic()
    made.hosts[lost].kill()
    made.trains(2, after=at)
    at = time.monotonic()
    back = made.start(lost, f"--nnodes 2:3 {JOB}", ELASTIC)
    grown = made.trains(3, after=at)
    made.until(lambda: made.steps()[-1].step >= grown.step + 10)
    made.finish()
    stayed = [a for n, a in enumerate(agents) if n != lost]
    assert [a.wait() for a in (*stayed, back)] == [0, 0, 0]
    steps = made.steps()
    assert {s.attempt for s in steps} == {0}
    for rank, step in before.items():
        if rank != gone:
            assert {s.pid for s in steps if s.host == step.host} == {step.pid}
    for agent in stayed:
        assert "going on with 3 instead of 2 ranks" in agent.err
        (at_step,) = [e["data"] for e in agent.events("membership")][2:]
        assert at_step["world"] == 3
    # nobody did a step twice: all left after the same one
    first = min(s.step for s in steps if s.step > grown.step - 1 and s.world == 3)
    assert {s.rank for s in steps if s.step == first and s.world == 3} == {0, 1, 2}
    assert max(s.step for s in steps if s.world == 2) == first - 1
    told = said(made, "resized")
    assert [["2", "3", str(rank)] in told for rank in range(3)] == [True] * 3
    check_samples(made, max(s.step for s in steps))
