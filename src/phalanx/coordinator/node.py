"""The coordinator as one agent has it: its own, or a link to another's, and whichever comes next.

The agent starts it (:meth:`CoordinatorNode.attend`), watches ``fd``, and takes what it is told.
All work is on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from phalanx.controller.etcd import OPEN as ETCD_OPEN
from phalanx.controller.etcd import Access, Denied
from phalanx.controller.journal import JournalError
from phalanx.coordinator import courier, link, net, office, takeover, wire, words
from phalanx.coordinator.copies import Held
from phalanx.coordinator.hub import Facts, Hub, Machine
from phalanx.coordinator.loop import Inbox, LoopThread, acquire, release
from phalanx.coordinator.security import OPEN, Security
from phalanx.coordinator.server import CoordinatorError, Job, Server
from phalanx.health.source import Metric
from phalanx.rendezvous import election, model
from phalanx.rendezvous.state import State

log = logging.getLogger("phalanx.coordinator")

INTERNAL = 70
"""The exit status of a defect of ours; ``phalanx.agent.exit_codes``."""

_KEPT = 1000  # sayings while there is no coordinator
_SILENT = 3.0  # seconds until one that did not answer is asked again
_SAY_FIRST = 2.0  # seconds of silent waiting, before the first line about it


@dataclass(frozen=True)
class Plan:
    """How this agent meets the others. Times in seconds.

    ``node``: what it says of itself; an empty ``address`` becomes the one by which the
    coordinator is reached, ``endpoint`` where this agent listens. ``endpoint``: where the first
    coordinator is. ``is_host``: it is here; None: if that is an address of this machine and the
    port is free. ``local``: the address of ours to use (``--local-addr``). ``ports``: where our
    own listener may be. ``silence``: no sign of life for so long is a loss. ``reach``: how long a
    lost coordinator is looked for before another is elected. ``separate``: the coordinator
    is a process of its own (``phalanx coordinator``), and no agent ever takes its place.
    ``etcd`` ("host:port[,host:port]"): who coordinates is agreed there, ``endpoint`` is not used.
    """

    run_id: str
    node: model.Node
    endpoint: str
    options: model.Options
    epoch: int = 0
    is_host: bool | None = None
    local: str = ""
    ports: tuple[int, int] | None = None
    security: Security = OPEN
    silence: float = 5.0
    reach: float = 3.0
    on_split: str = "wait"
    separate: bool = False
    linger: float = 30.0
    etcd: str = ""
    etcd_access: Access = ETCD_OPEN


class CoordinatorNode:
    """See the module. ``line(text)`` says something to a person, ``record(kind, data)`` is for
    the events; both are called on the thread of the loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        machine: Machine,
        fresh: Callable[[int], Any],
        recall: Callable[..., Any] = State.recall,
        line: Callable[[str], object] = log.info,
        record: Callable[[str, Mapping[str, object]], object] | None = None,
    ) -> None:
        """``fresh(term)`` is the state of a coordinator that knows of nobody yet, ``recall(term,
        now, options, gone)`` of one that takes over from another."""
        self.plan = plan
        self.node = plan.node
        self._machine = machine
        self._fresh = fresh
        self._recall = recall
        self._line = line
        self._record = record
        self._inbox = Inbox()
        self._thread: LoopThread | None = None
        self._server = Server(
            Job(plan.run_id, plan.epoch, plan.silence), plan.node.id, plan.security
        )
        self._server.on_higher = self._higher
        self._server.line = line
        self._server.ask = self._asked
        self._server.asked = wire.kinds(election.Ask | election.Who | election.Lead)
        self._target = self._server.moved = plan.endpoint  # where the coordinator is, or was last
        self._term = 0
        self._coordinator = ""  # its node id
        self._ballot = election.Ballot(plan.run_id)
        self._roster: model.Roster | None = None
        self._takeover = takeover.Takeover(plan.run_id, plan.security, plan.on_split)
        self._office: office.Office | None = None
        if plan.etcd:
            self._office = office.Office(
                plan.etcd, plan.run_id, plan.silence, access=plan.etcd_access
            )
        self._held = self._server.held = Held(plan.run_id)
        self._held.on_first = self._holds
        self._courier = courier.Courier(plan.run_id, plan.security, plan.silence)
        self._courier.on_end = lambda rank, step: self._inbox.put(words.Copied(rank, step))
        self._heralds: set[asyncio.Task[None]] = set()
        self._separate = plan.separate  # the coordinator is no agent
        self._lost_at = ""  # the endpoint of the one that was lost
        self._look_again = 0.0  # when it is next worth a try
        self._saw_end = False  # the last coordinator's connection closed
        self._was_there = False  # there has been a coordinator
        self._connection: link.Connection | None = None
        self._joined = False
        self._unsaid: deque[model.Saying] = deque(maxlen=_KEPT)
        self._alone: float | None = time.monotonic()
        self._closing = False
        self._live_task: Any = None

    # --- for the agent, from its thread -------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable when :meth:`take` has something."""
        return self._inbox.fd

    def attend(self) -> None:
        """Begin: find the coordinator, or be it. ``Reached`` comes when there is one.

        What makes it impossible comes as ``Refuse``.
        """
        self._thread = acquire()
        self._live_task = self._thread.submit(self._live())

    def say(self, saying: model.Saying) -> None:
        """Tell the coordinator; never waits. What is said without one is said later, after the
        Join that answers ``Reached``."""
        if self._thread is not None:
            self._thread.soon(self._say, saying)

    def beside(self, endpoints: Sequence[str]) -> None:
        """The neighbours now: snapshots go to the first of them."""
        self._courier.beside = (*endpoints,)

    def copy(
        self, rank: int, world: int, generation: int, fd: int, step: int, *, back: bool
    ) -> None:
        """Have a snapshot copied to the neighbour, or told that the rank has gone ``back`` to
        that step. ``fd``: of the slate, which becomes ours. Never waits; ``Copied`` comes when it
        is on its way no more."""
        if self._thread is None or self._closing:
            os.close(fd)
            return
        self._thread.soon(self._courier.note, rank, world, generation, fd, step, back)

    def copies(
        self, ranks: Sequence[int], world: int, endpoints: Sequence[str], limit: float
    ) -> dict[int, tuple[int, str]]:
        """What the neighbours hold of these ranks: descriptors of slates, the caller's, and the
        address of who held them. Waits ``limit`` seconds at most."""
        if self._thread is None or not ranks:
            return {}
        wanted = words.Wanted(self.plan.run_id, (*ranks,), world)
        plan, own = self.plan, self._server.address
        where = [at for at in endpoints if at not in ("", own)]
        asking = self._thread.submit(courier.collect(where, wanted, plan.security, plan.silence))
        try:
            return asking.result(limit)
        except (FutureTimeout, TimeoutError):
            asking.cancel()
            return {}

    def take(self) -> list[model.Telling | words.Reached | words.Alone]:
        """What came since, in order."""
        return self._inbox.take()

    def alone_since(self) -> float | None:
        """Since when (monotonic seconds) there is no coordinator; None: there is one."""
        return self._alone

    @property
    def is_coordinator(self) -> bool:
        """Whether it is here now."""
        return self._server.hub is not None

    def facts(self) -> Mapping[str, Any]:
        """For ``/status``. From any thread."""
        alone = self._alone
        return {
            "coordinator": self._target if not self.is_coordinator else self._server.address,
            "here": self.is_coordinator,
            "term": self._term,
            "listens": self._server.address,
            "alone_seconds": None if alone is None else round(time.monotonic() - alone, 3),
            "refused": dict(self._server.refused),
        }

    def numbers(self) -> list[Metric]:
        """For ``/metrics``. From any thread."""
        hub, alone = self._server.hub, self._alone
        out = [
            Metric("phalanx_coordinator_here", float(hub is not None), "1 if this agent is it"),
            Metric("phalanx_coordinator_term", self._term, "The highest seen"),
            Metric("phalanx_coordinator_alone", float(alone is not None), "1 if none is heard"),
        ]

        def count(name: str, what: str, label: str, counts: Mapping[str, float]) -> None:
            for key, value in sorted(dict(counts).items()):
                out.append(Metric(name, value, what, "counter", {label: key}))

        count("phalanx_coordinator_refused", "What did not fit", "why", self._server.refused)
        count("phalanx_snapshot_copies", "To the neighbour", "how", self._courier.counts)
        out.append(Metric("phalanx_snapshots_held", self._held.count, "Other nodes' ranks"))
        out.append(Metric("phalanx_snapshots_held_bytes", self._held.bytes, "Their memory"))
        if hub is not None:
            out.append(
                Metric("phalanx_coordinator_connected", len(hub.chairs), "Agents with a stream")
            )
            notes = {
                key.removeprefix("note "): value
                for key, value in hub.counts.copy().items()
                if key.startswith("note ")
            }
            count("phalanx_coordinator_events", "As in the events record", "kind", notes)
            count("phalanx_coordinator_seconds", "Time in each phase", "phase", hub.phases)
        return out

    def close(self, goodbye: str = "", hurry: Callable[[], bool] = lambda: False) -> None:
        """Say Leave and go. A coordinator whose job is over first waits until all other agents
        have gone (``Plan.linger`` at most, or until ``hurry()``)."""
        thread = self._thread
        if thread is not None:
            leaving = thread.submit(self._leave(goodbye))
            until = time.monotonic() + self.plan.linger + 5.0
            while not leaving.done() and time.monotonic() < until and not hurry():
                with contextlib.suppress(FutureTimeout, TimeoutError, Exception):
                    leaving.result(0.1)
            with contextlib.suppress(FutureTimeout, TimeoutError, Exception):
                thread.call(self._server.stop(0.2), 2.0)
            thread.soon(self._held.close)
            self._thread = None
            release()
        self._inbox.close()

    # --- on the loop --------------------------------------------------------------------------

    def _say(self, saying: model.Saying) -> None:
        connection = self._connection
        if type(saying) is model.Join:
            if connection is None:
                return  # it is asked for again
            self._joined = True
            away = election.promised_away(self._ballot, self.node.id, connection.term)
            leads = connection.coordinator == self.node.id
            connection.say(dataclasses.replace(saying, promised=away, leads=leads))
            while self._unsaid:
                self._pass_on(connection, self._unsaid.popleft())
        elif connection is not None and self._joined:
            self._pass_on(connection, saying)
        elif type(saying) is not model.Progress:
            self._unsaid.append(saying)

    @staticmethod
    def _pass_on(connection: link.Connection, saying: model.Saying) -> None:
        try:
            connection.say(saying)
        except wire.WireError as error:
            log.error("%s could not be told: %s", type(saying).__name__, error)

    async def _live(self) -> None:
        try:
            await self._settle()
            while not self._closing:
                await self._attend_once(await self._find())
        except (CoordinatorError, link.Refused) as error:
            self._inbox.put(model.Refuse(str(error)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("the link to the coordinator failed")
            self._inbox.put(model.Refuse(f"a defect of phalanx: {error!r}", INTERNAL))

    async def _attend_once(self, connection: link.Connection) -> None:
        """One stream, from its Welcome to its end."""
        self._saw(connection.term)
        self._coordinator = connection.coordinator
        self._separate = connection.separate
        self._connection, self._joined = connection, False
        self._alone = None
        self._was_there = True
        where = self._server.moved = self._target
        self._takeover.forget()
        self._ballot = dataclasses.replace(self._ballot, following=self._target)
        self._inbox.put(words.Reached(self.node, connection.term, self._target))
        how = "it has moved"
        try:
            async for telling in connection.tellings():
                self._heed(telling)
                self._inbox.put(telling)
        except link.LinkEnded as error:
            how = str(error)
            self._saw_end = not (error.silent or error.slept)
            self._lost_at = where
            if self._server.moved == where:
                self._server.moved = ""
            self._look_again = time.monotonic() + (_SILENT if error.silent else 0.0)
        finally:
            self._connection = None
            self._ballot = dataclasses.replace(self._ballot, following="")
            self._alone = time.monotonic()
            with contextlib.suppress(Exception):
                await connection.close()
        if not self._closing:
            self._inbox.put(words.Alone(how))

    def _heed(self, telling: model.Telling) -> None:
        """What of a telling matters when the coordinator is lost."""
        ballot = self._ballot
        if isinstance(telling, model.Roster):
            self._roster = telling
        elif isinstance(telling, model.Assign | model.Regroup):
            generation = max(ballot.generation, telling.assignment.generation)
            self._ballot = dataclasses.replace(ballot, generation=generation)
            self._say(model.Took(generation))
        elif isinstance(telling, model.Over):
            self._ballot = dataclasses.replace(ballot, verdict=telling.verdict)

    def _saw(self, term: int) -> None:
        self._term = max(self._term, term)
        self._server.term = max(self._server.term, self._term)
        if self._term > self._ballot.term:
            self._ballot = dataclasses.replace(self._ballot, term=self._term, promised="")

    def _aim(self, endpoint: str) -> None:
        """The coordinator is there, as far as is known."""
        self._target = self._server.moved = endpoint

    # --- finding it ---------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Be the first coordinator if its endpoint is ours. Raises CoordinatorError."""
        plan = self.plan
        host, port = net.split(plan.endpoint)
        loop = asyncio.get_running_loop()
        if plan.local:
            own = await loop.run_in_executor(None, net.own_address, plan.local)
            if own is None:
                raise CoordinatorError(
                    f"--local-addr {plan.local} is no address of this machine, or cannot be "
                    "resolved: give one that `ip address` shows"
                )
            self.node = dataclasses.replace(self.node, address=own)
        if self._office is not None:
            await self._meet_in_etcd(plan.etcd)
            return
        if plan.is_host is False or plan.separate:
            return
        own = await loop.run_in_executor(None, net.own_address, host)
        if own is None:
            if plan.is_host:
                raise CoordinatorError(
                    f"this node is to be the coordinator, but {host} is no address of it, or "
                    "cannot be resolved: correct --rdzv-endpoint"
                )
            return
        try:
            where = await self._server.start(own, [port])
        except CoordinatorError:
            if plan.is_host:
                raise
            return  # another agent of this machine is it
        self._open_hub(self._fresh(1), 1)
        self._named(own, where)
        self._warn(own)

    def _warn(self, host: str) -> None:
        if not self.plan.security.token and not net.is_loopback(host):
            self._line(
                f"anybody who reaches {self._server.address} can disturb this job: give all its "
                "agents the same --token-file (or PHALANX_TOKEN)"
            )

    def _open_hub(
        self, state: Any, term: int, commit: Callable[[Facts], object] | None = None
    ) -> None:
        """Be the coordinator, in this term."""
        self._term = self._server.term = term
        self._server.hub = Hub(
            self._machine,
            state,
            self.plan.options,
            term=term,
            record=self._record,
            commit=commit,
            on_failed=self._resign,
            probe=lambda node: takeover.ended(node, self.plan.run_id, self.plan.security),
            silence=self.plan.silence,
        )
        self._aim(self._server.address)

    # --- by etcd --------------------------------------------------------------------------------

    async def _meet_in_etcd(self, etcd: str) -> None:
        """Listen at the address from which etcd is reached. Raises CoordinatorError."""
        waiting = _Waiting(self._line, self.plan.options.join)
        self._target = ""
        while True:
            try:
                reached = await net.reach(etcd.split(",")[0], 2.0, self.node.address)
                break
            except net.Unreachable as error:
                waiting.say(f"etcd at {etcd}", str(error))
                if waiting.over():
                    raise CoordinatorError(
                        f"etcd at {etcd} cannot be reached ({error}): is it running, and is "
                        "--rdzv-endpoint right?"
                    ) from None
            await asyncio.sleep(0.5)
        await self._listen(self.node.address or reached.ours)
        self._named(reached.ours, self._server.address)
        self._warn(reached.ours)

    async def _ask_etcd(self) -> str:
        """Find out who coordinates, or be it; "", or why there is nobody yet."""
        assert self._office is not None
        loop = asyncio.get_running_loop()
        try:
            holder = await self._office.holder()
            if holder and holder != self._server.address:
                self._aim(holder)
                return ""
            facts = await self._office.take(
                self._server.address, lambda: loop.call_soon_threadsafe(self._resign, "")
            )
        except Denied as error:
            raise CoordinatorError(
                f"{error}: correct username and password (--rdzv-conf), or the user's rights"
            ) from None
        except JournalError as error:
            return str(error)
        self._line(f"this agent coordinates the job now (term {facts.term})")
        if self._record is not None:
            self._record("coordinator_elected", {"term": facts.term, "dead": []})
        self._open_hub(self._fresh(facts.term), facts.term, self._office.commit)
        assert self._server.hub is not None
        self._server.hub.facts = facts
        return ""

    def _resign(self, why: str) -> None:
        """The lease in etcd is lost, or what is agreed cannot be written."""
        hub = self._server.hub
        if hub is None:
            return
        self._line(f"this agent coordinates the job no more: {why or 'its lease in etcd is lost'}")
        self._server.hub = None
        self._server.moved = ""
        hub.stop("the coordinator has lost its lease")
        if self._office is not None:
            # In a thread: etcd may not answer.
            asyncio.get_running_loop().run_in_executor(None, self._office.leave)

    def _higher(self, term: int) -> None:
        """Somebody has been elected after us: step down."""
        self._saw(term)
        hub = self._server.hub
        if hub is not None and term > hub.term:
            self._line(f"another agent coordinates the job now (term {term})")
            self._server.hub = None
            hub.stop(f"the coordinator of term {hub.term} has stepped down")

    def _holds(self, rank: int, step: int) -> None:
        if self._record is not None:
            self._record("snapshot_held", {"rank": rank, "step": step})

    def _named(self, address: str, endpoint: str) -> None:
        self.node = dataclasses.replace(
            self.node, address=self.node.address or address, endpoint=endpoint
        )

    def _hello(self) -> words.Hello:
        plan = self.plan
        return words.Hello(plan.run_id, plan.node.id, plan.epoch, options=plan.options)

    async def _find(self) -> link.Connection:
        """A stream to the coordinator. Raises CoordinatorError when there is none in time, and
        Refused."""
        plan = self.plan
        waiting = _Waiting(self._line, plan.options.join)
        pause, hops = 0.05, 0
        while True:
            reason = "nobody coordinates the job yet"
            if self._ballot.verdict is not None:
                await asyncio.get_running_loop().create_future()  # the agent goes by itself
            if self._office is not None and self._server.hub is None:
                reason = await self._ask_etcd() or reason
            if self._server.hub is not None:
                return link.Seat(self._server.hub, self.node.id, self.node.address)
            if self._worth_a_try(self._target):
                tried = self._target
                try:
                    found = await self._try(tried)
                    if found is not None:
                        return found
                    if self._target != tried and hops < 3:
                        hops += 1
                        continue  # it knows who coordinates: no election before that is asked
                except net.Unreachable as error:
                    reason = str(error)
                    if reason != net.REFUSED:
                        self._look_again = time.monotonic() + _SILENT
            hops = 0
            if await self._elect():
                pause = 0.05
                continue
            if self._was_there and self._roster is None and not (self._separate or self._office):
                reason = (
                    f"{reason}; nobody can take its place before the job's first generation: "
                    "start that agent again"
                )
            waiting.say(self._target or f"etcd at {plan.etcd}", reason)
            if waiting.over():
                if self._office is not None:
                    raise CoordinatorError(
                        f"no coordinator was found by etcd at {plan.etcd} within "
                        f"{plan.options.join:.0f} s ({reason})"
                    )
                raise CoordinatorError(
                    f"there was no coordinator at {self._target} within {plan.options.join:.0f} s "
                    f"({reason}): is the agent that owns --rdzv-endpoint running, and is the "
                    "address right?"
                )
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))  # a back-off
            pause = min(pause * 1.6, 0.3 if self._was_there else 1.0)
            if not self._office and self._target != plan.endpoint and random.random() < 0.2:
                self._target = plan.endpoint  # the first one may be back

    def _worth_a_try(self, endpoint: str) -> bool:
        """Whether somebody might coordinate there. Not we ourselves; and whoever was silent when
        it was lost would keep us waiting, while others are to be asked."""
        if endpoint in ("", self._server.address):
            return False
        if endpoint == self._lost_at and self._roster is not None and not self._separate:
            return time.monotonic() >= self._look_again
        return True

    async def _try(self, endpoint: str) -> link.Connection | None:
        """A stream to the coordinator there; None: it is not there (``_target`` may be new).

        Raises Unreachable, and Refused.
        """
        plan = self.plan
        found = await link.attend(
            endpoint,
            self._hello(),
            term=self._term,
            security=plan.security,
            silence=plan.silence,
            timeout=min(2.0, max(plan.silence, 1.0)),
            local=self.node.address if plan.local else "",
        )
        if isinstance(found, words.Moved):
            if found.endpoint and found.endpoint not in (endpoint, self._server.address):
                self._aim(found.endpoint)
            return None
        if not self._server.address and not plan.separate:
            await self._listen(found.ours)
        self._named(found.ours, self._server.address)
        return found

    # --- taking over ----------------------------------------------------------------------------

    async def _elect(self) -> bool:
        """Whether there is a coordinator to be tried now: another, or this agent."""
        roster = self._roster
        if not self._was_there or self._separate or self._office or roster is None:
            return False
        term = self._term + 1
        if election.stands(roster, self.node.id):
            own = election.Ask(
                self.plan.run_id, term, self.node.id, self._server.address, self._ballot.generation
            )
            result = await self._takeover.attempt(
                roster, own, self._promise_myself, lost=self._coordinator, seen=self._saw_end
            )
        else:
            result = await self._takeover.follow(roster, self.node.id, lost=self._coordinator)
        if self._closing:
            return False
        self._saw(result.term)
        if result.verdict is not None:
            self._ballot = dataclasses.replace(self._ballot, verdict=result.verdict)
            self._inbox.put(model.Over(result.verdict))
            return True
        if result.won:
            if self._term > term or self._ballot.promised != self.node.id:
                return False  # overtaken meanwhile
            self._become(term, roster, result.dead)
            return True
        if result.endpoint and result.endpoint != self._target:
            self._aim(result.endpoint)
            return True
        return False

    def _promise_myself(self, own: election.Ask) -> bool:
        self._ballot, answer = election.vote(self._ballot, own)
        return answer.granted

    def _become(self, term: int, roster: model.Roster, dead: frozenset[str]) -> None:
        self._line(f"this agent coordinates the job now (term {term})")
        if self._record is not None:
            self._record("coordinator_elected", {"term": term, "dead": sorted(dead)})
        now = time.monotonic()
        absent = frozenset({self._coordinator}) - {self.node.id, ""}
        state = self._recall(term, now, self.plan.options, dead, absent, roster)
        self._open_hub(state, term)
        others = {e for n, e in roster.nodes if e and n != self.node.id} | {self.plan.endpoint}
        lead = election.Lead(self.plan.run_id, term, self.node.id, self._server.address)
        herald = asyncio.create_task(self._herald(lead, others - {self._server.address}))
        self._heralds.add(herald)
        herald.add_done_callback(self._heralds.discard)

    async def _herald(self, lead: election.Lead, endpoints: set[str]) -> None:
        """Tells the places where somebody may not know it who leads: those that vanished, and
        where the first coordinator may start again. Ends when it leads no more."""
        pause = 0.2
        while self._server.hub is not None and self._server.hub.term == lead.term:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 3.0)
            hub = self._server.hub
            if hub is None:
                return
            here = {n.endpoint for i, n in hub.nodes.items() if i in hub.chairs}
            away = [e for e in endpoints if e not in here]
            for term in await self._takeover.tell(lead, away):
                self._higher(term)

    async def _asked(self, value: Any) -> Any:
        """Another agent's question."""
        hub = self._server.hub
        if isinstance(value, election.Ask):
            ballot = self._ballot
            if hub is not None:
                ballot = dataclasses.replace(ballot, following=self._server.address)
            ballot, answer = election.vote(ballot, value)
            if answer.granted:
                self._ballot = ballot
                self._saw(value.term)
                self._ballot = ballot
                self._aim(value.endpoint)
            return answer
        if value.run_id != self.plan.run_id:
            return election.Here(0, node=self.node.id)
        if isinstance(value, election.Lead) and value.term > self._term:
            self._aim(value.endpoint)
            self._higher(value.term)
            if self._connection is not None:
                # A stream to one of a lower term is of no use any more.
                await self._connection.close()
        where = self._server.address if hub is not None else self._ballot.following
        return election.Here(self._term, where, self.node.id)

    async def _listen(self, address: str) -> None:
        """Our own listener, for the day when this agent takes over."""
        ports = range(self.plan.ports[0], self.plan.ports[1] + 1) if self.plan.ports else (0,)
        await self._server.start(address, ports)

    # --- leaving --------------------------------------------------------------------------------

    async def _leave(self, goodbye: str) -> None:
        self._closing = True
        hub = self._server.hub
        connection = self._connection
        if connection is not None:
            if self._joined:
                connection.say(model.Leave(goodbye))
            await connection.close()
        if self._live_task is not None:
            self._live_task.cancel()
        for herald in self._heralds:
            herald.cancel()
        self._courier.close()
        if hub is not None and hub.verdict is not None:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(hub.empty.wait(), self.plan.linger)
        if self._office is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._office.leave)


class _Waiting:
    """The lines of somebody who waits for an endpoint: not many."""

    def __init__(self, line: Callable[[str], object], limit: float) -> None:
        self._line = line
        self._limit = limit
        self._began = time.monotonic()
        self._next = _SAY_FIRST
        self._said = ""

    def say(self, endpoint: str, reason: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._next or (self._said and reason != self._said):
            self._line(f"waiting for {endpoint} ({reason}), {waited:.0f} s of {self._limit:.0f} s")
            self._said = reason
            self._next = max(waited * 1.5, waited + 5.0)

    def over(self) -> bool:
        return time.monotonic() - self._began >= self._limit
