"""The worker side's end of the recovery protocol.

:class:`Link` is the small client an agent uses; :class:`DLRecoverManager` and the
``report_*`` functions are what users of MindCluster's recover client know. Needs the
``control`` extra (grpcio, protobuf); importing this package alone does not.
"""

from typing import Any

_HOME = {
    "Answer": "link",
    "Credentials": "channel",
    "DLRecoverManager": "manager",
    "Declaration": "link",
    "Link": "link",
    "LinkDown": "link",
    "Received": "link",
    "init_grpc_client": "reports",
    "report_process_fault": "reports",
    "report_recover_status": "reports",
    "report_recover_strategy": "reports",
    "report_stop_complete": "reports",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "pb":
        return import_module(f"{__name__}.pb")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
