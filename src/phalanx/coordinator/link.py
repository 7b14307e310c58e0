"""An agent's end of the stream to its coordinator, on the network or in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from phalanx.coordinator import net, wire, words
from phalanx.coordinator.hub import Chair, Hub
from phalanx.coordinator.security import OPEN, Security
from phalanx.coordinator.server import METHODS, options
from phalanx.rendezvous import model

_WRONG = {
    grpc.StatusCode.UNAUTHENTICATED: "refused our token",
    grpc.StatusCode.UNIMPLEMENTED: "is no coordinator of ours",
}


class Refused(Exception):
    """Somebody answers and lets us not in, for good; the text says why and what to do."""


class Connection(Protocol):
    """A stream to the coordinator of ``term``. ``ours``: our address as it sees it."""

    term: int
    ours: str
    coordinator: str
    separate: bool

    def say(self, saying: model.Saying) -> None: ...

    def tellings(self) -> AsyncIterator[Any]:
        """What the coordinator says, until the stream ends; then raises LinkEnded."""
        ...

    async def close(self) -> None: ...


class LinkEnded(Exception):
    """The stream to the coordinator has ended; the text is a clause that says how. ``silent``:
    nothing was heard of it, so it would be of no use to ask it again at once. ``slept``: this
    process has not run for a while, and may have been left for that."""

    def __init__(self, how: str, silent: bool = False, slept: bool = False) -> None:
        super().__init__(how)
        self.silent = silent
        self.slept = slept


def channel(reached: net.Reached, endpoint: str, security: Security, silence: float) -> Any:
    """A channel of its own to an address that has been reached."""
    host, port = reached.address, reached.port
    target = f"ipv6:{net.join(host, port)}" if ":" in host else f"ipv4:{host}:{port}"
    arguments = [*options(silence), ("grpc.use_local_subchannel_pool", 1)]
    if not security.tls:
        return grpc.aio.insecure_channel(target, arguments)
    name = security.name or net.split(endpoint)[0].strip("[]")
    credentials = grpc.ssl_channel_credentials(security.ca, security.key, security.certificate)
    arguments.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(target, credentials, arguments)


def why(code: grpc.StatusCode, details: str | None) -> str:
    """What the status of a call that failed means, as a clause."""
    details = (details or "").strip()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer"
    if code is grpc.StatusCode.UNAVAILABLE:
        for sign, words_ in (
            ("refused", "refused"),
            ("keepalive", "no sign of life"),
            ("ping", "no sign of life"),
            ("SSL", "no TLS there that fits ours"),
            ("handshake", "no TLS there that fits ours"),
            ("Socket closed", "the connection closed"),
            ("reset", "the connection closed"),
            ("GOAWAY", "the connection closed"),
        ):
            if sign.lower() in details.lower():
                return words_
    return details or ("the connection closed" if code is grpc.StatusCode.OK else code.name)


async def call(
    endpoint: str,
    method: str,
    value: object,
    known: Any,
    *,
    term: int = 0,
    security: Security = OPEN,
    timeout: float = 2.0,
    local: str = "",
) -> tuple[int, Any]:
    """One question: the answer's term and value. Raises Unreachable, or Refused."""
    reached = await net.reach(endpoint, timeout, local)
    async with channel(reached, endpoint, security, timeout) as made:
        invoke = made.unary_unary(METHODS[method].path)
        try:
            data = await invoke(
                wire.seal(value, term=term), timeout=timeout, metadata=security.metadata()
            )
            envelope = wire.unseal(data)
            return envelope.term, wire.decode(envelope.kind, envelope.body, known)
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code(), error.details(), endpoint) from None
        except wire.WireError as error:
            raise net.Unreachable(f"answers what makes no sense ({error})") from None


def _failure(code: grpc.StatusCode, details: str | None, endpoint: str) -> Exception:
    wrong = _WRONG.get(code)
    if wrong is not None:
        return Refused(f"{endpoint} {wrong}: {details}")
    return net.Unreachable(why(code, details))


