"""``MultiprocessContext``: workers that are functions, in processes of Python's making."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.elastic.multiprocessing import function_worker
from phalanx.elastic.multiprocessing.api import PContext, RunProcsResult, logger
from phalanx.elastic.multiprocessing.errors import first_failure
from phalanx.elastic.multiprocessing.logs_specs import LogsSpecs
from phalanx.process import launch, syscalls, tree, undertaker
from phalanx.process.oom import Mark, OomWatch

if TYPE_CHECKING:
    import socket

    from phalanx.process.store_process import StoreProcess
    from phalanx.process.supervisor import Supervisor

__all__ = ["MultiprocessContext"]

_GROUP_SECONDS = 0.5  # between SIGTERM to a worker's session and SIGKILL
_KILL_SECONDS = 10.0  # after SIGKILL
_TICK = 0.25  # how often ``hurry`` is asked during a stop when nothing wakes us


class MultiprocessContext(PContext):
    """Runs ``entrypoint(*args[rank])`` in one process each; the values come back pickled.

    PyTorch's constructor. Every worker leads a session of its own and dies with the
    agent. One that exits 0 without a value has returned None.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
            **more,
        )
        self.start_method = start_method
        self._numa_options = numa_options
        self._mark = secrets.token_hex(6)
        self._children: dict[int, _Child] = {}
        self._started = False
        self._closed = False
        self._poll_set = select.poll()
        self._by_fd: dict[int, _Child] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll_set.register(self._wake_fd, select.POLLIN)
        self._news = False
        self._oom: OomWatch | None = None
        self._undertaker: _Undertaker | None = None
        self._store_supervisor: Supervisor | None = None
        self._result: RunProcsResult | None = None

    # -- starting

    def _start(self) -> None:
        if self._started:
            raise ValueError("the processes of this context have been started already")
        self._started = True
        context: Any = multiprocessing.get_context(self.start_method)
        self._oom = OomWatch()
        if self.nprocs:
            self._undertaker = _Undertaker(self._mark)
        for rank in range(self.nprocs):
            child = self._start_one(context, rank)
            assert self._undertaker is not None
            self._undertaker.tell(child.pid)
            self._children[rank] = child
            for fd in child.fds():
                self._by_fd[fd] = child
                self._poll_set.register(fd, select.POLLIN)
            child.mark = self._oom.mark(child.pid)

    def _start_one(self, context: Any, rank: int) -> _Child:
        mark = f"{self._mark}.{rank}"
        env = {k: v for k, v in self.envs[rank].items() if v is not None}
        env[launch.WORKER] = mark
        reader, writer = context.Pipe(duplex=False)
        task = function_worker.Task(
            local_rank=rank,
            fn=self.entrypoint,  # type: ignore[arg-type]
            args=tuple(self.args[rank]),
            env=env,
            stdout=self.stdouts[rank],
            stderr=self.stderrs[rank],
            value=writer,
            agent_pid=os.getpid(),
            # The kernel ties it to the thread that starts the process, not to the process.
            death_signal=threading.current_thread() is threading.main_thread(),
            numa_options=self._numa_options,
        )
        process = context.Process(
            target=function_worker.main,
            args=(task,),
            name=function_worker.EnvironmentFirst(f"{self.name}-{rank}", env),
            daemon=False,
        )
        try:
            if self.start_method == "fork":
                # Until the child has put its own handlers in place, no signal may reach it.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                try:
                    process.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            else:
                process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            reader.close()
            raise pickle.PicklingError(
                f"the entrypoint or its arguments cannot be sent to a {self.start_method}ed "
                f"process: {error}. Use a function at the top level of an importable module, "
                "or start_method 'fork'"
            ) from error
        except BaseException:
            reader.close()
            raise
        finally:
            writer.close()
        return _Child(rank, process, reader, mark, by_server=self.start_method == "forkserver")

    def start_store(self, listener: socket.socket, eager: bool = False) -> StoreProcess:
        """See `PContext.start_store`."""
        from phalanx.process.supervisor import Supervisor

        if self._store_supervisor is None:
            supervisor = Supervisor(job=self.name)
            supervisor.open()
            self._store_supervisor = supervisor
        return self._store_supervisor.start_store(listener, eager=eager)

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {rank: child.pid for rank, child in self._children.items()}

    # -- waiting

    def _wait_event(self, timeout: float) -> bool:
        if self._closed:
            return self._news or super()._wait_event(timeout)
        end = time.monotonic() + timeout
        while not self._news:
            left = end - time.monotonic()
            if self._take(max(0.0, left)):
                return True
            if left <= 0:
                return False
        return True

    def _take(self, timeout: float) -> bool:
        """Wait, and take in values and deaths; True if the caller should look or was woken."""
        look = False
        for fd, _ in self._poll_set.poll(max(0.0, timeout) * 1000):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                look = True
                continue
            child = self._by_fd.get(fd)
            if child is None:  # forgotten a moment ago
                continue
            if fd == child.reader_fd:
                if not child.read():
                    self._forget(fd)
            elif child.note_end():
                self._forget(fd)
                if child.reader_fd in self._by_fd:
                    self._forget(child.reader_fd)
                self._news = look = True
        return look

    def _forget(self, fd: int) -> None:
        del self._by_fd[fd]
        self._poll_set.unregister(fd)

    def _poll(self) -> RunProcsResult | None:
        if self._result is not None:
            return self._result
        if not self._closed:
            self._take(0)
        self._news = False
        children = self._children.values()
        failed = any(child.failed for child in children)
        if not failed and any(child.returncode is None for child in children):
            return None
        oom, self._oom = self._oom, None  # outlives the close: the peak is known only then
        try:
            self.close()
            self._result = self._make_result(oom)
        finally:
            if oom is not None:
                oom.close()
        return self._result

    def _make_result(self, oom: OomWatch | None) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank, child in self._children.items():
            if not child.failed and child.returncode is not None:
                continue
            explanation = child.trouble
            if oom is not None and child.mark is not None and child.signalled_ns is None:
                explanation = oom.explain(child.mark, child.returncode or 0) or explanation
            # None: not even SIGKILL has ended it. 0: it did not send what it returned.
            code = -signal.SIGKILL if child.returncode is None else child.returncode or 1
            result.failures[rank] = self._failure(
                rank,
                child.pid,
                code,
                child.dead_ns or time.monotonic_ns(),
                signalled_ns=child.signalled_ns,
                explanation=explanation,
            )
        # As PyTorch: of functions those that failed by themselves are reported, if there are.
        alone = {r: f for r, f in result.failures.items() if not f.stopped_by_agent}
        result.failures = alone or result.failures
        if result.failures:
            first = result.failures[first_failure(result.failures)]
            logger.error(
                "failed (exitcode: %s) local_rank: %s (pid: %s) of fn: %s (start_method: %s)",
                first.exitcode,
                first.local_rank,
                first.pid,
                getattr(self.entrypoint, "__qualname__", self.entrypoint),
                self.start_method,
            )
        else:
            for rank, child in self._children.items():
                if not child.has_value:
                    logger.warning(
                        "local rank %s (pid %s) exited 0 without returning: its value is None",
                        rank,
                        child.pid,
                    )
                result.return_values[rank] = child.value
        return result

    # -- stopping

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        if self._closed:
            return
        self._closed = True
        children = list(self._children.values())
        try:
            if any(child.returncode is None for child in children):
                self._stop(children, death_sig, timeout)
            self._sweep(children)
        finally:
            for fd in list(self._by_fd):
                self._forget(fd)
            for child in children:
                child.release()
            if self._oom is not None:
                self._oom.close()
                self._oom = None
            if self._undertaker is not None:
                self._undertaker.dismiss()
            supervisor, self._store_supervisor = self._store_supervisor, None
            if supervisor is not None:
                supervisor.close()

    def _stop(self, children: list[_Child], death_sig: signal.Signals, timeout: float) -> None:
        self._take(0)

        def running() -> list[_Child]:
            return [child for child in children if child.returncode is None]

        def wait(seconds: float, patient: bool = True) -> None:
            end = time.monotonic() + seconds
            while running() and not (patient and self._hurry()):
                left = end - time.monotonic()
                if left <= 0:
                    return
                self._take(min(left, _TICK))

        if not running():
            return
        logger.warning(
            "stopping %s with %s, for %s s at most",
            ", ".join(f"local rank {c.rank} (pid {c.pid})" for c in running()),
            signal.Signals(death_sig).name,
            timeout,
        )
        if timeout > 0:
            for child in running():
                child.signal(death_sig)
            wait(timeout)
            for child in running():
                for entry in child.session():
                    tree.kill(entry, signal.SIGTERM)
            wait(min(_GROUP_SECONDS, timeout))
        late = running()
        for child in late:
            logger.warning(
                "local rank %s (pid %s) did not end after %s and is killed",
                child.rank,
                child.pid,
                signal.Signals(death_sig).name,
            )
            below = tree.descendants(child.pid)
            child.signal(signal.SIGKILL)
            for entry in below:
                tree.kill(entry)
        if late:
            wait(_KILL_SECONDS, patient=False)
        for child in running():
            logger.error(
                "local rank %s (pid %s) does not end after SIGKILL and is given up: the kernel "
                "holds it, perhaps for a device; this host may need attention",
                child.rank,
                child.pid,
            )

    def _sweep(self, children: list[_Child]) -> None:
        """Kill what workers left behind: in their sessions, or with their mark."""
        sessions = {child.pid for child in children if child.unreaped}
        own = {child.pid for child in children}
        for _ in range(5):  # one that forks while we look is found the next time
            left = [
                entry
                for entry in tree.everybody()
                if entry.pid not in own
                and not entry.zombie
                and (
                    entry.session in sessions
                    or (tree.environment_value(entry.pid, launch.WORKER) or "").startswith(
                        self._mark + "."
                    )
                )
            ]
            killed = [entry.pid for entry in left if tree.kill(entry)]
            if not killed:
                return
            logger.info("killed what workers had left: %s", killed)
            for pid in killed:
                _await_end(pid)


