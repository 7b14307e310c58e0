"""start_processes and what it is made of: ends, logs, signals (T70 to T95)."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import entrypoints
from cases_local import failure
from harness import (
    Impl,
    alive,
    case,
    env,
    folder,
    gone,
    logs_of,
    outcome,
    plain,
    raised,
    stderr_fd,
    until,
)


def start(
    impl: Impl,
    entrypoint: Any,
    args: Any = (),
    workers: int = 1,
    *,
    d: Path | None = None,
    logs: Any = None,
    envs: dict[str, str] | None = None,
    method: str = "fork",
    **more: Any,
) -> Any:
    if logs is None:
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d) if d else None)
    return impl.mp.start_processes(
        name="trainer",
        entrypoint=entrypoint,
        args=args if isinstance(args, dict) else {r: tuple(args) for r in range(workers)},
        envs={r: {"LOCAL_RANK": str(r), "RANK": str(r), **(envs or {})} for r in range(workers)},
        logs_specs=logs,
        start_method=method,
        **more,
    )


def end(impl: Impl, context: Any, timeout: float = 30) -> Any:
    """How a context ended, without pids and paths."""
    pids = list(context.pids().values())
    result = context.wait(timeout, 0.05)
    if result is None:
        context.close()
        return "still running"
    return {
        "failed": result.is_failed(),
        "values": plain(result.return_values),
        "failures": {str(r): failure(f) for r, f in sorted(result.failures.items())},
        "gone": all(gone(p) for p in pids),
        "tails stopped": all(t.stopped() for t in context._tail_logs),
    }


SAY = 'echo "out $LOCAL_RANK"; echo "err $LOCAL_RANK" >&2'


@case("T70.std_from_str")
def std_from_str(impl: Impl) -> Any:
    """Masks as text."""
    good = "0 1 2 3 0:1 0:1,1:2 0:1,1:0,2:3 0:3 10:1 0:1,10:3".split()
    bad = "4 -1 11 0:1, 0:1,1 1,0:1 a 0:a 0:4".split()
    table = [*good, *bad, "", " 1", "0: 1"]
    return {t: outcome(lambda t=t: impl.mp.Std.from_str(t)) for t in table}


@case("T71.to_map")
def to_map(impl: Impl) -> Any:
    """Masks by rank."""
    std = impl.mp.Std
    return {
        "scalar": impl.mp.to_map(std.OUT, 2),
        "map": impl.mp.to_map({0: std.OUT, 3: std.ERR}, 2),
        "empty": impl.mp.to_map({}, 2),
        "all": impl.mp.to_map(std.ALL, 1),
    }


@case("T72.sizes")
def sizes(impl: Impl) -> Any:
    """Arguments and environments must be of all ranks."""

    def go(args: Any, envs: Any) -> Any:
        return impl.mp.start_processes(
            "trainer", "/bin/true", args, envs, impl.mp.DefaultLogsSpecs()
        )

    return {
        "args": outcome(lambda: go({0: ()}, {0: {}, 1: {}}), text=True),
        "envs": outcome(lambda: go({0: (), 1: ()}, {0: {}}), text=True),
        "gap": raised(lambda: go({0: (), 2: ()}, {0: {}, 2: {}})),
        "nobody": raised(lambda: go({}, {})),
    }


@case("T73.missing_program")
def missing(impl: Impl) -> Any:
    """A program that is not there, for one rank of two too."""
    before = set(_children())
    return {
        "raised": raised(lambda: start(impl, "/does/not/exist", workers=2)),
        "left": len(set(_children()) - before),
    }


def _children() -> list[int]:
    import harness

    return harness.children_of(os.getpid())


@case("T74.wait")
def wait(impl: Impl) -> Any:
    """wait(timeout): None while running, the result later; closing ends it."""
    context = start(impl, "/bin/sh", ("-c", "exec sleep 60"), 2)
    pids = context.pids()
    first = context.wait(0)
    started = time.monotonic()
    second = context.wait(0.3, 0.1)
    took = time.monotonic() - started
    context.close()
    ended = [gone(p) for p in pids.values()]
    short = start(impl, "/bin/sh", ("-c", "exit 0"), 2)
    return {
        "pids": [sorted(pids), all(isinstance(p, int) for p in pids.values())],
        "running": [first, second, 0.2 < took < 5],
        "closed": ended,
        "close twice": raised(context.close),
        "ended": end(impl, short),
        "start twice": raised(short.start),
    }


@case("T75.values")
def values(impl: Impl) -> Any:
    """Return values of functions."""
    shown = {}
    with folder() as d:
        context = start(impl, entrypoints.echo, {0: ("a",), 1: ("b",)}, 2, d=d)
        shown["fork"] = end(impl, context)
    with folder() as d:
        context = start(impl, entrypoints.large, (200_000,), 2, d=d)
        result = context.wait(10, 0.05)
        shown["large"] = {str(r): len(v) for r, v in result.return_values.items()}
    return shown


@case("T75.unpicklable_value")
def unpicklable(impl: Impl) -> Any:
    """A value that cannot be sent back."""
    seen = end(impl, start(impl, _unpicklable), 3)
    if isinstance(seen, dict):
        return {"failed": seen["failed"]}
    return seen


def _unpicklable() -> Any:
    return lambda: 1


@case("T76.raising")
def raising(impl: Impl) -> Any:
    """Rank 0 of two raises; where its error file is."""
    with folder() as d:
        context = start(impl, entrypoints.fail_on_rank, (0, "oh no"), 2, d=d)
        result = context.wait(10, 0.05)
        found = result.failures[0]
        relative = Path(found.error_file).relative_to(d).parts
        import json

        content = json.loads(Path(found.error_file).read_text())
        return {
            "ranks": sorted(result.failures),
            "code": found.exitcode,
            "file": ["<RUN>", *relative[1:]],
            "run folder": relative[0].startswith("test_run_id_"),
            "keys": [
                sorted(content),
                sorted(content["message"]),
                sorted(content["message"]["extraInfo"]),
            ],
            "message": content["message"]["message"],
            "timestamp": type(content["message"]["extraInfo"]["timestamp"]).__name__,
            "callstack": content["message"]["extraInfo"]["py_callstack"].strip().splitlines()[-1],
            "values": plain(result.return_values),
            "std": [result.stdouts, result.stderrs],
        }


@case("T77.function_exit_code")
def exit_code(impl: Impl) -> Any:
    """A function worker that exits with a status of its own."""
    return {
        "138": end(impl, start(impl, entrypoints.leave, (138,))),
        "sys.exit(3)": end(impl, start(impl, entrypoints.exits, (3,))),
    }


@case("T77.function_sys_exit_0")
def sys_exit_0(impl: Impl) -> Any:
    """sys.exit(0) in a function worker."""
    return end(impl, start(impl, entrypoints.exits, (0,)), 3)


@case("T78.program_exit_code")
def program_exit_code(impl: Impl) -> Any:
    """A program's status; its output in files."""
    with folder() as d:
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.ALL)
        context = start(impl, "/bin/sh", ("-c", SAY + "; exit 138"), logs=logs)
        result = context.wait(10, 0.05)
        return {
            "failures": {str(r): failure(f) for r, f in result.failures.items()},
            "texts": [Path(result.stdouts[0]).read_text(), Path(result.stderrs[0]).read_text()],
        }