class Stream:
    """A :class:`Connection` on the network. Made by :func:`attend`."""

    def __init__(self, made: Any, stream: Any, ours: str) -> None:
        self.term = 0
        self.coordinator = ""
        self.separate = False
        self.silence = 0.0
        self.ours = ours
        self.generation = 0
        self.refused: Counter[str] = Counter()
        self.messages = self.bytes = 0
        self._channel = made
        self._stream = stream
        self._sent = 0
        self._heard = 0
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self._alive = 0.0
        self._beating: asyncio.Task[None] | None = None
        self._how, self._silent = "it was given up", False
        self._due = math.inf  # when the next sign of life is to be said
        self._slept = -math.inf  # when it was seen last that this process had not run

    def say(self, saying: model.Saying) -> None:
        """Sends, in order; what is said after the end goes nowhere. Raises WireError."""
        self._send(saying)

    def _send(self, saying: object) -> None:
        self._sent += 1
        self._out.put_nowait(
            wire.seal(saying, term=self.term, generation=self.generation, seq=self._sent)
        )
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(await self._out.get())

    async def hello(self, hello: words.Hello, term: int, timeout: float) -> Any:
        """Sends Hello; the answer. Raises Unreachable, or Refused."""

        async def ask() -> Any:
            await self._stream.write(wire.seal(hello, term=term))
            return await self._stream.read()

        try:
            data = await asyncio.wait_for(ask(), timeout)
            if data is grpc.aio.EOF:
                raise _failure(*await self._status(), "the endpoint")
            envelope = wire.unseal(data)
            value = wire.decode(envelope.kind, envelope.body, wire.TELLINGS)
        except (TimeoutError, asyncio.TimeoutError):
            raise net.Unreachable("no answer") from None
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code(), error.details(), "the endpoint") from None
        except asyncio.InvalidStateError:
            raise net.Unreachable("the connection closed") from None
        except wire.WireError as error:
            raise net.Unreachable(f"answers what makes no sense ({error})") from None
        if type(value) is model.Refuse:
            raise Refused(value.reason)
        if type(value) is words.Welcome:
            if envelope.term < term:
                raise net.Unreachable(f"a coordinator of term {envelope.term}, which is over")
            self.term, self._heard = envelope.term, envelope.seq
            self.coordinator, self.silence = value.coordinator, value.silence
            self.separate = value.separate
            self._beating = asyncio.create_task(self._beat())
        return value

    async def _beat(self) -> None:
        """Signs of life; when none is answered any more the stream is given up."""
        loop = asyncio.get_running_loop()
        pause = self.silence / 3
        self._alive = loop.time()
        while not self._closed:
            due = self._due = loop.time() + pause * random.uniform(0.8, 1.0)
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            if now - due > pause:
                self._alive = self._slept = now  # it is us who did not run
            if now - self._alive > self.silence:
                self._how, self._silent = f"no sign of life for {self.silence:g} s", True
                self._closed = True
                self._stream.cancel()
                return
            self._send(words.Beat())

    def _ended(self, how: str) -> LinkEnded:
        now = asyncio.get_running_loop().time()
        slept = now - self._due > self.silence / 3 or now - self._slept < self.silence
        return LinkEnded(how, slept=slept)

    async def _status(self) -> tuple[grpc.StatusCode, str]:
        return await self._stream.code(), await self._stream.details()

    async def tellings(self) -> AsyncIterator[Any]:
        while True:
            try:
                data = await self._stream.read()
                if data is grpc.aio.EOF:
                    raise self._ended(why(*await self._status()))
            except grpc.aio.AioRpcError as error:
                raise self._ended(why(error.code(), error.details())) from None
            except (asyncio.InvalidStateError, grpc.aio.UsageError):
                raise self._ended("the connection closed") from None
            except asyncio.CancelledError:
                if not self._closed:
                    raise
                raise LinkEnded(self._how, self._silent) from None
            self.messages += 1
            self.bytes += len(data)
            try:
                for envelope in wire.unbundle(data):
                    value = wire.decode(envelope.kind, envelope.body, wire.TELLINGS)
                    if self._is_next(envelope) and type(value) is not words.Beat:
                        yield value
            except wire.WireError as error:
                self.refused["garbage"] += 1
                raise LinkEnded(f"it says what makes no sense ({error})") from None

    def _is_next(self, envelope: Any) -> bool:
        if envelope.term != self.term:
            self.refused["term"] += 1
            return False
        if envelope.seq <= self._heard:
            self.refused["replayed"] += 1
            return False
        self._heard = envelope.seq
        self._alive = asyncio.get_running_loop().time()
        self.generation = max(self.generation, envelope.generation)
        return True

    async def close(self) -> None:
        """Sends what was said, then hangs up; a second at most."""
        self._closed = True
        until = asyncio.get_running_loop().time() + 1.0
        with contextlib.suppress(Exception):
            if self._writer is not None:
                while not self._out.empty() and asyncio.get_running_loop().time() < until:
                    await asyncio.sleep(0.005)
                self._writer.cancel()
            await asyncio.wait_for(self._stream.done_writing(), 1.0)
        if self._beating is not None:
            self._beating.cancel()
        self._stream.cancel()
        await self._channel.close()


