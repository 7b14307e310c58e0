"""The worker's end of its channel: a thread that hears the agent while training computes.

What the agent says and expects is described in ``docs/training.md``.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.process.channel import (
    FD_VARIABLE,
    Channel,
    ChannelClosed,
    ChannelFull,
    MalformedMessage,
    Message,
)

_AGAIN = 500  # milliseconds


class AgentGone(RuntimeError):
    """The agent has died or closed the channel; nobody can call the ranks together again."""


class NoWord(RuntimeError):
    """The agent did not say in time how to go on."""


NEVER = -2
"""A step that none is."""


@dataclass(frozen=True)
class Join:
    """One ``join`` message, checked."""

    generation: int
    rank: int
    world: int
    store: str
    previous_rank: int | None
    after: int | None = None  # the step that is finished first

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Join:
        """:raises ValueError: a field is missing or of the wrong kind."""
        values = {}
        for name in ("generation", "rank", "world"):
            value = fields.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"join: {name} is {value!r}, not a number")
            values[name] = value
        store = fields.get("store")
        if not isinstance(store, str) or not store.rpartition(":")[2].isdigit():
            raise ValueError(f"join: store is {store!r}, not host:port")
        previous = fields.get("previous_rank")
        if previous is not None and not isinstance(previous, int):
            raise ValueError(f"join: previous_rank is {previous!r}")
        after = fields.get("after")
        if after is not None and not isinstance(after, int):
            raise ValueError(f"join: after is {after!r}")
        if not 0 <= values["rank"] < values["world"]:
            raise ValueError(f"join: rank {values['rank']} of {values['world']}")
        return cls(values["generation"], values["rank"], values["world"], store, previous, after)


@dataclass(frozen=True)
class Dump:
    """A ``dump`` message, checked."""

    generation: int
    step: int
    writers: tuple[int, ...]
    commit: bool
    #: descriptors of the slates that ranks gave to be kept, by rank; who takes this closes them
    records: dict[int, int]

    @classmethod
    def of(cls, fields: dict[str, Any], fds: Sequence[int]) -> Dump:
        """:raises ValueError: a field is missing or of the wrong kind."""
        writers = fields.get("writers")
        generation, step = _number(fields.get("generation")), fields.get("step")
        if generation < 1 or not isinstance(step, int) or not isinstance(writers, list):
            raise ValueError(f"dump: generation, step and writers are needed, not {fields}")
        ranks = fields.get("records", [])
        if not isinstance(ranks, list) or len(ranks) != len(fds):
            raise ValueError(f"dump: records {ranks!r} came with {len(fds)} descriptors")
        records = dict(zip(map(_number, ranks), fds, strict=True))
        if len(records) != len(fds):
            raise ValueError(f"dump: records {ranks!r} name a rank twice")
        commit = fields.get("commit") is True
        return cls(generation, step, tuple(map(_number, writers)), commit, records)


@dataclass(frozen=True)
class Permit:
    """Whether a checkpoint may have its mark: ``until`` (CLOCK_MONOTONIC seconds), or not, why."""

    until: float | None
    why: str = ""


@dataclass(frozen=True)
class Seat:
    """One ``take`` message: variables of the rank, and descriptors of ours by stream."""

    environment: dict[str, str]
    streams: dict[str, int]

    @classmethod
    def of(cls, message: Message) -> Seat:
        given, names = message.fields.get("environment"), message.fields.get("streams")
        environment = given if isinstance(given, dict) else {}
        streams = dict(zip(names if isinstance(names, list) else [], message.fds, strict=False))
        return cls({str(name): str(value) for name, value in environment.items()}, streams)

    def sit(self) -> None:
        """Be what it says: from now on in this process's environment and output."""
        os.environ.update(self.environment)
        for number, name in ((1, "stdout"), (2, "stderr")):
            if name in self.streams:
                os.dup2(self.streams[name], number)
        for fd in self.streams.values():
            os.close(fd)


