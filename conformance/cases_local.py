"""LocalElasticAgent with real workers (T37 to T66)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import entrypoints
from harness import (
    Diary,
    DictStore,
    Impl,
    alive,
    brief,
    case,
    env,
    events_of,
    fake_handler,
    folder,
    gone,
    metrics_of,
    outcome,
    plain,
    raised,
    sh,
    threads,
    until,
    worker_spec,
)


def local_agent(
    impl: Impl,
    entrypoint: Any,
    args: tuple[Any, ...] = (),
    workers: int = 1,
    *,
    handler: Any = None,
    logs: Any = None,
    options: dict[str, Any] | None = None,
    **spec: Any,
) -> Any:
    spec.setdefault("max_restarts", 0)
    spec.setdefault("monitor_interval", 0.05)
    what = worker_spec(
        impl, handler, entrypoint=entrypoint, args=args, local_world_size=workers, **spec
    )
    return impl.local.LocalElasticAgent(
        what,
        logs_specs=logs or impl.mp.DefaultLogsSpecs(),
        **{"start_method": "fork", "shutdown_timeout": 5, **(options or {})},
    )


def run(agent: Any) -> Any:
    """The end of a run: state, values, and failures without pids and times."""

    def go() -> Any:
        result = agent.run()
        if result is None:
            return None
        return {
            "state": result.state.name,
            "failed": result.is_failed(),
            "values": plain(result.return_values),
            "failures": {str(r): failure(f) for r, f in sorted(result.failures.items())},
        }

    seen = outcome(go)
    if "returned" in seen:
        seen = seen["returned"] or {"returned": None}
    return seen


def failure(f: Any) -> Any:
    data = f.error_file_data
    message = data.get("message") if isinstance(data, dict) else data
    return {
        "local": f.local_rank,
        "code": f.exitcode,
        "signal": f.signal_name(),
        "file": "N/A" if f.error_file == "<N/A>" else Path(f.error_file).name,
        "message": type(f.message).__name__,
        "text": re.sub(
            r"PID \d+", "PID <PID>", re.sub(r"for [\d.]+ s:", "for <N> s:", _text(f.message))
        )
        .strip()
        .splitlines()[-1:],
        "data": sorted(message) if isinstance(message, dict) else message,
    }


def _text(message: Any) -> str:
    return str(message["message"] if isinstance(message, dict) else message)


@case("T37.function")
def function(impl: Impl) -> Any:
    """Functions that return something, and nothing."""
    return {
        "nothing": run(local_agent(impl, entrypoints.nothing, workers=2)),
        "echo": run(local_agent(impl, entrypoints.echo, ("foo",), 2)),
        "state after": local_agent(impl, entrypoints.nothing).get_worker_group().state.name,
    }


@case("T37.function_spawn")
def function_spawn(impl: Impl) -> Any:
    """The same with start method spawn."""
    return run(local_agent(impl, entrypoints.echo, ("foo",), 2, options={"start_method": "spawn"}))


@case("T37.function_forkserver")
def function_forkserver(impl: Impl) -> Any:
    """The same with start method forkserver."""
    options = {"start_method": "forkserver"}
    return run(local_agent(impl, entrypoints.echo, ("foo",), 1, options=options))


@case("T37.lambda_under_spawn")
def lambda_spawn(impl: Impl) -> Any:
    """What cannot be pickled cannot be spawned."""
    seen = run(local_agent(impl, lambda: 1, options={"start_method": "spawn"}))
    return {
        "raised": seen.get("raised") in ("PicklingError", "AttributeError"),
        "seen": "state" in seen,
    }


@case("T39.large_values")
def large(impl: Impl) -> Any:
    """Large return values arrive whole."""
    agent = local_agent(impl, entrypoints.large, (200_000,), 2)
    result = agent.run()
    return {str(r): [len(v), sum(v)] for r, v in result.return_values.items()}


@case("T37.binary")
def binary(impl: Impl) -> Any:
    """Programs: no return values but None."""
    return run(local_agent(impl, "/bin/sh", ("-c", "exit 0"), 2))


def _environment(seen: dict[str, Any]) -> dict[str, Any]:
    """Variables with what differs by run made plain."""
    shown = dict(seen)
    if shown.get("TORCHELASTIC_ERROR_FILE"):
        shown["TORCHELASTIC_ERROR_FILE"] = re.sub(
            r"^.*/(job|test_run_id)_[^/]*/", r"<ROOT>/\1_<X>/", shown["TORCHELASTIC_ERROR_FILE"]
        )
    if shown.get("TORCHELASTIC_TIMER_FILE"):
        shown["TORCHELASTIC_TIMER_FILE"] = re.sub(
            r"[0-9a-f-]{36}$", "<UUID>", shown["TORCHELASTIC_TIMER_FILE"]
        )
    return shown


@case("T40.environment_function")
def environment_function(impl: Impl) -> Any:
    """All variables of a function worker, by value."""
    with env(OMP_NUM_THREADS="3", CUDA_VISIBLE_DEVICES=None):
        result = local_agent(
            impl, entrypoints.variables, workers=2, max_restarts=2, role="reader"
        ).run()
    return {str(r): _environment(v) for r, v in sorted(result.return_values.items())}


def _script_environment(
    impl: Impl, workers: int = 2, args: tuple[Any, ...] = (), **spec: Any
) -> Any:
    """The same of a program, which tells by files."""
    with folder() as d:
        code = (
            "import json, os, sys; "
            "p = os.path.join(sys.argv[1], os.environ['RANK']); "
            "open(p, 'w').write(json.dumps([dict(os.environ), sys.argv[2:]]))"
        )
        agent = local_agent(
            impl, sys.executable, ("-S", "-c", code, str(d), *args), workers, **spec
        )
        seen = run(agent)
        found = {p.name: json.loads(p.read_text()) for p in sorted(d.iterdir())}
    return seen, found


@case("T40.environment_program")
def environment_program(impl: Impl) -> Any:
    """All variables of a program, by value; the agent's own environment is inherited."""
    with env(OMP_NUM_THREADS=None, CUDA_VISIBLE_DEVICES="3,5", MY_OWN="mine", RANK="77"):
        seen, found = _script_environment(impl)
    shown = {}
    for rank, (variables, _) in found.items():
        mine = {n: variables.get(n) for n in (*entrypoints.VARIABLES, "MY_OWN")}
        shown[rank] = _environment(mine)
    return {"state": seen["state"], "workers": shown}


