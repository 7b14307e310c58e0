"""A job's connection to a controller: threads only, every wait bounded.

:class:`Link` keeps a subscription alive in the background (Init, Register, Subscribe, again
after every end), hands signals to a callback in order and once each, and sends reports with a
deadline. It works with ClusterD as well: it never counts on a stream surviving a recovery.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from phalanx.client.channel import Credentials, Stub, connect, metadata
from phalanx.proto import control_pb2
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery import words
from phalanx.recovery.model import Key, Node, Received
from phalanx.recovery.words import Code

log = logging.getLogger("phalanx.client")

_SEEN = 512
_QUEUE = 1024


class LinkDown(ConnectionError):
    """No answer from any controller within the bound. Training goes on without one."""


@dataclass(frozen=True)
class Declaration:
    """What a job says about itself. Times in seconds; 0 and () leave it to the controller."""

    strategies: tuple[str, ...] = ()
    world_size: int = 0
    devices_per_node: int = 0
    nodes: tuple[Node, ...] = ()
    spares: int | None = None
    watches_nodes: bool = False
    report_timeout: int = 0
    reschedule_timeout: int = 0


@dataclass(frozen=True)
class Answer:
    """A controller's answer to a report."""

    code: int
    info: str

    @property
    def stale(self) -> bool:
        """The controller no longer waits for this report; nothing changed."""
        return self.code == Code.ORDER_MIX


def received(message: Any) -> Received:
    """A ProcessManageSignal as plain values. ValueError: a rank is not a number."""
    return Received(
        Key(message.uuid, message.signalType, message.changeStrategy, message.round),
        message.jobId,
        message.signalType,
        tuple(message.actions),
        {int(r.rankId): int(r.faultType) for r in message.faultRanks},
        message.changeStrategy,
        message.timeout,
        tuple(int(n) for n in message.nodeRankIds if n.isdigit()),
        message.extraParams,
        message.reportWithin,
        message.reason,
        message.again,
    )


