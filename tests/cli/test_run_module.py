"""``phalanx.run``, the twin of ``torch.distributed.run`` (beside it: ``make conformance``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx import run
from phalanx.cli.options import OPTIONS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for option in OPTIONS:
        if option.variable:
            monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_what_follows_the_script_is_its_own() -> None:
    args = run.parse_args(
        ["--nproc_per_node=2", "s.py", "--log=x", "--r=16", "-m", "--nnodes", "2"]
    )
    assert args.nproc_per_node == "2" and args.nnodes == "1:1" and not args.module
    assert args.training_script_args == ["--log=x", "--r=16", "-m", "--nnodes", "2"]


def test_variables_and_torchruns_defaults(monkeypatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:3")
    monkeypatch.setenv("PET_MODULE", "1")
    args = run.parse_args(["pkg.mod"])
    assert (args.nnodes, args.module, args.max_restarts) == ("2:3", True, 0)
    config, command, words = run.config_from_args(run.parse_args(["--nnodes", "1", "pkg.mod", "a"]))
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (1, 1, 0)
    assert (command, words) == (sys.executable, ["-u", "-m", "pkg.mod", "a"])
    monkeypatch.setenv("PET_MODULE", "perhaps")
    with pytest.raises(ValueError, match="PET_MODULE"):
        run.get_args_parser()


def test_numbers() -> None:
    assert run.parse_min_max_nnodes("2:20") == (2, 20)
    with pytest.raises(RuntimeError, match="MIN:MAX"):
        run.parse_min_max_nnodes("1:2:3")
    assert run.determine_local_world_size("cpu") >= 1
    with pytest.raises(ValueError, match="nproc-per-node"):
        run.determine_local_world_size("many")


@pytest.mark.process
def test_the_command_exits_as_its_first_failing_worker(tmp_path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    command = [sys.executable, "-m", "phalanx.run", "--run-path", str(script)]
    for status in ("0", "7"):
        done = subprocess.run([*command, status], capture_output=True, text=True, timeout=60)
        assert done.returncode == int(status), done.stderr
    assert "exitcode  : 7" in done.stderr and "Traceback" not in done.stderr
