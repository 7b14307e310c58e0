"""The reset.json side channel, for agents that read only files.

One folder per job under ``--reset-dir`` with ``reset.json`` and ``restartType``: what
ClusterD writes into the reset ConfigMap that pods have at /user/restore/reset/config.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,200}\Z")


class ResetFiles:
    """Writes each job's reset.json, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, job_id: str) -> Path:
        """Where a job's files are; a job id that is no file name gets its hash."""
        if _SAFE.match(job_id) and job_id.strip("."):
            return self._folder / job_id
        return self._folder / hashlib.sha256(job_id.encode()).hexdigest()

    def write(
        self, job_id: str, operation: str, ranks: tuple[int, ...] = (), in_place: bool = False
    ) -> None:
        """``flushing``, ``faults``, ``clear`` or ``restart`` (clear and RetryTime + 1).

        Raises OSError.
        """
        folder = self.folder(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        retries = self._retries(folder / "reset.json")
        body: dict[str, Any] = {
            "RankList": [
                {
                    "RankId": rank,
                    "LogicId": -1,
                    "Status": "fault",
                    "Policy": "",
                    "InitialPolicy": "",
                    "ErrorCode": [],
                    "ErrorCodeHex": "",
                }
                for rank in (ranks if operation == "faults" else ())
            ],
            "UpdateTime": int(time.time()),
            "RetryTime": retries + (operation == "restart"),
            "FaultFlushing": operation == "flushing",
            "GracefulExit": 0,
            "RestartFaultProcess": in_place and operation == "faults",
        }
        text = json.dumps(body)
        _replace(folder / "restartType", "podReschedule")
        _replace(folder / "checkCode", hashlib.sha256(text.encode()).hexdigest())
        _replace(folder / "reset.json", text)

    @staticmethod
    def _retries(path: Path) -> int:
        try:
            return int(json.loads(path.read_text())["RetryTime"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