def _await_end(pid: int) -> None:
    """Wait a moment for the end of a process, and reap it if it has become our child."""
    try:
        pidfd = syscalls.pidfd_open(pid)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(1000):
            os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    finally:
        os.close(pidfd)


class _Undertaker:
    """Ends what workers have started, should this process die before it can; see there."""

    def __init__(self, mark: str) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        try:
            script = undertaker.__file__
            command = [sys.executable, "-S", "-E", script, str(os.getpid()), mark]
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, reader, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            self._pid = os.posix_spawn(
                command[0],
                command,
                {},
                file_actions=actions,
                setsigmask=(),
                setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)

    def tell(self, pid: int) -> None:
        """``pid`` leads the session of a worker."""
        try:
            os.write(self._writer, b"%d\n" % pid)
        except BrokenPipeError:
            logger.warning("the process that would clean up after this one has ended")

    def dismiss(self) -> None:
        """It is not needed any more."""
        os.close(self._writer)
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):  # somebody else has reaped it
            pass


class _Child:
    """One worker."""

    def __init__(self, rank: int, process: Any, reader: Any, mark: str, *, by_server: bool) -> None:
        self.rank = rank
        self.process = process
        self.pid: int = process.pid
        self.name = mark
        self.reader = reader
        self.reader_fd: int = reader.fileno()
        os.set_blocking(self.reader_fd, False)
        # A child of the fork server is not ours to wait for: the server tells its status.
        self._by_server = by_server
        self.pidfd = syscalls.pidfd_open(self.pid)
        self.end_fd: int = process.sentinel if by_server else self.pidfd
        self.returncode: int | None = None
        self.dead_ns: int | None = None
        self.signalled_ns: int | None = None
        self.mark: Mark | None = None
        self.trouble: str | None = None  # why its value cannot be used
        self.has_value = False
        self.value: Any = None
        self._data = bytearray()
        # While its corpse is there nobody else can get its pid, and no session its number.
        self.unreaped = not by_server

    def fds(self) -> tuple[int, int]:
        return self.reader_fd, self.end_fd

    @property
    def failed(self) -> bool:
        return bool(self.returncode) or self.trouble is not None

    def read(self) -> bool:
        """Take what there is of the value; False at its end."""
        try:
            while data := os.read(self.reader_fd, 1 << 20):
                self._data += data
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def note_end(self) -> bool:
        """Note how it ended; False if it has not."""
        code = self._exit_code()
        if code is None:
            return False
        self.dead_ns = time.monotonic_ns()
        self.read()
        self._unpack()
        self.returncode = code
        return True

    def _exit_code(self) -> int | None:
        if self.unreaped:
            try:
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                found = os.waitid(os.P_PIDFD, self.pidfd, flags)
            except ChildProcessError:  # somebody else has reaped it, multiprocessing perhaps
                self.unreaped = False
                code: int | None = self.process.exitcode
                return 1 if code is None else code
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        code = self.process.exitcode
        return code

    def _unpack(self) -> None:
        start = function_worker.HEADER.size
        if len(self._data) < start:
            return
        (size,) = function_worker.HEADER.unpack_from(self._data)
        if len(self._data) != start + size:
            return
        try:
            self.value = pickle.loads(memoryview(self._data)[start:])
            self.has_value = True
        except Exception as error:
            self.trouble = f"its value cannot be unpickled: {type(error).__name__}: {error}"
        self._data = bytearray()

    def signal(self, signum: int) -> None:
        """Signal this process alone."""
        try:
            syscalls.pidfd_send_signal(self.pidfd, int(signum))
        except ProcessLookupError:
            return
        if self.signalled_ns is None:
            self.signalled_ns = time.monotonic_ns()

    def session(self) -> list[tree.Stat]:
        """Itself and what is in its session, if it leads one."""
        return [entry for entry in tree.everybody() if entry.session == self.pid]

    def release(self) -> None:
        """Reap it and close what belongs to it."""
        if self.returncode is not None:
            _ = self.process.exitcode  # reaps; join alone waits for what holds the child's pipe
            self.process.join(1.0)
            try:
                self.process.close()
            except ValueError:
                pass
        else:
            # Python's exit would wait for it without an end.
            known: Any = getattr(multiprocessing.process, "_children", set())
            known.discard(self.process)
        if self.reader_fd >= 0:
            self.reader.close()
            os.close(self.pidfd)
            self.reader_fd = -1
