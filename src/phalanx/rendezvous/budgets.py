"""What a fault costs: a restart of the job's budget, and the good name of the node it was on."""

from __future__ import annotations

from dataclasses import replace

from phalanx.recovery import policy
from phalanx.rendezvous.forming import finish, stop_all
from phalanx.rendezvous.model import Failed, Node, Verdict
from phalanx.rendezvous.state import Record, State, Turn

HUNG = 121
NO_ONE_TO_BLAME = 123
"""Exit statuses of ``phalanx.agent.exit_codes``."""


def status_of(failed: Failed) -> int:
    """What the agents exit with when this failure ends the job."""
    if failed.end.get("hung"):
        return HUNG
    code = failed.returncode
    if not code:
        return NO_ONE_TO_BLAME
    return 128 - code if code < 0 else code


def fault(turn: Turn, node: str, what: Failed, final: str = "") -> None:
    """The whole group starts again, or the job ends: with ``final`` in any case.

    Restarts count for the whole job, whichever node a fault is on. A node that cannot start its
    workers, or on which one fault follows another, is left out if the job can do without it.
    """
    state = turn.state
    where = f"{what.reason} on {turn.name(node)}"
    cannot_start = not what.retryable
    out = blame(turn, node, at_once=cannot_start)
    if cannot_start and out and not final:
        turn.note("attempt_failed", node=node, reason=what.reason, restart=True, verdict="")
        stop_all(turn, where)
        return
    attempt = _attempt(state, what, turn.now)
    turn.set(attempts=(*state.attempts, attempt))
    budget = max(0, turn.options.max_restarts - state.spent)
    decision = policy.decide(policy.Policy(max_restarts=budget), turn.state.attempts)
    why = final or ("a new try does not cure that" if cannot_start else decision.reason)
    again = decision.restart and not final and not cannot_start
    turn.note(
        "attempt_failed",
        node=node,
        rank=what.rank,
        generation=state.generation,
        reason=what.reason,
        restart=again,
        verdict=why,
    )
    if again:
        stop_all(turn, where, start_at=turn.now + decision.delay)
    else:
        reason = f"{where}; not restarted: {why}"
        finish(turn, Verdict(False, status_of(what), reason, node))


def _attempt(state: State, what: Failed, now: float) -> policy.Attempt:
    exception, step = what.end.get("exception"), what.end.get("step")
    steps = [s for s in (state.furthest, step) if isinstance(s, int)]
    return policy.Attempt(
        lasted=max(0.0, now - state.began),
        returncode=what.returncode,
        exception=_class_of(exception) if isinstance(exception, str) else None,
        last_step=max(steps, default=None),
    )


def _class_of(exception: str) -> str:
    return exception.split(":", 1)[0].strip().rsplit(".", 1)[-1]


# --- nodes ----------------------------------------------------------------------------------


def blame(turn: Turn, node: str, *, at_once: bool = False) -> bool:
    """Count a fault against the node; whether it is left out from now on."""
    peer = turn.state.peers.get(node)
    if peer is None:
        return False
    options, now = turn.options, turn.now
    old = turn.state.records.get(node) or Record(peer.node.host, peer.node.address)
    faults = (*(t for t in old.faults if t > now - options.quarantine), now)
    bad = at_once or len(faults) >= options.node_failures
    out = bad and can_do_without(turn, node)
    until = now + options.quarantine if out else None
    record = replace(old, faults=() if out else faults, until=until)
    turn.set(records={**turn.state.records, node: record})
    if out:
        turn.note("node_left_out", node=node, seconds=options.quarantine)
    return out


def can_do_without(turn: Turn, node: str) -> bool:
    others = [p for p in turn.state.peers.values() if p.node.id != node]
    return sum(not turn.state.is_out(p.node.id) for p in others) >= turn.options.least


def inherit(turn: Turn, node: Node) -> None:
    """An agent that was started again where a bad one was has its record."""
    for old, record in turn.state.records.items():
        if old in turn.state.peers or (record.host, record.address) != (node.host, node.address):
            continue
        records = {k: v for k, v in turn.state.records.items() if k != old}
        turn.set(records={**records, node.id: record})
        return
