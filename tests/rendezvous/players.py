"""Who plays in the simulation: the network, agents with coordinators, and their workers.

The coordinator's machine and the rules of election are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.rendezvous import election, job
from phalanx.rendezvous import model as m

if TYPE_CHECKING:
    from tests.rendezvous.simulation import Sim

CLOSED = "closed its connection"
SILENCE = 5.0  # without a sign of life a connection counts as lost
ISOLATION = 30.0
LINGER = 20.0
STEP = 0.5
CHECKPOINT = 10  # steps


class Broken(AssertionError):
    """Something that must hold does not."""


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
        self.away: dict[str, object] = {}  # those whose connection has closed, and who are asked
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
        if how.startswith("was silent") or self.owner.stalled:
            self.feed(m.Lost(node, how, certain=False))
            return
        token = self.away[node] = object()

        def ended(certain: bool) -> None:
            if self.live and node not in self.streams and self.away.get(node) is token:
                del self.away[node]
                self.feed(m.Lost(node, how, certain=certain))

        def answered(found: Any) -> None:
            if isinstance(found, election.Here):  # it lives, and has time to come back
                self.sim.after(SILENCE, self.owner.do, ended, False)
            else:
                ended(found == "dead")

        self.feed(m.Away(node))
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
                tuple(r for r, w in ranks if w == "loop") if self.sim.setting.elastic else (),
            )
        offer = f"{self.id}:{self.offered}"
        self.say(m.Join(self.node, 0, self.held, offer, share, self.last, *self._tied(hub)))
        if self.asked is not None and self.held and self.held.generation == self.asked[0]:
            self._ask_to_commit(self.asked[1])

    def _tied(self, hub: Hub) -> tuple[tuple[str, ...], bool]:
        return election.promised_away(self.ballot, self.id, hub.term), hub.owner is self

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
        self.sim.told_of_end = True
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
        self._renumber(self.held.seat.ranks, a)
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

    def _renumber(self, old: tuple[int, ...], a: m.Assignment) -> None:
        """The same processes, called otherwise."""
        fresh = set(a.fresh or ())
        for local, rank in enumerate(old):
            if local not in fresh and a.previous[local] != rank:
                raise Broken(f"{self.id}: rank {rank} was told that it was {a.previous[local]}")
        now = dict(zip(old, a.seat.ranks, strict=True))
        self.workers = {now[rank]: state for rank, state in self.workers.items()}
        born = {now[rank]: n for rank, n in self.incarnation_of.items() if rank in now}
        self.incarnation_of.clear()
        self.incarnation_of.update(born)

    def _build(self, rank: int, a: m.Assignment, *, fresh: bool) -> None:
        self.incarnation += 1
        born = self.incarnation
        wait = self.sim.rng.uniform(0.05, 1.0)

        def built() -> None:
            rank = next((r for r, n in self.incarnation_of.items() if n == born), None)
            if rank is None or self.workers.get(rank) != "starting":
                return
            if self.host.bad and self.sim.rng.random() < 0.5:
                self.worker_dies(rank, "exited with code 7")
                return
            self.workers[rank] = "loop"
            self.event(rank, "hello", waiting=fresh, resizes=self.sim.setting.elastic)
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
        self.sim.alive -= 1
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
        self.told: set[str] = set()  # who has noticed that it is broken
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
            if other is not agent and other.id not in self.told and self.sim.reach(other, agent):
                self.told.add(other.id)
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