@case("T40.nothing_else")
def nothing_else(impl: Impl) -> Any:
    """Variables a program has that its agent had not, beyond the contract's."""
    before = set(os.environ)
    _, found = _script_environment(impl, 1)
    added = set(found["0"][0]) - before - set(entrypoints.VARIABLES) - {"LC_CTYPE"}
    return sorted(added)


@case("T41.async_error_handling")
def async_error(impl: Impl) -> Any:
    """TORCH_NCCL_ASYNC_ERROR_HANDLING: ours or 1."""
    shown = {}
    for value in (None, "0", "x"):
        with env(TORCH_NCCL_ASYNC_ERROR_HANDLING=value):
            agent = local_agent(impl, entrypoints.variables, ("TORCH_NCCL_ASYNC_ERROR_HANDLING",))
            shown[str(value)] = plain(agent.run().return_values)
    return shown


@case("T42.master_override")
def master(impl: Impl) -> Any:
    """The spec's master address and port reach the workers."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    agent = local_agent(impl, entrypoints.variables, names, master_addr="test_host", master_port=42)
    shared = local_agent(
        impl, entrypoints.variables, names, handler=fake_handler(impl, use_agent_store=True)
    )
    return [plain(agent.run().return_values), plain(shared.run().return_values)]


@case("T45.two_agents")
def two_agents(impl: Impl) -> Any:
    """Two agents on one store: world and values by global rank."""
    store = DictStore(timeout=15)

    def one(rank: int, workers: int) -> Any:
        handler = fake_handler(impl, store=store, rank=rank, world_size=2)
        agent = local_agent(
            impl,
            entrypoints.variables,
            ("RANK", "WORLD_SIZE", "GROUP_RANK"),
            workers,
            handler=handler,
        )
        return lambda: run(agent)

    return threads([one(0, 2), one(1, 3)], timeout=25)


@case("T46.failing_function")
def failing(impl: Impl) -> Any:
    """A function that raises."""
    return run(local_agent(impl, entrypoints.fail, ("oh no",)))


@case("T46.failing_function_siblings")
def failing_siblings(impl: Impl) -> Any:
    """One of two functions raises; who is reported."""
    return run(local_agent(impl, entrypoints.fail_on_rank, (1,), 2))


@case("T46.failing_program")
def failing_program(impl: Impl) -> Any:
    """One of two programs fails; its sibling is ended and reported too."""
    script = 'if [ "$LOCAL_RANK" = 1 ]; then exit 7; fi; exec sleep 60'
    return run(local_agent(impl, "/bin/sh", ("-c", script), 2))


@case("T46.killed_program")
def killed_program(impl: Impl) -> Any:
    """A program that dies of a signal."""
    code = (
        "import os, time\n"
        "if os.environ['LOCAL_RANK'] == '0': os.kill(os.getpid(), 11)\n"
        "time.sleep(60)"
    )
    return run(local_agent(impl, sys.executable, ("-S", "-c", code), 2))


@case("T47.restarts_spent")
def restarts_spent(impl: Impl) -> Any:
    """A function that always fails."""
    agent = local_agent(impl, entrypoints.fail, max_restarts=2)
    with metrics_of(impl) as seen:
        end = run(agent)
    return {
        "end": end,
        "remaining": agent._remaining_restarts,
        "group": agent.get_worker_group().state.name,
        "time": type(agent._total_execution_time).__name__,
        "states": [n.rpartition(".")[2] for n, _ in seen if n.endswith((".failed", ".succeeded"))],
        "monitored": any(n.startswith("LocalElasticAgent._monitor_workers") for n, _ in seen),
        "profiled": sorted({n for n, _ in seen if n.startswith("LocalElasticAgent.")}),
    }


@case("T47.restart_succeeds")
def restart_succeeds(impl: Impl) -> Any:
    """Fails twice, then succeeds; functions and programs."""
    script = "exit $(( $TORCHELASTIC_RESTART_COUNT < 2 ))"
    first = local_agent(impl, entrypoints.fail_first, (2,), 2, max_restarts=3)
    second = local_agent(impl, "/bin/sh", ("-c", script), 2, max_restarts=3)
    return {
        "function": [run(first), first._remaining_restarts],
        "program": [run(second), second._remaining_restarts],
    }


@case("T48.killed_then_well")
def killed_then_well(impl: Impl) -> Any:
    """Rank 1 kills itself in attempt 0."""
    agent = local_agent(impl, entrypoints.die_first, (1,), 2, max_restarts=3)
    return [run(agent), agent._remaining_restarts]


@case("T30.events_of_workers")
def events(impl: Impl) -> Any:
    """Events of a run with a restart, and of a failing one; worker metadata by key."""
    agent = local_agent(impl, entrypoints.fail_first, (1,), 2, max_restarts=1)
    with events_of(impl) as seen:
        run(agent)
    bad = local_agent(impl, "/bin/sh", ("-c", "exit 3"), 1)
    with events_of(impl) as worse:
        run(bad)
    last = worse[-1]["metadata"]
    return {
        "restart": [brief(e) for e in seen],
        "worker ids": [
            e["metadata"]["worker_id"].isdigit() for e in seen if e["source"] == "WORKER"
        ],
        "restarts": [e["metadata"]["agent_restarts"] for e in seen],
        "failed": [brief(e) for e in worse],
        "metadata keys": [sorted(last), sorted(json.loads(last["metadata"]))],
        "exit code": json.loads(last["metadata"])["exit_code"],
        "pid is int": [type(p).__name__ for p in json.loads(last["metadata"])["worker_pid"]],
        "raw_error": last["raw_error"],
    }


@case("T54.drift")
def drifting(impl: Impl) -> Any:
    """Workers that end at different times, with and without time for it in the barrier."""

    def pair(barrier: float, seconds: float) -> Any:
        store = DictStore(timeout=15)

        def one(rank: int) -> Any:
            handler = fake_handler(impl, store=store, rank=rank, world_size=2)
            agent = local_agent(
                impl,
                entrypoints.drift,
                (seconds,),
                handler=handler,
                options={"exit_barrier_timeout": barrier},
            )
            return lambda: run(agent)

        return threads([one(0), one(1)], timeout=60)

    return {"time enough": pair(5, 0.5), "no time": pair(0, 0.5)}


@case("T55.shutdown")
def shutdown(impl: Impl) -> Any:
    """The process context after a run, and what closed it."""
    agent = local_agent(impl, entrypoints.nothing)
    run(agent)
    kept = agent._pcontext is not None
    return {"kept": kept, "watchdog": agent._worker_watchdog, "health": agent._health_check_server}


@case("T55.attributes")
def attributes(impl: Impl) -> Any:
    """Attributes a subclass relies on."""
    agent = local_agent(impl, entrypoints.nothing, options={"log_line_prefix_template": "x"})
    handler = agent._worker_group.spec.rdzv_handler
    with env(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="2.5"):
        dstate = local_agent(impl, entrypoints.nothing)._uninterruptible_state_timeout
    return {
        "start_method": agent._start_method,
        "pcontext": agent._pcontext,
        "handler": agent._rdzv_handler is handler,
        "template": agent._log_line_prefix_template,
        "watchdog": agent._worker_watchdog,
        "logs": type(agent._logs_specs).__name__,
        "health": agent._health_check_server,
        "dstate": [agent._uninterruptible_state_timeout, dstate],
        "seen": agent._uninterruptible_state_first_seen,
        "now": abs(agent._get_current_time_secs() - time.time()) < 2,
        "alive": abs(agent._get_alive_time() - time.time()) < 2,
    }


@case("T55.not_started")
def not_started(impl: Impl) -> Any:
    """Monitoring, stopping, shutting down what was never started."""
    agent = local_agent(impl, entrypoints.nothing)
    group = agent.get_worker_group()
    return {
        "monitor": raised(lambda: agent._monitor_workers(group)),
        "start": raised(lambda: agent._start_workers(group)),
        "stop": raised(lambda: agent._stop_workers(group)),
        "shutdown": raised(lambda: agent._shutdown()),
        "twice": raised(lambda: agent._shutdown(signal.SIGINT, timeout=1)),
    }


@case("T55.by_hand")
def by_hand(impl: Impl) -> Any:
    """Start, monitor, stop by a subclass's hands."""
    agent = local_agent(impl, entrypoints.sleep_then, (60,), 2)
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    pids = [w.id for w in group.workers]
    healthy = agent._monitor_workers(group)
    agent._stop_workers(group)
    ended = [gone(p) for p in pids]
    agent._shutdown()
    return {
        "ids are pids": all(isinstance(p, int) for p in pids),
        "context": sorted(agent._pcontext.pids()) if agent._pcontext else None,
        "healthy": healthy.state.name,
        "ended": ended,
    }


