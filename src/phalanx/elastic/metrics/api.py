"""Counting and timing; where the numbers go is the handler's business."""

from __future__ import annotations

import abc
import time
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, overload

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class MetricData(NamedTuple):
    """One number: ``timestamp`` is in seconds since the epoch."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricsConfig:
    """What :func:`phalanx.elastic.metrics.initialize_metrics` is given."""

    __slots__ = ["params"]

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params: dict[str, str] = {} if params is None else params


class MetricHandler(abc.ABC):
    """Takes numbers somewhere."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one number."""


class ConsoleMetricHandler(MetricHandler):
    """Prints to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        print(
            f"[{metric_data.timestamp}][{metric_data.group_name}]: "
            f"{metric_data.name}={metric_data.value}"
        )


class NullMetricHandler(MetricHandler):
    """Drops everything."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """A group and the handler that takes its numbers."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Hand one number to the handler, stamped with the time of now."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_metrics_map: dict[str, MetricHandler] = {}
_default_metrics_handler: MetricHandler = NullMetricHandler()


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Let ``handler`` take a group's numbers, or those of all groups without one of their own."""
    global _default_metrics_handler
    if group is None:
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def getStream(group: str) -> MetricStream:
    """The stream of a group."""
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def put_metric(metric_name: str, metric_value: int, metric_group: str = "torchelastic") -> None:
    """Publish one number."""
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since a reading of ``time.time()``."""
    return int((time.time() - start_time_in_seconds) * 1000)


def _get_metric_name(fn: Callable[..., Any]) -> str:
    """``Class.method``, or the last part of the module and the function."""
    name = fn.__qualname__
    if "." not in name and fn.__module__:
        return f"{fn.__module__.rpartition('.')[2]}.{name}"
    return name


def _timed(fn: Callable[..., Any], key: str, put: Callable[[str, int], None]) -> Callable[..., Any]:
    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            result = fn(*args, **kwargs)
            put(f"{key}.success", 1)
            return result
        except Exception:
            put(f"{key}.failure", 1)
            raise
        finally:
            put(f"{key}.duration.ms", int((time.monotonic() - start) * 1000))

    return wrapper


@overload
def prof(fn: _Function, group: str = ...) -> _Function: ...
@overload
def prof(fn: None = ..., group: str = ...) -> Callable[[_Function], _Function]: ...
def prof(fn: Any = None, group: str = "torchelastic") -> Any:
    """Publish success, failure and duration of a function.

    ``<name>.success`` 1 or, after an ``Exception``, ``<name>.failure`` 1; always
    ``<name>.duration.ms``. Works with and without arguments: ``@prof``, ``@prof(group="mine")``.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return _timed(
            function,
            _get_metric_name(function),
            lambda name, value: put_metric(name, value, group),
        )

    return wrap(fn) if fn else wrap


def profile(group: str | None = None) -> Callable[[_Function], _Function]:
    """As :func:`prof`, under the bare name of the function. Deprecated: use ``prof``."""
    warnings.warn("Deprecated, use `@prof` instead", FutureWarning, stacklevel=2)

    def wrap(function: Any) -> Any:
        return _timed(
            function,
            function.__name__,
            lambda name, value: getStream(group or "").add_value(name, value),
        )

    return wrap


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """As :func:`put_metric`. Deprecated: use that."""
    warnings.warn(
        "Deprecated, use `put_metric(metric_name, metric_value, metric_group)` instead",
        FutureWarning,
        stacklevel=2,
    )
    getStream(metric_group).add_value(metric_name, metric_value)
