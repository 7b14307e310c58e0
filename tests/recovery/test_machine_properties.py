"""What holds for every sequence of events, and what a simulated cluster makes of it."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.recovery import choice, codec, words
from phalanx.recovery import model as m
from phalanx.recovery.machine import ACTIONS, ENTRIES, GUARDS, due, step
from phalanx.recovery.model import Fault, Job, JobConfig, State
from phalanx.recovery.table import AWAITS, CHOICES, COMMON, DECIDED, EVENTS, ROWS, SENDS, rows

NO_BOUND = (State.IDLE, State.SMALLER)


def test_every_event_has_an_answer_in_every_state():
    for state in State:
        for event in EVENTS:
            assert rows(state, event)[-1].guard == "", (state, event)


def test_every_word_of_the_table_means_something():
    assert {r.guard for r in (*ROWS, *COMMON)} - {""} == set(GUARDS)
    assert {r.does for r in (*ROWS, *COMMON)} == set(ACTIONS)
    assert set(ENTRIES) == set(State)
    assert set(AWAITS) == set(State) - {State.IDLE}
    concrete = {c for c in vars(m).values() if isinstance(c, type) and issubclass(c, m.Event)}
    assert set(EVENTS) == concrete - {m.Event, m.Report}


def test_every_state_can_be_reached_and_left():
    arrows = {
        (r.state, n)
        for r in ROWS
        if r.next is not None
        for n in (CHOICES if r.next is DECIDED else (r.next,))
    }
    reached, todo = set(), [State.IDLE]
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            todo += [n for s, n in arrows if s is here]
    assert reached == set(State)
    for state in State:
        back, todo = set(), [state]
        while todo:
            here = todo.pop()
            if here not in back:
                back.add(here)
                todo += [n for s, n in arrows if s is here]
        assert State.IDLE in back, state
        if state not in NO_BOUND:
            assert any(r.state is state and r.event is m.Timeout and not r.guard for r in ROWS)


def test_no_row_is_shadowed():
    for state in State:
        for event in EVENTS:
            guards = [r.guard for r in rows(state, event) if r.state is not None]
            assert len(guards) == len(set(guards))
            assert "" not in guards[:-1]


ranks = st.integers(0, 9)
kinds = st.sampled_from([words.UCE, words.NORMAL, words.NETWORK])
names = st.sampled_from([*words.LADDER, "downgrade", "upgrade", "migration", "continue", "", "x"])
codes = st.sampled_from([0, 0, 0, 201, 404, 405, 406, 407, 499, 1, -5])
faults = st.builds(
    Fault,
    rank=ranks,
    kind=kinds,
    source=st.sampled_from(["", "", "d1", "d2"]),
    level=st.sampled_from(
        ["", "RestartRequest", "SeparateNPU", "SubHealthFault", "NotHandleFault"]
    ),
    incarnation=st.integers(0, 2),
)
few = st.lists(ranks, max_size=3).map(tuple)
configs = st.builds(
    JobConfig,
    strategies=st.lists(st.sampled_from(words.LADDER), max_size=6).map(tuple),
    sub_healthy=st.sampled_from(["ignore", "hotSwitch", "graceExit"]),
    world_size=st.sampled_from([0, 8]),
    devices_per_node=st.sampled_from([0, 2]),
    spares=st.sampled_from([None, 0, 2]),
    watches_nodes=st.booleans(),
    max_rounds=st.integers(1, 5),
)
events = st.one_of(
    st.builds(m.FaultSeen, faults=st.lists(faults, min_size=1, max_size=3).map(tuple)),
    st.builds(m.FaultCleared, source=st.sampled_from(["d1", "d2"])),
    st.builds(m.StopComplete, code=codes, ranks=few),
    st.builds(m.Strategies, names=st.lists(names, max_size=5).map(tuple), ranks=few),
    st.builds(m.Status, code=codes, strategy=names, isolate=few),
    st.just(m.Timeout()),
    st.just(m.NodeTimeout()),
    st.builds(m.NodeReplaced, node=ranks),
    st.builds(m.NodeReady, node=ranks),
    st.builds(m.NodeGone, node=ranks),
    st.builds(m.Subscribed, incarnation=st.integers(0, 3), keyed=st.booleans()),
    st.just(m.Unsubscribed()),
    st.just("delivered"),
    st.just("right answer"),
    st.just("right answer"),
    st.just("failure"),
    st.builds(m.SwitchNic, ranks=st.just(("0",)), ops=st.just((True,))),
    st.builds(m.NicSwitched, ok=st.booleans()),
    st.just(m.StressTest((("0", (0,)),))),
    st.builds(
        m.StressTested, codes=st.lists(st.tuples(ranks, st.sampled_from("01234"))).map(tuple)
    ),
    st.builds(m.HotSwitch, node=st.integers(0, 3)),
    st.builds(m.Configured, config=configs),
    st.just(m.GiveUp("enough")),
)


def answer(job: Job, pick: int = 0) -> m.Event:
    """What a well-behaved client says next; a timeout where nothing is asked of it."""
    key = job.open.key if job.open else None
    if job.state in (State.STOPPING, State.PAUSING):
        return m.StopComplete(key=key)
    if job.state in (State.AGREEING, State.SPARE_RUNNING):
        return m.Strategies(names=("retry", "recover", "downgrade", "dump", "exit"), key=key)
    if job.state is State.SWITCHING:
        return m.NicSwitched(True)
    if job.state is State.TESTING:
        return m.StressTested(())
    if job.state is State.PREPARING:
        return m.NodeReady(job.maintenance.node)
    if job.state is State.OLD_LEAVING:
        return m.NodeGone(job.maintenance.node)
    if job.state is State.SMALLER:
        return m.NodeReplaced(next(iter(set(job.isolated) - set(job.replaced)), 0))
    if job.state is State.SHRINKING:
        return m.Status(code=201, strategy="downgrade", key=key)
    if key is not None:
        return m.Status(code=0, strategy=key.strategy, key=key)
    return m.Timeout()


def check(before: Job, out: m.Outcome) -> None:
    job = out.job
    assert (job.open is not None) == (
        job.state in SENDS and job.state not in (State.SWITCHING, State.TESTING)
    )
    assert (job.deadline is None) == (job.state in NO_BOUND)
    if job.open is not None:
        assert job.open.key.round == job.round and job.open.key.uuid == job.uuid
        bound = job.deadline - job.entered
        assert 0 < bound <= job.config.report_timeout
        if job.open.report_within:
            assert job.open.report_within == int(bound)
    if job.node_deadline is not None:
        assert job.state is State.REPLACING
    if job.state in (State.IDLE, State.SMALLER):
        assert not job.faults
    if not out.changed:
        assert not out.effects
    sends = [e for e in out.effects if isinstance(e, m.Send)]
    assert len(sends) <= 1
    if sends:
        assert sends[0].signal == job.open
    assert job.round <= before.round + 1


@settings(max_examples=150, deadline=None)
@given(configs, st.lists(events, max_size=40))
def test_any_sequence(config, sequence):
    job, now, seen = Job("j", config), 1e9, {}
    for event in sequence:
        if event == "delivered":
            event = m.Delivered(job.open.key) if job.open else m.Unsubscribed()
        elif event == "right answer":
            event = answer(job)
        elif event == "failure":
            event = answer(job)
            if isinstance(event, m.Status):
                event = replace(event, code=405)
        now += 0.5
        out = step(job, event, now)
        check(job, out)
        assert codec.load(codec.dump(out.job)) == out.job
        for effect in out.effects:
            if isinstance(effect, m.Send):
                # the same key is the same signal
                assert seen.setdefault(effect.signal.key, effect.signal) == effect.signal
        job = out.job
    # silence from here on: it ends
    job = step(job, m.Unsubscribed(), now).job
    for _ in range(12):
        if (at := due(job)) is None:
            break
        late = m.NodeTimeout() if at == job.node_deadline else m.Timeout()
        out = step(job, late, at)
        check(job, out)
        job = out.job
    assert job.state in NO_BOUND


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(words.LADDER)),
    st.lists(names),
    st.lists(faults),
    st.dictionaries(st.sampled_from(words.LADDER[:-1]), st.just("why")),
)
def test_choice_is_total_and_never_above_what_is_allowed(enabled, offered, fault_list, barred):
    job = Job(
        "j",
        JobConfig(strategies=tuple(enabled)),
        faults=tuple(fault_list),
        reported=tuple(offered),
        barred=tuple(barred.items()),
    )
    chosen = choice.choose(job)
    assert chosen.strategy in {*enabled, "exit"} - set(barred)
    if chosen.strategy == "retry":
        assert all(f.kind != words.NORMAL for f in fault_list)
    for name, why in chosen.skipped:
        assert words.LADDER.index(name) < words.LADDER.index(chosen.strategy) and why


# ------------------------------------------------------------------ a simulated cluster


@dataclass
class World:
    """One job under a virtual clock, with a client that dies, repeats, reorders and lies."""

    seed: int
    keyed: bool
    config: JobConfig
    now: float = 1e9
    events: list = field(default_factory=list)
    count: int = 0
    states: set = field(default_factory=set)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.job = Job("sim", self.config)
        self.alive = False
        self.incarnation = 0
        self.calm = False
        self.done: dict[m.Key, int] = {}
        self.writes: dict[m.Key, int] = {}
        self.answers: dict[m.Report, int] = {}

    def at(self, delay, what):
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, what))

    def tell(self, event):
        before = self.job
        out = step(self.job, event, self.now)
        check(before, out)
        # kill -9 and a restart from the journal at any moment changes nothing
        self.job = codec.load(codec.dump(out.job))
        assert self.job == out.job
        self.states.add(self.job.state)
        for effect in out.effects:
            if isinstance(effect, m.ToWorkers):
                good = self.calm or self.random.random() < 0.7
                nic = effect.maintenance.kind == "nic"
                reply = m.NicSwitched(good) if nic else m.StressTested(((1, "0" if good else "2"),))
                self.at(1, lambda reply=reply: self.tell(reply))
            if isinstance(effect, m.Send) and self.alive:
                self.deliver(effect)
        return out

    def deliver(self, effect):
        signal, rnd = effect.signal, self.random
        lost = not self.calm and rnd.random() < 0.1
        if not lost:
            self.writes[signal.key] = self.writes.get(signal.key, 0) + 1
            if effect.again and not self.keyed and not signal.repeatable:
                assert self.writes[signal.key] <= 1, "a second copy that may harm"
            self.at(rnd.uniform(0, 2), lambda: self.receive(signal))
            self.at(0, lambda: self.tell(m.Delivered(signal.key)))
        else:
            self.at(0, self.die)

    def die(self):
        if self.alive:
            self.alive = False
            self.tell(m.Unsubscribed())
            self.at(self.random.uniform(0.1, 20), self.subscribe)

    def subscribe(self):
        if self.alive:
            return
        self.alive = True
        if self.random.random() < 0.5:
            self.incarnation += 1
        self.tell(m.Subscribed("c", self.incarnation if self.keyed else 0, self.keyed))

    def receive(self, signal):
        """Answers as a client does, or worse."""
        if not self.alive:
            return
        if self.keyed and self.done.get(signal.key):
            return  # seen before
        self.done[signal.key] = 1
        rnd, key = self.random, signal.key if self.keyed else None
        good = self.calm or rnd.random() < 0.7
        if signal.key.signal == words.STOP_TRAIN:
            reply = m.StopComplete(code=0 if good else rnd.choice([404, 499, 0, 1]), key=key)
        elif signal.key.signal == words.GLOBAL_FAULT or words.A_NEW_POD_RUNNING in signal.actions:
            offer = ["retry", "recover", "downgrade", "dump", "exit"]
            reply = m.Strategies(names=tuple(offer if good else rnd.sample(offer, 2)), key=key)
        elif signal.report_within:
            strategy = signal.key.strategy or "dump"
            if signal.key.signal == words.FAULT_NODES_EXIT:
                strategy = "downgrade"
            code = 201 if strategy == "downgrade" and signal.key.strategy else 0
            if not good:
                code = rnd.choice([0, 201, 405, 406, 407, 499, 3])
                strategy = rnd.choice([strategy, "lie", "exit"])
            reply = m.Status(code=code, strategy=strategy, key=key)
        else:
            return
        for _ in range(1 if good else rnd.choice([0, 1, 2, 3])):
            self.at(rnd.uniform(0, 5), lambda: self.report(reply))

    def report(self, reply):
        """A report that comes again gets the answer that its first copy got."""
        code = self.tell(reply).code
        if self.keyed:
            assert self.answers.setdefault(reply, code) == code

    def mischief(self):
        rnd = self.random
        what = rnd.randrange(8)
        if what <= 2:
            self.tell(
                m.FaultSeen(
                    tuple(
                        Fault(rnd.randrange(8), rnd.choice([0, 1, 2]), incarnation=rnd.randrange(3))
                        for _ in range(rnd.randint(1, 3))
                    )
                )
            )
        elif what == 3:
            device = rnd.choice(["d1", "d2"])
            level = rnd.choice(["RestartRequest", "SeparateNPU"])
            kind = rnd.choice([words.NORMAL, words.NETWORK, words.NETWORK])
            self.tell(m.FaultSeen((Fault(rnd.randrange(8), kind, source=device, level=level),)))
        elif what == 4:
            self.tell(m.FaultCleared(rnd.choice(["d1", "d2"])))
        elif what == 5:
            self.die()
        elif what == 6:
            self.tell(rnd.choice([m.SwitchNic(("0",), (True,)), m.StressTest(), m.HotSwitch(1)]))
        else:
            self.tell(rnd.choice([m.NodeReplaced(n) for n in range(4)] + [m.NodeReady(1)]))

    def run(self, until):
        while True:
            timer = due(self.job)
            head = self.events[0][0] if self.events else None
            if timer is not None and (head is None or timer <= head):
                if timer > until:
                    return
                self.now = max(self.now, timer)
                late = self.job.node_deadline == timer
                self.tell(m.NodeTimeout() if late else m.Timeout())
            elif head is not None and head <= until:
                self.now, _, what = heapq.heappop(self.events)
                what()
            else:
                return


@pytest.mark.parametrize("keyed", [False, True])
def test_simulated_clients(keyed):
    states = set()
    for seed in range(60):
        enabled = random.Random(seed).sample(words.LADDER, 4) if seed % 10 else ["dump"]
        config = JobConfig(
            strategies=tuple(enabled),
            world_size=8,
            devices_per_node=2,
            watches_nodes=seed % 3 == 0,
        )
        world = World(seed, keyed, config)
        world.subscribe()
        for _ in range(30):
            world.at(world.random.uniform(0, 3000), world.mischief)
        world.run(1e9 + 3000)
        world.calm = True
        world.run(1e9 + 3000 + 20 * config.report_timeout)
        assert world.job.state in NO_BOUND, seed
        assert world.now < 1e9 + 3000 + 8 * config.report_timeout
        # and a quiet cluster recovers from one more fault as if nothing had been
        world.events.clear()
        world.alive = False
        world.job = replace(world.job, present=(), isolated=())
        world.subscribe()
        world.tell(m.FaultSeen((Fault(5, incarnation=9),)))
        world.run(world.now + 100)
        enabled = choice.enabled(config.strategies)
        if world.job.state is State.IDLE and "recover" in enabled and not choice.dump_only(config):
            assert world.job.outcome in ("recover succeeded", "recover-in-place succeeded")
        states |= world.states
    assert states >= set(State) - {State.MIGRATING, State.OLD_LEAVING, State.SPARE_RUNNING}


def test_importing_recovery_needs_neither_grpc_nor_protobuf():
    code = (
        "import sys; sys.modules['grpc'] = sys.modules['google'] = None\n"
        "import phalanx.recovery, phalanx.recovery.machine, phalanx.recovery.devices\n"
        "from phalanx.recovery import step, Job, State\n"
        "import phalanx.recovery.render"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
