"""Environment look-up, a reserved port, and the macros in worker arguments."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from typing import Any

# "$$" is matched first so that the dollar sign after it is never taken for a macro.
_MACRO = re.compile(r"\$\$|\$\{local_rank\}|\$local_rank(?![A-Za-z0-9_])")


def get_env_variable_or_raise(env_name: str) -> str:
    """The value of an environment variable; ``ValueError`` names it when it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of localhost; the caller closes it."""
    problems = []
    for family, kind, proto, _, address in socket.getaddrinfo(
        "localhost", 0, type=socket.SOCK_STREAM
    ):
        held = None
        try:
            held = socket.socket(family, kind, proto)
            held.bind(("localhost", 0))
            held.listen(0)
        except OSError as error:
            if held is not None:
                held.close()
            problems.append(f"{address[0]}: {error.strerror}")
        else:
            return held
    raise RuntimeError(f"Failed to create a socket on localhost ({'; '.join(problems)})")


class macros:
    """What is replaced in the arguments of a worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """Put the local rank for ``$local_rank`` and ``${local_rank}`` in all strings of ``args``.

        Every other dollar sign stays as it is, ``$$`` included.
        """

        def put(match: re.Match[str]) -> str:
            return match.group() if match.group() == "$$" else str(local_rank)

        return [_MACRO.sub(put, arg) if isinstance(arg, str) else arg for arg in args]
