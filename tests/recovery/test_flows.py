"""The machine, flow by flow: what is told, what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from phalanx.recovery import codec, words
from phalanx.recovery import model as m
from phalanx.recovery.machine import due, step
from phalanx.recovery.model import Fault, Job, JobConfig, Node, State

ALL = ("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")
CONFIG = JobConfig(strategies=ALL, world_size=8, devices_per_node=2)
OFFER = ("retry", "recover", "downgrade", "upgrade", "dump", "exit")


@dataclass
class Play:
    """Feeds events and keeps what was sent."""

    config: JobConfig = CONFIG
    keyed: bool = False
    now: float = 1_700_000_000.0
    job: Job = field(init=False)
    sent: list[m.Signal] = field(default_factory=list)
    told: list[m.Signal] = field(default_factory=list)
    effects: list[m.Effect] = field(default_factory=list)

    def __post_init__(self):
        self.job = Job("job-a", self.config)
        self.tell(m.Subscribed("client", 1, self.keyed))

    def tell(self, event: m.Event, later: float = 0.01) -> m.Outcome:
        self.now += later
        out = step(self.job, event, self.now)
        assert codec.load(codec.dump(out.job)) == out.job
        self.job = out.job
        self.effects = list(out.effects)
        for effect in out.effects:
            if isinstance(effect, m.Send):
                self.sent.append(effect.signal)
            elif isinstance(effect, m.Tell):
                self.told.append(effect.signal)
        return out

    def fault(self, *ranks: int, kind: int = 1, **more) -> m.Outcome:
        return self.tell(m.FaultSeen(tuple(Fault(r, kind, **more) for r in ranks)))

    def late(self) -> m.Outcome:
        self.now = due(self.job) or self.now
        node = self.job.node_deadline is not None and self.now == self.job.node_deadline
        return self.tell(m.NodeTimeout() if node else m.Timeout(), 0)

    def to_offer(self, *ranks: int, kind: int = 1) -> None:
        self.fault(*ranks, kind=kind)
        self.tell(m.StopComplete(code=0))
        assert self.job.state is State.AGREEING

    def to_choice(self, *ranks: int, kind: int = 1, offer=OFFER) -> m.Signal:
        self.to_offer(*ranks, kind=kind)
        self.tell(m.Strategies(names=tuple(offer)))
        return self.sent[-1]

    def episode_of(self, n: int) -> None:
        """A whole episode of a client of ours, for the ``n``-th process of rank 3."""
        self.fault(3, incarnation=n + 1)
        self.tell(m.StopComplete(key=self.job.open.key))
        self.tell(m.Strategies(names=OFFER, key=self.job.open.key))
        self.tell(m.Status(code=0, strategy="recover", key=self.job.open.key))

    def status(self, code: int, strategy: str, isolate=()) -> m.Outcome:
        return self.tell(m.Status(code=code, strategy=strategy, isolate=tuple(isolate)))


def only(*names: str, **more) -> JobConfig:
    return replace(CONFIG, strategies=names, **more)


def test_a_retry_that_works():
    play = Play()
    signal = play.to_choice(3, kind=words.UCE)
    stop, agree, change = play.sent
    assert stop.key.signal == "stopTrain" and stop.actions == ("stop_train",)
    assert stop.ranks == ((3, 0),) and stop.timeout == 900
    assert agree.actions == ("on_global_rank",) and agree.ranks == ((3, 0),)
    assert change is signal and signal.key.strategy == "retry" and signal.nodes == (1,)
    assert len({s.key.uuid for s in play.sent}) == 1
    play.status(0, "retry")
    assert play.job.state is State.IDLE and play.job.outcome == "retry succeeded"


def test_network_faults_give_the_routes_time():
    play = Play()
    play.to_offer(2, kind=words.NETWORK)
    assert play.sent[-1].timeout >= 33


def test_in_place_is_recover_on_the_wire():
    signal = Play().to_choice(3)
    assert signal.key.strategy == "recover" and signal.extra == "recover-in-place"
    assert signal.actions == ("change_strategy", "fault_nodes_restart") and signal.nodes == (1,)
    assert signal.ranks == ((3, 1),)


@pytest.mark.parametrize("name", ["recover", "recover-in-place"])
def test_in_place_may_be_reported_under_either_name(name):
    play = Play()
    play.to_choice(3)
    play.status(0, name)
    assert play.job.outcome == "recover-in-place succeeded"


def test_recover_names_all_ranks_of_the_node():
    play = Play(only("recover", "dump"))
    signal = play.to_choice(3)
    agree = play.sent[-2]
    assert agree.actions == ("on_global_rank", "fault_nodes_exit")
    assert agree.ranks == ((2, 1), (3, 1)) and agree.nodes == (1,)
    assert signal.key.strategy == "recover" and signal.actions == ("change_strategy",)


@pytest.mark.parametrize(
    ("strategy", "kind", "enabled", "code", "then"),
    [
        ("retry", 0, ALL, 406, State.SHRINKING),
        ("retry", 0, ("retry", "recover", "dump"), 406, State.DUMPING),
        ("retry", 0, ("retry", "recover", "dump"), 499, State.EXITING),
        ("retry", 0, ("retry", "recover", "dump"), 7, State.DUMPING),
        ("retry", 0, ("retry",), 406, State.EXITING),
        ("recover", 1, ("recover-in-place", "recover", "dump"), 405, State.REPLACING),
        ("recover", 1, ("recover-in-place", "recover", "dump"), 406, State.DUMPING),
        ("recover", 1, ("recover", "dump"), 406, State.DUMPING),
        ("recover", 1, ("recover", "dump"), 405, State.DUMPING),
        ("recover", 1, ("recover", "elastic-training", "dump"), 405, State.SHRINKING),
        ("recover", 1, ("recover", "dump"), 499, State.EXITING),
        ("recover", 1, ("recover", "dump"), 404, State.EXITING),
        ("recover", 1, ("recover",), 406, State.EXITING),
        ("downgrade", 1, ("elastic-training", "dump"), 406, State.DUMPING),
        ("downgrade", 1, ("elastic-training", "dump"), 499, State.EXITING),
        ("dump", 1, ("dump", "recover"), 0, State.EXITING),
        ("dump", 1, ("dump", "recover"), 407, State.EXITING),
        ("dump", 1, ("dump", "recover"), 499, State.EXITING),
    ],
)
def test_what_follows_a_failure(strategy, kind, enabled, code, then):
    play = Play(only(*enabled))
    offer = [o for o in OFFER if strategy != "dump" or o in ("dump", "exit")]
    signal = play.to_choice(3, kind=kind, offer=offer)
    assert signal.key.strategy == strategy
    play.status(code, strategy)
    assert play.job.state is then
    assert len({s.key for s in play.sent}) == len(play.sent)  # each is a signal of its own
    if strategy == "dump":
        assert play.sent[-1].extra == "dump_exit"


def test_405_after_a_retry_asks_again_with_normal_faults():
    play = Play(only("retry", "recover", "dump"))
    play.to_choice(3, kind=words.UCE)
    play.status(405, "retry")
    again = play.sent[-1]
    assert play.job.state is State.AGREEING and again.key.round == 2
    assert again.key.uuid == play.sent[0].key.uuid
    assert again.ranks == ((2, 1), (3, 1)) and "fault_nodes_exit" in again.actions
    play.tell(m.Strategies(names=("recover", "dump", "exit")))
    assert play.job.state is State.REPLACING
    assert [s.key.signal for s in play.sent].count("stopTrain") == 1


def test_no_retry_in_the_offer_falls_to_recover_not_to_dump():
    signal = Play(only("retry", "recover", "dump")).to_choice(
        3, kind=words.UCE, offer=("recover", "dump", "exit")
    )
    assert signal.key.strategy == "recover" and "did not offer retry" in signal.reason


@pytest.mark.parametrize(
    ("code", "state"),
    [(404, State.KILLING), (499, State.EXITING), (403, State.EXITING), (0, State.AGREEING)],
)
def test_stop_complete_codes_count(code, state):
    play = Play()
    play.fault(1)
    play.tell(m.StopComplete(code=code))
    assert play.job.state is state


def test_dump_only_jobs_save_at_once():
    play = Play(only("dump"))
    play.fault(5)
    assert play.sent[-1].key.signal == "saveAndExit" and play.sent[-1].nodes == (2,)
    play.status(0, "dump")
    assert play.sent[-1].key.strategy == "exit" and play.sent[-1].extra == "dump_exit"
    play.tell(m.Delivered(play.sent[-1].key))
    play.tell(m.Subscribed("client", 0))
    assert play.job.state is State.IDLE and play.job.outcome == "dump and exit"


def test_scale_in_and_out():
    play = Play(only("elastic-training", "dump"))
    signal = play.to_choice(3)
    assert signal.key.strategy == "downgrade" and signal.extra == '{"scale-in-strategy": "DP"}'
    play.status(201, "downgrade", isolate=(2, 3, 6))
    gone = play.sent[-1]
    assert gone.key.signal == "faultNodesExit" and gone.nodes == (3,)
    play.status(0, "downgrade")
    assert play.job.state is State.SMALLER and play.job.isolated == (1, 3)
    assert play.job.deadline is None
    assert not play.fault(2).effects  # a node that was sent away
    play.tell(m.NodeReplaced(1))
    assert play.job.state is State.SMALLER
    play.tell(m.NodeReplaced(3))
    assert play.sent[-1].key.strategy == "upgrade"
    play.status(0, "upgrade")
    assert play.job.state is State.IDLE


def test_scale_in_that_reports_0_first_is_not_stuck():
    play = Play(only("elastic-training"))
    play.to_choice(3)
    play.status(0, "downgrade")
    assert play.job.state is State.SMALLER


def test_a_fault_in_the_smaller_world_starts_a_round():
    play = Play(only("elastic-training", "dump"))
    play.to_choice(3)
    play.status(0, "downgrade")
    play.fault(6)
    assert play.job.state is State.STOPPING and play.sent[-1].ranks == ((6, 1),)
    assert play.sent[-1].key.uuid != play.sent[0].key.uuid


def test_no_replacement_in_time_shrinks_or_dumps():
    for names, state in ((ALL, State.SHRINKING), (("recover", "dump"), State.DUMPING)):
        play = Play(only(*names, watches_nodes=True))
        play.to_choice(3, offer=OFFER)
        if play.job.state is State.RESTARTING:
            play.status(405, "recover")
        assert play.job.state is State.REPLACING
        play.late()
        assert play.job.state is state, names


def test_a_replaced_node_ends_the_wait_for_it():
    play = Play(only("recover", watches_nodes=True))
    play.to_choice(3)
    assert play.job.node_deadline is not None
    play.tell(m.NodeReplaced(1))
    assert play.job.node_deadline is None


def test_hardware_that_may_clear_is_waited_for_by_event():
    play = Play()
    play.fault(3, source="d1", level="RestartRequest")
    play.tell(m.StopComplete())
    assert play.job.state is State.CLEARING and play.job.open is None
    play.tell(m.FaultCleared("d1"))
    assert play.job.state is State.AGREEING and play.job.stay == (1,)
    play.tell(m.Strategies(names=OFFER))
    assert play.job.state is State.RESTARTING


def test_hardware_that_does_not_clear_goes():
    play = Play()
    play.fault(3, source="d1", level="RestartRequest")
    play.tell(m.StopComplete())
    play.late()
    assert play.job.state is State.AGREEING and play.sent[-1].nodes == (1,)
    play.tell(m.Strategies(names=OFFER))
    assert play.job.state is State.REPLACING


def test_a_link_that_comes_back_lets_the_retry_go():
    play = Play()
    play.fault(3, kind=words.NETWORK, source="link")
    play.tell(m.StopComplete())
    play.tell(m.Strategies(names=OFFER))
    assert play.job.state is State.ROUTING
    play.tell(m.FaultCleared("link"))
    assert play.job.state is State.RETRYING


def test_second_fault_while_stopping_is_merged():
    play = Play()
    play.fault(0)
    play.fault(1)
    play.fault(0)
    assert play.job.state is State.STOPPING and len(play.sent) == 1
    play.tell(m.StopComplete())
    assert dict(play.sent[-1].ranks) == {0: 1, 1: 1}


def test_second_fault_during_the_agreement():
    for keyed, rounds in ((False, 1), (True, 2)):
        play = Play(keyed=keyed)
        play.to_offer(3, kind=words.UCE)
        play.fault(6)
        assert play.job.round == rounds and play.job.state is State.AGREEING
        key = play.job.open.key if keyed else None
        play.tell(m.Strategies(names=OFFER, key=key))
        assert {r for r, _ in play.sent[-1].ranks} == {3, 6}


def test_second_fault_during_a_repair_original_client():
    play = Play()
    play.to_choice(3)
    play.fault(6)
    assert play.job.state is State.RESTARTING and play.job.waiting
    play.status(0, "recover")
    assert play.job.state is State.STOPPING and play.sent[-1].ranks == ((6, 1),)
    assert play.sent[-1].key.uuid != play.sent[0].key.uuid


def test_second_fault_during_a_repair_own_client():
    play = Play(keyed=True)
    play.to_choice(3)
    old = play.job.open.key
    play.fault(6)
    assert play.job.state is State.STOPPING and play.sent[-1].ranks == ((3, 1), (6, 1))
    out = play.tell(m.Status(code=0, strategy="recover", key=old))
    assert out.code == 401 and out.job is play.job and not out.changed


def test_the_same_rank_again_as_another_process():
    play = Play(keyed=True)
    play.to_choice(3)
    assert not play.fault(3).effects
    play.fault(3, incarnation=2)
    assert play.job.state is State.STOPPING


def test_rounds_end():
    play = Play(only(*ALL, max_rounds=3), keyed=True)
    play.fault(3)
    for n in range(2, 6):
        if play.job.state is State.STOPPING:
            play.tell(m.StopComplete(key=play.job.open.key))
        if play.job.state is State.AGREEING:
            play.tell(m.Strategies(names=OFFER, key=play.job.open.key))
        play.fault(3, incarnation=n)
    assert play.job.state in (State.DUMPING, State.EXITING)
    assert "rounds" in play.job.why


def test_stale_reports_are_answered_and_change_nothing():
    play = Play()
    for event in (m.StopComplete(), m.Strategies(names=OFFER), m.Status(strategy="retry")):
        out = play.tell(event)
        assert out.job is play.job and out.code == 0 and "stale" in out.info and not out.effects
    play.to_choice(3)
    for event in (
        m.Status(code=0, strategy="dump"),
        m.Status(code=406, strategy="retry"),
        m.Status(code=0, strategy="recover", ranks=(7,)),
        m.StopComplete(code=404),
    ):
        assert not play.tell(event).effects and play.job.state is State.RESTARTING


def test_repetition_to_an_original_client():
    play = Play()
    play.fault(3)
    key = play.sent[-1].key
    play.tell(m.Delivered(key))
    play.tell(m.Unsubscribed())
    play.tell(m.Subscribed("client", 0))
    assert play.sent[-1].key == key and len(play.sent) == 2  # stop_train: harmless
    play.tell(m.StopComplete())
    play.tell(m.Strategies(names=OFFER))
    count = len(play.sent)
    play.tell(m.Subscribed("client", 0))
    assert len(play.sent) == count + 1  # not known to be delivered
    play.tell(m.Delivered(play.sent[-1].key))
    play.tell(m.Subscribed("client", 0))
    assert len(play.sent) == count + 1


def test_repetition_to_our_client():
    play = Play(keyed=True)
    play.to_choice(3)
    play.tell(m.Delivered(play.sent[-1].key))
    count = len(play.sent)
    play.tell(m.Subscribed("client", 2, True))
    assert len(play.sent) == count + 1 and play.sent[-1] == play.sent[-2]
    assert any(isinstance(e, m.Send) and e.again for e in play.effects)


def test_faults_without_a_subscriber_wait_for_one():
    play = Play()
    play.tell(m.Unsubscribed())
    play.fault(1)
    play.tell(m.Subscribed("client", 0))
    assert [s.key.signal for s in play.sent] == ["stopTrain", "stopTrain"]


def test_silence_ends_everywhere():
    play = Play()
    play.fault(1)
    play.tell(m.Unsubscribed())
    seen = []
    while play.job.state is not State.IDLE:
        seen.append(play.job.state)
        play.late()
        assert len(seen) < 10
    assert seen == [State.STOPPING, State.EXITING]


def test_nic_switch():
    play = Play()
    out = play.tell(m.SwitchNic(("0", "1"), (True, False)))
    assert out.code == 0 and play.sent[-1].actions == ("pause_train",)
    assert play.sent[-1].timeout == 0
    assert play.tell(m.SwitchNic(("0",), (True,))).code == 411
    play.tell(m.StopComplete())
    assert play.job.state is State.SWITCHING
    (order,) = [e for e in play.effects if isinstance(e, m.ToWorkers)]
    assert order.maintenance.ranks == ("0", "1")
    play.tell(m.NicSwitched(True))
    assert play.sent[-1].key.strategy == "continue"
    play.status(0, "continue")
    assert play.job.state is State.IDLE
    assert m.ToOperator("nic", "ok") in play.effects


@pytest.mark.parametrize(
    "event", [m.NicSwitched(False), m.Status(code=406), m.Status(code=405), m.Timeout()]
)
def test_nic_switch_that_fails_becomes_a_recovery(event):
    play = Play()
    play.tell(m.SwitchNic(("0",), (True,)))
    play.tell(m.StopComplete())
    play.tell(event)
    assert play.job.state is State.STOPPING
    assert any(isinstance(e, m.ToOperator) for e in play.effects)


def test_stress_test():
    play = Play()
    play.tell(m.StressTest((("0", (0, 1)),)))
    assert play.sent[-1].timeout == 900
    play.tell(m.StopComplete())
    assert play.told[-1].actions == ("pause_start_agent",)
    play.tell(m.StressTested(((0, "0"), (1, "1"))))
    assert play.told[-1].actions == ("continue_start_agent",)
    play.status(0, "continue")
    assert play.job.outcome == "maintenance succeeded"


@pytest.mark.parametrize("code", ["2", "3", "4"])
def test_stress_test_that_finds_something(code):
    play = Play()
    play.tell(m.StressTest((("0", (0,)),)))
    play.tell(m.StopComplete())
    play.tell(m.StressTested(((0, "0"), (5, code))))
    assert play.job.state is State.STOPPING and play.sent[-1].ranks == ((5, 1),)
    assert play.told[-1].actions == ("continue_start_agent",)


@pytest.mark.parametrize("event", [m.StopComplete(code=499), m.Timeout()])
def test_a_pause_that_fails_kills(event):
    play = Play()
    play.tell(m.SwitchNic(("0",), (True,)))
    play.tell(event)
    assert play.sent[-1].key.signal == "killMaster"
    play.tell(m.Delivered(play.sent[-1].key))
    assert play.job.state is State.IDLE and play.job.outcome == "killed"


def test_hot_switch():
    play = Play()
    play.tell(m.HotSwitch(2))
    assert play.sent[-1].actions == ("hot switch",) and play.sent[-1].ranks == ((4, 1), (5, 1))
    play.tell(m.NodeReady(1))
    assert play.job.state is State.PREPARING
    play.tell(m.NodeReady(2))
    assert play.sent[-1].actions == ("new pod running",)
    play.tell(m.Strategies(names=("migration",)))
    play.tell(m.NodeGone(2))
    assert play.sent[-1].key.strategy == "migration"
    play.status(0, "migration")
    assert play.job.outcome == "migration succeeded"


def test_hot_switch_without_a_spare_is_given_up_and_not_tried_again():
    play = Play()
    play.tell(m.HotSwitch(2))
    play.late()
    assert play.job.state is State.IDLE and play.told[-1].actions == ("stop switch",)
    assert play.tell(m.HotSwitch(2)).code == 411


@pytest.mark.parametrize("names", [(), ("exit",)])
def test_hot_switch_that_the_client_refuses(names):
    play = Play()
    play.tell(m.HotSwitch(2))
    play.tell(m.NodeReady(2))
    play.tell(m.Strategies(names=names))
    assert play.job.state is State.EXITING


@pytest.mark.parametrize("code", [405, 406, 499, 1])
def test_migration_never_sticks(code):
    play = Play()
    for event in (m.HotSwitch(2), m.NodeReady(2), m.Strategies(names=("migration",))):
        play.tell(event)
    play.tell(m.NodeGone(2))
    play.status(code, "migration")
    assert play.job.state is State.EXITING


def test_a_fault_ends_a_hot_switch():
    play = Play()
    play.tell(m.HotSwitch(2))
    play.fault(1)
    assert play.job.state is State.STOPPING and play.told[-1].actions == ("stop switch",)


def test_sub_health():
    play = Play()
    play.fault(3, source="s", level="SubHealthFault")
    assert play.job.state is State.IDLE
    play = Play(only(*ALL, sub_healthy="hotSwitch"))
    play.fault(3, source="s", level="SubHealthFault")
    assert play.job.state is State.PREPARING
    play = Play(only("dump", sub_healthy="graceExit"))
    play.fault(3, source="s", level="SubHealthFault")
    assert play.job.state is State.SAVING
    play = Play()
    play.fault(3, source="s", level="NotHandleFault")
    assert play.job.state is State.IDLE


def test_configuration_takes_effect_at_the_next_episode():
    play = Play(only("dump", "recover"))
    play.to_choice(3)
    play.tell(m.Configured(only("exit")))
    assert play.job.config.strategies == ("dump", "recover")
    play.status(0, "recover")
    assert play.job.config.strategies == ("exit",)


def test_a_device_fault_triggers_once_until_it_is_cleared():
    play = Play(only("recover"))
    play.fault(3, source="d")
    play.tell(m.StopComplete())
    play.tell(m.Strategies(names=OFFER))
    play.status(0, "recover")
    assert play.job.state is State.IDLE and play.job.present
    assert not play.fault(3, source="d").effects
    play.tell(m.FaultCleared("d"))
    play.fault(3, source="d")
    assert play.job.state is State.STOPPING


def test_no_spare_shrinks_at_once():
    play = Play(only("recover", "elastic-training", spares=0))
    play.fault(3, source="d", level="SeparateNPU")
    play.tell(m.StopComplete())
    play.tell(m.Strategies(names=OFFER))
    assert play.job.state is State.SHRINKING and "no spare node" in play.job.why


def test_named_nodes():
    nodes = (Node(0, "a", ranks=(0, 1, 2)), Node(1, "b", ranks=(3,)))
    play = Play(JobConfig(strategies=("recover",), nodes=nodes))
    play.to_offer(1)
    assert play.sent[-1].ranks == ((0, 1), (1, 1), (2, 1)) and play.sent[-1].nodes == (0,)


def test_a_job_that_says_nothing_about_itself():
    play = Play(JobConfig(strategies=("recover",)))
    signal = play.to_choice(3)
    assert signal.ranks == ((3, 1),) and signal.nodes == ()


def test_a_repeated_report_is_one():
    play = Play()
    play.tell(m.FaultSeen((Fault(1),), "id-1"))
    play.tell(m.StopComplete())
    play.tell(m.Strategies(names=OFFER))
    play.status(0, "recover")
    assert not play.tell(m.FaultSeen((Fault(1),), "id-1")).effects
    assert play.job.state is State.IDLE


def test_a_keyed_report_that_comes_again_gets_its_first_answer():
    play = Play(keyed=True)
    play.fault(3)
    stop = m.StopComplete(key=play.job.open.key)
    first = play.tell(stop)
    offer = m.Strategies(names=OFFER, key=play.job.open.key)
    play.tell(offer)
    done = m.Status(code=0, strategy="recover", key=play.job.open.key)
    play.tell(done)
    assert play.job.state is State.IDLE and first.code == 0
    for again in (stop, offer, done):
        out = play.tell(again)
        assert (out.code, out.info, out.effects, out.changed) == (0, "", (), False)
    # other words under the same key are not the same report
    assert play.tell(replace(done, code=406)).code == 401
    for n in range(20):  # and not all of them are remembered
        play.episode_of(n)
    assert len(play.job.answered) == 8 and play.tell(stop).code == 401


def test_a_rank_that_fails_over_and_over_does_not_add_up():
    for keyed in (False, True):
        play = Play(only("recover", "dump", max_rounds=10_000), keyed=keyed)
        for n in range(1, 300):
            play.fault(3, incarnation=n)
            play.fault(3, incarnation=n - 1)  # an old one again
        assert len(play.job.faults) == 1 and play.job.faults[0].incarnation == 299
        play.tell(m.StopComplete(key=play.job.open.key if keyed else None))
        play.tell(m.Strategies(names=OFFER, key=play.job.open.key if keyed else None))
        for n in range(300, 600):
            play.fault(3, incarnation=n)
        assert len(play.job.faults) + len(play.job.waiting) <= 2
