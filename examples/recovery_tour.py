"""A walk through every strategy of the recovery protocol and every fall-back.

``python examples/recovery_tour.py [--listen 127.0.0.1:8899] [--state-dir DIR]`` starts a
controller and, in another process, the clients of some jobs (no training, no device): they
report faults, answer signals as a worker side does, and fail where the story wants it. What
goes over the wire is printed: ``>`` from the client, ``<`` from the controller.
"""

from __future__ import annotations

import argparse
import os
import queue
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OFFER = ("retry", "recover", "downgrade", "upgrade", "dump", "exit")
ALL = ("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")


@dataclass
class Story:
    """One job: what it enables, what breaks, what its worker side reports."""

    title: str
    strategies: tuple[str, ...]
    kind: int = 1  # 0 memory, 1 anything, 2 network
    offer: tuple[str, ...] = OFFER
    codes: dict[str, list[int]] = field(default_factory=dict)
    stop_code: int = 0
    ends: str = ""  # how the last episode has to end
    special: Callable[[Any], None] | None = None


STORIES = [
    Story("retry: the step is done again", ALL, 0, ends="retry succeeded"),
    Story("retry of a network fault", ("retry", "dump"), 2, ends="retry succeeded"),
    Story(
        "retry fails while cleaning up (405): asked again, then in place",
        ALL,
        0,
        codes={"retry": [405]},
        ends="recover-in-place succeeded",
    ),
    Story(
        "retry fails (406): dump or exit",
        ("retry", "recover", "dump"),
        0,
        codes={"retry": [406]},
        ends="dump and exit",
    ),
    Story(
        "retry fails (499): nothing but exit",
        ("retry", "recover", "dump"),
        0,
        codes={"retry": [499]},
        ends="exit",
    ),
    Story(
        "retry enabled, not offered: recover, not dump",
        ("retry", "recover", "dump"),
        0,
        offer=("recover", "dump", "exit"),
        ends="recover succeeded",
    ),
    Story("recover-in-place: only the faulty process", ALL, ends="recover-in-place succeeded"),
    Story(
        "recover-in-place fails (405): the node goes",
        ("recover-in-place", "recover", "dump"),
        codes={"recover": [405]},
        ends="recover succeeded",
    ),
    Story("recover: the node is replaced", ("recover", "dump"), ends="recover succeeded"),
    Story(
        "recover fails (406): dump",
        ("recover", "dump"),
        codes={"recover": [406]},
        ends="dump and exit",
    ),
    Story(
        "recover fails (406), the dump too (407)",
        ("recover", "dump"),
        codes={"recover": [406], "dump": [407]},
        ends="dump and exit",
    ),
    Story(
        "elastic-training: smaller, and back",
        ("elastic-training", "dump"),
        ends="elastic-training succeeded",
    ),
    Story(
        "scale-in fails (406): dump",
        ("elastic-training", "dump"),
        codes={"downgrade": [406]},
        ends="dump and exit",
    ),
    Story("a job that enables only dump", ("dump",), ends="dump and exit"),
    Story("nothing enabled: exit", ("exit",), ends="exit"),
    Story("the workers had not come up (404)", ALL, stop_code=404, ends="killed"),
    Story(
        "a second fault while the first is repaired",
        ALL,
        ends="recover-in-place succeeded",
        special=lambda job: job.second_fault(),
    ),
    Story(
        "the client dies in the middle and comes back",
        ALL,
        ends="recover-in-place succeeded",
        special=lambda job: job.reconnect(),
    ),
    Story(
        "the controller is killed (kill -9) in the middle",
        ALL,
        ends="recover-in-place succeeded",
        special=lambda job: job.kill_controller(),
    ),
    Story("a NIC switch", ALL, ends="maintenance succeeded", special=lambda job: job.switch_nic()),
    Story(
        "a stress test that finds a bad device",
        ("recover", "dump"),
        ends="recover succeeded",
        special=lambda job: job.stress_test(),
    ),
    Story(
        "a hot switch to a spare node",
        ALL,
        ends="migration succeeded",
        special=lambda job: job.hot_switch(),
    ),
]


# ------------------------------------------------------------------ the clients' process


def say(text: str) -> None:
    print(text, flush=True)


