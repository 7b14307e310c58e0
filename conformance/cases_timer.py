"""Timers: the wire, the client, the server (T103 to T120)."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import entrypoints
from cases_local import local_agent, run
from harness import Impl, alive, case, env, folder, gone, outcome, plain, raised, threads, until


class Pipe:
    """A named pipe and all that was written into it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, timeout: float = 2) -> bytes:
        select.select([self.fd], [], [], timeout)
        try:
            return os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.fd)


def _wire(data: bytes) -> str:
    text = data.decode()
    text = re.sub(r'"pid": \d+', '"pid": <PID>', text)
    return re.sub(r'"scope_id": "[^"]*/([^"/]*)#\d+"', r'"scope_id": "<DIR>/\1#<LINE>"', text)


@case("T103.wire")
def wire(impl: Impl) -> Any:
    """Each request byte for byte."""
    with folder() as d:
        pipe = Pipe(d / "fifo")
        client = impl.timer.FileTimerClient(str(d / "fifo"))
        quiet = impl.timer.FileTimerClient(str(d / "fifo"), signal=signal.SIGUSR1)
        none = impl.timer.FileTimerClient(str(d / "fifo"), signal=0)
        shown = []
        for call in (
            lambda: client.acquire("scope", 1795976331.355546),
            lambda: client.release("scope"),
            lambda: quiet.acquire('quoted "x" \u00e4', 5.0),
            lambda: none.acquire("s", 1.5),
            lambda: client.acquire("two\nlines", 1.0),
        ):
            call()
            shown.append(_wire(pipe.read()))
        too_long = raised(lambda: client.acquire("x" * 5000, 1.0))
        pipe.close()
    return {"lines": shown, "too long": too_long}


@case("T103.request")
def request(impl: Impl) -> Any:
    """FileTimerRequest: JSON, equality, attributes."""
    make = impl.timer.FileTimerRequest
    one = make(worker_pid=12, scope_id="s", expiration_time=1.5, signal=9)
    return {
        "json": one.to_json(),
        "equal": [one == make(12, "s", 1.5, 9), one == make(12, "s", 1.5, 2), one == 3],
        "attributes": [
            one.worker_pid,
            one.worker_id,
            one.scope_id,
            one.expiration_time,
            one.signal,
            one.version,
        ],
    }


@case("T104.expires")
def expires(impl: Impl) -> Any:
    """The context manager: acquire, release, exceptions, clients."""
    calls: list[Any] = []

    class Client(impl.timer.TimerClient):  # type: ignore[misc, name-defined]
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            calls.append(["acquire", scope_id, round(expiration_time - time.time())])

        def release(self, scope_id: str) -> None:
            calls.append(["release", scope_id])

    api = impl.mod("elastic.timer.api")

    def no_client() -> None:
        with mock.patch.object(api, "_timer_client", None), impl.timer.expires(after=1):
            pass

    def failing() -> None:
        with impl.timer.expires(after=60, scope="b"):
            raise KeyError("x")

    shown: dict[str, Any] = {"none": raised(no_client) if hasattr(api, "_timer_client") else "?"}
    impl.timer.configure(Client())
    with impl.timer.expires(after=60, scope="a") as value:
        calls.append(["inside", plain(value)])
    shown["failing"] = raised(failing)
    with impl.timer.expires(after=60, scope="c", client=Client()):
        pass

    @impl.timer.expires(after=60, scope="decorated")
    def function() -> int:
        return 3

    shown["decorator"] = function()
    return {**shown, "calls": calls}


@case("T119.default_scopes")
def default_scopes(impl: Impl) -> Any:
    """Scopes of unnamed blocks: two places, and the same place twice."""
    scopes: list[str] = []

    class Client(impl.timer.TimerClient):  # type: ignore[misc, name-defined]
        def acquire(self, scope_id: str, expiration_time: float) -> None:
            scopes.append(scope_id)

        def release(self, scope_id: str) -> None: ...

    client = Client()

    def nested(depth: int) -> None:
        with impl.timer.expires(after=60, client=client):
            if depth:
                nested(depth - 1)

    nested(1)
    with impl.timer.expires(after=60, client=client):
        pass
    return {
        "recursion, same": scopes[0] == scopes[1],
        "other place, different": scopes[1] != scopes[2],
        "names this file": "cases_timer" in scopes[0],
        "form": bool(re.fullmatch(r".+#\d+", scopes[0])),
    }


