"""kill -9 of the controller in every state of every flow: the episode ends as if nothing
had happened, for clients that know keys and for original ones.

All jobs of all (flow, step) pairs are brought to their place, then the controller is killed
once, started again, and every job's client comes back and goes on.
"""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

import grpc
from compat.harness import Controller, Raw

from phalanx.proto import control_pb2
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery.model import State

pytestmark = [pytest.mark.process]

CONFIG = (
    '{"defaults": {"devices_per_node": 2, "world_size": 8, "clear_wait": 60, "routing_wait": 60},'
    ' "jobs": {}}'
)
NAMES = ("retry", "recover", "downgrade", "dump", "exit")


class Client:
    """One job's client, driven by hand; after a loss it subscribes again."""

    def __init__(self, name: str, keyed: bool, channel_of, strategies: str):
        self.job, self.keyed, self.channel_of = name, keyed, channel_of
        self.strategies = strategies.split(",")
        self.incarnation = 1
        self.connect()

    def info(self):
        return pb.ClientInfo(
            jobId=self.job,
            clientId=self.job,
            incarnation=self.incarnation,
            keyed=self.keyed,
            keepAlive=-1,
            declaration=pb.JobDeclaration(
                strategies=self.strategies,
                nodes=[
                    pb.NodeDeclaration(rank=n, name=f"{self.job}-n{n}", ranks=[2 * n, 2 * n + 1])
                    for n in range(4)
                ],
                watchesNodes=True,
            ),
        )

    def connect(self):
        self.raw = Raw(self.channel_of())
        assert self.raw("Init", self.info()).code == 0
        assert self.raw("Register", self.info()).code == 0
        self.stream = self.raw("SubscribeProcessManageSignal", self.info())
        self.stream.initial_metadata()

    def next(self, *wanted: str):
        signal = next(
            s
            for s in self.stream
            if s.signalType != "keep-alive"
            and (
                s.signalType in wanted or s.changeStrategy in wanted or set(s.actions) & set(wanted)
            )
        )
        self.signal = signal
        return signal

    def key(self):
        s = self.signal
        if not self.keyed:
            return None
        return pb.SignalKey(
            uuid=s.uuid, signalType=s.signalType, changeStrategy=s.changeStrategy, round=s.round
        )

    def state(self) -> str:
        return self.raw("Jobs", control_pb2.Query(jobId=self.job)).jobs[0].state

    def outcome(self) -> str:
        for _ in range(1000):  # delivery is noted just after the client has it
            view = self.raw("Jobs", control_pb2.Query(jobId=self.job)).jobs[0]
            if view.lastOutcome:
                break
        return view.lastOutcome

    # steps: each leaves the job in a state

    def fault(self, kind="1"):
        ranks = [pb.FaultRank(rankId="3", faultType=kind)]
        self.ok("ReportProcessFault", pb.ProcessFaultRequest(jobId=self.job, faultRanks=ranks))

    def device(self, code="", level="SeparateNPU"):
        self.ok(
            "ReportFault",
            control_pb2.DeviceFault(
                faultId=f"device-{self.job}",
                nodeName=f"{self.job}-n1",
                devices=[1],
                code=code,
                level=level,
            ),
        )

    def clear(self):
        self.ok("ClearFault", control_pb2.FaultReference(faultId=f"device-{self.job}"))

    def ok(self, name, request):
        answer = self.raw(name, request)
        assert answer.code == 0 and "stale" not in answer.info, (name, answer)

    def stopped(self):
        self.ok("ReportStopComplete", pb.StopCompleteRequest(jobId=self.job, key=self.key()))

    def offer(self, *names: str):
        self.ok(
            "ReportRecoverStrategy",
            pb.RecoverStrategyRequest(jobId=self.job, strategies=names or NAMES, key=self.key()),
        )

    def status(self, strategy: str, code: int = 0, isolate=()):
        self.ok(
            "ReportRecoverStatus",
            pb.RecoverStatusRequest(
                jobId=self.job,
                status=pb.Status(code=code),
                strategy=strategy,
                isolateRankIds=isolate,
                key=self.key(),
            ),
        )

    def node(self, state: str, rank: int = 1):
        self.ok("ReportNode", control_pb2.NodeReport(jobId=self.job, nodeRank=rank, state=state))


