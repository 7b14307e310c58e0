"""The questions that agents ask each other when the coordinator is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.coordinator import link, net, wire
from phalanx.coordinator.security import Security
from phalanx.rendezvous import election, model

_ANSWERS = wire.kinds(election.Promise | election.Here)
_AT_ONCE = 64  # questions under way
_PATIENCE = 3  # rounds that somebody who comes first is waited for


_PROBE = 1.0  # seconds for which it is asked whether an agent has ended
_PROBE_AGAIN = 0.02


async def ended(node: model.Node, run_id: str, security: Security) -> bool | None:
    """Whether the agent of a node has ended: its machine says that nobody listens there any more,
    or somebody else does. False: it answers. None: nothing is heard, so it is not known."""
    until = time.monotonic() + _PROBE
    while (left := until - time.monotonic()) > 0:
        try:
            _, answer = await asyncio.wait_for(
                link.call(
                    node.endpoint,
                    "Ask",
                    election.Who(run_id),
                    _ANSWERS,
                    security=security,
                    timeout=left,
                ),
                left,
            )
            return isinstance(answer, election.Here) and answer.node != node.id
        except net.Unreachable as error:
            if str(error) == net.REFUSED:
                return True
        except (link.Refused, TimeoutError, asyncio.TimeoutError):
            return None
        await asyncio.sleep(_PROBE_AGAIN)  # a process that ends closes one thing after the other
    return None


@dataclass(frozen=True)
class Result:
    """``won``: this agent may coordinate. Else ``endpoint`` is the one to try ("": none), and
    ``verdict`` how the job ended, if somebody knows. ``term``: the highest heard of."""

    won: bool = False
    endpoint: str = ""
    term: int = 0
    dead: frozenset[str] = frozenset()
    verdict: model.Verdict | None = None


class Takeover:
    """Asks on the network; what is decided is ``phalanx.rendezvous.election``'s."""

    def __init__(
        self, run_id: str, security: Security, on_split: str, timeout: float = 1.0
    ) -> None:
        self._run_id = run_id
        self._security = security
        self._on_split = on_split
        self._timeout = timeout
        self._waited: dict[str, int] = {}  # rounds, by the node that comes first
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def forget(self) -> None:
        """There is a coordinator again: the next loss is another."""
        self._waited.clear()

    async def attempt(
        self,
        roster: model.Roster,
        own: election.Ask,
        promise: Callable[[election.Ask], bool],
        lost: str,
        *,
        seen: bool = True,
    ) -> Result:
        """One round: those who come first are looked for; if none lives, promises are asked for.

        ``promise(own)`` is this agent's own vote, ``lost`` the coordinator's node; ``seen``: the
        connection to it closed, and was not silent.
        """
        ahead = await self._ahead(roster, own.candidate, lost)
        if ahead is not None:
            return ahead
        if not promise(own):
            return Result()
        promised: set[str] = set()
        dead: set[str] = set()
        best = Result(term=0)

        def won(on_split: str) -> bool:
            ended = lost if seen and lost in dead else ""
            return election.won(roster, own.candidate, promised, on_split, ended)

        asked = {
            asyncio.create_task(self._one(node, endpoint, own)): node
            for node, endpoint in election.voters(roster, own.candidate)
        }
        try:
            pending: set[Any] = set(asked)
            # Whoever says that the coordinator lives is believed: it may only not know better yet,
            # and is asked again soon.
            while pending and not best.endpoint and not won("wait"):
                done, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED, timeout=2 * self._timeout
                )
                if not done:
                    break
                for task in done:
                    answer = task.result()
                    if answer == "dead":
                        dead.add(asked[task])
                    elif isinstance(answer, election.Promise):
                        if answer.granted:
                            promised.add(asked[task])
                        elif answer.verdict is not None:
                            return Result(verdict=answer.verdict, term=answer.term)
                        else:
                            best = Result(
                                endpoint=answer.endpoint or best.endpoint,
                                term=max(answer.term, best.term),
                            )
        finally:
            for task in asked:
                task.cancel()
        alive = bool(best.endpoint)
        if not alive and won(self._on_split):
            gone = dead if seen else dead - {lost}
            return Result(won=True, term=own.term, dead=frozenset(gone))
        return best

    async def follow(self, roster: model.Roster, me: str, lost: str) -> Result:
        """For an agent that cannot stand: the first who lives is the one to try."""
        return await self._ahead(roster, me, lost, patience=1 << 30) or Result()

    async def _ahead(
        self, roster: model.Roster, me: str, lost: str, patience: int = _PATIENCE
    ) -> Result | None:
        who = election.Who(self._run_id)
        first = election.before(roster, me, {lost})
        answers = await asyncio.gather(*[self._one(node, at, who) for node, at in first])
        for (node, endpoint), answer in zip(first, answers, strict=True):
            if not isinstance(answer, election.Here):
                continue
            if answer.endpoint:
                return Result(endpoint=answer.endpoint, term=answer.term)
            rounds = self._waited[node] = self._waited.get(node, 0) + 1
            if rounds <= patience:
                return Result(endpoint=endpoint, term=answer.term)
        return None

    async def tell(self, lead: election.Lead, endpoints: Iterable[str]) -> list[int]:
        """Say who leads; the terms above that one that somebody answers with."""
        answers = await asyncio.gather(*[self._one("", at, lead) for at in endpoints])
        return [a.term for a in answers if isinstance(a, election.Here) and a.term > lead.term]

    async def _one(self, _node: str, endpoint: str, question: object) -> Any:
        """The answer; "dead": nobody listens there any more; None: none came."""
        if not endpoint:
            return None
        async with self._slots:
            try:
                _, answer = await link.call(
                    endpoint,
                    "Ask",
                    question,
                    _ANSWERS,
                    security=self._security,
                    timeout=self._timeout,
                )
                return answer
            except net.Unreachable as error:
                return "dead" if str(error) == net.REFUSED else None
            except link.Refused:
                return None