@case("T105.no_server")
def no_server(impl: Impl) -> Any:
    """No pipe, no reader."""
    shown = {}
    with folder() as d:
        client = impl.timer.FileTimerClient(str(d / "missing"))
        try:
            client.acquire("s", 1.0)
        except Exception as error:
            shown["missing"] = [type(error).__name__, type(error.__cause__).__name__]
        os.mkfifo(d / "fifo")
        client = impl.timer.FileTimerClient(str(d / "fifo"))
        try:
            client.release("s")
        except Exception as error:
            shown["no reader"] = [type(error).__name__, type(error.__cause__).__name__]
    return shown


class Server:
    """A running file timer server, and what it told."""

    def __init__(self, impl: Impl, d: Path, interval: float = 0.05, cls: Any = None) -> None:
        self.impl = impl
        self.path = str(d / "fifo")
        self.told: list[Any] = []
        self.reaped: list[tuple[int, int]] = []
        self.server = (cls or impl.timer.FileTimerServer)(
            self.path, "run", interval, True, self._told
        )

    def _told(self, name: str, request: Any) -> None:
        self.told.append(
            [name, None if request is None else [request.scope_id, int(request.signal)]]
        )

    def start(self) -> None:
        self.server.start()

    def spy(self) -> None:
        """Note what would be killed instead of killing it."""

        def reap(pid: int, number: int) -> bool:
            self.reaped.append((pid, int(number)))
            return True

        self.server._reap_worker = reap

    def write(self, data: bytes) -> None:
        def connect() -> int | None:
            try:
                return os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return None

        fd = until(connect, 5)
        os.write(fd, data)
        os.close(fd)

    def names(self) -> list[str]:
        return [name for name, _ in self.told]


def _line(pid: int, scope: str, expiration: float, number: int = 9) -> bytes:
    return (
        json.dumps(
            {
                "version": 1,
                "pid": pid,
                "scope_id": scope,
                "expiration_time": expiration,
                "signal": number,
            }
        ).encode()
        + b"\n"
    )


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "60"])


@case("T104.server_life")
def server_life(impl: Impl) -> Any:
    """Construction, start, stop; the pipe."""
    with folder() as d:
        (d / "fifo").write_text("a plain file in the way")
        s = Server(impl, d)
        made = Path(s.path).is_fifo()
        mode = oct(os.stat(s.path).st_mode & 0o777)
        old = os.umask(0)
        os.umask(old)
        before = abs(s.server.get_last_progress_time() - time.time()) < 2
        s.start()
        idle = abs(s.server.get_last_progress_time() - time.time()) < 2
        fd = os.open(s.path, os.O_WRONLY)
        os.write(fd, _line(os.getpid(), "s", -1, 0))
        os.close(fd)
        until(lambda: s.server._request_count == 1, 3)
        started = time.monotonic()
        s.server.stop()
        return {
            "fifo": made,
            "mode": mode,
            "progress": [before, idle, type(s.server.get_last_progress_time()).__name__],
            "told": s.told,
            "gone": not os.path.exists(s.path),
            "stopped soon": time.monotonic() - started < 3,
            "attributes": [s.server._is_client_started, s.server._timers],
            "stop twice": raised(s.server.stop),
        }


@case("T117.stop_without_client")
def stop_without_client(impl: Impl) -> Any:
    """stop with no client ever: at once, and its thread."""
    before = set(threading.enumerate())
    with folder() as d:
        s = Server(impl, d)
        s.start()
        started = time.monotonic()
        s.server.stop()
        took = time.monotonic() - started
        ours = [t for t in threading.enumerate() if t not in before]
        until(lambda: not any(t.is_alive() for t in ours), 1)
        return {
            "soon": took < 2,
            "thread ended": not any(t.is_alive() for t in ours),
            "told": s.told,
        }


