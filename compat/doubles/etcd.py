"""etcd as far as the journal uses it: KV and leases in memory, over real gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from phalanx.proto import etcd_pb2 as pb


class FakeEtcd:
    """``with FakeEtcd() as etcd: etcd.address``; ``down`` makes every call fail."""

    def __init__(self) -> None:
        self.data: dict[bytes, tuple[bytes, int, int]] = {}  # value, create revision, lease
        self.leases: dict[int, list[float]] = {}  # id: ttl, until
        self.revision = 0
        self.down = False
        self.writes = 0
        self.lock = threading.Lock()
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        for service, methods in pb.SERVICES.items():
            handlers = {}
            for name, method in methods.items():
                if not hasattr(self, name):
                    continue  # no users here
                make = (
                    grpc.stream_stream_rpc_method_handler
                    if method.client_streams
                    else grpc.unary_unary_rpc_method_handler
                )
                handlers[name] = make(
                    getattr(self, name), method.request.FromString, lambda r: r.SerializeToString()
                )
            self.server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> FakeEtcd:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(0).wait(5)

    def _check(self, context: Any) -> None:
        if self.down:
            context.abort(grpc.StatusCode.UNAVAILABLE, "etcd is down")
        now = time.monotonic()
        for lease in [i for i, (_, until) in self.leases.items() if until < now]:
            self.drop(lease)

    def drop(self, lease: int) -> None:
        """A lease ends, and its keys with it."""
        self.leases.pop(lease, None)
        self.data = {k: v for k, v in self.data.items() if v[2] != lease or not lease}

    def _range(self, request: Any) -> Any:
        end = request.range_end or request.key + b"\0"
        keys = sorted(k for k in self.data if request.key <= k < end)
        limit = request.limit or len(keys)
        return pb.RangeResponse(
            kvs=[
                pb.KeyValue(key=k, value=self.data[k][0], create_revision=self.data[k][1])
                for k in keys[:limit]
            ],
            more=len(keys) > limit,
            count=len(keys),
        )

    def Range(self, request: Any, context: Any) -> Any:
        self._check(context)
        with self.lock:
            return self._range(request)

    def Txn(self, request: Any, context: Any) -> Any:
        self._check(context)
        if len(request.success) > 128:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many operations in txn request")
        with self.lock:
            good = all(self._holds(c) for c in request.compare)
            self.revision += 1
            responses = []
            for op in request.success if good else request.failure:
                kind = op.WhichOneof("request")
                if kind == "request_range":
                    answer = self._range(op.request_range)
                    responses.append(pb.ResponseOp(response_range=answer))
                elif kind == "request_put":
                    put = op.request_put
                    created = self.data.get(put.key, (b"", self.revision, 0))[1]
                    self.data[put.key] = (put.value, created, put.lease)
                    self.writes += 1
                    responses.append(pb.ResponseOp(response_put=pb.PutResponse()))
                else:
                    self.data.pop(op.request_delete_range.key, None)
                    self.writes += 1
                    gone = pb.DeleteRangeResponse()
                    responses.append(pb.ResponseOp(response_delete_range=gone))
            return pb.TxnResponse(succeeded=good, responses=responses)

    def _holds(self, compare: Any) -> bool:
        value, created, _ = self.data.get(compare.key, (b"", 0, 0))
        if compare.target == 1:
            return bool(created == compare.create_revision)
        return bool(compare.target == 3 and value == compare.value)

    def LeaseGrant(self, request: Any, context: Any) -> Any:
        self._check(context)
        with self.lock:
            self.revision += 1
            self.leases[self.revision] = [request.TTL, time.monotonic() + request.TTL]
            return pb.LeaseGrantResponse(ID=self.revision, TTL=request.TTL)

    def LeaseRevoke(self, request: Any, context: Any) -> Any:
        self._check(context)
        with self.lock:
            self.drop(request.ID)
        return pb.LeaseRevokeResponse()

    def LeaseKeepAlive(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            self._check(context)
            lease = self.leases.get(request.ID)
            if lease is not None:
                lease[1] = time.monotonic() + lease[0]
            yield pb.LeaseKeepAliveResponse(ID=request.ID, TTL=int(lease[0]) if lease else 0)
