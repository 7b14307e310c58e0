"""The four report functions and the start of the client, under the vendor's names.

Each returns the server's code (0: taken). When the first answer is not 0, the client registers
once and repeats the report once; the second code counts. No answer within a minute raises
``LinkDown`` (a ConnectionError); an impossible argument, ValueError.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from phalanx.client.link import key_of
from phalanx.client.manager import DLRecoverManager
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery import words
from phalanx.recovery.model import Key
from phalanx.recovery.words import Code

log = logging.getLogger("phalanx.client")


def _fault_ranks(fault_ranks: Mapping[Any, Any] | None) -> list[Any]:
    made = []
    for rank, kind in (fault_ranks or {}).items():
        if int(rank) < 0 or int(kind) not in (0, 1, 2):
            raise ValueError(
                f"fault_ranks must map ranks to 0 (memory), 1 (other) or 2 (network), not {rank!r} "
                f"to {kind!r}"
            )
        made.append(pb.FaultRank(rankId=str(int(rank)), faultType=str(int(kind))))
    return made


def _send(name: str, request: Any) -> int:
    manager = DLRecoverManager.current()
    answer = manager.call(name, request, again=False)
    if answer.code not in (Code.OK, Code.ORDER_MIX):
        log.warning("%s: %s %s; registering and repeating once", name, answer.code, answer.info)
        manager.call("Init", manager.client_info(), again=False)
        manager.call("Register", manager.client_info(), again=False)
        answer = manager.call(name, request, again=False)
    if answer.info.startswith("stale"):
        log.warning("%s: %s", name, answer.info)
    return answer.code


def _key(kind: str) -> Key | None:
    return DLRecoverManager.current().last.get(kind)


def report_stop_complete(code: int, msg: str, fault_ranks: Mapping[Any, Any]) -> int:
    """All ranks have stopped (0); 404: they had not come up; 499: they cannot pause."""
    manager = DLRecoverManager.current()
    key = _key("stop")
    return _send(
        "ReportStopComplete",
        pb.StopCompleteRequest(
            jobId=manager.job_id,
            status=pb.Status(code=code, info=msg),
            faultRanks=_fault_ranks(fault_ranks),
            key=key_of(key) if key else None,
        ),
    )


def report_recover_strategy(fault_ranks: Mapping[Any, Any], strategy_list: list[str]) -> int:
    """What the job can do: retry, recover, downgrade, upgrade, dump, exit."""
    manager = DLRecoverManager.current()
    key = _key("strategies")
    return _send(
        "ReportRecoverStrategy",
        pb.RecoverStrategyRequest(
            jobId=manager.job_id,
            faultRanks=_fault_ranks(fault_ranks),
            strategies=strategy_list,
            key=key_of(key) if key else None,
        ),
    )


def report_recover_status(
    code: int, msg: str, fault_ranks: Mapping[Any, Any], strategy: str
) -> int:
    """How the strategy went. With code 201 ``fault_ranks`` are the ranks whose nodes have to
    go (which the vendor's Python client left out)."""
    manager = DLRecoverManager.current()
    key = _key("status")
    if key is not None and strategy not in _names(key):
        key = None  # a report about something else; the server judges by the name
    isolate = [str(int(rank)) for rank in fault_ranks or ()] if code == 201 else []
    return _send(
        "ReportRecoverStatus",
        pb.RecoverStatusRequest(
            jobId=manager.job_id,
            status=pb.Status(code=code, info=msg),
            strategy=strategy,
            isolateRankIds=isolate,
            key=key_of(key) if key else None,
        ),
    )


def _names(key: Key) -> tuple[str, ...]:
    if key.signal == words.SAVE_AND_EXIT:
        return (words.DUMP,)
    if key.signal == words.FAULT_NODES_EXIT:
        return (words.DOWNGRADE,)
    return (key.strategy, words.IN_PLACE) if key.strategy == words.RECOVER else (key.strategy,)


def report_process_fault(fault_ranks: Mapping[Any, Any], fault_codes: Any = None) -> int:
    """Ranks that failed, with their types. ``fault_codes`` is accepted and not used."""
    manager = DLRecoverManager.current()
    import uuid

    return _send(
        "ReportProcessFault",
        pb.ProcessFaultRequest(
            jobId=manager.job_id,
            faultRanks=_fault_ranks(fault_ranks),
            reportId=uuid.uuid4().hex,
        ),
    )


def init_grpc_client(frame: str = "pytorch") -> DLRecoverManager | None:
    """Starts the client that the environment describes, in a daemon thread.

    Init first; None when recovery is off for the job. With ``mindio_ttp`` its controller is
    started, and the job registered once high availability is on. ValueError names an
    environment variable that is missing.
    """
    from phalanx.client import mindio

    manager = DLRecoverManager.current()
    if not manager.init_clusterd():
        manager.close()
        return None
    os.environ["TORCH_AGENT_START"] = "0"
    ttp = mindio.find()

    def run() -> None:
        if ttp is not None and not mindio.drive(manager, ttp, frame):
            manager.close()
            return
        manager.start_subscribe(frame)

    threading.Thread(target=run, name="phalanx-recover-client", daemon=True).start()
    return manager