@case("T107.expiry")
def expiry(impl: Impl) -> Any:
    """An expired timer: its process is killed by the signal asked for; the server lives."""
    shown = {}
    for number in (signal.SIGKILL, signal.SIGTERM):
        with folder() as d:
            victim = _sleeper()
            s = Server(impl, d)
            s.start()
            selves: list[int] = []
            real = os.kill

            def kill(pid: int, sig: int, selves: list[int] = selves, real: Any = real) -> None:
                if pid == os.getpid():
                    selves.append(sig)  # do not let it kill this process
                    return
                real(pid, sig)

            with mock.patch("os.kill", kill):
                s.write(_line(victim.pid, "scope", time.time() + 0.1, number))
                code = victim.wait(5)
                until(lambda s=s: "kill worker process" in s.names(), 3)
                time.sleep(0.1)
                s.server.stop()
            shown[number.name] = {
                "code": code,
                "told": s.told,
                "signals to the server's own process": [int(x) for x in selves],
                "timers": len(s.server._timers),
            }
    return shown


@case("T107.client_to_server")
def client_to_server(impl: Impl) -> Any:
    """Client and server of one implementation: blocks, nested, in several processes."""
    with folder() as d:
        s = Server(impl, d)
        s.start()

        def work() -> None:
            impl.timer.configure(impl.timer.FileTimerClient(s.path))
            for i in range(10):
                with impl.timer.expires(after=60, scope=f"s{i}"):
                    pass

        processes = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work()
                    code = 0
                finally:
                    os._exit(code)
            processes.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in processes]
        until(lambda: s.server._request_count == 80, 5)
        count = s.server._request_count
        s.server.stop()
        return {"codes": codes, "requests": count, "timers": len(s.server._timers)}


@case("T107.overrun")
def overrun(impl: Impl) -> Any:
    """A process that overruns its block is killed; one that does not is not."""
    with folder() as d:
        s = Server(impl, d)
        s.start()

        def child(sleep: float) -> int:
            pid = os.fork()
            if pid == 0:
                try:
                    impl.timer.configure(impl.timer.FileTimerClient(s.path))
                    with impl.timer.expires(after=0.5):
                        time.sleep(sleep)
                finally:
                    os._exit(0)
            return pid

        real = os.kill

        def kill(pid: int, sig: int) -> None:
            if pid != os.getpid():
                real(pid, sig)

        with mock.patch("os.kill", kill):
            slow, quick = child(20), child(0.01)
            codes = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in (slow, quick)]
            s.server.stop()
        return codes


@case("T108.gone_before_expiry")
def gone_before(impl: Impl) -> Any:
    """A process that left without releasing: nothing to kill, timers dropped."""
    with folder() as d:
        s = Server(impl, d)
        s.spy()
        s.start()
        child = subprocess.Popen(["/bin/true"])
        child.wait()
        s.write(_line(child.pid, "a", time.time() + 0.2))
        until(lambda: s.server._request_count == 1, 3)
        time.sleep(0.5)
        told = s.names()
        s.server.stop()
        return {"reaped": len(s.reaped), "timers": len(s.server._timers), "told": told}


@case("T109.timers")
def timers(impl: Impl) -> Any:
    """Registering, replacing, releasing, expiring, clearing."""
    with folder() as d:
        s = Server(impl, d)
        server = s.server
        make = impl.timer.FileTimerRequest
        now = 1000.0
        server.register_timers(
            [make(1, "a", 5.0, 9), make(1, "b", 2000.0, 9), make(2, "a", 7.0, 9)]
        )
        first = sorted(map(str, server._timers))
        expired = {
            str(pid): sorted(r.scope_id for r in reqs)
            for pid, reqs in server.get_expired_timers(now).items()
        }
        server.register_timers([make(1, "a", -1, 0), make(9, "never", -1, 0)])
        released = sorted(map(str, server._timers))
        server.register_timers([make(1, "b", 3000.0, 9)])
        replaced = server._timers[(1, "b")].expiration_time
        border = {str(k): len(v) for k, v in server.get_expired_timers(7.0).items()}
        server.clear_timers({1})
        return {
            "first": first,
            "expired": expired,
            "released": released,
            "replaced": replaced,
            "at the deadline": border,
            "cleared": sorted(map(str, server._timers)),
        }


