"""What cases are made of: the implementation under test, fakes, and ways to observe it.

A case is a function that takes an `Impl` and returns something JSON can hold: what was
seen, never a verdict. Both implementations get the same function; the runner compares.
Whatever two runs of one implementation may differ in (pids, paths, ports, times, host
names) is the case's to leave out or to normalise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------ implementations

TORCH_MODULES = {
    "elastic": "torch.distributed.elastic",
    "launcher": "torch.distributed.launcher",
    "run": "torch.distributed.run",
    "run_module": "torch.distributed.run",
}
PHALANX_MODULES = {
    "elastic": "phalanx.elastic",
    "launcher": "phalanx.launcher",
    "run": "phalanx.cli.options",
    "run_module": "phalanx.run",
}


class Impl:
    """One implementation: its modules, looked up by the name they have below the prefix."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._modules = {"torch": TORCH_MODULES, "phalanx": PHALANX_MODULES}[name]

    @property
    def other(self) -> Impl:
        return Impl("phalanx" if self.name == "torch" else "torch")

    def module_name(self, path: str) -> str:
        head, dot, rest = path.partition(".")
        return self._modules[head] + dot + rest

    def mod(self, path: str) -> Any:
        return importlib.import_module(self.module_name(path))

    def get(self, path: str) -> Any:
        """The object at "module:attribute.attribute"."""
        module, _, attributes = path.partition(":")
        found: Any = self.mod(module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
        return found

    # The names cases use most.
    @property
    def server(self) -> Any:
        return self.mod("elastic.agent.server")

    @property
    def api(self) -> Any:
        return self.mod("elastic.agent.server.api")

    @property
    def local(self) -> Any:
        return self.mod("elastic.agent.server.local_elastic_agent")

    @property
    def mp(self) -> Any:
        return self.mod("elastic.multiprocessing")

    @property
    def errors(self) -> Any:
        return self.mod("elastic.multiprocessing.errors")

    @property
    def rdzv(self) -> Any:
        return self.mod("elastic.rendezvous")

    @property
    def timer(self) -> Any:
        return self.mod("elastic.timer")

    @property
    def launcher(self) -> Any:
        return self.mod("launcher.api")

    @property
    def run(self) -> Any:
        return self.mod("run")


# ------------------------------------------------------------------ cases


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    function: Callable[[Impl], Any]
    batch: str
    timeout: float
    doc: str


CASES: dict[str, Case] = {}


def case(name: str, *, timeout: float = 60.0, batch: str | None = None) -> Callable[..., Any]:
    """Register a case. Cases of one batch run one after the other in one process."""

    def register(function: Callable[[Impl], Any]) -> Callable[[Impl], Any]:
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        where = batch or function.__module__.rpartition(".")[2].removeprefix("cases_")
        CASES[name] = Case(name, function, where, timeout, inspect.getdoc(function) or "")
        return function

    return register


# ------------------------------------------------------------------ observing

HOST = socket.gethostname()


def plain(value: Any) -> Any:
    """`value` as JSON holds it; unknown objects become their type's name."""
    if isinstance(value, enum.Enum) and not isinstance(value, int):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, str)):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, float):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"<{value.__name__}>"
    return f"<{type(value).__name__}>"


def outcome(function: Callable[[], Any], *, text: bool = False) -> Any:
    """What a call came to: its value, or the name (and text) of what it raised."""
    try:
        value = function()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        seen = {"raised": type(error).__name__}
        if text:
            seen["text"] = str(error)
        return seen
    return {"returned": plain(value)}


def raised(function: Callable[[], Any]) -> str | None:
    """Only the name of what a call raised."""
    try:
        function()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return type(error).__name__
    return None


def signature(callable_: Any) -> Any:
    """Parameters by name: place, kind, default; annotations are nobody's contract.

    Keyword-only parameters with a default, and keywords at large, are left out: they take
    nothing away from anyone who calls as the contract says.
    """
    try:
        parameters = inspect.signature(callable_).parameters.values()
    except (TypeError, ValueError):
        return "no signature"
    shown: dict[str, str] = {}
    for place, p in enumerate(parameters):
        if p.kind is p.VAR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.default is not p.empty):
            continue
        text = {p.VAR_POSITIONAL: "*", p.KEYWORD_ONLY: "keyword "}.get(p.kind, "") + str(place)
        if p.default is not p.empty:
            default = "a function" if inspect.isfunction(p.default) else plain(p.default)
            text = f"{text} = {default}"
        shown[p.name] = text
    return shown


