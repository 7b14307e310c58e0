"""Runs the pure machine of one job: what nodes say goes in, what they are told comes out.

On one asyncio loop, never from another thread. Knows nothing of the network: a connection is a
:class:`Chair`, with a function that tells its node something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.rendezvous import model

log = logging.getLogger("phalanx.coordinator")

_REMEMBERED = 100  # nodes that are gone


class Machine(Protocol):
    """``phalanx.rendezvous.job``, or a stand-in for it."""

    def advance(
        self, state: Any, event: model.Event, now: float, options: model.Options, /
    ) -> tuple[Any, Sequence[model.Effect]]: ...

    def next_deadline(self, state: Any, /) -> float | None: ...


class Chair:
    """One connection of one node: ``tell`` says something to it, ``dismiss`` ends it with a
    reason. Both are called on the hub's loop and return at once."""

    __slots__ = ("dismiss", "heard", "node", "tell")

    def __init__(
        self, node: str, tell: Callable[[Any], object], dismiss: Callable[[str], object]
    ) -> None:
        self.node = node
        self.tell = tell
        self.dismiss = dismiss
        self.heard = time.monotonic()  # the last sign of life; inf: it needs none, it is ours


class CommitFailed(Exception):
    """What was agreed could not be written; the text is a clause that says why."""


@dataclass(frozen=True)
class Facts:
    """What must outlive a coordinator, where there is a place for it."""

    term: int = 0
    generation: int = 0
    attempt: int = 0
    verdict: model.Verdict | None = None


def facts_of(before: Facts, effects: Sequence[model.Effect]) -> Facts:
    """What holds once these effects have been carried out."""
    for effect in effects:
        what = effect.what if isinstance(effect, model.To) else None
        if isinstance(what, model.Over):
            return replace(before, verdict=what.verdict)
        if isinstance(what, model.Assign | model.Regroup):
            a = what.assignment
            if a.generation > before.generation:
                before = replace(before, generation=a.generation, attempt=a.attempt)
    return before


def make_room(nodes: int) -> None:
    """Let this process have the descriptors that so many connections take, if it may."""
    wanted = 4 * nodes + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def agree(theirs: model.Options | None, ours: model.Options) -> str:
    """Why an agent with these options cannot take part; "": it can."""
    if theirs is not None and (theirs.least, theirs.most) != (ours.least, ours.most):
        return (
            f"this agent was started with --nnodes {theirs.least}:{theirs.most}, the job with "
            f"{ours.least}:{ours.most}: all agents of a job must agree"
        )
    return ""


