"""Recovery of a job that asks a controller (``phalanx run --controller``).

What would start a recovery is held until the controller has spoken, or has had its time; then
the machine of :mod:`phalanx.recovery.episode` gets it, with the controller's word as the only
strategy that is enabled. Whether something would start one, and what could be done about it,
the machine itself is asked: it is pure, so it can be asked without anything happening.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from phalanx.agent import report
from phalanx.agent.counsel import Counsel
from phalanx.agent.inplace import InPlace, episodes
from phalanx.process import pause
from phalanx.recovery import counsel as c
from phalanx.recovery import words
from phalanx.recovery.counsel import Trouble

if TYPE_CHECKING:
    from phalanx.process.supervisor import WorkerProcess
    from phalanx.recovery import episode as ep

Held = tuple[Any, str | None]
"""An event of the machine, and the words that tell a person of it."""


class Advised(InPlace):
    """An :class:`InPlace` whose decisions are a controller's. ``counsel`` is set before use."""

    counsel: Counsel

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._held: deque[Held] = deque()
        self._failed: str | None = None  # a plain program's first failure, while held
        self._ruling: c.Decided | None = None
        self._open: set[int] = set()  # ranks whose fault the ruling is about and has not met
        self._halting: set[int] = set()
        self._halt_by: float | None = None

    @property
    def _waits(self) -> bool:
        return bool(self._held) or self._failed is not None

    # ------------------------------------------------------------------ what InPlace does

    def begin(self, world: int, generation: int) -> None:
        self._forget()
        self.counsel.tell(c.Done())  # whatever was decided: the whole group starts anew
        super().begin(world, generation)

    def give_up(self, why: str) -> None:
        """The group has to be started again whatever anybody decides."""
        if self.why is None:
            troubles = [
                self._trouble(rank, words.NORMAL, why) for rank in range(len(self.crew.ranks))
            ]
            self._forget()
            self.counsel.tell(c.NoChoice(tuple(troubles), words.EXIT, why))
        super().give_up(why)

    def due(self) -> float | None:
        own = None if self._waits else super().due()
        due = [t for t in (own, self.counsel.due, self._halt_by) if t is not None]
        return min(due) if due else None

    def tick(self, now: float) -> None:
        machine = InPlace.due(self)
        if not self._waits and machine is not None and now >= machine:
            self._advance(episodes().Tick())
        if self._halt_by is not None and now >= self._halt_by:
            self._halted()
        self._obey(self.counsel.heard())

    def on_died(self, worker: WorkerProcess) -> None:
        if self._machine is not None or not worker.returncode or not self.crew.is_current(worker):
            super().on_died(worker)
        elif self.why is None:  # a plain program
            rank = self.crew.ranks[worker.local_rank]
            how = report.how(self.crew.end_of(worker, light=True))
            self._failed = self._failed or f"rank {rank} {how}"
            self._ask((self._trouble(rank, words.NORMAL, how),), ())

    def _advance(self, event: ep.Event, words_: str | None = None) -> None:
        if isinstance(event, episodes().Left):
            self._has_left(event.rank)
        if self._waits:
            self._held.append((event, words_))
            self._tell_more(event)
        elif self.why is None:
            self._consider(event, words_)

    def _carry_out(self, effect: ep.Effect) -> None:
        if isinstance(effect, episodes().RestartGroup):
            self._group_ends(effect)
        super()._carry_out(effect)
        if isinstance(effect, episodes().Recovered):
            self._ruling = None
            self._open.clear()
            self._obey(self.counsel.tell(c.Done()))

    def _group_ends(self, effect: ep.RestartGroup) -> None:
        """The machine has given the group up, after a dump or without: how that went."""
        dumping = self._ruling is not None and self._ruling.strategy == words.DUMP
        if dumping and effect.dumped is not None:
            self.counsel.tell(c.Done())
        elif self.counsel.state.acting is not None:
            code = words.Code.DUMP_ERROR if dumping else words.Code.UNRECOVERABLE
            why = effect.words if dumping and effect.words else effect.why
            self.counsel.tell(c.NoChoice((), words.EXIT, why, code))
        self._forget()
        InPlace.give_up(self, effect.why)  # what there was to tell has been told

    # ------------------------------------------------------------------ asking

    def _consider(self, event: ep.Event, words_: str | None, ruled: bool = False) -> None:
        """Carry an event out if the ruling covers it or nothing is to be decided; else ask.

        ``ruled``: it is what the ruling was asked for.
        """
        troubles = self._troubles(event)
        ruled = ruled or bool(troubles and self._open.issuperset(t.rank for t in troubles))
        only = self._ruling.strategy if ruled and self._ruling else None
        effects = self._peek(event, only)
        ends = self._machine is not None and self._machine.ending is not None
        if ends or not _decisive(effects):
            super()._advance(event, words_)
            return
        why = _gives_up(effects)
        if ruled and (why is None or (only == words.DUMP and _dumps(effects))):
            self._open.difference_update(t.rank for t in troubles)
            self._commit(event, words_, only)
            return
        self._held.append((event, words_))
        failed = why is not None and self._ruling is not None and (ruled or not troubles)
        if failed and self._ruling is not None:
            code = _code(self._ruling.strategy, event)
            offer = self._offer(event)
            self._ruling = None
            self._obey(self.counsel.tell(c.Failed(code, why or "", offer)))
        else:
            self._ask(troubles, self._offer(event))

    def _ask(self, troubles: tuple[Trouble, ...], offer: tuple[str, ...]) -> None:
        self._obey(self.counsel.tell(c.Faulted(troubles, offer)))

    def _tell_more(self, event: ep.Event) -> None:
        """What breaks while a decision is awaited goes into the same decision."""
        troubles = self._troubles(event) if not isinstance(event, episodes().Tick) else ()
        if troubles and self.counsel.state.asking and _decisive(self._peek(event)):
            self._has_left(event.rank)  # type: ignore[union-attr]
            self._ask(troubles, self._offer(event))

    def _peek(self, event: ep.Event, only: str | None = None) -> list[ep.Effect]:
        """What the machine would do, with only this strategy (None: as it likes)."""
        assert self._machine is not None
        bounds = self._bounds(only)
        return list(episodes().advance(self._machine, event, pause.now(), bounds)[1])

    def _offer(self, event: ep.Event) -> tuple[str, ...]:
        """The strategies of the ladder that the machine could take."""
        possible = []
        for name in (words.RETRY, words.IN_PLACE, words.DUMP):
            effects = self._peek(event, name)
            if _dumps(effects) if name == words.DUMP else _gives_up(effects) is None:
                possible.append(name)
        return tuple(possible)

    def _troubles(self, event: ep.Event) -> tuple[Trouble, ...]:
        """What an event tells the controller; nothing: it is no fault of a rank."""
        ep = episodes()
        if isinstance(event, ep.Tick):
            assert self._machine is not None
            suspicion = self._machine.suspicion
            if suspicion is None or pause.now() < suspicion[0]:
                return ()
            event = suspicion[1]
        if isinstance(event, ep.Died):
            return (self._trouble(event.rank, words.NORMAL, event.how),)
        if isinstance(event, ep.Fault) and event.kind != "lost-state":
            kind = words.UCE if event.kind == "device" else words.NETWORK
            return (self._trouble(event.rank, kind, f"{event.kind}: {event.text}"),)
        return ()

    def _trouble(self, rank: int, kind: int, reason: str) -> Trouble:
        (local,) = self.hands.local([rank]).values()
        worker = self.crew.workers.get(local)
        return Trouble(rank, kind, worker.incarnation if worker else 0, reason)

    # ------------------------------------------------------------------ the answer

    def _obey(self, effects: Iterable[c.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, c.Halt):
                self._halt()
            elif isinstance(effect, c.Decided):
                self._rule(effect)
            elif isinstance(effect, c.DecideAlone):
                self._alone(effect.why)

    def _rule(self, ruling: c.Decided) -> None:
        self._halting, self._halt_by = set(), None
        self.crew.events.record(
            "decided", by="controller", strategy=ruling.strategy, why=ruling.why
        )
        if ruling.strategy == c.END:
            self.ended = ruling.why or "no reason given"
            self._restart(f"the controller ended the job: {self.ended}")
        elif ruling.strategy == words.EXIT or self._machine is None:
            self.story.advised(ruling.strategy, ruling.why)
            self._restart(f"the controller decided {ruling.strategy}: {ruling.why}")
        else:
            self._ruling, self._open = ruling, set(ruling.ranks)
            held = self._release()
            for rank in ruling.foreign & set(range(len(self.crew.ranks))):
                if self._machine.members[rank].alive and ruling.strategy == words.IN_PLACE:
                    self.hands.kill(rank, f"was reported broken ({ruling.why})")
            if held:
                self._go_on(held, lambda e, w: self._consider(e, w, ruled=True))
            elif ruling.strategy != words.IN_PLACE or not ruling.foreign:
                self._consider(self._again(ruling.why), None, ruled=True)
            self.story.advised(ruling.strategy, ruling.why)

    def _alone(self, why: str) -> None:
        self._ruling = None
        self._open.clear()
        self._halting, self._halt_by = set(), None
        failed, held = self._failed, self._release()
        if not held and failed is None and self._machine is not None:
            held = [(self._again("the controller stopped the job and said no more"), None)]
        if failed is not None:
            took = words.EXIT
        elif held:
            effects = self._peek(held[0][0])
            took = _strategy(effects) if _decisive(effects) else words.RETRY
        else:
            took = words.RETRY  # a plain program that nobody has stopped
        self.crew.events.record("decided", by="agent", strategy=took, why=why)
        self.counsel.tell(c.TookAlone(took))
        if failed is not None:
            super().give_up(failed)
        for event, words_ in held:
            if self.why is None:
                self._commit(event, words_, None)
        self.story.alone(took, why)

    def _release(self) -> list[Held]:
        held = list(self._held)
        self._held.clear()
        self._failed = None
        return held

    def _go_on(self, held: list[Held], first: Callable[[Any, str | None], None]) -> None:
        """What was held, in its order."""
        first(*held[0])
        for event, words_ in held[1:]:
            self._advance(event, words_)

    def _commit(self, event: ep.Event, words_: str | None, only: str | None) -> None:
        self._only = only
        try:
            super()._advance(event, words_)
        finally:
            self._only = None

    def _restart(self, why: str) -> None:
        """The whole group starts again, or the job ends."""
        self._forget()
        self.crew.events.record("restart_group", why=why)
        super().give_up(why)

    def _forget(self) -> None:
        self._release()
        self._ruling = None
        self._open.clear()
        self._halting, self._halt_by = set(), None

    # ------------------------------------------------------------------ stopping

    def _halt(self) -> None:
        """Have those that are in a step leave it; who is not is not waited for."""
        machine = self._machine
        if machine is not None and machine.episode is None:
            self._halting = {r for r, m in enumerate(machine.members) if m.alive and m.in_loop}
            for event, _ in self._held:
                self._halting.discard(getattr(event, "rank", -1))
            self.hands.leave(self._halting, self.crew.generation)
            self._halt_by = pause.now() + self.counsel.settings.timeout / 2
        if not self._halting:
            self._halted()

    def _has_left(self, rank: int) -> None:
        if rank in self._halting:
            self._halting.discard(rank)
            if not self._halting:
                self._halted()

    def _halted(self) -> None:
        self._halting, self._halt_by = set(), None
        offer: tuple[str, ...] = ()
        if self._machine is not None and not self._held:
            offer = self._offer(self._again("stopped by the controller"))
        self._obey(self.counsel.tell(c.Stopped(offer)))

    def _again(self, why: str) -> ep.Event:
        """An event upon which all leave their step and do it again."""
        assert self._machine is not None
        living = [r for r, m in enumerate(self._machine.members) if m.alive]
        return episodes().Fault(living[0], self._machine.generation, "network", why)  # type: ignore[no-any-return]


def _decisive(effects: Iterable[ep.Effect]) -> bool:
    ep = episodes()
    decisions = ep.Replace | ep.Regroup | ep.GiveUp | ep.RestartGroup
    return any(isinstance(e, decisions) for e in effects)


def _gives_up(effects: Iterable[ep.Effect]) -> str | None:
    """Why the machine would go on in place no more; None: it would go on."""
    ep = episodes()
    return next((e.why for e in effects if isinstance(e, ep.GiveUp | ep.RestartGroup)), None)


def _dumps(effects: Iterable[ep.Effect]) -> bool:
    from phalanx.recovery import ending

    return any(isinstance(e, ending.Leave) for e in effects)


def _strategy(effects: Iterable[ep.Effect]) -> str:
    ep = episodes()
    kinds = {type(e) for e in effects}
    if kinds & {ep.GiveUp, ep.RestartGroup}:
        return words.EXIT
    return words.IN_PLACE if ep.Replace in kinds else words.RETRY


def _code(strategy: str, event: Any) -> int:
    """What ReportRecoverStatus says of a strategy that has failed."""
    if getattr(event, "kind", "") == "lost-state":
        return words.Code.CLIENT_ERROR
    return words.Code.RECOVERABLE if strategy == words.RETRY else words.Code.UNRECOVERABLE