def fields(dataclass: Any) -> dict[str, str]:
    """Fields of a dataclass by name: place and default; keyword-only ones left out."""
    shown = {}
    for place, f in enumerate(dataclasses.fields(dataclass)):
        if f.kw_only:
            continue
        shown[f.name] = str(place)
        if f.default is not dataclasses.MISSING:
            shown[f.name] += f" = {plain(f.default)}"
        elif f.default_factory is not dataclasses.MISSING:
            shown[f.name] += f" = {plain(f.default_factory())}"
    return shown


def normal(text: str, replace: Mapping[str, str] | None = None) -> str:
    """Text without host, pids, ports, dates and the given strings."""
    for old, new in (replace or {}).items():
        if old:
            text = text.replace(old, new)
    for name in sorted({HOST, socket.getfqdn(), socket.getfqdn(HOST)}, key=len, reverse=True):
        text = text.replace(name, "<HOST>")
    text = re.sub(r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d(\.\d+)?", "<TIME>", text)
    text = re.sub(r"\b(pid|PID)(:? ?)\d+", r"\1\2<PID>", text)
    return text


class Captured(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def messages(self) -> list[str]:
        return [r.getMessage() for r in self.records]


@contextlib.contextmanager
def events_of(impl: Impl, destination: str = "null") -> Iterator[list[dict[str, Any]]]:
    """The events recorded for `destination`, as dicts, in order."""
    impl.mod("elastic.events").record(_event(impl, "conformance.warmup"), destination)
    logger = logging.getLogger(f"torchelastic-events-{destination}")
    handler = Captured()
    logger.addHandler(handler)
    seen: list[dict[str, Any]] = []
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
        seen.extend(json.loads(m) for m in handler.messages())


def _event(impl: Impl, name: str) -> Any:
    events = impl.mod("elastic.events")
    return events.Event(name=name, source=events.EventSource.AGENT)


def brief(event: Mapping[str, Any]) -> str:
    """One event in a word: source, state, and which worker."""
    metadata = event["metadata"]
    rank = metadata.get("global_rank")
    who = "" if rank is None else f" {rank}"
    return f"{event['source']} {event['name'].rpartition('.')[2]}{who}"


@contextlib.contextmanager
def metrics_of(impl: Impl) -> Iterator[list[tuple[str, int]]]:
    """The metrics emitted, as (name, value)."""
    metrics = impl.mod("elastic.metrics")
    seen: list[tuple[str, int]] = []

    class Capture(metrics.MetricHandler):  # type: ignore[misc, name-defined]
        def emit(self, metric_data: Any) -> None:
            seen.append((metric_data.name, metric_data.value))

    metrics.configure(Capture())
    try:
        yield seen
    finally:
        metrics.configure(metrics.NullMetricHandler())


@contextlib.contextmanager
def logs_of(name: str = "", level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    handler = Captured()
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set (or, with None, unset) variables; everything is put back afterwards."""
    before = dict(os.environ)
    try:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="conformance_"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def stderr_fd() -> Iterator[Callable[[], str]]:
    """What is written to file descriptor 2 in the block."""
    with tempfile.TemporaryFile("w+b") as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def read() -> str:
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def quiet_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def until(what: Callable[[], Any], timeout: float = 10.0, period: float = 0.02) -> Any:
    """Wait for something that only the outside world can tell of; its last value."""
    deadline = time.monotonic() + timeout
    while True:
        value = what()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(period)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def gone(pid: int, timeout: float = 5.0) -> bool:
    return bool(until(lambda: not alive(pid), timeout))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def threads(functions: Sequence[Callable[[], Any]], timeout: float = 15.0) -> list[Any]:
    """Run all at once; the outcome of each."""
    results: list[Any] = [{"hung": True}] * len(functions)

    def work(index: int, function: Callable[[], Any]) -> None:
        results[index] = outcome(function)

    running = [
        threading.Thread(target=work, args=(i, f), daemon=True) for i, f in enumerate(functions)
    ]
    for t in running:
        t.start()
    deadline = time.monotonic() + timeout
    for t in running:
        t.join(max(0.0, deadline - time.monotonic()))
    return results


# ------------------------------------------------------------------ fakes


class DictStore:
    """A store with the members an agent may use, and no others; counts what is asked of it.

    Both implementations must be content with it: handlers written against torch bring
    stores of their own.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        import datetime

        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout = datetime.timedelta(seconds=timeout)
        self.calls: dict[str, int] = {}

    @property
    def timeout(self) -> Any:
        return self._timeout

    def set_timeout(self, timeout: Any) -> None:
        self._timeout = timeout

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    @staticmethod
    def _bytes(value: Any) -> bytes:
        return value.encode() if isinstance(value, str) else bytes(value)

    def _await(self, keys: Sequence[str], timeout: Any = None) -> None:
        limit = (timeout or self._timeout).total_seconds()
        if not self._changed.wait_for(lambda: all(k in self._data for k in keys), limit):
            raise StoreTimeout(f"keys {list(keys)} did not come in {limit} s")

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._count("set")
            self._data[key] = self._bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._count("get")
            self._await([key])
            return self._data[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._count("add")
            value = int(self._data.get(key, b"0")) + amount
            self._data[key] = str(value).encode()
            self._changed.notify_all()
            return value

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        with self._changed:
            self._count("wait")
            self._await(keys, timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self._count("multi_get")
            self._await(keys)
            return [self._data[k] for k in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        with self._changed:
            self._count("multi_set")
            self._data.update(zip(keys, map(self._bytes, values), strict=False))
            self._changed.notify_all()


class StoreTimeout(RuntimeError):
    """As torch's DistStoreError: derived from RuntimeError."""


class Diary(list[str]):
    """What was called, in order."""

    def note(self, text: str) -> None:
        self.append(text)


def fake_handler(
    impl: Impl,
    *,
    diary: Diary | None = None,
    store: Any = None,
    rank: int = 0,
    world_size: int = 1,
    waiting: Sequence[int] = (),
    backend: str = "fake",
    use_agent_store: bool = False,
    address: str = "localhost",
    port: int = 1234,
    fail_next: BaseException | None = None,
) -> Any:
    """A rendezvous handler as a user would write one."""
    notes = Diary() if diary is None else diary
    rdzv = impl.rdzv
    pending = list(waiting)

    class Handler(rdzv.RendezvousHandler):  # type: ignore[misc, name-defined]
        store_given = DictStore() if store is None else store

        def get_backend(self) -> str:
            return backend

        @property
        def use_agent_store(self) -> bool:
            return use_agent_store

        def next_rendezvous(self) -> Any:
            notes.note("next_rendezvous")
            if fail_next is not None:
                raise fail_next
            return rdzv.RendezvousInfo(
                self.store_given, rank, world_size, rdzv.RendezvousStoreInfo(address, port)
            )

        def is_closed(self) -> bool:
            notes.note("is_closed")
            return False

        def set_closed(self) -> None:
            notes.note("set_closed")

        def num_nodes_waiting(self) -> int:
            value = pending.pop(0) if pending else 0
            notes.note(f"num_nodes_waiting={value}")
            return value

        def get_run_id(self) -> str:
            return "job"

        def shutdown(self) -> bool:
            notes.note("shutdown")
            return True

    return Handler()


def worker_spec(impl: Impl, handler: Any = None, **overrides: Any) -> Any:
    values: dict[str, Any] = {
        "role": "trainer",
        "local_world_size": 1,
        "rdzv_handler": fake_handler(impl) if handler is None else handler,
        "entrypoint": do_nothing,
        "args": (),
        "max_restarts": 3,
        "monitor_interval": 0.01,
    }
    values.update(overrides)
    return impl.server.WorkerSpec(**values)


def fake_agent(
    impl: Impl,
    results: Sequence[Any],
    *,
    diary: Diary | None = None,
    handler: Any = None,
    agent_options: Mapping[str, Any] | None = None,
    on: Mapping[str, Callable[[Any], Any]] | None = None,
    **spec: Any,
) -> Any:
    """A `SimpleElasticAgent` whose workers are pretence.

    `results`: what the monitor says, tick by tick: state names, `RunResult`s or exceptions;
    the last is repeated. `on`: a hook per method name, called with the agent.
    """
    notes = Diary() if diary is None else diary
    state = impl.server.WorkerState
    script = list(results)
    hooks = on or {}
    own = handler if handler is not None else fake_handler(impl, diary=notes)

    class Agent(impl.server.SimpleElasticAgent):  # type: ignore[misc, name-defined]
        starts = 0
        stops = 0
        monitors = 0
        shutdowns: list[list[Any]]

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.starts += 1
            notes.note(f"_start_workers({worker_group.state.name})")
            if "start" in hooks:
                hooks["start"](self)
            return {w.local_rank: f"id{w.local_rank}" for w in worker_group.workers}

        def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
            self.stops += 1
            notes.note("_stop_workers")
            if "stop" in hooks:
                hooks["stop"](self)

        def _monitor_workers(self, worker_group: Any) -> Any:
            self.monitors += 1
            result = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(result, BaseException):
                notes.note(f"_monitor_workers raises {type(result).__name__}")
                raise result
            if isinstance(result, str):
                result = impl.server.RunResult(state=state[result])
            if result.state == state.SUCCEEDED and not result.return_values:
                result.return_values = {w.global_rank: None for w in worker_group.workers}
            notes.note(f"_monitor_workers={result.state.name}")
            return result

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            self.shutdowns = [*getattr(self, "shutdowns", []), [plain(args), plain(kwargs)]]
            notes.note("_shutdown")
            if "shutdown" in hooks:
                hooks["shutdown"](self)

    agent = Agent(worker_spec(impl, own, **spec), **dict(agent_options or {}))
    agent.shutdowns = []
    return agent


# ------------------------------------------------------------------ entrypoints of workers
# Module level, so that they can be pickled; none may import torch.


def do_nothing(*_args: Any) -> None:
    return None


# ------------------------------------------------------------------ whole programs


@dataclasses.dataclass
class Ran:
    code: int | None  # as subprocess has it; None: it did not end in time
    out: str
    err: str
    cpu: float  # processor seconds of the command and all of its that it waited for


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def _clean_env(extra: Mapping[str, str | None] | None) -> dict[str, str]:
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PET_", "TORCHELASTIC_", "TORCH_ELASTIC", "PHALANX_"))
    }
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (extra or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _run_as_main(main: Callable[[], Any]) -> int:
    """What the interpreter's top level does with a program: its exit status."""
    try:
        main()
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


class Program:
    """A running command line of the implementation (torchrun, or phalanx run).

    torch's is forked from this process, which has paid for importing it; ours is executed
    for real.
    """

    def __init__(
        self,
        impl: Impl,
        argv: Sequence[str],
        extra_env: Mapping[str, str | None] | None = None,
        *,
        really: bool = False,
        cwd: str | None = None,
    ) -> None:
        self._cpu = 0.0
        self._out = tempfile.TemporaryFile("w+b")
        self._err = tempfile.TemporaryFile("w+b")
        environment = _clean_env(extra_env)
        self._code: int | None = None
        if impl.name == "torch" and not really:
            self.pid = self._fork(impl, argv, environment, cwd)
        else:
            command = (
                [sys.executable, "-m", "torch.distributed.run"]
                if impl.name == "torch"
                else [sys.executable, "-m", "phalanx", "run"]
            )
            process = subprocess.Popen(
                [*command, *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
                cwd=cwd,
            )
            self.pid = process.pid
            process.returncode = 0  # reaped here, not by subprocess

    def _fork(
        self, impl: Impl, argv: Sequence[str], environment: Mapping[str, str], cwd: str | None
    ) -> int:
        run = impl.mod("run")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            if cwd:
                os.chdir(cwd)
            sys.argv = ["torchrun", *argv]
            code = _run_as_main(run.main)
            sys.stdout.flush()
            sys.stderr.flush()
            if code < 0:
                signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
        finally:
            os._exit(code & 0xFF)

    def poll(self) -> int | None:
        if self._code is None:
            self._reap(os.WNOHANG)
        return self._code

    def _reap(self, options: int) -> None:
        pid, status, usage = os.wait4(self.pid, options)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)
            self._cpu = usage.ru_utime + usage.ru_stime

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def read(self) -> tuple[str, str]:
        texts = []
        for file in (self._out, self._err):
            texts.append(os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace"))
        return texts[0], texts[1]

    def wait(self, timeout: float = 30.0) -> Ran:
        until(lambda: self.poll() is not None, timeout)
        code = self._code
        self._stop()
        out, err = self.read()
        return Ran(code, out, err, self._cpu)

    def _stop(self) -> None:
        if self.poll() is None:
            kill_tree(self.pid)
            self._reap(0)

    def close(self) -> None:
        self._stop()
        self._out.close()
        self._err.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cli(
    impl: Impl,
    argv: Sequence[str],
    extra_env: Mapping[str, str | None] | None = None,
    *,
    timeout: float = 30.0,
    really: bool = False,
    cwd: str | None = None,
) -> Ran:
    with Program(impl, argv, extra_env, really=really, cwd=cwd) as program:
        return program.wait(timeout)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(p) for p in task.read_text().split()]
    return found


def descendants_of(pid: int) -> list[int]:
    found: list[int] = []
    todo = [pid]
    while todo:
        for child in children_of(todo.pop()):
            found.append(child)
            todo.append(child)
    return found


def kill_tree(pid: int, itself: bool = True) -> None:
    """SIGKILL a process and all below it, until nothing is left below."""
    for _ in range(50):
        victims = descendants_of(pid) + ([pid] if itself else [])
        victims = [v for v in victims if alive(v)]
        if not victims:
            return
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.01)