@case("T55.patched_start")
def patched_start(impl: Impl) -> Any:
    """start_processes is looked up in the module when called; what it is given."""
    target = impl.module_name("elastic.agent.server.local_elastic_agent") + ".start_processes"
    agent = local_agent(
        impl,
        entrypoints.echo,
        ("x",),
        2,
        options={"log_line_prefix_template": "[${role_name}-${local_rank}:${rank}]:${other} "},
    )
    with mock.patch(target) as start:
        start.return_value.pids.return_value = {0: 10, 1: 11}
        agent._initialize_workers(agent.get_worker_group())
    kwargs = start.call_args.kwargs
    return {
        "positional": len(start.call_args.args),
        "keywords": sorted(kwargs),
        "name": kwargs["name"],
        "args": plain(kwargs["args"]),
        "envs": [
            sorted(map(str, kwargs["envs"])),
            {type(v).__name__ for v in kwargs["envs"][0].values()},
        ],
        "start_method": kwargs["start_method"],
        "prefixes": plain(kwargs.get("log_line_prefixes")),
        "ids": [w.id for w in agent.get_worker_group().workers],
    }


@case("T56.timer_file")
def timer_file(impl: Impl) -> Any:
    """TORCHELASTIC_TIMER_FILE in the worker, by what the agent has."""
    name = "TORCHELASTIC_TIMER_FILE"
    shown = {}
    with folder() as d:
        path = str(d / "fifo")
        for label, enabled, file in (
            ("neither", None, None),
            ("file only", None, path),
            ("enabled 0", "0", None),
            ("enabled", "1", None),
            ("both", "1", path),
        ):
            with env(TORCHELASTIC_ENABLE_FILE_TIMER=enabled, TORCHELASTIC_TIMER_FILE=file):
                result = local_agent(impl, entrypoints.variables, (name,)).run()
            value = result.return_values[0][name]
            if value:
                value = value.replace(str(d), "<DIR>").replace(tempfile.gettempdir(), "<TMP>")
                value = re.sub(r"[0-9a-f-]{36}$", "<UUID>", value)
            shown[label] = value
        shown["left"] = sorted(p.name for p in d.iterdir())
    return shown


