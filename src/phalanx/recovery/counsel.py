"""An agent's side of the conversation with a controller: events in, what to say and do out. Pure.

The agent says what broke and what it could do about it; the controller's word comes within a
bound, or the agent decides alone. What was decided alone is final for that round: the
controller's later signals are answered with what was done. ``agent/counsel.py`` carries the
words over the wire, the agent carries out the decisions.

Times are seconds of one monotonic clock. Every state has an answer to every event, and the one
wait a bound (``State.until``): send a ``Tick`` when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from phalanx.recovery import words
from phalanx.recovery.model import Received
from phalanx.recovery.words import Code

END = "end"
"""The decision to end the job for good (``killMaster``)."""

ONE_NODE = frozenset({words.RETRY, words.IN_PLACE, words.DUMP, words.EXIT})
"""What a job on one node can carry out."""


class Phase(Enum):
    """``IDLE``: nothing is open. ``ASKING``: a decision is awaited. ``ACTING``: one is being
    carried out."""

    IDLE = "idle"
    ASKING = "asking"
    ACTING = "acting"


@dataclass(frozen=True)
class Trouble:
    """A fault of a rank: its type on the wire, and which process of the rank it was."""

    rank: int
    kind: int = words.NORMAL
    incarnation: int = 0
    reason: str = ""


# --- events ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Linked:
    """The subscription stands, or no longer does."""

    up: bool


@dataclass(frozen=True)
class Faulted:
    """Something broke and a decision is needed; ``offer``: the strategies that are possible."""

    troubles: tuple[Trouble, ...]
    offer: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """What was decided did not work; ``code`` is that of ReportRecoverStatus."""

    code: int
    why: str
    offer: tuple[str, ...]


@dataclass(frozen=True)
class Stopped:
    """The workers have left their step, or cannot be waited for any longer."""

    offer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """What was decided has been carried out, to the first good step."""


@dataclass(frozen=True)
class TookAlone:
    """The answer to ``DecideAlone``: what the agent does now."""

    strategy: str


@dataclass(frozen=True)
class NoChoice:
    """Something broke, or did not work, and there is only one thing to do about it, which is
    being done. ``code``: what is reported of a strategy that was under way."""

    troubles: tuple[Trouble, ...]
    strategy: str
    why: str
    code: int = Code.UNRECOVERABLE


@dataclass(frozen=True)
class Heard:
    signal: Received


@dataclass(frozen=True)
class Tick:
    """The clock has passed ``until`` (or not: an early tick changes nothing)."""


Event = Linked | Faulted | Failed | Stopped | Done | TookAlone | NoChoice | Heard | Tick

# --- effects: to be said to the controller -----------------------------------------------


@dataclass(frozen=True)
class SayFault:
    troubles: tuple[Trouble, ...]


@dataclass(frozen=True)
class SayStopped:
    signal: Received
    info: str = ""


@dataclass(frozen=True)
class SayOffer:
    signal: Received
    names: tuple[str, ...]


@dataclass(frozen=True)
class SayStatus:
    signal: Received
    code: int
    info: str = ""


# --- effects: to be done by the agent ------------------------------------------------------


@dataclass(frozen=True)
class Halt:
    """Have the workers leave their step, then say ``Stopped``."""


@dataclass(frozen=True)
class Decided:
    """The controller's word: retry, recover-in-place, recover, dump, exit or ``END``.

    ``ranks`` are all that it is about; ``foreign`` those of them that somebody else has
    reported, whose processes may still be there.
    """

    strategy: str
    ranks: frozenset[int]
    why: str
    foreign: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DecideAlone:
    """No word of the controller: decide, and answer with ``TookAlone``."""

    why: str


Effect = SayFault | SayStopped | SayOffer | SayStatus | Halt | Decided | DecideAlone


@dataclass(frozen=True)
class State:
    """Where the conversation stands. ``timeout``: seconds a decision may take."""

    timeout: float = 2.0
    able: frozenset[str] = ONE_NODE
    up: bool | None = None  # None: the first try is under way
    phase: Phase = Phase.IDLE
    until: float | None = None
    ranks: frozenset[int] = frozenset()  # those that the agent has reported
    offer: tuple[str, ...] = ()
    stop: Received | None = None  # a stop that waits for the workers
    acting: Received | None = None  # the signal whose outcome is owed
    alone: str = ""  # what was done without the controller, which does not know yet
    unsaid: tuple[Trouble, ...] = ()  # faults it has not been told of

    @property
    def asking(self) -> bool:
        return self.phase is Phase.ASKING


def advance(state: State, event: Event, now: float) -> tuple[State, list[Effect]]:
    """One step. Total: every event has an answer in every state."""
    if isinstance(event, Heard):
        return _heard(state, event.signal, now)
    if isinstance(event, Linked):
        return _linked(state, event.up)
    if isinstance(event, Faulted):
        return _faulted(state, event, now)
    if isinstance(event, Failed):
        return _failed(state, event, now)
    if isinstance(event, Stopped):
        return _stopped(state, event)
    if isinstance(event, Done):
        return _done(state)
    if isinstance(event, TookAlone):
        return replace(state, alone=event.strategy), []
    if isinstance(event, NoChoice):
        return _no_choice(state, event)
    if state.asking and state.until is not None and now >= state.until:
        # who does not answer is not waited for again until something is heard of it
        return _go_alone(replace(state, up=False), f"no word within {state.timeout:g} s")
    return state, []


def wire_offer(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which a client offers these strategies; exit is always possible."""
    wire = [words.RECOVER if n == words.IN_PLACE else n for n in names]
    return tuple(dict.fromkeys([*wire, words.EXIT]))


