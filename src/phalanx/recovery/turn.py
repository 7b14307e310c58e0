"""The working copy of one step of the machine, and what its parts are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from hashlib import blake2b

from phalanx.recovery.model import (
    Effect,
    Event,
    Job,
    Record,
    State,
)

_FIELDS = frozenset(f.name for f in fields(Job))


@dataclass
class Turn:
    """The working copy of one step."""

    job: Job
    event: Event
    now: float
    effects: list[Effect] = field(default_factory=list)
    code: int = 0
    info: str = ""
    target: State | None = None  # where DECIDE came out

    def set(self, **changes: object) -> None:
        # dataclasses.replace without its cost: this is most of what a step does.
        assert changes.keys() <= _FIELDS, changes
        job = object.__new__(Job)
        job.__dict__.update(self.job.__dict__, **changes)
        self.job = job

    def record(self, kind: str, **data: object) -> None:
        self.effects.append(Record(kind, data))

    def new_uuid(self, round_: int) -> str:
        """The uuid of a round's signals, in the original's form."""
        job = self.job
        seed = f"{job.job_id}/{job.episode}/{round_}/{self.now!r}".encode()
        return f"{int(self.now * 1e9):X}-{blake2b(seed, digest_size=16).hexdigest()}"


Guard = Callable[[Turn], bool]
Action = Callable[[Turn], None]