@case("T109.reap")
def reap(impl: Impl) -> Any:
    """_reap_worker and is_process_running."""
    with folder() as d:
        s = Server(impl, d)
        victim = _sleeper()
        first = s.server.is_process_running(victim.pid)
        result = s.server._reap_worker(victim.pid, signal.SIGKILL)
        victim.wait(5)
        return {
            "running": [first, s.server.is_process_running(victim.pid)],
            "reaped": result,
            "again": s.server._reap_worker(victim.pid, signal.SIGKILL),
            "not allowed": _not_allowed(s.server),
        }


def _not_allowed(server: Any) -> Any:
    with (
        mock.patch("os.kill", side_effect=PermissionError),
        mock.patch("signal.pidfd_send_signal", side_effect=PermissionError),
    ):
        return outcome(lambda: server._reap_worker(os.getppid(), 15))


@case("T109.one_kill_per_process")
def one_kill(impl: Impl) -> Any:
    """Two expired timers and a valid one of a process: one kill, no timers left."""
    with folder() as d:
        victim = _sleeper()
        s = Server(impl, d)
        s.spy()
        s.start()
        now = time.time()
        with mock.patch("os.kill", _only_probe):
            s.write(
                _line(victim.pid, "late", now - 1)
                + _line(victim.pid, "later", now - 2)
                + _line(victim.pid, "valid", now + 60)
            )
            until(lambda: s.reaped, 3)
            time.sleep(0.2)
            s.server.stop()
        victim.kill()
        victim.wait()
        return {
            "reaped": [[pid == victim.pid, n] for pid, n in s.reaped],
            "timers": len(s.server._timers),
            "told": s.told,
        }


_real_kill = os.kill


def _only_probe(pid: int, number: int) -> None:
    if number == 0:
        _real_kill(pid, 0)


@case("T112.log_only")
def log_only(impl: Impl) -> Any:
    """Signal 0: told, not killed, dropped."""
    with folder() as d:
        victim = _sleeper()
        s = Server(impl, d)
        s.spy()
        s.start()
        s.write(_line(victim.pid, "quiet", time.time() - 1, 0))
        until(lambda: "timer expired" in s.names(), 3)
        time.sleep(0.2)
        s.server.stop()
        killed = victim.poll()
        victim.kill()
        victim.wait()
        return {
            "code": killed,
            "reaped": len(s.reaped),
            "told": s.told,
            "timers": len(s.server._timers),
        }


@case("T113.junk")
def junk(impl: Impl) -> Any:
    """A malformed line between two good ones in one write."""
    shown = {}
    for label, bad in (
        ("text", b"hello\n"),
        ("half", b'{"version": 1, "pid"\n'),
        ("no pid", b'{"version": 1, "scope_id": "x", "expiration_time": 1, "signal": 9}\n'),
        ("empty", b"\n"),
    ):
        with folder() as d:
            s = Server(impl, d)
            s.spy()
            s.start()
            pid = os.getpid()
            s.write(_line(pid, "a", time.time() + 60) + bad + _line(pid, "b", time.time() + 60))
            until(lambda s=s: len(s.server._timers) == 2, 0.7)
            kept = sorted(scope for _, scope in s.server._timers)
            s.write(_line(pid, "c", time.time() + 60))
            until(lambda s=s: any(scope == "c" for _, scope in s.server._timers), 4)
            shown[label] = {"kept": kept, "alive": any(x == "c" for _, x in s.server._timers)}
            s.server.stop()
    return shown


