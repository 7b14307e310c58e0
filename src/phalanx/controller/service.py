"""The gRPC services, as far as they are words to calls: Recover, Fault, PubFault, Control."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from phalanx.controller import access, faultview, wire
from phalanx.controller.hub import Entry, Feed, Hub, Subscriber, Unavailable
from phalanx.proto import control_pb2, fault_pb2, health_pb2, pubfault_pb2, recover_pb2
from phalanx.proto import reflection_pb2 as rpb
from phalanx.proto._pool import Method, file_of, files
from phalanx.recovery import devices
from phalanx.recovery import model as m
from phalanx.recovery.model import State
from phalanx.recovery.words import Code

log = logging.getLogger("phalanx.controller")

Status = recover_pb2.Status
_OM_WAIT = 900.0
_DELAY_RECOVER_MS = 5000
_FAULT_WAITERS = 10_000


class _Malformed:
    """Stands in for a request that could not be parsed."""


_MALFORMED = _Malformed()


def _parse(kind: Any) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except Exception:  # protobuf's DecodeError, which has moved between versions
            return _MALFORMED

    return parse


def _bytes(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    data: bytes = message.SerializeToString()
    return data


class Refused(Exception):
    """Ends a call with a gRPC status."""

    def __init__(self, code: Any, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Services:
    """All handlers over one hub."""

    def __init__(
        self,
        hub: Hub,
        policy: access.Policy = access.ANYBODY,
        calls: access.Quotas | None = None,
        checks: access.Quotas | None = None,
    ) -> None:
        self.hub = hub
        self.policy = policy
        self.calls = calls or access.Quotas(1000, 2000)
        self.checks = checks or access.Quotas(10_000, 10_000)
        self.queries = access.Quotas(10, 10)
        self.public = access.Quotas(1, 100)

    # ---------------------------------------------------------------- plumbing

    def handlers(self) -> list[Any]:
        """Generic handlers for ``server.add_generic_rpc_handlers``."""
        out = []
        for table in (
            recover_pb2.SERVICES,
            fault_pb2.SERVICES,
            pubfault_pb2.SERVICES,
            control_pb2.SERVICES,
            health_pb2.SERVICES,
        ):
            for service, methods in table.items():
                prefix = service.rsplit(".", 1)[-1].lower()
                out.append(
                    grpc.method_handlers_generic_handler(
                        service,
                        {name: self._handler(prefix, mth) for name, mth in methods.items()},
                    )
                )
        (reflection,) = rpb.SERVICES.values()
        for service in (
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ):
            (method,) = reflection.values()
            out.append(
                grpc.method_handlers_generic_handler(
                    service,
                    {
                        method.name: grpc.stream_stream_rpc_method_handler(
                            self._reflect,
                            request_deserializer=_parse(method.request),
                            response_serializer=_bytes,
                        )
                    },
                )
            )
        return out

    def _handler(self, prefix: str, method: Method) -> Any:
        run = getattr(self, f"_{prefix}_{method.name}")
        if method.server_streams:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method.path, run),
                request_deserializer=_parse(method.request),
                response_serializer=_bytes,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method.path, run),
            request_deserializer=_parse(method.request),
            response_serializer=_bytes,
        )

    def _unary(
        self, path: str, run: Callable[[Any, access.Caller, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        health = path in ("/Recover/HealthCheck", "/grpc.health.v1.Health/Check")
        count = self.hub.metrics.count

        async def call(request: Any, context: Any) -> Any:
            try:
                if request is _MALFORMED:
                    raise Refused(
                        grpc.StatusCode.INVALID_ARGUMENT, f"the request of {path} cannot be parsed"
                    )
                who = access.caller(context, self.policy.open)
                if not (self.checks if health else self.calls).take(who.host):
                    raise Refused(
                        grpc.StatusCode.RESOURCE_EXHAUSTED, f"qps exceeded for {who.host}"
                    )
                answer = await run(request, who, context)
                count("calls", method=path, code=str(getattr(answer, "code", 0)))
                return answer
            except BaseException as error:
                await self._fail(path, context, error)
                raise

        return call

    def _streaming(
        self, path: str, run: Callable[[Any, access.Caller, Any], Awaitable[str]]
    ) -> Callable[[Any, Any], Awaitable[None]]:
        async def call(request: Any, context: Any) -> None:
            try:
                if request is _MALFORMED:
                    raise Refused(
                        grpc.StatusCode.INVALID_ARGUMENT, f"the request of {path} cannot be parsed"
                    )
                who = access.caller(context, self.policy.open)
                if not self.calls.take(who.host):
                    raise Refused(
                        grpc.StatusCode.RESOURCE_EXHAUSTED, f"qps exceeded for {who.host}"
                    )
                reason = await run(request, who, context)
                if reason:
                    raise Refused(grpc.StatusCode.ABORTED, reason)
            except BaseException as error:
                await self._fail(path, context, error)
                raise

        return call

    async def _fail(self, path: str, context: Any, error: BaseException) -> None:
        """Turns what went wrong into a gRPC status; what is not ours goes on."""
        if isinstance(error, Refused):
            code, text = error.code, error.text
        elif isinstance(error, wire.BadMessage):
            code, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        elif isinstance(error, Unavailable):
            code, text = grpc.StatusCode.UNAVAILABLE, str(error)
        elif isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            log.exception("%s failed", path)
            code, text = grpc.StatusCode.INTERNAL, f"{path}: {type(error).__name__}"
        else:
            return
        self.hub.metrics.count("refused", method=path, status=code.name)
        await context.abort(code, text[:500])

    def _job(self, value: str, who: access.Caller) -> str:
        job_id = wire.job_id(value)
        if not self.policy.allows(who, job_id):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the token or certificate of this call is not good for job {job_id}",
            )
        return job_id

    def _operator(self, who: access.Caller) -> None:
        if not self.policy.is_operator(who):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this call is for operators; the access file does not name this caller as one",
            )

    def _entry(self, value: str, who: access.Caller) -> Entry | None:
        entry = self.hub.entries.get(self._job(value, who))
        if entry is not None:
            entry.seen = self.hub.now()
        return entry

    # ---------------------------------------------------------------- Recover

    async def _recover_Init(self, request: Any, who: access.Caller, _: Any) -> Any:
        if request.rc3TaskId and not request.role:
            return Status(
                code=Code.UNREGISTERED,
                info="this client speaks the message layout of v6.0.RC3, which is not served",
            )
        job_id = self._job(request.jobId, who)
        code, info = self.hub.init(job_id, wire.declaration(request), who.host)
        await self.hub.settled()
        return Status(code=code, info=info)

    async def _recover_Register(self, request: Any, who: access.Caller, _: Any) -> Any:
        if request.rc3TaskId and not request.role:
            return Status(
                code=Code.UNREGISTERED,
                info="this client speaks the message layout of v6.0.RC3, which is not served",
            )
        job_id = self._job(request.jobId, who)
        code, info = await self.hub.register(job_id, wire.declaration(request))
        await self.hub.settled()
        return Status(code=code, info=info)

    async def _recover_SubscribeProcessManageSignal(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        entry = self._entry(request.jobId, who)
        if entry is None:
            raise Refused(grpc.StatusCode.UNKNOWN, f"jobId={request.jobId} not registed")
        keyed = bool(request.keyed)
        identity = f"client {request.clientId[:200]}" if keyed else f"peer {who.peer}"
        made = self.hub.subscribe(
            entry,
            identity,
            request.clientId[:200],
            request.incarnation,
            keyed,
            request.keepAlive,
        )
        if isinstance(made, str):
            raise Refused(grpc.StatusCode.ABORTED, made)
        subscriber: Subscriber = made
        try:
            # Tells the client that the subscription stands, before the first signal.
            await context.send_initial_metadata(())
            return await subscriber.run(
                context.write,
                None if keyed else lambda key: self.hub.delivered(entry, key),
            )
        finally:
            self.hub.unsubscribe(entry, subscriber)

    async def _report(self, entry: Entry | None, event: Callable[[], m.Event]) -> Any:
        if entry is None:
            return Status(code=Code.UNREGISTERED, info="the job is not registered")
        if self.hub.closing:
            return Status(code=Code.SERVER_ERROR, info="the controller is stopping; repeat")
        told = event()
        key = told.key if isinstance(told, m.Report) else None
        # a report that comes again gets the very answer that was lost
        before = key.uuid if key is not None else entry.job.uuid
        out = await self.hub.tell(entry, told)
        return Status(
            code=out.code, info=out.info or f"jobId={entry.job.job_id}, uuid={before}, received"
        )

    async def _recover_ReportStopComplete(self, request: Any, who: access.Caller, _: Any) -> Any:
        # A report without its status submessage reads as code 0.
        return await self._report(
            self._entry(request.jobId, who),
            lambda: m.StopComplete(
                wire.ranks(request.faultRanks),
                wire.key(request),
                request.status.code,
                request.status.info[:500],
            ),
        )

    async def _recover_ReportRecoverStrategy(self, request: Any, who: access.Caller, _: Any) -> Any:
        return await self._report(
            self._entry(request.jobId, who),
            lambda: m.Strategies(
                wire.ranks(request.faultRanks),
                wire.key(request),
                tuple(name[:64] for name in list(request.strategies)[:64]),
            ),
        )

    async def _recover_ReportRecoverStatus(self, request: Any, who: access.Caller, _: Any) -> Any:
        return await self._report(
            self._entry(request.jobId, who),
            lambda: m.Status(
                (),
                wire.key(request),
                request.status.code,
                request.status.info[:500],
                request.strategy[:64],
                wire.rank_list(request.isolateRankIds, "isolateRankIds"),
            ),
        )

    async def _recover_ReportProcessFault(self, request: Any, who: access.Caller, _: Any) -> Any:
        return await self._report(
            self._entry(request.jobId, who),
            lambda: m.FaultSeen(wire.faults(request.faultRanks), request.reportId[:200]),
        )

    async def _recover_HealthCheck(self, request: Any, who: access.Caller, _: Any) -> Any:
        return Status(code=Code.OK, info="ok")

    # -- NIC switch and stress test

    async def _recover_SwitchNicTrack(self, request: Any, who: access.Caller, _: Any) -> Any:
        entry = self._entry(request.jobID, who)
        if entry is None:
            return Status(code=Code.OM_PARAMETER_INVALID, info="the job is not registered")
        ranks: list[str] = []
        ops: list[bool] = []
        for node, listed in request.nicOps.items():
            known = self._node_ranks(entry, node)
            if not known:
                return _om(f"node {node!r} is not one of the job's")
            if len(listed.dev) != len(listed.op) or not listed.dev:
                return _om(f"node {node!r}: as many devices as operations, at least one")
            for device, op in zip(listed.dev, listed.op, strict=True):
                if not device.isdigit() or int(device) >= len(known):
                    return _om(f"node {node!r} has no device {device!r}")
                ranks.append(str(known[int(device)]))
                ops.append(op)
        if not ranks:
            return _om("nicOps is empty")
        out = await self.hub.tell(entry, m.SwitchNic(tuple(ranks), tuple(ops)))
        return Status(
            code=out.code, info=out.info or "switching operation was successfully distributed"
        )

    def _node_ranks(self, entry: Entry, node: str) -> tuple[int, ...]:
        config = entry.job.config
        for known in config.nodes:
            if node and node in (known.name, known.sn):
                return known.ranks or config.ranks_of(known.rank)
        return config.ranks_of(int(node)) if node.isdigit() and len(node) < 7 else ()

    async def _recover_StressTest(self, request: Any, who: access.Caller, _: Any) -> Any:
        entry = self._entry(request.jobID, who)
        if entry is None:
            return Status(code=Code.OM_PARAMETER_INVALID, info="the job is not registered")
        config = entry.job.config
        per_node: dict[str, tuple[int, ...]] = {
            node: tuple(ops.ops) for node, ops in request.stressParam.items()
        }
        if request.allNodesOps:
            nodes = {n.rank for n in config.nodes}
            if not nodes and config.devices_per_node and config.world_size:
                nodes = set(range(-(-config.world_size // config.devices_per_node)))
            per_node = {str(n): tuple(request.allNodesOps) for n in sorted(nodes)}
            if not per_node:
                return _om("the job has not said which nodes it has")
        if not per_node:
            return _om("stressParam is empty")
        orders: list[tuple[str, tuple[int, ...]]] = []
        for node, ops in per_node.items():
            ranks = self._node_ranks(entry, node) or (
                config.ranks_of(int(node)) if request.allNodesOps else ()
            )
            if not ranks:
                return _om(f"node {node!r} is not one of the job's")
            if not ops or len(set(ops)) != len(ops) or not set(ops) <= {0, 1}:
                return _om("the operations of a node are 0 (AIC) and 1 (P2P), each at most once")
            orders += [(str(rank), ops) for rank in ranks]
        out = await self.hub.tell(entry, m.StressTest(tuple(orders)))
        return Status(
            code=out.code, info=out.info or "stress test operation was successfully distributed"
        )

    async def _operator_stream(
        self, entry: Entry | None, kind: str, context: Any, job_id: str
    ) -> str:
        if entry is None:
            raise Refused(grpc.StatusCode.UNKNOWN, f"jobId={job_id} not registed")
        maintenance = entry.job.maintenance
        if maintenance is None or maintenance.kind != kind:
            raise Refused(grpc.StatusCode.UNKNOWN, f"jobId={job_id}: nothing of that kind runs")
        feed = self.hub.listen(entry.operators, kind)
        return await self._run_feed(feed, entry.operators.setdefault(kind, []), context, _OM_WAIT)

    async def _run_feed(
        self, feed: Feed, feeds: list[Feed], context: Any, limit: float | None = None
    ) -> str:
        import asyncio

        try:
            await context.send_initial_metadata(())
            return await asyncio.wait_for(feed.run(context.write), limit)
        except asyncio.TimeoutError:
            return ""
        finally:
            if feed in feeds:
                feeds.remove(feed)

    async def _worker_stream(
        self, entry: Entry | None, kind: str, state: State, context: Any, job_id: str
    ) -> str:
        from phalanx.controller.hub import worker_order

        if entry is None:
            raise Refused(
                grpc.StatusCode.UNKNOWN,
                f"jobId={job_id} not registed, please wait agent register",
            )
        feeds = entry.workers.setdefault(kind, [])
        if len(feeds) >= 1024:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 workers listen already")
        feed = self.hub.listen(entry.workers, kind)
        if entry.job.state is state and entry.job.maintenance is not None:
            feed.put(worker_order(job_id, entry.job.maintenance))
        return await self._run_feed(feed, feeds, context)

    async def _recover_SubscribeSwitchNicSignal(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        entry = self._entry(request.jobID, who)
        return await self._operator_stream(entry, "nic", context, request.jobID)

    async def _recover_SubscribeStressTestResponse(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        entry = self._entry(request.jobID, who)
        return await self._operator_stream(entry, "stress", context, request.jobID)

    async def _recover_SubscribeNotifySwitch(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        entry = self._entry(request.jobId, who)
        return await self._worker_stream(entry, "nic", State.SWITCHING, context, request.jobId)

    async def _recover_SubscribeNotifyExecStressTest(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        entry = self._entry(request.jobId, who)
        return await self._worker_stream(entry, "stress", State.TESTING, context, request.jobId)

    async def _recover_ReplySwitchNicResult(self, request: Any, who: access.Caller, _: Any) -> Any:
        if not request.jobId:
            return _om("jobId is empty")
        answer = await self._report(
            self._entry(request.jobId, who), lambda: m.NicSwitched(request.result)
        )
        return answer if answer.code else Status(code=0, info=_reply(answer.info))

    async def _recover_ReplyStressTestResult(self, request: Any, who: access.Caller, _: Any) -> Any:
        if not request.jobId:
            return _om("jobId is empty")

        def event() -> m.Event:
            worst = []
            for rank, result in request.stressResult.items():
                found = [op.code for op in result.rankResult.values()]
                bad = [code for code in found if code not in ("0", "1")]
                worst.append(
                    (wire.number(rank, "rank"), (bad or found or ["0"])[0][:8]),
                )
            return m.StressTested(tuple(sorted(worst)))

        answer = await self._report(self._entry(request.jobId, who), event)
        return answer if answer.code else Status(code=0, info=_reply(answer.info))

    # ---------------------------------------------------------------- Fault

    def _fault_job(self, request: Any, who: access.Caller) -> str:
        if request.jobId in ("", "-1"):
            self._operator(who)
            return "-1"
        return self._job(request.jobId, who)

    async def _fault_Register(self, request: Any, who: access.Caller, _: Any) -> Any:
        job_id = self._fault_job(request, who)
        if not request.role:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "role is empty")
        if job_id != "-1" and job_id not in self.hub.entries:
            return fault_pb2.Status(code=Code.JOB_NOT_EXIST, info=f"job {job_id} is not known")
        known = self.hub.fault_feed(job_id, request.role)
        if known is None and self.hub.fault_feeds >= _FAULT_WAITERS:
            return fault_pb2.Status(code=Code.TOO_MANY_JOBS, info="too many publishers")
        self.hub.register_fault_feed(job_id, request.role[:200])
        return fault_pb2.Status(code=Code.OK, info="register success")

    async def _fault_SubscribeFaultMsgSignal(
        self, request: Any, who: access.Caller, context: Any
    ) -> str:
        job_id = self._fault_job(request, who)
        feed = self.hub.fault_feed(job_id, request.role)
        if feed is None or feed.started:
            raise Refused(
                grpc.StatusCode.UNKNOWN,
                f"jobId={request.jobId}, role={request.role[:100]} not registered; Register first",
            )
        feed.started = True
        # Unlike the original: what is broken now is shown at once.
        entry = self.hub.entries.get(job_id)
        if entry is not None and (broken := self.hub.faults_of(entry.job.config)):
            feed.show(job_id, broken, entry.job.config)
        elif job_id == "-1" and self.hub.devices:
            feed.show("-1", list(self.hub.devices.values()), None)
        try:
            await context.send_initial_metadata(())
            return await feed.run(context.write)
        finally:
            self.hub.drop_fault_feed(feed)

    async def _fault_GetFaultMsgSignal(self, request: Any, who: access.Caller, _: Any) -> Any:
        job_id = self._fault_job(request, who)
        result = fault_pb2.FaultQueryResult
        if not self.queries.take("all"):
            return result(code=Code.RATE_LIMITED, info="more than 10 queries in a second")
        if job_id == "-1":
            shown = faultview.message("-1", list(self.hub.devices.values()), None)
            return result(code=Code.SUCCESS, info="all info returned", faultSignal=shown)
        if not 8 <= len(job_id) <= 128:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "jobId must have 8 to 128 characters")
        entry = self.hub.entries.get(job_id)
        if entry is None:
            return result(code=Code.SUCCESS, info=f"job {job_id} not found")
        config = entry.job.config
        shown = faultview.message(job_id, self.hub.faults_of(config), config)
        return result(code=Code.SUCCESS, info="Succeed", faultSignal=shown)

    # ---------------------------------------------------------------- PubFault

    async def _pubfault_SendPublicFault(self, request: Any, who: access.Caller, _: Any) -> Any:
        self._operator(who)
        answer = pubfault_pb2.RespStatus
        catalogue = self.hub.catalogue
        wrong = devices.wrong_request(
            catalogue,
            request.id,
            request.timestamp,
            request.version,
            request.resource,
            len(request.faults),
        )
        if wrong:
            return answer(code=Code.INVALID_PARAMETER, info=wrong)
        if not self.public.take(request.resource):
            return answer(
                code=Code.INVALID_RATE, info=f"{request.resource} sends more than 1 in a second"
            )
        good, texts = [], []
        for entry in request.faults:
            fault = devices.PublicFault(
                entry.faultId,
                entry.faultType,
                entry.faultCode,
                entry.faultTime,
                entry.assertion,
                dict(entry.faultLocation),
                [(i.nodeName, i.nodeSN, tuple(i.deviceIds)) for i in entry.influence],
                entry.description,
            )
            if text := devices.wrong_fault(catalogue, fault):
                texts.append(text)
            else:
                good.append(fault)
        if not good:
            return answer(code=Code.INVALID_PARAMETER, info=texts[0])
        full = False
        for fault in good:
            for device in devices.spread(catalogue, request.resource, fault):
                full |= not self._public_fault(fault, device)
        await self.hub.settled()
        if full:
            return answer(
                code=Code.TOO_MANY_JOBS, info="too many faults are known; some were not taken"
            )
        dropped = f" ({len(texts)} bad entries left out: {texts[0]})" if texts else ""
        return answer(code=Code.OK, info=f"public fault send successfully{dropped}")

    def _public_fault(self, fault: devices.PublicFault, device: devices.DeviceFault) -> bool:
        if fault.assertion == "recover":
            since = self.hub.devices.get(device.key)
            early = 0.0
            if since is not None:
                early = max(0.0, (since.since_ms + _DELAY_RECOVER_MS - fault.time) / 1000)
            self.hub.clear_device(device.key, min(early, _DELAY_RECOVER_MS / 1000))
            return True
        taken = self.hub.device_fault(device)
        if taken and fault.assertion == "once":
            self.hub.clear_device(device.key, _DELAY_RECOVER_MS / 1000)
        return taken

    # ---------------------------------------------------------------- Control

    async def _control_Acknowledge(self, request: Any, who: access.Caller, _: Any) -> Any:
        entry = self._entry(request.jobId, who)
        if entry is None:
            return control_pb2.Answer(code=Code.UNREGISTERED, info="the job is not registered")
        key = m.Key(request.uuid, request.signalType, request.changeStrategy, request.round)
        await self.hub.tell(entry, m.Delivered(key))
        return control_pb2.Answer()

    async def _control_Jobs(self, request: Any, who: access.Caller, _: Any) -> Any:
        views = []
        for job_id, entry in self.hub.entries.items():
            if request.jobId and job_id != request.jobId:
                continue
            if not self.policy.allows(who, job_id):
                continue
            job = entry.job
            views.append(
                control_pb2.JobView(
                    jobId=job_id,
                    state=job.state.value,
                    uuid=job.uuid,
                    round=job.round,
                    strategy=job.chosen,
                    subscribed=entry.subscriber is not None,
                    strategies=job.config.strategies,
                    faults=[f"{f.rank}:{f.kind}" for f in (*job.faults, *job.waiting)],
                    lastOutcome=job.outcome,
                    lastReason=job.why,
                    episodes=job.episode,
                    owner=entry.subscriber.client if entry.subscriber else "",
                )
            )
        if request.jobId and not views:
            return control_pb2.JobsAnswer(
                code=Code.UNREGISTERED, info=f"job {request.jobId} is not registered"
            )
        # an answer has to fit into a message
        return control_pb2.JobsAnswer(jobs=views[:5000])

    async def _control_Faults(self, request: Any, who: access.Caller, _: Any) -> Any:
        if request.jobId:
            entry = self._entry(request.jobId, who)
            if entry is None:
                return control_pb2.FaultsAnswer(
                    code=Code.UNREGISTERED, info=f"job {request.jobId} is not registered"
                )
            found = self.hub.faults_of(entry.job.config)
        else:
            self._operator(who)
            found = list(self.hub.devices.values())
        return control_pb2.FaultsAnswer(
            faults=[
                control_pb2.DeviceFault(
                    faultId=f.fault_id,
                    nodeName=f.node_name,
                    nodeSN=f.node_sn,
                    devices=f.devices,
                    deviceType=f.device_type,
                    code=f.code,
                    level=f.level,
                    description=f.description,
                    resource=f.resource,
                    since=f.since_ms,
                )
                for f in found[:5000]
            ]
        )

    async def _control_ReportFault(self, request: Any, who: access.Caller, _: Any) -> Any:
        self._operator(who)
        if not request.faultId or not (request.nodeName or request.nodeSN):
            return control_pb2.Answer(
                code=Code.INVALID_PARAMETER, info="a fault needs an id and a node (name or SN)"
            )
        if len(request.devices) > 1024 or any(d < 0 for d in request.devices):
            return control_pb2.Answer(code=Code.INVALID_PARAMETER, info="bad device numbers")
        if request.level and request.level not in devices.KNOWN_LEVELS:
            return control_pb2.Answer(
                code=Code.INVALID_PARAMETER,
                info=f"there is no level {request.level[:32]!r}; there are "
                + ", ".join(devices.KNOWN_LEVELS),
            )
        taken = self.hub.device_fault(
            devices.DeviceFault(
                request.faultId[:128],
                request.nodeName[:253],
                request.nodeSN[:253],
                tuple(request.devices),
                request.deviceType[:32] or ("NPU" if request.devices else "Node"),
                request.code[:32],
                request.level[:32] or "SeparateNPU",
                request.description[:512],
                request.resource[:64] or "phalanx",
                request.since or int(self.hub.now() * 1000),
            )
        )
        await self.hub.settled()
        if not taken:
            return control_pb2.Answer(code=Code.TOO_MANY_JOBS, info="too many faults are known")
        return control_pb2.Answer(info="taken")

    async def _control_ClearFault(self, request: Any, who: access.Caller, _: Any) -> Any:
        self._operator(who)
        keys = [
            key
            for key, f in self.hub.devices.items()
            if f.fault_id == request.faultId
            and request.nodeName in ("", f.node_name, f.node_sn)
            and request.resource in ("", f.resource)
        ]
        for key in keys:
            self.hub.clear_device(key)
        await self.hub.settled()
        if not keys:
            return control_pb2.Answer(
                code=Code.INVALID_PARAMETER, info=f"no fault {request.faultId!r} is known"
            )
        return control_pb2.Answer(info=f"{len(keys)} cleared")

    async def _control_ReportNode(self, request: Any, who: access.Caller, _: Any) -> Any:
        entry = self._entry(request.jobId, who)
        kinds = {"replaced": m.NodeReplaced, "ready": m.NodeReady, "gone": m.NodeGone}
        if entry is None:
            return control_pb2.Answer(code=Code.UNREGISTERED, info="the job is not registered")
        if request.state not in kinds:
            return control_pb2.Answer(
                code=Code.INVALID_PARAMETER, info="state must be replaced, ready or gone"
            )
        out = await self.hub.tell(entry, kinds[request.state](request.nodeRank))
        return control_pb2.Answer(code=out.code, info=out.info)

    async def _control_SwitchNode(self, request: Any, who: access.Caller, _: Any) -> Any:
        entry = self._entry(request.jobId, who)
        if entry is None:
            return control_pb2.Answer(code=Code.UNREGISTERED, info="the job is not registered")
        out = await self.hub.tell(entry, m.HotSwitch(request.nodeRank))
        return control_pb2.Answer(code=out.code, info=out.info)

    async def _control_Forget(self, request: Any, who: access.Caller, _: Any) -> Any:
        job_id = self._job(request.jobId, who)
        known = self.hub.forget(job_id)
        await self.hub.settled()
        if not known:
            return control_pb2.Answer(code=Code.UNREGISTERED, info=f"job {job_id} is not known")
        return control_pb2.Answer(info="forgotten")

    # ---------------------------------------------------------------- health, reflection

    def _serving(self, service: str) -> int:
        known = {"", *self._services()}
        if service not in known:
            return 3
        return 2 if self.hub.closing else 1

    async def _health_Check(self, request: Any, who: access.Caller, _: Any) -> Any:
        status = self._serving(request.service)
        if status == 3:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def _health_Watch(self, request: Any, who: access.Caller, context: Any) -> str:
        import asyncio

        status = self._serving(request.service)
        await context.write(health_pb2.HealthCheckResponse(status=status))
        await asyncio.get_running_loop().create_future()  # until the client or the server ends it
        return ""

    @staticmethod
    def _services() -> list[str]:
        return [
            "Recover",
            "fault.Fault",
            "PubFault",
            "phalanx.Control",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ]

    async def _reflect(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _MALFORMED:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "cannot be parsed")
            kind = request.WhichOneof("message_request")
            answer = rpb.ServerReflectionResponse(valid_host=request.host, original_request=request)
            name: str | None = None
            if kind == "list_services":
                answer.list_services_response.CopyFrom(
                    rpb.ListServiceResponse(
                        service=[rpb.ServiceResponse(name=n) for n in self._services()]
                    )
                )
                yield answer
                continue
            if kind == "file_by_filename":
                name = request.file_by_filename
            elif kind == "file_containing_symbol":
                symbol = request.file_containing_symbol
                name = file_of(symbol.replace(".reflection.v1.", ".reflection.v1alpha."))
            data = files().get(name or "")
            if data is not None:
                answer.file_descriptor_response.CopyFrom(
                    rpb.FileDescriptorResponse(file_descriptor_proto=[data])
                )
            else:
                answer.error_response.CopyFrom(
                    rpb.ErrorResponse(error_code=5, error_message="not found")
                )
            yield answer


def _om(text: str) -> Any:
    return Status(code=Code.OM_PARAMETER_INVALID, info=text)


def _reply(info: str) -> str:
    return info if info.startswith("stale") else "reply success"
