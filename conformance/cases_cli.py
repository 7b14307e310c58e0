"""The command lines: torchrun, and phalanx run (T84 to T92, T102, T136 to T150)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Impl, Program, alive, case, cli, env, folder, gone, outcome, plain, until

# torchrun's options by attribute; what a command line makes of each.
OPTIONS = (
    "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts"
    " monitor_interval start_method event_log_handler role module no_python run_path log_dir"
    " redirects tee local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters node_rank"
    " master_addr master_port local_addr logs_specs numa_binding signals_to_handle"
    " shutdown_timeout virtual_local_rank training_script training_script_args"
).split()


def parsed(impl: Impl, argv: Sequence[str], variables: Mapping[str, str] | None = None) -> Any:
    """All options after parsing, or the exit status."""
    import contextlib
    import io

    clean = {n: None for n in os.environ if n.startswith("PET_")}
    with env(**{**clean, **(variables or {})}), contextlib.redirect_stderr(io.StringIO()):
        if impl.name == "torch":
            seen = outcome(lambda: _values(impl.run.parse_args(list(argv))))
        else:
            try:
                seen = outcome(lambda: _values(impl.run.parse(list(argv))))
            except SystemExit:
                raise
            if seen.get("raised") == "UsageError":
                seen = {"raised": "SystemExit"}  # the command prints it and leaves with 2
    return seen.get("returned", seen)


def _values(found: Any) -> dict[str, Any]:
    return {n: plain(getattr(found, n, "<no such option>")) for n in OPTIONS}


def changed(impl: Impl, argv: Sequence[str], variables: Mapping[str, str] | None = None) -> Any:
    """Only what differs from the defaults."""
    base = parsed(impl, ["script.py"])
    seen = parsed(impl, argv, variables)
    if "raised" in seen:
        return seen
    return {k: v for k, v in seen.items() if v != base[k]}


@case("T136.defaults")
def defaults(impl: Impl) -> Any:
    """Every option's default."""
    return parsed(impl, ["script.py"])


@case("T136.command_lines")
def command_lines(impl: Impl) -> Any:
    """Command lines, by what they change."""
    table = [
        "script.py a -b --c",
        "--nproc-per-node 4 script.py",
        "--nproc_per_node=4 script.py",
        "--nproc-per-node=auto script.py",
        "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id x --rdzv-conf a=1,b=2 s.py",
        "--max-restarts 5 --monitor-interval 0.5 --start-method fork s.py",
        "-m pkg.mod x",
        "--module pkg.mod",
        "--no-python bash -c true",
        "--no_python bash",
        "--run-path s.py",
        "--standalone s.py",
        "-r 3 -t 0:1,1:2 s.py",
        "--redirects 1 --tee=2 s.py",
        "-t3 s.py",
        "--log-dir /tmp/x --local-ranks-filter 0,2 s.py",
        "--duplicate-stdout-filters a,b --duplicate-stderr-filters=c,,d s.py",
        "--node-rank 1 --master-addr h --master-port 7 --local-addr l s.py",
        "--logs-specs mine --numa-binding node --signals-to-handle SIGTERM s.py",
        "--shutdown-timeout 5 --virtual-local-rank s.py",
        "--role r --event-log-handler console s.py",
        "--max-restarts=1 --max-restarts=2 s.py",
        "s.py --nproc-per-node 4",
        "-- s.py --x",
        # wrong ones
        "",
        "--nproc-per-node",
        "--nproc-per-node 2",
        "--nonsense s.py",
        "--max-restarts x s.py",
        "--start-method bogus s.py",
        "--monitor-interval x s.py",
        "--standalone=1 s.py",
        "--numa-binding bogus s.py",
        "--nproc 2 s.py",
    ]
    return {line.replace(".", "_"): changed(impl, line.split()) for line in table}