@case("T57.timer_file_changes")
def timer_file_changes(impl: Impl) -> Any:
    """A pipe of its own per attempt, gone at the end."""
    seen: list[str] = []
    real = impl.local.start_processes

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["envs"][0]["TORCHELASTIC_TIMER_FILE"])
        seen.append(str(os.path.exists(seen[-1])))
        return real(*args, **kwargs)

    target = impl.module_name("elastic.agent.server.local_elastic_agent") + ".start_processes"
    with mock.patch(target, side_effect=spy), env(TORCHELASTIC_ENABLE_FILE_TIMER="1"):
        run(local_agent(impl, entrypoints.fail_first, (1,), max_restarts=1))
    return {
        "different": seen[0] != seen[2],
        "there at start": seen[1::2],
        "left": [os.path.exists(p) for p in seen[::2]],
        "in the temporary folder": {os.path.dirname(p) == tempfile.gettempdir() for p in seen[::2]},
    }


@case("T57.watchdog_events")
def watchdog_events(impl: Impl) -> Any:
    """Events of the watchdog in an undisturbed run."""
    with env(TORCHELASTIC_ENABLE_FILE_TIMER="1"), events_of(impl) as seen:
        run(local_agent(impl, entrypoints.nothing))
    told = [e for e in seen if "watchdog" in e["name"] or "watchdog" in str(e["metadata"])]
    return [
        [
            e["name"],
            e["source"],
            e["metadata"].get("state"),
            sorted(e["metadata"]),
            json.loads(e["metadata"]["metadata"]),
        ]
        for e in told
    ]


