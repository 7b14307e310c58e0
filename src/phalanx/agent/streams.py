"""Where the workers' standard streams go, and their last lines for the report."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.agent.config import JobConfig
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from phalanx.elastic.multiprocessing.tail_log import TailLog
from phalanx.process.logs import OutputRelay, tail_of_file

logger = logging.getLogger(__name__)


class Streams:
    """Opens the descriptors of a worker's streams for each start.

    A stream that is redirected goes to its file, one that is tee'd to its file and from
    there to the console with a prefix. stderr otherwise passes through a pipe of ours, so
    that its last lines are known; stdout is the agent's own.
    """

    def __init__(self, config: JobConfig) -> None:
        """Raises OSError or ValueError for a log folder or logs specs that will not do."""
        self.config = config
        make_specs = specs_class(config.logs_specs)
        self.temporary: str | None = None  # the folder, when it is our own
        self.keeps_logs = config.log_dir is not None or config.logs_specs is not None
        log_dir = config.log_dir
        redirects, tee = Std.from_str(config.redirects), Std.from_str(config.tee)
        if log_dir is not None:
            try:
                os.makedirs(log_dir, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--log-dir {log_dir} cannot be made: {error.strerror}") from None
        else:
            self.temporary = log_dir = tempfile.mkdtemp(prefix="phalanx-")
            self.keeps_logs |= bool(redirects) or bool(tee)
        self.specs = make_specs(
            log_dir=log_dir,
            redirects=redirects,
            tee=tee,
            local_ranks_filter=set(config.local_ranks_filter) or None,
        )
        self.relay = OutputRelay()
        self._tails: list[TailLog] = []
        self._dest: LogsDest | None = None

    def begin(self, envs: dict[int, dict[str, str]], prefixes: Mapping[int, str]) -> LogsDest:
        """Folders and files for an attempt; adds TORCHELASTIC_ERROR_FILE to each environment."""
        self.end_attempt()
        try:
            dest = self.specs.reify(envs)
        except OSError as error:
            if self.keeps_logs and self._dest is None:
                raise
            # A restart, or nobody wants logs: training matters more than they do.
            logger.warning("no log files from here on: %s", error)
            dest = LogsDest()
        self._dest = dest
        for name, files, out in (
            ("stdout", dest.tee_stdouts, sys.stdout),
            ("stderr", dest.tee_stderrs, sys.stderr),
        ):
            if files:
                tail = TailLog(name, files, out, dict(prefixes), interval_sec=0.1)
                self._tails.append(tail.start())
        for name, files, path, wanted in (
            ("stdout", dest.tee_stdouts, dest.filtered_stdout, self.config.stdout_filters),
            ("stderr", dest.tee_stderrs, dest.filtered_stderr, self.config.stderr_filters),
        ):
            if wanted and path and files:
                self._filter(name, files, path, prefixes, list(wanted))
        return dest

    def _filter(
        self,
        name: str,
        files: dict[int, str],
        path: str,
        prefixes: Mapping[int, str],
        wanted: list[str],
    ) -> None:
        sink = open(path, "a")  # closed with the tail, which writes to it
        tail = TailLog(
            name,
            files,
            sink,
            dict(prefixes),
            interval_sec=0.1,
            log_line_filter=lambda line: any(text in line for text in wanted),
        )
        self._tails.append(tail.start())

    def open(self, local_rank: int) -> tuple[int | None, int | None]:
        """Descriptors for stdout and stderr of one start; None: the agent's own.

        The caller closes them once the worker has them.
        """
        assert self._dest is not None
        out = self._file(self._dest.stdouts, local_rank)
        err = self._file(self._dest.stderrs, local_rank)
        if err is None:
            err = self.relay.attach(local_rank, "stderr")
        return out, err

    def open_apart(self, slot: int) -> tuple[int, int]:
        """The same for the standby in this slot: what it writes is remembered, not shown."""
        out = self.relay.attach(-1 - slot, "stdout", show=False)
        try:
            return out, self.relay.attach(-1 - slot, "stderr", show=False)
        except OSError:
            os.close(out)
            raise

    def apart(self, slot: int, drain: bool = False) -> tuple[list[str], list[str]]:
        """The last lines of that standby's stdout and stderr; ``drain``: it is dead."""
        if drain:
            self.relay.drain(-1 - slot)
        return self.relay.tail(-1 - slot, "stdout"), self.relay.tail(-1 - slot, "stderr")

    @staticmethod
    def _file(paths: dict[int, str], local_rank: int) -> int | None:
        path = paths.get(local_rank, "")
        if not path:
            return None
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            logger.warning("not logged to a file: %s", error)
            paths[local_rank] = ""
            return None

    def last_lines(self, local_rank: int) -> tuple[Sequence[str], str]:
        """The last lines of a dead worker's stderr, and the file they are in ("" if none)."""
        path = self._dest.stderrs.get(local_rank, "") if self._dest else ""
        if path and path != os.devnull:
            return tail_of_file(path), path if self.keeps_logs else ""
        self.relay.drain(local_rank)
        return self.relay.tail(local_rank), ""

    def error_file(self, local_rank: int) -> str:
        """Where the worker of this rank writes what it raised; "" if nowhere."""
        return self._dest.error_files.get(local_rank, "") if self._dest else ""

    def end_attempt(self) -> None:
        """Show what the tails have not shown yet, and end them."""
        tails, self._tails = self._tails, []
        for tail in tails:
            tail.stop()

    def close(self) -> None:
        """End everything; the temporary folder goes unless somebody asked for logs."""
        self.end_attempt()
        self.relay.close()
        if self.temporary and not self.keeps_logs:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def folder(self) -> str | None:
        """Where the logs stay; None when none do."""
        return self.specs.root_log_dir if self.keeps_logs else None


def specs_class(name: str | None) -> type[LogsSpecs] | Any:
    """``--logs-specs NAME``: an entry point of the group ``torchrun.logs_specs``.

    Raises ValueError when there is none of that name.
    """
    if name is None or name == "default":
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="torchrun.logs_specs") if e.name == name]
    if not found:
        raise ValueError(
            f"--logs-specs {name}: there is no entry point of that name in the group "
            "torchrun.logs_specs"
        )
    return found[0].load()
