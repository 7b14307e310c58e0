"""The recoveries of one job's workers: events in, a new state and effects out. Pure.

The agent feeds what it sees (deaths, messages of the workers, the clock) and carries out
the effects. Messages and their order are those of docs/training.md. A worker that never
said ``hello`` cannot be recovered in place, so for a plain program every fault ends in
``RestartGroup``.

Times are seconds of one monotonic clock. Every state has an answer to every event, and
every wait a deadline: ``next_deadline`` says when to send the next ``Tick``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from phalanx.recovery import ending, ladder
from phalanx.recovery.repair import Holding

ANY_RESTARTS = 1 << 30  # those of the group are counted elsewhere
KEEP_PROCESSES = frozenset(
    {ladder.Strategy.RETRY, ladder.Strategy.IN_PLACE, ladder.Strategy.ELASTIC}
)
"""The strategies that leave the survivors their processes."""


@dataclass(frozen=True)
class Bounds:
    """How long each wait may last (seconds), and how many rounds an episode may have.

    What may be tried how often is the ladder's ``policy``; restarts of the group are
    counted by the agent.
    """

    left: float = 10.0
    built: float = 60.0
    good: float = 120.0
    peer: float = 1.0
    dying: float = 20.0  # from the word of its exception to the end of the process
    rounds: int = 8
    policy: ladder.Policy = field(
        default_factory=lambda: ladder.Policy(
            enabled=frozenset(ladder.Strategy), restarts=ANY_RESTARTS
        )
    )
    ending: ending.Bounds | None = None  # None: a group that is given up is given up at once


# --- events ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The worker of ``rank`` is in its loop; ``waiting``: a replacement, built; ``dumps``: it
    could write a last checkpoint; ``resizes``: it can go on in a world of another size.
    """

    rank: int
    generation: int
    waiting: bool = False
    dumps: bool = False
    resizes: bool = False


@dataclass(frozen=True)
class Died:
    """The process of ``rank`` is dead; ``how`` is a clause for a person; ``hung``: we ended it."""

    rank: int
    how: str
    step: int | None = None
    hung: bool = False


@dataclass(frozen=True)
class Gone:
    """The processes of ``ranks`` are dead at once: their node is lost. ``how``: as a sentence."""

    ranks: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Resized:
    """The job has other places for workers than before: nodes are lost that nobody replaces, or
    more have come. ``ranks``: for each rank from now on the one that its process has now, None
    where a process is to be started. ``how``: why, as a sentence; ``cause``: with what follows.
    ``within``: seconds that the survivors have for the step that they finish before.
    """

    ranks: tuple[int | None, ...]
    how: str
    cause: str
    within: float = 0.0


@dataclass(frozen=True)
class Fault:
    """A ``fault`` message; the kinds are those of docs/training.md."""

    rank: int
    generation: int
    kind: str
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Left:
    """It has left its step and holds the state after ``step`` (see `repair.Holding`)."""

    rank: int
    generation: int
    step: int | None = None
    clean: bool = False
    shard: int = 0
    shards: int = 0


@dataclass(frozen=True)
class GoodStep:
    rank: int
    generation: int
    step: int
    report: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    rank: int


@dataclass(frozen=True)
class Dumped:
    """The answer to ``dump``; ``text``: why not, or where it is."""

    rank: int
    generation: int
    step: int
    commit: bool = False
    complete: bool = False
    text: str = ""


@dataclass(frozen=True)
class Tick:
    """The clock has passed a deadline (or not: an early tick changes nothing)."""


Event = Hello | Died | Gone | Resized | Fault | Left | GoodStep | Finished | Dumped | Tick

# --- effects --------------------------------------------------------------------------


@dataclass(frozen=True)
class Replace:
    """Start a new process for ``rank``, as a replacement of generation ``generation``."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Regroup:
    """A fresh store for ``generation``; ``leave`` to ``survivors``; ``join`` to all."""

    generation: int
    survivors: tuple[int, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Kill:
    """End this rank's process with SIGKILL: it is reported dead in turn."""

    rank: int
    why: str


@dataclass(frozen=True)
class GiveUp:
    """In place is not possible (any more); `RestartGroup` follows when the group has ended."""

    why: str


@dataclass(frozen=True)
class RestartGroup:
    """In place is not possible (any more): the whole group is to be started again, or, if
    ``final``, the job is to end. ``dumped``: the step that was written down first; ``words``:
    what there is to say of that.
    """

    why: str
    final: bool = False
    dumped: int | None = None
    words: str = ""