@case("T79.signals")
def signals(impl: Impl) -> Any:
    """Programs and functions that die of a signal."""
    shown = {}
    for name in ("SEGV", "KILL", "ABRT", "TERM"):
        shown[name] = end(impl, start(impl, "/bin/sh", ("-c", f"kill -{name} $$")))
    shown["function"] = end(
        impl, start(impl, entrypoints.die_first, (0,), envs={"TORCHELASTIC_RESTART_COUNT": "0"})
    )
    return shown


@case("T80.siblings")
def siblings(impl: Impl) -> Any:
    """Who is reported when one of three fails: programs, functions."""
    script = 'if [ "$LOCAL_RANK" = 1 ]; then exit 4; fi; exec sleep 60'
    return {
        "program": end(impl, start(impl, "/bin/sh", ("-c", script), 3)),
        "function": end(impl, start(impl, entrypoints.fail_on_rank, (1,), 3)),
    }


def _texts(d: Path) -> dict[str, str]:
    """Log files below a log folder by path, the run's folder name left out."""
    found = {}
    for path in sorted(d.rglob("*")):
        if path.is_file():
            parts = path.relative_to(d).parts
            found["/".join(["<RUN>", *parts[1:]])] = path.read_text()
    return found


@case("T81.redirects")
def redirects(impl: Impl) -> Any:
    """Which streams go to which files; programs and functions."""
    std = impl.mp.Std
    shown = {}
    for label, options in (
        ("none", {}),
        ("all", {"redirects": std.ALL}),
        ("by rank", {"redirects": {0: std.ERR}}),
        ("out", {"redirects": std.OUT}),
    ):
        for kind, entry, args in (
            ("program", "/bin/sh", ("-c", SAY)),
            ("function", entrypoints.say, ("o", "e")),
        ):
            with folder() as d, stderr_fd():
                logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), **options)
                context = start(impl, entry, args, 2, logs=logs)
                result = context.wait(10, 0.05)
                shown[f"{label}, {kind}"] = [
                    _texts(d),
                    {str(r): bool(p) for r, p in sorted(result.stdouts.items())},
                    {str(r): bool(p) for r, p in sorted(result.stderrs.items())},
                ]
    return shown


