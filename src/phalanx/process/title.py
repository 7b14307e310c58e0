"""What ``ps`` and ``/proc`` show of a process that was forked and not started by exec.

Without this every warm worker would look like its keeper, and ``pgrep -f train.py`` would
find none of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

# In the kernel's order: name -> field of /proc/self/stat, 0 where it is new.
_ADDRESSES = {
    "start_code": 25,
    "end_code": 26,
    "start_data": 44,
    "end_data": 45,
    "start_brk": 46,
    "brk": 0,
    "start_stack": 27,
    "arg_start": 0,
    "arg_end": 0,
    "env_start": 0,
    "env_end": 0,
}


class _Map(ctypes.Structure):
    """struct prctl_mm_map."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show_as(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Have ``/proc/self/cmdline`` and ``/proc/self/environ`` say this.

    Any user may do it where the kernel has checkpoint/restore built in. Elsewhere the command
    is written over the old one as far as there is room, and the environment stays: False.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    settings = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in env.items())
    try:
        with open("/proc/self/stat", "rb") as file:
            # The name in parentheses may itself hold parentheses and blanks.
            rest = file.read().rpartition(b")")[2].split()
        fields = [0, 0, *(int(f) if f.isdigit() else 0 for f in rest)]
        if _point_at(words, settings, fields):
            return True
        _overwrite(words, fields[47], fields[48])
    except (OSError, ValueError, IndexError):
        pass
    return False


def _point_at(words: bytes, settings: bytes, fields: Sequence[int]) -> bool:
    """Give the kernel new addresses for both; ``fields`` are those of proc(5), from 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.sbrk.restype = ctypes.c_void_p
    size = len(words) + len(settings)
    # Never unmapped: the kernel reads it as long as the process lives.
    place = libc.mmap(
        None,
        ctypes.c_size_t(size),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        -1,
        ctypes.c_long(0),
    )
    if place in (None, ctypes.c_void_p(-1).value):
        return False
    ctypes.memmove(place, words + settings, size)
    known = {name: fields[number] for name, number in _ADDRESSES.items() if number}
    layout = _Map(
        **known,
        brk=libc.sbrk(0),
        arg_start=place,
        arg_end=place + len(words),
        env_start=place + len(words),
        env_end=place + size,
        exe_fd=0xFFFFFFFF,
    )
    result = libc.prctl(
        _PR_SET_MM,
        ctypes.c_ulong(_PR_SET_MM_MAP),
        ctypes.byref(layout),
        ctypes.c_ulong(ctypes.sizeof(layout)),
        ctypes.c_ulong(0),
    )
    return bool(result == 0)


def _overwrite(words: bytes, start: int, end: int) -> None:
    room = end - start
    if room > 1:
        ctypes.memmove(start, words[: room - 1].ljust(room, b"\0"), room)
