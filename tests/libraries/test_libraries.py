"""The callbacks for Lightning and Hugging Face, with the real libraries, under ``phalanx run``.

    make test-libraries

The libraries are not needed by Phalanx, so the main suite skips these tests.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIBRARIES = {"lightning": "lightning", "huggingface": "transformers", "accelerate": "accelerate"}

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]


def program(name: str) -> str:
    library = LIBRARIES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-libraries installs it and runs this")
    return str(HERE / f"programs_{name}.py")


def environment(folder: Path, fault: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PHALANX_", "TORCHELASTIC_"))}
    env |= {"TEST_OUT": str(folder), "FAULT": fault, "OMP_NUM_THREADS": "1"}
    return env | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def start(name: str, folder: Path, *words: str, fault: str = "") -> subprocess.Popen[str]:
    env = environment(folder, fault)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", *words]
    command += ["--log-dir", str(folder / "logs"), program(name)]
    out = (folder / "out").open("a")
    return subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out, text=True)


def run(name: str, folder: Path, *words: str, fault: str = "") -> str:
    """To its end; what it wrote."""
    process = start(name, folder, *words, fault=fault)
    try:
        status = process.wait(200)
    finally:
        process.kill()
    text = (folder / "out").read_text()
    assert status == 0, text
    return text


def terminated(process: subprocess.Popen[str], folder: Path) -> int:
    """Its status after a SIGTERM that it gets when it has ``reached`` its fault."""
    try:
        end = time.monotonic() + 120
        while not (folder / "reached").exists():
            assert process.poll() is None and time.monotonic() < end, (folder / "out").read_text()
            select.select([], [], [], 0.02)
        process.send_signal(signal.SIGTERM)
        return process.wait(60)
    finally:
        process.kill()
        process.wait()


def ends(folder: Path) -> list[str]:
    return [(folder / f"end-{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module", params=["lightning", "huggingface"])
def library(request: pytest.FixtureRequest) -> str:
    program(request.param)
    return request.param


@pytest.fixture(scope="module")
def calm(library: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Final weights of a run without a fault."""
    folder = tmp_path_factory.mktemp(f"calm-{library}")
    text = run(library, folder)
    assert "phalanx: Trainer under an agent" in text
    assert "SIGTERM: a checkpoint" in text
    found = ends(folder)
    assert found[0] == found[1]
    return found


def test_a_killed_rank_costs_a_warm_restart_from_the_newest_checkpoint(
    library: str, calm: list[str], tmp_path: Path
) -> None:
    text = run(library, tmp_path, fault="kill:1:8")
    assert (tmp_path / "fault-happened").exists()
    assert "restarting all 2 workers" in text
    assert ends(tmp_path) == calm


def test_a_stopped_rank_is_found_by_its_silence(
    library: str, calm: list[str], tmp_path: Path
) -> None:
    text = run(library, tmp_path, "--hang-timeout", "step=4", fault="stop:0:8")
    assert "hung: " in text
    assert ends(tmp_path) == calm


def test_a_notice_stops_all_after_the_same_step_with_a_checkpoint_and_the_next_run_goes_on(
    library: str, calm: list[str], tmp_path: Path
) -> None:
    process = start(library, tmp_path, fault="notice:1:8")  # rank 1 waits for the signal
    assert terminated(process, tmp_path) == 128 + signal.SIGTERM
    text = (tmp_path / "out").read_text()
    assert text.count("stopped at 9") == 2, text
    assert not (tmp_path / "end-0").exists()
    run(library, tmp_path)
    assert ends(tmp_path) == calm


def test_a_notice_while_lightning_gathers_gradients_loses_none(tmp_path, monkeypatch) -> None:
    program("lightning")
    monkeypatch.setenv("ACCUMULATE", "5")  # of 12 batches: steps after 5, 10 and 12
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    calm.mkdir()
    hit.mkdir()
    run("lightning", calm)
    process = start("lightning", hit, fault="notice:1:1")  # in the first batch of its second step
    assert terminated(process, hit) == 128 + signal.SIGTERM
    assert (hit / "out").read_text().count("stopped at 2") == 2
    run("lightning", hit)
    assert ends(hit) == ends(calm)


def test_after_an_exception_in_a_trainer_sigterm_is_itself_again(tmp_path: Path) -> None:
    script = program("huggingface")
    with (tmp_path / "out").open("a") as out:
        env = environment(tmp_path, "raise:0:3")
        process = subprocess.Popen([sys.executable, script], env=env, stdout=out, stderr=out)
    assert terminated(process, tmp_path) == -signal.SIGTERM, (tmp_path / "out").read_text()


def test_a_loop_with_accelerate_goes_on_in_place(tmp_path: Path) -> None:
    program("accelerate")
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    calm.mkdir()
    hit.mkdir()
    run("accelerate", calm)
    text = run("accelerate", hit, fault="kill:1:8")
    assert "rank 1 replaced, training again" in text, text
    assert "restarting all" not in text
    assert ends(hit) == ends(calm)