@case("T136.variables")
def variables(impl: Impl) -> Any:
    """PET_ variables, by what they change."""
    table: dict[str, str] = {
        "PET_NNODES": "1:3",
        "PET_NPROC_PER_NODE": "4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "h:1",
        "PET_RDZV_ID": "x",
        "PET_RDZV_CONF": "a=1",
        "PET_STANDALONE": "1",
        "PET_MAX_RESTARTS": "7",
        "PET_MONITOR_INTERVAL": "0.5",
        "PET_START_METHOD": "fork",
        "PET_EVENT_LOG_HANDLER": "console",
        "PET_ROLE": "r",
        "PET_MODULE": "1",
        "PET_NO_PYTHON": "1",
        "PET_RUN_PATH": "1",
        "PET_LOG_DIR": "/tmp/x",
        "PET_REDIRECTS": "3",
        "PET_TEE": "1",
        "PET_LOCAL_RANKS_FILTER": "1",
        "PET_DUPLICATE_STDOUT_FILTERS": "a,b",
        "PET_DUPLICATE_STDERR_FILTERS": "a,,b",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "h",
        "PET_MASTER_PORT": "7",
        "PET_LOCAL_ADDR": "l",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM",
        "PET_SHUTDOWN_TIMEOUT": "9",
        "PET_VIRTUAL_LOCAL_RANK": "1",
        "PET_LOGS_SPECS": "ignored",
        "PET_NUMA_BINDING": "node",
    }
    shown = {n: changed(impl, ["s_py"], {n: v}) for n, v in table.items()}
    shown["flag 0"] = changed(impl, ["s_py"], {"PET_MODULE": "0"})
    shown["line wins"] = changed(impl, ["--max-restarts", "1", "s_py"], {"PET_MAX_RESTARTS": "7"})
    return shown


@case("T145.bad_variables")
def bad_variables(impl: Impl) -> Any:
    """PET_ variables that make no sense."""
    return {
        f"{n}={v}": changed(impl, ["s_py"], {n: v})
        for n, v in (
            ("PET_STANDALONE", "true"),
            ("PET_STANDALONE", "x"),
            ("PET_START_METHOD", "bogus"),
            ("PET_MAX_RESTARTS", "x"),
            ("PET_MAX_RESTARTS", ""),
        )
    }


@case("T150.help")
def help_lists(impl: Impl) -> Any:
    """Which of torchrun's options the help names."""
    if impl.name == "torch":
        text = impl.run.get_args_parser().format_help()
    else:
        text = impl.run.help_text(everything=True)
    words = set(re.findall(r"--[a-z][a-z-]*", text))
    listed = [n for n in OPTIONS if n not in ("training_script", "training_script_args")]
    return {n: "--" + n.replace("_", "-") in words for n in listed}


# ------------------------------------------------------------------ real runs

SAY = "import os, sys; print('R', os.environ['RANK'], *sys.argv[1:], flush=True)"


def script(d: Path, text: str, name: str = "train.py") -> str:
    path = d / name
    path.write_text(text)
    return str(path)


def lines(text: str) -> list[str]:
    return sorted(x for x in text.splitlines() if x.startswith("R "))


@case("T136.real_script")
def real_script(impl: Impl) -> Any:
    """The command itself, from a shell: a script with arguments, two workers; what it costs."""
    with folder() as d:
        ran = cli(impl, ["--nproc-per-node", "2", script(d, SAY), "a", "--b"], really=True)
        return {
            "code": ran.code,
            "out": lines(ran.out),
            "under 1.2 processor seconds": ran.cpu < 1.2,
        }


@case("T136.kinds_of_program")
def kinds(impl: Impl) -> Any:
    """A script, a module, a command, run-path."""
    with folder() as d:
        path = script(d, SAY)
        shown = {}
        for label, argv in (
            ("script", [path, "x"]),
            ("module", ["-m", "train", "x"]),
            ("command", ["--no-python", "/bin/sh", "-c", 'echo "R $RANK"']),
            ("run-path", ["--run-path", "--start-method", "fork", path, "x"]),
            ("module and command", ["-m", "--no-python", "train"]),
        ):
            ran = cli(impl, argv, cwd=str(d))
            shown[label] = [ran.code, lines(ran.out)]
    return shown


