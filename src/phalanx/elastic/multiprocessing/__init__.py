"""Starts copies of a program or a function as workers, and tells how they ended.

The names of ``torch.distributed.elastic.multiprocessing``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.elastic.multiprocessing.api import (
    PContext,
    RunProcsResult,
    SignalException,
    _validate_full_rank,
)
from phalanx.elastic.multiprocessing.errors import ProcessFailure
from phalanx.elastic.multiprocessing.logs_specs import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    Std,
    to_map,
)

if TYPE_CHECKING:
    from phalanx.elastic.multiprocessing.multiprocess_context import MultiprocessContext
    from phalanx.elastic.multiprocessing.subprocess_context import SubprocessContext

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    **ours: Any,
) -> PContext:
    """Start one worker for each key of ``args`` and ``envs``, which are 0 to n-1.

    ``entrypoint`` is a command (its arguments become text) or a function, which runs in a
    process made by ``start_method`` (spawn, fork, forkserver) and whose value is returned.
    ``name`` stands before lines of output unless ``log_line_prefixes`` say otherwise;
    ``logs_specs`` says where output goes; lines of tee'd output that contain one of
    ``duplicate_*_filters`` are also written to a file. ``ours``: the keywords of
    `PContext`, `SubprocessContext` and `MultiprocessContext`.

    Raises RuntimeError when ranks are missing, FileNotFoundError and the like for a command
    that cannot be run, PicklingError for a function that cannot be sent to another process.
    Nothing is left running then.
    """
    _validate_full_rank(args, len(args), "args")
    _validate_full_rank(envs, len(args), "envs")
    context: PContext
    if isinstance(entrypoint, str):
        from phalanx.elastic.multiprocessing.subprocess_context import SubprocessContext

        context = SubprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
            **ours,
        )
    else:
        from phalanx.elastic.multiprocessing.multiprocess_context import MultiprocessContext

        context = MultiprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            start_method=start_method,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
            **ours,
        )
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context


def __getattr__(name: str) -> Any:
    if name in ("MultiprocessContext", "SubprocessContext"):
        from phalanx.elastic.multiprocessing import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