def _state(agent: Any) -> str:
    return str(agent._monitor_workers(agent.get_worker_group()).state.name)


@case("T58.health_port")
def health_port(impl: Impl) -> Any:
    """A health check port, a bad one, none: the run succeeds."""
    from harness import free_port

    server = impl.get("elastic.agent.server.health_check_server:HealthCheckServer")
    shown = {}
    for label, port in (("none", None), ("free", str(free_port())), ("bad", "abc")):
        with env(TORCHELASTIC_HEALTH_CHECK_PORT=port):
            agent = local_agent(impl, entrypoints.nothing)
            agent._initialize_workers(agent.get_worker_group())
            there = isinstance(agent._health_check_server, server)
            until(lambda agent=agent: _state(agent) != "HEALTHY", 5)
            agent._shutdown()
            shown[label] = [there, agent._health_check_server is None]
    return shown


@case("T59.log_prefix", batch="processes")
def log_prefix(impl: Impl) -> Any:
    """Prefixes of tee'd lines: the default, a template, an unknown word in it."""
    from harness import stderr_fd

    shown = {}
    for label, template in (
        ("default", None),
        ("template", "[${role_name}-${local_rank}:${rank}]:"),
        ("unknown", "${rank} ${colour}: "),
        ("plain", "log> "),
    ):
        with folder() as d, stderr_fd() as written:
            logs = impl.mp.DefaultLogsSpecs(log_dir=str(d), tee=impl.mp.Std.ERR)
            agent = local_agent(
                impl,
                "/bin/sh",
                ("-c", "echo line >&2"),
                2,
                logs=logs,
                options={"log_line_prefix_template": template},
            )
            run(agent)
            lines = [x for x in written().splitlines() if x.endswith("line")]
        shown[label] = sorted(lines)
    return shown


@case("T60.virtual_local_rank")
def virtual(impl: Impl) -> Any:
    """Everybody is local rank 0 and sees one device."""
    shown = {}
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RANK")
    for label, devices in (("unset", None), ("two", "5, 7"), ("short", "5"), ("empty", "")):
        with env(CUDA_VISIBLE_DEVICES=devices):
            agent = local_agent(impl, entrypoints.variables, names, 2, virtual_local_rank=True)
            shown[label] = run(agent)
    return shown


