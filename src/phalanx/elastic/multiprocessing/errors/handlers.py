"""Which error handler a process uses."""

from __future__ import annotations

from phalanx.elastic.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """The error handler of this process."""
    return ErrorHandler()
