"""The vendor's two Python clients, and the worker-side controller behind them.

``agent`` is the Elastic Agent's (v6.0 messages, optional TLS, loops on 403), ``taskd`` the
TaskD one (v7.1 messages, pings every 3 s, a health thread, gives up on 403).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from compat.doubles import stubs

OFFER = ("retry", "recover", "downgrade", "upgrade", "dump", "exit")


@dataclass
class WorkerSide:
    """MindIO's controller as far as its dialogue goes: waits for one word at a time."""

    offer: tuple[str, ...] = OFFER
    codes: dict[str, list[int]] = field(default_factory=dict)  # per strategy: codes to report
    stop_code: int = 0
    patience: float = 30.0
    isolate: tuple[int, ...] = ()
    hold: threading.Event = field(default_factory=threading.Event)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    exited: str = ""

    def __post_init__(self) -> None:
        self.hold.set()
        self.client: Any = None
        self.ranks: dict[int, int] = {}
        self.waiting_since = 0.0
        self.changed = threading.Condition()

    def note(self, *call: Any) -> None:
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def wait_for(self, word: str, timeout: float = 10.0) -> tuple[Any, ...]:
        """The first call that begins with this word."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: next((c for c in self.calls if c[0] == word or word in c), None), timeout
            )
        assert found, f"no {word} came; calls were {self.calls}"
        return found

    def _late(self) -> None:
        if self.waiting_since and time.monotonic() - self.waiting_since > self.patience:
            self.exited = f"no word in {self.patience} s"

    def fault(self, ranks: dict[int, int]) -> int:
        self.ranks.update(ranks)
        self.waiting_since = time.monotonic()
        return self.client.report_process_fault(ranks)

    def stop_train(self, ranks: dict[int, int], how: str = "stop", timeout: int = 0) -> None:
        self._late()
        self.note("stop_train" if how == "stop" else "pause_train", ranks, timeout)
        self.ranks.update(ranks)
        self.hold.wait(10)
        self.client.report_stop_complete(self.stop_code, "stopped", self.ranks)
        self.waiting_since = time.monotonic()

    def on_global_rank(self, ranks: dict[int, int], timeout: int = 0) -> None:
        self._late()
        self.note("on_global_rank", ranks, timeout)
        self.ranks.update(ranks)
        self.hold.wait(10)
        self.client.report_recover_strategy(self.ranks, list(self.offer))
        self.waiting_since = time.monotonic()

    def change_strategy(self, name: str) -> None:
        self._late()
        self.note("change_strategy", name)
        self.waiting_since = 0.0
        if name == "exit":
            self.exited = "told to"
            return
        self.hold.wait(10)
        codes = self.codes.get(name, [])
        code = codes.pop(0) if codes else 0
        if (
            name == "downgrade"
            and code == 0
            and hasattr(self.client.pb.RecoverStatusRequest(), "isolateRankIds")
        ):
            self.client.report_recover_status(201, "isolate", self.isolate, name)
            # the second report comes once the smaller world has made a step
        self.client.report_recover_status(code, "done", self.ranks, name)
        self.ranks = {} if code == 0 else self.ranks
        self.waiting_since = time.monotonic() if code else 0.0

    def dump(self) -> None:
        self.note("dump")
        codes = self.codes.get("dump", [])
        self.client.report_recover_status(codes.pop(0) if codes else 0, "saved", {}, "dump")

    def destroy(self) -> None:
        self.note("killMaster")
        self.exited = "killMaster"


class OldClient:
    """``generation`` "agent", "taskd" or "go" (the newest fields, one call one connection)."""

    def __init__(
        self,
        generation: str,
        address: str,
        job_id: str,
        worker: WorkerSide | None = None,
        root: bytes | None = None,
        server_name: str = "",
        health_pause: float = 1.0,
    ) -> None:
        self.generation = generation
        self.pb = {"agent": stubs.v60, "taskd": stubs.v71, "go": stubs.v72}[generation]
        self.address, self.job_id = address, job_id
        self.worker = worker or WorkerSide()
        self.worker.client = self
        self.root, self.server_name = root, server_name
        self.health_pause = health_pause
        self.closed = threading.Event()
        self.killed = threading.Event()
        self.subscribed = threading.Event()
        self.signals: list[Any] = []
        self.codes: list[tuple[str, int]] = []
        self.ends: list[str] = []
        self.off = False
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.channel = self.connect()

    def connect(self) -> Any:
        if self.root is not None:
            return grpc.secure_channel(
                self.address,
                grpc.ssl_channel_credentials(self.root),
                [("grpc.ssl_target_name_override", self.server_name)],
            )
        # A process of its own has a connection of its own.
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.generation == "taskd":
            options += [
                ("grpc.keepalive_time_ms", 3000),
                ("grpc.keepalive_timeout_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 1),
            ]
        return grpc.insecure_channel(self.address, options)

    def call(self, name: str, request: Any, timeout: float | None = 10) -> Any:
        answer = self.channel.unary_unary(
            f"/Recover/{name}", type(request).SerializeToString, self.pb.Status.FromString
        )(request, timeout=timeout)
        self.codes.append((name, answer.code))
        return answer

    def info(self) -> Any:
        return self.pb.ClientInfo(jobId=self.job_id, role="master agent")

    # -- reports: register once, repeat once

    def report(self, name: str, request: Any) -> int:
        code = self.call(name, request).code
        if code != 0:
            self.call("Register", self.info())
            code = self.call(name, request).code
        return code

    def faults(self, ranks: Any) -> list[Any]:
        pairs = ranks.items() if isinstance(ranks, dict) else [(r, 1) for r in ranks]
        return [self.pb.FaultRank(rankId=str(r), faultType=str(t)) for r, t in pairs]

    def report_process_fault(self, ranks: dict[int, int]) -> int:
        return self.report(
            "ReportProcessFault",
            self.pb.ProcessFaultRequest(jobId=self.job_id, faultRanks=self.faults(ranks)),
        )

    def report_stop_complete(self, code: int, msg: str, ranks: dict[int, int]) -> int:
        return self.report(
            "ReportStopComplete",
            self.pb.StopCompleteRequest(
                jobId=self.job_id,
                status=self.pb.Status(code=code, info=msg),
                faultRanks=self.faults(ranks),
            ),
        )

    def report_recover_strategy(self, ranks: dict[int, int], names: list[str]) -> int:
        return self.report(
            "ReportRecoverStrategy",
            self.pb.RecoverStrategyRequest(
                jobId=self.job_id, faultRanks=self.faults(ranks), strategies=names
            ),
        )

    def report_recover_status(self, code: int, msg: str, ranks: Any, strategy: str) -> int:
        request = self.pb.RecoverStatusRequest(
            jobId=self.job_id, status=self.pb.Status(code=code, info=msg), strategy=strategy
        )
        if self.generation == "go" and code == 201:
            request.isolateRankIds.extend(str(r) for r in ranks)
        return self.report("ReportRecoverStatus", request)

    # -- the loop

    def start(self) -> OldClient:
        loops = [self.subscribe_loop]
        if self.generation == "taskd":
            loops.append(self.health_loop)
        for loop in loops:
            thread = threading.Thread(target=loop, daemon=True)
            thread.start()
            self.threads.append(thread)
        return self

    def close(self) -> None:
        self.closed.set()
        self.worker.hold.set()
        self.channel.close()
        for thread in self.threads:
            thread.join(5)

    def init(self) -> bool:
        while not self.closed.is_set():
            try:
                code = self.call("Init", self.info()).code
                if code == 0:
                    return True
                if code == 403 and self.generation != "agent":
                    self.off = True
                    return False
            except grpc.RpcError:
                pass
            self.closed.wait(0.2)  # (5 s in life)
        return False

    def subscribe_loop(self) -> None:
        tries = 0
        while not self.closed.is_set() and not self.killed.is_set():
            tries += 1
            try:
                if not self.init():
                    return
                if self.call("Register", self.info()).code == 0:
                    tries = 1
                stream = self.channel.unary_stream(
                    "/Recover/SubscribeProcessManageSignal",
                    self.pb.ClientInfo.SerializeToString,
                    self.pb.ProcessManageSignal.FromString,
                )(self.info())
                self.subscribed.set()
                for signal in stream:
                    self.take(signal)
                    if self.killed.is_set():
                        stream.cancel()
                        return
                self.ends.append("OK")
            except grpc.RpcError as error:
                self.ends.append(f"{error.code().name}: {error.details()}")
            except ValueError:
                self.ends.append("closed")
            self.subscribed.clear()
            self.closed.wait(min(10, tries) * 0.1)  # (tenfold in life)

    def health_loop(self) -> None:
        while not self.closed.wait(self.health_pause):
            try:
                self.call("HealthCheck", self.info())
            except (grpc.RpcError, ValueError):
                self.closed.wait(0.5)

    def take(self, signal: Any) -> None:
        if signal.signalType == "keep-alive":
            self.signals.append(signal)
            return
        self.signals.append(signal)
        if signal.signalType == "killMaster":
            self.worker.destroy()
            self.killed.set()
            return
        if not signal.actions or signal.jobId != self.job_id:
            return
        ranks = {int(r.rankId): int(r.faultType) for r in signal.faultRanks}
        timeout = getattr(signal, "timeout", 0)
        for action in set(signal.actions):  # yes: in no order
            with self.lock:
                try:
                    self.act(action, ranks, timeout, signal)
                except Exception as error:  # logged and swallowed, as theirs does
                    self.ends.append(f"action {action}: {error}")

    def act(self, action: str, ranks: dict[int, int], timeout: int, signal: Any) -> None:
        worker = self.worker
        if action == "save_and_exit":
            worker.dump()
        elif action == "stop_train":
            worker.stop_train(ranks)
        elif action == "pause_train" and self.generation != "agent":
            worker.stop_train(ranks, "pause", timeout or 600)
        elif action == "on_global_rank":
            worker.on_global_rank(ranks, timeout)
        elif action == "change_strategy":
            worker.change_strategy(signal.changeStrategy)
        elif action in ("hot switch", "stop switch") and self.generation != "agent":
            worker.note(action, ranks)
        elif action == "new pod running" and self.generation != "agent":
            worker.note(action)
            if self.generation == "go":
                self.report_recover_strategy({}, ["migration"])
        else:
            worker.note("unregistered", action)