@case("T61.macros")
def macros(impl: Impl) -> Any:
    """What is replaced in arguments."""
    args = ("${local_rank}", "$local_rank", "a$$b", "$other", "${rank}", "100%", "x")
    _, found = _script_environment(impl, 2, args)
    numbers = local_agent(impl, entrypoints.echo, (5,)).run().return_values
    return {"strings": {r: a for r, (_, a) in found.items()}, "numbers": plain(numbers)}


@case("T62.dstate")
def dstate(impl: Impl) -> Any:
    """A worker stuck in the kernel for longer than allowed."""
    target = impl.module_name("elastic.agent.server.local_elastic_agent") + ".read_proc_state"
    agent = local_agent(
        impl,
        entrypoints.sleep_then,
        (60,),
        max_restarts=3,
        options={"uninterruptible_state_timeout": 0.3, "shutdown_timeout": 2},
    )
    with mock.patch(target, return_value="D"):
        end = run(agent)
    return {
        "end": end,
        "remaining": agent._remaining_restarts,
        "group": agent.get_worker_group().state.name,
    }


@case("T63.dstate_timeout")
def dstate_timeout(impl: Impl) -> Any:
    """Where its timeout comes from."""
    resolve = impl.local._resolve_uninterruptible_state_timeout
    shown = {}
    for label, variable, value in (
        ("none", None, None),
        ("env", "2.5", None),
        ("explicit", "2.5", 7.0),
        ("explicit zero", "2.5", 0),
        ("negative", None, -3.0),
        ("bad env", "x", None),
        ("negative env", "-1", None),
        ("empty env", "", None),
    ):
        with env(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT=variable):
            value = resolve(value)
            shown[label] = [type(value).__name__, value]
    return shown


@case("T64.proc_state")
def proc_state(impl: Impl) -> Any:
    """The state letter of a process."""
    module = impl.mod("elastic.utils.process_state")
    return {
        "self": module.read_proc_state(os.getpid()) in ("R", "S"),
        "nobody": module.read_proc_state(2**22 + 1),
        "D": [
            module.is_uninterruptible_state(s) for s in ("D", "R", "S", "Z", "DN", "D+", "", None)
        ],
    }


@case("T65.pid_mismatch")
def pid_mismatch(impl: Impl) -> Any:
    """Workers that are not those of the context."""
    agent = local_agent(impl, entrypoints.sleep_then, (60,))
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    group.workers[0].id = 1
    seen = agent._monitor_workers(group).state.name
    agent._shutdown()
    return seen


@case("T36.stop_timeout")
def stop_timeout(impl: Impl) -> Any:
    """How long _stop_workers and _shutdown give the workers."""
    agent = local_agent(impl, entrypoints.nothing, options={"shutdown_timeout": 7})
    agent._pcontext = mock.Mock()
    agent._stop_workers(agent.get_worker_group())
    first = plain(list(agent._pcontext.close.call_args))
    agent._shutdown()
    second = plain(list(agent._pcontext.close.call_args))
    return {"stop": first, "shutdown()": second}


@case("T99.garbage_error_file")
def garbage_error_file(impl: Impl) -> Any:
    """A worker that dies while writing its error file: empty, half, without the keys."""
    shown = {}
    for label, text in (
        ("empty", ""),
        ("half", '{"message": {"mes'),
        ("keys", '{"a": 1}'),
        ("list", "[1]"),
    ):
        script = f"printf '%s' '{text}' > \"$TORCHELASTIC_ERROR_FILE\"; exit 3"
        agent = local_agent(impl, "/bin/sh", ("-c", script), max_restarts=1)
        shown[label] = [run(agent), agent._remaining_restarts]
    return shown


@case("T91.vanishing_function")
def vanishing(impl: Impl) -> Any:
    """A function worker that leaves with status 0 and without a value."""
    agent = local_agent(impl, entrypoints.leave_on_rank, (0, 0), 2)
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    state = until(
        lambda: (s := agent._monitor_workers(group).state.name) != "HEALTHY" and s, timeout=3
    )
    agent._shutdown(timeout=1)
    return {"state": state or "HEALTHY for ever"}


