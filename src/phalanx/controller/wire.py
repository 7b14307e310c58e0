"""Between wire messages and the words of :mod:`phalanx.recovery`. Checks what comes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phalanx.proto import recover_pb2 as pb
from phalanx.recovery import codec, words
from phalanx.recovery.model import Fault, JobConfig, Key, Signal

MAX_RANK = 100_000
_MAX_ITEMS = 100_000


class BadMessage(ValueError):
    """A message that says something impossible; the text names it."""


def job_id(value: str) -> str:
    """A usable job id. Raises BadMessage."""
    if not value:
        raise BadMessage("jobId is empty")
    if len(value) > 256 or not value.isprintable():
        raise BadMessage("jobId must be at most 256 printable characters")
    return value


def number(text: str, what: str, limit: int = MAX_RANK) -> int:
    """A decimal number below ``limit``. Raises BadMessage."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < limit):
        raise BadMessage(f"{what} must be a number from 0 to {limit - 1}, not {text[:40]!r}")
    return int(text)


def faults(ranks: Any) -> tuple[Fault, ...]:
    """FaultRank messages. Raises BadMessage."""
    _few(ranks, "faultRanks")
    return tuple(
        Fault(
            number(r.rankId, "rankId"),
            number(r.faultType, "faultType", 3),
            incarnation=max(0, r.incarnation),
            reason=r.reason[:500],
        )
        for r in ranks
    )


def ranks(items: Any) -> tuple[int, ...]:
    """The ranks alone. Raises BadMessage."""
    return tuple(dict.fromkeys(fault.rank for fault in faults(items)))


def rank_list(items: Any, what: str) -> tuple[int, ...]:
    """Ranks given as strings. Raises BadMessage."""
    _few(items, what)
    return tuple(number(item, what) for item in items)


def _few(items: Any, what: str) -> None:
    if len(items) > _MAX_ITEMS:
        raise BadMessage(f"{what} has more than {_MAX_ITEMS} entries")


def key(request: Any) -> Key | None:
    """The key in a report; None: the client does not know keys."""
    if not request.HasField("key"):
        return None
    k = request.key
    return Key(k.uuid, k.signalType, k.changeStrategy, k.round)


def key_message(k: Key) -> pb.SignalKey:
    """The same, the other way."""
    return pb.SignalKey(uuid=k.uuid, signalType=k.signal, changeStrategy=k.strategy, round=k.round)


def signal(job: str, s: Signal, again: bool = False) -> bytes:
    """A signal's bytes."""
    return pb.ProcessManageSignal(
        uuid=s.key.uuid,
        jobId=job,
        signalType=s.key.signal,
        actions=s.actions,
        faultRanks=[pb.FaultRank(rankId=str(r), faultType=str(t)) for r, t in s.ranks],
        changeStrategy=s.key.strategy,
        timeout=s.timeout,
        nodeRankIds=[str(n) for n in s.nodes],
        extraParams=s.extra,
        round=s.key.round,
        reportWithin=s.report_within,
        reason=s.reason,
        again=again,
    ).SerializeToString()


def keep_alive(job: str, uuid: str) -> bytes:
    """A keep-alive's bytes."""
    return pb.ProcessManageSignal(
        uuid=uuid, jobId=job, signalType=words.KEEP_ALIVE
    ).SerializeToString()


def declaration(info: Any) -> dict[str, Any]:
    """What a client of ours declares about its job, as settings. Raises BadMessage."""
    if not info.HasField("declaration"):
        return {}
    d = info.declaration
    _few(d.nodes, "nodes")
    out: dict[str, Any] = {}
    if d.strategies:
        out["strategies"] = [s[:64] for s in list(d.strategies)[:32]]
    for name, value in (
        ("world_size", d.worldSize),
        ("devices_per_node", d.devicesPerNode),
        ("report_timeout", float(d.reportTimeout)),
        ("reschedule_timeout", float(d.rescheduleTimeout)),
    ):
        if value < 0 or value > MAX_RANK:
            raise BadMessage(f"{name} must be 0 to {MAX_RANK}, not {value}")
        if value:
            out[name] = value
    if d.nodes:
        out["nodes"] = [
            {
                "rank": _node(n.rank),
                "name": n.name[:253],
                "ip": n.ip[:64],
                "sn": n.sn[:253],
                "ranks": sorted({_node(r) for r in n.ranks}),
            }
            for n in d.nodes
        ]
    if d.knowsSpares and d.spares >= 0:
        out["spares"] = d.spares
    if d.watchesNodes:
        out["watches_nodes"] = True
    return out


def _node(value: int) -> int:
    if not 0 <= value < MAX_RANK:
        raise BadMessage(f"a rank of a node must be 0 to {MAX_RANK - 1}, not {value}")
    return value


def config(declared: dict[str, Any], base: JobConfig, fixed: dict[str, Any]) -> JobConfig:
    """A job's configuration: what the file fixes, over what is declared, over the defaults.

    Raises BadMessage.
    """
    try:
        return codec.load_config({**declared, **fixed}, base)
    except ValueError as error:
        raise BadMessage(str(error)) from None


def rank_messages(pairs: Iterable[tuple[int, int]]) -> list[pb.FaultRank]:
    """FaultRank messages of (rank, type) pairs."""
    return [pb.FaultRank(rankId=str(rank), faultType=str(kind)) for rank, kind in pairs]