@case("T81.tee")
def tee(impl: Impl) -> Any:
    """Tee'd streams go to the file and, with a prefix, to the console."""
    std = impl.mp.Std
    with folder() as d, stderr_fd() as written:
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects={0: std.ERR}, tee={1: std.ERR})
        context = start(impl, "/bin/sh", ("-c", 'echo "err $LOCAL_RANK" >&2'), 3, logs=logs)
        context.wait(10, 0.05)
        return {
            "files": _texts(d),
            "console": sorted(x for x in written().splitlines() if "err" in x),
        }


@case("T81.prefixes")
def prefixes(impl: Impl) -> Any:
    """Prefixes as given to start_processes."""
    with folder() as d, stderr_fd() as written:
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), tee=impl.mp.Std.ERR)
        context = start(
            impl,
            "/bin/sh",
            ("-c", 'printf "one\\ntwo\\n" >&2'),
            2,
            logs=logs,
            log_line_prefixes={0: "zero|"},
        )
        context.wait(10, 0.05)
        return sorted(x for x in written().splitlines() if "one" in x or "two" in x)


@case("T82.local_ranks_filter")
def ranks_filter(impl: Impl) -> Any:
    """Only the named ranks are heard."""
    std = impl.mp.Std
    shown = {}
    for label, options in (
        ("tee", {"tee": std.ERR, "local_ranks_filter": {1}}),
        ("plain", {"local_ranks_filter": {1}}),
        ("empty", {"local_ranks_filter": set()}),
        ("redirect", {"redirects": std.ERR, "local_ranks_filter": {0}}),
    ):
        with folder() as d, stderr_fd() as written:
            logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), **options)
            context = start(impl, "/bin/sh", ("-c", 'echo "err $LOCAL_RANK" >&2'), 2, logs=logs)
            context.wait(10, 0.05)
            console = sorted(x for x in written().splitlines() if "err" in x)
            shown[label] = [_texts(d), console]
    return shown


@case("T83.duplicate_filters")
def duplicate(impl: Impl) -> Any:
    """Matching lines of tee'd ranks also go to one file per stream."""
    std = impl.mp.Std
    with folder() as d, stderr_fd():
        logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=std.ALL, tee={0: std.ERR})
        script = 'for w in good bad ugly; do echo "$w $LOCAL_RANK"; echo "$w $LOCAL_RANK" >&2; done'
        context = start(
            impl,
            "/bin/sh",
            ("-c", script),
            2,
            logs=logs,
            duplicate_stdout_filters=["good"],
            duplicate_stderr_filters=["bad", "ugly"],
        )
        context.wait(10, 0.05)
        return {"files": _texts(d), "tails": len(context._tail_logs)}


@case("T93.log_paths")
def log_paths(impl: Impl) -> Any:
    """Where DefaultLogsSpecs puts things."""
    std = impl.mp.Std
    shown: dict[str, Any] = {}
    with folder() as d:
        root = d / "new" / "deep"
        specs = impl.mp.DefaultLogsSpecs(log_dir=str(root), redirects=std.OUT, tee={1: std.ERR})
        envs = {
            r: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for r in (0, 1)
        }
        dest = specs.reify(envs)

        def short(path: str) -> str:
            if not path or not path.startswith(str(root)):
                return path
            parts = Path(path).relative_to(root).parts
            return "/".join([parts[0][:4] + "<X>", *parts[1:]])

        for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
            shown[name] = {str(r): short(p) for r, p in sorted(getattr(dest, name).items())}
        shown["filtered"] = [short(dest.filtered_stdout), short(dest.filtered_stderr)]
        shown["envs"] = {str(r): {k: short(v) for k, v in e.items()} for r, e in envs.items()}
        shown["root"] = specs.root_log_dir == str(root)
        shown["made"] = sorted(short(str(p)) for p in root.rglob("*"))
        first = Path(dest.stdouts[0]).parent.parent
        envs = {
            r: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "3"} for r in (0, 1)
        }
        third = specs.reify(envs)
        shown["same run folder"] = Path(third.stdouts[0]).parents[2] == first.parent
    return shown