@case("T90.grandchild")
def grandchild(impl: Impl) -> Any:
    """A child of a program that died by itself."""
    with folder() as d:
        script = f'sleep 60 & echo $! > "{d}/pid"; sleep 0.2; exit 5'
        run(local_agent(impl, "/bin/sh", ("-c", script), max_restarts=0))
        pid = int((d / "pid").read_text())
        ended = gone(pid, 2)
        if not ended:
            os.kill(pid, signal.SIGKILL)
    return {"ended with its parent": ended}


@case("T85.stubborn_sibling")
def stubborn(impl: Impl) -> Any:
    """A sibling that ignores SIGTERM, with a short shutdown timeout, after a failure."""
    with folder() as d:
        script = (
            'if [ "$LOCAL_RANK" = 0 ]; then until [ -e DIR/1 ]; do sleep 0.05; done; exit 3; fi;'
            " trap '' TERM; : > DIR/1; while :; do sleep 0.1; done"
        ).replace("DIR", str(d))
        agent = local_agent(impl, "/bin/sh", ("-c", script), 2, options={"shutdown_timeout": 1})
        close = impl.mp.PContext.close
        # torch's own tear-down waits its fixed 30 s; here only who says how long is of interest.
        waits: list[float] = []

        def quick(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
            waits.append(timeout)
            close(self, death_sig, min(timeout, 1))

        with mock.patch.object(impl.mp.PContext, "close", quick):
            end = run(agent)
    return {"end": end, "first wait": waits[:1]}


@case("T18.membership_with_workers")
def membership(impl: Impl) -> Any:
    """Somebody waits: the workers are stopped and started again, the count unchanged."""
    diary = Diary()
    with folder() as d:
        handler = fake_handler(impl, diary=diary, waiting=[0, 0, 1, 0, 0])
        script = (
            f'echo $TORCHELASTIC_RESTART_COUNT >> "{d}/starts";'
            f' if [ "$(wc -l < "{d}/starts")" = 2 ]; then exit 0; fi; exec sleep 60'
        )
        agent = local_agent(impl, "/bin/sh", ("-c", script), handler=handler, max_restarts=1)
        end = run(agent)
        starts = (d / "starts").read_text().split()
    return {
        "end": end["state"],
        "counts": starts,
        "remaining": agent._remaining_restarts,
        "rendezvous": diary.count("next_rendezvous"),
    }


@case("T61.entry_is_missing")
def missing_program(impl: Impl) -> Any:
    """A program that does not exist."""
    agent = local_agent(impl, "/does/not/exist", max_restarts=2)
    return [run(agent), agent._remaining_restarts]


@case("T55.orphans")
def no_orphans(impl: Impl) -> Any:
    """After a run nothing of it is left."""
    with folder() as d:
        agent = local_agent(impl, entrypoints.wait_to_be_killed, (str(d),), 2)
        group = agent.get_worker_group()
        agent._initialize_workers(group)
        until(lambda: len([p for p in d.iterdir() if p.suffix == ""]) == 2)
        pids = [int(p.read_text()) for p in d.iterdir()]
        before = [alive(p) for p in pids]
        agent._shutdown(signal.SIGTERM, timeout=5)
        after = [gone(p) for p in pids]
    return [before, after]


@case("T55.subprocess_group")
def own_group(impl: Impl) -> Any:
    """Programs lead sessions and groups of their own; functions do not."""
    with folder() as d:
        code = (
            "import os, sys; open(sys.argv[1], 'w').write("
            "f'{os.getsid(0) == os.getpid()} {os.getpgid(0) == os.getpid()}')"
        )
        run(local_agent(impl, sys.executable, ("-S", "-c", code, str(d / "x"))))
        program = (d / "x").read_text()
    mine = local_agent(impl, _session).run().return_values[0]
    return {"program": program, "function": [mine[0] == os.getsid(0), mine[1] == os.getpgid(0)]}


def _session() -> list[int]:
    return [os.getsid(0), os.getpgid(0)]


@case("T37.shell_lines")
def shell_lines(impl: Impl) -> Any:
    """An entrypoint is one program name, not a command line."""
    return run(local_agent(impl, " ".join(sh("exit 0"))))
