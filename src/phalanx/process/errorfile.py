"""The error file: how a worker tells in JSON what it died of.

A worker finds the path in ``TORCHELASTIC_ERROR_FILE`` and writes one object there, PyTorch's
or ours; the agent reads it after the worker's death. Writing is atomic; reading believes
nothing: a file that is empty, cut short or of another shape counts as no file at all.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 8 * 1024 * 1024

_SECOND = 1_000_000_000


@dataclass(frozen=True)
class ErrorRecord:
    """What an error file says.

    ``message`` is a text, or PyTorch's object with ``message`` and ``extraInfo``.
    ``timestamp`` is in whole seconds since the epoch, as the file gives it (0: it gives
    none); ``time_ns`` is the best the file and its own age tell, in nanoseconds.
    """

    data: dict[str, Any]
    message: str | dict[str, Any]
    timestamp: int
    time_ns: int

    @property
    def text(self) -> str:
        """The traceback if there is one, else the message."""
        return message_text(self.message)


def message_text(message: Any) -> str:
    """The traceback in a message object, else its message; a text as it is."""
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    if isinstance(extra, dict) and extra.get("py_callstack"):
        return str(extra["py_callstack"])
    return str(message.get("message", "<N/A>"))


def describe(
    error: BaseException, *, callstack: str | None = None, now_ns: int | None = None
) -> dict[str, Any]:
    """The object for ``error``: PyTorch's shape, and ``timestamp_ns`` beside ``timestamp``."""
    if callstack is None:
        callstack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if now_ns is None:
        now_ns = time.time_ns()
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": callstack,
                "timestamp": str(now_ns // _SECOND),
                "timestamp_ns": str(now_ns),
            },
        }
    }


def write(path: str, data: dict[str, Any]) -> None:
    """Put ``data`` at ``path``: whoever reads finds all of it or what was there before.

    What is not a regular file (``/dev/null``) is written to in place. Raises OSError, and
    TypeError or ValueError for what JSON cannot say.
    """
    write_text(path, json.dumps(data))


def write_text(path: str, text: str) -> None:
    """`write` for text that is JSON already. Raises OSError."""
    body = text.encode("utf-8", "surrogatepass")
    try:
        in_place = not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        in_place = False
    if not in_place:
        temporary = f"{path}.{os.getpid()}.{threading.get_native_id()}.tmp"
        try:
            _put(temporary, body, os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
            os.replace(temporary, path)
            return
        except PermissionError:  # the file may be writable where its directory is not
            pass
        except BaseException:
            _remove(temporary)
            raise
    _put(path, body, os.O_CREAT | os.O_TRUNC)


def read(path: str | os.PathLike[str]) -> ErrorRecord | None:
    """What the file says; None if there is no file or none that can be understood.

    Understood are PyTorch's object and the flat ``{"message": text, "timestamp": t}``.
    """
    found = _get(path)
    if found is None:
        return None
    body, changed_ns = found
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parse(data, changed_ns)


def identity(path: str) -> tuple[int, ...] | None:
    """Tells one file at ``path`` from another that is written there later; None: no file.

    Taken before a worker starts and again after its death it shows whether an error file is
    this worker's or was left by an earlier one. No clock is involved.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def lacks_message(path: str | os.PathLike[str]) -> bool:
    """Whether the file is a whole JSON object, but not one of an error."""
    found = _get(path) if path else None
    if found is None:
        return False
    try:
        data = json.loads(found[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "message" not in data


def parse(data: Any, changed_ns: int) -> ErrorRecord | None:
    """`read` without the file: ``changed_ns`` is when it was last written to."""
    if not isinstance(data, dict):
        return None
    message = data.get("message")
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        clock = extra if isinstance(extra, dict) else {}
    elif isinstance(message, str):
        clock = data
    else:
        return None
    timestamp = _integer(clock.get("timestamp")) or 0
    if timestamp * _SECOND >= 1 << 63:  # no time that a clock has shown
        timestamp = 0
    exact = _integer(clock.get("timestamp_ns"))
    if exact is not None and (not timestamp or exact // _SECOND == timestamp):
        time_ns = exact
    elif not timestamp:
        time_ns = changed_ns
    elif 0 <= changed_ns - timestamp * _SECOND < 2 * _SECOND:
        # A whole second says little; the file was written right after its time was taken.
        time_ns = changed_ns
    else:
        time_ns = timestamp * _SECOND
    return ErrorRecord(data, message, timestamp or time_ns // _SECOND, time_ns)


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 1 << 63 else None


def _put(path: str, body: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o644)
    with open(fd, "wb") as file:
        file.write(body)


def _get(path: str | os.PathLike[str]) -> tuple[bytes, int] | None:
    try:
        # Not blocking: a named pipe in the file's place must not hold the agent up.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MAX_BYTES:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)[:MAX_BYTES], status.st_mtime_ns
    except OSError:
        return None
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