@case("T93.same_attempt_twice")
def same_attempt(impl: Impl) -> Any:
    """The same attempt again: what becomes of the files of the first time."""
    with folder() as d:
        specs = impl.mp.DefaultLogsSpecs(log_dir=str(d), redirects=impl.mp.Std.ALL)
        envs: dict[int, dict[str, str]] = {0: {"TORCHELASTIC_RESTART_COUNT": "0"}}
        one = specs.reify(envs)
        Path(one.stdouts[0]).write_text("first")
        two = specs.reify({0: {"TORCHELASTIC_RESTART_COUNT": "0"}})
        first = Path(one.stdouts[0])
        return {
            "kept": first.exists() and first.read_text() == "first",
            "same path": one.stdouts[0] == two.stdouts[0],
        }


@case("T93.log_dir_kinds")
def log_dir_kinds(impl: Impl) -> Any:
    """A file, /dev/null, nothing, the empty string as log folder."""
    with folder() as d:
        (d / "file").write_text("")
        null = impl.mp.DefaultLogsSpecs(
            log_dir=os.devnull, redirects=impl.mp.Std.ALL, tee=impl.mp.Std.OUT
        )
        envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
        dest = null.reify(envs)
        default = impl.mp.DefaultLogsSpecs()
        made = impl.mp.DefaultLogsSpecs(log_dir="")
        return {
            "file": raised(lambda: impl.mp.DefaultLogsSpecs(log_dir=str(d / "file"))),
            "null": [
                plain(dest.stdouts),
                plain(dest.stderrs),
                plain(dest.tee_stdouts),
                plain(dest.tee_stderrs),
                plain(dest.error_files),
                plain(envs),
            ],
            "default": os.path.basename(default.root_log_dir)[:13],
            "default exists": os.path.isdir(default.root_log_dir),
            "empty": os.path.basename(made.root_log_dir)[:13],
            "null runs": end(impl, start(impl, "/bin/sh", ("-c", "exit 0"), logs=null)),
            "null error": end(impl, start(impl, entrypoints.fail, logs=null)),
        }


@case("T93.custom_logs_specs")
def custom_logs(impl: Impl) -> Any:
    """A LogsSpecs of the user's own."""

    class Mine(impl.mp.LogsSpecs):  # type: ignore[misc, name-defined]
        def __init__(self, where: Path) -> None:
            super().__init__(str(where), impl.mp.Std.ALL, impl.mp.Std.NONE, {0})
            self.where = where

        @property
        def root_log_dir(self) -> str:
            return str(self.where)

        def reify(self, envs: Any) -> Any:
            out = {r: str(self.where / f"{r}.out") for r in envs}
            errors = {r: str(self.where / f"{r}.json") for r in envs}
            return impl.mp.LogsDest(
                stdouts=out, stderrs=dict.fromkeys(envs, os.devnull), error_files=errors
            )

    with folder() as d:
        specs = Mine(d)
        context = start(impl, "/bin/sh", ("-c", SAY), 2, logs=specs)
        result = context.wait(10, 0.05)
        return {
            "attributes": [
                specs._root_log_dir == str(d),
                plain(specs._redirects),
                plain(specs._tee),
                plain(specs._local_ranks_filter),
            ],
            "files": {p.name: p.read_text() for p in sorted(d.iterdir())},
            "stdouts": {str(r): os.path.basename(p) for r, p in result.stdouts.items()},
        }


@case("T84.close_signals")
def close_signals(impl: Impl) -> Any:
    """close(signal): that signal reaches the workers."""
    shown = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        with folder() as d:
            script = (
                f"trap 'echo {number.name} > {d}/got; exit 0' {number.name[3:]}; : > {d}/up;"
                " while :; do sleep 0.05; done"
            )
            context = start(impl, "/bin/sh", ("-c", script))
            until((d / "up").exists)
            context.close(number, 5)
            shown[number.name] = (d / "got").read_text().strip() if (d / "got").exists() else None
    return shown


