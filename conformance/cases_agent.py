"""SimpleElasticAgent: order of calls, budgets of restarts, ends, events, metrics (T5 to T36)."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any
from unittest import mock

from harness import (
    Diary,
    DictStore,
    Impl,
    brief,
    case,
    events_of,
    fake_agent,
    fake_handler,
    metrics_of,
    outcome,
    plain,
    raised,
    worker_spec,
)

INTERNAL = (
    "_invoke_run _initialize_workers _restart_workers _rendezvous _assign_worker_ranks"
    " _exit_barrier _record_metrics _record_worker_events"
).split()


def _with_diary(impl: Impl, results: list[Any], **options: Any) -> tuple[Any, Diary]:
    """An agent that also writes down its own internal calls (looked up through self)."""
    diary = Diary()
    agent = fake_agent(
        impl,
        results,
        diary=diary,
        handler=options.pop("handler", None)
        or fake_handler(impl, diary=diary, waiting=options.pop("waiting", ())),
        **options,
    )
    for name in INTERNAL:
        real = getattr(agent, name)

        def wrapper(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            diary.note(_name)
            return _real(*args, **kwargs)

        setattr(agent, name, wrapper)
    return agent, diary


def _end(agent: Any, result: Any) -> dict[str, Any]:
    return {
        "result": result if isinstance(result, dict) else plain(result),
        "group": agent.get_worker_group().state.name,
        "remaining": agent._remaining_restarts,
        "starts/stops/monitors": [agent.starts, agent.stops, agent.monitors],
        "shutdowns": agent.shutdowns,
    }


def _run(agent: Any) -> Any:
    def go() -> Any:
        result = agent.run()
        if result is None:
            return None
        return [result.state.name, result.is_failed(), plain(result.return_values)]

    return outcome(go)


@case("T5.constructor")
def constructor(impl: Impl) -> Any:
    """A new agent's attributes."""
    agent = fake_agent(impl, ["SUCCEEDED"], max_restarts=7)
    group = agent.get_worker_group()
    return {
        "state": group.state.name,
        "remaining": agent._remaining_restarts,
        "same group": [agent.get_worker_group("x") is group, agent._worker_group is group],
        "store": agent._store,
        "barrier": [agent._exit_barrier_timeout, agent._in_exit_barrier],
        "shutdown": agent._shutdown_timeout,
        "time": agent._total_execution_time,
    }


@case("T6.flakiness")
def flakiness(impl: Impl) -> Any:
    """Flakiness by restarts used."""

    def of(most: int, left: int, failed: bool) -> Any:
        agent = fake_agent(impl, ["SUCCEEDED"], max_restarts=most)
        agent._remaining_restarts = left
        with metrics_of(impl) as seen:
            agent._record_flakiness_metric(failed)
        return seen

    table = [(1, 1), (10, 3), (0, 0), (3, 3), (3, 0), (10, 10), (2, 1)]
    shown = {f"{m},{n}": of(m, n, False) for m, n in table}
    shown["failed"] = of(3, 3, True)
    return shown


@case("T7.metrics")
def end_metrics(impl: Impl) -> Any:
    """The run_* metrics at the end."""

    def of(state: str, left: int) -> Any:
        agent = fake_agent(impl, ["SUCCEEDED"], max_restarts=3)
        agent._remaining_restarts = left
        with metrics_of(impl) as seen:
            agent._record_metrics(impl.server.RunResult(impl.server.WorkerState[state]))
        return seen

    return {f"{s},{n}": of(s, n) for s in ("SUCCEEDED", "FAILED", "UNHEALTHY") for n in (3, 1)}


@case("T7.metrics_of_a_run")
def run_metrics(impl: Impl) -> Any:
    """Every metric of a run with one failure, durations only by name."""
    agent = fake_agent(impl, ["HEALTHY", "FAILED", "HEALTHY", "SUCCEEDED"])
    with metrics_of(impl) as seen:
        agent.run()
    names: dict[str, int] = {}
    for name, _value in seen:
        names[name] = names.get(name, 0) + 1
    return {
        "values": [[n, v] for n, v in seen if n.startswith("workers.")],
        "counts": names,
    }