def _linked(state: State, up: bool) -> tuple[State, list[Effect]]:
    state = replace(state, up=up)
    if up and state.unsaid:
        return replace(state, unsaid=()), [SayFault(state.unsaid)]
    return state, []


def _say(state: State, troubles: tuple[Trouble, ...]) -> tuple[State, list[Effect]]:
    if not troubles or state.up:
        return state, [SayFault(troubles)] if troubles else []
    # told together once somebody listens: one episode, not many
    newest = {(t.rank, t.kind): t for t in (*state.unsaid, *troubles)}
    return replace(state, unsaid=tuple(newest.values())), []


def _faulted(state: State, event: Faulted, now: float) -> tuple[State, list[Effect]]:
    state, effects = _say(state, event.troubles)
    ranks = state.ranks | frozenset(t.rank for t in event.troubles)
    state = replace(state, ranks=ranks, offer=event.offer, acting=None)
    if state.asking:  # one more while the first is being decided
        return state, effects
    if state.up is False:
        state, more = _go_alone(state, "it cannot be reached")
        return state, effects + more
    return replace(state, phase=Phase.ASKING, until=now + state.timeout, alone=""), effects


def _go_alone(state: State, why: str) -> tuple[State, list[Effect]]:
    effects: list[Effect] = [DecideAlone(why)]
    if state.stop is not None:
        effects.append(SayStopped(state.stop, "decided without the controller"))
    return replace(state, phase=Phase.ACTING, until=None, stop=None, acting=None), effects


def _no_choice(state: State, event: NoChoice) -> tuple[State, list[Effect]]:
    effects: list[Effect] = []
    if state.acting is not None:
        effects.append(SayStatus(state.acting, event.code, event.why))
    else:
        state, effects = _say(state, event.troubles)
    if state.stop is not None:
        effects.append(SayStopped(state.stop, event.why))
    state = replace(
        state, phase=Phase.ACTING, until=None, stop=None, acting=None, alone=event.strategy
    )
    return state, effects


def _failed(state: State, event: Failed, now: float) -> tuple[State, list[Effect]]:
    owed = state.acting
    if owed is None:
        # Decided alone, and what comes next is too.
        return _go_alone(state, "this round was decided without it")
    state = replace(state, acting=None, offer=event.offer)
    status: list[Effect] = [SayStatus(owed, event.code, event.why)]
    if state.up is False:
        state, more = _go_alone(state, "it cannot be reached")
        return state, status + more
    return replace(state, phase=Phase.ASKING, until=now + state.timeout), status


def _stopped(state: State, event: Stopped) -> tuple[State, list[Effect]]:
    stop = state.stop
    if stop is None:
        return state, []
    offer = event.offer or state.offer
    return replace(state, stop=None, offer=offer), [SayStopped(stop)]


