"""The progress page: one page of shared memory per worker.

The worker writes what it is doing; the agent reads it without a message or a system
call. A robust mutex in the page tells the agent of the worker's death before the kernel
has freed the worker's memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from typing import NamedTuple

from phalanx.process.syscalls import RobustMutex

SIZE = mmap.PAGESIZE
FD_VARIABLE = "PHALANX_PROGRESS_FD"

_MAGIC = 0x31584850  # "PHX1"
_HEAD = struct.Struct("<I")
_MUTEX_AT = 64
_BODY_AT = 192
_END_AT = 320
_PHASE_BYTES = 32
_STEPS = 1 << 53  # no training has more

# The first and the last field are the same counter: a reader that finds them different
# has met the writer half way and reads again.
_BODY = struct.Struct(f"<QIqQQQQq{_PHASE_BYTES}sQ")
_END = struct.Struct("<ii")  # whether finished, status

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK_GROW = 0x0002 | 0x0004


class Progress(NamedTuple):
    """What a worker said last. Times are CLOCK_MONOTONIC nanoseconds."""

    pid: int  # 0: nobody has attached yet
    step: int | None
    phase: str
    beat_ns: int  # 0: no beat yet
    beats: int
    generation: int
    finished: int | None  # the status with which the program ended by itself
    first_beat_ns: int = 0  # the first beat with a step; 0: none yet
    first_step: int | None = None  # the step of that beat

    @property
    def seconds_per_step(self) -> float:
        """On average since the first; 0.0 when it is not known."""
        if self.step is None or self.first_step is None or self.step <= self.first_step:
            return 0.0
        return (self.beat_ns - self.first_beat_ns) / 1e9 / (self.step - self.first_step)


class ProgressPage:
    """See the module. Make one with `create` (agent) or `attach` (worker)."""

    def __init__(self, fd: int, *, new: bool) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE, mmap.MAP_SHARED)
        self._mutex = RobustMutex(self._map, _MUTEX_AT)
        self._seq = 0
        self._pid = 0
        self._step = -1
        self._phase = b""
        self._beat_ns = 0
        self._beats = 0
        self._generation = 0
        self._first_beat_ns = 0
        self._first_step = -1
        if new:
            _HEAD.pack_into(self._map, 0, _MAGIC)
        elif _HEAD.unpack_from(self._map, 0)[0] != _MAGIC:
            raise ValueError(f"descriptor {fd} is not a progress page")
        else:
            # Another object of this process may have written before: go on from there.
            (
                self._seq,
                self._pid,
                self._step,
                self._beat_ns,
                self._beats,
                self._generation,
                self._first_beat_ns,
                self._first_step,
                phase,
                _,
            ) = _BODY.unpack_from(self._map, _BODY_AT)
            self._phase = phase.rstrip(b"\0")
            if self._seq == 0:
                self._step = -1

    @classmethod
    def create(cls, name: str) -> ProgressPage:
        """A fresh page. ``name`` shows in ``/proc/<pid>/maps`` of whoever maps it.

        Raises OSError.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SIZE)
            # Nobody may cut the file short: that would kill the other side by SIGBUS.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK_GROW)
            page = cls(fd, new=True)
            page._mutex.initialise()
        except BaseException:
            os.close(fd)
            raise
        return page

    @classmethod
    def attach(cls, fd: int) -> ProgressPage:
        """The page behind ``fd``, which becomes close-on-exec. Raises OSError, ValueError."""
        os.set_inheritable(fd, False)
        return cls(fd, new=False)

    @classmethod
    def from_environment(cls) -> ProgressPage | None:
        """The page that ``PHALANX_PROGRESS_FD`` names; None where there is none."""
        value = os.environ.get(FD_VARIABLE, "")
        return cls.attach(int(value)) if value.isdigit() else None

    # -- the worker's side

    def hold(self) -> bool:
        """Lock the mutex with the calling thread, which must be the worker's main thread.

        From then on this thread's end wakes whoever waits in `await_death`. False if
        somebody else has it (the agent then knows of the death by the pidfd only).
        """
        result = self._mutex.try_lock()
        if result == errno.EOWNERDEAD:  # a holder that exec'ed: its lock is ours to take over
            self._mutex.recover()
            result = self._mutex.try_lock()
        self._pid = os.getpid()
        self._write()
        if result == 0:
            self._mutex.pin()
        return result == 0

    def beat(
        self, step: int | None = None, phase: str | None = None, generation: int | None = None
    ) -> None:
        """Say that the worker is alive and where it is; what is None stays as it was."""
        if step is not None:
            self._step = step
        if phase is not None:
            self._phase = phase.encode("utf-8", "replace")[:_PHASE_BYTES]
        if generation is not None:
            self._generation = generation
        self._beats += 1
        self._beat_ns = time.monotonic_ns()
        if step is not None and not self._first_beat_ns:
            self._first_beat_ns, self._first_step = self._beat_ns, step
        self._write()

    def finish(self, code: int) -> None:
        """Say, as the last thing, that the program ended by itself with status ``code``."""
        _END.pack_into(self._map, _END_AT, 1, code)

    def _write(self) -> None:
        self._seq += 1
        _BODY.pack_into(
            self._map,
            _BODY_AT,
            self._seq,
            self._pid,
            self._step,
            self._beat_ns,
            self._beats,
            self._generation,
            self._first_beat_ns,
            self._first_step,
            self._phase,
            self._seq,
        )

    # -- the agent's side

    def await_death(self) -> bool:
        """Block until the holder's thread is dead; True then.

        False if nobody held the mutex. A dead thread is not always a dead process: the
        main thread alone may have ended, or the process may have exec'ed. The
        interpreter lock is free during the wait.
        """
        result = self._mutex.lock()
        if result == errno.EOWNERDEAD:
            self._mutex.recover()
            return True
        if result == 0:
            self._mutex.unlock()
        return False

    def abandon(self, pid: int) -> None:
        """Wake those in `await_death` if the kernel has not: ``pid``, the holder, is gone.

        The kernel cannot if the holder had unmapped the page.
        """
        self._mutex.abandon(pid)

    def read(self) -> Progress:
        """What the worker said last; never blocks. What cannot be is left out."""
        for _ in range(100):
            (first, pid, step, beat_ns, beats, generation, first_beat, first_step, phase, last) = (
                _BODY.unpack_from(self._map, _BODY_AT)
            )
            if first == last:
                break
        ended, code = _END.unpack_from(self._map, _END_AT)
        # A program that writes into memory it should not may have hit the page.
        now = time.monotonic_ns()
        beat_ns, first_beat = (at if at <= now else 0 for at in (beat_ns, first_beat))
        return Progress(
            pid,
            step if first and 0 <= step < _STEPS else None,
            phase.rstrip(b"\0").decode("utf-8", "replace"),
            beat_ns,
            beats,
            generation,
            code if ended else None,
            first_beat,
            first_step if first_beat and 0 <= first_step < _STEPS else None,
        )

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while anybody uses this object."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
