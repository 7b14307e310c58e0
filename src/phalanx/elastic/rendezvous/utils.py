"""Reading endpoints and ``--rdzv-conf`` strings; what handlers written elsewhere build on."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["parse_rendezvous_endpoint"]


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """``k=v,k=v`` as a dictionary; ``ValueError`` for an empty key or value."""
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for pair in config_str.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError(
                "The rendezvous configuration string must be in format "
                "<key1>=<value1>,...,<keyN>=<valueN>."
            )
        if not value:
            raise ValueError(
                f"The rendezvous configuration option '{key}' must have a value specified."
            )
        config[key] = value
    return config


def _try_parse_port(port_str: str) -> int | None:
    return int(port_str) if re.fullmatch(r"[0-9]{1,5}", port_str) else None


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[v6]``, ``[v6]:port``; nothing is localhost.

    Raises ``ValueError`` for anything else.
    """
    endpoint = (endpoint or "").strip()
    if not endpoint:
        return "localhost", default_port
    port = default_port
    if _is_ip_v6(endpoint) or re.fullmatch(r"\[.*\]", endpoint):
        host = endpoint
    else:
        host, colon, port_text = endpoint.rpartition(":")
        if not colon:
            host = endpoint
        else:
            parsed = _try_parse_port(port_text)
            if parsed is None or parsed >= 2**16:
                raise ValueError(
                    f"The port number of the rendezvous endpoint '{endpoint}' must be an integer "
                    "between 0 and 65536."
                )
            port = parsed
    if len(host) > 2 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(
            f"The hostname of the rendezvous endpoint '{endpoint}' must be a dot-separated list of "
            "labels, an IPv4 address, or an IPv6 address."
        )
    return host, port


def _is_ip_v6(text: str) -> bool:
    if text.count(":") < 2:
        return False
    import ipaddress

    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _matches_machine_hostname(host: str) -> bool:
    """Whether ``host`` is a name or an address of this machine, as far as the resolver tells."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass
    this_host = socket.gethostname()
    if host == this_host:
        return True

    def look_up(name: str) -> tuple[set[str], set[str]]:
        try:
            found = socket.getaddrinfo(
                name, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME
            )
        except (ValueError, OSError):
            return set(), set()
        return {str(entry[4][0]) for entry in found}, {entry[3] for entry in found if entry[3]}

    addresses, _ = look_up(host)
    own_addresses, own_names = look_up(this_host)
    return host in own_names or host in own_addresses or bool(addresses & own_addresses)


def _delay(seconds: float | tuple[float, float]) -> None:
    """Back off for that long; of a pair, for a random time between the two."""
    time.sleep(random.uniform(*seconds) if isinstance(seconds, tuple) else seconds)


class _PeriodicTimer:
    """Calls a function at regular intervals in a thread of its own, until cancelled or forgotten.

    PyTorch's, for handlers written for it: it keeps their heartbeats.
    """

    def __init__(
        self, interval: timedelta, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        self._name: str | None = None
        self._cancelled = threading.Event()
        self._work = (interval.total_seconds(), function, args, kwargs)
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def name(self) -> str | None:
        """The name of the thread."""
        return self._name

    def set_name(self, name: str) -> None:
        """Name the thread; ``RuntimeError`` once it runs."""
        self._refuse_if_started()
        self._name = name

    def start(self) -> None:
        """Begin; ``RuntimeError`` the second time."""
        self._refuse_if_started()
        # The thread must not hold the timer, or it would never be forgotten.
        thread = threading.Thread(
            target=_repeat,
            args=(self._cancelled, *self._work),
            name=self._name or "PeriodicTimer",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _end_thread, thread, self._cancelled)
        self._finalizer.atexit = False  # the thread ends with the process anyhow
        thread.start()

    def cancel(self) -> None:
        """End, and wait until the function is not called any more; again: does nothing."""
        if self._finalizer is not None:
            self._finalizer()

    def _refuse_if_started(self) -> None:
        if self._finalizer is not None:
            raise RuntimeError("The timer has already started.")


def _repeat(
    cancelled: threading.Event,
    interval: float,
    function: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    while not cancelled.wait(interval):
        function(*args, **kwargs)


def _end_thread(thread: threading.Thread, cancelled: threading.Event) -> None:
    cancelled.set()
    if thread is not threading.current_thread():
        thread.join()
