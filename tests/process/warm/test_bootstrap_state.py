"""A warm program sees what a fresh one sees."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from phalanx.process.preload import PreloadPlan

pytestmark = pytest.mark.process

PROBE = Path(__file__).with_name("probe.py")
TORCH = PreloadPlan(("torch", "numpy"), optimizer_step=True)


@pytest.fixture
def probe(run_both, tmp_path):
    """Both views of one program, without what is only the test's own."""

    def look(words, *modules, **options):
        views = []
        for kind in ("fresh", "warm"):
            file = tmp_path / "seen.json"
            outcome = run_both([*words, str(file), *modules], only=kind, **options)
            outcome = outcome[kind == "warm"]
            assert outcome.status == 0, outcome.err
            views.append(json.loads(re.sub(rf"\.{kind}\d+", ".kind", file.read_text())))
            file.unlink()
        return views

    return look


def differences(fresh, warm):
    found = {k: (fresh[k], warm[k]) for k in fresh if fresh[k] != warm[k]}
    print(json.dumps(found, indent=1))
    return found


def test_script(probe):
    assert differences(*probe([str(PROBE)])) == {}


def test_module(probe, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE.read_text())
    assert differences(*probe(["-m", "probe"])) == {}


def test_environment_and_folder_are_the_programs(probe, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "temporary").mkdir()
    fresh, warm = probe(
        [str(PROBE)],
        env={
            "RANK": "3",
            "EMPTY": "",
            "ODD": "a=b\u00e9\udcff",
            "TMPDIR": str(tmp_path / "temporary"),
        },
        cwd=tmp_path / "elsewhere",
    )
    assert differences(fresh, warm) == {}
    assert ["RANK", "3"] in warm["environ"]


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "stdio",
    [
        ("/dev/null", "out", "err"),
        (None, "out", "err"),
        ("/dev/null", None, "err"),
        ("/dev/null", "out", None),
        ("/dev/null", "/dev/null", "/dev/null"),
    ],
    ids=["files", "no stdin", "no stdout", "no stderr", "null"],
)
def test_streams(probe, stdio, flags):
    fresh, warm = probe([str(PROBE)], stdio=stdio, flags=flags)
    assert differences(fresh, warm) == {}


def test_terminal(probe):
    controller, terminal = os.openpty()
    try:
        name = os.ttyname(terminal)
        fresh, warm = probe([str(PROBE)], stdio=(name, name, name))
        assert differences(fresh, warm) == {}
        assert warm["stdout"]["tty"]
    finally:
        os.close(controller)
        os.close(terminal)


@pytest.mark.torch
def test_with_torch_preloaded(probe):
    fresh, warm = probe([str(PROBE)], "torch", "torch._dynamo", "numpy", plan=TORCH)
    found = differences(fresh, warm)
    # OpenBLAS starts its threads when numpy is imported; after a fork, when it needs them.
    found.pop("children", None)
    if "threads" in found:
        assert found.pop("threads")[1][-1] == "1"
    assert found == {}


@pytest.mark.torch
def test_generators_differ_from_worker_to_worker(run_both, tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, numpy, torch\n"
        "print(numpy.random.rand(), torch.rand(1).item(), random.random(), torch.initial_seed())\n"
    )
    draws = [run_both([str(script)], plan=TORCH, only="warm")[1].out.split() for _ in range(2)]
    assert all(len(set(pair)) == 2 for pair in zip(*draws, strict=True)), draws