async def attend(
    endpoint: str,
    hello: words.Hello,
    *,
    term: int = 0,
    security: Security = OPEN,
    silence: float = 5.0,
    timeout: float = 5.0,
    local: str = "",
) -> Stream | words.Moved:
    """Connects and says Hello; ``term`` is the highest that we know, and none lower will do.

    Raises Unreachable (try again), or Refused (do not).
    """
    reached = await net.reach(endpoint, timeout, local)
    made = channel(reached, endpoint, security, silence)
    try:
        stream = made.stream_stream(METHODS["Attend"].path)(metadata=security.metadata())
        link = Stream(made, stream, reached.ours)
        answer = await link.hello(hello, term, timeout)
    except BaseException:
        await made.close()
        raise
    if type(answer) is words.Moved:
        await made.close()
        return answer
    if type(answer) is not words.Welcome:
        await made.close()
        raise net.Unreachable(f"says {type(answer).__name__} before Welcome")
    return link


class Seat:
    """A :class:`Connection` to the coordinator in this process."""

    def __init__(self, hub: Hub, node: str, ours: str) -> None:
        self.term = hub.term
        self.coordinator = node
        self.separate = False
        self.ours = ours
        self.generation = 0
        self._hub = hub
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._chair = Chair(node, self._queue.put_nowait, self._dismiss)
        self._chair.heard = math.inf
        hub.sit(self._chair)

    def _dismiss(self, reason: str) -> None:
        self._queue.put_nowait(LinkEnded(reason))

    def say(self, saying: model.Saying) -> None:
        self._hub.hears(self._chair, saying)

    async def tellings(self) -> AsyncIterator[Any]:
        while True:
            value = await self._queue.get()
            if isinstance(value, LinkEnded):
                raise value
            yield value

    async def close(self) -> None:
        self._hub.rises(self._chair, "it left")


async def status(endpoint: str, security: Security, timeout: float) -> dict[str, Any]:
    """What the coordinator of the job of this agent says of it; what the agent itself says,
    where that cannot be had. Raises Unreachable, Refused."""
    out = await _status_of(endpoint, security, timeout)
    moved = out.get("moved")
    if isinstance(moved, str) and moved and moved != endpoint:
        with contextlib.suppress(net.Unreachable, Refused):
            return await _status_of(moved, security, timeout)
    return out


async def _status_of(endpoint: str, security: Security, timeout: float) -> dict[str, Any]:
    asked = words.StatusRequest()
    _, reply = await call(
        endpoint, "Status", asked, wire.STATUS, security=security, timeout=timeout
    )
    try:
        out = json.loads(reply.text)
    except (ValueError, AttributeError):
        out = None
    if not isinstance(out, dict):
        raise net.Unreachable("answers what makes no sense")
    return out
