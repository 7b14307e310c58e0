"""A torchrun whose program has a Phalanx session: run by Phalanx's own agent.

Such workers can be told to leave a step and to come together again, which torch's agent has no
channel for. Everything else stays with torch's agent and the loop of :mod:`mindx_elastic._hooks`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mindx_elastic import api
from mindx_elastic._decide import reset_path


def words(config: Any, entrypoint: Any, args: Sequence[str]) -> list[str] | None:
    """The command line of ``phalanx run`` that does what torch's LaunchConfig asks for.

    None: it asks for something that only torch's agent does (several nodes, functions, logs of
    another kind), or something needs the loop beside it (reset.json, a device check).
    """
    if not isinstance(entrypoint, str) or config.max_nodes != 1:
        return None
    if api.device_check is not None or os.path.exists(reset_path()):
        return None
    logs = _logs(config.logs_specs)
    program = _program(entrypoint, list(args))
    numa = getattr(config, "numa_options", None)
    if logs is None or program is None:
        return None
    if numa is not None and numa.should_fall_back_if_binding_fails:
        return None  # ours refuses to start what it cannot bind
    made = [
        "--nproc-per-node", str(config.nproc_per_node),
        "--max-restarts", str(config.max_restarts),
        "--monitor-interval", str(config.monitor_interval),
        "--role", config.role,
        "--rdzv-id", config.run_id or "none",
        *logs,
    ]  # fmt: skip
    host, _, port = (config.rdzv_endpoint or "").rpartition(":")
    if config.rdzv_backend == "static" and host and port.isdigit():
        made += ["--master-addr", host.strip("[]"), "--master-port", port]
    if config.local_addr:
        made += ["--local-addr", config.local_addr]
    if config.log_line_prefix_template:
        made += ["--log-line-prefix-template", config.log_line_prefix_template]
    if getattr(config, "signals_to_handle", ""):
        made += ["--signals-to-handle", config.signals_to_handle]
    if getattr(config, "virtual_local_rank", False):
        made.append("--virtual-local-rank")
    if getattr(config, "shutdown_timeout", None) is not None:
        made += ["--shutdown-timeout", str(config.shutdown_timeout)]
    if getattr(config, "event_log_handler", "null") != "null":
        made += ["--event-log-handler", config.event_log_handler]
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if texts := [text.replace(",", ",,") for text in getattr(config, name, None) or ()]:
            made += [f"--{name.replace('_', '-')}", ",".join(texts)]
    if numa is not None:
        made += ["--numa-binding", str(numa.affinity_mode.value)]
    return made + program


def _program(entrypoint: str, args: list[str]) -> list[str] | None:
    from phalanx.cli.run import interpreter

    if entrypoint != interpreter(os.environ):
        return None  # no Python program: it has no session
    if args[:1] == ["-u"]:
        args = args[1:]
    if args[:1] == ["-m"]:
        return ["--module", "--", *args[1:]] if len(args) > 1 else None
    return ["--", *args] if args and not args[0].startswith("-") else None


def _logs(specs: Any) -> list[str] | None:
    """The options for what torch's logs specs say; None: they are somebody's own."""
    if specs is None:
        return []
    if type(specs).__name__ != "DefaultLogsSpecs":
        return None
    made = ["--redirects", _mask(specs._redirects), "--tee", _mask(specs._tee)]
    if specs._local_ranks_filter:
        made += ["--local-ranks-filter", ",".join(map(str, specs._local_ranks_filter))]
    folder = str(specs._root_log_dir)
    return made if folder == os.devnull else [*made, "--log-dir", folder]


def _mask(std: Any) -> str:
    if isinstance(std, Mapping):
        return ",".join(f"{rank}:{int(value.value)}" for rank, value in std.items()) or "0"
    return str(int(std.value))


def job_config(line: Sequence[str], controller: Sequence[str], task: str, timeout: float) -> Any:
    """The job for this command line, asking this controller; None: it has no session."""
    from phalanx.agent.config import Controller
    from phalanx.cli.options import parse
    from phalanx.cli.run import config_from
    from phalanx.process.scan import scan

    config = config_from(parse(line, {}))
    if not any(name.startswith("phalanx.training") for name in scan(config.program).dotted):
        return None
    root = ""
    if os.environ.get("ELASTIC_GRPC_SECURE_CONNECT") == "on":
        root = os.environ.get("ELASTIC_GRPC_SECURE_CERTIFICATES_PATH", "")
    asked = Controller(
        tuple(controller),
        timeout,
        root,
        token=os.environ.get("PHALANX_CONTROLLER_TOKEN", ""),
        job=task,
    )
    return dataclasses.replace(config, controller=asked)


def run(config: Any) -> dict[int, Any]:
    """Run it. Raises SystemExit with the status of ``phalanx run`` when it failed."""
    from phalanx.agent import run_job

    status = run_job(config)
    if status:
        raise SystemExit(status)
    return dict.fromkeys(range(config.nproc))
