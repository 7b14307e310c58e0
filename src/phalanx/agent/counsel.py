"""The agent's connection to a controller (``phalanx run --controller``).

The conversation itself is :mod:`phalanx.recovery.counsel`, which is pure. Here is what carries
it: a thread of its own for gRPC (which is imported there, and only when a controller is asked
for), a queue of reports that are repeated until they are answered, and signals that wake the
agent's loop. The loop calls :meth:`Counsel.tell` and :meth:`Counsel.heard`; nothing there waits.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.process import pause
from phalanx.recovery import counsel as c

if TYPE_CHECKING:
    from phalanx.agent.config import Controller
    from phalanx.client.link import Link
    from phalanx.events import EventLog
    from phalanx.recovery.model import Received

log = logging.getLogger("phalanx.agent.counsel")

_PATIENCE = 900.0
"""How long a report is repeated while no controller answers, in seconds: the original's bound
for every report."""

_GOODBYE = 1.0
"""Seconds that the end of a job may wait for the last reports to be taken."""


class Counsel:
    """One job's conversation. ``wake`` is called from any thread when there is news."""

    def __init__(
        self,
        settings: Controller,
        job_id: str,
        world: int,
        wake: Callable[[], None],
        events: EventLog,
    ) -> None:
        self.settings = settings
        self.state = c.State(timeout=settings.timeout)
        self.link_state = ("new", "")
        self._job_id = job_id
        self._world = world
        self._wake = wake
        self._events = events
        self._news: deque[c.Event] = deque()  # from the link's threads
        self._reports: queue.Queue[tuple[str, Callable[[Link], Any]] | None] = queue.Queue()
        self._link: Link | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-counsel", daemon=True)

    def start(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    def close(self) -> None:
        """The job is over: say what is left to say, within a moment."""
        if not self._thread.ident:
            return
        self.tell(c.Done())
        if self.state.up:
            self._reports.put(None)
            self._thread.join(_GOODBYE)
        self._closing.set()
        self._reports.put(None)
        if self._link is not None:
            self._link.close(_GOODBYE)
        self._thread.join(_GOODBYE)

    # ------------------------------------------------------------------ the loop's side

    @property
    def due(self) -> float | None:
        """When the loop has to call :meth:`heard` at the latest (monotonic seconds)."""
        return self.state.until

    def tell(self, event: c.Event) -> list[c.Effect]:
        """What the agent has to do about something that it has seen."""
        self.state, effects = c.advance(self.state, event, pause.now())
        return [effect for effect in effects if not self._say(effect)]

    def heard(self) -> list[c.Effect]:
        """What the agent has to do about what has come in, or has not come in time."""
        todo: list[c.Effect] = []
        while self._news:
            event = self._news.popleft()
            if isinstance(event, c.Heard):
                signal = event.signal
                self._events.record(
                    "controller_said",
                    signal=signal.signal,
                    strategy="recover-in-place" if signal.in_place else signal.strategy,
                    round=signal.key.round,
                    again=signal.again,
                    reason=signal.reason,
                )
            todo += self.tell(event)
        if self.due is not None and pause.now() >= self.due:
            todo += self.tell(c.Tick())
        return todo

    def _say(self, effect: c.Effect) -> bool:
        """Queue what is for the controller; False: it is for the agent."""
        if isinstance(effect, c.SayFault):
            troubles = effect.troubles

            def fault(link: Link) -> Any:
                return link.report_fault(
                    {t.rank: t.kind for t in troubles},
                    incarnations={t.rank: t.incarnation for t in troubles},
                    reasons={t.rank: t.reason for t in troubles},
                    timeout=_PATIENCE,
                )

            self._reports.put(("fault", fault))
        elif isinstance(effect, c.SayStopped):
            signal, info = effect.signal, effect.info
            self._reports.put(
                (
                    "stopped",
                    lambda link: link.stop_complete(signal, 0, info, timeout=_bound(signal)),
                )
            )
        elif isinstance(effect, c.SayOffer):
            signal, names = effect.signal, effect.names
            self._reports.put(
                ("offer", lambda link: link.strategies(signal, names, timeout=_bound(signal)))
            )
        elif isinstance(effect, c.SayStatus):
            signal, code, why = effect.signal, effect.code, effect.info
            self._reports.put(
                ("status", lambda link: link.status(signal, code, why, timeout=_bound(signal)))
            )
        else:
            return False
        return True

    # ------------------------------------------------------------------ its own thread

    def _run(self) -> None:
        try:
            from phalanx.client import Credentials, Declaration, Link
            from phalanx.recovery.model import Node

            s = self.settings
            self._link = link = Link(
                s.addresses,
                self._job_id,
                lambda signal: self._post(c.Heard(signal)),
                on_state=self._on_state,
                role="phalanx agent",
                declaration=Declaration(
                    world_size=self._world,
                    devices_per_node=self._world,
                    nodes=(Node(0, socket.gethostname(), ranks=tuple(range(self._world))),),
                ),
                credentials=Credentials(s.root, s.certificate, s.key, s.token),
                back_off=max(1.0, min(10.0, s.timeout)),
            )
            link.start()
        except (ImportError, ValueError) as error:
            log.warning("no controller is asked: %s", error)
            self._on_state("refused", str(error))
            return
        while (report := self._reports.get()) is not None:
            what, send = report
            try:
                answer = send(link)
                if answer.code:
                    log.info("%s: %s %s", what, answer.code, answer.info)
            except Exception as error:  # whatever is wrong with one report: the next are told
                if not self._closing.is_set():
                    log.warning("the controller was not told of %s: %s", what, error)

    def _on_state(self, state: str, text: str) -> None:
        self.link_state = (state, text)
        self._events.record("controller", state=state, text=text)
        self._post(c.Linked(state == "connected"))

    def _post(self, event: c.Event) -> None:
        self._news.append(event)
        self._wake()


def _bound(signal: Received) -> float:
    """Seconds after which nobody waits for the answer to this signal any more."""
    return float(signal.report_within or _PATIENCE)
