"""The messages under the names that users of the vendor's ``recover_pb2`` know."""

from __future__ import annotations

from typing import Any

from phalanx.proto import recover_pb2 as _pb

FaultRank = _pb.FaultRank
ProcessFaultRequest = _pb.ProcessFaultRequest
ProcessManageSignal = _pb.ProcessManageSignal
RecoverStatusRequest = _pb.RecoverStatusRequest
RecoverStrategyRequest = _pb.RecoverStrategyRequest
Status = _pb.Status
StopCompleteRequest = _pb.StopCompleteRequest


def ClientInfo(
    jobId: str = "",
    role: str = "master agent",
    *,
    taskId: str = "",
    ip: str = "",
    port: str = "",
) -> Any:
    """Who a client is. ``taskId`` is the older name of ``jobId``; ``ip`` and ``port`` are
    accepted and ignored, as servers have done since v6.0.0."""
    if jobId and taskId and jobId != taskId:
        raise ValueError(f"jobId {jobId!r} and taskId {taskId!r} are the same thing; give one")
    return _pb.ClientInfo(jobId=jobId or taskId, role=role)
