"""What compatibility means, check by check. Each function returns one line of what it saw.

``python -m compat`` runs them all; the test suite runs them too.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from compat.doubles.clients import OldClient, WorkerSide
from compat.doubles.server import OldServer
from compat.harness import Cable, Controller, Raw, certificates
from phalanx.client import Credentials, Declaration, DLRecoverManager, Link, Received, reports
from phalanx.client import pb as client_pb
from phalanx.proto import control_pb2, fault_pb2, pubfault_pb2
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery.model import Node

CHECKS: list[Callable[[], str]] = []
GENERATIONS = ("agent", "taskd", "go")


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS.append(function)
    return function


def wait_until(what: Callable[[], Any], timeout: float = 10.0) -> Any:
    until = time.monotonic() + timeout
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > until:
            raise AssertionError("it did not happen in time")
        time.sleep(0.01)


def state_of(raw: Raw, job: str) -> Any:
    (view,) = raw("Jobs", control_pb2.Query(jobId=job)).jobs
    return view


def _old_round(
    controller: Controller, generation: str, codes: dict[str, list[int]], kind: int = 1, **more: Any
) -> OldClient:
    worker = WorkerSide(codes=codes, **more)
    name = f"{generation}-{kind}-{'-'.join(codes)}-{len(more)}-{time.monotonic_ns()}"
    client = OldClient(generation, controller.address, name, worker)
    client.start()
    assert client.subscribed.wait(10)
    raw = Raw(grpc.insecure_channel(controller.address))
    wait_until(lambda: state_of(raw, name).subscribed)
    worker.fault({3: kind})
    client.raw = raw  # type: ignore[attr-defined]
    client.name = name  # type: ignore[attr-defined]
    return client


def _outcome(client: OldClient) -> str:
    raw, name = client.raw, client.name  # type: ignore[attr-defined]
    view = wait_until(
        lambda: (v := state_of(raw, name)).state in ("idle", "smaller", "exiting") and v, 15
    )
    if view.state == "exiting":
        wait_until(lambda: client.worker.exited)  # the word is on its way
    with client.lock:  # not in the middle of an action
        client.close()
    raw.channel.close()
    return str(view.lastOutcome or view.state)


# ---------------------------------------------------------------- old clients, our server

FLOWS: list[tuple[str, int, dict[str, list[int]], dict[str, Any], str]] = [
    ("a retry works", 0, {"retry": [0]}, {}, "retry succeeded"),
    (
        "retry 405, then in place",
        0,
        {"retry": [405], "recover": [0]},
        {},
        "recover-in-place succeeded",
    ),
    ("retry 406, then dump", 0, {"retry": [406], "downgrade": [406], "dump": [0]}, {}, "exiting"),
    ("retry 499, then exit", 0, {"retry": [499]}, {}, "exiting"),
    ("in place works", 1, {"recover": [0]}, {}, "recover-in-place succeeded"),
    ("in place 405, then recover", 1, {"recover": [405, 0]}, {}, "recover succeeded"),
    ("recover 406, then dump", 1, {"recover": [406], "dump": [0]}, {}, "exiting"),
    ("dump 407", 1, {"recover": [406], "dump": [407]}, {}, "exiting"),
    ("only exit offered", 1, {}, {"offer": ("exit",)}, "exiting"),
    ("not ready (404)", 1, {}, {"stop_code": 404}, "killed"),
]


@check
def old_clients_walk_every_fall_back() -> str:
    seen = 0
    with Controller("--devices-per-node", "2") as controller:
        for generation in GENERATIONS:
            for name, kind, codes, more, outcome in FLOWS:
                codes = {k: [*v] for k, v in codes.items()}
                client = _old_round(controller, generation, codes, kind, **more)
                got = _outcome(client)
                assert got == outcome, f"{generation}, {name}: {got}, not {outcome}"
                problems = [e for e in client.ends if e.startswith("action")]
                assert not problems, problems
                seen += 1
    return f"{seen} recoveries by {len(GENERATIONS)} clients, each as documented"


@check
def old_go_manager_scales_in_with_its_isolate_ranks() -> str:
    with Controller("--devices-per-node", "2", "--strategies", "elastic-training,dump") as c:
        client = _old_round(c, "go", {"downgrade": [0]}, isolate=(6,))
        got = _outcome(client)
        assert got == "smaller", got
        gone = next(s for s in client.signals if s.signalType == "faultNodesExit")
        assert list(gone.nodeRankIds) == ["3"]
        # (b) cannot send isolate ranks and reports 0 at once: not stuck either
        client = _old_round(c, "taskd", {"downgrade": [0]})
        assert _outcome(client) == "smaller"
    return "201, faultNodesExit, 0"


@check
def old_clients_of_a_dump_only_job() -> str:
    with Controller("--strategies", "dump") as controller:
        for generation in GENERATIONS:
            client = _old_round(controller, generation, {"dump": [0]})
            client.worker.wait_for("dump")
            assert _outcome(client) == "exiting"
            assert client.signals[-1].changeStrategy == "exit"
    return "saveAndExit, then dump_exit"


@check
def old_clients_keep_their_stream_and_hear_keep_alives() -> str:
    with Controller("--keep-alive", "0.2") as controller:
        client = _old_round(controller, "taskd", {"recover": [0, 0]})
        raw, name = client.raw, client.name  # type: ignore[attr-defined]
        wait_until(lambda: state_of(raw, name).lastOutcome)
        wait_until(lambda: any(s.signalType == "keep-alive" for s in client.signals))
        assert client.worker.fault({5: 1}) == 0
        wait_until(lambda: state_of(raw, name).episodes == 2)
        _outcome(client)
        assert client.ends in ([], ["closed"]) or all("CANCEL" in e for e in client.ends)
    return "two recoveries on one stream"


@check
def pings_every_three_seconds_are_no_offence() -> str:
    with Controller("--keep-alive", "0") as controller:
        client = OldClient("taskd", controller.address, "pinger", health_pause=100).start()
        assert client.subscribed.wait(10)
        fast = grpc.insecure_channel(
            controller.address,
            [
                ("grpc.keepalive_time_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        raw = Raw(fast)
        info = pb.ClientInfo(jobId="fast")
        raw("Init", info)
        raw("Register", info)
        stream = raw("SubscribeProcessManageSignal", info)
        stream.initial_metadata()
        time.sleep(7)
        assert stream.is_active() and not client.ends, client.ends
        stream.cancel()
        client.close()
    return "pings of 1 s and 3 s for 7 s: both streams stand"


@check
def two_old_clients_of_one_job_do_not_fight() -> str:
    with Controller() as controller:
        first = OldClient("taskd", controller.address, "twice").start()
        raw = Raw(grpc.insecure_channel(controller.address))
        wait_until(lambda: first.subscribed.is_set() and state_of(raw, "twice").subscribed)
        second = OldClient("taskd", controller.address, "twice").start()
        wait_until(lambda: len(first.ends) >= 3)
        assert all("superseded" in end for end in first.ends), first.ends
        assert not second.ends
        second.close()
        wait_until(lambda: first.subscribed.is_set() and state_of(raw, "twice").subscribed)
        first.close()
    return "the newer owner keeps the job; the older is told, and comes back when it is free"


@check
def old_clients_stay_within_thirty_seconds() -> str:
    with Controller() as controller:
        client = _old_round(controller, "taskd", {"recover": [0]})
        started = time.monotonic()
        assert _outcome(client).endswith("succeeded")
        took = time.monotonic() - started
        assert not client.worker.exited and took < 5
    return f"a whole recovery in {took * 1000:.0f} ms"


# ---------------------------------------------------------------- codes


@check
def every_return_code_of_recover() -> str:
    seen: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = Path(folder) / "jobs.json"
        jobs.write_text(
            json.dumps(
                {
                    "defaults": {"devices_per_node": 2, "world_size": 4},
                    "jobs": {"job-a": {}, "off": {"enabled": False}, "job-b": {}, "gone": {}},
                }
            )
        )
        with Controller("--jobs", str(jobs), "--known-jobs-only", "--max-jobs", "2") as c:
            raw = Raw(grpc.insecure_channel(c.address))
            who = lambda job: pb.ClientInfo(jobId=job, role="x")  # noqa: E731

            def expect(code: int, answer: Any) -> None:
                assert answer.code == code, (code, answer)
                assert code == 0 or answer.info
                seen[code] = answer.info

            expect(502, raw("Init", who("stranger")))
            expect(403, raw("Init", who("off")))
            expect(408, raw("Register", who("job-a")))
            expect(400, raw("ReportStopComplete", pb.StopCompleteRequest(jobId="job-a")))
            expect(400, raw("ReplySwitchNicResult", pb.SwitchResult(jobId="job-a")))
            expect(0, raw("Init", who("job-a")))
            expect(0, raw("Init", who("job-a")))
            expect(0, raw("Register", who("job-a")))
            expect(0, raw("Register", who("job-a")))
            expect(0, raw("HealthCheck", who("anybody")))
            expect(413, raw("SwitchNicTrack", pb.SwitchNics(jobID="job-a")))
            expect(413, raw("SwitchNicTrack", pb.SwitchNics(jobID="nobody")))
            expect(413, raw("StressTest", pb.StressTestParam(jobID="job-a", allNodesOps=[7])))
            expect(413, raw("ReplyStressTestResult", pb.StressTestResult()))
            nics = pb.SwitchNics(jobID="job-a", nicOps={"0": pb.DeviceList(dev=["1"], op=[True])})
            expect(0, raw("SwitchNicTrack", nics))
            expect(411, raw("SwitchNicTrack", nics))
            expect(411, raw("StressTest", pb.StressTestParam(jobID="job-a", allNodesOps=[0])))
            # a report without its status submessage, and one that nobody waits for
            expect(0, raw("ReportRecoverStatus", pb.RecoverStatusRequest(jobId="job-a")))
            stale = pb.RecoverStatusRequest(jobId="job-a", key=pb.SignalKey(uuid="old", round=1))
            expect(401, raw("ReportRecoverStatus", stale))
            expect(0, raw("Init", who("job-b")))
            expect(0, raw("Register", who("job-b")))
            expect(502, raw("Init", pb.ClientInfo(jobId="unknown")))
            raw("Init", who("gone"))
            expect(500, raw("Register", who("gone")))
            jobs.write_text(json.dumps({"jobs": {"job-a": {}}}))
            import signal

            assert c.process is not None
            c.process.send_signal(signal.SIGHUP)
            wait_until(lambda: raw("Register", who("gone")).code == 402)
            seen[402] = "removed from the jobs file"
            old = pb.ClientInfo(rc3TaskId="job-a")
            expect(400, raw("Init", old))
    assert set(seen) >= {0, 400, 401, 402, 403, 408, 411, 413, 500, 502}
    return "codes " + ", ".join(map(str, sorted(seen)))


@check
def a_report_that_comes_again_gets_its_first_answer() -> str:
    """Its answer was lost, with the controller killed in between; of both kinds of clients."""
    told = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Controller("--strategies", "dump,recover", state=Path(folder)) as c,
    ):
        raw = Raw(grpc.insecure_channel(c.address))
        for keyed in (True, False):
            job = f"job-{keyed}"
            who = pb.ClientInfo(jobId=job, role="x", clientId="a" * keyed, keyed=keyed)
            for call in ("Init", "Register"):
                assert raw(call, who).code == 0
            stream = raw("SubscribeProcessManageSignal", who)
            fault = pb.ProcessFaultRequest(
                jobId=job, faultRanks=[pb.FaultRank(rankId="1", faultType="1")]
            )
            assert raw("ReportProcessFault", fault).code == 0
            stop = next(s for s in stream if s.signalType == "stopTrain")
            report = pb.StopCompleteRequest(jobId=job)
            if keyed:
                report.key.CopyFrom(
                    pb.SignalKey(uuid=stop.uuid, signalType=stop.signalType, round=stop.round)
                )
            first = raw("ReportStopComplete", report)
            c.restart()
            raw = Raw(grpc.insecure_channel(c.address))
            again = raw("ReportStopComplete", report)
            assert (first.code, again.code) == (0, 0), (first, again)
            assert again == first or not keyed, (first, again)
            report.status.code = 404  # something else under the same key
            assert raw("ReportStopComplete", report).code == (401 if keyed else 0)
            assert state_of(raw, job).state == "agreeing"
            told.append("keyed" if keyed else "unkeyed")
    return f"{' and '.join(told)}, across kill -9"


@check
def the_last_reports_of_a_stopping_controller_get_599() -> str:
    import asyncio

    from phalanx.controller.hub import Hub
    from phalanx.controller.journal import Journal
    from phalanx.controller.service import Services

    async def run() -> int:
        hub = Hub(Journal(None))
        hub.open()
        services = Services(hub)
        hub.init("j", {}, "p")
        await hub.register("j", {})
        hub.closing = True
        answer = await services._report(hub.entries["j"], lambda: None)  # type: ignore[arg-type,return-value]
        await hub.close()
        return int(answer.code)

    assert asyncio.run(run()) == 599
    return "599, and the client repeats"


# ---------------------------------------------------------------- our client


class Worker:
    """An application that registers its callbacks with the manager."""

    def __init__(self, manager: DLRecoverManager, code: int = 0) -> None:
        self.calls: list[str] = []
        self.codes: list[int] = []
        self.offer = ["retry", "recover", "downgrade", "dump", "exit"]
        self.code = code
        manager.on_action("stop_train", self.stop)
        manager.on_action("tft_notify_controller_on_global_rank", self.everywhere)
        manager.on_action("change_strategy", self.change)
        manager.on_action("save_and_exit", self.dump)
        manager.on_action("unknown", lambda signal: self.calls.append(f"unknown {signal.actions}"))

    def stop(self, signal: Received) -> None:
        self.calls.append("stop")
        self.codes.append(reports.report_stop_complete(0, "", signal.ranks))

    def everywhere(self, signal: Received) -> None:
        self.calls.append("global")
        self.codes.append(reports.report_recover_strategy(signal.ranks, self.offer))

    def change(self, signal: Received) -> None:
        self.calls.append(signal.strategy)
        if signal.strategy != "exit":
            self.codes.append(
                reports.report_recover_status(self.code, "", signal.ranks, signal.strategy)
            )

    def dump(self, signal: Received) -> None:
        self.calls.append("dump")
        self.codes.append(reports.report_recover_status(0, "", {}, "dump"))


def _manager(address: str, job: str, **more: Any) -> tuple[DLRecoverManager, threading.Thread]:
    manager = DLRecoverManager(client_pb.ClientInfo(taskId=job, ip="1", port="2"), address, **more)
    thread = threading.Thread(target=manager.start_subscribe, daemon=True)
    return manager, thread


@check
def our_manager_against_the_original() -> str:
    with OldServer(strategies=("recover", "dump", "exit"), keep_alive=0.2) as server:
        manager, thread = _manager(server.address, "job-a", secure_conn=False)
        try:
            worker = Worker(manager)
            assert manager.init_clusterd()
            thread.start()
            for round_ in (1, 2):  # the stream ends after each
                server.wait_for("Subscribe", round_)
                assert manager.wait_connected(10)
                assert reports.report_process_fault({1: 1}) == 0
                server.wait_for("ReportRecoverStatus", round_)
            server.wait_for("Subscribe", 3)
            assert (
                worker.calls
                == ["stop", "global", "unknown ('on_global_rank', 'fault_nodes_exit')", "recover"]
                * 2
            ), worker.calls
            assert set(worker.codes) == {0}
        finally:
            manager.close()
    thread.join(5)
    assert not thread.is_alive()
    return "two recoveries, a new subscription after each"


@check
def our_manager_when_the_original_says_no() -> str:
    with OldServer(init_codes=(502, 403)) as server:
        manager, _ = _manager(server.address, "job-off", secure_conn=False)
        assert manager.init_clusterd() is False
        manager.close()
    with OldServer(register_codes=(402, 500, 502), keep_alive=0.1) as server:
        manager, thread = _manager(server.address, "job-late", secure_conn=False)
        thread.start()
        server.wait_for("Register", 4, 20)
        assert manager.wait_connected(10)
        server.inited.clear()
        server.jobs.clear()  # the original forgot everything: 400, then Init and Register
        assert reports.report_process_fault({0: 1}) in (0, 400)
        assert [n for n, _ in server.seen].count("Init") >= 2
        manager.close()
        thread.join(5)
    return "403 ends, 402, 500 and 502 are tried again, 400 registers anew"


@check
def our_link_survives_too_many_pings() -> str:
    with OldServer(min_ping_ms=60_000, keep_alive=100) as server:
        got: list[str] = []
        link = Link(server.address, "job-p", lambda signal: got.append(signal.signal))
        with link:
            server.wait_for("Subscribe")
            server.end_streams()
            server.wait_for("Subscribe", 2)
            link.report_fault({1: 1})
            wait_until(lambda: "stopTrain" in got)
    return "a strict server ends streams; the link subscribes again and hears the next signal"


@check
def too_many_pings_of_ours_are_survived() -> str:
    got: list[str] = []
    server = OldServer(min_ping_ms=300_000, keep_alive=1000)
    link = Link(server.address, "job-p", lambda signal: got.append(signal.signal))
    with server, link:
        server.wait_for("Subscribe", 2, 90)  # dropped with "too_many_pings", came back
        link.report_fault({1: 1})
        wait_until(lambda: "stopTrain" in got)
    return "dropped for its pings, the link subscribes again and hears the next signal"


@check
def our_manager_against_our_server() -> str:
    with Controller("--devices-per-node", "2") as controller:
        manager, thread = _manager(controller.address, "job-a", secure_conn=False)
        raw = Raw(grpc.insecure_channel(controller.address))
        try:
            worker = Worker(manager)
            thread.start()
            assert manager.wait_connected(10)
            assert reports.report_process_fault({1: 1}) == 0
            wait_until(lambda: state_of(raw, "job-a").lastOutcome)
            assert state_of(raw, "job-a").lastOutcome == "recover-in-place succeeded"
            assert worker.calls == [
                "stop",
                "global",
                "unknown ('on_global_rank', 'fault_nodes_exit')",
                "recover",
                "unknown ('change_strategy', 'fault_nodes_restart')",
            ], worker.calls
        finally:
            manager.close()
    return "stop, global, recover in place; unknown actions told"


@check
def cut_connections_lose_nothing() -> str:
    cuts = 0
    with Controller("--devices-per-node", "2") as c, Cable(c.address) as cable:
        raw = Raw(grpc.insecure_channel(c.address))
        got: list[Received] = []
        arrived = threading.Condition()

        def take(signal: Received) -> None:
            with arrived:
                got.append(signal)
                arrived.notify_all()

        with Link(cable.address, "job-cut", take, client_id="x", back_off=0.5) as link:
            assert link.wait_connected(10)
            cable.cut()  # between Register and the fault
            raw(
                "ReportProcessFault",
                pb.ProcessFaultRequest(
                    jobId="job-cut", faultRanks=[pb.FaultRank(rankId="3", faultType="1")]
                ),
            )
            for number, word in enumerate(("stopTrain", "globalFault", "changeStrategy")):
                with arrived:
                    assert arrived.wait_for(lambda n=number: len(got) > n, 20), (word, got)
                assert got[number].signal == word
                for _ in range(2):  # twice, quickly
                    cable.cut()
                    cuts += 1
                answer = {
                    "stopTrain": lambda s: link.stop_complete(s),
                    "globalFault": lambda s: link.strategies(s, ["recover", "exit"]),
                    "changeStrategy": lambda s: link.status(s, 0),
                }[word](got[number])
                assert answer.code == 0, answer
            wait_until(lambda: state_of(raw, "job-cut").lastOutcome)
            assert len(got) == 3, got
    return f"{cuts + 1} cuts; each signal was handed out exactly once"


@check
def secure_connections() -> str:
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        pem = certificates(Path(folder))
        for bad in ("no-ca.pem", "no-sign.pem", "short.pem"):
            try:
                DLRecoverManager(client_pb.ClientInfo("job-a"), "127.0.0.1:1", True, pem[bad])
            except ValueError as error:
                told.append(str(error).rsplit(": ", 1)[1])
            else:
                raise AssertionError(f"{bad} was trusted")
        try:
            DLRecoverManager(client_pb.ClientInfo("job-a"), "127.0.0.1:1")
        except ValueError as error:
            text = str(error)
        else:
            raise AssertionError("secure without a certificate was accepted")
        assert "cert_path" in text and "secure_conn=False" in text
        with Controller("--tls-cert", pem["server.pem"], "--tls-key", pem["server.key"]) as c:
            manager, thread = _manager(c.address, "job-a", cert_path=pem["ca.pem"])
            thread.start()
            assert manager.wait_connected(10)
            assert reports.report_process_fault({}) == 0
            manager.close()
            # the elastic agent with TLS, and somebody in clear text
            root = Path(pem["ca.pem"]).read_bytes()
            client = OldClient("agent", c.address, "job-tls", root=root, server_name="clusterd")
            client.start()
            assert client.subscribed.wait(10)
            client.close()
            try:
                Raw(grpc.insecure_channel(c.address))("Init", pb.ClientInfo(jobId="x"), 3)
            except grpc.RpcError:
                pass
            else:
                raise AssertionError("clear text was served on a TLS port")
        # mutual TLS: the certificate is good for the job that bears its name
        with Controller(
            "--tls-cert",
            pem["server.pem"],
            "--tls-key",
            pem["server.key"],
            "--tls-client-ca",
            pem["ca.pem"],
        ) as c:
            good = Credentials(pem["ca.pem"], pem["client.pem"], pem["client.key"])
            with Link(c.address, "job-a", print, credentials=good) as link:
                assert link.wait_connected(10)
            states: list[tuple[str, str]] = []
            with Link(
                c.address, "job-b", print, credentials=good, on_state=lambda *s: states.append(s)
            ):
                wait_until(lambda: any(s[0] == "refused" for s in states))
    return "trusted roots only; TLS, mutual TLS; " + "; ".join(told)


@check
def tokens_are_good_for_their_jobs() -> str:
    with tempfile.TemporaryDirectory() as folder:
        access = Path(folder) / "access.json"
        digest = hashlib.sha256(b"secret-a").hexdigest()
        operator = hashlib.sha256(b"op").hexdigest()
        access.write_text(json.dumps({"tokens": {digest: ["team-a-*"]}, "operators": [operator]}))
        with Controller("--access", str(access)) as c:
            channel = grpc.insecure_channel(c.address)

            def attempt(token: str, job: str) -> str:
                raw = Raw(channel, (("authorization", f"Bearer {token}"),) if token else ())
                try:
                    return str(raw("Init", pb.ClientInfo(jobId=job)).code)
                except grpc.RpcError as error:
                    return str(error.code().name)

            assert attempt("secret-a", "team-a-1") == "0"
            assert attempt("op", "team-a-1") == "0"
            for token, job in (("secret-a", "team-b-1"), ("wrong", "team-a-1"), ("", "team-a-1")):
                assert attempt(token, job) == "PERMISSION_DENIED", (token, job)
            bare = Raw(channel)
            fault = pb.ProcessFaultRequest(jobId="team-a-1")
            try:
                bare("ReportProcessFault", fault)
            except grpc.RpcError as error:
                status = error.code().name
            else:
                raise AssertionError("a stranger reported a fault for somebody's job")
            assert status == "PERMISSION_DENIED"
            with Link(c.address, "team-a-1", print, credentials=Credentials(token="secret-a")) as k:
                assert k.wait_connected(10)
    return "own jobs yes, others no, strangers no"


# ---------------------------------------------------------------- Fault and PubFault


def public(id_: str = "fault-0001", assertion: str = "occur", **more: Any) -> Any:
    now = int(time.time() * 1000)
    entry = {
        "faultId": id_,
        "faultType": "NPU",
        "faultCode": "220001001",
        "faultTime": now,
        "assertion": assertion,
        "influence": [pubfault_pb2.PubFaultInfo(nodeName="node-1", deviceIds=[1])],
        **{k: v for k, v in more.items() if k in ("faultType", "faultCode", "influence")},
    }
    return pubfault_pb2.PublicFaultRequest(
        id=more.get("id", "request-0001"),
        timestamp=more.get("timestamp", now),
        version=more.get("version", "1.0"),
        resource=more.get("resource", "CCAE"),
        faults=[pubfault_pb2.Fault(**entry)],
    )


DECLARED = Declaration(
    strategies=("recover", "dump"),
    world_size=4,
    nodes=(
        Node(0, "node-0", "10.0.0.1", ranks=(0, 1)),
        Node(1, "node-1", "10.0.0.2", ranks=(2, 3)),
    ),
)


@check
def public_faults_reach_jobs_and_subscribers() -> str:
    with Controller() as c:
        raw = Raw(grpc.insecure_channel(c.address))
        signals: list[Received] = []
        with Link(c.address, "job-fault", signals.append, declaration=DECLARED) as link:
            assert link.wait_connected(10)
            who = fault_pb2.ClientInfo(jobId="job-fault", role="watcher")
            early = raw("Fault.SubscribeFaultMsgSignal", who)
            assert early.code().name == "UNKNOWN" and "not registered" in early.details()
            assert raw("Fault.Register", fault_pb2.ClientInfo(jobId="nobody", role="x")).code == 402
            assert raw("Fault.Register", who).code == 0
            stream = raw("Fault.SubscribeFaultMsgSignal", who)
            stream.initial_metadata()
            answer = raw("PubFault.SendPublicFault", public())
            assert answer.code == 0 and answer.info.startswith("public fault send success")
            shown = next(stream)
            assert shown.signalType == "fault"
            (node,) = shown.nodeFaultInfo
            assert (node.nodeName, node.nodeIP, node.faultLevel) == (
                "node-1",
                "10.0.0.2",
                "UnHealthy",
            )
            assert node.faultDevice[0].deviceId == "1"
            wait_until(lambda: signals)
            assert signals[0].ranks == {3: 1}
            result = raw("Fault.GetFaultMsgSignal", who)
            assert result.code == 200 and result.info == "Succeed"
            assert (
                raw("Fault.GetFaultMsgSignal", fault_pb2.ClientInfo()).info == "all info returned"
            )
            codes = {raw("Fault.GetFaultMsgSignal", who).code for _ in range(15)}
            assert codes == {200, 429}
            assert raw("ClearFault", control_pb2.FaultReference(faultId="fault-0001")).code == 0
            assert next(stream).signalType == "normal"
            again = raw("Fault.Register", who)
            assert again.code == 0
            assert not list(stream)  # a second registration ends the first stream
    return "fault, normal, 200, 402, 429"


@check
def every_return_code_of_pubfault() -> str:
    with Controller() as c:
        raw = Raw(grpc.insecure_channel(c.address))
        bad: list[dict[str, Any]] = [
            {"id": "short"},
            {"timestamp": 5},
            {"version": "2"},
            {"resource": "nobody"},
            {"faultType": "x"},
            {"faultCode": "1"},
            {"assertion": "maybe"},
            {"influence": []},
            {"influence": [pubfault_pb2.PubFaultInfo(nodeName="n", deviceIds=[1, 1])]},
            {"influence": [pubfault_pb2.PubFaultInfo(nodeName="n", deviceIds=[32])]},
            {"influence": [pubfault_pb2.PubFaultInfo(deviceIds=[3])]},
        ]
        for wrong in bad:
            answer = raw("PubFault.SendPublicFault", public(**wrong))
            assert answer.code == 409 and answer.info, (wrong, answer)
        codes = [raw("PubFault.SendPublicFault", public(f"fault-{n:05}")).code for n in range(110)]
        assert set(codes) == {0, 410}, set(codes)
    return "0, 409 for 11 reasons, 410"


@check
def health_and_reflection() -> str:
    from phalanx.proto import health_pb2
    from phalanx.proto import reflection_pb2 as rpb

    with Controller() as c:
        channel = grpc.insecure_channel(c.address)
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            lambda m: m.SerializeToString(),
            health_pb2.HealthCheckResponse.FromString,
        )
        assert call(health_pb2.HealthCheckRequest(service="Recover"), timeout=5).status == 1
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            lambda m: m.SerializeToString(),
            rpb.ServerReflectionResponse.FromString,
        )
        questions = [
            rpb.ServerReflectionRequest(list_services=""),
            rpb.ServerReflectionRequest(file_containing_symbol="fault.Fault"),
            rpb.ServerReflectionRequest(file_containing_symbol="nobody"),
        ]
        services, file, nothing = list(ask(iter(questions), timeout=5))
        names = [s.name for s in services.list_services_response.service]
        assert {"Recover", "fault.Fault", "PubFault"} <= set(names)
        assert file.file_descriptor_response.file_descriptor_proto
        assert nothing.error_response.error_code == 5
    return ", ".join(names[:3])


@check
def nic_switch_and_stress_test_on_the_wire() -> str:
    with Controller("--devices-per-node", "2") as c:
        raw = Raw(grpc.insecure_channel(c.address))
        for kind in ("nic", "stress"):
            job = f"job-{kind}"
            worker = WorkerSide()
            client = OldClient("go", c.address, job, worker).start()
            wait_until(lambda client=client: client.subscribed.is_set())
            wait_until(lambda job=job: state_of(raw, job).subscribed)
            who = pb.ClientInfo(jobId=job)
            if kind == "nic":
                orders = raw("SubscribeNotifySwitch", who)
                request: Any = pb.SwitchNics(
                    jobID=job, nicOps={"1": pb.DeviceList(dev=["0"], op=[True])}
                )
                assert raw("SwitchNicTrack", request).code == 0
                result = raw("SubscribeSwitchNicSignal", pb.SwitchNicRequest(jobID=job))
                result.initial_metadata()
                order = next(orders)
                assert list(order.rankID) == ["2"] and list(order.op) == [True]
                assert (
                    raw("ReplySwitchNicResult", pb.SwitchResult(jobId=job, result=True)).code == 0
                )
            else:
                orders = raw("SubscribeNotifyExecStressTest", who)
                ops = {"1": pb.StressOpList(ops=[0, 1])}
                request = pb.StressTestParam(jobID=job, stressParam=ops)
                assert raw("StressTest", request).code == 0
                result = raw("SubscribeStressTestResponse", pb.StressTestRequest(jobID=job))
                result.initial_metadata()
                order = next(orders)
                assert set(order.stressParam) == {"2", "3"}
                good = pb.StressTestRankResult(rankResult={"0": pb.StressTestOpResult(code="0")})
                assert (
                    raw(
                        "ReplyStressTestResult",
                        pb.StressTestResult(jobId=job, stressResult={"2": good, "3": good}),
                    ).code
                    == 0
                )
            assert [m.msg for m in result] == ["ok"]
            worker.wait_for("continue")
            assert state_of(raw, job).lastOutcome == "maintenance succeeded"
            orders.cancel()
            client.close()
    return "pause, order to the workers, reply, continue, answer to the operator"


@check
def a_hot_switch_on_the_wire() -> str:
    with Controller("--devices-per-node", "2") as c:
        raw = Raw(grpc.insecure_channel(c.address))
        client = OldClient("go", c.address, "job-hot").start()
        wait_until(lambda: client.subscribed.is_set() and state_of(raw, "job-hot").subscribed)
        node = control_pb2.NodeReport(jobId="job-hot", nodeRank=1)
        assert raw("SwitchNode", node).code == 0
        client.worker.wait_for("hot switch")
        for state in ("ready", "gone"):
            assert (
                raw(
                    "ReportNode", control_pb2.NodeReport(jobId="job-hot", nodeRank=1, state=state)
                ).code
                == 0
            )
            if state == "ready":
                wait_until(lambda: state_of(raw, "job-hot").state == "old-leaving")
        client.worker.wait_for("migration")
        wait_until(lambda: state_of(raw, "job-hot").lastOutcome)
        assert state_of(raw, "job-hot").lastOutcome == "migration succeeded"
        client.close()
    return "hot switch, new pod running, migration"
