"""Writing the events record. Never raises into whoever has something to record."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

__all__ = ["CONTEXT", "EVENTS_ENV", "EventLog"]

logger = logging.getLogger(__name__)

#: Names the file that ``--events`` was given; a worker writes beside it (``EventLog.beside``).
EVENTS_ENV = "PHALANX_EVENTS_FILE"

#: The context that every line has, in this order (null where not given).
CONTEXT = (
    "host",
    "node",
    "run_id",
    "epoch",
    "generation",
    "attempt",
    "episode",
    "rank",
    "incarnation",
)

_LINE_LIMIT = 64 * 1024  # bytes; the data of a longer one is cut


class _File:
    """The descriptor that a log and the logs bound from it share."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self.pid = 0
        self.torn = False
        self.lost = 0
        self.broken = False  # it cannot be opened: said once, not tried again

    def write(self, line: bytes) -> None:
        pid = os.getpid()
        if self.pid != pid:
            if self.pid:
                # A fork: the parent's file is the parent's.
                self.path, self.torn, self.lost = _beside(self.path), False, 0
            self.pid, self.fd, self.broken = pid, -1, False
        if self.fd < 0:
            if self.broken:
                self.lost += 1
                return
            self._open()
        if self.fd < 0:
            return
        if self.torn:
            line = b"\n" + line
        try:
            written = os.write(self.fd, line)
        except OSError as e:
            self._lose(e.strerror or str(e))
        else:
            self.torn = written < len(line)
            if self.torn:
                self._lose("written in part")

    def _open(self) -> None:
        try:
            folder = os.path.dirname(self.path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            # A named pipe that nobody reads must not hold the writer up.
            self.fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
            # What a killed writer left half done must not swallow our first line.
            size = os.fstat(self.fd).st_size
            if size:
                with open(self.path, "rb") as f:
                    f.seek(size - 1)
                    self.torn = f.read(1) != b"\n"
        except (OSError, ValueError) as e:
            self.broken = self.fd < 0
            if self.broken:
                self._lose(str(e))

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.warning("events are lost, training goes on: %s: %s", self.path, why)


class EventLog:
    """Appends to ``path``; None: nothing is written.

    ``source``: who records ("agent", "worker", "controller"). ``context``: values for the
    fields in ``CONTEXT``, for all lines; ``host`` is known by itself. Raises TypeError for a
    context that is not in ``CONTEXT``; after that nothing ever raises: what cannot be written
    (disk full, no such directory) is counted in ``lost`` and said once. A line is written by
    one system call, so any number of threads may record; after a fork the child writes a
    file of its own.
    """

    def __init__(self, path: str | os.PathLike[str] | None, source: str, **context: Any) -> None:
        self.source = source
        self._file = None if path is None else _File(os.fspath(path))
        self._context: dict[str, Any] = dict.fromkeys(CONTEXT)
        if path is not None:
            self._context["host"] = _host()
        self.update(**context)

    @classmethod
    def beside(cls, path: str | os.PathLike[str] | None, source: str, **context: Any) -> EventLog:
        """A log for a process that does not own ``path``: it writes ``path.<host>.<pid>``."""
        return cls(None if path is None else _beside(os.fspath(path)), source, **context)

    @classmethod
    def from_environment(cls, source: str, **context: Any) -> EventLog:
        """``beside`` the file of ``PHALANX_EVENTS_FILE``, with what a worker's environment
        says of run id, rank, attempt and generation; writes nothing without it."""
        env = os.environ
        known: dict[str, Any] = {
            "run_id": env.get("TORCHELASTIC_RUN_ID"),
            "rank": _integer(env.get("RANK")),
            "attempt": _integer(env.get("TORCHELASTIC_RESTART_COUNT")),
            "generation": _integer(env.get("PHALANX_GENERATION")),
        }
        return cls.beside(env.get(EVENTS_ENV) or None, source, **{**known, **context})

    @property
    def lost(self) -> int:
        """How many events of this process could not be written."""
        return self._file.lost if self._file else 0

    @property
    def path(self) -> str | None:
        """The file that this process writes; None: none."""
        return self._file.path if self._file else None

    def update(self, **context: Any) -> None:
        """Set context for the lines from now on; None takes a value away."""
        for name in context:
            if name not in CONTEXT:
                raise TypeError(f"{name!r} is no context of events; there are {CONTEXT}")
        self._context.update(context)

    def bind(self, **context: Any) -> EventLog:
        """A log into the same file with more context; later ``update`` calls stay apart."""
        other = EventLog(None, self.source)
        other._file = self._file
        other._context = dict(self._context)
        other.update(**context)
        return other

    def record(self, kind: str, /, **data: Any) -> None:
        """Write one event. Values that are not JSON are written as their ``str``."""
        if self._file is None:
            return
        try:
            self._file.write(self._line(kind, data))
        except Exception:
            # Not logged with a traceback each time: this may be a hot path.
            self._file._lose(f"event {kind!r:.80} cannot be written")

    def _line(self, kind: str, data: dict[str, Any]) -> bytes:
        head = {"wall": round(time.time(), 6), "mono": time.monotonic_ns(), **self._context}
        line = _encode({**head, "source": self.source, "kind": kind, "data": data})
        if len(line) > _LINE_LIMIT:
            cut = {"truncated": line[: _LINE_LIMIT // 4].decode("ascii"), "bytes": len(line)}
            line = _encode({**head, "source": self.source, "kind": kind, "data": cut})
        return line

    def close(self) -> None:
        """Close the file; a later ``record`` opens it again."""
        if self._file is not None and self._file.fd >= 0 and self._file.pid == os.getpid():
            os.close(self._file.fd)
            self._file.fd = -1


def _encode(value: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(value, default=str, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        # NaN, keys that are no strings, cycles.
        text = json.dumps(_plain(value, 8), default=str, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, dict) and depth:
        return {str(k): _plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and depth:
        return [_plain(v, depth - 1) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return str(value)[:1000]


def _host() -> str:
    return os.uname().nodename


def _beside(path: str) -> str:
    return f"{path}.{_host()}.{os.getpid()}"


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
