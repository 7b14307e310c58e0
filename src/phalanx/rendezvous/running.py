"""While workers run: who is lost, who failed, who is done, and what follows from it."""

from __future__ import annotations

from phalanx.recovery import policy
from phalanx.rendezvous.forming import finish, settle, stop_all, wants_more
from phalanx.rendezvous.model import Failed, Progress, Stopped, Succeeded, Verdict
from phalanx.rendezvous.state import Phase, Turn

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


def failed(turn: Turn, node: str, what: Failed) -> None:
    """A fault of the program: the whole group again, or the end."""
    state = turn.state
    if state.phase is not Phase.RUNNING or what.generation != state.generation:
        return
    if state.seat_of(node) is None:
        return
    exception = what.end.get("exception")
    step = what.end.get("step")
    steps = [s for s in (state.furthest, step) if isinstance(s, int)]
    attempt = policy.Attempt(
        lasted=max(0.0, turn.now - state.began),
        returncode=what.returncode,
        exception=_class_of(exception) if isinstance(exception, str) else None,
        last_step=max(steps, default=None),
    )
    turn.set(attempts=(*state.attempts, attempt))
    budget = max(0, turn.options.max_restarts - state.spent)
    decision = policy.decide(policy.Policy(max_restarts=budget), turn.state.attempts)
    turn.note(
        "attempt_failed",
        node=node,
        rank=what.rank,
        generation=state.generation,
        reason=what.reason,
        restart=decision.restart,
        verdict=decision.reason,
    )
    if not decision.restart or not what.retryable:
        why = decision.reason if not decision.restart else "it cannot be cured by a new try"
        reason = f"{what.reason} on {turn.name(node)}; not restarted: {why}"
        finish(turn, Verdict(False, status_of(what), reason, node))
        return
    stop_all(turn, f"{what.reason} on {turn.name(node)}", start_at=turn.now + decision.delay)


def _class_of(exception: str) -> str:
    return exception.split(":", 1)[0].strip().rsplit(".", 1)[-1]


def succeeded(turn: Turn, node: str, what: Succeeded) -> None:
    state = turn.state
    if what.generation != state.generation or state.seat_of(node) is None:
        return
    turn.change(node, runs=0)
    if state.phase is not Phase.RUNNING:
        settle(turn)  # an end is as good as a stop
        return
    turn.set(done=state.done | {node})
    if all(seat.node in turn.state.done for seat in state.seats):
        finish(turn, Verdict(True))


def progress(turn: Turn, node: str, what: Progress) -> None:
    state = turn.state
    further = state.furthest is None or what.step > state.furthest
    if further and what.generation == state.generation and state.seat_of(node) is not None:
        turn.set(furthest=what.step)


def stopped(turn: Turn, node: str, what: Stopped) -> None:
    peer = turn.state.peers[node]
    if not peer.runs or what.generation < peer.runs:
        return
    turn.change(node, runs=0)
    if turn.state.phase is Phase.RUNNING:
        if turn.state.seat_of(node) is not None and node not in turn.state.done:
            stop_all(turn, f"the workers on {turn.name(node)} were stopped")
            return
        grow(turn)
        return
    settle(turn)


def grow(turn: Turn) -> None:
    """A node waits and there is room: the others stop, and all start again with it."""
    if turn.state.phase is Phase.RUNNING and wants_more(turn):
        stop_all(turn, "more nodes are there")


def departed(turn: Turn, node: str, why: str) -> None:
    """The node is gone. Its share counts as done if it was."""
    state = turn.state
    member = state.seat_of(node) is not None
    name = turn.name(node)
    turn.drop(node)
    turn.note("node_gone", node=node, why=why, member=member)
    if state.phase is Phase.RUNNING and member and node not in state.done:
        stop_all(turn, f"{name} {why}")
    else:
        settle(turn)
