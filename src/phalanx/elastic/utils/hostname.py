"""The name of this machine, never at the price of a hanging name server."""

from __future__ import annotations

import socket
import threading

_LOOK_UP_LIMIT = 1.0  # seconds
_known: dict[str, str] = {}


def fq_hostname() -> str:
    """The full name of this machine.

    The first call asks the resolver, for one second at most; a resolver that is
    slower than that leaves the plain host name until it has answered.
    """
    name = socket.gethostname()
    if name not in _known:

        def ask() -> None:
            _known[name] = socket.getfqdn(name)

        thread = threading.Thread(target=ask, name="phalanx-fqdn", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this user
            return name
        thread.join(_LOOK_UP_LIMIT)
    return _known.get(name, name)