def _done(state: State) -> tuple[State, list[Effect]]:
    owed = state.acting
    state = replace(
        state,
        phase=Phase.IDLE,
        until=None,
        acting=None,
        ranks=frozenset(),
        offer=(),
        stop=None,
    )
    return state, [SayStatus(owed, Code.OK)] if owed is not None else []


def _heard(state: State, signal: Received, now: float) -> tuple[State, list[Effect]]:
    state, effects = _linked(state, True)
    state, more = _take(state, signal, now)
    return state, effects + more


def _take(state: State, signal: Received, now: float) -> tuple[State, list[Effect]]:
    kind = signal.signal
    if kind == words.KILL_MASTER:
        state = replace(state, phase=Phase.ACTING, until=None, stop=None, acting=None, alone="")
        return state, [Decided(END, frozenset(), signal.reason)]
    if kind == words.STOP_TRAIN:
        return _told_to_stop(state, signal, now)
    if kind == words.GLOBAL_FAULT:
        if state.asking:
            return state, [SayOffer(signal, wire_offer(state.offer))]
        return _answer_alone(state, signal)
    if kind in (words.CHANGE_STRATEGY, words.SAVE_AND_EXIT):
        return _told_what(state, signal)
    if signal.report_within:
        why = f"this agent does not do {kind} {' '.join(signal.actions)}".strip()
        return state, [SayStatus(signal, Code.UNRECOVERABLE, why)]
    return state, []


def _told_to_stop(state: State, signal: Received, now: float) -> tuple[State, list[Effect]]:
    if state.alone and not state.asking:
        return state, [SayStopped(signal, f"done without the controller: {state.alone}")]
    # how long a pause may last is the controller's to say; any other stop is bounded by us
    bound = state.timeout
    if words.A_PAUSE_TRAIN in signal.actions:
        bound = float(signal.timeout or 600)
    until = state.until if state.asking and state.until is not None else now + bound
    state = replace(state, phase=Phase.ASKING, until=until, stop=signal, acting=None, alone="")
    return state, [Halt()]


def _told_what(state: State, signal: Received) -> tuple[State, list[Effect]]:
    strategy = _strategy(signal)
    about = frozenset(signal.ranks)
    if state.acting is not None and signal.key == state.acting.key:
        return state, []
    elsewhere = bool(about and state.ranks and about.isdisjoint(state.ranks))
    if not state.asking and (state.alone or state.phase is Phase.IDLE):
        if strategy == words.DUMP and signal.signal == words.SAVE_AND_EXIT and not state.alone:
            pass  # the one order that comes without a stop
        else:
            return _answer_alone(state, signal)
    elif state.alone and elsewhere:
        return _answer_alone(state, signal)
    if strategy not in state.able:
        why = f"this job cannot do {strategy}: it runs on one node"
        return state, [SayStatus(signal, Code.RECOVERABLE, why)]
    state = replace(state, phase=Phase.ACTING, until=None, stop=None, acting=signal)
    why = signal.reason or strategy
    return state, [Decided(strategy, state.ranks | about, why, about - state.ranks)]


def _strategy(signal: Received) -> str:
    """The strategy in the words of the ladder."""
    if signal.signal == words.SAVE_AND_EXIT:
        return words.DUMP
    if signal.strategy == words.RECOVER and signal.in_place:
        return words.IN_PLACE
    if signal.strategy == words.CONTINUE:
        return words.RETRY  # out of a pause: the step is done again
    return signal.strategy


def _answer_alone(state: State, signal: Received) -> tuple[State, list[Effect]]:
    """A signal about something that is over: it is answered with what was done.

    Without anything done here it is about a process before this one, after whose end all
    workers were started anew.
    """
    did = state.alone or words.EXIT
    info = f"done without the controller: {did}"
    if signal.signal == words.GLOBAL_FAULT:
        return state, [SayOffer(signal, wire_offer((did,)))]
    strategy = _strategy(signal)
    code = Code.OK if strategy == did else Code.CLIENT_ERROR
    if code == Code.OK or strategy == words.EXIT:
        state = replace(state, alone="")
        code = Code.OK
    return state, [SayStatus(signal, code, info)]