@case("T147.how_python_is_called")
def how_python(impl: Impl) -> Any:
    """Unbuffered; PYTHON_EXEC; OMP_NUM_THREADS by number of workers; sys.argv[0]; sys.path[0]."""
    text = (
        "import os, sys, json\n"
        "kind = lambda n: n if n in (None, '5') else 'a number' if n.isdigit() else n\n"
        "print('R', json.dumps([sys.argv[0] == os.path.abspath(sys.argv[0]), sys.argv[1:],\n"
        "  sys.path[0] == os.path.dirname(os.path.abspath(__file__)), __name__,\n"
        "  sys.stdout.line_buffering or sys.stdout.write_through,\n"
        "  kind(os.environ.get('OMP_NUM_THREADS'))]))\n"
    )
    with folder() as d:
        path = script(d, text)
        shown = {}
        for label, argv, extra in (
            ("one worker", [path], {"OMP_NUM_THREADS": None, "PYTHONUNBUFFERED": None}),
            ("two workers", ["--nproc-per-node", "2", path], {"OMP_NUM_THREADS": None}),
            ("OMP given", ["--nproc-per-node", "2", path], {"OMP_NUM_THREADS": "5"}),
        ):
            ran = cli(impl, argv, extra)
            shown[label] = [ran.code, lines(ran.out)]
        wrapper = d / "python"
        wrapper.write_text(f'#!/bin/sh\nFROM_WRAPPER="R wrapped $*" exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        own = script(d, "import os; print(os.environ.get('FROM_WRAPPER'))", "own.py")
        ran = cli(impl, [own], {"PYTHON_EXEC": str(wrapper)})
        shown["PYTHON_EXEC"] = [ran.code, [x.replace(str(d), "<DIR>") for x in lines(ran.out)]]
    return shown


@case("T144.exit_codes", timeout=180)
def exit_codes(impl: Impl) -> Any:
    """Exit status by what happened."""
    with folder() as d:
        shown = {}
        for label, argv in (
            ("good", [script(d, "pass", "good.py")]),
            ("exit 7", [script(d, "import sys; sys.exit(7)", "seven.py")]),
            ("exception", [script(d, "raise ValueError('x')", "raises.py")]),
            ("SIGKILL", [script(d, "import os; os.kill(os.getpid(), 9)", "killed.py")]),
            ("SIGSEGV", [script(d, "import os; os.kill(os.getpid(), 11)", "segv.py")]),
            ("no such script", [str(d / "missing.py")]),
            ("no such command", ["--no-python", "/does/not/exist"]),
            ("unknown option", ["--nonsense", "x.py"]),
            ("no script", []),
            ("bad nnodes", ["--nnodes", "1:2:3", str(d / "good.py")]),
            ("nnodes backwards", ["--nnodes", "2:1", str(d / "good.py")]),
            ("nproc nonsense", ["--nproc-per-node", "many", str(d / "good.py")]),
            ("nproc 0", ["--nproc-per-node", "0", str(d / "good.py")]),
            ("nproc gpu", ["--nproc-per-node", "gpu", str(d / "good.py")]),
            ("bad redirects", ["-r", "9", str(d / "good.py")]),
            ("bad filter", ["--local-ranks-filter", "x", str(d / "good.py")]),
            ("bad interval", ["--monitor-interval", "0", str(d / "good.py")]),
            ("bad restarts", ["--max-restarts", "-1", str(d / "good.py")]),
            ("bad backend", ["--nnodes", "2", "--rdzv-backend", "nonsense", str(d / "good.py")]),
            ("bad handler", ["--event-log-handler", "nonsense", str(d / "good.py")]),
            ("bad logs specs", ["--logs-specs", "nonsense", str(d / "good.py")]),
            ("log dir is file", ["--log-dir", str(d / "good.py"), "-r", "3", str(d / "good.py")]),
            ("negative timeout", ["--shutdown-timeout", "-5", str(d / "good.py")]),
        ):
            shown[label] = cli(
                impl, [*(["--max-restarts=0"] if "bad restarts" != label else []), *argv]
            ).code
    return shown


@case("T144.last_words")
def last_words(impl: Impl) -> Any:
    """What a person reads when a worker fails."""
    with folder() as d:
        path = script(
            d,
            "import os\nif os.environ['RANK'] == '1': raise ValueError('the reason')\n"
            "import time; time.sleep(60)",
        )
        ran = cli(impl, ["--nproc-per-node", "2", "--max-restarts", "0", path])
        return {
            "code": ran.code,
            "out": ran.out,
            "tells the script": "train.py" in ran.err,
            "tells the rank": bool(re.search(r"rank\s*:?\s*1", ran.err)),
            "shows the exception": "the reason" in ran.err,
        }


@case("T136.restarts")
def restarts(impl: Impl) -> Any:
    """--max-restarts, by the counts that workers see."""
    text = (
        "import os, sys\n"
        "print('R', os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'],\n"
        "  os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\n"
        "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 2)\n"
    )
    with folder() as d:
        path = script(d, text)
        good = cli(impl, ["--max-restarts", "2", path])
        bad = cli(impl, ["--max-restarts", "1", path])
        return {"enough": [good.code, lines(good.out)], "too few": [bad.code, lines(bad.out)]}


@case("T141.cli_logs")
def logs(impl: Impl) -> Any:
    """--log-dir with redirects and tee: files and console."""
    text = (
        "import os, sys; print('R out', os.environ['RANK']); "
        "print('R err', os.environ['RANK'], file=sys.stderr)"
    )
    with folder() as d:
        path = script(d, text)
        shown = {}
        for label, argv in (
            ("redirects 3", ["-r", "3"]),
            ("tee 3", ["-t", "3"]),
            ("tee 1 of rank 0", ["-t", "0:1"]),
            ("filter", ["-t", "3", "--local-ranks-filter", "1"]),
            ("nothing", []),
        ):
            log = d / label.replace(" ", "_")
            # A run id of one's own takes a backend of one's own.
            ran = cli(impl, ["--nproc-per-node=2", "--log-dir", str(log), *argv, path])
            files = {}
            for p in sorted(log.rglob("*")):
                if p.is_file():
                    parts = p.relative_to(log).parts
                    files["/".join(["<RUN>", *parts[1:]])] = p.read_text()
            shown[label] = [
                ran.code,
                sorted(x for x in ran.out.splitlines() if "R out" in x),
                sorted(x for x in ran.err.splitlines() if "R err" in x),
                files,
            ]
    return shown


@case("T141.prefix_template")
def prefix_template(impl: Impl) -> Any:
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""
    with folder() as d:
        path = script(d, "print('R')")
        ran = cli(
            impl,
            ["--nproc-per-node=2", "--role", "reader", "-t", "3", path],
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank} ${role_name}]: "},
        )
        return [ran.code, sorted(x for x in ran.out.splitlines() if x.endswith("R"))]


