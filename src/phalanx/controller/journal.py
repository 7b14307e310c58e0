"""What must outlive the controller: jobs with their open episodes, and device faults.

SQLite in WAL mode. A transaction that has returned survives the death of this process
(kill -9 included); with ``sync="full"`` it survives the machine's power as well, for a disk
flush per batch.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SCHEMA = 1


class JournalError(RuntimeError):
    """The journal cannot be used; the text says why and what to do."""


class WriteFailed(RuntimeError):
    """A write was not taken; nothing of it may be acted on."""


@dataclass(frozen=True)
class StoredJob:
    """One job as the journal has it; ``body`` is :func:`phalanx.recovery.codec.dump`'s text."""

    body: str
    registered: bool


class Journal:
    """The journal in one folder, which belongs to one controller at a time."""

    def __init__(self, folder: Path | None, sync: str = "normal") -> None:
        """``folder`` None keeps everything in memory (nothing survives).

        Raises JournalError when another controller holds the folder or it cannot be used.
        """
        self._lock: int | None = None
        if folder is None:
            place = ":memory:"
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise JournalError(
                    f"another controller uses {folder}; stop it, or give --state-dir another folder"
                ) from None
            except OSError as error:
                self.close()
                raise JournalError(f"cannot use {folder} for the journal: {error}") from None
            place = str(folder / "journal.sqlite")
        try:
            self._db = sqlite3.connect(place, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if sync == 'full' else 'NORMAL'}")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS jobs(id TEXT PRIMARY KEY, body TEXT NOT NULL,"
                " registered INTEGER NOT NULL) WITHOUT ROWID"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS faults(id TEXT PRIMARY KEY, body TEXT NOT NULL)"
                " WITHOUT ROWID"
            )
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version > _SCHEMA:
                raise JournalError(
                    f"the journal in {folder} was written by a newer version (format {version})"
                )
            self._db.execute(f"PRAGMA user_version={_SCHEMA}")
        except (sqlite3.Error, JournalError) as error:
            self.close()
            raise JournalError(str(error)) from None

    def jobs(self) -> dict[str, StoredJob]:
        """All jobs, by id."""
        return {
            id_: StoredJob(body, bool(registered))
            for id_, body, registered in self._db.execute("SELECT id, body, registered FROM jobs")
        }

    def faults(self) -> dict[str, str]:
        """All device faults (JSON), by key."""
        return dict(self._db.execute("SELECT id, body FROM faults").fetchall())

    def write(
        self,
        jobs: Mapping[str, StoredJob | None],
        faults: Mapping[str, str | None],
    ) -> None:
        """Puts these, or deletes where None, in one transaction. Raises WriteFailed."""
        try:
            self._write(jobs, faults)
        except sqlite3.Error as error:
            raise WriteFailed(str(error)) from None

    def _write(
        self, jobs: Mapping[str, StoredJob | None], faults: Mapping[str, str | None]
    ) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            _put(
                db,
                "INSERT OR REPLACE INTO jobs VALUES(?,?,?)",
                ((id_, job.body, int(job.registered)) for id_, job in jobs.items() if job),
            )
            _put(db, "DELETE FROM jobs WHERE id=?", ((i,) for i, job in jobs.items() if not job))
            _put(
                db,
                "INSERT OR REPLACE INTO faults VALUES(?,?)",
                ((id_, body) for id_, body in faults.items() if body is not None),
            )
            _put(
                db,
                "DELETE FROM faults WHERE id=?",
                ((id_,) for id_, body in faults.items() if body is None),
            )
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Closes the files and lets the folder go."""
        db = getattr(self, "_db", None)
        if db is not None:
            db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _put(db: sqlite3.Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    db.executemany(statement, rows)
