"""``phalanx.run``: as ``torch.distributed.run``, for code that imports it (and ``python -m``).

The options, spellings and defaults are those of torchrun 2.13, from the one table of
``phalanx.cli.options``; ``run`` starts the job through ``phalanx.launcher``, that is with
``LocalElasticAgent``. ``phalanx run`` is the command for people: it has more options, warm
workers and a report.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cli.options import OPTIONS, Option, UsageError, _flag
from phalanx.elastic.multiprocessing.errors import record
from phalanx.launcher.api import LaunchConfig, elastic_launch

logger = logging.getLogger(__name__)

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

TORCHRUN = frozenset(
    "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts"
    " monitor_interval start_method event_log_handler role module no_python run_path log_dir"
    " redirects tee local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters node_rank"
    " master_addr master_port local_addr logs_specs numa_binding signals_to_handle"
    " shutdown_timeout virtual_local_rank".split()
)
"""The attributes of torchrun's options; ``phalanx run`` has more."""

_DEFAULTS = {"max_restarts": 0}
"""Where torchrun's differ from those of ``phalanx run``."""


class _Flag(Action):
    """A switch that may be on by its variable too."""

    def __init__(self, dest: str, default: bool = False, **more: Any) -> None:
        super().__init__(dest=dest, nargs=0, const=True, default=default, **more)

    def __call__(self, parser: Any, namespace: Namespace, *_: Any) -> None:
        setattr(namespace, self.dest, True)


def get_args_parser() -> ArgumentParser:
    """torchrun's options; each may be given as ``PET_<NAME>``, read now.

    Raises ValueError for a switch whose variable is neither on nor off.
    """
    parser = ArgumentParser(prog="python -m phalanx.run", allow_abbrev=False)
    for option in OPTIONS:
        if option.dest in TORCHRUN:
            _add(parser, option)
    parser.add_argument("training_script", type=str, help="the script, module or command")
    parser.add_argument("training_script_args", nargs=REMAINDER, help="its own arguments")
    return parser


def _add(parser: ArgumentParser, option: Option) -> None:
    names = list(option.names)
    names += [f"--{n[2:].replace('-', '_')}" for n in names if "-" in n[2:]]
    text = os.environ.get(option.variable) if option.variable else None
    what = option.help.replace("%", "%%")
    if option.take is None:
        on = text is not None and _flag(text, option.variable)
        parser.add_argument(*names, action=_Flag, default=on, help=what)
        return
    default = _DEFAULTS.get(option.dest, option.default) if text is None else text
    parser.add_argument(
        *names,
        type=option.take,
        default=default,
        metavar=option.metavar or None,
        choices=option.choices or None,
        help=what,
    )


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line (default: this process's). A wrong one ends in SystemExit(2)."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """``"2"`` -> (2, 2), ``"1:4"`` -> (1, 4). Raises RuntimeError, ValueError for no number."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of workers that ``--nproc-per-node`` means: a number, auto, cpu, gpu, npu.

    Raises ValueError for anything else and for a device that is not there.
    """
    from phalanx.cli.run import worker_count

    try:
        return int(nproc_per_node)
    except ValueError:
        pass
    try:
        return worker_count(nproc_per_node)
    except UsageError as error:
        raise ValueError(str(error)) from None


def config_from_args(
    args: Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What to launch: the configuration, the command or function, its arguments.

    Sets ``OMP_NUM_THREADS`` where several workers share a machine and nobody chose it.
    Raises AssertionError, ValueError and RuntimeError for values that make no sense.
    """
    from phalanx.agent.streams import specs_class
    from phalanx.cli.run import interpreter, threads
    from phalanx.elastic.multiprocessing import Std
    from phalanx.elastic.rendezvous.utils import _parse_rendezvous_config

    low, high = parse_min_max_nnodes(args.nnodes)
    if not 0 < low <= high:
        raise AssertionError(f"--nnodes needs 0 < MIN <= MAX, not {args.nnodes}")
    if args.max_restarts < 0:
        raise AssertionError(f"--max-restarts is zero or more, not {args.max_restarts}")
    nproc = determine_local_world_size(args.nproc_per_node)
    os.environ.update(threads(nproc, os.environ) if nproc > 1 else {})
    rdzv_configs = dict(_parse_rendezvous_config(args.rdzv_conf))
    endpoint = args.rdzv_endpoint
    if args.rdzv_backend == "static":
        rdzv_configs["rank"] = args.node_rank
        endpoint = endpoint or f"{args.master_addr}:{args.master_port}"
    try:
        ranks = {int(rank) for rank in args.local_ranks_filter.split(",") if rank.strip()} or None
    except ValueError:
        raise ValueError(
            f"--local-ranks-filter is numbers with commas, not {args.local_ranks_filter!r}"
        ) from None
    numa = None
    if args.numa_binding is not None:
        from phalanx.process.numa import AffinityMode, NumaOptions

        numa = NumaOptions(AffinityMode(args.numa_binding))
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=nproc,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=endpoint,
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=rdzv_configs,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        local_addr=args.local_addr,
        logs_specs=specs_class(args.logs_specs)(
            log_dir=args.log_dir,
            redirects=Std.from_str(args.redirects),
            tee=Std.from_str(args.tee),
            local_ranks_filter=ranks,
        ),
        event_log_handler=args.event_log_handler,
        numa_options=numa,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
    )
    command: Callable[..., Any] | str
    words: list[str] = []
    if args.run_path:
        command, words = run_script_path, [args.training_script]
    elif args.no_python:
        if args.module:
            raise ValueError("--module and --no-python exclude each other")
        command = args.training_script
    else:
        command = interpreter(os.environ)
        words = ["-u", *(["-m"] if args.module else []), args.training_script]
    if not getattr(args, "use_env", True):  # torch.distributed.launch
        words.append("--local-rank=${local_rank}")
    return config, command, [*words, *args.training_script_args]


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script as ``__main__`` in this interpreter."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: Namespace) -> None:
    """Run the job. Raises what `phalanx.launcher.api.launch_agent` and `config_from_args` raise."""
    alone = (
        args.rdzv_backend == "static"
        and not args.rdzv_endpoint
        and args.master_port is None
        and parse_min_max_nnodes(args.nnodes)[1] == 1
    )
    if args.standalone or alone:
        import uuid

        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    config, command, words = config_from_args(args)
    elastic_launch(config=config, entrypoint=command)(*words)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line (default: this process's) and run the job."""
    run(parse_args(args))


def _command() -> int:
    """``python -m phalanx.run``: the exit status of docs/exit-codes.md."""
    from phalanx.agent import exit_codes
    from phalanx.elastic.multiprocessing import SignalException
    from phalanx.elastic.multiprocessing.errors import ChildFailedError

    try:
        main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return exit_codes.of_returncode(failure.exitcode) or 1
    except SignalException as error:
        number = int(error.sigval)
        print(f"phalanx.run: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + number
    except UsageError as error:
        print(f"phalanx.run: {error}", file=sys.stderr)
        return exit_codes.USAGE
    return exit_codes.OK


if __name__ == "__main__":
    raise SystemExit(_command())
