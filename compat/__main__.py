"""``python -m compat [--fuzz N] [NAME ...]``: every compatibility check, one line each."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from compat import checks, fuzz
from compat.harness import Controller


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m compat")
    parser.add_argument("names", nargs="*", help="only checks whose name contains one of these")
    parser.add_argument(
        "--fuzz",
        type=int,
        default=100_000,
        metavar="N",
        help="malformed messages to send (default: %(default)s; 0: none)",
    )
    args = parser.parse_args()
    failed = 0
    for function in checks.CHECKS:
        if args.names and not any(name in function.__name__ for name in args.names):
            continue
        title = function.__name__.replace("_", " ")
        started = time.monotonic()
        try:
            text = function()
        except Exception:
            failed += 1
            traceback.print_exc()
            text = "FAILED"
        print(f"{title:<58} {time.monotonic() - started:6.1f} s  {text}", flush=True)
    if args.fuzz and not args.names:
        started = time.monotonic()
        try:
            with Controller("--calls-per-second", "1000000") as controller:
                report = fuzz.run(controller, args.fuzz)
            grown = report.memory_after - report.memory_before
            text = (
                f"{report.sent} sent: {report.codes} answered, {report.errors} refused, "
                f"{report.lost} lost; memory {grown / 1e6:+.1f} MB; another job recovered "
                f"{report.bystander_rounds} times meanwhile"
            )
            if report.lost or grown > 16 << 20:
                failed += 1
                text += "  FAILED"
        except Exception:
            failed += 1
            traceback.print_exc()
            text = "FAILED"
        print(f"{'malformed messages':<58} {time.monotonic() - started:6.1f} s  {text}")
    print("all checks passed" if not failed else f"{failed} checks FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