@dataclass(frozen=True)
class Recovered:
    """The episode is over: every rank has finished a step in ``generation``."""

    episode: Episode
    seconds: float


Effect = Replace | Regroup | Kill | GiveUp | RestartGroup | Recovered | ending.Effect

# --- state ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """What is known of the process that holds a rank."""

    alive: bool = True
    in_loop: bool = False
    finished: bool = False
    left: int = 0
    good: int = 0
    said: ladder.Fault | None = None  # the last fault it reported
    dying_by: float | None = None  # it said that it ends, with an exception
    dumps: bool = False
    resizes: bool = False
    holds: tuple[int, Holding, int] | None = None  # generation it left; what; of how many shards


@dataclass(frozen=True)
class Episode:
    """One recovery. ``phases`` are (name, seconds since it began), in order of time."""

    number: int
    began: float
    cause: str
    strategy: str
    generation: int
    round: int = 1
    replaced: frozenset[int] = frozenset()
    passed_over: tuple[tuple[str, str], ...] = ()  # cheaper strategies, and why not
    phases: tuple[tuple[str, float], ...] = ()
    reports: tuple[tuple[int, Mapping[str, object]], ...] = ()
    left_by: float | None = None
    built_by: float | None = None
    good_by: float | None = None


@dataclass(frozen=True)
class State:
    """The whole job as the agent sees it. ``world`` ranks, all started in ``generation``."""

    world: int
    generation: int = 1
    members: tuple[Member, ...] = ()
    episode: Episode | None = None
    episodes: int = 0
    replaced: int = 0
    suspicion: tuple[float, Fault] | None = None
    history: ladder.History = field(default_factory=ladder.History)
    over: str | None = None
    final: bool = False
    why: str = ""  # the reason for the end that is under way
    ending: ending.Ending | None = None

    @staticmethod
    def fresh(world: int, generation: int = 1, before: State | None = None) -> State:
        """A group just started whole; counts are carried over from ``before``."""
        members = tuple(Member() for _ in range(world))
        if before is None:
            return State(world, generation, members)
        return State(
            world,
            generation,
            members,
            episodes=before.episodes,
            replaced=before.replaced,
            history=before.history,
        )


def _with(state: State, rank: int, **changes: object) -> State:
    members = list(state.members)
    members[rank] = replace(members[rank], **changes)  # type: ignore[arg-type]
    return replace(state, members=tuple(members))


def next_deadline(state: State) -> float | None:
    """When the next Tick is due; None while nothing is waited for."""
    due = []
    if state.ending is not None:
        return None if state.over is not None else state.ending.by
    if state.over is None:
        if state.suspicion:
            due.append(state.suspicion[0])
        due += [m.dying_by for m in state.members if m.alive and m.dying_by is not None]
        if state.episode:
            e = state.episode
            due += [t for t in (e.left_by, e.built_by, e.good_by) if t is not None]
    return min(due) if due else None


def able(state: State) -> bool:
    """Whether every living worker can leave its step and join again."""
    building = state.episode.replaced if state.episode else frozenset()
    return not any(m.finished for m in state.members) and all(
        m.in_loop or rank in building for rank, m in enumerate(state.members) if m.alive
    )


def _give_up(
    state: State,
    bounds: Bounds,
    now: float,
    why: str,
    *,
    dump: bool = False,
    final: bool = False,
    blamed: frozenset[int] = frozenset(),
) -> tuple[State, list[Effect]]:
    """End the group; with ``dump`` what it holds is written down first."""
    if bounds.ending is None:
        over = RestartGroup(why, final)
        return replace(state, suspicion=None, final=final, why=why, over=why), [over]
    living = {r for r, m in enumerate(state.members) if m.alive and m.in_loop and not m.finished}
    able = {r for r in living if state.members[r].dumps} if dump else set()
    building = state.episode.replaced if state.episode else frozenset()
    held = [
        m.holds[1:] for m in state.members if m.holds is not None and m.holds[0] == state.generation
    ]
    # a replacement that has made no step yet has nothing, and may not answer
    expected = {r for r in able if r not in building or state.members[r].good == state.generation}
    now_ending, effects = ending.begin(
        state.generation,
        able=able,
        expected=expected,
        blamed=blamed & living,
        held=held,
        now=now,
        bounds=bounds.ending,
    )
    state = replace(state, suspicion=None, final=final)
    ends = now_ending.phase is ending.Phase.OVER
    return _end(state, now_ending, [*([] if ends else [GiveUp(why)]), *effects], why)


