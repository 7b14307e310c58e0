"""A job of many nodes under a virtual clock, with everything that can go wrong going wrong.

The coordinator's machine and the rules of election are the real ones; agents, workers, network
and storage are played. A seed replays exactly. ``python tests/rendezvous/simulation.py --help``.

What must hold (`Broken` is raised otherwise):

* in one generation no rank is held by two acting nodes;
* checkpoints get their marks in the order of steps, and none of a generation after one of
  another: so no two generations commit;
* every wait ends: when no more faults come the job does, and all its agents with one verdict.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from phalanx.rendezvous import election, job
from phalanx.rendezvous import model as m

CLOSED = "closed its connection"
SILENCE = 5.0  # without a sign of life a connection counts as lost
ISOLATION = 30.0
LINGER = 20.0
STEP = 0.5
CHECKPOINT = 10  # steps
RPC = 1.0


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Setting:
    seed: int
    nodes: int = 5
    events: int = 20_000  # faults come until then
    spares: int = 1
    slots: int = 1
    sessions: bool = True
    steps: int = 60  # what there is to train
    fault_every: float = 4.0  # seconds, on average
    kill_coordinator_at: int | None = None  # at that event
    only_that: bool = False  # and no other fault
    trace: bool = False


# --- machines and the network -------------------------------------------------------------------


@dataclass
class Host:
    name: str
    up: bool = True
    side: int = 0
    bad: bool = False  # workers die here


class Stream:
    """An agent's connection to a coordinator: ordered while it lives."""

    def __init__(self, sim: Sim, agent: Agent, hub: Hub) -> None:
        self.sim, self.agent, self.hub = sim, agent, hub
        self.open = {"agent": True, "hub": True}
        self.last = {"agent": 0.0, "hub": 0.0}
        self.held: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []  # while cut

    def end(self, side: str) -> Agent:
        return self.agent if side == "agent" else self.hub.owner

    @property
    def whole(self) -> bool:
        return self.sim.reach(self.agent, self.hub.owner)

    def send(self, to: str, call: Callable[..., None], *args: Any) -> None:
        if not (self.open["agent"] and self.open["hub"]):
            return
        if not self.whole:
            self.held.append((to, call, args))
            return
        near = self.agent is self.hub.owner
        at = max(self.last[to] + 1e-6, self.sim.now + (0 if near else self.sim.latency()))
        self.last[to] = at
        self.sim.at(at, self._arrive, to, call, args)

    def _arrive(self, to: str, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.open[to] or not self.end(to).alive:
            return
        if self.held or not self.whole:
            self.held.append((to, call, args))
        else:
            self.end(to).do(call, *args)

    def mend(self) -> None:
        """The network is whole again: what was held up comes through."""
        held, self.held = self.held, []
        for to, call, args in held:
            self.send(to, call, *args)
        for side, other in (("agent", "hub"), ("hub", "agent")):
            if self.open[side] and not self.open[other]:
                self.sim.after(self.sim.latency(), self._closed, side, CLOSED)

    def close(self, side: str) -> None:
        """That end gives up, or is dead."""
        if not self.open[side]:
            return
        self.open[side] = False
        self._tell_other(side)

    def _tell_other(self, side: str) -> None:
        other = "hub" if side == "agent" else "agent"
        if self.whole:
            at = max(self.last[other] + 1e-6, self.sim.now + self.sim.latency())
            self.sim.at(at, self._closed, other, CLOSED)
        else:
            self.watch(other)

    def watch(self, side: str) -> None:
        """That end notices after a while that nothing comes any more."""
        wait = SILENCE * (1 + 0.2 * self.sim.rng.random())
        self.sim.after(wait, self._silent, side)

    def _silent(self, side: str) -> None:
        other = "hub" if side == "agent" else "agent"
        if not self.open[side]:
            return
        if self.whole and self.end(other).alive and not self.end(other).paused and self.open[other]:
            return  # it is well again
        self._closed(side, f"was silent for {SILENCE:g} s")

    def _closed(self, side: str, how: str) -> None:
        if not self.open[side]:
            return
        end = self.end(side)
        if not end.alive:
            self.open[side] = False
            return
        if end.paused:
            end.inbox.append((self._closed, (side, how)))
            return
        self.open[side] = False
        self.sim.streams.pop(self, None)
        if side == "agent":
            self.agent.link_lost(self, how)
        else:
            self.hub.link_lost(self, how)
        self._tell_other(side)


# --- the coordinator ----------------------------------------------------------------------------


class Hub:
    """The real machine, in the agent that owns it."""

    def __init__(self, sim: Sim, owner: Agent, state: job.State) -> None:
        self.sim, self.owner, self.state = sim, owner, state
        self.streams: dict[str, Stream] = {}
        self.live = True
        self.due: float | None = None
        self.known: dict[str, Agent] = {}
        sim.after(0.2, self._herald)

    @property
    def term(self) -> int:
        return self.state.term

    def feed(self, event: m.Event) -> None:
        if not self.live or not self.owner.alive:
            return
        self.sim.counts["machine"] += 1
        try:
            self.state, effects = job.advance(self.state, event, self.sim.now, self.sim.options)
        except Exception as error:
            raise Broken(f"advance raised on {event}: {error!r}") from error
        for effect in effects:
            if isinstance(effect, m.To):
                self.sim.counts["told"] += 1
                stream = self.streams.get(effect.node)
                if stream is not None:
                    stream.send("agent", stream.agent.obey, stream, effect.what, self.term)
            else:
                self.sim.note(self, effect)
        self._arm()

    def _arm(self) -> None:
        due = job.next_deadline(self.state)
        if due is not None and due != self.due:
            self.sim.at(max(due, self.sim.now), self.owner.do, self._tick, due)
        self.due = due

    def _tick(self, due: float) -> None:
        if self.live and self.due == due and self.sim.now >= due:
            self.due = None
            self.feed(m.Tick())
            again = job.next_deadline(self.state)
            if again is not None and again <= due:
                raise Broken(f"a deadline is not met by its tick: {self.state.phase}")

    def attend(self, agent: Agent) -> Stream:
        stream = Stream(self.sim, agent, self)
        self.sim.streams[stream] = None
        old = self.streams.get(agent.id)
        self.streams[agent.id] = stream
        self.known[agent.id] = agent
        if old is not None:
            old.close("hub")
        return stream

    def hears(self, stream: Stream, what: m.Saying) -> None:
        if self.streams.get(stream.agent.id) is stream:
            self.feed(m.Said(stream.agent.id, what))

    def link_lost(self, stream: Stream, how: str) -> None:
        node = stream.agent.id
        if self.streams.get(node) is not stream:
            return
        del self.streams[node]
        self.feed(m.Lost(node, how, certain=False))

        def answered(found: Any) -> None:
            if self.live and found == "dead" and node not in self.streams:
                self.feed(m.Lost(node, "nobody listens there", certain=True))

        if how == CLOSED and not self.owner.stalled:
            self.sim.ask(self.owner, self.known[node], election.Who("j"), answered)

    def _herald(self) -> None:
        """Say who leads to those that are away."""
        if not self.live or not self.owner.alive or self.state.settled:
            return
        roster = self.owner.roster
        for node, _ in roster.nodes[:64] if roster else ():
            agent = self.sim.agents.get(node)
            if agent is not None and node not in self.streams and agent is not self.owner:
                lead = election.Lead("j", self.term, self.owner.id, self.owner.id)
                self.sim.ask(self.owner, agent, lead, self._led)
        self.sim.after(2.0, self.owner.do, self._herald)

    def _led(self, found: Any) -> None:
        if isinstance(found, election.Here) and found.term > self.term:
            self.owner.step_down(found.term)

    def stop(self) -> None:
        self.live = False
        for stream in list(self.streams.values()):
            stream.close("hub")


# --- an agent -----------------------------------------------------------------------------------


class Agent:
    def __init__(self, sim: Sim, host: Host, number: int) -> None:
        self.sim, self.host = sim, host
        self.id = f"{host.name}.{number}"
        self.node = m.Node(self.id, host.name, self.id, slots=sim.setting.slots, host=host.name)
        self.alive, self.paused = True, 0
        self.inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.term = 0
        self.ballot = election.Ballot("j")
        self.roster: m.Roster | None = None
        self.coordinator = ""
        self.target: str = ""
        self.stream: Stream | None = None
        self.hub: Hub | None = None
        self.searching = False
        self.was_there = False
        self.was_certain = False  # the coordinator's end was seen
        self.resumed = -10.0
        self.alone_since: float | None = sim.now
        self.rounds: Counter[str] = Counter()
        self.waited = 0.05
        self.verdict: m.Verdict | None = None
        self.exited = False
        self.fence = (0, 0)
        self.held: m.Assignment | None = None
        self.last: m.Assignment | None = None
        self.workers: dict[int, str] = {}  # rank: starting, loop, finished, dead
        self.group: Group | None = None
        self.incarnation = 0
        self.done = False
        self.failed: m.Failed | None = None
        self.offered = 0
        self.asked: tuple[int, int, float] | None = None  # generation, step, when

    # ---- time

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Now, or when it is not stopped any more."""
        if not self.alive:
            return
        if self.paused:
            self.inbox.append((call, args))
        else:
            call(*args)

    def after(self, wait: float, call: Callable[..., None], *args: Any) -> None:
        self.sim.after(wait, self.do, call, *args)

    @property
    def stalled(self) -> bool:
        """What it sees now may be older than it seems."""
        return self.sim.now < self.resumed + 1.0

    def resume(self) -> None:
        self.resumed = self.sim.now
        while self.inbox and self.alive and not self.paused:
            call, args = self.inbox.pop(0)
            call(*args)

    # ---- its coordinator

    def search(self) -> None:
        if not self.searching:
            self.searching = True
            self.after(0.001, self._look)

    def _found(self, stream: Stream) -> None:
        hub = stream.hub
        self.searching = False
        self.stream = stream
        self.term = hub.term
        self.ballot = replace(
            self.ballot, term=max(self.ballot.term, hub.term), following=hub.owner.id
        )
        self.coordinator = hub.owner.id
        self.was_there = True
        self.alone_since = None
        self.rounds.clear()
        self.waited = 0.05
        self.offered += 1
        share = None
        if self.held is not None:
            ranks = self.workers.items()
            share = m.Share(
                tuple(r for r, w in ranks if w == "loop") if self.sim.setting.sessions else (),
                tuple(r for r, w in ranks if w == "finished") if self.sim.setting.sessions else (),
                tuple(r for r, w in ranks if w == "dead") if self.sim.setting.sessions else (),
                self.done,
                self.failed,
            )
        offer = f"{self.id}:{self.offered}"
        self.say(m.Join(self.node, 0, self.held, offer, share, self.last))
        if self.asked is not None and self.held and self.held.generation == self.asked[0]:
            self._ask_to_commit(self.asked[1])

    def _look(self) -> None:
        if self.exited or self.stream is not None:
            self.searching = False
            return
        if self.verdict is not None:
            self.searching = False
            self.leave_for_good()
            return
        if self.hub is not None and self.hub.live:
            self._found(self.hub.attend(self))
            return
        target = self.sim.agents.get(self.target)
        if target is None or target is self:
            self._not_there(None)
        else:
            self.sim.ask(self, target, ("attend", self), self._attended)

    def _attended(self, found: Any) -> None:
        if self.exited or self.stream is not None or not self.searching:
            return
        if isinstance(found, Hub):
            if found.live and found.term >= self.term and found.owner.alive:
                self._found(found.attend(self))
                return
        elif isinstance(found, str) and found not in ("dead", "", self.id):
            self.target = found
            self._again()
            return
        self._not_there(found)

    def _not_there(self, found: Any) -> None:
        if self.was_there and self.roster is not None:
            self._elect(self.roster)
        else:
            self.target = self.sim.somebody(self)
            self._again()

    def _again(self) -> None:
        self.after(self.waited * (0.7 + 0.6 * self.sim.rng.random()), self._look)
        self.waited = min(self.waited * 1.6, 1.0)

    def _elect(self, roster: m.Roster) -> None:
        ahead = election.before(roster, self.id, {self.coordinator})
        asked = [self.sim.agents[n] for n, _ in ahead if n in self.sim.agents]
        self.sim.ask_all(self, asked, election.Who("j"), lambda found: self._heard(roster, found))

    def _heard(self, roster: m.Roster, found: list[tuple[Agent, Any]]) -> None:
        if self.exited or self.stream is not None:
            return
        for agent, answer in found:
            if isinstance(answer, election.Here):
                if answer.endpoint and answer.endpoint != self.id:
                    self.target = answer.endpoint
                    self._again()
                    return
                self.rounds[agent.id] += 1
                if self.rounds[agent.id] <= 3 or not election.stands(roster, self.id):
                    self.target = agent.id
                    self._again()
                    return
        if not election.stands(roster, self.id):
            self.target = self.sim.somebody(self)
            self._again()
            return
        term = max(self.term, self.ballot.term) + 1
        ask = election.Ask("j", term, self.id, self.id, self.ballot.generation)
        self.ballot, own = election.vote(self.ballot, ask)
        if not own.granted:
            self._again()
            return
        voters = [
            self.sim.agents[n] for n, _ in election.voters(roster, self.id) if n in self.sim.agents
        ]
        self.sim.ask_all(self, voters, ask, lambda found: self._counted(roster, term, found))

    def _counted(self, roster: m.Roster, term: int, found: list[tuple[Agent, Any]]) -> None:
        if self.exited or self.stream is not None:
            return
        promised = [a.id for a, p in found if isinstance(p, election.Promise) and p.granted]
        dead = [a.id for a, p in found if p == "dead"]
        ended = self.coordinator if self.was_certain and self.coordinator in dead else ""
        dead = [n for n in dead if n != self.coordinator or ended]
        for _, answer in found:
            if isinstance(answer, election.Promise) and not answer.granted:
                if answer.verdict is not None:
                    self._over(answer.verdict)
                    return
                self.ballot = replace(self.ballot, term=max(self.ballot.term, answer.term))
                if answer.endpoint and answer.endpoint != self.id:
                    self.target = answer.endpoint
                    self._again()
                    return
        overtaken = self.ballot.term > term or self.ballot.promised != self.id
        if overtaken or not election.won(roster, self.id, promised, "wait", ended):
            self._again()
            return
        self.sim.counts["elections"] += 1
        self.sim.say(f"{self.id} coordinates in term {term}")
        self.sim.won(term, self)
        self.term = term
        absent = frozenset({self.coordinator}) - {self.id}
        state = job.State.recall(
            term, self.sim.now, self.sim.options, frozenset(dead), absent, roster
        )
        self.hub = Hub(self.sim, self, state)
        self.hub.known.update({n: a for n, a in self.sim.agents.items() if n != self.id})
        self.hub._arm()
        self._found(self.hub.attend(self))

    def asked_by(self, what: Any) -> Any:
        """The answer to another agent's question."""
        live = self.hub is not None and self.hub.live
        if isinstance(what, tuple):
            if live:
                return self.hub
            return self.ballot.following
        if isinstance(what, election.Ask):
            ballot = replace(self.ballot, following=self.id) if live else self.ballot
            ballot, answer = election.vote(ballot, what)
            if answer.granted:
                self.ballot = ballot
                self.target = what.candidate
            return answer
        if isinstance(what, election.Lead) and what.term > self.term:
            self.target = what.node
            self.step_down(what.term)
            if self.stream is not None:
                stream = self.stream
                stream.close("agent")
                self.link_lost(stream, "another coordinates")
        return election.Here(max(self.term, 0), self.id if live else self.ballot.following)

    def step_down(self, term: int) -> None:
        self.ballot = replace(self.ballot, term=max(self.ballot.term, term))
        if self.hub is not None and self.hub.live and self.hub.term < term:
            self.sim.say(f"{self.id} steps down from term {self.hub.term}")
            self.hub.stop()

    def link_lost(self, stream: Stream, how: str) -> None:
        if self.stream is not stream:
            return
        self.stream = None
        self.was_certain = how == CLOSED and not self.stalled
        self.ballot = replace(self.ballot, following="")
        self.alone_since = self.sim.now
        self.after(ISOLATION, self._isolated, self.alone_since)
        self.after(self.sim.options.join, self.give_up, self.alone_since)
        self.search()

    def _isolated(self, since: float) -> None:
        if self.alone_since == since and self.held is not None:
            self.stop_workers()
            self.held = None

    def give_up(self, since: float) -> None:
        """Nobody coordinates: it was waited for long enough."""
        if self.alone_since == since and not self.exited:
            self.sim.say(f"{self.id} finds no coordinator")
            self.sim.lost = self.sim.lost or self.roster is not None
            self.leave_for_good()

    def say(self, what: m.Saying) -> None:
        if self.stream is not None:
            self.stream.send("hub", self.stream.hub.hears, self.stream, what)

    # ---- what it is told

    def obey(self, stream: Stream, what: m.Telling, term: int) -> None:
        if stream is not self.stream or term < self.term or self.exited:
            return
        if isinstance(what, m.Assign):
            if self._passes(what.assignment):
                self.assign(what.assignment)
        elif isinstance(what, m.Regroup):
            if self._passes(what.assignment):
                self.regroup(what.assignment)
        elif isinstance(what, m.Stop):
            self.after(self.sim.rng.uniform(0.01, 0.5), self._stopped, stream, what.generation)
        elif isinstance(what, m.Kill):
            if what.rank in self.workers:
                self.worker_dies(what.rank, "was killed", hung=True)
        elif isinstance(what, m.Roster):
            self.roster = what
        elif isinstance(what, m.Commit):
            self.commit(what)
        elif isinstance(what, m.Refused):
            self.asked = None
        elif isinstance(what, m.Refuse):
            raise Broken(f"{self.id} was refused: {what.reason}")
        elif isinstance(what, m.Over):
            self._over(what.verdict)

    def _passes(self, a: m.Assignment) -> bool:
        if a.generation <= self.fence[1] or a.term < self.fence[0]:
            return False
        self.fence = (a.term, a.generation)
        self.last = a
        self.ballot = replace(self.ballot, generation=a.generation)
        self.say(m.Took(a.generation))
        return True

    def _stopped(self, stream: Stream, generation: int) -> None:
        if self.held is not None and self.held.generation <= generation:
            self.stop_workers()
            self.held = None
        if self.held is None and self.stream is not None:
            self.say(m.Stopped(generation))

    def _over(self, verdict: m.Verdict) -> None:
        if self.verdict is not None:
            return
        self.verdict = verdict
        self.ballot = replace(self.ballot, verdict=verdict)
        self.stop_workers()
        self.held = None
        if self.hub is not None and self.hub.live:
            self.say(m.Leave("the job is over"))
            self.after(0.1, self._linger, self.sim.now + LINGER)
        elif self.stream is not None:
            self.say(m.Leave("the job is over"))
            self.after(LINGER / 4, self.leave_for_good)
        else:
            self.after(LINGER / 4, self.leave_for_good)

    def _linger(self, until: float) -> None:
        leads = self.hub is not None and self.hub.live and not self.hub.state.settled
        if leads and self.sim.now < until:
            self.after(0.5, self._linger, until)
            return
        self.leave_for_good()

    def leave_for_good(self) -> None:
        if not self.exited:
            self.exited = True
            self.sim.verdicts.append((self.id, self.verdict))
            self.die()

    # ---- its workers

    def assign(self, a: m.Assignment) -> None:
        self.stop_workers()
        self.held, self.done, self.failed, self.asked = a, False, None, None
        if a.host_of_store == self.id:
            self.offered += 1
            self.say(m.Offer(f"{self.id}:{self.offered}"))
        self.group = self.sim.group(a)
        self.group.claim(self, a)
        self.workers = dict.fromkeys(a.seat.ranks, "starting")
        for rank in a.seat.ranks:
            self._build(rank, a, fresh=a.fresh is not None)

    def regroup(self, a: m.Assignment) -> None:
        if self.held is None:
            return
        if self.group is not None:
            self.group.leave(self)
        self.held, self.done, self.failed, self.asked = a, False, None, None
        if a.host_of_store == self.id:
            self.offered += 1
            self.say(m.Offer(f"{self.id}:{self.offered}"))
        self.group = self.sim.group(a)
        self.group.claim(self, a)
        fresh = {a.seat.ranks[local] for local in a.fresh or ()}
        for rank in a.seat.ranks:
            if rank in fresh or self.workers.get(rank) == "dead":
                self.workers[rank] = "starting"
                self._build(rank, a, fresh=True)
            elif self.workers[rank] == "loop":
                self.event(rank, "left")
                self.group.enter(self, rank)

    def _build(self, rank: int, a: m.Assignment, *, fresh: bool) -> None:
        self.incarnation += 1
        born = self.incarnation
        wait = self.sim.rng.uniform(0.05, 1.0)

        def built() -> None:
            if self.incarnation_of.get(rank) != born or self.workers.get(rank) != "starting":
                return
            if self.host.bad and self.sim.rng.random() < 0.5:
                self.worker_dies(rank, "exited with code 7")
                return
            self.workers[rank] = "loop"
            self.event(rank, "hello", waiting=fresh)
            if self.group is not None:
                self.group.enter(self, rank)

        self.incarnation_of[rank] = born
        self.after(wait, built)

    @property
    def incarnation_of(self) -> dict[int, int]:
        return self.__dict__.setdefault("_born", {})

    def event(self, rank: int, kind: str, /, **data: Any) -> None:
        if self.held is not None and self.sim.setting.sessions:
            self.say(m.WorkerEvent(self.held.generation, rank, kind, data))

    def worker_dies(self, rank: int, how: str, *, hung: bool = False, echo: bool = False) -> None:
        if self.workers.get(rank) in (None, "dead", "finished") or self.held is None:
            return
        self.workers[rank] = "dead"
        self.sim.counts["deaths"] += 1
        if self.sim.setting.sessions:
            self.event(rank, "died", how=how, hung=hung, returncode=1)
        elif self.failed is None:
            end = {"exception": "RuntimeError: Connection closed by peer"} if echo else {}
            self.failed = m.Failed(
                self.held.generation, rank, f"rank {rank} {how}", 1, {**end, "step": 1}
            )
            self.say(self.failed)
        if self.group is not None:
            self.group.broken(self)

    def peer_gone(self, group: Group) -> None:
        """What the workers here notice when another's connection breaks."""
        if self.group is not group or self.held is None or self.done:
            return
        rank = self.held.seat.ranks[0]
        if self.sim.setting.sessions:
            if self.workers.get(rank) == "loop":
                self.event(rank, "fault", kind="peer", text="closed by peer")
        else:
            self.worker_dies(rank, "raised RuntimeError", echo=True)

    def stop_workers(self) -> None:
        self.workers = {}
        group, self.group = self.group, None
        if group is not None:
            group.leave(self)

    def good_step(self, step: int) -> None:
        for rank in list(self.workers):
            self.event(rank, "good_step", step=step, report={"lost_steps": 0})

    def finish(self, group: Group) -> None:
        if self.group is not group or self.held is None:
            return
        for rank in list(self.workers):
            self.workers[rank] = "finished"
            self.event(rank, "finished")
        self.done = True
        self.say(m.Succeeded(self.held.generation))

    # ---- checkpoints

    def prepare(self, group: Group, step: int) -> None:
        if self.group is group and self.held is not None:
            self.asked = (self.held.generation, step, self.sim.now)
            self._ask_to_commit(step)

    def _ask_to_commit(self, step: int) -> None:
        assert self.held is not None
        self.asked = (self.held.generation, step, self.sim.now)
        rank = self.held.seat.ranks[0]
        self.say(m.WorkerEvent(self.held.generation, rank, "prepared", {"step": step}))

    def commit(self, what: m.Commit) -> None:
        asked, self.asked = self.asked, None
        if asked is None or self.held is None or self.group is None:
            return
        if asked[:2] != (what.generation, what.step) or self.held.generation != what.generation:
            return
        if self.sim.now <= asked[2] + what.within and 0 in self.workers:
            self.sim.commit(self, self.held, what.step)

    # ---- its end

    def die(self, *, quietly: bool = False) -> None:
        """Its process ends, and all of it with it. ``quietly``: nobody is told by the kernel."""
        if not self.alive:
            return
        self.alive = False
        if self.roster is not None and not any(a.roster for a in self.sim.living()):
            self.sim.lost = True
        group = self.group
        self.stop_workers()
        if group is not None and not quietly:
            group.broken(self)
        for stream in list(self.sim.streams):
            if stream.agent is self:
                stream.close("agent")
            elif stream.hub.owner is self:
                stream.close("hub")
        if self.hub is not None:
            self.hub.live = False


# --- workers of a generation, together ------------------------------------------------------------


class Group:
    """They make steps while all of them are there and can talk."""

    def __init__(self, sim: Sim, a: m.Assignment) -> None:
        self.sim = sim
        self.key = (a.generation, a.store)
        self.world, self.groups = a.world, a.groups
        self.in_place = a.fresh is not None
        self.holders: dict[int, Agent] = {}
        self.here: set[int] = set()
        self.nodes: dict[str, Agent] = {}
        self.step = float(sim.progress if self.in_place else sim.saved)
        self.since: float | None = None
        self.version = 0
        self.ended = False

    def claim(self, agent: Agent, a: m.Assignment) -> None:
        for rank in a.seat.ranks:
            holder = self.holders.setdefault(rank, agent)
            if holder is not agent and holder.alive and holder.group is self:
                raise Broken(
                    f"rank {rank} of generation {a.generation}: {holder.id} and {agent.id} hold it"
                )
            self.holders[rank] = agent
        self.nodes[agent.id] = agent

    def enter(self, agent: Agent, rank: int) -> None:
        self.here.add(rank)
        self.look()

    def leave(self, agent: Agent) -> None:
        self.nodes.pop(agent.id, None)
        self.here -= {r for r, a in self.holders.items() if a is agent}
        self.ended = True
        self.look()

    def broken(self, agent: Agent) -> None:
        """A process of it died: the kernel tells those who hold a connection to it."""
        self.ended = True
        self.look()
        for other in list(self.nodes.values()):
            if other is not agent and self.sim.reach(other, agent):
                other.after(self.sim.rng.uniform(0.001, 0.05), other.peer_gone, self)

    def look(self) -> None:
        """Whether it goes on."""
        agents = self.nodes.values()
        well = (
            not self.ended
            and len(self.here) == self.world
            and len(self.nodes) == self.groups
            and all(a.alive and not a.paused and a.host.up for a in agents)
            and len({a.host.side for a in agents}) == 1
        )
        if well and self.since is None:
            self.since = self.sim.now
            self.version += 1
            if self.in_place:
                self.sim.after(STEP, self._good, self.version)
            self._plan()
        elif not well and self.since is not None:
            self._count()
            self.since = None
            self.version += 1

    def _count(self) -> None:
        if self.since is not None:
            self.step += (self.sim.now - self.since) / STEP
            self.since = self.sim.now
            self.sim.progress = int(self.step)

    def _good(self, version: int) -> None:
        if version == self.version and self.since is not None:
            for agent in list(self.nodes.values()):
                agent.do(agent.good_step, int(self.step))

    def _plan(self) -> None:
        goal = self.sim.setting.steps
        at = min((int(self.step + 1e-9) // CHECKPOINT + 1) * CHECKPOINT, goal)
        self.sim.after(max(0.0, at - self.step) * STEP + 1e-6, self._reach, self.version, at)

    def _reach(self, version: int, at: int) -> None:
        if version != self.version or self.since is None:
            return
        self._count()
        self.step = max(self.step, float(at))
        self.sim.progress = at
        writer = self.holders[0]
        writer.do(writer.prepare, self, at)
        if at >= self.sim.setting.steps:
            if self.sim.saved >= at or self.sim.rng.random() < 0.5:
                self.version += 1
                for agent in list(self.nodes.values()):
                    agent.do(agent.finish, self)
                return
            self.since = self.sim.now
            self.sim.after(1.0, self._reach, self.version, at)
            return
        self._plan()


# --- the whole ----------------------------------------------------------------------------------


class Sim:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.digest = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.events = 0
        count = setting.nodes
        self.options = m.Options(
            least=max(1, count * 3 // 4),
            most=count,
            spares=setting.spares,
            join=300.0,
            last_call=2.0,
            rejoin=10.0,
            recall=5.0,
            max_restarts=8,
            quarantine=60.0,
        )
        self.hosts = [Host(f"h{n}") for n in range(count + setting.spares)]
        self.agents: dict[str, Agent] = {}
        self.streams: dict[Stream, None] = {}  # in the order in which they came
        self.groups: dict[tuple[int, str], Group] = {}
        self.verdicts: list[tuple[str, m.Verdict | None]] = []
        self.terms: dict[int, str] = {1: "h0.1"}
        self.saved = 0  # the newest checkpoint's step
        self.progress = 0
        self.commits: list[tuple[tuple[int, str], int]] = []
        self.faults_end: float | None = None
        self.births: Counter[str] = Counter()
        self.excused: set[str] = set()  # who could not hear of the end
        self.lost = False  # all who knew of the job have died

    # ---- time and chance

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, call, args))

    def after(self, wait: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + wait, call, *args)

    def latency(self) -> float:
        chance = self.rng.random()
        return 0.0002 + 0.002 * chance if chance < 0.98 else self.rng.uniform(0.05, 0.8)

    def say(self, text: str) -> None:
        self.digest = zlib.crc32(f"{self.now:.6f} {text}".encode(), self.digest)
        if self.setting.trace:
            print(f"{self.now:10.3f} {text}")

    def note(self, hub: Hub, note: m.Note) -> None:
        self.counts[note.kind] += 1
        if note.kind == "job_over" and not self.job_over():
            here = {s.agent.id for s in hub.streams.values() if s.whole and not s.agent.paused}
            self.excused = {a.id for a in self.living()} - here
        self.say(f"[{hub.term}] {note.kind} {dict(note.data)}")

    # ---- the network

    def reach(self, a: Agent, b: Agent) -> bool:
        return a.host is b.host or (a.host.up and b.host.up and a.host.side == b.host.side)

    def ask(self, asker: Agent, target: Agent, what: Any, answered: Callable[[Any], None]) -> None:
        """One question; the answer, "dead" (nobody listens there), or None (no answer in time)."""
        state = {"open": True}

        def give(found: Any) -> None:
            if state["open"]:
                state["open"] = False
                asker.do(answered, found)

        def arrive() -> None:
            if not self.reach(asker, target):
                return
            if not target.alive:
                self.after(self.latency(), back, "dead")
            else:
                target.do(answer)

        def answer() -> None:
            found = target.asked_by(what)
            self.after(self.latency(), back, found)

        def back(found: Any) -> None:
            if self.reach(asker, target):
                give(found)

        self.after(self.latency(), arrive)
        if self.rng.random() < 0.01:  # twice
            self.after(self.latency() * 3, arrive)
        self.after(RPC, give, None)

    def ask_all(
        self,
        asker: Agent,
        targets: Iterable[Agent],
        what: Any,
        answered: Callable[[list[tuple[Agent, Any]]], None],
    ) -> None:
        targets = list(targets)
        found: dict[str, tuple[Agent, Any]] = {}
        if not targets:
            answered([])
            return

        def one(agent: Agent, answer: Any) -> None:
            found[agent.id] = (agent, answer)
            if len(found) == len(targets):
                answered([found[a.id] for a in targets])

        for target in targets:
            self.ask(asker, target, what, lambda answer, target=target: one(target, answer))

    def somebody(self, but: Agent) -> str:
        living = [a.id for a in self.agents.values() if a.alive and a is not but]
        return self.rng.choice(living) if living else ""

    # ---- what must hold

    def group(self, a: m.Assignment) -> Group:
        key = (a.generation, a.store)
        if key not in self.groups:
            self.say(f"generation {a.generation} at {a.store} of {a.groups} nodes")
            self.groups[key] = Group(self, a)
        return self.groups[key]

    def won(self, term: int, agent: Agent) -> None:
        if self.terms.setdefault(term, agent.id) != agent.id:
            raise Broken(f"term {term} has two coordinators: {self.terms[term]} and {agent.id}")

    def commit(self, agent: Agent, a: m.Assignment, step: int) -> None:
        key = (a.generation, a.store)
        self.say(f"{agent.id} commits step {step} of generation {a.generation}")
        self.counts["commits"] += 1
        if self.commits:
            last, last_step = self.commits[-1]
            if key != last and any(k == key for k, _ in self.commits):
                raise Broken(f"generation {key} commits after {last} has")
            if step < last_step or (
                step == last_step and key == last and step < self.setting.steps
            ):
                raise Broken(f"step {step} is committed by {key} after {last_step} by {last}")
        self.commits.append((key, step))
        self.saved = max(self.saved, step)

    # ---- faults

    def born(self, host: Host) -> Agent:
        self.births[host.name] += 1
        agent = Agent(self, host, self.births[host.name])
        self.agents[agent.id] = agent
        agent.target = self.somebody(agent)
        agent.after(self.options.join, agent.give_up, agent.alone_since)
        self.say(f"{agent.id} starts")
        return agent

    def living(self) -> list[Agent]:
        return [a for a in self.agents.values() if a.alive]

    def coordinator(self) -> Agent | None:
        hubs = [a for a in self.living() if a.hub is not None and a.hub.live]
        return max(hubs, key=lambda a: a.hub.term, default=None)  # type: ignore[union-attr]

    def _fault(self) -> None:
        if self.faults_end is not None:
            return
        self.after(self.rng.expovariate(1 / self.setting.fault_every), self._fault)
        living = self.living()
        if not living or self.job_over() or self.lost:
            return
        kinds = [
            (self._kill, 5),
            (self._host_off, 2),
            (self._pause, 3),
            (self._cut, 2),
            (self._reset, 4),
            (self._worker, 6),
            (self._leave, 2),
            (self._kill_coordinator, 3),
            (self._bad, 1),
        ]
        (call,) = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])
        self.counts["faults"] += 1
        call(self.rng.choice(living))

    def job_over(self) -> bool:
        return any(a.verdict is not None for a in self.agents.values())

    def _revive(self, host: Host) -> None:
        if (
            self.job_over()
            or self.lost
            or not host.up
            or any(a.alive and a.host is host for a in self.agents.values())
        ):
            return
        self.born(host).search()

    def _later(self) -> float:
        return self.rng.choice([0.3, 3.0, 10.0]) * (0.5 + self.rng.random())

    def _kill(self, agent: Agent) -> None:
        self.say(f"kill {agent.id}")
        agent.die()
        self.after(self._later(), self._revive, agent.host)

    def _kill_coordinator(self, _: Agent | None = None) -> None:
        agent = self.coordinator()
        if agent is not None:
            self._kill(agent)

    def _host_off(self, agent: Agent) -> None:
        host = agent.host
        self.say(f"power off {host.name}")
        host.up = False
        agent.die(quietly=True)
        self._look()

        def on() -> None:
            host.up = True
            self._mend()
            self._revive(host)

        self.after(self._later() * 2, on)

    def _pause(self, agent: Agent) -> None:
        self.say(f"stop {agent.id}")
        agent.paused += 1
        for stream in list(self.streams):
            if stream.agent is agent:
                stream.watch("hub")
            elif stream.hub.owner is agent:
                stream.watch("agent")
        self._look()
        self.after(self._later() * 1.5, self._resume, agent)

    def _resume(self, agent: Agent) -> None:
        agent.paused = max(0, agent.paused - 1)
        if agent.alive and not agent.paused:
            self.say(f"continue {agent.id}")
            agent.resume()
            self._look()

    def _cut(self, _: Agent) -> None:
        if any(h.side for h in self.hosts):
            return
        share = self.rng.choice([0.1, 0.3, 0.5])
        away = [h for h in self.hosts if self.rng.random() < share] or [self.hosts[0]]
        self.say(f"cut off {[h.name for h in away]}")
        for host in away:
            host.side = 1
        for stream in list(self.streams):
            if not stream.whole:
                stream.watch("agent")
                stream.watch("hub")
        self._look()
        self.after(self._later() * 2, self._heal)

    def _heal(self) -> None:
        for host in self.hosts:
            host.side = 0
        self._mend()

    def _mend(self) -> None:
        self.say("the network is whole")
        for stream in sorted(self.streams, key=lambda s: (s.agent.id, s.hub.term)):
            if stream.whole:
                stream.mend()
        self._look()

    def _look(self) -> None:
        for group in self.groups.values():
            if not group.ended:
                group.look()

    def _reset(self, agent: Agent) -> None:
        if agent.stream is not None and agent.stream.hub.owner is not agent:
            self.say(f"the connection of {agent.id} breaks")
            stream = agent.stream
            for side in ("agent", "hub"):
                self.after(self.latency(), stream._closed, side, "was reset")

    def _worker(self, agent: Agent) -> None:
        if agent.workers:
            rank = self.rng.choice(sorted(agent.workers))
            self.say(f"rank {rank} on {agent.id} dies")
            agent.do(agent.worker_dies, rank, "was killed by SIGKILL")

    def _leave(self, agent: Agent) -> None:
        self.say(f"{agent.id} leaves")
        agent.do(agent.say, m.Leave("SIGTERM"))
        self.after(0.05, agent.do, agent.die)
        self.after(self._later(), self._revive, agent.host)

    def _bad(self, agent: Agent) -> None:
        agent.host.bad = not agent.host.bad
        self.say(f"{agent.host.name} is {'bad' if agent.host.bad else 'good'}")

    def _peace(self) -> None:
        """No more faults: all that is broken is mended."""
        self.faults_end = self.now
        self.say("no more faults")
        for host in self.hosts:
            host.side, host.up, host.bad = 0, True, False
        for agent in list(self.agents.values()):
            if agent.alive and agent.paused:
                agent.paused = 0
                agent.resume()
        self._mend()
        for host in self.hosts:
            self.after(self.rng.random(), self._revive, host)

    # ---- a run

    def run(self) -> Counter[str]:
        first = self.born(self.hosts[0])
        first.hub = Hub(self, first, job.State.fresh(1))
        first.hub._arm()
        first.search()
        for host in self.hosts[1:]:
            self.after(self.rng.random(), self._start, host, first)
        if not self.setting.only_that:
            self.after(1.0, self._fault)
        else:
            self.faults_end = 0.0
        limit = None
        while self._heap:
            if not self.living() and self.faults_end is not None and not self._starting():
                break
            self.events += 1
            when, _, call, args = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            call(*args)
            if self.events == self.setting.kill_coordinator_at:
                self._kill_coordinator()
            if self.faults_end is None and (
                self.events >= self.setting.events or self.job_over() or self.lost
            ):
                self._peace()
            if self.faults_end is not None:
                limit = limit or self.now + 3 * self.options.join + 200
                if self.now > limit:
                    raise Broken(f"it does not end: {self._who()}")
        self._check_end()
        self.counts["events"] = self.events
        return self.counts

    def _start(self, host: Host, first: Agent) -> None:
        agent = self.born(host)
        agent.target = first.id
        agent.search()

    def _starting(self) -> bool:
        return any(call == self._revive or call == self._start for _, _, call, _ in self._heap)

    def _who(self) -> str:
        return ", ".join(
            f"{a.id} {'leads' if a.hub and a.hub.live else ''} "
            f"{a.hub.state.phase.value if a.hub and a.hub.live else ''}"
            f"{' alone' if a.stream is None else ''}"
            for a in self.living()[:8]
        )

    def _check_end(self) -> None:
        told = {v.success for a, v in self.verdicts if v is not None and a not in self.excused}
        told = told or {v.success for _, v in self.verdicts if v is not None}
        if len(told) > 1:
            raise Broken(f"agents left with different verdicts: {self.verdicts}")
        if not told and not self.lost:
            raise Broken("nobody knows how the job ended")
        name = "lost" if not told else "succeeded" if told == {True} else "failed"
        self.counts[name] += 1


def run(setting: Setting) -> tuple[Counter[str], int]:
    """Play it; the counts, and a number that is equal for equal runs.

    Raises Broken, with the seed in its words.
    """
    sim = Sim(setting)
    try:
        return sim.run(), sim.digest
    except Broken as error:
        raise Broken(f"{setting}: at {sim.now:.3f}, event {sim.events}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1, help="this many seeds, one after another")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--plain", action="store_true", help="programs without sessions")
    parser.add_argument("--trace", action="store_true", help="say all that happens")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.runs):
        setting = Setting(
            seed,
            args.nodes,
            args.events,
            spares=max(1, args.nodes // 50),
            sessions=not args.plain,
            trace=args.trace,
        )
        try:
            counts, digest = run(setting)
        except Broken as error:
            print(f"broken: {error}")
            return 1
        total += counts
        if args.runs == 1:
            print(f"seed {seed}: {digest:08x}")
    print(", ".join(f"{value} {name}" for name, value in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
