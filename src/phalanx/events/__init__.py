"""The events record: who did what when, in JSON lines.

Each process writes a file of its own; ``read`` puts the files of a job together. One line:

    {"wall": Unix seconds, "mono": CLOCK_MONOTONIC nanoseconds, "host": ..., "node": ...,
     "run_id": ..., "epoch": ..., "generation": ..., "attempt": ..., "episode": ...,
     "rank": ..., "incarnation": ..., "source": ..., "kind": ..., "data": {...}}

What is not known is null. (These are not the events of ``phalanx.elastic.events``, which are
PyTorch's.)
"""

from phalanx.events.log import CONTEXT, EVENTS_ENV, EventLog
from phalanx.events.reader import files, read

__all__ = ["CONTEXT", "EVENTS_ENV", "EventLog", "files", "read"]