@case("T114.idle_writer")
def idle_writer(impl: Impl) -> Any:
    """A writer that keeps the pipe open: are timers still looked at?"""
    shown = {}
    for label, data in (("idle", b""), ("partial line", b'{"version": 1, ')):
        with folder() as d:
            victim = _sleeper()
            s = Server(impl, d)
            s.spy()
            s.start()
            s.write(_line(victim.pid, "a", time.time() + 0.5))
            until(lambda s=s: s.server._request_count == 1, 3)
            fd = os.open(s.path, os.O_WRONLY)
            if data:
                os.write(fd, data)
            with mock.patch("os.kill", _only_probe):
                until(lambda s=s: s.reaped, 3)
            shown[label] = len(s.reaped)
            os.close(fd)
            with mock.patch("os.kill", _only_probe):
                s.server.stop()
            victim.kill()
            victim.wait()
    return shown


@case("T116.progress")
def progress(impl: Impl) -> Any:
    """Progress time moves on with each turn of the loop."""
    with folder() as d:
        s = Server(impl, d)
        s.start()
        s.write(_line(os.getpid(), "a", -1, 0))
        until(lambda: s.server._request_count == 1, 3)
        first = s.server.get_last_progress_time()
        moved = until(lambda: s.server.get_last_progress_time() > first, 4)
        s.server.stop()
        return {"moves": bool(moved)}


@case("T118.expiry_in_agent")
def expiry_in_agent(impl: Impl) -> Any:
    """A timer expires under an agent with a restart left: what becomes of the agent."""
    with folder() as d:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
                os.environ["TORCHELASTIC_TIMER_FILE"] = str(d / "fifo")
                agent = local_agent(impl, entrypoints.overrun_first, (0.2, 20), 2, max_restarts=1)
                (d / "result").write_text(json.dumps([run(agent), agent._remaining_restarts]))
            finally:
                os._exit(0)
        deadline = time.monotonic() + 12
        code = None
        while code is None and time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        result = json.loads((d / "result").read_text()) if (d / "result").exists() else None
        return {"code": code, "result": result, "pipe left": (d / "fifo").exists()}


def _other(impl: Impl) -> Impl:
    return impl.other


@case("T103.their_client_our_server", batch="torch_things")
def cross_wire(impl: Impl) -> Any:
    """This implementation's server with the other one's client."""
    other = _other(impl)
    with folder() as d:
        s = Server(impl, d)
        s.start()
        victim = os.fork()
        if victim == 0:
            try:
                other.timer.configure(other.timer.FileTimerClient(s.path))
                with other.timer.expires(after=60, scope="good"):
                    pass
                with other.timer.expires(after=0.3, scope="bad"):
                    time.sleep(20)
            finally:
                os._exit(0)
        real = os.kill

        def kill(pid: int, sig: int) -> None:
            if pid != os.getpid():
                real(pid, sig)

        with mock.patch("os.kill", kill):
            code = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
            until(lambda: "kill worker process" in s.names(), 3)
            s.server.stop()
        return {"code": code, "told": s.told, "requests": s.server._request_count}