@case("T8.run_calls")
def run_calls(impl: Impl) -> Any:
    """Order of calls of a clean run."""
    agent, diary = _with_diary(impl, ["HEALTHY", "HEALTHY", "SUCCEEDED"])
    result = _run(agent)
    return {"diary": list(diary), **_end(agent, result)}


@case("T8.run_calls_one_failure")
def run_calls_failure(impl: Impl) -> Any:
    """Order of calls with one failure and a restart left."""
    agent, diary = _with_diary(impl, ["FAILED", "SUCCEEDED"], max_restarts=1)
    result = _run(agent)
    return {"diary": list(diary), **_end(agent, result)}


@case("T8.run_calls_no_restart_left")
def run_calls_exhausted(impl: Impl) -> Any:
    """Order of calls when no restart is left."""
    agent, diary = _with_diary(impl, ["FAILED"], max_restarts=0)
    result = _run(agent)
    return {"diary": list(diary), **_end(agent, result)}


@case("T9.rendezvous")
def rendezvous(impl: Impl) -> Any:
    """What _rendezvous fills in."""
    agent = fake_agent(impl, ["SUCCEEDED"], local_world_size=3)
    group = agent.get_worker_group()
    agent._rendezvous(group)
    other = fake_agent(impl, ["SUCCEEDED"], master_addr="boss", master_port=42)
    other._rendezvous(other.get_worker_group())
    return {
        "group": [group.group_rank, group.group_world_size, group.master_addr, group.master_port],
        "state": group.state.name,
        "workers": [str(w) for w in group.workers],
        "ids": [w.id for w in group.workers],
        "stores": [group.store is agent._store, agent._store is not None],
        "override": [other.get_worker_group().master_addr, other.get_worker_group().master_port],
    }


@case("T10.initialize")
def initialize(impl: Impl) -> Any:
    """_initialize_workers and _restart_workers by hand."""
    diary = Diary()
    agent = fake_agent(impl, ["SUCCEEDED"], diary=diary, local_world_size=2)
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    first = [group.state.name, [w.id for w in group.workers]]
    for _ in range(3):
        agent._restart_workers(group)
    return {
        "first": first,
        "then": [group.state.name, agent.starts, agent.stops],
        "diary": list(diary),
        "remaining": agent._remaining_restarts,
    }


@case("T11.stop_clears_rank")
def stop_clears(impl: Impl) -> Any:
    """A subclass's _stop_workers may clear what it likes."""

    def clear(agent: Any) -> None:
        group = agent.get_worker_group()
        group.group_rank = None
        group.group_world_size = None

    agent = fake_agent(impl, ["SUCCEEDED"], on={"stop": clear})
    group = agent.get_worker_group()
    agent._initialize_workers(group)
    agent._restart_workers(group)
    return [group.state.name, group.group_rank, group.group_world_size]


@case("T12.success")
def success(impl: Impl) -> Any:
    """Restarts untouched by a clean run."""
    agent = fake_agent(impl, ["HEALTHY", "HEALTHY", "SUCCEEDED"])
    return _end(agent, _run(agent))


@case("T13.first_start_fails")
def first_start_fails(impl: Impl) -> Any:
    """The first rendezvous' or start's error comes out; the state stays INIT."""

    def boom(_agent: Any) -> None:
        raise ValueError("no start")

    started = fake_agent(impl, ["SUCCEEDED"], on={"start": boom})
    diary = Diary()
    handler = fake_handler(impl, diary=diary, fail_next=RuntimeError("no rendezvous"))
    met = fake_agent(impl, ["SUCCEEDED"], handler=handler)
    closed = fake_agent(
        impl,
        ["SUCCEEDED"],
        handler=fake_handler(impl, fail_next=impl.rdzv.RendezvousClosedError()),
    )
    return {
        "start": _end(started, _run(started)),
        "rendezvous": _end(met, _run(met)),
        "closed": _end(closed, _run(closed)),
    }