class Job:
    """One story's client."""

    def __init__(self, number: int, story: Story, address: str, started: float) -> None:
        from phalanx.client import Declaration, Link
        from phalanx.recovery.model import Node

        self.story, self.started = story, started
        self.name = f"tour-{number:02}"
        self.codes = {k: [*v] for k, v in story.codes.items()}
        self.events: queue.Queue[Any] = queue.Queue()
        self.declaration = Declaration(
            strategies=story.strategies,
            world_size=8,
            nodes=tuple(Node(n, f"{self.name}-n{n}", ranks=(2 * n, 2 * n + 1)) for n in range(4)),
        )
        self.address = address
        self.incarnation = 1
        self.make = lambda: Link(
            address,
            self.name,
            self.events.put,
            client_id=self.name,
            back_off=1.0,
            incarnation=self.incarnation,
            declaration=self.declaration,
        )
        self.twist: Callable[[Any], bool] | None = None
        self.connect()

    def connect(self) -> None:
        self.link = self.make()
        self.link.start()
        if not self.link.wait_connected(20):
            raise SystemExit(f"no controller at {self.address}")

    def out(self, text: str) -> None:
        say(f"  {(time.monotonic() - self.started) * 1000:9.1f} ms  > {text}")

    def into(self, signal: Any) -> None:
        parts = [signal.signal, *(f"[{a}]" for a in signal.actions)]
        if signal.strategy:
            parts.append(f"strategy {signal.strategy}")
        if signal.extra:
            parts.append(f"({signal.extra})")
        if signal.ranks:
            parts.append("ranks " + ",".join(f"{r}:{t}" for r, t in signal.ranks.items()))
        if signal.nodes:
            parts.append("nodes " + ",".join(map(str, signal.nodes)))
        if signal.report_within:
            parts.append(f"within {signal.report_within} s")
        if signal.again:
            parts.append("(again)")
        if signal.reason and signal.signal == "changeStrategy":
            parts.append(f"because: {signal.reason}")
        say(f"  {(time.monotonic() - self.started) * 1000:9.1f} ms  < {' '.join(parts)}")

    def answered(self, answer: Any) -> None:
        if answer.code or answer.info.startswith("stale"):
            say(f"{'':15}  < answer {answer.code}: {answer.info}")

    def fault(self, rank: int = 3, incarnation: int = 1) -> None:
        kind = self.story.kind
        self.out(f"ReportProcessFault rank {rank} type {kind}")
        self.answered(self.link.report_fault({rank: kind}, incarnations={rank: incarnation}))

    def view(self) -> Any:
        from phalanx.client.channel import Stub, connect
        from phalanx.proto import control_pb2

        channel = connect(self.address, None)
        try:
            return Stub(channel)("Jobs", control_pb2.Query(jobId=self.name), 5).jobs[0]
        finally:
            channel.close()

    def operate(self, name: str, request: Any) -> None:
        from phalanx.client.channel import Stub, connect

        channel = connect(self.address, None)
        try:
            self.answered(Stub(channel)(name, request, 5))
        finally:
            channel.close()

    def play(self) -> bool:
        story = self.story
        if story.special is not None:
            story.special(self)
        else:
            self.fault()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                signal = self.events.get(timeout=0.2)
            except queue.Empty:
                view = self.view()
                if view.state == "smaller":
                    for node in (1, 3):
                        self.out(f"ReportNode {node} replaced")
                        self.link.node(node, "replaced")
                    continue
                if view.state == "idle" and view.lastOutcome:
                    good = view.lastOutcome == story.ends
                    say(
                        f"  => {view.lastOutcome}: {view.lastReason}"
                        + ("" if good else f"   EXPECTED {story.ends}")
                    )
                    self.link.close()
                    return good
                continue
            self.into(signal)
            if self.twist is not None and self.twist(signal):
                continue
            self.answer(signal)
        say("  => it did not end in 30 s")
        return False

    def answer(self, signal: Any) -> None:
        link = self.link
        if signal.signal == "stopTrain":
            code = self.story.stop_code if "stop_train" in signal.actions else 0
            self.out(f"ReportStopComplete {code}")
            self.answered(link.stop_complete(signal, code, ranks=signal.ranks))
        elif signal.signal == "globalFault" or "new pod running" in signal.actions:
            offer = self.story.offer if signal.signal == "globalFault" else ("migration",)
            self.out(f"ReportRecoverStrategy {', '.join(offer)}")
            self.answered(link.strategies(signal, offer))
            if signal.signal == "hot-switch":
                self.out("ReportNode 1 gone")
                self.answered(link.node(1, "gone"))
        elif signal.strategy == "exit":
            self.out("ReportRecoverStatus 0 exit (the job leaves)")
            self.answered(link.status(signal, 0))
        elif signal.report_within:
            name = signal.strategy or "dump"
            if signal.signal == "faultNodesExit":
                name = "downgrade"
            codes = self.codes.get(name, [])
            code = codes.pop(0) if codes else 0
            isolate: tuple[int, ...] = ()
            if signal.strategy == "downgrade" and code == 0:  # first which ranks have to go
                code, isolate = 201, (6,)
            self.out(
                f"ReportRecoverStatus {code} {name}" + (f" isolate {isolate}" if isolate else "")
            )
            self.answered(link.status(signal, code, isolate=isolate))
        elif "hot switch" in signal.actions:
            self.out("ReportNode 1 ready")
            self.answered(link.node(1, "ready"))

    # -- the special ones

    def second_fault(self) -> None:
        def twist(signal: Any) -> bool:
            if signal.strategy == "recover":
                self.twist = None
                self.fault(6)
                self.out("ReportRecoverStatus 0 recover (too late)")
                self.answered(self.link.status(signal, 0))
                return True
            return False

        self.twist = twist
        self.fault()

    def reconnect(self) -> None:
        def twist(signal: Any) -> bool:
            if signal.signal == "globalFault":
                self.twist = None
                say(f"{'':15}  -- the client dies; another one takes over")
                self.link.close()
                self.incarnation += 1
                self.connect()
                return True
            return False

        self.twist = twist
        self.fault()

    def kill_controller(self) -> None:
        def twist(signal: Any) -> bool:
            if signal.strategy == "recover":
                self.twist = None
                say(f"{'':15}  -- the controller is killed and started again")
                say("KILL")  # the parent does it
                sys.stdin.readline()
                self.link.close()
                self.incarnation += 1
                self.connect()
                return True
            return False

        self.twist = twist
        self.fault()

    def switch_nic(self) -> None:
        from phalanx.proto import recover_pb2 as pb

        def twist(signal: Any) -> bool:
            if signal.signal == "stopTrain":
                self.answer(signal)
                self.out("ReplySwitchNicResult true")
                self.operate("ReplySwitchNicResult", pb.SwitchResult(jobId=self.name, result=True))
                return True
            return False

        self.twist = twist
        self.out("SwitchNicTrack node 1, device 0")
        ops = {f"{self.name}-n1": pb.DeviceList(dev=["0"], op=[True])}
        self.operate("SwitchNicTrack", pb.SwitchNics(jobID=self.name, nicOps=ops))

    def stress_test(self) -> None:
        from phalanx.proto import recover_pb2 as pb

        def twist(signal: Any) -> bool:
            if signal.signal == "stopTrain" and "pause_train" in signal.actions:
                self.twist = None
                self.answer(signal)
                bad = pb.StressTestRankResult(rankResult={"0": pb.StressTestOpResult(code="2")})
                self.out("ReplyStressTestResult rank 5: code 2")
                self.operate(
                    "ReplyStressTestResult",
                    pb.StressTestResult(jobId=self.name, stressResult={"5": bad}),
                )
                return True
            return False

        self.twist = twist
        self.out("StressTest all nodes, AIC")
        self.operate("StressTest", pb.StressTestParam(jobID=self.name, allNodesOps=[0]))

    def hot_switch(self) -> None:
        from phalanx.proto import control_pb2

        self.out("SwitchNode 1")
        self.operate("SwitchNode", control_pb2.NodeReport(jobId=self.name, nodeRank=1))


