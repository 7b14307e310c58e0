"""``phalanx check``: what a script needs, what can be warm, what could be recovered."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.process.preload import PreloadPlan, PreloadReport, plan_for
from phalanx.process.program import Program
from phalanx.process.scan import ImportScan, scan

TESTED_TORCH = ("2.13",)
_LEAST_SHARED_MEMORY = 256 * 1024 * 1024
_LEAST_FILES = 4096
_MB = 1024 * 1024


@dataclass
class Findings:
    """What `phalanx check` found; with ``--json`` it is printed as it stands.

    ``problems`` would make the job fail, ``notes`` may matter. ``warm`` whether workers can
    be forked from a preloaded process (None: not tried) and ``why_not``; ``why`` the plan is
    what it is.
    """

    script: str
    interpreter: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warm: bool | None = None
    why_not: str = ""
    why: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    measured: dict[str, float] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems


def main(argv: Sequence[str]) -> int:
    """Check one script. Returns 0, or 1 if running it would fail, or 2 for wrong words."""
    parser = _parser()
    try:
        words = parser.parse_args(list(argv))
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 2
    findings = check(
        words.script,
        module=words.module,
        args=words.args,
        preload=words.preload,
        try_imports=not words.no_import,
        timeout=words.timeout,
    )
    if words.json:
        print(json.dumps({"ok": findings.ok, **asdict(findings)}, indent=2))
    else:
        print(text(findings))
    return 0 if findings.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx check",
        description="Says what a script needs, what can be preloaded for it, and from what it "
        "could be recovered. Imports what would be preloaded, in a process of its own; runs "
        "nothing of the script. Exit status 0, or 1 if something would fail.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="also import MODULE; auto: all that the script imports (as for phalanx run)",
    )
    parser.add_argument("--no-import", action="store_true", help="only read, import nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="seconds that the imports may take (default 180)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...")
    return parser


def check(
    script: str,
    *,
    module: bool = False,
    args: Sequence[str] = (),
    preload: Sequence[str] = (),
    try_imports: bool = True,
    timeout: float = 180.0,
) -> Findings:
    """Read the script, try its imports, look at the machine. Never raises for what it finds."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    words = ("-m", script) if module else (script,)
    program = Program(
        argv=(python, "-u", *words, *args),
        script=None if module else script,
        module=script if module else None,
        args=tuple(args),
    )
    seen = scan(program)
    plan = plan_for(seen, [m for m in preload if m != "auto"], auto="auto" in preload)
    findings = Findings(script, python, why=plan.why, plan=plan.to_json())
    if seen.problem is not None and seen.problem.kind != "syntax":
        findings.problems.append(str(seen.problem))
        return findings
    if not seen.complete:
        findings.notes.append(
            "not all of the program's own modules were read: there are too many; name what "
            "else is slow to import with --preload"
        )
    if try_imports:
        _try(findings, seen, plan, timeout)
    elif seen.problem is not None:
        findings.problems.append(str(seen.problem))
    _machine(findings, seen)
    _strategies(findings, seen)
    return findings


# ---------------------------------------------------------------------------------------
# The imports, tried by the interpreter that would run the workers
# ---------------------------------------------------------------------------------------


def _try(findings: Findings, seen: ImportScan, plan: PreloadPlan, timeout: float) -> None:
    order = {
        "plan": plan.to_json(),
        "main": seen.main,
        "names": sorted(seen.imports - seen.local),
    }
    try:
        done = subprocess.run(
            [findings.interpreter, "-u", "-c", "from phalanx.cli.check import inside; inside()"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        findings.problems.append(f"the imports did not end within {timeout:g} s")
        return
    except OSError as error:
        findings.problems.append(f"{findings.interpreter}: {error.strerror or error}")
        return
    try:
        answer = json.loads(done.stdout)
        report = PreloadReport.from_json(answer["report"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if "phalanx" in last and "ModuleNotFoundError" in last:
            last = "phalanx is not installed there"
        findings.problems.append(
            f"{findings.interpreter} did not get through the imports "
            f"(status {done.returncode}): {last}"
        )
        return
    findings.report = report.to_json()
    findings.measured = answer["measured"]
    findings.warm, findings.why_not = report.safe, report.why_not
    if findings.warm and not findings.plan.get("modules"):
        findings.warm, findings.why_not = False, "a fresh interpreter is as quick"
    if answer["syntax"]:
        findings.problems.append(answer["syntax"])
    _missing(findings, seen, answer["missing"])
    for name, failure in report.failed.items():
        top = name.partition(".")[0]
        if top in answer["missing"]:
            continue
        certain = any(c.partition(".")[0] == top for c in seen.certain)
        (findings.problems if certain else findings.notes).append(f"import {name}: {failure}")
    torch = answer["torch"]
    if torch and not torch.startswith(tuple(f"{v}." for v in TESTED_TORCH)):
        findings.notes.append(
            f"torch {torch} is not a version Phalanx is tested with ({', '.join(TESTED_TORCH)})"
        )


def _missing(findings: Findings, seen: ImportScan, missing: Sequence[str]) -> None:
    needed = {name.partition(".")[0] for name in seen.certain}
    for name in missing:
        if name in needed:
            findings.problems.append(f"there is no module {name}, which the script imports")
        elif not seen.changes_path:
            findings.notes.append(
                f"there is no module {name}; it is imported in a function, under a condition or "
                "by another module"
            )


def inside() -> None:
    """The part that runs in the workers' interpreter: an order on stdin, an answer on stdout."""
    import time

    from phalanx.process import bootstrap, preload

    order = json.load(sys.stdin)
    plan = preload.PreloadPlan.from_json(order["plan"])
    if plan.first_path is not None:
        bootstrap.search_path.first = plan.first_path
    syntax = _syntax(order["main"])
    missing = [name for name in order["names"] if not _exists(name)]
    report = preload.perform(plan)
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    answer = {
        "report": report.to_json(),
        "syntax": syntax,
        "missing": missing,
        "torch": getattr(sys.modules.get("torch"), "__version__", ""),
        "measured": {
            "imports_s": round(report.seconds, 3),
            "fork_s": round(time.perf_counter() - begin, 4),
            "memory_mb": _resident() // _MB,
        },
    }
    os.write(1, json.dumps(answer).encode())
    os._exit(0)


def _syntax(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{path}, line {error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{path}: {error}"
    return ""


def _exists(name: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except Exception:  # a module in sys.modules without a spec, a finder that fails
        return name in sys.modules


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------
# The machine, the strategies
# ---------------------------------------------------------------------------------------


def _machine(findings: Findings, seen: ImportScan) -> None:
    import resource

    try:
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
        if free < _LEAST_SHARED_MEMORY and "torch" in seen.imports:
            findings.notes.append(
                f"/dev/shm has {free // _MB} MB free; data loaders pass batches through it "
                "(in a container: --shm-size, or a memory volume)"
            )
    except OSError:
        findings.notes.append("there is no /dev/shm; data loaders with workers need it")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        findings.notes.append(
            f"at most {soft} open files per process (ulimit -n; hard limit {hard}); many ranks "
            "or data loaders need more"
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.path.isdir("/dev/infiniband") and locked != resource.RLIM_INFINITY:
        findings.notes.append(
            f"memory that may be locked is limited to {locked // _MB} MB (ulimit -l), and this "
            "machine has RDMA devices, which need it unlimited"
        )
    if not hasattr(os, "fork") or not os.path.isdir("/proc/self/task"):
        findings.problems.append("this is no Linux with /proc: Phalanx needs both")


def _strategies(findings: Findings, seen: ImportScan) -> None:
    cooperates = any(name.startswith("phalanx.training") for name in seen.dotted)
    start = "with fresh interpreters" if findings.warm is False else "warm"
    findings.strategies["restart"] = (
        f"all workers of the group start again ({start}) and go on from the last checkpoint"
    )
    if cooperates:
        findings.strategies["retry"] = "the step is done again after a passing fault"
        findings.strategies["recover-in-place"] = (
            "only the faulty worker is replaced; the others keep their processes"
        )
        findings.strategies["dump"] = "a checkpoint of the current step before everything stops"
    else:
        findings.notes.append(
            "a plain program: after any fault the whole group starts again. With "
            "phalanx.training only the faulty worker is replaced (docs/training.md)"
        )


def text(findings: Findings) -> str:
    """For a person."""
    rows: list[tuple[str, str]] = []
    modules = findings.plan.get("modules", ())
    if modules:
        step = " and one optimizer step" if findings.plan.get("optimizer_step") else ""
        rows.append(("preload", ", ".join(modules) + step))
        rows.append(("because", findings.why))
    else:
        rows.append(("preload", f"nothing: {findings.why}"))
    if findings.warm is not None:
        rows.append(("warm", "yes" if findings.warm else f"no: {findings.why_not}"))
    if modules and (measured := findings.measured):
        imports, fork, memory = (measured[n] for n in ("imports_s", "fork_s", "memory_mb"))
        once = "once per node instead of once per worker and restart"
        costs = f"a fork {fork * 1000:.0f} ms; {memory:.0f} MB shared by all workers"
        rows.append(("measured", f"imports {imports:.1f} s, {once}; {costs}"))
    rows += findings.strategies.items()
    rows += [("note", note) for note in findings.notes]
    rows += [("PROBLEM", problem) for problem in findings.problems]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [
            f"{findings.script} ({findings.interpreter})",
            *(f"  {name:<{width}}  {what}" for name, what in rows),
            "  ready to run" if findings.ok else "  this would fail",
        ]
    )