@case("T13.later_start_fails")
def later_start_fails(impl: Impl) -> Any:
    """A restart that cannot start ends the run with its error."""

    def boom(agent: Any) -> None:
        if agent.starts == 2:
            raise ValueError("no start")

    agent = fake_agent(impl, ["FAILED"], on={"start": boom})
    return _end(agent, _run(agent))


@case("T14.always_failing")
def always_failing(impl: Impl) -> Any:
    """The budget is spent, then the run ends."""
    shown = {}
    for state in ("FAILED", "UNHEALTHY"):
        for most in (0, 3):
            agent = fake_agent(impl, [state], max_restarts=most)
            shown[f"{state} {most}"] = _end(agent, _run(agent))
    return shown


@case("T15.mixed_failures")
def mixed(impl: Impl) -> Any:
    """Failures and unhealthy spells share one budget."""
    agent = fake_agent(
        impl, ["HEALTHY", "FAILED", "HEALTHY", "UNHEALTHY", "SUCCEEDED"], max_restarts=2
    )
    return _end(agent, _run(agent))


@case("T16.unknown_state")
def unknown(impl: Impl) -> Any:
    """States a monitor must not report end the run at once."""
    shown = {}
    for state in ("UNKNOWN", "STOPPED", "INIT"):
        agent = fake_agent(impl, ["HEALTHY", state])
        end = _end(agent, _run(agent))
        end["text names state"] = state in str(_text(fake_agent(impl, [state])))
        shown[state] = end
    return shown


def _text(agent: Any) -> str:
    try:
        agent.run()
    except Exception as error:
        return str(error)
    return ""


@case("T16.monitor_raises")
def monitor_raises(impl: Impl) -> Any:
    """An exception of the monitor ends the run."""
    agent = fake_agent(impl, ["HEALTHY", KeyError("x")])
    return _end(agent, _run(agent))


@case("T18.membership_change")
def membership(impl: Impl) -> Any:
    """Somebody waits: everybody starts again, and it costs no restart."""
    agent, diary = _with_diary(impl, ["HEALTHY"] * 4 + ["SUCCEEDED"], waiting=[0, 1, 0])
    result = _run(agent)
    return {"diary": list(diary), **_end(agent, result)}


@case("T19.when_polled")
def when_polled(impl: Impl) -> Any:
    """num_nodes_waiting is asked only while the group is healthy."""
    diary = Diary()
    agent = fake_agent(
        impl,
        ["HEALTHY", "FAILED", "SUCCEEDED"],
        diary=diary,
        handler=fake_handler(impl, diary=diary),
    )
    agent.run()
    return [d for d in diary if not d.startswith("_s")]


@case("T23.signal_in_run")
def signal_in_run(impl: Impl) -> Any:
    """A SignalException: shutdown with that signal, once, and it comes out."""
    shown = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        error = impl.mp.SignalException("stop", number)
        agent = fake_agent(impl, ["HEALTHY", error], agent_options={"shutdown_timeout": 7})
        shown[number.name] = _end(agent, _run(agent))
    return shown


@case("T23.foreign_signal_exception")
def foreign_signal(impl: Impl) -> Any:
    """A KeyboardInterrupt is no SignalException."""
    agent = fake_agent(impl, ["HEALTHY", KeyboardInterrupt()])
    return _end(agent, _run(agent))


@case("T24.second_signal_in_shutdown")
def second_signal(impl: Impl) -> Any:
    """A second signal during shutdown: shut down again from the finally clause."""
    error = impl.mp.SignalException("first", signal.SIGTERM)

    def again(agent: Any) -> None:
        if len(agent.shutdowns) == 1:
            raise impl.mp.SignalException("second", signal.SIGINT)

    agent = fake_agent(impl, ["HEALTHY", error], on={"shutdown": again})
    return _end(agent, _run(agent))