def clients(address: str) -> int:
    """The clients' process: all stories, one after the other."""
    started = time.monotonic()
    good = 0
    for number, story in enumerate(STORIES, 1):
        say(f"\n{number}. {story.title}   [enabled: {', '.join(story.strategies)}]")
        good += Job(number, story, address, started).play()
    say(f"\n{good} of {len(STORIES)} ended as they should")
    return 0 if good == len(STORIES) else 1


# ------------------------------------------------------------------ the parent


def controller(listen: str, folder: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "controller", "--listen", listen, "--state-dir", folder],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], 20)[0]:
        process.kill()
        raise SystemExit("the controller did not come up in 20 s")
    line = process.stdout.readline()
    if "listens on" not in line:
        raise SystemExit(f"the controller did not come up (exit status {process.wait(10)})")
    return process, line.split("listens on ")[1].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--listen", default="127.0.0.1:8899")
    parser.add_argument("--state-dir", default="")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        return clients(args.client)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.state_dir or temporary
        server, address = controller(args.listen, folder)
        say(f"$ phalanx controller --listen {address} --state-dir {folder}   (pid {server.pid})")
        child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--client", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None and child.stdin is not None
            for line in child.stdout:
                if line == "KILL\n":
                    server.kill()
                    server.wait()
                    server, _ = controller(address, folder)
                    child.stdin.write("\n")
                    child.stdin.flush()
                else:
                    print(line, end="", flush=True)
            return child.wait(30)
        finally:
            child.kill()
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    sys.exit(main())