S = State
# A flow is its enabled strategies and steps; a step: what brings the job on, the state it is in
# then, and the signal that is open there ("": none; the client has to hear it (again)).
HEAD = [
    (lambda c: c.fault(), S.STOPPING, "stop_train"),
    (lambda c: c.stopped(), S.AGREEING, "on_global_rank"),
]
RETRY_HEAD = [
    (lambda c: c.fault("0"), S.STOPPING, "stop_train"),
    (lambda c: c.stopped(), S.AGREEING, "on_global_rank"),
]
DUMP_TAIL = [
    (lambda c: c.status("dump"), S.EXITING, "exit"),
    (lambda c: c.status("exit"), S.IDLE, ""),
]
FLOWS = {
    "retry": (
        "retry",
        [
            *RETRY_HEAD,
            (lambda c: c.offer(), S.RETRYING, "retry"),
            (lambda c: c.status("retry"), S.IDLE, ""),
        ],
    ),
    "retry-recover": (
        "retry,recover",
        [
            *RETRY_HEAD,
            (lambda c: c.offer(), S.RETRYING, "retry"),
            (lambda c: c.status("retry", 405), S.AGREEING, "on_global_rank"),
            (lambda c: c.offer(), S.REPLACING, "recover"),
            (lambda c: c.status("recover"), S.IDLE, ""),
        ],
    ),
    "routes": (
        "retry",
        [
            (lambda c: c.device("8C1F860B"), S.STOPPING, "stop_train"),
            (lambda c: c.stopped(), S.AGREEING, "on_global_rank"),
            (lambda c: c.offer(), S.ROUTING, ""),
            (lambda c: c.clear(), S.RETRYING, "retry"),
            (lambda c: c.status("retry"), S.IDLE, ""),
        ],
    ),
    "in-place": (
        "recover-in-place",
        [
            *HEAD,
            (lambda c: c.offer(), S.RESTARTING, "recover"),
            (lambda c: c.status("recover"), S.IDLE, ""),
        ],
    ),
    "clearing": (
        "recover-in-place",
        [
            (lambda c: c.device(level="RestartRequest"), S.STOPPING, "stop_train"),
            (lambda c: c.stopped(), S.CLEARING, ""),
            (lambda c: c.clear(), S.AGREEING, "on_global_rank"),
            (lambda c: c.offer(), S.RESTARTING, "recover"),
            (lambda c: c.status("recover"), S.IDLE, ""),
        ],
    ),
    "recover-dump": (
        "recover,dump",
        [
            *HEAD,
            (lambda c: c.offer(), S.REPLACING, "recover"),
            (lambda c: c.status("recover", 406), S.DUMPING, "dump"),
            *DUMP_TAIL,
        ],
    ),
    "elastic": (
        "elastic-training",
        [
            *HEAD,
            (lambda c: c.offer(), S.SHRINKING, "downgrade"),
            (lambda c: c.status("downgrade", 201, ["6"]), S.ISOLATING, "fault_nodes_exit"),
            (lambda c: c.status("downgrade"), S.SMALLER, ""),
            (lambda c: (c.node("replaced", 1), c.node("replaced", 3)), S.GROWING, "upgrade"),
            (lambda c: c.status("upgrade"), S.IDLE, ""),
        ],
    ),
    "dump-only": (
        "dump",
        [
            (lambda c: c.fault(), S.SAVING, "save_and_exit"),
            *DUMP_TAIL,
        ],
    ),
    "not-ready": (
        "recover",
        [
            (lambda c: c.fault(), S.STOPPING, "stop_train"),
            (
                lambda c: c.ok(
                    "ReportStopComplete",
                    pb.StopCompleteRequest(jobId=c.job, status=pb.Status(code=404), key=c.key()),
                ),
                S.KILLING,
                "killMaster",
            ),
        ],
    ),
    "nic": (
        "recover",
        [
            (
                lambda c: c.ok(
                    "SwitchNicTrack",
                    pb.SwitchNics(jobID=c.job, nicOps={"1": pb.DeviceList(dev=["0"], op=[True])}),
                ),
                S.PAUSING,
                "pause_train",
            ),
            (lambda c: c.stopped(), S.SWITCHING, ""),
            (
                lambda c: c.ok("ReplySwitchNicResult", pb.SwitchResult(jobId=c.job, result=True)),
                S.CONTINUING,
                "continue",
            ),
            (lambda c: c.status("continue"), S.IDLE, ""),
        ],
    ),
    "stress": (
        "recover",
        [
            (
                lambda c: c.ok(
                    "StressTest",
                    pb.StressTestParam(jobID=c.job, stressParam={"1": pb.StressOpList(ops=[0])}),
                ),
                S.PAUSING,
                "pause_train",
            ),
            (lambda c: c.stopped(), S.TESTING, ""),
            (
                lambda c: c.ok("ReplyStressTestResult", pb.StressTestResult(jobId=c.job)),
                S.CONTINUING,
                "continue",
            ),
            (lambda c: c.status("continue"), S.IDLE, ""),
        ],
    ),
    "hot-switch": (
        "recover",
        [
            (
                lambda c: c.ok("SwitchNode", control_pb2.NodeReport(jobId=c.job, nodeRank=1)),
                S.PREPARING,
                "hot switch",
            ),
            (lambda c: c.node("ready"), S.SPARE_RUNNING, "new pod running"),
            (lambda c: c.offer("migration"), S.OLD_LEAVING, ""),
            (lambda c: c.node("gone"), S.MIGRATING, "migration"),
            (lambda c: c.status("migration"), S.IDLE, ""),
        ],
    ),
}