@case("T24.shutdown_raises")
def shutdown_raises(impl: Impl) -> Any:
    """An error of the last shutdown comes out."""

    def boom(_agent: Any) -> None:
        raise OSError("cannot")

    agent = fake_agent(impl, ["SUCCEEDED"], on={"shutdown": boom})
    return _end(agent, _run(agent))


@case("T25.graceful_exit")
def graceful(impl: Impl) -> Any:
    """A rendezvous that says goodbye."""
    error = impl.rdzv.RendezvousGracefulExitError()
    first = fake_agent(impl, ["SUCCEEDED"], handler=fake_handler(impl, fail_next=error))
    later = fake_agent(impl, ["HEALTHY", error])
    return {"first": _end(first, _run(first)), "later": _end(later, _run(later))}


def _event(event: Any) -> Any:
    seen = json.loads(event.serialize())
    seen["timestamp"] = "0" if seen["timestamp"] == 0 else "a time"
    seen["metadata"]["hostname"] = bool(seen["metadata"]["hostname"])
    seen["metadata"]["metadata"] = json.loads(seen["metadata"]["metadata"])
    if seen["metadata"]["raw_error"]:
        seen["metadata"]["raw_error"] = seen["metadata"]["raw_error"].strip().splitlines()[-1]
    return seen


@case("T27.agent_events")
def agent_events(impl: Impl) -> Any:
    """The AGENT events as records."""
    agent = fake_agent(impl, ["SUCCEEDED"])
    shown = {"succeeded": _event(agent.get_event_succeeded())}
    try:
        raise ValueError("bad luck")
    except ValueError:
        shown["failed"] = _event(agent.get_event_failed())
    return shown


@case("T28.worker_event")
def worker_event(impl: Impl) -> Any:
    """A WORKER event, with a restart used."""
    agent = fake_agent(impl, ["SUCCEEDED"], max_restarts=3, local_world_size=2)
    agent._initialize_workers(agent.get_worker_group())
    agent._remaining_restarts = 1
    source = impl.mod("elastic.events").EventSource
    worker = agent.get_worker_group().workers[1]
    return {
        "plain": _event(agent._construct_event("RUNNING", source.WORKER, worker=worker)),
        "full": _event(
            agent._construct_event(
                "FAILED",
                source.WORKER,
                worker=worker,
                raw_error="text",
                exit_code=7,
                worker_pid=5,
            )
        ),
        "duration": _event(agent._construct_event("X", source.AGENT, duration_ms=1.5)),
    }


@case("T30.event_order")
def event_order(impl: Impl) -> Any:
    """Which events, in which order."""
    shown = {}
    scripts: dict[str, list[Any]] = {
        "clean": ["HEALTHY", "SUCCEEDED"],
        "one restart": ["FAILED", "SUCCEEDED"],
    }
    for name, script in scripts.items():
        agent = fake_agent(impl, script, local_world_size=2)
        with events_of(impl) as seen:
            agent.run()
        shown[name] = [brief(e) for e in seen]
    failing = fake_agent(impl, [_failed(impl)], local_world_size=2, max_restarts=0)
    with events_of(impl) as seen:
        failing.run()
    shown["failed"] = [brief(e) for e in seen]
    last = seen[-2]["metadata"]
    shown["failed worker"] = [last["raw_error"], json.loads(last["metadata"])]
    return shown


def _failed(impl: Impl) -> Any:
    failure = impl.errors.ProcessFailure(local_rank=0, pid=11, exitcode=3, error_file="<N/A>")
    return impl.server.RunResult(impl.server.WorkerState.FAILED, failures={0: failure})