@case("T85.close_timeout")
def close_timeout(impl: Impl) -> Any:
    """Workers that ignore the signal: killed after the timeout; programs and functions."""
    shown = {}
    for kind in ("program", "function"):
        with folder() as d:
            if kind == "program":
                script = f"trap '' TERM; echo $$ > {d}/0; while :; do sleep 0.1; done"
                context = start(impl, "/bin/sh", ("-c", script))
            else:
                context = start(impl, entrypoints.ignore_and_wait, (str(d),))
            until(lambda d=d: (d / "0").exists() and (d / "0").read_text().strip())
            pid = int((d / "0").read_text())
            started = time.monotonic()
            context.close(signal.SIGTERM, 1)
            took = time.monotonic() - started
            shown[kind] = [gone(pid), 0.8 < took < 4]
    return shown


@case("T84.group_of_a_program")
def group(impl: Impl) -> Any:
    """Closing reaches a program's children too."""
    with folder() as d:
        script = f"sleep 60 & echo $! > {d}/child; : > {d}/up; wait"
        context = start(impl, "/bin/sh", ("-c", script))
        until((d / "up").exists)
        child = int((d / "child").read_text())
        context.close(signal.SIGTERM, 5)
        ended = gone(child, 2)
        if not ended:
            os.kill(child, 9)
    return {"child ended": ended}


_kept: list[Any] = []


def _keep(context: Any) -> None:
    _kept.append(context)


@case("T86.handlers")
def handlers(impl: Impl) -> Any:
    """Which signals are handled, by TORCHELASTIC_SIGNALS_TO_HANDLE."""
    shown = {}
    for label, value in (
        ("default", None),
        ("two", "SIGUSR1,SIGUSR2"),
        ("blanks", " SIGTERM , SIGUSR1 "),
        ("unknown", "SIGTERM,SIGNONSENSE"),
        ("empty", ""),
        ("kill", "SIGKILL"),
    ):
        before = {n: signal.getsignal(n) for n in (1, 2, 3, 10, 12, 15)}
        for n in before:
            signal.signal(n, signal.SIG_DFL)
        with env(TORCHELASTIC_SIGNALS_TO_HANDLE=value):
            context = outcome(lambda: _keep(start(impl, "/bin/sh", ("-c", "exec sleep 60"))))
        shown[label] = {
            "raised": context.get("raised"),
            "handled": [
                signal.Signals(n).name
                for n in before
                if signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN)
            ],
        }
        while _kept:
            _kept.pop().close()
        for n, h in before.items():
            signal.signal(n, h)
    return shown


@case("T86.handler_raises")
def handler_raises(impl: Impl) -> Any:
    """A signal while waiting comes out as SignalException."""
    context = start(impl, "/bin/sh", ("-c", "exec sleep 60"))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        context.wait(10, 0.1)
        seen: Any = "nothing"
    except impl.mp.SignalException as error:
        seen = [
            str(error).replace(str(os.getpid()), "<PID>"),
            plain(error.sigval),
            type(error.sigval).__name__,
        ]
    timer.join()
    context.close()
    handler = impl.get("elastic.multiprocessing.api:_terminate_process_handler")
    try:
        handler(signal.SIGINT, None)
    except impl.mp.SignalException as error:
        direct = [str(error).replace(str(os.getpid()), "<PID>"), plain(error.sigval)]
    return {"waiting": seen, "direct": direct}


@case("T86.other_thread")
def other_thread(impl: Impl) -> Any:
    """Started off the main thread: no handlers, a warning, and it works."""
    seen: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)

    def go() -> None:
        seen.append(end(impl, start(impl, "/bin/sh", ("-c", "exit 0"))))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(15)
    return {"end": seen, "handler unchanged": signal.getsignal(signal.SIGTERM) is before}