def run(client: Client, steps, start: int, stop: int) -> None:
    for act, state, opens in steps[start:stop]:
        act(client)
        if opens:
            client.next(opens)
        if state is not S.KILLING or client.keyed:
            assert client.state() == state.value, client.job


def test_every_state_is_in_some_flow():
    reached = {state for _, steps in FLOWS.values() for _, state, _ in steps}
    assert reached == set(State)


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
def test_kill_in_every_state(tmp_path, heard):
    """``heard``: the client had received the open signal before the controller died."""
    (tmp_path / "jobs.json").write_text(CONFIG)
    channels: list[grpc.Channel] = []
    with Controller("--jobs", str(tmp_path / "jobs.json"), state=tmp_path / "state") as controller:

        def channel_of():
            return channels[-1]

        def connect():
            channels.append(
                grpc.insecure_channel(
                    controller.address,
                    [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)],
                )
            )
            grpc.channel_ready_future(channels[-1]).result(20)

        connect()
        outcomes = {"not-ready": "killed"}
        cases = []
        for keyed in (True, False):
            for flow, (strategies, steps) in FLOWS.items():
                for at in range(len(steps)):
                    name = f"{flow}-{at}-{'keyed' if keyed else 'old'}"
                    client = Client(name, keyed, channel_of, strategies)
                    act, state, opens = steps[at]
                    run(client, steps, 0, at)
                    if heard or state is S.KILLING:
                        if state is S.KILLING and not keyed:
                            continue  # delivery is what ends it: there is nothing to resume
                        run(client, steps, at, at + 1)
                    else:
                        client.stream.cancel()
                        # the signal is decided while nobody listens
                        while client.raw("Jobs", control_pb2.Query(jobId=name)).jobs[0].subscribed:
                            pass
                        act(client)
                    assert client.state() == state.value, name
                    cases.append((client, flow, at))
        for flow, (strategies, steps) in FLOWS.items():
            if flow == "not-ready":
                continue
            client = Client(f"{flow}-calm", True, channel_of, strategies)
            run(client, steps, 0, len(steps))
            outcomes[flow] = client.outcome()

        channels[-1].close()
        controller.restart()
        connect()

        for client, flow, at in cases:
            _, steps = FLOWS[flow]
            _, state, opens = steps[at]
            before = getattr(client, "signal", None)
            client.incarnation = 1
            client.connect()
            if state is S.EXITING and not client.keyed and heard:
                # an original client that has heard "exit" and comes back is the new job
                assert client.outcome() and client.state() == "idle", client.job
                continue
            if opens and (
                not heard
                or client.keyed
                or opens in ("stop_train", "on_global_rank", "fault_nodes_exit", "new pod running")
            ):
                again = client.next(opens)
                if heard:
                    assert again.again and again == _again(before), client.job
            assert client.state() == state.value, client.job
            run(client, steps, at + 1, len(steps))
            if steps[-1][1] is S.KILLING and client.keyed:
                client.ok(
                    "Acknowledge",
                    control_pb2.Acknowledgement(
                        jobId=client.job,
                        uuid=client.signal.uuid,
                        signalType="killMaster",
                        round=client.signal.round,
                    ),
                )
            assert client.outcome() == outcomes[flow], client.job
        channels[-1].close()
        assert len(cases) >= 90


def _again(signal):
    twin = pb.ProcessManageSignal()
    twin.CopyFrom(signal)
    twin.again = True
    return twin
