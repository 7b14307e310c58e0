"""A notice to stop, heard by any rank and agreed on by all at the end of the same step."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed


class Notice:
    """From `open` on SIGTERM does not end this process but is remembered; `agreed` asks all ranks.

    ``every``: steps between two questions; each is one all-reduce of a number. ``grace``: seconds
    after the signal in which a step has to end. A process that is still inside one then (its
    collective waits for a rank that is gone) ends as SIGTERM would have it.
    """

    def __init__(self, every: int = 1, grace: float = 20.0) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; it counts steps, from 1")
        self.heard = False
        self._every = every
        self._grace = grace
        self._asked = 0
        self._before: Any = None
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1
        self._loop: tuple[int, CodeType] | None = None

    def open(self, loop: FrameType | None = None) -> None:
        """Begin to listen. Outside of the main thread it hears nothing of its own.

        ``loop``: the call that the steps are made in, for a library that does not say when an
        exception ends it: once that has returned, SIGTERM means again what it did before.
        """
        # Not the frame itself: it would keep what its loop had in hand.
        self._loop = (id(loop), loop.f_code) if loop is not None else None
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The main thread may be inside a collective for long: the interpreter's C part tells
        # another thread by this descriptor.
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True).start()
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """A child of the program is not the one that is asked to stop."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            self._pipe = None
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._left(frame):
            self.close()
            signal.raise_signal(signum)
            return
        self.heard = True

    def _left(self, frame: FrameType | None) -> bool:
        """Whether the main thread, which is at ``frame``, has left the loop."""
        if self._loop is None:
            return False
        while frame is not None:
            if (id(frame), frame.f_code) == self._loop:
                return False
            frame = frame.f_back
        return True

    def _watch(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        until: float | None = None
        while True:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not poll.poll(left):
                os._exit(128 + signal.SIGTERM)
            said = os.read(fd, 4096)
            if not said or 0 in said:  # closed, or all have agreed
                os.close(fd)
                return
            if self._wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup, said)
            if signal.SIGTERM in said:
                self.heard = True
                until = until or time.monotonic() + self._grace

    def agreed(self) -> bool:
        """Whether any rank has had the notice. By all ranks, at the end of each step."""
        self._asked += 1
        if self._asked % self._every:
            return False
        heard = self.heard
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            flag = torch.tensor([int(heard)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            heard = bool(flag.item())
        if heard:
            self._rest()
        return heard

    def _rest(self) -> None:
        """The step has ended: nobody watches any more."""
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._pipe[1], b"\0")
            os.close(self._pipe[1])
            self._pipe = None

    def close(self) -> None:
        """SIGTERM means again what it did before."""
        self._rest()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def announce(text: str) -> None:
    """One line of rank 0 on stderr."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"phalanx: {text}\n")
        sys.stderr.flush()


def under_agent() -> bool:
    """Whether ``phalanx run`` has started this process: it then sees progress and hangs."""
    return bool(os.environ.get("PHALANX_PROGRESS_FD"))