class Link:
    """Hears ``leave``, ``join``, ``take``, ``stop_at``, ``dump``, ``exit``, ``commit`` and
    ``refused``; sends the answers.

    ``on_leave(generation)`` is called in the link's own thread, at once. As long as it returns
    true (the main thread is still in that generation) it is called again each half second.
    """

    def __init__(self, channel: Channel, on_leave: Callable[[int], bool | None]) -> None:
        self._channel = channel
        self._on_leave = on_leave
        self._news = threading.Condition()
        self.left = -1  # highest generation that is over
        self._join: Join | None = None
        self.stop_at: int | None = None
        self._dumps: list[Dump] = []
        self._permit: tuple[int, int, float | None, str] | None = None
        self.exit_code: int | None = None
        self.closed = False
        self.kept: dict[str, int] | None = None
        self._seat: Seat | None = None
        self.holder = ""  # the node that held the snapshots among it, if it was another
        self.copied = NEVER  # the last snapshot that came to the end of its way to another node
        self.heard_leave = 0.0
        self._leaving = -1  # a generation that the main thread has not left yet
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="phalanx-link", daemon=True)

    @classmethod
    def from_environment(cls, on_leave: Callable[[int], bool | None]) -> Link | None:
        """The link behind ``PHALANX_CHANNEL_FD``; None where there is none."""
        value = os.environ.get(FD_VARIABLE, "")
        if not value.isdigit():
            return None
        # A descriptor of our own: what else holds the channel in this process keeps it.
        sock = socket.socket(fileno=os.dup(int(value)))
        return cls(Channel(sock), on_leave)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(5)
        self._channel.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # -- hearing -------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll(_AGAIN if self._leaving >= 0 else None):
                if fd == self._wake:
                    return
            self._press()
            try:
                while (message := self._channel.receive()) is not None:
                    self._take(message)
            except MalformedMessage:
                continue
            except ChannelClosed:
                with self._news:
                    self.closed = True
                    self._news.notify_all()
                return

    def _take(self, message: Message) -> None:
        fields = message.fields
        over = -1
        taken = False  # whether the message's descriptors have a new owner
        with self._news:
            if message.type == "leave":
                over = _number(fields.get("generation"))
            elif message.type == "join":
                try:
                    join = Join.of(fields)
                except ValueError as error:
                    self.fault(-1, "regroup", str(error), None)
                    return
                if self._join is None or join.generation > self._join.generation:
                    self._join = join
                if join.after is None:
                    over = join.generation - 1
            elif message.type == "kept":
                names = [str(name) for name in fields.get("names", [])]
                self.kept = dict(zip(names, message.fds, strict=False))
                self.holder = str(fields.get("holder", ""))
                taken = True
            elif message.type == "take":
                self._seat = Seat.of(message)
                taken = True
            elif message.type == "copied":
                self.copied = _number(fields.get("step"))
            elif message.type == "stop_at":
                self.stop_at = _number(fields.get("step"))
            elif message.type == "dump":
                with contextlib.suppress(ValueError):
                    self._dumps.append(Dump.of(fields, message.fds))
                    taken = True
            elif message.type in ("commit", "refused"):
                within = fields.get("within") if message.type == "commit" else None
                self._permit = (
                    _number(fields.get("generation")),
                    _number(fields.get("step")),
                    float(within) if isinstance(within, int | float) else None,
                    str(fields.get("reason", "refused")),
                )
            elif message.type == "exit":
                self.exit_code = _number(fields.get("code", 1))
            if over > self.left:
                self.left = over
                self.heard_leave = time.monotonic()
            else:
                over = -1
            self._news.notify_all()
        if not taken:
            for fd in message.fds:
                os.close(fd)
        if over >= 0:
            self._leaving = over
            self._press()

    def _press(self) -> None:
        # An abort is a request to somebody else's code: it is made until it has worked.
        if self._leaving >= 0 and not self._on_leave(self._leaving):
            self._leaving = -1

    def finished(self, step: int | None) -> None:
        """The main thread has finished ``step`` (None: the last one there is): a `join` that was
        to wait for it waits no more."""
        join = self._join
        if join is None or join.after is None or (step is not None and step < join.after):
            return
        with self._news:
            if join.generation - 1 > self.left:
                self.left = join.generation - 1
                self.heard_leave = time.monotonic()

    def over(self, generation: int) -> bool:
        """Whether the agent has said that ``generation`` is over."""
        return self.left >= generation

    def await_over(self, generation: int, timeout: float) -> bool:
        """Wait until ``generation`` is over, the agent wants an end, or is gone."""
        with self._news:
            return self._news.wait_for(
                lambda: self.left >= generation or self.closed or self.exit_code is not None,
                timeout,
            )

    def await_word(self, beyond: int, timeout: float | None) -> Join | Dump:
        """The newest ``join`` to a generation higher than ``beyond``, or a ``dump``.

        ``timeout`` None: as long as the agent lives.

        :raises AgentGone: end of file. :raises NoWord: ``timeout`` seconds are over.
        :raises SystemExit: the agent said ``exit``.
        """

        def word() -> bool:
            return bool(
                (self._join is not None and self._join.generation > max(beyond, self.left))
                or self._dumps
                or self.closed
                or self.exit_code is not None
            )

        with self._news:
            told = self._news.wait_for(word, timeout)
            if self.exit_code is not None:
                raise SystemExit(self.exit_code)
            if self._join is not None and self._join.generation > max(beyond, self.left):
                return self._join
            if self._dumps:
                return self._dumps.pop(0)
            if self.closed:
                raise AgentGone("the agent is gone: nobody calls the ranks together again")
            assert not told
            raise NoWord(f"no word from the agent for {timeout:.0f} s after leaving a step")

    def await_kept(self, timeout: float) -> dict[str, int]:
        """What earlier processes of this rank gave to be kept. Empty if it does not come."""
        with self._news:
            self._news.wait_for(lambda: self.kept is not None or self.closed, timeout)
            return dict(self.kept or {})

    def seat(self) -> Seat | None:
        """What a standby was told of the rank that it takes; given away once."""
        with self._news:
            seat, self._seat = self._seat, None
        return seat

    def may_commit(self, generation: int, step: int, timeout: float) -> Permit:
        """Ask whether the checkpoint of ``step`` may have its mark (`prepared`).

        Waits ``timeout`` seconds at most; less when ``generation`` is over.
        """
        asked = time.monotonic()
        with self._news:
            self._permit = None
        if not self.say("prepared", generation=generation, step=step):
            return Permit(None, "the agent cannot be asked")

        def told() -> bool:
            return self._permit is not None and self._permit[:2] == (generation, step)

        with self._news:
            self._news.wait_for(
                lambda: (
                    told() or self.left >= generation or self.closed or self.exit_code is not None
                ),
                timeout,
            )
            if not told():
                over = self.left >= generation
                why = f"generation {generation} is over" if over else "nobody answered"
                return Permit(None, why)
            assert self._permit is not None
            _, _, within, why = self._permit
        return Permit(None, why) if within is None else Permit(asked + within)

    # -- saying --------------------------------------------------------------

    def say(self, word: str, fds: tuple[int, ...] = (), **fields: Any) -> bool:
        """Send a message; False if it could not be sent. Never raises, never blocks."""
        with contextlib.suppress(ChannelClosed, ChannelFull, ValueError, OSError):
            self._channel.send(word, fds, **fields)
            return True
        return False

    def fault(self, generation: int, kind: str, text: str, step: int | None) -> None:
        self.say("fault", generation=generation, kind=kind, text=text[:2000], step=step)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
