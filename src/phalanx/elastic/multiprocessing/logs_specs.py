"""Where workers' output goes: ``Std``, ``LogsDest``, ``LogsSpecs``, ``DefaultLogsSpecs``."""

from __future__ import annotations

import logging
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from phalanx.process.errorfile import VARIABLE
from phalanx.process.logs import free_suffix

__all__ = ["DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std", "to_map"]

logger = logging.getLogger(__name__)

_ONE = re.compile(r"[0-3]", re.ASCII)
_MAP = re.compile(r"\d+:[0-3](,\d+:[0-3])*", re.ASCII)


class Std(IntFlag):
    """Which of a worker's streams: a mask."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """A mask ("0" to "3") for all, or masks by local rank: "0:3,10:1".

        Raises ValueError for anything else.
        """
        if _ONE.fullmatch(vm):
            return cls(int(vm))
        if _MAP.fullmatch(vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(rank): cls(int(mask)) for rank, mask in pairs}
        raise ValueError(
            f"{vm!r} says no streams: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "for all workers or by local rank as in 0:3,1:1"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """A mask for each of ``local_world_size`` ranks; those a map leaves out get ``Std.NONE``."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths by local rank; an empty path: not redirected. ``filtered_*`` are for all ranks."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)
    filtered_stderr: str = field(default_factory=str)


class LogsSpecs(ABC):
    """Decides where output goes. Subclasses are found by ``--logs-specs``.

    ``redirects``: streams that go to files; ``tee``: to files and to the console;
    ``local_ranks_filter``: the ranks whose output the console shows (None or empty: all).
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations for workers with these variables (by local rank).

        Called once per start of the group. May add to ``envs``.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory that all files are below."""


class DefaultLogsSpecs(LogsSpecs):
    """Files in ``<log_dir>/<run id>_<random>/attempt_<n>/<local rank>/``.

    ``log_dir`` None: a temporary directory, made when it is needed and removed at the end
    if nothing was written to it. ``/dev/null``: no files at all.

    Nothing is ever deleted or written over: when an attempt's files are there already (a
    restart for a changed membership counts as no attempt), the new ones end in ``.1``,
    ``.2`` and so on.

    Ours, by keyword: ``own_directory`` False uses ``<log_dir>/<run id>/``, in which later
    agents of the same run go on; ``node`` then puts a directory of that name below it, for
    nodes that share a file system.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        *,
        own_directory: bool = True,
        node: str | None = None,
    ) -> None:
        """Raises NotADirectoryError if ``log_dir`` is a file, OSError if it cannot be made."""
        if log_dir and log_dir != os.devnull:
            if os.path.isfile(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self._own_directory = own_directory
        self._node = node
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """The log directory; a temporary one is made now."""
        if self._root_log_dir is None:
            import tempfile

            self._root_log_dir = tempfile.mkdtemp(prefix="torchelastic_")
            weakref.finalize(self, _remove_empty, self._root_log_dir, os.getpid())
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See the class. Sets ``TORCHELASTIC_ERROR_FILE`` in each of ``envs``."""
        ranks = range(len(envs))
        if self._root_log_dir == os.devnull:
            return self._nowhere(envs)
        attempt = self._attempt_dir(envs[0] if envs else {})
        for rank in ranks:
            os.makedirs(os.path.join(attempt, str(rank)), exist_ok=True)

        names = ("stdout.log", "stderr.log", "error.json")
        shared = ("filtered_stdout.log", "filtered_stderr.log")
        suffix = free_suffix(
            [os.path.join(attempt, str(rank), name) for rank in ranks for name in names]
            + [os.path.join(attempt, name) for name in shared]
        )

        def path(name: str, rank: int | None = None) -> str:
            folder = attempt if rank is None else os.path.join(attempt, str(rank))
            return os.path.join(folder, name + suffix)

        dest = LogsDest(filtered_stdout=path(shared[0]), filtered_stderr=path(shared[1]))
        redirects, tees = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for rank in ranks:
            heard = not self._local_ranks_filter or rank in self._local_ranks_filter
            for std, name, files, tee_files in (
                (Std.OUT, names[0], dest.stdouts, dest.tee_stdouts),
                (Std.ERR, names[1], dest.stderrs, dest.tee_stderrs),
            ):
                # What is tee'd is written to its file, and followed from there.
                if std & (redirects[rank] | tees[rank]):
                    files[rank] = path(name, rank)
                    if std & tees[rank] and heard:
                        tee_files[rank] = files[rank]
                else:
                    files[rank] = "" if heard else os.devnull
            dest.error_files[rank] = envs[rank][VARIABLE] = path(names[2], rank)
        return dest

    def _nowhere(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env[VARIABLE] = ""
        null = dict.fromkeys(range(len(envs)), os.devnull)
        console = dict.fromkeys(range(len(envs)), "")
        return LogsDest(
            dict(console), dict(console), dict(null), dict(null), null, os.devnull, os.devnull
        )

    def _attempt_dir(self, env: Mapping[str, str]) -> str:
        run_id = env.get("TORCHELASTIC_RUN_ID", "test_run_id")
        name = re.sub(r"[/\0]", "_", run_id) or "_"
        if name in (".", ".."):
            name = f"_{name}"
        if self._run_log_dir is None:
            if self._own_directory:
                import tempfile

                self._run_log_dir = tempfile.mkdtemp(prefix=f"{name}_", dir=self.root_log_dir)
            else:
                self._run_log_dir = os.path.join(self.root_log_dir, name, self._node or "")
            logger.info("log directory set to: %s", self._run_log_dir)
        count = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return os.path.join(self._run_log_dir, f"attempt_{count}")

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return False
        mine = (self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter)
        return mine == (
            other._root_log_dir,
            other._redirects,
            other._tee,
            other._local_ranks_filter,
        )

    __hash__ = None  # type: ignore[assignment]


def _remove_empty(root: str, pid: int) -> None:
    """Remove a temporary directory as far as nothing was written to it."""
    if os.getpid() != pid:  # a forked child has the parent's finalizers
        return
    for folder, _, _ in os.walk(root, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass
