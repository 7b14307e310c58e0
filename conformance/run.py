"""Runs every case against torch's implementation and against ours, and compares.

    python conformance/run.py [--only PATTERN] [--verbose] [--json FILE] [--jobs N]

Exit status 0: all the same, or different exactly as `expected_differences.py` says; 1:
anything else, and also a case that crashed, hung or raised.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import fnmatch
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import harness  # noqa: E402
from compare import Verdict, as_json, judge, report, summary  # noqa: E402

MODULES = sorted(p.stem for p in HERE.glob("cases_*.py"))
IMPLS = ("torch", "phalanx")
START_LIMIT = 60.0  # seconds for a child to be ready for its first case: torch's import


def load(modules: Iterable[str] = MODULES) -> dict[str, harness.Case]:
    for module in modules:
        importlib.import_module(module)
    return harness.CASES


# ------------------------------------------------------------------ the child: runs cases


def child_main(impl_name: str, names: Sequence[str], report_fd: int) -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: strays come to us
    os.environ.pop("PYTHONWARNINGS", None)
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "TORCH_ELASTIC", "PHALANX_")):
            del os.environ[name]
    os.set_inheritable(report_fd, False)  # what a case executes must not keep it open
    report = os.fdopen(report_fd, "w", buffering=1)

    def say(**message: Any) -> None:
        report.write(json.dumps(message) + "\n")

    cases = load()
    impl = harness.Impl(impl_name)
    if impl_name == "torch":
        impl.mod("run")  # all of the import, before anybody's time limit runs
    me = os.getpid()
    handlers = {n: signal.getsignal(n) for n in (1, 2, 3, 15)}
    environment = dict(os.environ)
    say(ready=True)
    for name in names:
        say(start=name)
        print(f"--- {name}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            seen = as_json(harness.plain(cases[name].function(impl)))
            say(done=name, seen=seen, seconds=time.monotonic() - started)
        except BaseException as error:
            if os.getpid() != me:
                os._exit(1)  # a forked child of a case, on its way up
            if isinstance(error, ModuleNotFoundError):
                short = f"no module {error.name}"
            else:
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                short = f"{type(error).__name__}: {error} ({place})"
            traceback.print_exc()
            say(done=name, broken=short[:500], seconds=time.monotonic() - started)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        sweep()
    say(end=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some threads (torch's store servers, blocked watchdogs) never end


def sweep() -> None:
    """End what a case left behind, other than Python's own helper processes."""
    for pid in harness.children_of(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"resource_tracker" in command:
            continue
        harness.kill_tree(pid)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass


# ------------------------------------------------------------------ the driver


def run_batch(impl: str, cases: Sequence[harness.Case], verbose: bool) -> dict[str, Any]:
    """All cases of a batch; a child that crashes or hangs costs the case it was in."""
    reports: dict[str, Any] = {}
    todo = list(cases)
    while todo:
        current, reports_now, log = run_child(impl, todo)
        reports.update(reports_now)
        if verbose and log:
            sys.stderr.write(f"===== {impl} {todo[0].batch}\n{log}\n")
        if current is not None and current not in reports:
            reports[current] = {"broken": "the process running it died", "log": log[-2000:]}
        before = len(todo)
        todo = [c for c in todo if c.name not in reports]
        if len(todo) == before:
            for c in todo:
                reports[c.name] = {"broken": "the process did not start", "log": log[-2000:]}
            break
    return reports


def run_child(impl: str, cases: Sequence[harness.Case]) -> tuple[str | None, dict[str, Any], str]:
    limits = {c.name: c.timeout for c in cases}
    reader, writer = os.pipe()
    reports: dict[str, Any] = {}
    current: str | None = None
    clock = Clock(START_LIMIT)
    with (
        tempfile.TemporaryFile("w+b") as log,
        # Both sides leave log folders behind; here they are swept with this one.
        tempfile.TemporaryDirectory(prefix="conformance_", ignore_cleanup_errors=True) as scratch,
    ):
        process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "run.py"),
                "--child",
                impl,
                "--report",
                str(writer),
                *(c.name for c in cases),
            ],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "TMPDIR": scratch},
        )
        os.close(writer)
        ended = False
        try:
            for message in messages(reader, clock):
                if message is None:
                    if current is not None:
                        reports[current] = {"broken": f"not done in {limits[current]} s"}
                    break
                if "start" in message:
                    current = message["start"]
                    clock.restart(limits[current])
                elif "done" in message:
                    reports[message["done"]] = message
                    current = None
                    clock.restart(START_LIMIT)
                elif "end" in message:
                    ended = True
                    break
        finally:
            os.close(reader)
            if ended:
                process.wait(10)
            else:
                harness.kill_tree(process.pid)
                process.wait(10)
                sweep_marked()
        log.seek(0)
        text = log.read().decode(errors="replace")
    return current, reports, text


