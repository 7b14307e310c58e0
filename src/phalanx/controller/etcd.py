"""The journal in etcd (v3 API): survives the controller's machine, and lets a standby take over.

One controller at a time: it holds a key under a lease, and each write is a transaction that
asks for that key first. A controller that has lost its lease can therefore write nothing more.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from phalanx.controller.journal import JournalError, StoredJob, WriteFailed
from phalanx.proto import etcd_pb2 as pb

log = logging.getLogger("phalanx.controller")

_OPS = 100  # of a transaction; etcd's own limit is 128
_FENCES = 5  # tries; each failure is a write given up earlier that was carried out meanwhile
_PAGE = 200


_DENIED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,  # a wrong password
)


class Denied(JournalError):
    """etcd does not let us: a wrong user or password, or one without the rights."""


def _failed(addresses: str, error: Any) -> JournalError:
    kind = Denied if error.code() in _DENIED else JournalError
    return kind(f"etcd at {addresses}: {error.code().name}: {error.details()}")


@dataclass(frozen=True)
class Access:
    """How etcd is spoken to. ``tls``; ``ca``: PEM of who signed its certificate, b"": the
    system's authorities; ``certificate``, ``key``: ours, PEM; ``user``, ``password``: "" for none.
    """

    tls: bool = False
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)


OPEN = Access()


class Client:
    """Calls to etcd: ``addresses`` is ``HOST:PORT[,HOST:PORT]``, ``timeout`` in seconds a call."""

    def __init__(self, addresses: str, access: Access, timeout: float) -> None:
        """Raises JournalError for addresses that are none."""
        hosts = [a.strip() for a in addresses.split(",") if a.strip()]
        if not hosts or any(":" not in h for h in hosts):
            raise JournalError(f"--etcd must be HOST:PORT[,HOST:PORT], not {addresses!r}")
        target = hosts[0] if len(hosts) == 1 else "ipv4:" + ",".join(hosts)
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.enable_http_proxy", 0),
        ]
        if access.tls:
            name = hosts[0].rpartition(":")[0].strip("[]")
            options.append(("grpc.ssl_target_name_override", name))
            credentials = grpc.ssl_channel_credentials(
                access.ca or None, access.key or None, access.certificate or None
            )
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._access = access
        self._timeout = timeout
        self._token = ""
        channel = self._channel
        self._calls = {
            name: (channel.stream_stream if method.client_streams else channel.unary_unary)(
                method.path, method.request.SerializeToString, method.response.FromString
            )
            for service in pb.SERVICES.values()
            for name, method in service.items()
        }

    def call(self, name: str, request: Any) -> Any:
        """The answer, of a stream the first one. Raises grpc.RpcError, StopIteration."""
        if not self._access.user:
            return self._once(name, request)
        if not self._token:
            self._log_in()
            return self._once(name, request)
        try:
            return self._once(name, request)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise
        self._log_in()  # etcd was started again, or has forgotten us
        return self._once(name, request)

    def _log_in(self) -> None:
        self._token = ""
        who = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
        self._token = self._once("Authenticate", who).token

    def _once(self, name: str, request: Any) -> Any:
        streams = name == "LeaseKeepAlive"
        answer = self._calls[name](
            iter([request]) if streams else request,
            timeout=self._timeout,
            metadata=(("token", self._token),) if self._token else None,
        )
        return next(answer) if streams else answer

    def close(self) -> None:
        self._channel.close()


class EtcdJournal:
    """The same as :class:`phalanx.controller.journal.Journal`, in etcd."""

    def __init__(
        self,
        addresses: str,
        prefix: str = "/phalanx/controller",
        *,
        ttl: int = 15,
        wait: float = 0.0,
        timeout: float = 2.0,
        me: str = "",
        access: Access = OPEN,
    ) -> None:
        """``addresses`` is ``HOST:PORT[,HOST:PORT]``. When another controller owns the journal,
        waits ``wait`` seconds (as a standby does) for it to let go. ``me``: what the owner's key
        says, "": host and process.

        Raises JournalError when it is still owned, or etcd does not answer.
        """
        self._client = Client(addresses, access, timeout)
        self._prefix = prefix.rstrip("/").encode()
        self._owner = self._prefix + b"/owner"
        self._me = (me or f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}").encode()
        self._name = self._me  # what the owner's key began with; see `_fence`
        self._turn = 0
        self._unsure = False  # whether a write may be carried out that we have given up
        self._timeout = timeout
        self._closed = threading.Event()
        self._lost = threading.Event()
        self.on_lost: Callable[[], object] | None = None
        self._lease = 0
        try:
            self._acquire(ttl, wait)
        except grpc.RpcError as error:
            self._client.close()
            raise _failed(addresses, error) from None
        except JournalError:
            self._client.close()
            raise
        self._thread = threading.Thread(
            target=self._keep, args=(ttl,), name="phalanx-etcd-lease", daemon=True
        )
        self._thread.start()

    def _call(self, name: str, request: Any) -> Any:
        return self._client.call(name, request)

    def _acquire(self, ttl: int, wait: float) -> None:
        until = time.monotonic() + wait
        self._lease = int(self._call("LeaseGrant", pb.LeaseGrantRequest(TTL=ttl)).ID)
        put = pb.PutRequest(key=self._owner, value=self._me, lease=self._lease)
        take = pb.TxnRequest(
            compare=[pb.Compare(target=1, key=self._owner, create_revision=0)],  # nobody's
            success=[pb.RequestOp(request_put=put)],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=self._owner))],
        )
        while True:
            answer = self._call("Txn", take)
            if answer.succeeded:
                return
            kvs = answer.responses[0].response_range.kvs
            holder = _named(kvs[0].value).decode("utf-8", "replace") if kvs else "somebody"
            if time.monotonic() >= until:
                raise JournalError(
                    f"another controller ({holder}) owns the journal in etcd; stop it, give "
                    "another --etcd-prefix, or start this one with --standby"
                )
            # A back-off; the lease of this one must not run out meanwhile.
            self._closed.wait(min(1.0, max(0.05, ttl / 5)))
            self._call("LeaseKeepAlive", self._renewal())

    def _renewal(self) -> Any:
        return pb.LeaseKeepAliveRequest(ID=self._lease)

    def _keep(self, ttl: int) -> None:
        """Renews the lease thrice in its time; once it has run out, nothing is written."""
        good = time.monotonic()
        while not self._closed.wait(ttl / 3):
            try:
                if self._call("LeaseKeepAlive", self._renewal()).TTL <= 0:
                    break
                good = time.monotonic()
            except (grpc.RpcError, StopIteration, ValueError) as error:
                if self._closed.is_set():
                    return
                log.warning("etcd: the lease could not be renewed: %s", error)
                if time.monotonic() - good > ttl:
                    break
        if not self._closed.is_set():
            log.error("etcd: the lease is lost; another controller may own the journal now")
            self._lose()

    def _lose(self) -> None:
        self._lost.set()
        if self.on_lost is not None:
            self.on_lost()

    @property
    def lost(self) -> bool:
        """Another controller may own the journal."""
        return self._lost.is_set()

    def _all(self, kind: bytes) -> Iterator[tuple[str, bytes]]:
        start = self._prefix + b"/" + kind + b"/"
        end, key = start[:-1] + b"0", start  # "0" follows "/"
        while True:
            answer = self._call("Range", pb.RangeRequest(key=key, range_end=end, limit=_PAGE))
            for kv in answer.kvs:
                yield kv.key[len(start) :].decode(), kv.value
            if not answer.more:
                return
            key = answer.kvs[-1].key + b"\0"

    def jobs(self) -> dict[str, StoredJob]:
        """All jobs, by id."""
        return {
            id_: StoredJob(value[1:].decode(), value[:1] == b"1")
            for id_, value in self._all(b"jobs")
        }

    def faults(self) -> dict[str, str]:
        """All device faults (JSON), by key."""
        return {id_: value.decode() for id_, value in self._all(b"faults")}

    def write(self, jobs: Mapping[str, StoredJob | None], faults: Mapping[str, str | None]) -> None:
        """Puts these, or deletes where None; at most 100 in one transaction.

        Raises WriteFailed.
        """
        if self._lost.is_set():
            raise WriteFailed("the lease in etcd is lost; this controller decides nothing more")
        ops = []
        for id_, job in jobs.items():
            key = self._prefix + b"/jobs/" + id_.encode()
            ops.append(_op(key, (("1" if job.registered else "0") + job.body) if job else None))
        for id_, body in faults.items():
            ops.append(_op(self._prefix + b"/faults/" + id_.encode(), body))
        try:
            if self._unsure:
                self._fence()
            mine = pb.Compare(target=3, key=self._owner, value=self._me)
            for at in range(0, len(ops), _OPS):
                answer = self._call(
                    "Txn", pb.TxnRequest(compare=[mine], success=ops[at : at + _OPS])
                )
                if not answer.succeeded:
                    self._not_mine()
        except grpc.RpcError as error:
            self._unsure = True
            raise WriteFailed(f"etcd: {error.code().name}: {error.details()}") from None

    def _not_mine(self) -> NoReturn:
        self._lose()
        raise WriteFailed("another controller owns the journal in etcd now")

    def _fence(self) -> None:
        """Have a write that was given up, and may be on its way still, come to nothing.

        It asks for the owner's key to say what it said then; so that says something else now.
        Raises WriteFailed, grpc.RpcError.
        """
        for _ in range(_FENCES):
            kvs = self._call("Range", pb.RangeRequest(key=self._owner)).kvs
            value = kvs[0].value if kvs else b""  # a fence that was given up may have been put
            if _named(value) != self._name:
                self._not_mine()
            self._turn += 1
            fresh = self._name + b"#%d" % self._turn
            put = pb.PutRequest(key=self._owner, value=fresh, lease=self._lease)
            request = pb.TxnRequest(
                compare=[pb.Compare(target=3, key=self._owner, value=value)],
                success=[pb.RequestOp(request_put=put)],
            )
            if self._call("Txn", request).succeeded:
                self._me, self._unsure = fresh, False
                return
        raise WriteFailed("etcd: what an earlier write came to is still not known")

    def close(self) -> None:
        """Lets the journal go, so that a standby need not wait for the lease to run out."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._call("LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease))
        except grpc.RpcError as error:
            log.warning("etcd: the lease could not be given back: %s", error.code())
        self._thread.join(self._timeout + 1)
        self._client.close()


def _named(value: bytes) -> bytes:
    """Who the owner's key names, without the number of his fence."""
    return value.partition(b"#")[0]


def owner(addresses: str, prefix: str, timeout: float = 2.0, access: Access = OPEN) -> str:
    """What the owner's key under ``prefix`` says now; "": nobody owns it. Raises JournalError."""
    client = Client(addresses, access, timeout)
    try:
        key = prefix.rstrip("/").encode() + b"/owner"
        kvs = client.call("Range", pb.RangeRequest(key=key)).kvs
        return _named(kvs[0].value).decode("utf-8", "replace") if kvs else ""
    except grpc.RpcError as error:
        raise _failed(addresses, error) from None
    finally:
        client.close()


def _op(key: bytes, value: str | None) -> Any:
    if value is None:
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value.encode()))
