"""``phalanx run``: the words of the command line to a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from phalanx.cli import show
from phalanx.cli.nodes import endpoint_from, nodes_from
from phalanx.cli.options import RunArguments, UsageError, help_text, parse, wants_help
from phalanx.process.program import Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.config import Controller, JobConfig

USAGE_STATUS = 2

MOST_STANDBYS = 64
"""Each takes as much memory as a rank."""


def main(argv: Sequence[str]) -> int:
    """Run a job; the exit status is that of docs/exit-codes.md."""
    asked = wants_help(argv)
    if asked:
        return show(help_text(asked == "--help-all"))
    try:
        config = config_from(parse(argv))
    except UsageError as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return USAGE_STATUS
    from phalanx.agent import run_job

    is_python = config.program.script or config.program.module
    if is_python and (doubt := other_environment(config.python[0], os.environ)):
        print(f"phalanx: {doubt}", file=sys.stderr)
    return run_job(config)


def other_environment(python: str, env: Mapping[str, str]) -> str | None:
    """What to say when workers will not run in the virtual environment that is active."""
    active = env.get("VIRTUAL_ENV")
    if not active or not os.path.isdir(active) or not python:
        return None
    home = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    if os.path.realpath(home) == os.path.realpath(active):
        return None
    return (
        f"workers run with {python}, which does not belong to the active environment {active}; "
        f"for that one: PYTHON_EXEC={active}/bin/python"
    )


def config_from(arguments: RunArguments, environ: Mapping[str, str] | None = None) -> JobConfig:
    """Values from words.

    Raises:
        UsageError: what the words ask for is not possible.
    """
    from phalanx.agent.config import JobConfig

    env = os.environ if environ is None else environ
    a = arguments
    nodes = nodes_from(a)
    if nodes is not None and (a.no_retry_exit_codes or a.retry_exit_codes):
        raise UsageError("--no-retry-exit-codes and --retry-exit-codes are for one node so far")
    if nodes is not None and a.controller:
        raise UsageError(
            "--controller is for one node so far; with several the coordinator decides alone"
        )
    nproc = worker_count(a.nproc_per_node)
    if a.max_restarts < 0:
        raise UsageError("--max-restarts is zero or more")
    if not 0 <= a.standby <= MOST_STANDBYS:
        raise UsageError(f"--standby is 0 to {MOST_STANDBYS}, not {a.standby}")
    if not 0 < a.monitor_interval < float("inf"):
        raise UsageError(f"--monitor-interval is more than zero seconds, not {a.monitor_interval}")
    grace = a.shutdown_timeout
    if grace is None:
        text = env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        if not text.strip().isdigit():
            raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is whole seconds, not {text!r}")
        grace = int(text)
    if grace < 0:
        raise UsageError("--shutdown-timeout must be non-negative")
    if a.module and a.no_python:
        raise UsageError("--module and --no-python exclude each other")
    host, port = a.master_addr, a.master_port or 0
    if a.rdzv_endpoint and a.rdzv_backend == "static" and not a.standalone:
        host, port = endpoint_from(a.rdzv_endpoint, port)
    if not 0 <= port <= 65535:
        raise UsageError(f"--master-port is a port, 0 to 65535, not {port}")
    for name in (a.redirects, a.tee):
        _check_streams(name)
    try:
        ranks = frozenset(int(r) for r in a.local_ranks_filter.split(",") if r.strip())
    except ValueError:
        raise UsageError(
            f"--local-ranks-filter is numbers with commas, not {a.local_ranks_filter!r}"
        ) from None
    from phalanx.agent.hangs import limits_from

    try:
        hang_limits = limits_from(a.hang_timeout)
    except ValueError as error:
        raise UsageError(f"--hang-timeout: {error}") from None
    return JobConfig(
        program=program_of(a, env),
        nproc=nproc,
        run_id=a.rdzv_id
        if a.rdzv_id not in ("", "none") or "rdzv_id" in a.given or nodes
        else _run_id(),
        role=a.role,
        max_restarts=a.max_restarts,
        never_retried=a.no_retry_exit_codes,
        always_retried=a.retry_exit_codes,
        monitor_interval=a.monitor_interval,
        start_timeout=a.start_timeout,
        shutdown_timeout=grace,
        signals=a.signals_to_handle,
        warm=not a.no_warm and not is_wrapper(interpreter(env)),
        preload=tuple(a.preload),
        python=(interpreter(env), "-u"),
        log_dir=a.log_dir,
        redirects=a.redirects,
        tee=a.tee,
        local_ranks_filter=ranks,
        stdout_filters=tuple(a.duplicate_stdout_filters),
        stderr_filters=tuple(a.duplicate_stderr_filters),
        logs_specs=a.logs_specs,
        prefix_template=a.log_line_prefix_template,
        events=a.events,
        health_host=a.health_check_host,
        health_port=a.health_check_port,
        event_log_handler=a.event_log_handler,
        virtual_local_rank=a.virtual_local_rank,
        numa_binding=a.numa_binding,
        master_addr=host,
        master_port=port,
        local_addr=a.local_addr,
        hang_limits=hang_limits,
        standby=a.standby,
        controller=_controller(a, env),
        node_check=a.node_check or None,
        node_check_timeout=a.node_check_timeout,
        nodes=nodes,
        environment=threads(nproc, env),
    )


def _controller(a: RunArguments, env: Mapping[str, str]) -> Controller | None:
    """Who is asked, if anybody is."""
    from importlib.util import find_spec

    from phalanx.agent.config import Controller

    more = [n for n in ("controller_ca", "controller_cert", "controller_key") if getattr(a, n)]
    if not a.controller:
        if more:
            raise UsageError(f"--{more[0].replace('_', '-')} needs --controller HOST:PORT")
        return None
    addresses = tuple(part.strip() for part in a.controller.split(",") if part.strip())
    if not addresses:
        raise UsageError(f"--controller is HOST:PORT, not {a.controller!r}")
    if not 0 < a.controller_timeout <= 3600:
        raise UsageError(
            f"--controller-timeout is up to 3600 seconds and not 0, not {a.controller_timeout:g}"
        )
    if bool(a.controller_cert) != bool(a.controller_key):
        raise UsageError("--controller-cert and --controller-key go together")
    for name in more:
        if not os.access(getattr(a, name), os.R_OK):
            raise UsageError(f"--{name.replace('_', '-')}: cannot read {getattr(a, name)}")
    if any(find_spec(name) is None for name in ("grpc", "google")):
        raise UsageError("--controller needs two more packages: pip install grpcio protobuf")
    return Controller(
        addresses,
        a.controller_timeout,
        a.controller_ca,
        a.controller_cert,
        a.controller_key,
        env.get("PHALANX_CONTROLLER_TOKEN", ""),
    )


def _run_id() -> str:
    return os.urandom(4).hex()


def interpreter(env: Mapping[str, str]) -> str:
    """The Python that runs the workers: ``PYTHON_EXEC``, else the one that runs us."""
    return env.get("PYTHON_EXEC") or sys.executable


def is_wrapper(python: str) -> bool:
    """Whether the interpreter is a script around one: what it sets up, a fork would not have."""
    try:
        with open(python, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def program_of(a: RunArguments, env: Mapping[str, str]) -> Program:
    """What the workers run."""
    script, args = a.training_script, tuple(a.training_script_args)
    if a.no_python:
        return Program((script, *args))
    python = (interpreter(env), "-u")
    if a.module:
        return Program((*python, "-m", script, *args), module=script, args=args)
    return Program((*python, script, *args), script=script, args=args)


def _check_streams(text: str) -> None:
    for part in str(text).split(","):
        rank, colon, mask = part.rpartition(":")
        if mask not in ("0", "1", "2", "3") or (colon and not rank.isdigit()):
            raise UsageError(
                f"-r and -t take 0, 1, 2 or 3, or RANK:N,RANK:N,... ; {text!r} is neither"
            )


def cpu_count() -> int:
    """Processors this process may use: affinity, and the cgroup's quota rounded up."""
    count = len(os.sched_getaffinity(0))
    for path, form in (
        ("/sys/fs/cgroup/cpu.max", 2),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", 1),
    ):
        try:
            with open(path) as file:
                words = file.read().split()
            if form == 1:
                with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
                    words += file.read().split()
            if words[0] not in ("max", "-1"):
                count = min(count, max(1, -(-int(words[0]) // int(words[1]))))
            break
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue
    return max(1, count)


def device_count(kind: str) -> int:
    """Devices of this machine by their device files; visible ones only."""
    prefix, variable = {
        "gpu": ("nvidia", "CUDA_VISIBLE_DEVICES"),
        "npu": ("davinci", "ASCEND_RT_VISIBLE_DEVICES"),
    }[kind]
    try:
        names = os.listdir("/dev")
    except OSError:
        return 0
    found = sum(n.startswith(prefix) and n[len(prefix) :].isdigit() for n in names)
    visible = os.environ.get(variable)
    if visible is not None:
        return min(found, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
    return found


def worker_count(text: str) -> int:
    """The number that ``--nproc-per-node`` means.

    Raises:
        UsageError: no number and no known word, no such device, or less than one.
    """
    if text == "auto":
        return device_count("gpu") or device_count("npu") or cpu_count()
    if text == "cpu":
        return cpu_count()
    if text in ("gpu", "npu"):
        count = device_count(text)
        if not count:
            raise UsageError(f"--nproc-per-node {text}: there is no {text} on this machine")
        return count
    try:
        count = int(text)
    except ValueError:
        raise UsageError(
            f"--nproc-per-node is a number, auto, cpu, gpu or npu, not {text!r}"
        ) from None
    if count < 1:
        raise UsageError(f"--nproc-per-node is one or more, not {count}")
    return count


def threads(nproc: int, env: Mapping[str, str]) -> dict[str, str]:
    """``OMP_NUM_THREADS`` for the workers when nobody chose it: processors per worker."""
    if nproc == 1 or "OMP_NUM_THREADS" in env:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cpu_count() // nproc))}