@case("T40.cli_environment")
def environment(impl: Impl) -> Any:
    """Variables of a worker under the command; and of which kind the address is."""
    import entrypoints

    text = (
        "import os, json\n"
        f"names = {list(entrypoints.VARIABLES)!r}\n"
        "print('R', json.dumps({n: os.environ.get(n) for n in names}), flush=True)\n"
    )
    with folder() as d:
        path = script(d, text)
        ran = cli(
            impl,
            ["--nproc-per-node=2", "--role=reader", "--max-restarts=3", path],
            {"OMP_NUM_THREADS": "1"},
        )
        shown = {}
        for line in lines(ran.out):
            found = json.loads(line[2:])
            found["MASTER_PORT"] = found["MASTER_PORT"].isdigit()
            found["TORCHELASTIC_ERROR_FILE"] = Path(found["TORCHELASTIC_ERROR_FILE"] or "").name
            found["TORCHELASTIC_RUN_ID"] = bool(found["TORCHELASTIC_RUN_ID"])
            found["MASTER_ADDR"] = bool(found["MASTER_ADDR"])
            shown[found["RANK"]] = found
    return {"code": ran.code, "workers": shown}


def _two_waiting(d: Path, more: str = "") -> str:
    return script(
        d,
        "import os, signal, sys, time\n"
        "D = os.path.dirname(os.path.abspath(__file__))\n" + more + "\n"
        "open(f'{D}/{os.environ[\"RANK\"]}.new', 'w').write(str(os.getpid()))\n"
        "os.rename(f'{D}/{os.environ[\"RANK\"]}.new', f'{D}/{os.environ[\"RANK\"]}')\n"
        "while True: time.sleep(0.05)\n",
    )


