"""The store server: torch's ``TCPStore`` in a process of its own.

The keeper forks it from what has imported torch, or runs it by
``python -m phalanx.torch_bridge.store_server <fd> <host> <port>`` or the like.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys


def serve(fd: int, host: str, port: int) -> None:
    """Serve the bound, listening socket ``fd``; returns never (but for an error).

    ``host`` and ``port`` are where this process reaches the socket itself.
    """
    os.set_inheritable(fd, False)
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    store = TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=fd,
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
