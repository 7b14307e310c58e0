"""Signals of the agent process: those that stop the job and those that are passed on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.elastic.multiprocessing import SignalException

PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""What schedulers send as a warning: for the program, not for us."""


class JobSignals:
    """Installed for the life of a job on the main thread; elsewhere it does nothing.

    A stop signal is remembered and raised as SignalException where the agent's loop asks
    (``check``, ``checked``) or within ``interruptible()``, never in the middle of anything
    else. A second one makes ``hurry()`` true. A SIGHUP that is ignored at the start (nohup)
    stays ignored. SIGTSTP (Ctrl-Z) is remembered too: ``held()`` is true once for each.
    """

    def __init__(
        self, names: str, wake: Callable[[], None], pass_on: Callable[[int], None]
    ) -> None:
        """``names``: comma-separated, as ``--signals-to-handle``.

        Raises:
            ValueError: a name that is no signal, or one that cannot be caught.
        """
        self.stops = tuple(_number(name) for name in names.split(",") if name.strip())
        self._wake, self._pass_on = wake, pass_on
        self.received: list[int] = []
        self._raised = False
        self._now = False
        self._hold = False
        self._old: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over. On a thread other than the main one nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.stops:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._old[number] = signal.signal(number, self._on_stop)
        for name in PASSED_ON:
            number = _number(name)
            if number not in self._old:
                self._old[number] = signal.signal(number, self._on_other)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._old[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_hold)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._old)

    def restore(self) -> None:
        """Put back what was there before."""
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
        self._old.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._now and not self._raised:
            self._now = False
            self._raise()
        self._wake()

    def _on_other(self, number: int, frame: FrameType | None) -> None:
        self._pass_on(number)

    def _on_hold(self, number: int, frame: FrameType | None) -> None:
        self._hold = True
        self._wake()

    def held(self) -> bool:
        """Whether the job is to be stopped until it is continued; asking takes note of it."""
        hold, self._hold = self._hold, False
        return hold

    def _raise(self) -> None:
        self._raised = True
        number = signal.Signals(self.received[0])
        raise SignalException(f"the job was told to stop by {number.name}", number)

    def check(self) -> None:
        """Raise the first that has arrived, once.

        Raises:
            SignalException: a stop signal has arrived.
        """
        if self.received and not self._raised:
            self._raise()

    def asked(self) -> bool:
        """Whether a stop signal has arrived."""
        return bool(self.received)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """``check`` before and after: around what ends early by itself when ``asked``."""
        self.check()
        yield
        self.check()

    def hurry(self) -> bool:
        """Whether somebody asked a second time: no more grace."""
        return len(self.received) > 1

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A stop signal is raised at once in here: only around waits."""
        self._now = True  # before the look: one that comes between is raised by the handler
        try:
            self.check()
            yield
        finally:
            self._now = False


def _number(name: str) -> signal.Signals:
    try:
        number = signal.Signals[name.strip()]
    except KeyError:
        raise ValueError(
            f"--signals-to-handle: there is no signal {name.strip()!r} on this machine"
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{number.name} cannot be caught: leave it out of --signals-to-handle")
    return number