def _end(
    state: State, now: ending.Ending, effects: list[Effect], why: str
) -> tuple[State, list[Effect]]:
    """With the next stage of the end; the last one gives the group up."""
    state = replace(state, ending=now, why=why)
    if now.phase is not ending.Phase.OVER:
        return state, effects
    over = RestartGroup(why, state.final, now.dumped, now.words)
    return replace(state, over=why), [*effects, over]


def _ending(
    state: State, stage: ending.Ending, event: Event, now: float, bounds: Bounds
) -> tuple[State, list[Effect]]:
    """An event while the group is brought to its end."""
    assert bounds.ending is not None
    if isinstance(event, Tick):
        stage, effects = ending.tick(stage, now, bounds.ending)
    elif isinstance(event, (Gone, Resized)):
        effects = []
        for rank in event.ranks if isinstance(event, Gone) else _left_out(state, event):
            state = _with(state, rank, alive=False)
            stage, more = ending.died(stage, rank, now, bounds.ending)
            effects += more
    elif isinstance(event, (Died, Finished)):
        state = _with(state, event.rank, alive=isinstance(event, Finished))
        stage, effects = ending.died(stage, event.rank, now, bounds.ending)
    elif isinstance(event, Left) and event.generation == state.generation:
        stage, effects = ending.left(stage, _holding(event), event.shards, now, bounds.ending)
    elif isinstance(event, Dumped) and event.generation == state.generation:
        stage, effects = ending.dumped(
            stage,
            event.rank,
            event.step,
            event.commit,
            event.complete,
            event.text,
            now,
            bounds.ending,
        )
    else:
        return state, []
    return _end(state, stage, list(effects), state.why)


def _left_out(state: State, event: Resized) -> list[int]:
    return [rank for rank in range(state.world) if rank not in event.ranks]


def _resized(
    state: State, event: Resized, now: float, bounds: Bounds
) -> tuple[State, list[Effect]]:
    """The survivors go on with their processes, under their new ranks."""
    lost = tuple(
        ladder.Fault(rank, ladder.Kind.DEATH, None, event.how) for rank in _left_out(state, event)
    )
    members = tuple(
        Member(alive=False) if old is None else state.members[old] for old in event.ranks
    )
    if state.episode is not None:
        building = frozenset(
            new for new, old in enumerate(event.ranks) if old in state.episode.replaced
        )
        state = replace(state, episode=replace(state.episode, replaced=building, reports=()))
    state = replace(state, world=len(members), members=members, suspicion=None)
    return _round(state, bounds, now, event.cause, lost, resized=True, within=event.within)


def resizes(state: State, gone: Collection[int] = ()) -> bool:
    """Whether every living worker, but for those ``gone``, can go on in a world of another size."""
    for rank in gone:
        state = _with(state, rank, alive=False)
    return able(state) and all(m.resizes for m in state.members if m.alive and m.in_loop)


def _holding(event: Left) -> Holding:
    return Holding(event.rank, event.shard, event.step, event.clean)


