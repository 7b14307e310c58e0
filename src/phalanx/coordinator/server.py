"""What every agent of a job answers on its endpoint: as its coordinator, or that it is not.

Bytes that do not fit cost their sender the call and are counted (``refused``), by what was
wrong: unauthenticated, garbage, oversized, replayed, term, torchrun (a stock one), stranger
(another job, another version, a node that is somebody else).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from phalanx.coordinator import copies, doorman, wire, words
from phalanx.coordinator.hub import Chair, Hub, agree
from phalanx.coordinator.security import OPEN, Security
from phalanx.elastic.rendezvous.ports import owners
from phalanx.proto import coordinator_pb2 as pb
from phalanx.rendezvous import model

log = logging.getLogger("phalanx.coordinator")

HELLO_TIMEOUT = 10.0
_BACKLOG = 1000  # messages that one agent may be behind
METHODS = pb.SERVICES["phalanx.coordinator.Coordinator"]


class CoordinatorError(RuntimeError):
    """The job cannot be coordinated; the text says why and what to do."""


def options(silence: float) -> list[tuple[str, Any]]:
    """Channel arguments, both ends. gRPC's own pings only close what is dead already: they come
    late, or never, from a process that was stopped; ``Beat`` is what counts."""
    return [
        ("grpc.keepalive_time_ms", max(int(silence * 4000), 1000)),
        ("grpc.keepalive_timeout_ms", max(int(silence * 2000), 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 50),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", 2 * wire.MAX_BODY),
        ("grpc.max_send_message_length", 2 * wire.MAX_BODY),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


@dataclass(frozen=True)
class Job:
    """Which job is served. ``silence`` in seconds: after which an agent counts as lost.
    ``separate``: the coordinator is a process of its own."""

    run_id: str
    epoch: int = 0
    silence: float = 5.0
    separate: bool = False


class Server:
    """One listener. ``hub`` is set while this agent is the coordinator; ``moved`` is where the
    coordinator is otherwise. ``ask(value)`` answers other agents' questions (``asked`` names the
    kinds that there are)."""

    def __init__(self, job: Job, me: str, security: Security = OPEN) -> None:
        self.job = job
        self.me = me
        self.security = security
        self.hub: Hub | None = None
        self.moved = ""
        self.term = 0  # the highest seen
        self.ask: Callable[[Any], Awaitable[Any]] | None = None
        self.asked: dict[str, type] = {}
        self.on_higher: Callable[[int], object] | None = None
        self.on_cut_off: Callable[[], object] | None = None
        self.on_hello: Callable[[words.Hello], object] | None = None
        self.held: copies.Held | None = None  # snapshots of other nodes' ranks
        self.refused: Counter[str] = Counter()
        self.bytes_in = self.bytes_out = 0
        self._encoded: tuple[object, bytes] = (None, b"")
        self.address = ""
        self._server: Any = None
        self._door: doorman.Doorman | None = None
        self._scolded: dict[str, float] = {}
        self.line: Callable[[str], object] = log.warning
        self._sweeper: asyncio.Task[None] | None = None
        self._awake = time.monotonic()  # when the sweeper ran last
        self._nap = job.silence / 2
        self._slept = float("-inf")  # when it was seen last that this process had not run

    # --- life ---------------------------------------------------------------------------------

    async def start(self, host: str, ports: Iterable[int] = (0,)) -> str:
        """Listens on a numeric address and the first of the ports that is free.

        Returns "host:port". Raises CoordinatorError.
        """
        tried = list(ports)
        try:
            listener = doorman.bind(host, tried)
        except OSError as error:
            low, high = min(tried), max(tried)
            shown = f"port {low}" if low == high else f"ports {low}-{high}"
            why = (error.strerror or str(error)).lower()
            if error.errno == errno.EADDRINUSE:
                why = " by ".join(["in use", *(f"process {p} ({c})" for p, c in owners(low)[:1])])
            raise CoordinatorError(f"cannot listen on {host}, {shown}: {why}") from None
        inner = f"phalanx-{os.getpid()}-{os.urandom(8).hex()}"
        server = grpc.aio.server(options=options(self.job.silence))
        server.add_generic_rpc_handlers((self._handlers(),))
        if self.security.tls:
            server.add_secure_port(f"unix-abstract:{inner}", self._credentials())
        else:
            server.add_insecure_port(f"unix-abstract:{inner}")
        await server.start()
        self._server = server
        self._door = doorman.Doorman(inner, tls=self.security.tls, stranger=self._turned_away)
        self._sweeper = asyncio.create_task(self._sweep())
        self.address = await self._door.start(listener)
        return self.address

    def _turned_away(self, kind: str, host: str) -> None:
        self._count("garbage" if kind == "silent" else kind)
        now = time.monotonic()
        if kind != "torchrun" or now < self._scolded.get(host, 0.0):
            return
        self._scolded[host] = now + 60.0
        self.line(
            f"a stock torchrun on {host} tried to join and was refused: it speaks a protocol of "
            "its own. Start that node with phalanx run too, or all of them with torchrun "
            "--rdzv-backend phalanx"
        )

    async def stop(self, grace: float = 0.5) -> None:
        """Ends all streams and closes the listener."""
        if self.hub is not None:
            self.hub.stop("the coordinator leaves")
        if self._door is not None:
            self._door.close()
        server, self._server = self._server, None
        if self._sweeper is not None:
            self._sweeper.cancel()
        if server is not None:
            await server.stop(grace)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        pause = self.job.silence / 6
        while True:
            due = loop.time() + pause
            await asyncio.sleep(pause)
            self._awake = time.monotonic()
            if self.hub is not None:
                late = loop.time() - due
                if late > self._nap:
                    self._slept = self._awake
                if self.on_cut_off is not None and (
                    late > self._nap or self.hub.all_quiet(self.job.silence)
                ):
                    self.on_cut_off()
                elif late > pause:
                    self.hub.spare()
                self.hub.sweep(self.job.silence)

    def _credentials(self) -> Any:
        s = self.security
        return grpc.ssl_server_credentials(
            [(s.key, s.certificate)], root_certificates=s.ca, require_client_auth=True
        )

    def _handlers(self) -> Any:
        # No serializers: bytes that do not fit are ours to count, not gRPC's to log.
        return grpc.method_handlers_generic_handler(
            "phalanx.coordinator.Coordinator",
            {
                "Attend": grpc.stream_stream_rpc_method_handler(self._attend),
                "Ask": grpc.unary_unary_rpc_method_handler(self._ask),
                "Keep": grpc.stream_unary_rpc_method_handler(self._keep),
                "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
                "Status": grpc.unary_unary_rpc_method_handler(self._status),
            },
        )

    # --- who calls ----------------------------------------------------------------------------

    def _count(self, what: str) -> None:
        self.refused[what] += 1

    async def _admit(self, context: Any) -> None:
        if not self.security.admits(context.invocation_metadata() or ()):
            self._count("unauthenticated")
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "this job asks for a token: give the same --token-file (or PHALANX_TOKEN) to all "
                "its agents",
            )

    def _read(self, data: bytes, known: Any, limit: int = wire.MAX_BODY) -> tuple[Any, Any]:
        """The envelope and its value. Raises WireError, having counted it."""
        try:
            envelope = wire.unseal(data)
            return envelope, wire.decode(envelope.kind, envelope.body, known, limit)
        except wire.WireError as error:
            self._count("oversized" if "more than" in str(error) else "garbage")
            raise

    def _seal(self, value: object, seq: int = 0) -> bytes:
        hub = self.hub
        if value is not self._encoded[0]:  # the same is often told to many
            self._encoded = (value, wire.encode(value))
        return wire.seal(
            value,
            term=hub.term if hub else self.term,
            generation=hub.generation if hub else 0,
            seq=seq,
            body=self._encoded[1],
        )

    def _saw(self, term: int) -> None:
        """Somebody speaks in a higher term: whoever serves a lower one is to step down."""
        if term > self.term:
            self.term = term
            if self.on_higher is not None:
                self.on_higher(term)

    # --- the stream of an agent ---------------------------------------------------------------

    async def _attend(self, _requests: Any, context: Any) -> None:
        await self._admit(context)
        try:
            data = await asyncio.wait_for(context.read(), HELLO_TIMEOUT)
        except (TimeoutError, asyncio.TimeoutError):
            self._count("garbage")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a Hello comes first")
            return
        if data is grpc.aio.EOF:
            return
        try:
            envelope, hello = self._read(data, wire.HELLO, wire.MAX_SAYING)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        self.bytes_in += len(data)
        why = self._speaks_otherwise(hello)
        if not why and self.on_hello is not None:
            self.on_hello(hello)
        why = why or self._stranger(hello)
        if why:
            self._count("stranger")
            await context.write(self._seal(model.Refuse(why)))
            return
        self._saw(envelope.term)
        hub = self.hub
        if hub is None or hub.stopped:
            await context.write(self._seal(words.Moved(self.moved)))
            return
        await self._serve(hub, hello.node, context, envelope.seq)

    @staticmethod
    def _speaks_otherwise(hello: words.Hello) -> str:
        if hello.version == words.VERSION:
            return ""
        return (
            f"this agent speaks version {hello.version}, the job's coordinator version "
            f"{words.VERSION}: install the same phalanx on all nodes"
        )

    def _stranger(self, hello: words.Hello) -> str:
        if hello.run_id != self.job.run_id:
            return (
                f"the job here is {self.job.run_id!r}, not {hello.run_id!r}: give all agents of a "
                "job the same --rdzv-id, and each job its own --rdzv-endpoint"
            )
        return agree(hello.options, self.hub.options) if self.hub is not None else ""

    async def _serve(self, hub: Hub, node: str, context: Any, seq: int) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        sent = 0
        misfit, ended = False, ""

        def tell(value: Any) -> None:
            nonlocal sent
            sent += 1
            if queue.qsize() > _BACKLOG:
                dismiss("it does not read what it is told")
                return
            queue.put_nowait(self._seal(value, sent))

        def dismiss(reason: str) -> None:
            nonlocal ended
            ended = ended or reason
            queue.put_nowait(None)

        async def write() -> None:
            size = 0
            going: list[bytes] = []
            while (data := await queue.get()) is not None:
                going.append(data)
                size += len(data)
                if queue.empty() or size > wire.MAX_BODY // 2:
                    data = wire.bundle(going) if len(going) > 1 else data
                    self.bytes_out += len(data)
                    await context.write(data)
                    going, size = [], 0
            task.cancel()

        task: Any = asyncio.current_task()
        tell(words.Welcome(self.me, self.job.silence, self.job.separate))
        chair = Chair(node, tell, dismiss)
        hub.sit(chair)
        writer = asyncio.create_task(write())
        how = "its connection closed"
        try:
            while True:
                data = await context.read()
                if data is grpc.aio.EOF:
                    break
                self.bytes_in += len(data)
                envelope, saying = self._read(data, wire.SAYINGS, wire.MAX_SAYING)
                if envelope.term != hub.term:
                    self._count("term")
                    self._saw(envelope.term)
                    raise wire.WireError(f"said in term {envelope.term}, this is {hub.term}")
                if envelope.seq <= seq:
                    self._count("replayed")
                    raise wire.WireError(f"message {envelope.seq} was there before")
                seq = envelope.seq
                chair.heard = time.monotonic()
                if type(saying) is words.Beat:
                    tell(saying)
                    continue
                if type(saying) is model.Join and saying.node.id != node:
                    self._count("stranger")
                    raise wire.WireError(f"this is the stream of {node}, not {saying.node.id}")
                hub.hears(chair, saying)
        except wire.WireError as error:
            misfit, ended = True, ended or str(error)
            how = f"it sent what does not fit ({error})"
        except asyncio.CancelledError:
            how = ended or how
            if not ended:
                raise
        finally:
            if self.on_cut_off is not None and time.monotonic() - self._awake > self._nap:
                self.on_cut_off()  # we did not run, and they have left us for that
            now = time.monotonic()
            slept = now - self._awake > self._nap or now - self._slept < self.job.silence
            # who has not run cannot say whether the others have ended, or have left it
            hub.rises(chair, how, silent=slept)
            if not ended:
                writer.cancel()
        if ended:
            # A write that is cancelled half way keeps gRPC from ever sending the status.
            queue.put_nowait(None)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([writer], timeout=1.0)
            writer.cancel()
            code = grpc.StatusCode.INVALID_ARGUMENT if misfit else grpc.StatusCode.ABORTED
            await context.abort(code, ended)

    # --- questions ------------------------------------------------------------------------------

    async def _ask(self, data: bytes, context: Any) -> bytes:
        await self._admit(context)
        try:
            _, value = self._read(data, self.asked, wire.MAX_SAYING)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return b""
        self.bytes_in += len(data)
        if self.ask is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
            return b""
        answer = await self.ask(value)
        return self._seal(answer)

    async def _keep(self, _requests: Any, context: Any) -> bytes:
        await self._admit(context)
        held = self.held
        if held is None:
            return self._seal(words.Held("no snapshots are held here"))

        async def read() -> bytes | None:
            data = await asyncio.wait_for(context.read(), copies.STALL)
            self.bytes_in += 0 if data is grpc.aio.EOF else len(data)
            return None if data is grpc.aio.EOF else data

        try:
            await copies.take_in(held, read, self._count)
        except copies.NotHeld as error:
            return self._seal(words.Held(str(error)))
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (TimeoutError, asyncio.TimeoutError):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing more came")
        return self._seal(words.Held())

    async def _fetch(self, data: bytes, context: Any) -> None:
        await self._admit(context)
        try:
            _, wanted = self._read(data, wire.WANTED, wire.MAX_SAYING)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        for rank, slate, generation in self.held.of(wanted) if self.held is not None else ():
            for step in sorted(slate.steps()):
                head = words.Copy(wanted.run_id, generation, rank, wanted.world, step)
                async for part in copies.give_out(slate, head):
                    self.bytes_out += len(part)
                    await context.write(part)

    async def _status(self, data: bytes, context: Any) -> bytes:
        await self._admit(context)
        try:
            self._read(data, wire.STATUS, wire.MAX_SAYING)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self._seal(words.StatusReply(json.dumps(self.status())))

    def status(self) -> dict[str, Any]:
        """JSON for ``phalanx status``: the hub's, or where to ask instead."""
        out: dict[str, Any] = {
            "run_id": self.job.run_id,
            "epoch": self.job.epoch,
            "endpoint": self.address,
            "coordinator": self.me if self.hub else "",
            "moved": "" if self.hub else self.moved,
            "refused": dict(self.refused),
            "bytes": {"in": self.bytes_in, "out": self.bytes_out},
        }
        if self.hub is not None:
            out.update(self.hub.status())
        return out