def _pids(d: Path, count: int = 2) -> list[int]:
    until(lambda: all((d / str(r)).exists() for r in range(count)), 15)
    return [int((d / str(r)).read_text()) for r in range(count)]


@case("T87.signals")
def signals(impl: Impl) -> Any:
    """Signals to the agent: its exit status, what workers got, who is left."""
    note = (
        "def got(n, f):\n"
        "    open(f'{D}/got{os.environ[\"RANK\"]}', 'a').write(signal.Signals(n).name)\n"
        "    os._exit(0)\n"
        "for n in (1, 2, 3, 15): signal.signal(n, got)"
    )
    shown = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        with folder() as d:
            path = _two_waiting(d, note)
            with Program(impl, ["--nproc-per-node=2", path]) as program:
                pids = _pids(d)
                program.signal(number)
                ran = program.wait(15)
                shown[number.name] = {
                    "code": ran.code,
                    "got": [
                        (d / f"got{r}").read_text() if (d / f"got{r}").exists() else None
                        for r in range(2)
                    ],
                    "gone": [gone(p) for p in pids],
                }
    return shown


@case("T88.other_endings")
def other_endings(impl: Impl) -> Any:
    """An unhandled signal and SIGKILL to the agent: its status, who is left."""
    shown = {}
    for number in (signal.SIGUSR1, signal.SIGKILL):
        with folder() as d:
            ignore = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
            with Program(impl, ["--nproc-per-node=2", _two_waiting(d, ignore)]) as program:
                pids = _pids(d)
                program.signal(number)
                until(lambda program=program: program.poll() is not None, 2)
                code = program.poll()
                left = [alive(p) and not gone(p, 1.5) for p in pids]
                program.close()
                for p in pids:
                    if alive(p):
                        os.kill(p, signal.SIGKILL)
            shown[number.name] = {"code": code, "workers left": left}
    return shown