def _round(
    state: State,
    bounds: Bounds,
    now: float,
    cause: str,
    faults: tuple[ladder.Fault, ...],
    blamed: frozenset[int] = frozenset(),
    *,
    resized: bool = False,
    within: float = 0.0,
) -> tuple[State, list[Effect]]:
    """Begin an episode, or its next round, for all that is dead now.

    ``blamed``: living ranks with a fault of their own. A new try that did not cure it is
    followed by a new process for them. ``resized``: as the world is now (without faults, since
    somebody has come).
    """
    if state.episode and state.episode.round >= bounds.rounds:
        why = f"{state.episode.round} rounds did not end in a good step"
        return _give_up(state, bounds, now, why, dump=True, blamed=blamed)
    decision = ladder.choose(
        bounds.policy,
        state.history,
        ladder.Situation(
            faults=faults,
            living=sum(m.alive for m in state.members),
            able=able(state),
            dump_possible=any(m.dumps for m in state.members if m.alive),
            homeless=resized,
            resizes=resizes(state),
        ),
    )
    state = replace(state, history=ladder.after(state.history, decision, faults))
    over = tuple((rung.value, why) for rung, why in decision.passed_over)
    if decision.strategy not in KEEP_PROCESSES:
        final = (
            decision.strategy is ladder.Strategy.EXIT
            and ladder.Strategy.RESTART in bounds.policy.enabled
        )
        why = (
            decision.why
            if final or not over
            else "; ".join(f"{rung}: {text}" for rung, text in over)
        )
        return _give_up(
            state, bounds, now, why, dump=decision.dump_first, final=final, blamed=blamed
        )
    generation = state.generation + 1
    doomed = blamed if decision.strategy is ladder.Strategy.IN_PLACE else frozenset()
    dead = [rank for rank, m in enumerate(state.members) if not m.alive or rank in doomed]
    survivors = tuple(r for r, m in enumerate(state.members) if r not in dead)
    strategy = decision.strategy.value
    before = state.episode
    if before is None:
        episode = Episode(state.episodes + 1, now, cause, strategy, generation, passed_over=over)
    else:
        episode = replace(
            before,
            strategy=strategy if resized or not before.replaced else before.strategy,
            passed_over=over,
            generation=generation,
            round=before.round + 1,
            reports=(),
        )
    replaced = (episode.replaced | set(dead)) if dead else episode.replaced
    waits_for_build = any(r in dead or not state.members[r].in_loop for r in replaced)
    episode = replace(
        episode,
        replaced=replaced,
        left_by=now + bounds.left + within,
        built_by=now + bounds.built if waits_for_build else None,
        good_by=now + bounds.good + within,
    )
    for rank in dead:
        state = _with(
            state, rank, alive=True, in_loop=False, left=generation, good=0, said=None, holds=None
        )
    for rank in replaced.difference(dead):
        if state.members[rank].good < state.generation:
            # still being built, or about to be let in: it has no step to leave
            state = _with(state, rank, left=generation)
    state = replace(
        state,
        generation=generation,
        episode=episode,
        episodes=episode.number,
        replaced=state.replaced + len(dead),
        suspicion=None,
    )
    why = "had the same fault again after new tries"
    effects: list[Effect] = [Kill(rank, why) for rank in sorted(doomed)]
    effects += [Replace(rank, generation) for rank in dead]
    effects.append(Regroup(generation, survivors, tuple(range(state.world))))
    return state, effects


def _phase(state: State, name: str, now: float) -> State:
    episode = state.episode
    assert episode is not None
    phases = tuple(p for p in episode.phases if p[0] != name)
    return replace(state, episode=replace(episode, phases=(*phases, (name, now - episode.began))))


def advance(
    state: State, event: Event, now: float, bounds: Bounds | None = None
) -> tuple[State, list[Effect]]:
    """One step of the machine.

    Raises:
        ValueError: the event names a rank that the job does not have.
    """
    bounds = bounds or Bounds()
    rank = getattr(event, "rank", 0)
    named_ranks: tuple[int | None, ...] = (rank,)
    if isinstance(event, (Gone, Resized)):
        named_ranks = event.ranks
    for named in named_ranks:
        if named is not None and not 0 <= named < state.world:
            raise ValueError(f"there is no rank {named}: the world has {state.world}")
    if state.over is not None:
        return state, []
    if state.ending is not None:
        return _ending(state, state.ending, event, now, bounds)
    if isinstance(event, Tick):
        return _tick(state, now, bounds)
    if isinstance(event, Died):
        if not state.members[rank].alive:
            return state, []
        said = state.members[rank].said
        kind = ladder.Kind.HANG if event.hung else ladder.Kind.DEATH
        if said and said.kind in (ladder.Kind.BUG, ladder.Kind.MEMORY):
            fault = said  # it told why before it ended
        else:
            fault = ladder.Fault(rank, kind, event.step, event.how)
        # one that broke off its loop with an exception has not finished
        state = _with(
            state, rank, alive=False, in_loop=False, said=None, dying_by=None, finished=False
        )
        return _round(state, bounds, now, f"rank {rank} {event.how}", (fault,))
    if isinstance(event, Gone):
        for rank in event.ranks:
            state = _with(state, rank, alive=False, in_loop=False, said=None, dying_by=None)
        lost = tuple(ladder.Fault(r, ladder.Kind.DEATH, None, event.how) for r in event.ranks)
        return _round(state, bounds, now, event.how, lost)
    if isinstance(event, Resized):
        return _resized(state, event, now, bounds)
    if isinstance(event, Fault):
        return _fault(state, event, now, bounds)
    if isinstance(event, Finished):
        state = _with(state, rank, finished=True)
        if state.episode and state.members[rank].good < state.generation:
            # the others would wait for its step until the last bound
            why = f"rank {rank} ended while the others waited for it"
            return _give_up(state, bounds, now, why)
        return state, []
    if isinstance(event, Hello):
        if event.generation > state.generation:
            return state, []
        state = _with(state, rank, in_loop=True, dumps=event.dumps, resizes=event.resizes)
        e = state.episode
        if e and e.built_by is not None and all(state.members[r].in_loop for r in e.replaced):
            state = replace(state, episode=replace(e, built_by=None))
            state = _phase(state, "replaced", now)
        return state, []
    if isinstance(event, Left):
        if event.generation == state.generation:
            state = _with(state, rank, holds=(event.generation, _holding(event), event.shards))
        # a leave of the generation before the one that is being formed
        if state.episode is None or event.generation + 1 < state.generation:
            return state, []
        state = _with(state, rank, left=state.generation)
        if all(m.left >= state.generation for m in state.members if m.alive):
            e = state.episode
            if e is not None and e.left_by is not None:
                state = replace(state, episode=replace(e, left_by=None))
            state = _phase(state, "left", now)
        return state, []
    if isinstance(event, Dumped):
        return state, []
    if event.generation != state.generation or state.episode is None:
        return state, []
    state = _with(state, rank, good=event.generation, left=event.generation, in_loop=True)
    episode = state.episode
    assert episode is not None
    reports = (*(r for r in episode.reports if r[0] != rank), (rank, event.report))
    state = replace(state, episode=replace(episode, reports=reports))
    if not all(m.good >= state.generation for m in state.members):
        return state, []
    state = _phase(state, "first step", now)
    state = replace(state, history=ladder.good_step(state.history, event.step))
    done = state.episode
    assert done is not None
    return replace(state, episode=None), [Recovered(done, now - done.began)]


