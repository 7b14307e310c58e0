"""``phalanx coordinator``: a coordinator that is a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli import common

PROG = "phalanx coordinator"


def _parser() -> argparse.ArgumentParser:
    parser = common.parser(
        PROG,
        "Coordinates one job of several nodes, instead of one of its agents: start it, "
        "then the agents with --rdzv-endpoint HOST:PORT --rdzv-conf is_host=0. It may be stopped, "
        "killed and started again while the job runs.",
    )
    add = parser.add_argument
    add("--listen", default="127.0.0.1:29400", metavar="HOST:PORT", help="default: %(default)s")
    add(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="what it remembers across restarts; without it a job that is over is forgotten",
    )
    add("--rdzv-id", default="", metavar="ID", help="coordinate this job only; default: any")
    add(
        "--silence",
        type=common.seconds,
        default=5.0,
        metavar="S",
        help="an agent without a sign of life for so long is lost; default: %(default)s s",
    )
    add("--events", metavar="FILE", help="write what happens to FILE, one JSON object per line")
    common.agents(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT. 0: ended as told; 1: failed; 2: the options are wrong."""
    args = _parser().parse_args(argv)
    if common.lacks_grpc(PROG):
        return 1
    import asyncio
    import logging

    from phalanx.coordinator.security import SecurityError
    from phalanx.coordinator.server import CoordinatorError

    logging.basicConfig(level=logging.WARNING, format="phalanx coordinator: %(message)s")
    try:
        return asyncio.run(_serve(args))
    except SecurityError as error:
        return common.complain(PROG, error, 2)
    except CoordinatorError as error:
        return common.complain(PROG, error, 1)


async def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import signal

    from phalanx.coordinator import net
    from phalanx.coordinator.standalone import Journal, Standalone, where
    from phalanx.events import EventLog

    secure = common.security(args)
    host, port = where(args.listen)
    stop = asyncio.Event()
    status = 0

    def line(text: str) -> None:
        print(f"phalanx coordinator: {text}", file=sys.stderr, flush=True)

    def failed(why: str) -> None:
        nonlocal status
        line(f"{why}; it ends, the job's workers go on without it for a while")
        status = 1
        stop.set()

    log = EventLog(args.events, source="coordinator") if args.events else None
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    one = Standalone(
        Journal(args.state_dir),
        run_id=args.rdzv_id,
        security=secure,
        silence=args.silence,
        line=line,
        record=None if log is None else lambda kind, data: log.record(kind, **data),
        on_failed=failed,
    )
    try:
        address = await one.start(host, port)
        print(f"phalanx coordinator listens on {address}", flush=True)
        if not secure.token and not net.is_loopback(host):
            line(f"anybody who reaches {address} can disturb the job: give --token-file")
        await stop.wait()
    finally:
        await one.stop()
    return status
