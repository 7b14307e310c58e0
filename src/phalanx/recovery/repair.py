"""Which state a job goes on with, and who hands it to whom.

Every rank of a new generation tells the others what it holds (`Holding`); every rank then
runs `choose` on the same list and so comes to the same `Plan`, with nobody in charge.

A *shard* is what one rank holds of model and optimizer. Ranks with the same shard are
replicas of each other: with data-parallel training all ranks have shard 0; on a hybrid mesh
the ranks along the replicate dimension share one; where every rank's part is its own there are
as many shards as ranks.

Steps are counted by the last one that is finished: -1 is the state before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Origin(str, Enum):
    """Where the state comes from, in the order in which it is looked for."""

    REPLICA = "replica"  # the memory of a rank that holds the same shard
    SNAPSHOT = "snapshot"  # shared memory that outlives its worker
    CHECKPOINT = "checkpoint"  # storage
    NONE = "none"  # nowhere


@dataclass(frozen=True)
class Holding:
    """What one rank holds."""

    rank: int
    shard: int
    step: int | None  # last finished step of the state in its memory; None: it has none
    clean: bool = True  # no optimizer update (or receipt of state) was broken off
    snapshots: frozenset[int] = frozenset()
    checkpoint: int | None = None  # the newest committed checkpoint this rank can read


@dataclass(frozen=True)
class Plan:
    """What everybody does. ``step`` is the last finished one; training goes on after it."""

    origin: Origin
    step: int
    #: ranks that fill their memory from their own snapshot first
    load: tuple[int, ...] = ()
    #: (source, receiver), ordered; every receiver is there once
    transfers: tuple[tuple[int, int], ...] = ()
    #: the furthest any rank had come
    furthest: int = -1
    why: str = ""

    @property
    def lost(self) -> int:
        """Finished steps that are done again."""
        return max(0, self.furthest - self.step)

    def source_of(self, rank: int) -> int | None:
        for source, receiver in self.transfers:
            if receiver == rank:
                return source
        return None

    def receivers_of(self, rank: int) -> tuple[int, ...]:
        return tuple(receiver for source, receiver in self.transfers if source == rank)


def choose(holdings: Sequence[Holding]) -> Plan:
    """The newest state that is whole: every shard has a holder of it.

    The newest of: a step that is in the memory of a clean holder for every shard; a snapshot
    that every shard has; a checkpoint that everybody can read. Of the same step in that order.
    None of them: `Origin.NONE`.

    :raises ValueError: no ranks, or one twice.
    """
    if not holdings:
        raise ValueError("no ranks to choose among")
    ordered = sorted(holdings, key=lambda holding: holding.rank)
    if len({holding.rank for holding in ordered}) != len(ordered):
        raise ValueError("a rank is listed twice")
    furthest = max(
        [h.step for h in ordered if h.step is not None]
        + [step for h in ordered for step in h.snapshots],
        default=-1,
    )
    shards = sorted({holding.shard for holding in ordered})

    held = {shard: {h.step for h in ordered if h.shard == shard and _good(h)} for shard in shards}
    in_memory = _newest(list(held.values()))
    kept = {
        shard: {step for h in ordered if h.shard == shard for step in h.snapshots}
        for shard in shards
    }
    in_snapshot = _newest(list(kept.values()))

    checkpoints = [h.checkpoint for h in ordered if h.checkpoint is not None]
    in_storage = min(checkpoints) if len(checkpoints) == len(ordered) else None

    found = (
        (Origin.REPLICA, in_memory),
        (Origin.SNAPSHOT, in_snapshot),
        (Origin.CHECKPOINT, in_storage),
    )
    best = max((step for _, step in found if step is not None), default=None)
    missing = [shard for shard in shards if not held[shard]]
    if in_memory is not None:
        lack = f"memory is whole at step {in_memory} only"
    elif missing:
        lack = f"no clean holder of shard {missing[0]}"
    else:
        lack = "the shards' clean holders are at different steps"
    if best is None:
        why = f"{lack}, no snapshot, no checkpoint that all can read"
        return Plan(Origin.NONE, -1, furthest=furthest, why=why)
    if best == in_memory:
        return Plan(
            Origin.REPLICA,
            best,
            transfers=_pairs(ordered, lambda h: _good(h) and h.step == best),
            furthest=furthest,
            why=f"every shard has a clean holder of step {best}",
        )
    if best == in_snapshot:
        return Plan(
            Origin.SNAPSHOT,
            best,
            load=tuple(h.rank for h in ordered if best in h.snapshots),
            transfers=_pairs(ordered, lambda h: best in h.snapshots),
            furthest=furthest,
            why=f"{lack}; every shard has a snapshot of step {best}",
        )
    return Plan(
        Origin.CHECKPOINT, best, furthest=furthest, why=f"{lack}; step {best} is in storage"
    )


@dataclass(frozen=True)
class DumpPlan:
    """Who writes a checkpoint when the job is about to end."""

    step: int
    writers: tuple[int, ...]  # one for each shard


def dump(holdings: Sequence[Holding], shards: int) -> DumpPlan | None:
    """The newest step of which living ranks hold all ``shards``, and who writes which; None:
    there is none, and so nothing is written. ``holdings``: of the living only."""
    held: dict[int, dict[int, int]] = {}
    for holding in sorted(holdings, key=lambda h: h.rank):
        if _good(holding) and holding.step is not None:
            held.setdefault(holding.step, {}).setdefault(holding.shard, holding.rank)
    whole = [step for step, writers in held.items() if len(writers) >= shards > 0]
    if not whole:
        return None
    step = max(whole)
    return DumpPlan(step, tuple(sorted(held[step].values())))


def _good(holding: Holding) -> bool:
    return holding.clean and holding.step is not None


def _newest(steps: Sequence[set[int | None]] | Sequence[set[int]]) -> int | None:
    common = set.intersection(*({s for s in some if s is not None} for some in steps))
    return max(common, default=None)


def _pairs(
    ordered: Sequence[Holding], holds: Callable[[Holding], bool]
) -> tuple[tuple[int, int], ...]:
    pairs = []
    for shard in sorted({h.shard for h in ordered}):
        sources = [h.rank for h in ordered if h.shard == shard and holds(h)]
        receivers = [h.rank for h in ordered if h.shard == shard and not holds(h)]
        for turn, receiver in enumerate(receivers):
            # Spread over all sources: nobody sends twice while another sends nothing.
            pairs.append((sources[turn % len(sources)], receiver))
    return tuple(pairs)
