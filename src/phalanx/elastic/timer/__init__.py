"""Timers that end hung workers (PyTorch's ``torch.distributed.elastic.timer``).

A worker arms a timer before code that may hang and releases it afterwards; a server in
the agent ends the worker whose timer ran out. Clients and servers of this package and of
PyTorch work with each other.

    from phalanx.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        all_reduce(gradients)
"""

from phalanx.elastic.timer.api import TimerClient, TimerRequest, TimerServer, configure, expires
from phalanx.elastic.timer.file_based_local_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
)
from phalanx.elastic.timer.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
