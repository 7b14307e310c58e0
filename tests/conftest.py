"""What holds for every test: default signals, a temporary folder of our own, nothing left behind.

Everything that the tests start inherits a mark in its environment, and everything that
they put into the temporary folder goes into one made for this run. When the run is over
whatever is still there fails it, whether or not any test has noticed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples in each run, however slow the machine; other ones, and more, on request.
_SLOW = os.environ.get("PHALANX_SLOW_TESTS") == "1"
hypothesis.settings.register_profile(
    "phalanx",
    deadline=None,
    derandomize=not _SLOW,
    max_examples=1000 if _SLOW else 100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("phalanx")

MARK = "TESTED_BY"
"""In the environment of all that the tests start; its value is this run's folder."""

LIMIT = 10.0  # seconds that what is about to end may take for it

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Of the interpreters that run the tests: they end with them."""


_NOT_OURS = ("torchinductor_", "pymp-")
"""torch's cache, and what multiprocessing removes when the interpreter ends."""


def pytest_configure(config: pytest.Config) -> None:
    _default_signals()
    # Children exec at once; what gRPC does upon a fork can end them before they get there.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    real = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    if _is_worker(config):  # of pytest-xdist
        folder = Path(os.environ[MARK], config.workerinput["workerid"])  # type: ignore[attr-defined]
        folder.mkdir()
    else:
        folder = Path(tempfile.mkdtemp(prefix="phalanx-tests-", dir=real))
        os.environ[MARK] = str(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _default_signals() -> None:
    """Whoever runs the tests may ignore or block signals (nohup, a shell's background)."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN and number not in (
            signal.SIGPIPE,  # Python's own doing, as is the next
            signal.SIGXFSZ,
        ):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.fixture(autouse=True)
def _who_left_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remember which test a file in the temporary folder appeared in."""
    folder = tempfile.gettempdir()
    before = set(os.listdir(folder))
    yield
    for name in set(os.listdir(folder)) - before:
        _made_by[name] = request.node.nodeid


_made_by: dict[str, str] = {}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when anything is left of it."""
    folder = Path(tempfile.gettempdir())
    left = [
        f"{name}, since {_made_by.get(name, 'the start')}"
        for name in os.listdir(folder)
        if not name.startswith(_NOT_OURS)
    ]
    if _is_worker(session.config):
        session.config.workeroutput["left"] = left  # type: ignore[attr-defined]
        return
    left = [*_left_by_workers, *(line for line in left if not line.startswith("gw"))]
    left += [f"process {pid}: {what}" for pid, what in _processes_left().items()]
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.section("left behind", red=True)
            for line in left:
                reporter.line(line)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(folder, ignore_errors=True)


_left_by_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A process of pytest-xdist has ended."""
    _left_by_workers.extend(getattr(node, "workeroutput", {}).get("left", ()))


def _processes_left() -> dict[int, str]:
    """Processes of this run that do not end by themselves: pid to what they are."""
    left = {}
    end = time.monotonic() + LIMIT
    for pid in _marked():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            wait = max(0.0, end - time.monotonic())
            if not select.select([pidfd], [], [], wait)[0]:
                left[pid] = _describe(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
    return left


def _marked() -> list[int]:
    mark = f"{MARK}={os.environ[MARK]}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path("/proc", name, "environ").read_bytes()
            command = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in environment and not any(helper in command for helper in _HELPERS):
            found.append(int(name))
    return found


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return "ended while it was looked at"
    test = [v.partition(b"=")[2] for v in environment if v.startswith(b"PYTEST_CURRENT_TEST=")]
    words = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return f"{words}(started by {test[0].decode() if test else 'an unknown test'})"
