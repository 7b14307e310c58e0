"""``phalanx fault report|clear|list``: device and node faults, told to or asked of a controller."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cli import common
from phalanx.recovery.devices import KNOWN_LEVELS


def main(argv: Sequence[str]) -> int:
    """0; 1: no answer, or the controller did not take it."""
    parser = argparse.ArgumentParser(
        prog="phalanx fault", description="Tells a controller of broken nodes and devices."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="report|clear|list")
    report = verbs.add_parser("report", help="something is broken")
    report.add_argument("id", help="a name to clear it by")
    report.add_argument("--node", required=True, metavar="NAME")
    report.add_argument(
        "--device",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="of the node; may be given several times; none: the node itself",
    )
    report.add_argument(
        "--level",
        default="SeparateNPU",
        help=f"{', '.join(KNOWN_LEVELS)} (default: %(default)s)",
    )
    report.add_argument("--code", default="")
    report.add_argument("--text", default="", help="for people")
    clear = verbs.add_parser("clear", help="it works again")
    clear.add_argument("id")
    clear.add_argument("--node", default="", metavar="NAME")
    show = verbs.add_parser("list", help="what is broken")
    show.add_argument("--job", default="", help="only on this job's nodes")
    for one in (report, clear, show):
        common.controller(one)
    args = parser.parse_args(argv)

    def work(call: Callable[[str, Any], Any]) -> int:
        from phalanx.proto import control_pb2

        if args.verb == "report":
            answer = call(
                "ReportFault",
                control_pb2.DeviceFault(
                    faultId=args.id,
                    nodeName=args.node,
                    devices=args.device,
                    level=args.level,
                    code=args.code,
                    description=args.text,
                ),
            )
        elif args.verb == "clear":
            answer = call(
                "ClearFault", control_pb2.FaultReference(faultId=args.id, nodeName=args.node)
            )
        else:
            answer = call("Faults", control_pb2.Query(jobId=args.job))
        if answer.code:
            print(f"phalanx fault: {answer.info} (code {answer.code})", file=sys.stderr)
            return 1
        if args.verb != "list":
            print(answer.info)
            return 0
        if not answer.faults:
            print("phalanx fault: nothing is reported broken", file=sys.stderr)
        for fault in answer.faults:
            where = fault.nodeName or fault.nodeSN
            devices = f" devices {','.join(map(str, fault.devices))}" if fault.devices else ""
            text = f"  {fault.description}" if fault.description else ""
            print(f"{fault.faultId}  {where}{devices}  {fault.level}  {fault.code}{text}")
        return 0

    return common.ask("phalanx fault", args, work)
