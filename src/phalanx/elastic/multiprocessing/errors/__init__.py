"""What a worker died of, and which of several failures was the cause.

The names of ``torch.distributed.elastic.multiprocessing.errors``. The error files are the
same on disk: PyTorch's ``record`` works in a worker of ours, ours in a worker of torchrun.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from phalanx.elastic.multiprocessing.errors.error_handler import ErrorHandler
from phalanx.elastic.multiprocessing.errors.handlers import get_error_handler
from phalanx.process import errorfile
from phalanx.recovery import blame

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]

logger = logging.getLogger(__name__)

JSON = dict[str, Any]
GlobalRank = int

_NOT_AVAILABLE = "<N/A>"
_NO_MESSAGE = "<NONE>"
_HOW_TO_TRACE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_SECOND = 1_000_000_000
_WIDEST_RULER = 60

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class ProcessFailure:
    """One failed worker.

    The first four fields are PyTorch's, in its order; ``error_file_data``, ``message`` and
    ``timestamp`` (seconds since the epoch) come from the error file, or from what is known
    without one. The keyword fields are ours:

    * ``observed_ns``: when the death was noticed, nanoseconds since the epoch;
    * ``stopped_by_agent``: it died of a signal the agent sent it: a victim, never a cause;
    * ``stderr_tail``: the last lines it wrote;
    * ``log_files``: where its output went;
    * ``explanation``: a sentence on the likely cause (out of memory, ...).

    ``timestamp_ns`` is the best guess of when it failed, and what failures are ordered by.

    A file that cannot be read as JSON counts as none. One that is a JSON object of another form
    raises ``KeyError``, unless ``observed_ns`` says that an agent asks.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: JSON = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)
    timestamp_ns: int = field(init=False)
    observed_ns: int | None = field(default=None, kw_only=True)
    stopped_by_agent: bool = field(default=False, kw_only=True)
    stderr_tail: tuple[str, ...] = field(default=(), kw_only=True)
    log_files: tuple[str, ...] = field(default=(), kw_only=True)
    explanation: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        found = errorfile.read(self.error_file) if self.error_file else None
        if found is not None:
            self.error_file_data = found.data
            self.message = found.message
            self.timestamp = found.timestamp
            self.timestamp_ns = found.time_ns
            if self.observed_ns is not None:  # it was alive when it wrote
                self.timestamp_ns = min(found.time_ns, self.observed_ns)
        else:
            if self.observed_ns is None and errorfile.lacks_message(self.error_file):
                # PyTorch's contract for a failure made by hand; an agent gives `observed_ns`
                # and must go on whatever its workers wrote.
                raise KeyError(f"error file {self.error_file} has no entry 'message'")
            if self.error_file and _may_hold_something(self.error_file):
                logger.warning(
                    "rank %s: error file %s cannot be understood and is not used",
                    self.local_rank,
                    self.error_file,
                )
            self.error_file = _NOT_AVAILABLE
            self.error_file_data = {"message": _NO_MESSAGE}
            self.message = ""
            if self.observed_ns is None:
                self.timestamp = int(time.time())
                self.timestamp_ns = time.time_ns()
            else:
                self.timestamp = self.observed_ns // _SECOND
                self.timestamp_ns = self.observed_ns
        self._found_timestamp = self.timestamp
        if not self.message:
            if self.exitcode < 0:
                self.message = (
                    f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
                )
            else:
                self.error_file_data["errorTraits"] = {
                    "category": "system_terminated_error",
                    "retryability": "False",
                }
                self.message = _HOW_TO_TRACE

    def signal_name(self) -> str:
        """The name of the signal it died of; ``<N/A>`` if it exited or the signal has none."""
        try:
            return signal.Signals(-self.exitcode).name if self.exitcode < 0 else _NOT_AVAILABLE
        except ValueError:
            return _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """``timestamp`` as local time, YYYY-MM-DD_HH:MM:SS."""
        from datetime import datetime

        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


def _may_hold_something(path: str) -> bool:
    try:
        return os.path.isfile(path) and os.path.getsize(path) > 0
    except OSError:
        return False


def _order(failure: Any) -> tuple[int, int, int]:
    """What failures are sorted by: the smallest is the cause."""
    time_ns = getattr(failure, "timestamp_ns", None)
    # PyTorch's own class has whole seconds only, and those of ours can be set anew.
    if time_ns is None or failure.timestamp != getattr(failure, "_found_timestamp", None):
        time_ns = int(failure.timestamp) * _SECOND
    message = getattr(failure, "message", None)
    text = message.get("message") if isinstance(message, dict) else message
    stopped = bool(getattr(failure, "stopped_by_agent", False))
    exception = text if isinstance(text, str) else None
    return blame.order(
        blame.Failure(failure.exitcode, time_ns, stopped=stopped, exception=exception)
    )