class Link:
    """One job's connection. ``start`` returns at once; ``close`` ends everything.

    ``on_signal(received)`` runs in a thread of the link, one signal after the other, keep-alives
    left out; what it raises is logged. ``on_state(state, text)`` hears ``connected``, ``lost``
    (it will be tried again), ``off`` (403: the job may not recover), ``superseded`` (a newer
    client holds the job; no further tries) and ``refused`` (no permission; no further tries).
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        job_id: str,
        on_signal: Callable[[Received], None],
        *,
        on_state: Callable[[str, str], None] | None = None,
        role: str = "master agent",
        client_id: str = "",
        incarnation: int | None = None,
        declaration: Declaration | None = None,
        credentials: Credentials | None = None,
        keep_alive: int = 0,
        call_timeout: float = 5.0,
        report_timeout: float = 30.0,
        back_off: float = 10.0,
    ) -> None:
        if not job_id:
            raise ValueError("a link needs a job id")
        self.addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self.addresses or not all(self.addresses):
            raise ValueError("a link needs the address of a controller (HOST:PORT)")
        self.job_id = job_id
        self.declaration = declaration
        self.last: dict[str, Key] = {}  # the newest key per kind of report it asks for
        self._on_signal = on_signal
        self._on_state = on_state
        self._role = role
        self._client_id = client_id or f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"
        self._incarnation = time.time_ns() // 1000 if incarnation is None else incarnation
        self._credentials = credentials
        self._keep_alive = keep_alive
        self._call_timeout = call_timeout
        self._report_timeout = report_timeout
        self._back_off = back_off
        self._closed = threading.Event()
        self._connected = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._stub: Stub | None = None
        self._at = 0
        self._stream: Any = None
        self._seen: deque[Key] = deque(maxlen=_SEEN)
        self._signals: queue.Queue[Received | None] = queue.Queue(_QUEUE)
        self._threads: list[threading.Thread] = []
        self.state = "new"

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Starts the threads. Raises ValueError for certificates that cannot be used."""
        self._channel()
        for target in (self.run, self._dispatch):
            thread = threading.Thread(
                target=target, name=f"phalanx-link-{target.__name__.strip('_')}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the subscription and the threads; waits ``timeout`` seconds at most."""
        self._closed.set()
        with self._lock:
            stream, stub = self._stream, self._stub
            self._stub = None
        if stream is not None:
            stream.cancel()
        self._put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        if stub is not None:
            stub.channel.close()

    def __enter__(self) -> Link:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """A subscription stands."""
        return self._connected.is_set()

    def wait_connected(self, timeout: float) -> bool:
        """Waits ``timeout`` seconds at most for a subscription."""
        return self._connected.wait(timeout)

    # ---------------------------------------------------------------- subscription

    def _channel(self) -> Stub:
        with self._lock:
            if self._stub is None:
                if self._closed.is_set():
                    raise LinkDown("the link is closed")
                address = self.addresses[self._at % len(self.addresses)]
                self._stub = Stub(connect(address, self._credentials), metadata(self._credentials))
            return self._stub

    def _next_address(self) -> None:
        """The next try goes to the next controller on a fresh channel."""
        with self._lock:
            old, self._stub = self._stub, None
            self._at += 1
        if old is not None:
            old.channel.close()

    def client_info(self) -> Any:
        """The ClientInfo that goes with Init, Register and Subscribe."""
        info = pb.ClientInfo(
            jobId=self.job_id,
            role=self._role,
            clientId=self._client_id,
            incarnation=self._incarnation,
            keyed=True,
            keepAlive=self._keep_alive,
        )
        d = self.declaration
        if d is not None:
            info.declaration.CopyFrom(
                pb.JobDeclaration(
                    strategies=d.strategies,
                    worldSize=d.world_size,
                    devicesPerNode=d.devices_per_node,
                    nodes=[
                        pb.NodeDeclaration(
                            name=n.name, ip=n.ip, sn=n.sn, rank=n.rank, ranks=n.ranks
                        )
                        for n in d.nodes
                    ],
                    spares=d.spares or 0,
                    knowsSpares=d.spares is not None,
                    watchesNodes=d.watches_nodes,
                    reportTimeout=d.report_timeout,
                    rescheduleTimeout=d.reschedule_timeout,
                )
            )
        return info

    def _tell_state(self, state: str, text: str = "") -> None:
        self.state = state
        if self._on_state is not None:
            try:
                self._on_state(state, text)
            except Exception:
                log.exception("the state callback failed")

    def run(self) -> None:
        """The subscription loop; ``start`` runs it in a thread."""
        tries = 0
        try:
            while not self._closed.is_set():
                got_through, final = self._once()
                if final or self._closed.is_set():
                    return
                tries = 1 if got_through else tries + 1
                # jittered: a controller that restarts is not met by all jobs in one moment
                pause = min(self._back_off, 0.2 * 2 ** min(tries, 10)) * random.uniform(0.5, 1.0)
                self._closed.wait(pause)
        finally:
            self._connected.clear()
            self._ended.set()

    def _once(self) -> tuple[bool, bool]:
        """One subscription from Init to its end: (it stood, never try again)."""
        stood = False
        try:
            stub = self._channel()
            info = self.client_info()
            code, text = self._hello(stub, info)
            if code == Code.RECOVER_OFF:
                if self.state != "off":
                    self._tell_state("off", text)
                return False, False
            if code:
                log.warning("controller answered %s: %s; trying again", code, text)
                return False, False
            stream = stub("SubscribeProcessManageSignal", info, None)
            with self._lock:
                self._stream = stream
            if self._closed.is_set():
                stream.cancel()
                return False, True
            # Ours sends its headers at once, the original with its first keep-alive.
            stream.initial_metadata()
            if stream.is_active():
                stood = True
                self._stands()
            for message in stream:
                if not stood:
                    stood = True
                    self._stands()
                self._take(message)
            log.info("the controller ended the stream; subscribing again")
        except grpc.RpcError as error:
            if self._closed.is_set():
                return stood, True
            status, text = error.code(), error.details() or ""
            if status is grpc.StatusCode.ABORTED and text.startswith("superseded"):
                self._tell_state("superseded", text)
                return stood, True
            if status in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
                self._tell_state("refused", text)
                return stood, True
            log.info("controller: %s %s", status, text)
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                self._next_address()
        except LinkDown:
            return stood, True
        except ValueError as error:
            # a closed channel, or a signal with a rank that is no number
            log.warning("controller: %s", error)
        finally:
            with self._lock:
                self._stream = None
            if self._connected.is_set():
                self._connected.clear()
                if not self._closed.is_set() and self.state == "connected":
                    self._tell_state("lost", "the stream ended; trying again")
        return stood, False

    def _stands(self) -> None:
        self._connected.set()
        self._tell_state("connected", self.addresses[self._at % len(self.addresses)])

    def _hello(self, stub: Stub, info: Any) -> tuple[int, str]:
        answer = stub("Init", info, self._call_timeout)
        if answer.code:
            return int(answer.code), str(answer.info)
        answer = stub("Register", info, self._call_timeout)
        return int(answer.code), str(answer.info)

    def _take(self, message: Any) -> None:
        if message.jobId and message.jobId != self.job_id:
            log.warning("a signal for job %s came on the stream of %s", message.jobId, self.job_id)
            return
        if message.signalType == words.KEEP_ALIVE:
            return
        signal = received(message)
        # Only our controller counts rounds and repeats signals; the original never repeats one.
        if signal.key.round > 0:
            mark = (
                signal.key
                if signal.report_within
                else Key(signal.key.uuid, signal.signal, "/".join(signal.actions), signal.key.round)
            )
            if mark in self._seen:
                return
            self._seen.append(mark)
            kind = _report_kind(signal)
            if kind:
                self.last[kind] = signal.key
        self._put(signal)

    def _put(self, signal: Received | None) -> None:
        try:
            self._signals.put_nowait(signal)
        except queue.Full:
            log.error("signals are not being handled; one was dropped")

    def _dispatch(self) -> None:
        while (signal := self._signals.get()) is not None:
            self._handle(signal)

    def _handle(self, signal: Received) -> None:
        try:
            self._on_signal(signal)
        except Exception:
            log.exception("the callback for %s failed", signal.signal)
        if signal.key.round > 0 and (not signal.report_within or signal.strategy == words.EXIT):
            with contextlib.suppress(LinkDown, grpc.RpcError):
                self.acknowledge(signal)

    # ---------------------------------------------------------------- reports

    def call(
        self, name: str, request: Any, timeout: float | None = None, again: bool = True
    ) -> Answer:
        """One report, repeated while nobody answers, for ``timeout`` seconds at most.

        400 (not registered) makes it register and repeat once. Raises LinkDown.
        """
        until = time.monotonic() + (self._report_timeout if timeout is None else timeout)
        pause, last = 0.1, "no try was made"
        while (left := until - time.monotonic()) > 0 and not self._closed.is_set():
            try:
                stub = self._channel()
                answer = stub(name, request, min(left, self._call_timeout))
                if answer.code == Code.UNREGISTERED and again:
                    again = False
                    code, text = self._hello(stub, self.client_info())
                    if code == 0:
                        continue
                    return Answer(code, text)
                if answer.code == Code.SERVER_ERROR:
                    last = answer.info
                else:
                    return Answer(int(answer.code), str(answer.info))
            except grpc.RpcError as error:
                status, last = error.code(), f"{error.code().name}: {error.details()}"
                if status in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.PERMISSION_DENIED,
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.UNIMPLEMENTED,
                ):
                    raise
                if status is grpc.StatusCode.UNAVAILABLE and not self.connected:
                    self._next_address()
            except ValueError as error:  # the channel was closed by another thread
                last = str(error)
            self._closed.wait(min(pause, max(0.0, until - time.monotonic())))
            pause = min(2 * pause, 2.0)
        raise LinkDown(f"{name}: no controller at {', '.join(self.addresses)} answered ({last})")

    def report_fault(
        self,
        ranks: Mapping[int, int],
        *,
        incarnations: Mapping[int, int] | None = None,
        reasons: Mapping[int, str] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Ranks that failed, with their types (0 memory, 1 other, 2 network).

        ``incarnations`` says which process of the rank it was, so that the same rank may fail
        twice in one recovery. Raises LinkDown.
        """
        which, why = incarnations or {}, reasons or {}
        request = pb.ProcessFaultRequest(
            jobId=self.job_id,
            faultRanks=[
                pb.FaultRank(
                    rankId=str(rank),
                    faultType=str(kind),
                    incarnation=which.get(rank, 0),
                    reason=why.get(rank, "")[:500],
                )
                for rank, kind in ranks.items()
            ],
            reportId=uuid.uuid4().hex,
        )
        return self.call("ReportProcessFault", request, timeout)

    def stop_complete(
        self,
        signal: Received,
        code: int = 0,
        info: str = "",
        *,
        ranks: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """All ranks have stopped (0), or not: 404 they had not come up, 499 they cannot."""
        request = pb.StopCompleteRequest(
            jobId=self.job_id,
            status=pb.Status(code=code, info=info[:500]),
            faultRanks=_ranks(ranks),
            key=key_of(signal),
        )
        return self.call("ReportStopComplete", request, timeout)

    def strategies(
        self,
        signal: Received,
        names: Iterable[str],
        *,
        ranks: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """What the job can do now: retry, recover, downgrade, upgrade, dump, exit, migration."""
        request = pb.RecoverStrategyRequest(
            jobId=self.job_id,
            faultRanks=_ranks(ranks),
            strategies=list(names),
            key=key_of(signal),
        )
        return self.call("ReportRecoverStrategy", request, timeout)

    def status(
        self,
        signal: Received,
        code: int,
        info: str = "",
        *,
        isolate: Iterable[int] = (),
        timeout: float | None = None,
    ) -> Answer:
        """How the strategy went: 0 after the first good step, 201 with ranks to send away,
        405, 406, 407 or 499."""
        strategy = signal.strategy or {
            words.SAVE_AND_EXIT: words.DUMP,
            words.FAULT_NODES_EXIT: words.DOWNGRADE,
        }.get(signal.signal, "")
        request = pb.RecoverStatusRequest(
            jobId=self.job_id,
            status=pb.Status(code=code, info=info[:500]),
            strategy=strategy,
            isolateRankIds=[str(rank) for rank in isolate],
            key=key_of(signal),
        )
        return self.call("ReportRecoverStatus", request, timeout)

    def acknowledge(self, signal: Received, timeout: float | None = None) -> Answer:
        """Tells that a signal without a report has arrived. (ClusterD does not know the call.)"""
        request = control_pb2.Acknowledgement(
            jobId=self.job_id,
            uuid=signal.key.uuid,
            signalType=signal.key.signal,
            changeStrategy=signal.key.strategy,
            round=signal.key.round,
        )
        return self.call("Acknowledge", request, timeout)

    def node(self, node_rank: int, state: str, timeout: float | None = None) -> Answer:
        """A node was ``replaced``, a spare for it is ``ready``, or the old one is ``gone``."""
        request = control_pb2.NodeReport(jobId=self.job_id, nodeRank=node_rank, state=state)
        return self.call("ReportNode", request, timeout)

    def declare(self, declaration: Declaration, timeout: float | None = None) -> Answer:
        """A changed declaration; it takes effect at the next episode."""
        self.declaration = declaration
        return self.call("Init", self.client_info(), timeout)

    def forget(self, timeout: float | None = None) -> Answer:
        """The job has ended for good."""
        return self.call("Forget", control_pb2.Query(jobId=self.job_id), timeout, again=False)


def _report_kind(signal: Received) -> str:
    if signal.signal == words.STOP_TRAIN:
        return "stop"
    if signal.signal == words.GLOBAL_FAULT or words.A_NEW_POD_RUNNING in signal.actions:
        return "strategies"
    return "status" if signal.report_within else ""


def _ranks(ranks: Mapping[int, int] | None) -> list[Any]:
    return [
        pb.FaultRank(rankId=str(rank), faultType=str(kind)) for rank, kind in (ranks or {}).items()
    ]


def key_of(signal: Received | Key) -> Any:
    """The key to put into a report; None to an original server."""
    key = signal.key if isinstance(signal, Received) else signal
    if not key.round:
        return None
    return pb.SignalKey(
        uuid=key.uuid, signalType=key.signal, changeStrategy=key.strategy, round=key.round
    )
