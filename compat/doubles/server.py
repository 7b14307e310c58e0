"""ClusterD's Recover service as it can be observed: resets, one-slot queues, no replay.

Sleeps and waits are scaled by ``pace`` so that a test need not take the original's time.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from compat.doubles import stubs

pb = stubs.v72
RANK = ("retry", "recover-in-place", "recover", "elastic-training", "dump", "exit")


class _Reset(Exception):
    pass


class _Job:
    """One job controller; a reset makes new queues and ends the stream."""

    def __init__(self, server: OldServer, job_id: str) -> None:
        self.server, self.job_id = server, job_id
        self.generation = 0
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self.lock:
            self.generation += 1
            old = getattr(self, "signals", None)
            self.signals: queue.Queue[Any] = queue.Queue(1)
            self.events: queue.Queue[str] = queue.Queue(10)
            self.slots = {k: queue.Queue(1) for k in ("stop", "strategies", "status")}
            self.faults: dict[int, int] = {}
            self.uuid = ""
            self.state = "INIT"
        if old is not None:
            try:
                old.put_nowait(None)
            except queue.Full:
                old.get()
                old.put_nowait(None)

    def wait(self, kind: str, generation: int) -> Any:
        until = time.monotonic() + self.server.patience
        while time.monotonic() < until:
            if generation != self.generation:
                raise _Reset
            try:
                return self.slots[kind].get(timeout=0.02)
            except queue.Empty:
                continue
        return None

    def send(self, generation: int, **fields: Any) -> None:
        if generation != self.generation:
            raise _Reset
        try:
            self.signals.put(
                pb.ProcessManageSignal(jobId=self.job_id, uuid=self.uuid, **fields), timeout=1
            )
        except queue.Full:
            raise _Reset from None

    def ranks(self) -> list[Any]:
        return [pb.FaultRank(rankId=str(r), faultType=str(t)) for r, t in self.faults.items()]

    def recover(self, generation: int) -> None:
        """From a fault to the reset at the end; the choice as in the original."""
        pace, enabled = self.server.pace, self.server.strategies
        try:
            self.state = "NotifyStopTrainState"
            self.uuid = f"{time.time_ns():X}-{uuid.uuid4().hex}"
            if enabled[0] == "dump":
                self.send(generation, signalType="saveAndExit", actions=["save_and_exit"])
                self.wait("status", generation)
                self.leave(generation, "dump_exit")
                return
            self.send(
                generation, signalType="stopTrain", actions=["stop_train"], faultRanks=self.ranks()
            )
            self.state = "WaitReportStopCompleteState"
            stopped = self.wait("stop", generation)
            if stopped is not None and stopped.status.code == 404:
                self.send(generation, signalType="killMaster")
                return
            retry = "retry" in enabled and all(t != 1 for t in self.faults.values())
            while True:
                time.sleep((0 if retry else 11) * pace)
                self.send(
                    generation,
                    signalType="globalFault",
                    actions=["on_global_rank"] if retry else ["on_global_rank", "fault_nodes_exit"],
                    faultRanks=self.ranks(),
                    nodeRankIds=[] if retry else ["0"],
                )
                self.state = "WaitReportRecoverStrategyState"
                report = self.wait("strategies", generation)
                offered = list(report.strategies) if report is not None else []
                failed = ""
                while True:
                    name, extra = self.choose(offered, retry, failed)
                    actions = ["change_strategy"]
                    if extra == "recover-in-place":
                        actions.append("fault_nodes_restart")
                    self.send(
                        generation,
                        signalType="changeStrategy",
                        actions=actions,
                        changeStrategy=name,
                        extraParams=extra,
                        faultRanks=self.ranks(),
                    )
                    self.state = f"WaitReport {name}"
                    if name == "exit":
                        return
                    status = self.wait("status", generation)
                    if status is None or status.strategy not in (
                        "retry",
                        "recover",
                        "downgrade",
                        "dump",
                        "exit",
                    ):
                        return  # reset
                    if status.strategy == "dump":
                        self.leave(generation, "dump_exit")
                        return
                    if status.status.code == 0:
                        return
                    failed = status.strategy
                    if failed == "retry":
                        retry = False
                        self.faults = dict.fromkeys(self.faults, 1)
                        if status.status.code == 405:
                            break  # asked again
                        gone = {"recover", "dump"} if status.status.code == 499 else {"recover"}
                        offered = [o for o in offered if o not in gone]
        except _Reset:
            return
        finally:
            if generation == self.generation:
                time.sleep(0.05)  # the last signal leaves
                self.reset()

    def leave(self, generation: int, extra: str) -> None:
        self.send(
            generation,
            signalType="changeStrategy",
            actions=["change_strategy"],
            changeStrategy="exit",
            extraParams=extra,
        )

    def choose(self, offered: list[str], retry: bool, failed: str) -> tuple[str, str]:
        enabled = self.server.strategies
        dump = "dump" if "dump" in enabled and "dump" in offered else "exit"
        if failed in ("recover", "downgrade", "dump"):
            return ("exit" if failed == "dump" else dump), ""
        if retry:
            return ("retry", "") if "retry" in offered else (dump, "")
        if "recover" in offered and "recover-in-place" in enabled:
            return "recover", "recover-in-place"
        if "recover" in offered and "recover" in enabled:
            return "recover", ""
        if "downgrade" in offered and "elastic-training" in enabled:
            return "downgrade", '{"scale-in-strategy": "DP"}'
        return dump, ""


class OldServer:
    """``with OldServer() as server: ... server.address``."""

    def __init__(
        self,
        strategies: tuple[str, ...] = RANK,
        pace: float = 0.0,
        keep_alive: float = 5.0,
        init_codes: tuple[int, ...] = (),
        register_codes: tuple[int, ...] = (),
        min_ping_ms: int = 3000,
        patience: float = 900.0,
        port: int = 0,
    ) -> None:
        self.strategies = strategies
        self.pace = pace
        self.patience = patience
        self.keep_alive = keep_alive
        self.init_codes = list(init_codes)
        self.register_codes = list(register_codes)
        self.inited: set[str] = set()
        self.jobs: dict[str, _Job] = {}
        self.seen: list[tuple[str, Any]] = []
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self.server = grpc.server(
            futures.ThreadPoolExecutor(32),
            options=[
                ("grpc.http2.min_recv_ping_interval_without_data_ms", min_ping_ms),
                ("grpc.http2.min_ping_interval_without_data_ms", min_ping_ms),
                ("grpc.http2.max_ping_strikes", 1),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.max_concurrent_streams", 64),
                ("grpc.so_reuseport", 0),
            ],
        )
        handlers = {}
        for name, (request, _) in stubs.CALLS.items():
            make = (
                grpc.unary_stream_rpc_method_handler
                if name == "SubscribeProcessManageSignal"
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[name] = make(
                getattr(self, name),
                getattr(pb, request).FromString,
                lambda message: message.SerializeToString(),
            )
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Recover", handlers),)
        )
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> OldServer:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for job in self.jobs.values():
            job.reset()
        self.server.stop(0.2).wait(5)

    def note(self, name: str, request: Any) -> None:
        with self.changed:
            self.seen.append((name, request))
            self.changed.notify_all()

    def wait_for(self, name: str, count: int = 1, timeout: float = 10.0) -> list[Any]:
        """Until this call has come so often."""
        with self.changed:
            self.changed.wait_for(lambda: self._count(name) >= count, timeout)
        found = [r for n, r in self.seen if n == name]
        assert len(found) >= count, f"{name} came {len(found)} times, not {count}: {self.seen}"
        return found

    def _count(self, name: str) -> int:
        return sum(n == name for n, _ in self.seen)

    # -- the service

    def Init(self, request: Any, context: Any) -> Any:
        self.note("Init", request)
        code = self.init_codes.pop(0) if self.init_codes else 0
        if code == 0:
            self.inited.add(request.jobId)
        return pb.Status(code=code, info="init")

    def Register(self, request: Any, context: Any) -> Any:
        self.note("Register", request)
        if request.jobId in self.jobs:
            return pb.Status(code=0, info="register success")
        if request.jobId not in self.inited:
            return pb.Status(code=408, info="not init")
        code = self.register_codes.pop(0) if self.register_codes else 0
        if code == 0:
            self.jobs[request.jobId] = _Job(self, request.jobId)
        return pb.Status(code=code, info="register")

    def SubscribeProcessManageSignal(self, request: Any, context: Any) -> Iterator[Any]:
        self.note("Subscribe", request)
        job = self.jobs.get(request.jobId)
        if job is None:
            context.abort(grpc.StatusCode.UNKNOWN, f"jobId={request.jobId} not registed")
            return
        job.reset()
        signals = job.signals
        while context.is_active() and not self.closing.is_set():
            try:
                signal = signals.get(timeout=self.keep_alive)
            except queue.Empty:
                yield pb.ProcessManageSignal(jobId=job.job_id, signalType="keep-alive")
                continue
            if signal is None:
                return
            yield signal

    def _report(self, name: str, kind: str, request: Any) -> Any:
        self.note(name, request)
        job = self.jobs.get(request.jobId)
        if job is None:
            return pb.Status(code=400, info="not registered")
        job.slots[kind].put(request)  # no deadline: a second one blocks
        return pb.Status(code=0, info="received")

    def ReportStopComplete(self, request: Any, context: Any) -> Any:
        return self._report("ReportStopComplete", "stop", request)

    def ReportRecoverStrategy(self, request: Any, context: Any) -> Any:
        return self._report("ReportRecoverStrategy", "strategies", request)

    def ReportRecoverStatus(self, request: Any, context: Any) -> Any:
        return self._report("ReportRecoverStatus", "status", request)

    def ReportProcessFault(self, request: Any, context: Any) -> Any:
        self.note("ReportProcessFault", request)
        job = self.jobs.get(request.jobId)
        if job is None:
            return pb.Status(code=400, info="not registered")
        for rank in request.faultRanks:
            job.faults[int(rank.rankId)] = int(rank.faultType)
        if job.state == "INIT":
            threading.Thread(target=job.recover, args=(job.generation,), daemon=True).start()
        return pb.Status(code=0, info="receive ReportProcessFault")

    def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb.Status(code=0, info="ok")

    def end_streams(self) -> None:
        """What a reset of every job does."""
        for job in self.jobs.values():
            job.reset()
