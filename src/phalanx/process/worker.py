"""The worker's side, for a program that wants its channel and its page."""

from __future__ import annotations

import threading
from typing import NamedTuple

from phalanx.process.armed import arm
from phalanx.process.channel import HELD, Channel, ChannelClosed
from phalanx.process.page import ProgressPage


class Attachment(NamedTuple):
    """Both are there in a worker of Phalanx."""

    page: ProgressPage
    channel: Channel


def attach() -> Attachment | None:
    """This process's page and channel; None outside of a worker. Call it once.

    From then on it writes its stacks when it is asked (`phalanx.process.armed`). Called in the
    main thread, it has this thread hold the page's mutex (a warm worker
    does so from its start) and lets the agent know, which then knows of our death at once.
    Raises OSError or ValueError if the variables name descriptors of another kind.
    """
    page = ProgressPage.from_environment()
    channel = Channel.from_environment()
    if page is None or channel is None:
        return None
    arm()
    if threading.current_thread() is threading.main_thread() and page.hold():
        try:
            channel.send(HELD)
        except ChannelClosed:
            pass
    return Attachment(page, channel)