@case("T30.event_durations")
def event_durations(impl: Impl) -> Any:
    """record_duration: an event with a time, on errors too."""
    agent = fake_agent(impl, ["SUCCEEDED"])

    def failing() -> None:
        with agent.record_duration("PHASE"):
            raise ValueError

    with events_of(impl) as seen:
        with agent.record_duration("OTHER"):
            pass
        what = raised(failing)
    durations = [
        e["metadata"]["duration_ms"] is not None and e["metadata"]["duration_ms"] >= 0 for e in seen
    ]
    return {"events": [brief(e) for e in seen], "durations": durations, "raised": what}


@case("T31.worker_state")
def worker_state(impl: Impl) -> Any:
    """What a worker came to at the end."""
    agent = fake_agent(impl, ["SUCCEEDED"], local_world_size=2)
    agent._initialize_workers(agent.get_worker_group())
    worker, _ = agent.get_worker_group().workers
    result, state = impl.server.RunResult, impl.server.WorkerState
    failure = _failed(impl).failures[0]

    def of(*args: Any, **kwargs: Any) -> Any:
        return outcome(lambda: agent._get_worker_state(worker, result(*args, **kwargs)))

    return {
        "value": of(state.SUCCEEDED, {0: 1}),
        "failure": of(state.FAILED, {}, {0: failure}),
        "other failed": of(state.FAILED, {}, {1: failure}),
        "unhealthy": of(state.UNHEALTHY),
        "nobody": of(state.SUCCEEDED),
    }


@case("T32.barrier_raises")
def barrier_raises(impl: Impl) -> Any:
    """An exit barrier that fails does not undo the success; it is called late, by module path."""
    target = impl.module_name("elastic.utils.store") + ".barrier"
    with mock.patch(target, side_effect=RuntimeError("no")) as barrier:
        agent = fake_agent(impl, ["SUCCEEDED"], agent_options={"exit_barrier_timeout": 9})
        end = _end(agent, _run(agent))
    kwargs = {k: plain(v) for k, v in sorted(barrier.call_args.kwargs.items()) if k != "store"}
    return {
        **end,
        "calls": barrier.call_count,
        "kwargs": kwargs,
        "args": len(barrier.call_args.args),
    }


@case("T33.barrier_times_out")
def barrier_timeout(impl: Impl) -> Any:
    """A missing peer: success all the same, and a word in the log."""
    handler = fake_handler(impl, world_size=2)
    store = handler.store_given
    # The peer of group rank 1 answers the rank exchange, then is never heard of again.
    peer = impl.api._RoleInstanceInfo("trainer", 1, 1).serialize()
    store.set("torchelastic/role_info/1", peer)
    agent = fake_agent(
        impl, ["SUCCEEDED"], handler=handler, agent_options={"exit_barrier_timeout": 0.2}
    )
    result = _run(agent)
    return {
        **_end(agent, result),
        "members": store.get("torchelastic/agent/terminal_state/num_members"),
    }


@case("T34.signal_in_barrier")
def signal_in_barrier(impl: Impl) -> Any:
    """A signal in the exit barrier is not swallowed."""
    target = impl.module_name("elastic.utils.store") + ".barrier"
    error = impl.mp.SignalException("stop", signal.SIGTERM)
    inside = []
    with mock.patch(target) as barrier:
        agent = fake_agent(impl, ["SUCCEEDED"])

        def in_barrier(*_args: Any, **_kwargs: Any) -> None:
            inside.append(agent._in_exit_barrier)
            raise error

        barrier.side_effect = in_barrier
        end = _end(agent, _run(agent))
    return {**end, "inside": inside, "after": agent._in_exit_barrier}


@case("T33.barrier_keys")
def barrier_keys(impl: Impl) -> Any:
    """What the barrier writes; both agents leave together."""
    store = DictStore()
    barrier = impl.mod("elastic.utils.store").barrier
    import harness

    seen = harness.threads(
        [lambda: barrier(store, 2, "prefix/x", 5), lambda: barrier(store, 2, "prefix/x", 5)]
    )
    alone = DictStore()
    late = outcome(lambda: barrier(alone, 2, "p", 0.1))
    return {
        "both": seen,
        "keys": dict(sorted(store._data.items())),
        "alone": "raised" in late,
    }


