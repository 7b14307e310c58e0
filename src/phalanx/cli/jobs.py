"""``phalanx jobs``: what a controller knows of its jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cli import common


def main(argv: Sequence[str]) -> int:
    """Prints a line per job. 0; 1: no answer, or no such job."""
    parser = common.parser("phalanx jobs", "Lists a controller's jobs: all, or JOB alone.")
    parser.usage = "phalanx jobs [options] [JOB]"
    parser.add_argument(
        "job", metavar="JOB", nargs="?", default="", help="only this one, with more words"
    )
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    common.controller(parser)
    args = parser.parse_args(argv)

    def work(call: Callable[[str, Any], Any]) -> int:
        from phalanx.proto import control_pb2

        answer = call("Jobs", control_pb2.Query(jobId=args.job))
        if answer.code:
            print(f"phalanx jobs: {answer.info}", file=sys.stderr)
            return 1
        if args.json:
            import json

            names = [f.name for f in control_pb2.JobView.DESCRIPTOR.fields]
            rows = [
                {
                    n: v if isinstance(v := getattr(j, n), str | int | bool) else list(v)
                    for n in names
                }
                for j in answer.jobs
            ]
            print(json.dumps(rows, indent=1))
            return 0
        if not answer.jobs:
            print("phalanx jobs: no job is registered", file=sys.stderr)
        for job in answer.jobs:
            heard = "subscribed" if job.subscribed else "nobody listens"
            doing = f" {job.strategy}" if job.strategy else ""
            faults = f"  faults {','.join(job.faults)}" if job.faults else ""
            last = f"  last: {job.lastOutcome}" if job.lastOutcome else ""
            print(
                f"{job.jobId}  {job.state}{doing}  {heard}  episodes {job.episodes}{faults}{last}"
            )
            if args.job:
                print(f"  enables {', '.join(job.strategies)}")
                if job.lastReason:
                    print(f"  because {job.lastReason}")
        return 0

    return common.ask("phalanx jobs", args, work)
