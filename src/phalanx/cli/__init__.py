"""The command line: ``phalanx VERB ...``. Each verb's module is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

VERBS: dict[str, tuple[str, str]] = {
    "run": ("phalanx.cli.run", "start a training job on this machine and keep it running"),
    "check": ("phalanx.cli.check", "say what a script needs and what could be recovered"),
    "controller": ("phalanx.cli.controller", "serve the recovery protocol for a cluster"),
    "coordinator": ("phalanx.cli.coordinator", "coordinate a job of several nodes by itself"),
    "status": ("phalanx.cli.status", "show the nodes and ranks of a job of several nodes"),
    "jobs": ("phalanx.cli.jobs", "list the jobs of a controller"),
    "fault": ("phalanx.cli.fault", "report what is broken to a controller, or list it"),
    "mindx": ("phalanx.cli.mindx", "switch mindx_elastic's patch of torchrun on or off"),
}


def usage() -> str:
    """The text of ``phalanx --help``."""
    lines = ["usage: phalanx VERB ...", "", "verbs:"]
    lines += [f"  {verb:<12}{what}" for verb, (_, what) in VERBS.items()]
    lines += ["", "phalanx VERB --help says more. phalanx --version prints the version."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status (2: the command line itself was wrong)."""
    _open_streams()
    try:
        return _main(argv)
    except KeyboardInterrupt:  # where no verb had taken the signal over (yet)
        print("phalanx: stopped by SIGINT", file=sys.stderr)
        return 130


def show(text: str) -> int:
    """Print what somebody asked for; 1 if it could not be written (a closed pipe, a full disk)."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains at its end
        return 1
    return 0


def _open_streams() -> None:
    """Open standard streams that whoever started us has closed, on nothing.

    Else their numbers would be taken by the next files and sockets that are opened, and
    handed to workers as their streams.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = os.O_WRONLY if number else os.O_RDONLY
            os.set_inheritable(os.open(os.devnull, mode), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        status = show(usage())
        return status if words else 2
    if words[0] in ("--version", "-V", "version"):
        from phalanx import __version__

        print(f"phalanx {__version__}")
        return 0
    if words[0] not in VERBS:
        print(
            f"phalanx: there is no verb {words[0]!r}. The verbs are {', '.join(VERBS)}; "
            f"to start a script: phalanx run {words[0]}",
            file=sys.stderr,
        )
        return 2
    verb: Callable[[Sequence[str]], int] = import_module(VERBS[words[0]][0]).main
    return verb(words[1:])