@case("T86.restored_afterwards")
def restored(impl: Impl) -> Any:
    """Handlers once the context is closed."""
    for n in (1, 2, 3, 15):
        signal.signal(n, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    context = start(impl, "/bin/sh", ("-c", "exec sleep 60"))
    during = {signal.Signals(n).name: _kind(signal.getsignal(n)) for n in (1, 15)}
    context.close()
    after = {signal.Signals(n).name: _kind(signal.getsignal(n)) for n in (1, 15)}
    return {"during": during, "after": after}


def _kind(handler: Any) -> str:
    return {signal.SIG_DFL: "default", signal.SIG_IGN: "ignored"}.get(handler, "handled")


@case("T94.redirect")
def redirect(impl: Impl) -> Any:
    """redirect: the descriptor, also for child processes; put back afterwards."""
    module = impl.mod("elastic.multiprocessing.redirects")
    with folder() as d:
        target = d / "err"
        with stderr_fd() as written:
            print("before", file=sys.stderr, flush=True)
            with module.redirect_stderr(str(target)):
                print("python", file=sys.stderr)
                os.system("echo child >&2")
                os.write(2, b"raw\n")
            print("after", file=sys.stderr, flush=True)
            outside = written().split()
        again = d / "out"
        again.write_text("old")
        sys.stdout.flush()
        saved = os.dup(1)
        with module.redirect("stdout", str(again)):
            print("new")
        restored = os.fstat(1).st_ino == os.fstat(saved).st_ino
        os.close(saved)
        return {
            "inside": sorted(target.read_text().split()),
            "outside": outside,
            "truncated": again.read_text(),
            "restored": restored,
            "bad name": raised(lambda: module.redirect("stdin", str(target)).__enter__()),
            "after error": raised(lambda: _raise_inside(module, str(d / "x"))),
        }


def _raise_inside(module: Any, path: str) -> None:
    with module.redirect_stderr(path):
        raise KeyError("x")


@case("T94.std_cm")
def std_cm(impl: Impl) -> Any:
    """get_std_cm: nothing for an empty path."""
    get = impl.get("elastic.multiprocessing.api:get_std_cm")
    called: list[str] = []

    def fake(path: str) -> Any:
        import contextlib

        called.append(path)
        return contextlib.nullcontext()

    with get("", fake), get("path", fake):
        pass
    return called


@case("T95.tail_log")
def tail_log(impl: Impl) -> Any:
    """TailLog: files that come late, the rest at stop, prefixes, a filter."""
    tail = impl.get("elastic.multiprocessing.tail_log:TailLog")
    with folder() as d:
        out = io.StringIO()
        (d / "0").write_text("a\nb\n")
        log = tail("name", {0: str(d / "0"), 1: str(d / "1")}, out, interval_sec=0.02)
        same = log.start() is log
        (d / "1").write_text("late\n")
        until(lambda: out.getvalue().count("\n") == 3, 3)
        with open(d / "0", "a") as f:
            f.write("no newline")
        before = log.stopped()
        log.stop()
        filtered = io.StringIO()
        other = tail(
            "n", {0: str(d / "0")}, filtered, {0: "P "}, 0.02, lambda line: "b" in line
        ).start()
        other.stop()
        none = tail("n", {}, filtered).start()
        none.stop()
        return {
            "lines": sorted(out.getvalue().splitlines()),
            "start returns self": same,
            "stopped": [before, log.stopped(), none.stopped()],
            "filtered": filtered.getvalue(),
        }


@case("T95.tail_error")
def tail_error(impl: Impl) -> Any:
    """A destination that cannot be written: logged, not raised."""
    tail = impl.get("elastic.multiprocessing.tail_log:TailLog")

    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError("full")

    with folder() as d:
        (d / "0").write_text("a\n")
        log = tail("name", {0: str(d / "0")}, Broken(), interval_sec=0.02).start()
        time.sleep(0.1)
        return {"stop": raised(log.stop), "stopped": log.stopped()}


@case("T95.no_destination")
def no_destination(impl: Impl) -> Any:
    """No destination: nothing is started."""
    tail = impl.get("elastic.multiprocessing.tail_log:TailLog")
    with folder() as d:
        (d / "0").write_text("a\n")
        log = tail("name", {0: str(d / "0")}, None).start()
        return {"stop": raised(log.stop)}


@case("T95.tail_logfile")
def tail_logfile(impl: Impl) -> Any:
    """The function itself, with and without a filter."""
    function = impl.get("elastic.multiprocessing.tail_log:tail_logfile")
    finished = threading.Event()
    finished.set()
    with folder() as d:
        (d / "0").write_text("a\nb\n")
        shown = {}
        for label, pick in (("none", None), ("all", lambda _line: True), ("b", lambda x: "b" in x)):
            out = io.StringIO()
            function("h:", str(d / "0"), out, finished, 0.02, pick)
            shown[label] = out.getvalue()
        out = io.StringIO()
        function("h:", str(d / "missing"), out, finished, 0.02, lambda _line: True)
        shown["missing"] = out.getvalue()
    return shown


@case("T73.subprocess_handler")
def subprocess_handler(impl: Impl) -> Any:
    """SubprocessHandler: arguments as text, own session, log files, close."""
    get = impl.get("elastic.multiprocessing.subprocess_handler:get_subprocess_handler")
    with folder() as d:
        handler = get(
            "/bin/sh",
            ("-c", 'echo "$0 $1 $X"; exec sleep 60', 1, 2.5),
            {"X": "y"},
            str(d / "o"),
            "",
            3,
            None,
        )
        pid = handler.proc.pid
        until(lambda: (d / "o").read_text())
        shown = {
            "popen": isinstance(handler.proc, subprocess.Popen),
            "has": [hasattr(handler.proc, n) for n in ("pid", "poll", "wait", "returncode")],
            "rank": handler.local_rank_id,
            "session": os.getsid(pid) == pid,
            "out": (d / "o").read_text(),
            "running": handler.proc.poll(),
        }
        handler.close(signal.SIGTERM)
        shown["code"] = handler.proc.wait(5)
    return shown


@case("T74.attributes")
def attributes(impl: Impl) -> Any:
    """A context's attributes."""
    context = start(impl, "/bin/sh", ("-c", "exit 0"), 2)
    other = start(impl, entrypoints.nothing)
    shown = {
        "kinds": [
            type(context).__name__,
            type(other).__name__,
            isinstance(context, impl.mp.SubprocessContext),
            isinstance(other, impl.mp.MultiprocessContext),
        ],
        "name": context.name,
        "entrypoint": context.entrypoint,
        "nprocs": context.nprocs,
        "args": plain(context.args),
        "envs": {str(r): sorted(e) for r, e in context.envs.items()},
        "error_files": {str(r): os.path.basename(p) for r, p in context.error_files.items()},
        "tails": len(context._tail_logs),
    }
    context.wait(5, 0.05)
    other.wait(5, 0.05)
    return shown


@case("T84.program_environment")
def program_environment(impl: Impl) -> Any:
    """A program gets the parent's variables and its own on top."""
    with folder() as d, env(FROM_PARENT="p", BOTH="parent"):
        script = f'echo "$FROM_PARENT $BOTH $LOCAL_RANK" > {d}/seen'
        start(impl, "/bin/sh", ("-c", script), envs={"BOTH": "own"}).wait(5, 0.05)
        return (d / "seen").read_text()


@case("T89.function_pdeathsig")
def pdeathsig(impl: Impl) -> Any:
    """SIGKILL of the agent: what becomes of its workers, functions and programs."""
    shown = {}
    for kind in ("function", "program"):
        with folder() as d:
            pid = os.fork()
            if pid == 0:
                try:
                    os.setsid()
                    if kind == "function":
                        context = start(impl, entrypoints.wait_to_be_killed, (str(d),), 2)
                    else:
                        mine = f"{d}/$LOCAL_RANK"
                        script = f"echo $$ > {mine}.x; mv {mine}.x {mine}; exec sleep 60"
                        context = start(impl, "/bin/sh", ("-c", script), 2)
                    context.wait(60)
                finally:
                    os._exit(0)
            until(lambda d=d: all((d / str(r)).exists() for r in range(2)))
            workers = [int((d / str(r)).read_text()) for r in range(2)]
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shown[kind] = [gone(p, 2) for p in workers]
            for p in workers:
                if alive(p):
                    os.kill(p, signal.SIGKILL)
    return shown


@case("T86.warnings")
def warnings_logged(impl: Impl) -> Any:
    """What is warned of about signals, by way of the module's logger."""
    module = impl.mod("elastic.multiprocessing.api")
    with (
        mock.patch.object(module, "logger") as logger,
        env(TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGNONSENSE"),
        logs_of("nobody"),
    ):
        start(impl, "/bin/sh", ("-c", "exit 0")).wait(5, 0.05)
    told = [str(c.args) for c in logger.warning.call_args_list]
    return {"unknown told": any("SIGNONSENSE" in t for t in told)}
