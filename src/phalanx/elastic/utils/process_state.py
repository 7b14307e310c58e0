"""What the kernel says a process is doing."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The letter of state of a process (``R``, ``S``, ``D``, ``Z``...), None when it has none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The command name may hold blanks and brackets of its own: only the last ")" ends it.
    _, bracket, rest = line.rpartition(b")")
    fields = rest.split()
    return fields[0].decode("ascii", "replace") if bracket and fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether the process sleeps in the kernel where no signal reaches it."""
    return state is not None and state.startswith("D")
