"""The recover client under its old module path."""

from phalanx.client import (
    DLRecoverManager,
    init_grpc_client,
    pb,
    report_process_fault,
    report_recover_status,
    report_recover_strategy,
    report_stop_complete,
)

__all__ = [
    "DLRecoverManager",
    "init_grpc_client",
    "pb",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]
