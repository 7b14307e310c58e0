"""Sends this process's stdout or stderr to a file, at the level of descriptors.

The names of ``torch.distributed.elastic.multiprocessing.redirects``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]

_FDS = {"stdout": 1, "stderr": 2}


@contextlib.contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """While the body runs, ``std`` ("stdout" or "stderr") goes to ``to_file``, emptied first.

    What C code and child processes write goes there too. Raises ValueError for another
    name, OSError if the file cannot be made.
    """
    if std not in _FDS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {sorted(_FDS)}")
    stream = getattr(sys, std)
    fds = {_FDS[std]}
    if stream is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
            fds.add(stream.fileno())  # usually the same; not where something captures output
    with contextlib.ExitStack() as saved:
        originals = {}
        for fd in fds:
            try:
                originals[fd] = os.dup(fd)
            except OSError:  # the process has no such stream: nothing to come back to
                continue
            saved.callback(os.close, originals[fd])
        target = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        saved.callback(os.close, target)
        _flush(std, stream)
        for fd in fds:
            os.dup2(target, fd)
        try:
            yield
        finally:
            _flush(std, stream)
            for fd in fds:
                if fd in originals:
                    os.dup2(originals[fd], fd)
                else:
                    os.close(fd)


redirect_stdout = functools.partial(redirect, "stdout")
redirect_stderr = functools.partial(redirect, "stderr")


def _flush(std: str, stream: Any) -> None:
    """Write out what Python and the C library still hold for the stream."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    import ctypes

    libc = ctypes.CDLL(None)
    with contextlib.suppress(ValueError, AttributeError):  # no such symbol in this C library
        libc.fflush(ctypes.c_void_p.in_dll(libc, std))
