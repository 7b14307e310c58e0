"""A job of many nodes under a virtual clock, with everything that can go wrong going wrong.

The coordinator's machine and the rules of election are the real ones; agents, workers, network
and storage are played. A seed replays exactly. ``python -m tests.rendezvous.simulation --help``.

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
from dataclasses import dataclass
from typing import Any

from tests.rendezvous.players import Agent, Broken, Group, Host, Hub, Stream

from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

RPC = 1.0
MANY = 50  # nodes: faults of so many come in storms
STORM, CALM = (4.0, 0.1), (12.0, 2.0)  # seconds, and seconds between two faults on average


@dataclass(frozen=True)
class Setting:
    seed: int
    nodes: int = 5
    events: int = 20_000  # faults come until then
    spares: int = 1
    slots: int = 1
    sessions: bool = True
    elastic: bool = False  # and they can go on in another world
    steps: int = 60  # what there is to train
    fault_every: float = 4.0  # seconds, on average
    kill_coordinator_at: int | None = None  # at that event
    only_that: bool = False  # and no other fault
    trace: bool = False


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
        self.alive = 0  # agents
        self.told_of_end = False
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
        self.counts["questions"] += 1

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
        self.alive += 1
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
        self.after(self.rng.expovariate(1 / self._pace()), self._fault)
        living = self.living()
        if not living or self.job_over() or self.lost:
            return
        # Each of many nodes asks all candidates when the coordinator is lost: a few of these would
        # be most of what there is to play.
        often = 1.0 if self.setting.nodes < MANY else 0.05
        kinds = [
            (self._kill, 5),
            (self._host_off, 2),
            (self._pause, 3),
            (self._cut, 2 * often),
            (self._reset, 4),
            (self._worker, 6),
            (self._leave, 2),
            (self._kill_coordinator, 3 * often),
            (self._bad, 1),
        ]
        (call,) = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])
        before = self.digest
        call(self.rng.choice(living))
        if self.digest != before:  # it has said what it does: not all can be done at any time
            self.counts["faults"] += 1
            self.counts[f"fault: {call.__name__.strip('_').replace('_', ' ')}"] += 1

    def _pace(self) -> float:
        """Seconds between two faults, on average. With many nodes a fault now and then would
        find all of them well: many at once, in every phase, and then time to get well."""
        if self.setting.nodes < MANY:
            return self.setting.fault_every
        (storm, often), (calm, seldom) = STORM, CALM
        return often if self.now % (storm + calm) < storm else seldom

    @property
    def played(self) -> int:
        """Events without those of questions (three each), which of many nodes are nearly all."""
        return self.events - 3 * self.counts["questions"]

    def job_over(self) -> bool:
        return self.told_of_end

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
            if not self.alive and self.faults_end is not None and not self._starting():
                break
            self.events += 1
            when, _, call, args = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            call(*args)
            if self.events == self.setting.kill_coordinator_at:
                self._kill_coordinator()
            if self.faults_end is None and (
                self.played >= self.setting.events or self.job_over() or self.lost
            ):
                self._peace()
            if self.faults_end is not None:
                limit = limit or self.now + 3 * self.options.join + 200
                if self.now > limit:
                    raise Broken(f"it does not end: {self._who()}")
        self._check_end()
        self.counts["events"] = self.played
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
        began = any(a.roster is not None for a in self.agents.values())
        if not told and began and not self.lost:
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


def settings(args: argparse.Namespace, seed: int) -> Setting:
    """What the job of that seed is. It depends on the seed and the command line alone."""
    kind = seed % 3
    return Setting(
        seed,
        args.nodes,
        args.events if args.runs else max(1000, args.events // 8),
        spares=max(1, args.nodes // 50),
        sessions=not args.plain and (args.elastic or kind != 0),
        elastic=args.elastic or (not args.plain and kind == 2),
        steps=60 if args.nodes < MANY else 300,  # to be there for some storms
        trace=args.trace,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=0, help="this many jobs, of as many seeds")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument(
        "--events", type=int, default=20_000, help="in all jobs together; with --runs, in each"
    )
    parser.add_argument("--plain", action="store_true", help="only programs without sessions")
    parser.add_argument("--elastic", action="store_true", help="only sessions that can be resized")
    parser.add_argument("--trace", action="store_true", help="say all that happens")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    digest = jobs = 0
    while jobs < args.runs or (not args.runs and total["events"] < args.events):
        setting = settings(args, args.seed + jobs)
        try:
            counts, number = run(setting)
        except Broken as error:
            print(f"broken: {error}")
            return 1
        total += counts
        jobs += 1
        digest = zlib.crc32(f"{number:08x}".encode(), digest)
        if args.nodes >= MANY:
            kind = "elastic" if setting.elastic else "session" if setting.sessions else "plain"
            end = next(e for e in ("lost", "succeeded", "failed") if counts[e])
            print(
                f"seed {setting.seed}: {kind:8}{number:08x}  {counts['events']:7} events, "
                f"{counts['faults']:4} faults, {counts['generation']:3} generations formed, "
                f"{counts['recovered']} in place, {counts['elections']} elections, "
                f"{counts['commits']} commits: {end}",
                flush=True,
            )
    faults = {k: v for k, v in total.items() if k.startswith("fault: ")}
    rest = {k: v for k, v in total.items() if k not in faults}
    print(f"seeds {args.seed} to {args.seed + jobs - 1}: {digest:08x}")
    print(", ".join(f"{v} {k.removeprefix('fault: ')}" for k, v in sorted(faults.items())))
    print(", ".join(f"{value} {name}" for name, value in sorted(rest.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
