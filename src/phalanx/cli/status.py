"""``phalanx status``: the nodes, ranks and progress of a job, asked from any of its agents."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cli import common, show

PROG = "phalanx status"


def main(argv: Sequence[str]) -> int:
    """Prints it. 0; 1: nobody answers; 2: the options are wrong."""
    parser = common.parser(
        PROG,
        "Shows a job of several nodes: who takes part, with which ranks, how far it "
        "is. Any of its agents will do, from any host that reaches it.",
    )
    add = parser.add_argument
    add(
        "--endpoint",
        default=os.environ.get("PHALANX_ENDPOINT", "127.0.0.1:29400"),
        metavar="HOST:PORT",
        help="an agent, or the coordinator; default: $PHALANX_ENDPOINT or 127.0.0.1:29400",
    )
    add("--json", action="store_true", help="all of it, as a JSON object")
    add(
        "--watch",
        nargs="?",
        type=common.seconds,
        const=1.0,
        metavar="S",
        help="again every S seconds",
    )
    add("--timeout", type=common.seconds, default=5.0, metavar="S", help="default: %(default)s s")
    common.agents(parser)
    args = parser.parse_args(argv)
    if common.lacks_grpc(PROG):
        return 1
    import asyncio

    from phalanx.coordinator.security import SecurityError

    try:
        return asyncio.run(_run(args))
    except (SecurityError, ValueError) as error:
        return common.complain(PROG, error, 2)
    except KeyboardInterrupt:
        return 130


async def _run(args: argparse.Namespace) -> int:
    import asyncio
    import json

    from phalanx.coordinator import link, net

    secure = common.security(args)
    while True:
        try:
            status = await link.status(args.endpoint, secure, args.timeout)
        except net.Unreachable as error:
            common.complain(PROG, f"{args.endpoint}: {error}", 1)
            status = None
        except link.Refused as error:
            return common.complain(PROG, error, 1)
        if status is not None:
            clear = "\033[H\033[2J" if args.watch and not args.json and sys.stdout.isatty() else ""
            if show(clear + (json.dumps(status) if args.json else text(status))):
                return 1
        if args.watch is None:
            return 0 if status is not None else 1
        await asyncio.sleep(args.watch)


def text(status: Mapping[str, Any]) -> str:
    """The status for a person."""
    from phalanx.agent.report import ranges

    if "nodes" not in status:
        where = status.get("moved") or "nowhere that it knows of"
        return f"job {status['run_id']}: {status['endpoint']} is an agent; coordinator: {where}"
    verdict = status["verdict"]
    if verdict is not None:
        how = "succeeded" if verdict["success"] else f"failed: {verdict['reason']}"
    elif not status["generation"]:
        how = "waiting for nodes"
    else:
        how = f"generation {status['generation']}, attempt {status['attempt']}"
        how += f", world {status['world']}"
    step = f", step {status['step']}" if status["step"] is not None else ""
    age = f" {status['progress_age']:.0f} s ago" if status["progress_age"] is not None else ""
    nodes = f"{status['least']}:{status['most']}"
    rows = [("node", "address", "ranks", "step", "state")]
    for node in status["nodes"]:
        if not node["connected"]:
            state = f"gone ({node['gone']})"
        elif node["ranks"]:
            state = "trains" if verdict is None else "done"
        else:
            state = node["waiting"] or "waits"
        rows.append(
            (
                str(node["host"] or node["id"]),
                str(node["address"]),
                ranges(node["ranks"]) or "-",
                "-" if node["step"] is None else str(node["step"]),
                state,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"job {status['run_id']}, nodes {nodes}: {how}{step}{age}",
        f"coordinator {status['endpoint']}, term {status['term']}",
    ]
    for row in rows:
        lines.append("  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)).rstrip())
    return "\n".join(lines)