@case("T105.local_timers")
def local_timers(impl: Impl) -> Any:
    """LocalTimerServer and LocalTimerClient over a multiprocessing queue."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    server = impl.timer.LocalTimerServer(queue, max_interval=0.05)
    server.start()

    def child(sleep: float) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                impl.timer.configure(impl.timer.LocalTimerClient(queue))
                with impl.timer.expires(after=0.3):
                    time.sleep(sleep)
                queue.close()
                queue.join_thread()
            finally:
                os._exit(0)
        return pid

    slow, quick = child(20), child(0.01)
    codes = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in (slow, quick)]
    server.stop()
    return {"codes": codes}


@case("T105.local_queue")
def local_queue(impl: Impl) -> Any:
    """MultiprocessingRequestQueue: size, get with a time limit."""
    queue = multiprocessing.get_context("fork").Queue()
    requests = impl.get("elastic.timer.local_timer:MultiprocessingRequestQueue")(queue)
    empty = [requests.size(), requests.get(1, timeout=0.1)]
    make = impl.timer.TimerRequest
    queue.put(make(1, "a", 1.0))
    queue.put(make(1, "b", 2.0))
    until(lambda: requests.size() == 2, 2)
    got = requests.get(5, timeout=0.5)
    return {"empty": empty, "got": [[r.worker_id, r.scope_id, r.expiration_time] for r in got]}


@case("T105.timer_server")
def timer_server(impl: Impl) -> Any:
    """TimerServer's loop with fakes: one reap, failing reaps, releases."""
    make = impl.timer.TimerRequest

    class Queue(impl.get("elastic.timer.api:RequestQueue")):  # type: ignore[misc]
        def __init__(self, batches: list[list[Any]]) -> None:
            self.batches = batches

        def size(self) -> int:
            return sum(map(len, self.batches))

        def get(self, size: int, timeout: float) -> list[Any]:
            return self.batches.pop(0) if self.batches else []

    def go(answers: list[Any]) -> Any:
        calls: list[Any] = []

        class Server(impl.timer.TimerServer):  # type: ignore[misc, name-defined]
            def register_timers(self, timer_requests: Any) -> None:
                calls.append(["register", len(timer_requests)])

            def clear_timers(self, worker_ids: Any) -> None:
                calls.append(["clear", sorted(worker_ids)])

            def get_expired_timers(self, deadline: float) -> Any:
                return {1: [make(1, "a", 1.0)]}

            def _reap_worker(self, worker_id: Any) -> bool:
                calls.append(["reap", worker_id])
                answer = answers.pop(0)
                if isinstance(answer, BaseException):
                    raise answer
                return bool(answer)

        server = Server(Queue([[make(1, "a", 1.0)]]), 0.01)
        error = raised(lambda: server._run_watchdog())
        return {"error": error, "calls": calls}

    return {"reaped": go([True]), "not": go([False]), "raises": go([KeyError("x")])}


@case("T120.health_server")
def health_server(impl: Impl) -> Any:
    """HealthCheckServer: attributes, factory, no early call, idempotent ends."""
    from harness import free_port

    module = impl.mod("elastic.agent.server.health_check_server")
    called: list[int] = []

    def callback() -> int:
        called.append(1)
        return int(time.time())

    port = free_port()
    server = module.create_healthcheck_server(callback, port, 60)
    shown = {
        "kind": isinstance(server, module.HealthCheckServer),
        "values": [server._alive_callback is callback, server._port == port, server._timeout],
        "property": server.alive_callback is callback,
        "early": len(called),
        "start": outcome(server.start),
        "start twice": outcome(server.start),
    }
    shown["answers"] = _get(port)
    shown["stop"] = outcome(server.stop)
    shown["stop twice"] = outcome(server.stop)
    return shown


def _get(port: int) -> str:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/livez")
        return f"HTTP {connection.getresponse().status}"
    except OSError:
        return "nothing listens"
    finally:
        connection.close()


@case("T120.health_logs")
def health_logs(impl: Impl) -> Any:
    """Start and stop of the base class are told through the module's logger `log`."""
    module = impl.mod("elastic.agent.server.health_check_server")
    with mock.patch.object(module, "log") as log:
        server = module.HealthCheckServer(lambda: 0, 1, 60)
        server.start()
        server.stop()
    return [c[0] for c in log.method_calls]


@case("T106.threads_and_gone")
def nothing_left(impl: Impl) -> Any:
    """Two servers one after the other on one path."""
    with folder() as d:
        for _ in range(2):
            s = Server(impl, d)
            s.start()
            s.write(_line(os.getpid(), "a", -1, 0))
            until(lambda s=s: s.server._request_count == 1, 3)
            s.server.stop()
        return {"requests": s.server._request_count, "left": sorted(p.name for p in d.iterdir())}


@case("T111.run_once")
def run_once(impl: Impl) -> Any:
    """run_once drains what is there and ends."""
    with folder() as d:
        s = Server(impl, d)
        s.start()
        s.write(_line(os.getpid(), "a", time.time() + 60))
        until(lambda: s.server._request_count == 1, 3)
        ends = threads([lambda: s.server.run_once()], timeout=5)
        return {"ends": ends, "requests": s.server._request_count}


@case("T107.process_gone")
def process_gone(impl: Impl) -> Any:
    """What the helpers of these cases see of an ended process."""
    victim = _sleeper()
    victim.kill()
    victim.wait()
    with env():
        return [alive(victim.pid), gone(victim.pid, 1)]
