"""``phalanx status``: the nodes, ranks and progress of a job, asked from any of its agents."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cli.coordinator import security_options


def main(argv: Sequence[str]) -> int:
    """Prints it. 0; 1: nobody answers; 2: the options are wrong."""
    parser = argparse.ArgumentParser(
        prog="phalanx status",
        description="Shows a job of several nodes: who takes part, with which ranks, how far it "
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
    add("--watch", nargs="?", type=float, const=1.0, metavar="S", help="again every S seconds")
    add("--timeout", type=float, default=5.0, metavar="S")
    security_options(parser)
    args = parser.parse_args(argv)
    if args.timeout <= 0 or (args.watch is not None and args.watch <= 0):
        print("phalanx status: seconds are more than 0", file=sys.stderr)
        return 2
    try:
        import grpc  # noqa: F401
    except ImportError as error:
        print(f"phalanx status: {error}; pip install grpcio protobuf", file=sys.stderr)
        return 1
    import asyncio

    from phalanx.coordinator.security import SecurityError

    try:
        return asyncio.run(_run(args))
    except (SecurityError, ValueError) as error:
        print(f"phalanx status: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(args: argparse.Namespace) -> int:
    import asyncio
    import json

    from phalanx.cli import show
    from phalanx.coordinator import link, net, security

    secure = security.load(
        token_file=args.token_file,
        certificate=args.tls_cert,
        key=args.tls_key,
        ca=args.tls_ca,
        name=args.tls_name,
    )
    while True:
        try:
            status = await link.status(args.endpoint, secure, args.timeout)
        except net.Unreachable as error:
            print(f"phalanx status: {args.endpoint}: {error}", file=sys.stderr)
            status = None
        except link.Refused as error:
            print(f"phalanx status: {error}", file=sys.stderr)
            return 1
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
