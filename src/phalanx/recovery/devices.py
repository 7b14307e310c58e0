"""Faults of nodes and devices: what may be said about them, and what they mean to a job.

Pure: the rules of ``/PubFault/SendPublicFault`` and of the Fault service's payload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.recovery import words
from phalanx.recovery.model import Fault, JobConfig

RESOURCES = ("CCAE", "fd-online", "pingmesh", "Netmind", "dpcStorage", "dtfsStorage")
TYPES = ("NPU", "Node", "Network", "Storage")
ASSERTIONS = ("occur", "recover", "once")
LEVELS = ("SeparateNPU", "PreSeparateNPU", "SubHealthFault", "NotHandleFault")
EARLIEST_MS = 1_735_660_800_000  # the first day of 2025, at UTC+8

_ID = re.compile(r"[A-Za-z0-9_.-]{8,128}\Z")
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")

_HEALTH = {
    "NotHandleFault": "Healthy",
    "SubHealthFault": "SubHealthy",
    "PreSeparateNPU": "SubHealthy",
    "RestartRequest": "UnHealthy",
    "RestartBusiness": "UnHealthy",
    "RestartNPU": "UnHealthy",
    "FreeRestartNPU": "UnHealthy",
    "SeparateNPU": "UnHealthy",
    "ManuallySeparateNPU": "UnHealthy",
}
KNOWN_LEVELS = tuple(_HEALTH)
"""All levels a device fault can have."""

_ORDER = ("Healthy", "SubHealthy", "UnHealthy")


def health(level: str) -> str:
    """Healthy, SubHealthy or UnHealthy; Healthy for a level that nobody knows."""
    return _HEALTH.get(level, "Healthy")


def worst(levels: Sequence[str]) -> str:
    """The worst of these healths; Healthy for none."""
    return max(levels, key=_ORDER.index, default="Healthy")


@dataclass(frozen=True)
class DeviceFault:
    """A fault of a node's devices (none named: of the node itself)."""

    fault_id: str
    node_name: str = ""
    node_sn: str = ""
    devices: tuple[int, ...] = ()
    device_type: str = "Node"
    code: str = ""
    level: str = "SeparateNPU"
    description: str = ""
    resource: str = ""
    since_ms: int = 0

    @property
    def key(self) -> str:
        """What it is known by: resource, id and node."""
        return f"{self.resource}/{self.fault_id}/{self.node_name or self.node_sn}"


@dataclass(frozen=True)
class PublicFault:
    """One entry of a PublicFaultRequest, as plain values."""

    fault_id: str
    type: str
    code: str
    time: int
    assertion: str
    location: Mapping[str, str] = field(default_factory=dict)
    influence: Sequence[tuple[str, str, Sequence[int]]] = ()
    description: str = ""


@dataclass(frozen=True)
class Catalogue:
    """Which resources may report, and the level of each fault code. No codes: any, SeparateNPU."""

    resources: tuple[str, ...] = RESOURCES
    codes: Mapping[str, str] = field(default_factory=dict)

    def level(self, code: str) -> str | None:
        """The level of a fault code; None: the code is not listed."""
        return self.codes.get(code) if self.codes else "SeparateNPU"


def wrong_request(
    catalogue: Catalogue, id_: str, timestamp: int, version: str, resource: str, count: int
) -> str:
    """What is wrong with a request as a whole; "": nothing."""
    if not _ID.match(id_):
        return "id must be 8 to 128 letters, digits, dashes, underscores and dots"
    if wrong := _wrong_time(timestamp):
        return f"timestamp {wrong}"
    if version != "1.0":
        return f'version must be "1.0", not {version!r}'
    if resource not in catalogue.resources:
        return f"resource {resource!r} is not one of {', '.join(catalogue.resources)}"
    if not 1 <= count <= 100:
        return f"faults must have 1 to 100 entries, not {count}"
    return ""


def _wrong_time(value: int) -> str:
    if len(str(value)) != 13 or value < EARLIEST_MS:
        return "must be milliseconds (13 digits), not before 2025"
    return ""


def wrong_fault(catalogue: Catalogue, fault: PublicFault) -> str:
    """What is wrong with one entry; "": nothing."""
    if not _ID.match(fault.fault_id):
        return "faultId must be 8 to 128 letters, digits, dashes, underscores and dots"
    if fault.type not in TYPES:
        return f"faultType {fault.type!r} is not one of {', '.join(TYPES)}"
    if len(fault.code) != 9 or catalogue.level(fault.code) is None:
        return f"faultCode {fault.code!r} is not a known code of 9 characters"
    if wrong := _wrong_time(fault.time):
        return f"faultTime {wrong}"
    if fault.assertion not in ASSERTIONS:
        return f"assertion {fault.assertion!r} is not one of {', '.join(ASSERTIONS)}"
    if len(fault.location) > 10 or any(
        len(k) > 16 or len(v) > 128 for k, v in fault.location.items()
    ):
        return "faultLocation has more than 10 entries, or one that is too long"
    if not 1 <= len(fault.influence) <= 1000:
        return "influence must have 1 to 1000 entries"
    for name, sn, devices in fault.influence:
        if not (_NODE.match(name) if name else sn):
            return f"influence names no node ({name!r})"
        if not 1 <= len(devices) <= 32 or len(set(devices)) != len(devices):
            return "deviceIds must be 1 to 32 different numbers"
        if any(not 0 <= device <= 31 for device in devices):
            return "each of deviceIds must be 0 to 31"
    if len(fault.description) > 512:
        return "description is longer than 512 characters"
    return ""


def spread(catalogue: Catalogue, resource: str, fault: PublicFault) -> list[DeviceFault]:
    """One device fault per node that a (valid) entry names."""
    return [
        DeviceFault(
            fault.fault_id,
            name,
            sn,
            tuple(devices),
            fault.type,
            fault.code,
            catalogue.level(fault.code) or "",
            fault.description,
            resource,
            fault.time,
        )
        for name, sn, devices in fault.influence
    ]


def on_job(config: JobConfig, device: DeviceFault) -> tuple[Fault, ...]:
    """What a device fault means to one job: faults of its ranks, if the node is one of its."""
    for node in config.nodes:
        if not (
            (device.node_name and device.node_name == node.name)
            or (device.node_sn and device.node_sn == node.sn)
        ):
            continue
        ranks = node.ranks or config.ranks_of(node.rank)
        if device.devices and device.device_type == "NPU":
            ranks = tuple(ranks[d] for d in device.devices if d < len(ranks))
        kind = words.RETRY_CODES.get(device.code, words.NORMAL)
        return tuple(
            Fault(rank, kind, device.key, device.level, 0, device.description or device.code)
            for rank in ranks
        )
    return ()
