"""Every message against bytes built by hand from the documented numbers and types."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("google.protobuf")

from phalanx.proto import (
    config_pb2,
    control_pb2,
    fault_pb2,
    generate,
    health_pb2,
    job_pb2,
    profiling_pb2,
    pubfault_pb2,
    recover_pb2,
    reflection_pb2,
)

# "name=number:type"; s string, i int, b bool, X a message, []X repeated, <s,X> map from string.
RECOVER = {
    "Status": "code=1:i info=2:s",
    "ClientInfo": "jobId=1:s role=2:s",
    "FaultRank": "rankId=1:s faultType=2:s",
    "ProcessManageSignal": "uuid=1:s jobId=2:s signalType=3:s actions=4:[]s "
    "faultRanks=5:[]FaultRank changeStrategy=6:s timeout=7:i nodeRankIds=8:[]s extraParams=9:s",
    "StopCompleteRequest": "jobId=1:s status=2:Status faultRanks=3:[]FaultRank",
    "RecoverStrategyRequest": "jobId=1:s faultRanks=2:[]FaultRank strategies=3:[]s",
    "RecoverStatusRequest": "jobId=1:s status=2:Status strategy=3:s isolateRankIds=4:[]s",
    "ProcessFaultRequest": "jobId=1:s faultRanks=2:[]FaultRank",
    "SwitchNicResponse": "jobID=1:s msg=2:s",
    "SwitchNicRequest": "jobID=1:s",
    "SwitchNics": "jobID=1:s nicOps=2:<s,DeviceList>",
    "DeviceList": "dev=1:[]s op=2:[]b",
    "SwitchRankList": "rankID=1:[]s op=2:[]b jobId=3:s",
    "SwitchResult": "jobId=1:s result=2:b",
    "StressOpList": "ops=1:[]i",
    "StressTestParam": "jobID=1:s stressParam=2:<s,StressOpList> allNodesOps=3:[]i",
    "StressTestRequest": "jobID=1:s",
    "StressTestResponse": "jobID=1:s msg=2:s",
    "StressTestRankParams": "stressParam=1:<s,StressOpList> jobId=2:s",
    "StressTestResult": "jobId=1:s stressResult=2:<s,StressTestRankResult>",
    "StressTestRankResult": "rankResult=1:<s,StressTestOpResult>",
    "StressTestOpResult": "code=1:s result=2:s",
}
FAULT = {
    "FaultQueryResult": "code=1:i info=2:s faultSignal=3:FaultMsgSignal",
    "Status": "code=1:i info=2:s",
    "ClientInfo": "jobId=1:s role=2:s",
    "FaultMsgSignal": "uuid=1:s jobId=2:s signalType=3:s nodeFaultInfo=4:[]NodeFaultInfo",
    "NodeFaultInfo": "nodeName=1:s nodeIP=2:s nodeSN=3:s faultLevel=4:s "
    "faultDevice=5:[]DeviceFaultInfo",
    "DeviceFaultInfo": "deviceId=1:s deviceType=2:s faultCodes=3:[]s faultLevel=4:s "
    "faultType=5:[]s faultReason=6:[]s switchFaultInfos=7:[]SwitchFaultInfo faultLevels=8:[]s",
    "SwitchFaultInfo": "faultCode=1:s switchChipId=2:s switchPortId=3:s faultTime=4:s "
    "faultLevel=5:s",
}
PUBFAULT = {
    "RespStatus": "code=1:i info=2:s",
    "PublicFaultRequest": "id=1:s timestamp=2:i version=3:s resource=4:s faults=5:[]Fault",
    "Fault": "faultId=1:s faultType=2:s faultCode=3:s faultTime=4:i assertion=5:s "
    "faultLocation=6:<s,s> influence=7:[]PubFaultInfo description=8:s",
    "PubFaultInfo": "nodeName=1:s nodeSN=2:s deviceIds=3:[]i",
}
CONFIG = {
    "Status": "code=1:i info=2:s",
    "ClientInfo": "jobId=1:s role=2:s",
    "RankTableStream": "jobId=1:s rankTable=2:s",
}
JOB = {
    "ClientInfo": "role=1:s clientId=3:s",
    "Status": "code=1:i info=2:s clientId=3:s",
    "JobSummarySignal": "uuid=1:s jobId=2:s jobName=3:s namespace=4:s frameWork=5:s "
    "jobStatus=6:s time=7:s cmIndex=8:s total=9:s HcclJson=10:s deleteTime=11:s "
    "sharedTorIp=12:s masterAddr=13:s operator=14:s sid=15:s",
    "JobSummarySignalList": "jobSummarySignals=1:[]JobSummarySignal ReportTime=2:s JobTotalNum=3:i",
}
PROFILING = {
    "ProfilingSwitch": "CommunicationOperator=1:s Step=2:s SaveCheckpoint=3:s FP=4:s "
    "DataLoader=5:s",
    "DataTypeReq": "jobNsName=1:s profilingSwitch=2:ProfilingSwitch",
    "DataTypeRes": "message=1:s code=2:i",
    "DataStatusReq": "jobNsName=1:s",
    "DataStatusRes": "message=1:s profilingSwitch=2:ProfilingSwitch code=3:i",
    "ProfilingClientInfo": "jobId=1:s role=2:s",
}
# Ours; pinned all the same, since two of our own versions meet.
OWN = {
    "ClientInfo": "rc3TaskId=3:s rc3Role=4:s clientId=1001:s incarnation=1002:i keyed=1003:b "
    "declaration=1004:JobDeclaration keepAlive=1005:i",
    "JobDeclaration": "strategies=1:[]s worldSize=2:i devicesPerNode=3:i nodes=4:[]NodeDeclaration "
    "spares=5:i knowsSpares=6:b watchesNodes=7:b reportTimeout=8:i rescheduleTimeout=9:i",
    "NodeDeclaration": "name=1:s ip=2:s sn=3:s rank=4:i ranks=5:[]i",
    "FaultRank": "incarnation=1001:i reason=1002:s",
    "SignalKey": "uuid=1:s signalType=2:s changeStrategy=3:s round=4:i",
    "ProcessManageSignal": "round=1001:i reportWithin=1002:i reason=1003:s again=1004:b",
    "StopCompleteRequest": "key=1001:SignalKey",
    "RecoverStrategyRequest": "key=1001:SignalKey",
    "RecoverStatusRequest": "key=1001:SignalKey",
    "ProcessFaultRequest": "reportId=1001:s",
}
CONTROL = {
    "Answer": "code=1:i info=2:s",
    "Acknowledgement": "jobId=1:s uuid=2:s signalType=3:s changeStrategy=4:s round=5:i",
    "Query": "jobId=1:s",
    "JobView": "jobId=1:s state=2:s uuid=3:s round=4:i strategy=5:s subscribed=6:b "
    "strategies=7:[]s faults=8:[]s lastOutcome=9:s lastReason=10:s episodes=11:i owner=12:s",
    "JobsAnswer": "code=1:i info=2:s jobs=3:[]JobView",
    "DeviceFault": "faultId=1:s nodeName=2:s nodeSN=3:s devices=4:[]i deviceType=5:s code=6:s "
    "level=7:s description=8:s resource=9:s since=10:i",
    "FaultsAnswer": "code=1:i info=2:s faults=3:[]DeviceFault",
    "FaultReference": "faultId=1:s nodeName=2:s resource=3:s",
    "NodeReport": "jobId=1:s nodeRank=2:i state=3:s",
}
HEALTH = {"HealthCheckRequest": "service=1:s", "HealthCheckResponse": "status=1:i"}
REFLECTION = {
    "ServerReflectionRequest": "host=1:s list_services=7:s",
    "ServerReflectionResponse": "valid_host=1:s original_request=2:ServerReflectionRequest",
    "ListServiceResponse": "service=1:[]ServiceResponse",
    "ServiceResponse": "name=1:s",
    "ErrorResponse": "error_code=1:i error_message=2:s",
    "ExtensionRequest": "containing_type=1:s extension_number=2:i",
}

ALL = [
    (module, name, fields, {**own, **table})
    for module, table, own in (
        (recover_pb2, RECOVER, OWN),
        (recover_pb2, OWN, RECOVER),
        (fault_pb2, FAULT, {}),
        (pubfault_pb2, PUBFAULT, {}),
        (config_pb2, CONFIG, {}),
        (job_pb2, JOB, {}),
        (profiling_pb2, PROFILING, {}),
        (control_pb2, CONTROL, {}),
        (health_pb2, HEALTH, {}),
        (reflection_pb2, REFLECTION, {}),
    )
    for name, fields in table.items()
]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def block(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def parse(fields: str):
    for word in fields.split():
        name, rest = word.split("=")
        number, kind = rest.split(":")
        yield name, int(number), kind


def one(module, table, kind: str, seed: int):
    """A value of this kind and its bytes without tag (None for scalars encoded as varint)."""
    if kind == "s":
        text = f"text-{seed}-é"
        return text, text.encode()
    if kind == "i":
        return seed + 300, None
    if kind == "b":
        return True, None
    return build(module, table, kind, table[kind], seed + 1)


def build(module, table, name: str, fields: str, seed: int = 1):
    values, wire = {}, b""
    for field, number, kind in parse(fields):
        seed += 1
        if kind.startswith("<"):
            value, body = one(module, table, kind[3:-1], seed)
            values[field] = {"k": value}
            wire += block(number, block(1, b"k") + block(2, body))
        elif kind in ("[]i", "[]b"):
            items = [3, 400] if kind == "[]i" else [True, False]
            values[field] = items
            wire += block(number, b"".join(varint(int(i)) for i in items))
        elif kind.startswith("[]"):
            pairs = [one(module, table, kind[2:], seed + i) for i in range(2)]
            values[field] = [value for value, _ in pairs]
            wire += b"".join(block(number, body) for _, body in pairs)
        else:
            value, body = one(module, table, kind, seed)
            if name == "HealthCheckResponse":
                value = 1
            values[field] = value
            wire += (
                varint(number << 3) + varint(int(value)) if body is None else block(number, body)
            )
    return getattr(module, name)(**values), wire


@pytest.mark.parametrize(
    ("module", "name", "fields", "table"), ALL, ids=[f"{m.__name__[14:]}-{n}" for m, n, _, _ in ALL]
)
def test_bytes(module, name, fields, table):
    message, wire = build(module, table, name, fields)
    assert message.SerializeToString(deterministic=True) == wire
    assert getattr(module, name).FromString(wire) == message


@pytest.mark.parametrize(
    ("module", "table", "own"),
    [
        (recover_pb2, RECOVER, OWN),
        (fault_pb2, FAULT, {}),
        (pubfault_pb2, PUBFAULT, {}),
        (config_pb2, CONFIG, {}),
        (job_pb2, JOB, {}),
        (profiling_pb2, PROFILING, {}),
        (control_pb2, CONTROL, {}),
    ],
)
def test_nothing_beyond_the_tables(module, table, own):
    for name, service in module.SERVICES.items():
        assert service, name
    messages = {n for n in vars(module) if hasattr(getattr(module, n), "DESCRIPTOR")}
    assert messages == set(table) | set(own)
    for name in messages:
        known = {f for t in (table, own) for f, _, _ in parse(t.get(name, ""))}
        assert {f.name for f in getattr(module, name).DESCRIPTOR.fields} == known


def test_our_fields_are_skipped_by_old_ends_and_kept_by_new_ones():
    old, wire = build(recover_pb2, RECOVER, "ProcessManageSignal", RECOVER["ProcessManageSignal"])
    ours, more = build(recover_pb2, OWN, "ProcessManageSignal", OWN["ProcessManageSignal"])
    both = recover_pb2.ProcessManageSignal.FromString(wire + more)
    assert both.uuid == old.uuid and both.round == ours.round
    for name, fields in OWN.items():
        if name in RECOVER:
            for field, number, _ in parse(fields):
                assert number > 1000 or field in ("rc3TaskId", "rc3Role")


PATHS = {
    recover_pb2: {
        "Recover": "Init Register SubscribeProcessManageSignal> ReportStopComplete "
        "ReportRecoverStrategy ReportRecoverStatus ReportProcessFault HealthCheck SwitchNicTrack "
        "SubscribeSwitchNicSignal> SubscribeNotifySwitch> ReplySwitchNicResult StressTest "
        "SubscribeStressTestResponse> SubscribeNotifyExecStressTest> ReplyStressTestResult"
    },
    fault_pb2: {"fault.Fault": "Register SubscribeFaultMsgSignal> GetFaultMsgSignal"},
    pubfault_pb2: {"PubFault": "SendPublicFault"},
    config_pb2: {"config.Config": "Register SubscribeRankTable>"},
    job_pb2: {"job.Job": "Register SubscribeJobSummarySignal> SubscribeJobSummarySignalList>"},
    profiling_pb2: {
        "TrainingDataTrace": "ModifyTrainingDataTraceSwitch GetTrainingDataTraceSwitch "
        "SubscribeDataTraceSwitch>"
    },
}


@pytest.mark.parametrize("module", PATHS, ids=lambda m: m.__name__[14:])
def test_paths(module):
    for service, methods in PATHS[module].items():
        expected = {(f"/{service}/{m.rstrip('>')}", m.endswith(">")) for m in methods.split()}
        found = module.SERVICES[service].values()
        assert {(m.path, m.server_streams) for m in found} == expected


def test_two_copies_in_one_process():
    """The vendor's stubs sit in the default pool under the same names; a second copy of
    ours in a pool of its own."""
    code = """
import sys
from google.protobuf import descriptor_pb2, descriptor_pool
import phalanx.proto.recover_pb2 as ours, phalanx.proto._pool as pool
theirs = descriptor_pb2.FileDescriptorProto.FromString(pool.files()["recover.proto"])
status = next(m for m in theirs.message_type if m.name == "Status")
status.field.add(name="other", number=9, type=9, label=1)
descriptor_pool.Default().Add(theirs) if hasattr(descriptor_pool.Default(), "Add") else \
    descriptor_pool.Default().AddSerializedFile(theirs.SerializeToString())
assert descriptor_pool.Default().FindMessageTypeByName("Status").fields_by_name["other"]
for name in [n for n in sys.modules if n.startswith("phalanx")]:
    del sys.modules[name]
import phalanx.proto.recover_pb2 as again
assert again.Status is not ours.Status
assert again.Status.FromString(ours.Status(code=3).SerializeToString()).code == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_generated_files_are_current():
    pytest.importorskip("grpc_tools")
    assert generate.main(["--check"]) == 0