class ChildFailedError(Exception):
    """Workers failed: ``failures`` by global rank. Its text is a report for people.

    PyTorch's ``ChildFailedError``; `record` passes the cause's error file on.
    """

    def __init__(self, name: str, failures: dict[GlobalRank, ProcessFailure]) -> None:
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError("ChildFailedError needs at least one failure")
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[GlobalRank, ProcessFailure]:
        """The cause, as `phalanx.recovery.blame` finds it: the earliest failure that is neither
        the echo of another's nor was brought about by the agent, if there is one."""
        rank = min(self.failures, key=lambda r: _order(self.failures[r]))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report: the other failures, then the cause; victims of the agent in one line."""
        title = f"{self.name} FAILED"
        root_rank, _ = self.get_first_failure()
        root = ""
        others: list[str] = []
        victims: list[int] = []
        width = len(title)
        for index, (rank, failure) in enumerate(self.failures.items()):
            if rank != root_rank and getattr(failure, "stopped_by_agent", False):
                victims.append(rank)
                continue
            text, widest = self._format_failure(index, rank, failure, root=rank == root_rank)
            width = max(width, widest)
            if rank == root_rank:
                root = text
            else:
                others.append(text)
        others = others or ["  <NO_OTHER_FAILURES>"]
        if victims:
            others.append(f"  (stopped by the agent afterwards: rank {_ranges(victims)})")
        border = boarder_delim * min(width, _WIDEST_RULER)
        section = section_delim * min(width, _WIDEST_RULER)
        return "\n".join(
            [
                "",
                border,
                title,
                section,
                "Failures:",
                *others,
                section,
                "Root Cause (first observed failure):",
                root,
                border,
            ]
        )

    def _format_failure(
        self, idx: int, rank: int, failure: Any, *, root: bool = False
    ) -> tuple[str, int]:
        from phalanx.elastic.utils.hostname import fq_hostname

        name = failure.signal_name()
        tail: Sequence[str] = getattr(failure, "stderr_tail", ())
        log_files: Sequence[str] = getattr(failure, "log_files", ())
        explanation = getattr(failure, "explanation", None)
        traceback = errorfile.message_text(failure.message)
        if root and failure.exitcode < 0 and isinstance(failure.message, str):
            traceback = _enrich(traceback, failure.error_file)
        if failure.error_file == _NOT_AVAILABLE and tail:
            # Without an error file the last lines are all there is to say why.
            lines = "\n".join(["last lines of stderr:", *tail])
            known = failure.message != _HOW_TO_TRACE
            traceback = f"{traceback}\n{lines}" if known else lines
        rows = [
            ("time", failure.timestamp_isoformat()),
            ("host", fq_hostname()),
            ("rank", f"{rank} (local_rank: {failure.local_rank})"),
            (
                "exitcode",
                f"{failure.exitcode} (pid: {failure.pid}) "
                + (f" ({name})" if name != _NOT_AVAILABLE else ""),
            ),
        ]
        if explanation:
            rows.append(("cause", explanation))
        rows.append(("error_file", failure.error_file))
        if log_files:
            rows.append(("log_files", ", ".join(log_files)))
        rows.append(("traceback", traceback.replace("\n", "\n  ")))
        lines_out = [f"[{idx}]:", *(f"  {key:<10}: {value}" for key, value in rows)]
        text = "\n".join(lines_out)
        return text, max(len(line) for line in text.split("\n"))


def _enrich(message: str, error_file: str) -> str:
    # A hook of newer PyTorch; a handler written for an older one has no such method.
    hook = getattr(get_error_handler(), "maybe_enrich_signal_failure_message", None)
    if hook is None:
        return message
    try:
        return str(hook(message, error_file))
    except Exception:
        logger.warning("maybe_enrich_signal_failure_message raised", exc_info=True)
        return message


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _is_child_failed(error: Exception) -> bool:
    # PyTorch's error of the same name is as good: it is told by its name, not imported.
    return isinstance(error, ChildFailedError) or (
        any(kind.__name__ == "ChildFailedError" for kind in type(error).__mro__)
        and hasattr(error, "get_first_failure")
    )


def record(
    fn: Callable[_P, _R], error_handler: ErrorHandler | None = None
) -> Callable[_P, _R | None]:
    """Decorator for a worker's main function: what it raises goes to the error file, and on.

    ``SystemExit`` with code 0 becomes a return of None, with another code it passes
    unrecorded. For a `ChildFailedError` the error file of its cause is copied.
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as leaving:
            if leaving.code == 0:
                return None
            raise
        except Exception as error:
            if _is_child_failed(error):
                _pass_on(handler, error)
            else:
                handler.record_exception(error)
            raise

    return wrapper


def _pass_on(handler: ErrorHandler, error: Any) -> None:
    rank, failure = error.get_first_failure()
    if failure.error_file != _NOT_AVAILABLE:
        handler.dump_error_file(failure.error_file, failure.exitcode)
    else:
        logger.info("rank %s failed and left no error file to pass on", rank)


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """The key of the cause among ``failures`` (not empty); see `ChildFailedError`."""
    return min(failures, key=lambda key: _order(failures[key]))