def _fault(state: State, event: Fault, now: float, bounds: Bounds) -> tuple[State, list[Effect]]:
    if event.generation < state.generation or not state.members[event.rank].alive:
        return state, []  # of a generation that is already being left
    try:
        fault = ladder.Fault(event.rank, ladder.Kind(event.kind), event.step, event.text)
    except ValueError:
        return state, []  # a word of a later version: what it does next will tell
    if fault.kind in (ladder.Kind.BUG, ladder.Kind.MEMORY):
        # its process ends: Died follows
        return _with(state, event.rank, said=fault, dying_by=now + bounds.dying), []
    if fault.kind is ladder.Kind.LOST_STATE:
        why = f"rank {event.rank} found no state to go on from: {event.text}"
        return _give_up(state, bounds, now, why)
    if fault.kind is ladder.Kind.PEER:
        if state.suspicion is None:
            state = replace(state, suspicion=(now + bounds.peer, event))
        return state, []
    cause = f"rank {event.rank} reported a {event.kind} fault: {event.text}"
    if fault.kind is ladder.Kind.REGROUP:
        # to come together again may be tried like any other cure
        fault = replace(fault, kind=ladder.Kind.NETWORK)
        return _round(state, bounds, now, cause, (fault,))
    return _round(state, bounds, now, cause, (fault,), frozenset({event.rank}))


def _tick(state: State, now: float, bounds: Bounds) -> tuple[State, list[Effect]]:
    late = [r for r, m in enumerate(state.members) if m.alive and (m.dying_by or now + 1) <= now]
    if late:
        for rank in late:
            state = _with(state, rank, dying_by=None)
        why = f"did not end within {bounds.dying:g} s of its exception"
        return state, [Kill(rank, why) for rank in late]
    if state.suspicion and now >= state.suspicion[0]:
        dying = [m.dying_by for m in state.members if m.alive and m.dying_by is not None]
        if dying:  # that is the peer that was lost
            return replace(state, suspicion=(max(dying) + bounds.peer, state.suspicion[1])), []
        fault = state.suspicion[1]
        cause = f"rank {fault.rank} lost a peer that lives: {fault.text}"
        known = ladder.Fault(fault.rank, ladder.Kind.PEER, fault.step, fault.text)
        return _round(replace(state, suspicion=None), bounds, now, cause, (known,))
    e = state.episode
    if e is None:
        return state, []
    if e.left_by is not None and now >= e.left_by:
        late = [r for r, m in enumerate(state.members) if m.alive and m.left < state.generation]
        state = replace(state, episode=replace(e, left_by=None))
        return state, [Kill(r, f"did not leave its step within {bounds.left:g} s") for r in late]
    if e.built_by is not None and now >= e.built_by:
        late = [r for r in e.replaced if not state.members[r].in_loop]
        state = replace(state, episode=replace(e, built_by=None))
        return state, [Kill(r, f"was not ready within {bounds.built:g} s") for r in sorted(late)]
    if e.good_by is not None and now >= e.good_by:
        why = f"no good step within {bounds.good:g} s of the fault"
        return _give_up(state, bounds, now, why, dump=True)
    return state, []
