"""A coordinator that is a process of its own, and remembers: ``phalanx coordinator``.

One job at a time. What it must not forget is in its state folder before anybody is told of it;
the rest it asks the agents. So it may be killed, started again, or cut off: workers go on, and
the agents come back to it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.coordinator import net, takeover, wire, words
from phalanx.coordinator.hub import CommitFailed, Facts, Hub
from phalanx.coordinator.security import OPEN, Security
from phalanx.coordinator.server import CoordinatorError, Job, Server
from phalanx.rendezvous import job, model
from phalanx.rendezvous.state import Phase, State


@dataclass(frozen=True)
class Remembered:
    """What the file holds."""

    run_id: str
    epoch: int
    options: model.Options
    facts: Facts


class Journal:
    """One small file, replaced as a whole. ``folder`` None: nothing lasts."""

    def __init__(self, folder: Path | None) -> None:
        """Raises CoordinatorError when the folder cannot be used, or another has it."""
        self._file = folder / "job.json" if folder else None
        self._lock = -1
        if folder is None:
            return
        import fcntl

        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CoordinatorError(
                f"another coordinator uses {folder}: stop it, or give this one its own --state-dir"
            ) from None
        except OSError as error:
            raise CoordinatorError(f"cannot use --state-dir {folder}: {error}") from None

    def read(self) -> Remembered | None:
        """What was written last; None: nothing. Raises CoordinatorError for a damaged file."""
        if self._file is None:
            return None
        try:
            return wire.decode("Remembered", self._file.read_bytes(), wire.kinds(Remembered))  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None
        except (OSError, wire.WireError) as error:
            raise CoordinatorError(
                f"cannot read {self._file} ({error}): restore it, or remove it and start anew"
            ) from None

    def write(self, what: Remembered) -> None:
        """Lasts when this returns. Raises CommitFailed."""
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                body = wire.encode(what)
                if os.write(fd, body) != len(body):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(fd)
            finally:
                os.close(fd)
            new.replace(self._file)
            folder = os.open(self._file.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise CommitFailed(f"cannot write {self._file}: {error.strerror}") from None

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Standalone:
    """The server and what it remembers. All methods on one asyncio loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        run_id: str = "",
        security: Security = OPEN,
        silence: float = 5.0,
        line: Callable[[str], object],
        record: Callable[[str, Mapping[str, object]], object] | None = None,
        on_failed: Callable[[str], object] | None = None,
    ) -> None:
        """``run_id`` "": that of the first agent that comes. Raises CoordinatorError."""
        self._journal = journal
        self._line = line
        self._record = record
        self._on_failed = on_failed
        self._wanted = run_id
        self._known = journal.read()
        if self._known is not None and run_id and self._known.run_id != run_id:
            self._known = None
        self.server = Server(
            Job(run_id, 0, silence, separate=True), f"coordinator-{os.getpid()}", security
        )
        self.server.line = line
        self.server.on_hello = self._hello
        self.server.on_cut_off = self._cut_off

    async def start(self, host: str, port: int) -> str:
        """Listens; goes on with the job it remembers. Raises CoordinatorError."""
        address = await self.server.start(host, [port])
        if self._known is not None:
            try:
                self._open(self._known)
            except CommitFailed as error:
                raise CoordinatorError(str(error)) from None
        return address

    async def stop(self) -> None:
        await self.server.stop()
        self._journal.close()

    def _open(self, known: Remembered) -> None:
        """Coordinate this job, in a new term. Raises CommitFailed."""
        term = max(known.facts.term, self.server.term) + 1
        known = dataclasses.replace(known, facts=dataclasses.replace(known.facts, term=term))
        self._journal.write(known)
        self._known = known
        state = State.fresh(term, known.epoch)
        if known.facts.verdict is not None:
            state = dataclasses.replace(state, phase=Phase.OVER, verdict=known.facts.verdict)
        hub = Hub(
            job,
            state,
            known.options,
            term=term,
            record=self._record,
            commit=self._commit,
            on_failed=self._on_failed,
            probe=lambda node: takeover.ended(node, known.run_id, self.server.security),
            silence=self.server.job.silence,
        )
        hub.facts = known.facts
        hub.generation, hub.attempt = known.facts.generation, known.facts.attempt
        hub.verdict = known.facts.verdict
        self.server.job = dataclasses.replace(
            self.server.job, run_id=known.run_id, epoch=known.epoch
        )
        self.server.hub, self.server.term = hub, term
        self._line(f"coordinates job {known.run_id} (term {term})")

    def _commit(self, facts: Facts) -> None:
        hub, known = self.server.hub, self._known
        assert hub is not None and known is not None
        known = dataclasses.replace(known, facts=facts, epoch=hub.state.epoch)
        self._journal.write(known)
        self._known = known

    def _hello(self, hello: words.Hello) -> None:
        """The first agent of a job says how it was started."""
        hub = self.server.hub
        if hello.options is None:
            return  # whoever that is, it starts no job
        if self._wanted and hello.run_id != self._wanted:
            return
        if hub is not None:
            done = hub.verdict is not None and not hub.chairs
            same = hello.run_id == self.server.job.run_id
            if not done or (same and hello.epoch <= hub.state.epoch):
                return
            hub.stop("that job is over")
        fresh = Remembered(hello.run_id, hello.epoch, hello.options, Facts())
        try:
            self._open(fresh)
        except CommitFailed as error:
            self._line(f"cannot coordinate job {hello.run_id}: {error}")
            if self._on_failed is not None:
                self._on_failed(str(error))

    def _cut_off(self) -> None:
        """Nobody is heard: it is this process that is cut off, and the agents go on."""
        hub, known = self.server.hub, self._known
        if hub is None or known is None or hub.verdict is not None:
            return
        term = hub.term + 1
        self._line("no agent is heard any more: waiting for them to come back")
        if self._record is not None:
            self._record("coordinator_cut_off", {"term": term, "at": round(time.time(), 3)})
        facts = dataclasses.replace(hub.facts, term=term)
        try:
            self._commit(facts)
        except CommitFailed as error:
            if self._on_failed is not None:
                self._on_failed(str(error))
            return
        hub.facts = facts
        self.server.term = term
        hub.restart(State.fresh(term, known.epoch), term)


def where(listen: str) -> tuple[str, int]:
    """Host and port of ``--listen``. Raises CoordinatorError."""
    try:
        host, port = net.split(listen)
    except ValueError as error:
        raise CoordinatorError(f"--listen must be HOST:PORT: {error}") from None
    host = host.strip("[]")
    if host in ("0.0.0.0", "::"):
        return host, port
    own = net.own_address(host)
    if own is None:
        raise CoordinatorError(f"--listen {listen}: {host} is no address of this machine")
    return own, port
