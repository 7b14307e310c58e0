"""``torch.distributed.run`` as a module, and ``phalanx.run`` (T135 to T138, T144)."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import Any

from cases_cli import OPTIONS
from harness import Impl, case, env, folder, outcome, plain, raised

NAMES = (
    "get_args_parser parse_args parse_min_max_nnodes determine_local_world_size config_from_args"
    " run_script_path run main"
).split()

LINES = (
    "script.py",
    "script.py a -b --c --nnodes 3",
    "--nproc-per-node 4 --max-restarts=2 script.py",
    "--nproc_per_node=4 --max_restarts 2 script.py",
    "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id x --rdzv-conf a=1 s.py",
    "--node-rank 1 --nnodes 2 --master-addr h --master-port 7 --local-addr l s.py",
    "-m pkg.mod x",
    "--no-python bash -c true",
    "-r 3 -t 0:1,1:2 --local-ranks-filter 0,2 s.py",
    "--role r --start-method fork --monitor-interval 0.5 --signals-to-handle SIGTERM s.py",
    "--shutdown-timeout 5 --virtual-local-rank --event-log-handler console s.py",
    "--duplicate-stdout-filters a,b s.py",
    "--run-path s.py 1 2",
    # wrong ones
    "",
    "--nonsense s.py",
    "--max-restarts x s.py",
    "--max-restarts -1 s.py",
    "--nnodes 2:1 s.py",
    "--nnodes 1:2:3 s.py",
    "--nproc-per-node many s.py",
    "-m --no-python s.py",
    "--local-ranks-filter a s.py",
    "-t 7 s.py",
)


def words(line: str) -> list[str]:
    return line.split()


@contextlib.contextmanager
def bare(**variables: str) -> Any:
    clean: dict[str, str | None] = {n: None for n in os.environ if n.startswith("PET_")}
    hush = contextlib.redirect_stderr(io.StringIO())
    with env(**{**clean, "OMP_NUM_THREADS": "1", **variables}), hush:
        yield


@case("T136.module_names")
def names(impl: Impl) -> Any:
    """What the module offers, and every spelling its parser takes."""
    module = impl.mod("run_module")
    parser = module.get_args_parser()
    return {
        "names": {name: callable(getattr(module, name, None)) for name in NAMES},
        "spellings": sorted(s for a in parser._actions for s in a.option_strings),
    }


@case("T136.module_parse")
def parse(impl: Impl) -> Any:
    """Command lines to attributes."""
    module = impl.mod("run_module")

    def values(line: str) -> Any:
        found = module.parse_args(words(line))
        return {name: plain(getattr(found, name, "<none>")) for name in OPTIONS}

    with bare():
        seen = {line: outcome(lambda line=line: values(line)) for line in LINES}
    with bare(PET_NPROC_PER_NODE="3", PET_MODULE="1", PET_RDZV_ID="y"):
        seen["variables"] = outcome(lambda: values("--rdzv-id z s.py"))
    return seen


@case("T136.module_config")
def config(impl: Impl) -> Any:
    """Attributes to a configuration, a command and its arguments."""
    module = impl.mod("run_module")
    fields = (
        "min_nodes max_nodes nproc_per_node run_id role rdzv_endpoint rdzv_backend rdzv_configs"
        " max_restarts monitor_interval start_method local_addr event_log_handler"
        " signals_to_handle duplicate_stdout_filters virtual_local_rank shutdown_timeout"
    ).split()

    def made(line: str) -> Any:
        found, command, arguments = module.config_from_args(module.parse_args(words(line)))
        shown = {name: plain(getattr(found, name)) for name in fields}
        command = "<python>" if command == sys.executable else plain(command)
        return {**shown, "command": command, "arguments": arguments}

    with bare():
        return {line: outcome(lambda line=line: made(line)) for line in LINES}


@case("T135.module_numbers")
def numbers(impl: Impl) -> Any:
    """``--nnodes`` and ``--nproc-per-node``."""
    module = impl.mod("run_module")
    size = module.determine_local_world_size
    return {
        "nodes": {t: outcome(lambda t=t: module.parse_min_max_nnodes(t)) for t in ("1", "2:20")},
        "no nodes": {t: raised(lambda t=t: module.parse_min_max_nnodes(t)) for t in ("1:2:3", "x")},
        "numbers": {t: outcome(lambda t=t: size(t)) for t in ("1", "4")},
        "words": {t: size(t) >= 1 for t in ("auto", "cpu")},
        "not here": {t: raised(lambda t=t: size(t)) for t in ("gpu", "many")},
    }


SCRIPT = """
import os, sys
with open(os.environ["OUT"] + "/" + os.environ["RANK"], "w") as file:
    file.write(" ".join([os.environ["WORLD_SIZE"], __name__, *sys.argv[1:]]))
if "fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(7)
"""


@case("T138.module_runs", timeout=180)
def runs(impl: Impl) -> Any:
    """``main`` from code, and as ``python -m``."""
    seen = {}
    with folder() as place:
        script = place / "s.py"
        script.write_text(SCRIPT)
        code = f"import sys; from {impl.module_name('run_module')} import main; main(sys.argv[1:])"
        for label, start, line in (
            ("code", ["-c", code], "--standalone --nproc-per-node 2 S a --log=x"),
            ("run path", ["-c", code], "--run-path --nproc-per-node 2 S b"),
            ("fails", ["-c", code], "--nproc-per-node 2 S fail"),
            ("module", ["-m", impl.module_name("run_module")], "--nproc-per-node 2 S c"),
            ("module fails", ["-m", impl.module_name("run_module")], "--nproc-per-node 2 S fail"),
        ):
            out = place / label.replace(" ", "_")
            out.mkdir()
            done = subprocess.run(
                [sys.executable, *start, *line.replace("S", str(script)).split()],
                env={**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            said = {p.name: p.read_text() for p in sorted(out.iterdir())}
            if "fails" in label:
                said.pop("0", None)  # it may have been stopped first
            seen[label] = {
                "status": done.returncode,
                "said": said,
                "names the failure": "FAILED" in done.stderr and "exitcode  : 7" in done.stderr,
            }
    return seen