class Hub:
    """The machine, its clock, and who is connected.

    ``record(kind, data)`` gets the machine's notes. ``commit(facts)`` runs before anybody is told
    of a new generation or of the end; if it raises CommitFailed nobody is told, the hub stops,
    and ``on_failed(reason)`` is called: a coordinator that cannot write is none.
    ``probe(node)`` asks whether its agent has ended: True; False: it answers; None: no word of it.
    ``silence``: how many seconds one that answers has to come back.
    """

    def __init__(
        self,
        machine: Machine,
        state: Any,
        options: model.Options,
        *,
        term: int = 1,
        record: Callable[[str, Mapping[str, object]], object] | None = None,
        commit: Callable[[Facts], object] | None = None,
        on_failed: Callable[[str], object] | None = None,
        probe: Callable[[model.Node], Awaitable[bool | None]] | None = None,
        silence: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = machine
        self.state = state
        self.options = options
        self.term = term
        self.generation = 0
        self.attempt = 0
        self.verdict: model.Verdict | None = None
        self.chairs: dict[str, Chair] = {}
        self.nodes: dict[str, model.Node] = {}  # all that have joined, as they said
        self.assigned: dict[str, model.Assignment] = {}
        self.progress: dict[str, tuple[int, float]] = {}
        self.parked: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.stopped = False
        self.empty = asyncio.Event()
        self.empty.set()
        self._record = record
        self._commit = commit
        self._on_failed = on_failed
        self._probe = probe
        self._silence = silence
        self._away: dict[str, asyncio.Task[None]] = {}  # whose connection has closed just now
        self._epoch = getattr(state, "epoch", 0)
        self.facts = Facts(term=term)
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._notes: list[dict[str, Any]] = []
        self.phases: dict[str, float] = {}  # seconds in each, those that have ended
        self._phase = getattr(state, "phase", None)
        self._phase_since = clock()
        make_room(options.most + options.spares)
        self._arm()

    # --- connections ------------------------------------------------------------------------

    def sit(self, chair: Chair) -> None:
        """This node is connected; an older connection of it is dismissed and counts no more."""
        old = self.chairs.get(chair.node)
        self.chairs[chair.node] = chair
        self.empty.clear()
        self.gone.pop(chair.node, None)
        asking = self._away.pop(chair.node, None)
        if asking is not None:  # it has never been away, its Join will say
            asking.cancel()
        if old is not None:
            self.counts["replaced"] += 1
            old.dismiss("the same agent has connected again")

    def hears(self, chair: Chair, saying: model.Saying) -> None:
        """The node of this connection says something; an old connection is not listened to."""
        if self.chairs.get(chair.node) is not chair:
            return
        self.counts["said"] += 1
        if type(saying) is model.Progress:
            self.progress[chair.node] = (saying.step, self._clock())
        elif type(saying) is model.Join:
            self.nodes[chair.node] = saying.node
            if saying.held is not None:
                self._runs(chair.node, saying.held)
        elif type(saying) is model.Leave:
            self.gone[chair.node] = saying.reason or "left"
        self.feed(model.Said(chair.node, saying))

    def rises(self, chair: Chair, how: str, *, silent: bool = False) -> None:
        """The connection has ended; ``how`` is a clause. Nothing happens for an old one.

        ``silent``: it may live beyond a cut. Else it is asked: only where nobody listens any more
        its agent has ended. One that answers is given the time to come back.
        """
        node = chair.node
        if self.chairs.get(node) is not chair:
            return
        del self.chairs[node]
        if not self.chairs:
            self.empty.set()
        left = node in self.gone
        self._is_gone(node, how)
        known = self.nodes.get(node)
        if left or chair.heard == math.inf:
            self.feed(model.Lost(node, how))
        elif silent or self._probe is None or known is None or not known.endpoint:
            self.feed(model.Lost(node, how, certain=False))
        elif not self.stopped:
            self.feed(model.Away(node))
            self._away[node] = asyncio.create_task(self._ask_after(known, how))

    async def _ask_after(self, node: model.Node, how: str) -> None:
        """What has become of a node whose connection closed."""
        assert self._probe is not None
        ended: bool | None = None
        try:
            ended = await self._probe(node)
            if ended is False:
                await asyncio.sleep(self._silence)
                how = f"{how}, and it did not come back for {self._silence:g} s"
        finally:
            if self._away.get(node.id) is asyncio.current_task():
                del self._away[node.id]
                self.feed(model.Lost(node.id, how, certain=ended is True))

    def _is_gone(self, node: str, how: str) -> None:
        """For the status; of those that are gone only so many are remembered."""
        self.gone.setdefault(node, how)
        while len(self.gone) > _REMEMBERED:
            oldest = next(iter(self.gone))
            del self.gone[oldest]
            if oldest in self.chairs or oldest in self._away:
                continue
            for table in (self.nodes, self.assigned, self.progress, self.parked):
                table.pop(oldest, None)

    def sweep(self, silence: float) -> None:
        """Those that gave no sign of life for so many seconds are lost."""
        before = self._clock() - silence
        for chair in [c for c in self.chairs.values() if c.heard < before]:
            how = f"gave no sign of life for {silence:g} s"
            self.counts["silent"] += 1
            self.rises(chair, how, silent=True)
            chair.dismiss(f"it {how}")

    def all_quiet(self, silence: float) -> bool:
        """Whether somebody was silent for so long, and nobody has been heard lately: then it is
        rather this process that is cut off."""
        heard = [chair.heard for chair in self.chairs.values()]
        now = self._clock()
        return bool(heard) and min(heard) < now - silence and max(heard) < now - 0.6 * silence

    def spare(self) -> None:
        """This process itself did not run for a while: nobody's silence counts so far."""
        now = self._clock()
        for chair in self.chairs.values():
            chair.heard = max(chair.heard, now)

    # --- the machine ------------------------------------------------------------------------

    def feed(self, event: model.Event) -> None:
        """One event; its effects are carried out before this returns."""
        if self.stopped:
            return
        now = self._clock()
        try:
            state, effects = self.machine.advance(self.state, event, now, self.options)
        except Exception:
            # A total function does not raise; should it, the others must not pay for it.
            self.counts["errors"] += 1
            log.exception("dropped %s", type(event).__name__)
            return
        self._see_phase(now, getattr(state, "phase", None))
        self.state = state
        anew = getattr(state, "epoch", 0) != self._epoch
        if anew:
            self._begin_epoch()
        if self._commit is not None and not self._committed(effects, anew):
            return
        for effect in effects:
            if isinstance(effect, model.To):
                self._tell(effect)
            else:
                self._note(effect)
        # an earlier epoch's verdict is not this one's
        self.verdict = getattr(state, "verdict", self.verdict)
        self._arm()

    def _begin_epoch(self) -> None:
        """The job was queued again: what was agreed before is no more."""
        self._epoch = self.state.epoch
        self.generation = self.attempt = 0
        for table in (self.assigned, self.progress, self.parked):
            table.clear()
        self.facts = Facts(term=self.term)

    def _see_phase(self, now: float, phase: Any) -> None:
        """How long each phase of the machine lasts, for the events and the metrics."""
        if phase is self._phase:
            return
        if self._phase is not None:
            seconds = now - self._phase_since
            name = str(self._phase.value)
            self.phases[name] = self.phases.get(name, 0.0) + seconds
            data = {"phase": name, "seconds": round(seconds, 4), "next": str(phase.value)}
            self._note(model.Note("coordinator_phase", data))
        self._phase, self._phase_since = phase, now

    def _committed(self, effects: Sequence[model.Effect], anew: bool) -> bool:
        """Whether what the effects tell of is where it lasts."""
        facts = facts_of(self.facts, effects)
        # an earlier epoch's verdict is not this one's
        facts = replace(facts, verdict=getattr(self.state, "verdict", facts.verdict))
        if facts == self.facts and not anew:
            return True
        assert self._commit is not None
        try:
            self._commit(facts)
        except CommitFailed as error:
            log.error("the coordinator stops: %s", error)
            self.stop(f"the coordinator could not write: {error}")
            if self._on_failed is not None:
                self._on_failed(str(error))
            return False
        self.facts = facts
        return True

    def restart(self, state: Any, term: int) -> None:
        """Forget what is known; nobody counts as lost, and all are asked to come again."""
        self.state, self.term = state, term
        self._ask_nobody()
        chairs, self.chairs = self.chairs, {}
        for chair in chairs.values():
            self._is_gone(chair.node, "the coordinator was cut off")
            chair.dismiss("the coordinator was cut off and begins again")
        self.empty.set()
        self._arm()

    def _tell(self, effect: model.To) -> None:
        what, node = effect.what, effect.node
        if isinstance(what, model.Assign | model.Regroup):
            self._runs(node, what.assignment)
            self.parked.pop(node, None)
        elif type(what) is model.Park:
            self.parked[node] = what.reason
        elif type(what) is model.Over:
            self.verdict = what.verdict
        chair = self.chairs.get(node)
        if chair is not None:  # else it hears it when it joins again
            self.counts["told"] += 1
            chair.tell(what)

    def _runs(self, node: str, assignment: model.Assignment) -> None:
        self.assigned[node] = assignment
        self.generation = max(self.generation, assignment.generation)
        self.attempt = max(self.attempt, assignment.attempt)

    def _note(self, note: model.Note) -> None:
        self.counts[f"note {note.kind}"] += 1
        self._notes.append({"kind": note.kind, **note.data})
        del self._notes[:-50]
        if self._record is not None:
            self._record(note.kind, note.data)

    def _arm(self) -> None:
        due = None if self.stopped else self.machine.next_deadline(self.state)
        if due == self._due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            # Never at once: a deadline that a tick does not move must not spin.
            delay = max(due - self._clock(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer, self._due = None, None
        self.feed(model.Tick())

    def stop(self, reason: str) -> None:
        """No more events; all connections are dismissed."""
        self.stopped = True
        self._ask_nobody()
        self._arm()
        for chair in list(self.chairs.values()):
            chair.dismiss(reason)
        self.chairs.clear()
        self.empty.set()

    def _ask_nobody(self) -> None:
        away, self._away = self._away, {}
        for asking in away.values():
            asking.cancel()

    # --- for a person -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What ``phalanx status`` shows; JSON. Seconds are since the event."""
        now = self._clock()
        nodes = []
        for name, node in self.nodes.items():
            seat = self.assigned.get(name)
            current = (
                seat is not None and seat.generation == self.generation and name in self.chairs
            )
            step = self.progress.get(name)
            nodes.append(
                {
                    "id": name,
                    "host": node.host,
                    "address": node.address,
                    "endpoint": node.endpoint,
                    "connected": name in self.chairs,
                    "spare": node.spare,
                    "ranks": list(seat.seat.ranks) if current and seat else [],
                    "group": seat.group if current and seat else None,
                    "step": step[0] if step else None,
                    "progress_age": round(now - step[1], 3) if step else None,
                    "waiting": self.parked.get(name, ""),
                    "gone": "" if name in self.chairs else self.gone.get(name, ""),
                }
            )
        nodes.sort(key=lambda n: (n["group"] is None, n["group"] or 0, str(n["id"])))
        one = max(self.assigned.values(), key=lambda a: a.generation, default=None)
        steps = [s for s, _ in self.progress.values()]
        ages = [now - at for _, at in self.progress.values()]
        return {
            "term": self.term,
            "generation": self.generation,
            "attempt": self.attempt,
            "restarts_left": one.restarts_left if one else None,
            "world": one.world if one else 0,
            "store": one.store if one else "",
            "least": self.options.least,
            "most": self.options.most,
            "step": max(steps, default=None),
            "progress_age": round(min(ages), 3) if ages else None,
            "verdict": (
                None
                if self.verdict is None
                else {
                    "success": self.verdict.success,
                    "status": self.verdict.status,
                    "reason": self.verdict.reason,
                    "culprit": self.verdict.culprit,
                }
            ),
            "nodes": nodes,
            "counts": dict(self.counts),
            "phase": None if self._phase is None else str(self._phase.value),
            "phase_seconds": round(now - self._phase_since, 3),
            "phases": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "notes": self._notes[-10:],
        }
