"""Which strategy comes next: a pure function of what is enabled, reported, broken and tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.recovery import words
from phalanx.recovery.model import Fault, Job, JobConfig
from phalanx.recovery.words import Code


@dataclass(frozen=True)
class Choice:
    """A strategy of the ladder and why it was taken; ``skipped`` says why not the ones above."""

    strategy: str
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """One line for a person."""
        above = "; ".join(f"{name}: {why}" for name, why in self.skipped)
        return f"{self.strategy} ({above})" if above else self.strategy


def enabled(strategies: Iterable[str]) -> tuple[str, ...]:
    """The known names among these, in the ladder's order, with ``exit`` always there."""
    wanted = {*strategies, words.EXIT}
    return tuple(name for name in words.LADDER if name in wanted)


def dump_only(config: JobConfig) -> bool:
    """No round of stop and agreement is worth it when only a checkpoint can be saved."""
    return enabled(config.strategies)[0] == words.DUMP


def reclassify(job: Job) -> tuple[Fault, ...]:
    """The round's faults, with retryable ones made normal where no retry can follow.

    That is: retry is off or failed before in this round, a normal fault is there too, or
    the retryable ones are of different types.
    """
    kinds = {fault.kind for fault in job.faults}
    if (
        words.RETRY in enabled(job.config.strategies)
        and not job.retried
        and len(kinds) == 1
        and words.NORMAL not in kinds
    ):
        return job.faults
    return tuple(replace(fault, kind=words.NORMAL) for fault in job.faults)


def by_rank(faults: Iterable[Fault]) -> dict[int, int]:
    """The type of each faulty rank; a normal fault outweighs a retryable one."""
    kinds: dict[int, int] = {}
    for fault in faults:
        if kinds.get(fault.rank) != words.NORMAL:
            kinds[fault.rank] = fault.kind
    return dict(sorted(kinds.items()))


def nodes_of(config: JobConfig, ranks: Iterable[int]) -> tuple[int, ...]:
    """The node ranks that these ranks live on, as far as known."""
    return tuple(sorted({n for rank in ranks if (n := config.node_of(rank)) is not None}))


def uncleared(job: Job, fault: Fault) -> bool:
    """Whether this fault's device is still broken."""
    return bool(fault.source) and any(
        p.source == fault.source and p.rank == fault.rank for p in job.present
    )


def staying(job: Job) -> tuple[int, ...]:
    """Nodes whose processes can be restarted where they are (-1: the only, unnamed one)."""
    if words.IN_PLACE not in enabled(job.config.strategies):
        return ()
    nodes: dict[int, bool] = {}
    for fault in job.faults:
        node = job.config.node_of(fault.rank)
        good = not uncleared(job, fault)
        nodes[-1 if node is None else node] = nodes.get(-1 if node is None else node, True) and good
    if not job.keyed and len(nodes) > 1 and not any(fault.source for fault in job.faults):
        return ()  # the original's agents restart in place on one node only
    return tuple(sorted(node for node, good in nodes.items() if good))


def may_clear(job: Job) -> bool:
    """Whether waiting for a hardware fault to go away could keep processes in place."""
    return words.IN_PLACE in enabled(job.config.strategies) and any(
        fault.level in words.SHORT_LEVELS and uncleared(job, fault) for fault in job.faults
    )


def routes_converging(job: Job) -> bool:
    """Whether a link that a retry needs is still reported down."""
    return any(fault.kind == words.NETWORK and uncleared(job, fault) for fault in job.faults)


def _why_not(job: Job, name: str) -> str:
    """Why this strategy cannot be taken; "": it can."""
    barred = dict(job.barred)
    if name == words.EXIT:
        return ""
    if name not in enabled(job.config.strategies):
        return "not enabled"
    if name in barred:
        return barred[name]
    wanted = {words.IN_PLACE: words.RECOVER, words.ELASTIC: words.DOWNGRADE}.get(name, name)
    offered = {*job.reported}
    if wanted not in offered and name not in offered:
        return f"the client did not offer {wanted}"
    if name == words.RETRY and any(f.kind == words.NORMAL for f in job.faults):
        return "a fault cannot be retried"
    if name == words.IN_PLACE and not job.stay:
        return "no faulty node can keep its place"
    if (
        name == words.RECOVER
        and job.config.spares == 0
        and any(uncleared(job, f) for f in job.faults)
    ):
        return "no spare node"
    if (
        name == words.ELASTIC
        and not job.keyed
        and 0 in nodes_of(job.config, (f.rank for f in job.faults))
    ):
        return "node 0 is faulty"
    return ""


def choose(job: Job) -> Choice:
    """The highest strategy of the ladder that is enabled, offered, possible and untried."""
    skipped: list[tuple[str, str]] = []
    for name in words.LADDER:
        why = _why_not(job, name)
        if not why:
            return Choice(name, tuple(s for s in skipped if s[1] != "not enabled"))
        skipped.append((name, why))
    raise AssertionError("exit is always possible")


def bars(strategy: str, code: int) -> dict[str, str]:
    """What a failed strategy rules out, by the code it failed with.

    405: itself. 406 and unknown codes: everything but scale-in (after a retry), dump and
    exit. 404, 407 and 499: everything but exit.
    """
    why = f"{strategy} failed with {code}"
    if code == Code.RECOVERABLE:
        return dict.fromkeys(words.LADDER[: words.LADDER.index(strategy) + 1], why)
    if code in (Code.NOT_READY, Code.DUMP_ERROR, Code.CLIENT_ERROR) or strategy == words.DUMP:
        return {name: why for name in words.LADDER if name != words.EXIT}
    kept = {words.DUMP, words.EXIT}
    if strategy == words.RETRY:
        kept.add(words.ELASTIC)
    return {name: why for name in words.LADDER if name not in kept}
