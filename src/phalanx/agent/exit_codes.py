"""What ``phalanx run`` exits with, and why (docs/exit-codes.md is the reader's copy)."""

from __future__ import annotations

OK = 0
USAGE = 2
"""The command line was wrong; nothing was started."""

INTERNAL = 70
"""A defect of Phalanx itself; the traceback is printed."""

CONTROLLER = 118
"""A controller ended the job, and no worker had failed."""

NODE_CHECK = 119
"""This node did not pass its check (``--node-check``) and stayed out; nothing was started."""

RENDEZVOUS = 120
"""The nodes of the job did not find together."""

HUNG = 121
"""A worker stopped making progress and was ended, and no restart was left."""

UNKILLABLE = 122
"""A process of the job did not die of SIGKILL (uninterruptible sleep)."""

KEEPER = 123
"""No worker is to blame: the keeper or the workers' store was lost, or a recovery did not
come to an end, and no restart was left."""

CANNOT_START = 126
"""The program exists but cannot be run."""

NOT_FOUND = 127
"""The program does not exist."""


def of_returncode(returncode: int) -> int:
    """The shell's way to say how a process ended: its code, or 128 + signal.

    ``returncode`` is as subprocess has it: negative for a signal.
    """
    return 128 - returncode if returncode < 0 else returncode
