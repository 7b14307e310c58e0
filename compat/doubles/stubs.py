"""The wire as the old ends know it: fewer messages, fewer fields, in pools of their own."""

from __future__ import annotations

from types import SimpleNamespace

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_COMMON = {
    "Status": "code=1:i info=2:s",
    "ClientInfo": "jobId=1:s role=2:s",
    "FaultRank": "rankId=1:s faultType=2:s",
    "StopCompleteRequest": "jobId=1:s status=2:Status faultRanks=3:[]FaultRank",
    "RecoverStrategyRequest": "jobId=1:s faultRanks=2:[]FaultRank strategies=3:[]s",
    "RecoverStatusRequest": "jobId=1:s status=2:Status strategy=3:s",
    "ProcessFaultRequest": "jobId=1:s faultRanks=2:[]FaultRank",
}
_SIGNAL = (
    "uuid=1:s jobId=2:s signalType=3:s actions=4:[]s faultRanks=5:[]FaultRank changeStrategy=6:s"
)
V60 = {**_COMMON, "ProcessManageSignal": _SIGNAL}
V71 = {**_COMMON, "ProcessManageSignal": _SIGNAL + " timeout=7:l"}
V72 = {
    **_COMMON,
    "RecoverStatusRequest": "jobId=1:s status=2:Status strategy=3:s isolateRankIds=4:[]s",
    "ProcessManageSignal": _SIGNAL + " timeout=7:l nodeRankIds=8:[]s extraParams=9:s",
}

CALLS = {
    "Init": ("ClientInfo", "Status"),
    "Register": ("ClientInfo", "Status"),
    "SubscribeProcessManageSignal": ("ClientInfo", "ProcessManageSignal"),
    "ReportStopComplete": ("StopCompleteRequest", "Status"),
    "ReportRecoverStrategy": ("RecoverStrategyRequest", "Status"),
    "ReportRecoverStatus": ("RecoverStatusRequest", "Status"),
    "ReportProcessFault": ("ProcessFaultRequest", "Status"),
    "HealthCheck": ("ClientInfo", "Status"),
}


def build(version: dict[str, str], name: str) -> SimpleNamespace:
    """Message classes of one version."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", syntax="proto3")
    for message, fields in version.items():
        made = file.message_type.add(name=message)
        for word in fields.split():
            field, rest = word.split("=")
            number, kind = rest.split(":")
            label = 3 if kind.startswith("[]") else 1
            kind = kind.removeprefix("[]")
            scalar = {"s": 9, "i": 5, "l": 3, "b": 8}.get(kind)
            added = made.field.add(name=field, number=int(number), label=label, type=scalar or 11)
            if scalar is None:
                added.type_name = f".{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return SimpleNamespace(
        **{m: message_factory.GetMessageClass(pool.FindMessageTypeByName(m)) for m in version}
    )


v60 = build(V60, "recover_v60")
v71 = build(V71, "recover_v71")
v72 = build(V72, "recover_v72")