class Clock:
    """How long the child still has for what it is doing, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def messages(fd: int, clock: Clock) -> Iterable[dict[str, Any] | None]:
    """Lines from the child; None when its time is over; ends at end of file."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            left = clock.left()
            if left <= 0 or not selector.select(left):
                yield None
                return
            data = os.read(fd, 1 << 16)
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                yield json.loads(line)


def sweep_marked() -> None:
    """What a killed child left behind has come to us (we are its subreaper)."""
    for pid in harness.children_of(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"--child" not in command.split(b"\0"):
            harness.kill_tree(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def collect(
    cases: Sequence[harness.Case], impls: Sequence[str], jobs: int, verbose: bool
) -> dict[str, dict[str, Any]]:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    batches: dict[str, list[harness.Case]] = {}
    for c in cases:
        batches.setdefault(c.batch, []).append(c)
    # The batch that may take longest first, so that nothing long starts last.
    order = sorted(batches.values(), key=lambda b: -sum(c.timeout for c in b))
    results: dict[str, dict[str, Any]] = {impl: {} for impl in impls}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        work = {
            pool.submit(run_batch, impl, batch, verbose): impl for batch in order for impl in impls
        }
        for done in concurrent.futures.as_completed(work):
            results[work[done]].update(done.result())
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name matches (shell style)")
    parser.add_argument("--verbose", action="store_true", help="show same ones and all output")
    parser.add_argument("--json", metavar="FILE", help="write all observations and verdicts there")
    parser.add_argument("--jobs", type=int, default=max(3, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument("--show", choices=IMPLS, help="only run this side and print what is seen")
    parser.add_argument("--child", choices=IMPLS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child_main(options.child, options.names, options.report)
        return 0

    cases = list(load().values())
    if options.only:
        patterns = options.only.split(",")
        cases = [
            c
            for c in cases
            if any(fnmatch.fnmatch(c.name, p) or c.name.startswith(p + ".") for p in patterns)
        ]
    if options.list:
        for c in cases:
            print(f"{c.name:<40} {c.doc.splitlines()[0] if c.doc else ''}")
        return 0
    if not cases:
        parser.error("no case matches")
    if options.show:
        seen = collect(cases, [options.show], options.jobs, options.verbose)[options.show]
        for c in cases:
            r = seen[c.name]
            seconds = f"({r['seconds']:.2f} s)" if "seconds" in r else ""
            what = json.dumps(r["seen"]) if "seen" in r else "BROKEN " + r["broken"]
            print(c.name, seconds, what)
        return 0

    expected = importlib.import_module("expected_differences").EXPECTED
    started = time.monotonic()
    results = collect(cases, IMPLS, options.jobs, options.verbose)
    verdicts = [
        judge(c.name, results["torch"][c.name], results["phalanx"][c.name], expected) for c in cases
    ]
    if not options.only:
        known = {c.name for c in cases}
        for stray in sorted({d.case for d in expected} - known):
            verdicts.append(Verdict(stray, "broken", ["listed as different, but no such case"], {}))
    if options.json:
        Path(options.json).write_text(
            json.dumps(
                {
                    "verdicts": [dataclasses.asdict(v) for v in verdicts],
                    "torch": results["torch"],
                    "ours": results["phalanx"],
                    "seconds": time.monotonic() - started,
                },
                indent=1,
            )
        )
    text = report(verdicts, options.verbose)
    if text:
        print(text)
    print(f"{summary(verdicts)} ({time.monotonic() - started:.0f} s)")
    return 0 if all(v.kind in ("same", "purpose") for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