@case("T33.store_helpers")
def store_helpers(impl: Impl) -> Any:
    """synchronize, get_all, store_timeout."""
    import harness

    store_util = impl.mod("elastic.utils.store")
    store = DictStore()

    def one(rank: int) -> Any:
        return lambda: store_util.synchronize(store, f"data{rank}".encode(), rank, 3, "key")

    seen = harness.threads([one(r) for r in range(3)])
    timeouts = [store.timeout.total_seconds()]
    with store_util.store_timeout(store, 1.5):
        timeouts.append(store.timeout.total_seconds())
    timeouts.append(store.timeout.total_seconds())

    def failing() -> None:
        with store_util.store_timeout(store, 1.5):
            raise ValueError

    raised(failing)
    return {
        "all": seen,
        "timeouts": timeouts,
        "after an error": store.timeout.total_seconds(),
        "get_all": plain(_get_all(store_util)),
    }


def _get_all(store_util: Any) -> Any:
    import harness

    store = DictStore()
    for rank in range(2):
        store.set(f"p{rank}", f"v{rank}")
    return harness.threads([lambda r=r: store_util.get_all(store, r, "p", 2) for r in range(2)])


@case("T35.failing_pair")
def failing_pair(impl: Impl) -> Any:
    """No exit barrier after a failure: two failing agents end without waiting for each other."""
    import harness

    store = DictStore()

    def agent(rank: int) -> Any:
        handler = fake_handler(impl, store=store, rank=rank, world_size=2)
        return fake_agent(impl, ["HEALTHY", "FAILED"], handler=handler, max_restarts=0)

    agents = [agent(0), agent(1)]
    seen = harness.threads([lambda a=a: _run(a) for a in agents], timeout=8)
    return {
        "ends": seen,
        "barrier used": "torchelastic/agent/terminal_state/num_members" in store._data,
    }


@case("T36.shutdown_timeout")
def shutdown_timeout(impl: Impl) -> Any:
    """The timeout given is the timeout used."""
    agent = fake_agent(impl, ["SUCCEEDED"], agent_options={"shutdown_timeout": 180})
    agent.run()
    default = fake_agent(impl, ["SUCCEEDED"])
    default.run()
    local = impl.local.LocalElasticAgent(
        worker_spec(impl), impl.mp.DefaultLogsSpecs(), shutdown_timeout=240
    )
    local._pcontext = mock.Mock()
    local._shutdown(signal.SIGTERM, timeout=150)
    return {
        "simple": [agent._shutdown_timeout, agent.shutdowns],
        "default": [default._shutdown_timeout, default.shutdowns],
        "local": local._shutdown_timeout,
        "close": plain(list(local._pcontext.close.call_args)),
    }


@case("T36.execution_time")
def execution_time(impl: Impl) -> Any:
    """Total execution time is kept as whole seconds."""
    agent = fake_agent(impl, ["HEALTHY"] * 3 + ["SUCCEEDED"], monitor_interval=0.3)
    agent.run()
    return [type(agent._total_execution_time).__name__, 1 <= agent._total_execution_time <= 3]


@case("T36.run_in_thread")
def in_thread(impl: Impl) -> Any:
    """An agent runs off the main thread too."""
    agent = fake_agent(impl, ["HEALTHY", "SUCCEEDED"])
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_run(agent)))
    thread.start()
    thread.join(10)
    return _end(agent, seen)


@case("T36.subclass_stop_signature")
def stop_signature(impl: Impl) -> Any:
    """_stop_workers is called with one positional argument."""
    calls = []
    diary = Diary()
    agent = fake_agent(impl, ["FAILED", "SUCCEEDED"], diary=diary)

    def stop(*args: Any, **kwargs: Any) -> None:
        calls.append([len(args), sorted(kwargs)])

    agent._stop_workers = stop
    agent.run()
    return calls