@case("T87.stubborn_workers")
def stubborn_workers(impl: Impl) -> Any:
    """Workers that ignore SIGTERM: one signal with a short time-out; three signals in a row."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    shown = {}
    with (
        folder() as d,
        Program(
            impl, ["--nproc-per-node=2", "--shutdown-timeout=1", _two_waiting(d, ignore)]
        ) as program,
    ):
        pids = _pids(d)
        program.signal(signal.SIGTERM)
        ran = program.wait(15)
        shown["one"] = {"code": ran.code, "gone": [gone(p) for p in pids]}
    with folder() as d:
        with Program(
            impl, ["--nproc-per-node=2", "--shutdown-timeout=20", _two_waiting(d, ignore)]
        ) as program:
            pids = _pids(d)
            import time

            for _ in range(3):
                program.signal(signal.SIGTERM)
                time.sleep(0.4)
            until(lambda: program.poll() is not None, 10)
            code = program.poll()
            left = [alive(p) and not gone(p, 1) for p in pids]
            program.close()
            for p in pids:
                if alive(p):
                    os.kill(p, signal.SIGKILL)
        shown["three"] = {"code": code, "workers left": left}
    return shown


@case("T85.worker_fails_sibling_stubborn")
def fails_stubborn(impl: Impl) -> Any:
    """A worker fails, its sibling ignores SIGTERM: is --shutdown-timeout 1 kept within 10 s?"""
    with folder() as d:
        path = script(
            d,
            "import os, signal, sys, time\nD = os.path.dirname(os.path.abspath(__file__))\n"
            "if os.environ['RANK'] == '1':\n"
            "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "    open(f'{D}/up', 'w')\n    time.sleep(60)\n"
            "while not os.path.exists(f'{D}/up'): time.sleep(0.05)\n"
            "sys.exit(3)\n",
        )
        with Program(
            impl, ["--nproc-per-node=2", "--max-restarts=0", "--shutdown-timeout=1", path]
        ) as program:
            until(lambda: program.poll() is not None, 10)
            return {"ended within 10 s": program.poll() is not None}


@case("T118.watchdog")
def watchdog(impl: Impl) -> Any:
    """A timer expires in a worker, with --max-restarts 1."""
    with folder() as d:
        here = str(Path(__file__).parent)
        path = script(
            d,
            f"import sys; sys.path.insert(0, {here!r})\nimport entrypoints\n"
            "print('R', entrypoints.overrun_first(0.3, 20), flush=True)\n",
        )
        ran = cli(
            impl,
            ["--nproc-per-node=2", "--max-restarts=1", path],
            {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
            timeout=20,
        )
        return {"code": ran.code, "out": lines(ran.out)}


@case("T148.event_log")
def event_log(impl: Impl) -> Any:
    """--event-log-handler=console."""
    with folder() as d:
        ran = cli(impl, ["--event-log-handler=console", script(d, "pass")])
        found = []
        for line in (ran.out + ran.err).splitlines():
            start = line.find('{"name": "torchelastic')
            if start >= 0:
                event = json.loads(line[start:])
                found.append(f"{event['source']} {event['name'].rpartition('.')[2]}")
        return {"code": ran.code, "events": found}


@case("T138.backends")
def backends(impl: Impl) -> Any:
    """One node under each way of saying so: WORLD_SIZE, run id, status."""
    from harness import free_port

    port = str(free_port())
    text = (
        "import os; e = os.environ; print('R', e['WORLD_SIZE'], e['TORCHELASTIC_RUN_ID'][:5],"
        f" e['MASTER_ADDR'] == '127.0.0.1', e['MASTER_PORT'] == {port!r})"
    )
    with folder() as d:
        path = script(d, text)
        shown = {}
        for label, argv in (
            ("static port", ["--master-port", port, "--rdzv-id", "job12"]),
            (
                "c10d",
                [
                    "--nnodes=1",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=localhost:0",
                    "--rdzv-id=job12",
                ],
            ),
            ("endpoint", ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job12"]),
        ):
            ran = cli(impl, ["--nproc-per-node=2", *argv, path])
            shown[label] = [ran.code, lines(ran.out)]
    return shown


@case("T146.two_at_once")
def two_at_once(impl: Impl) -> Any:
    """Two plain runs at the same time do not disturb each other."""
    with folder() as d:
        path = script(d, "import os, time; time.sleep(0.5); print('R', os.environ['WORLD_SIZE'])")
        with Program(impl, ["--nproc-per-node=2", path]) as one, Program(impl, [path]) as two:
            first, second = one.wait(), two.wait()
        return [[first.code, lines(first.out)], [second.code, lines(second.out)]]


@case("T96.error_file_of_the_command")
def error_file(impl: Impl) -> Any:
    """TORCHELASTIC_ERROR_FILE of the command itself: the root's file with its exit code."""
    with folder() as d:
        text = (
            "import os, json, time\n"
            "extra = {'timestamp': str(int(time.time())), 'py_callstack': 'c'}\n"
            "json.dump({'message': {'message': 'M', 'extraInfo': extra}},"
            " open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
            "raise SystemExit(9)\n"
        )
        ran = cli(
            impl,
            ["--max-restarts=0", script(d, text)],
            {"TORCHELASTIC_ERROR_FILE": str(d / "own.json")},
        )
        content = json.loads((d / "own.json").read_text()) if (d / "own.json").exists() else None
        if content:
            content["message"]["extraInfo"].pop("timestamp")
        return {"failed": ran.code != 0, "file": content}
