"""examples/charlm: the same losses, however its workers were started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(
        os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="a quarter of a minute; on request"
    ),
]
pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "examples" / "charlm" / "train.py"


def test_warm_and_fresh_workers_have_the_same_losses(job, tmp_path) -> None:
    curves = []
    runs = {"warm": [], "fresh": ["--no-warm"]}
    for name, how in runs.items():
        size = ["--steps", "12", "--batch", "2", "--width", "16", "--save-every", "5"]
        out = tmp_path / name
        run = job.raw([*how, "--nproc-per-node", "2", str(SCRIPT), *size, "--out", str(out)])
        assert run.wait() == 0, run.err
        assert ("2 warm workers" in run.err) == (name == "warm"), run.err
        curves.append((out / "losses.jsonl").read_bytes())
    assert curves[0] == curves[1]
    assert curves[0].count(b"\n") == 12
