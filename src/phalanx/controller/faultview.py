"""What the Fault service shows: device faults by node, as ClusterD lays them out."""

from __future__ import annotations

import time
import uuid
from typing import Any

from phalanx.proto import fault_pb2 as pb
from phalanx.recovery import devices
from phalanx.recovery.devices import DeviceFault
from phalanx.recovery.model import JobConfig, Node


def _nodes(faults: list[DeviceFault], config: JobConfig | None) -> list[Any]:
    by_node: dict[tuple[str, str], list[DeviceFault]] = {}
    for fault in faults:
        by_node.setdefault((fault.node_name, fault.node_sn), []).append(fault)
    known = {n.name: n for n in (config.nodes if config else ()) if n.name}
    serial = {n.sn: n for n in (config.nodes if config else ()) if n.sn}
    out = []
    for (name, sn), items in by_node.items():
        node = known.get(name) or serial.get(sn) or Node(-1, name, "", sn)
        shown: dict[tuple[str, str], dict[str, str]] = {}
        for fault in items:
            ids = [str(d) for d in fault.devices] if fault.device_type == "NPU" else ["-1"]
            for id_ in ids or ["-1"]:
                shown.setdefault((id_, fault.device_type), {})[fault.code] = fault.level
        broken = []
        for (id_, kind), codes in sorted(shown.items()):
            ordered = sorted(codes)
            levels = [codes[code] for code in ordered]
            broken.append(
                pb.DeviceFaultInfo(
                    deviceId=id_,
                    deviceType=kind,
                    faultCodes=ordered,
                    faultLevels=levels,
                    faultLevel=devices.worst([devices.health(level) for level in levels]),
                )
            )
        out.append(
            pb.NodeFaultInfo(
                nodeName=name or node.name,
                nodeIP=node.ip,
                nodeSN=sn or node.sn,
                faultLevel=devices.worst([d.faultLevel for d in broken]),
                faultDevice=broken,
            )
        )
    return sorted(out, key=lambda n: (n.nodeIP, n.nodeName))


def message(job_id: str, faults: list[DeviceFault], config: JobConfig | None) -> Any:
    """The FaultMsgSignal of a job (``-1``: of the cluster), with a uuid of its own."""
    nodes = _nodes(faults, config)
    return pb.FaultMsgSignal(
        uuid=f"{time.time_ns():X}-{uuid.uuid4().hex}",
        jobId=job_id,
        signalType="fault" if nodes else "normal",
        nodeFaultInfo=nodes,
    )


def fault_signal(
    job_id: str, faults: list[DeviceFault], config: JobConfig | None
) -> tuple[bytes, bytes]:
    """(what it says without its uuid, the message)."""
    made = message(job_id, faults, config)
    data = made.SerializeToString(deterministic=True)
    made.uuid = ""
    return made.SerializeToString(deterministic=True), data
