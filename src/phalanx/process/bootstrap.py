"""Turns a forked child of the keeper into what a fresh interpreter would be.

A warm worker must not be told from ``python -u script args``: same arguments, search path,
``__main__``, streams, signals, tracebacks, exit status. `become` arranges that and then runs
the program. It ends by leaving the main module of the keeper's own interpreter, so that
threads are joined, ``atexit`` handlers run and streams are flushed by the interpreter itself.

The rule about state: what *imports* changed stays, since the program's own imports would have
changed it as well; what the *keeper* changed is undone.

The keeper's part:

* It is started with the interpreter and the flags that the program's command names, since
  ``sys.flags`` cannot be changed, and has written nothing to its standard streams.
* It imports this module before anything that programs import: the end of a program is
  reported by the ``atexit`` handler that is registered first and called last.
* The child leaves the keeper's stack before it calls `become`, and calls it from the end of
  the main module, outside of any ``except`` and ``finally``: the program would otherwise see
  an exception being handled, and must be able to end the way any program does.
* Python signal handlers of this package are undone here. A signal that the keeper ignores it
  restores itself: an ignored signal is also what a fresh process inherits.

Known differences that stay: the workers of one keeper share one hash seed (unless
``PYTHONHASHSEED`` is set); what imports write to the terminal is seen once, by the keeper, and
not by each worker; modules are in ``sys.modules`` before the program imports them;
``warnings.warn`` with a ``stacklevel`` beyond the program's first frame names a file of ours;
the error for a source that is not text in its encoding is worded as for ``exec``.
"""

from __future__ import annotations

# All that is needed is imported here, once per keeper, and nothing in its children.
import atexit
import builtins
import functools
import io
import itertools
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from phalanx.process import errorfile, title
from phalanx.process.program import Program

_PACKAGE = __name__.partition(".")[0]


def become(
    program: Program,
    env: Mapping[str, str],
    cwd: str | None = None,
    on_finish: Callable[[int], None] | None = None,
) -> NoReturn:
    """Be ``program`` with the complete environment ``env``, in the directory ``cwd`` if given.

    Runs in a forked child whose descriptors 0 to 2, session and ignored signals are already
    the program's. Never returns: it raises SystemExit, or KeyboardInterrupt, which the caller
    lets through to the end of the main module. ``on_finish(status)`` is called as the last of
    the ``atexit`` handlers, when the program has ended by itself, with its status as
    `subprocess` has it (-2 after an uncaught KeyboardInterrupt); not after ``os._exit`` or a
    signal. Raises ValueError for a program that is no Python program and OSError when ``cwd``
    cannot be entered.
    """
    if not program.warmable:
        raise ValueError(f"a warm process cannot become {program.argv[0]!r}: not a Python program")
    if cwd is not None:
        os.chdir(cwd)
    _end.begin(on_finish)
    _environment(env)
    _arguments(program)
    _signals()
    _streams(unbuffered=_asks_unbuffered(program) or bool(env.get("PYTHONUNBUFFERED")))
    _libraries()
    _forget_ourselves()
    title.show_as(program.argv, env)
    if program.module is not None:
        search_path.first = _working_directory()
        _fresh_main()
        ending = _run_module(program.module, alter_argv=True)
    else:
        assert program.script is not None
        ending = _start_script(program.script)
    _end.leave(ending)


# ---------------------------------------------------------------------------------------
# What surrounds the program
# ---------------------------------------------------------------------------------------


class SearchPath:
    """The entry that the interpreter puts before all others on ``sys.path``.

    It is the keeper's own at first, the program's while modules are preloaded (a module
    beside the script must shadow an installed one in both), then the program's for good.
    """

    def __init__(self) -> None:
        self._safe = bool(getattr(sys.flags, "safe_path", sys.flags.isolated))
        ours = None if self._safe else _first_of_ours()
        self._first = ours if sys.path[:1] == [ours] else None  # or somebody took it away

    @property
    def first(self) -> str | None:
        return self._first

    @first.setter
    def first(self, value: str | None) -> None:
        self._replace(None if self._safe else value)

    def force(self, value: str) -> None:
        """Set it for a directory or archive that is run itself: there a safe path has no say."""
        self._replace(value)

    def _replace(self, value: str | None) -> None:
        at = 0
        if self._first is not None and self._first in sys.path:
            at = sys.path.index(self._first)
            del sys.path[at]
        if value is not None:
            sys.path.insert(at, value)
        self._first = value


def _first_of_ours() -> str | None:
    """What the interpreter put first on ``sys.path`` when this process was started."""
    if sys.argv[0] == "-c":
        return ""
    if getattr(sys.modules.get("__main__"), "__spec__", None) is not None:  # -m
        return _working_directory()
    return script_directory(sys.argv[0])


def script_directory(script: str) -> str:
    """What the interpreter puts first on ``sys.path`` for a script: links are followed."""
    try:
        return os.path.dirname(os.path.realpath(script, strict=True))
    except OSError:
        return os.path.dirname(script)


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


search_path = SearchPath()


def _asks_unbuffered(program: Program) -> bool:
    for word in program.argv[1:]:
        if not word.startswith("-") or word == "-m":
            return False
        if not word.startswith("--") and "u" in word:
            return True
    return False


def _environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for name, (before, after) in _inherited.items():
        if env.get(name) != before:
            continue
        if after is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = after


def _arguments(program: Program) -> None:
    sys.argv[:] = [program.script if program.script is not None else "-m", *program.args]
    sys.orig_argv = list(program.argv)


def _is_ours(function: object) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and (module + ".").startswith(_PACKAGE + ".")


def _signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers) and _is_ours(handler):
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _streams(unbuffered: bool) -> None:
    """Make the standard streams anew on descriptors 0 to 2, as ``create_stdio`` does.

    The objects stay the same where they can: log handlers that were made by an import hold
    on to them.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        dunder = f"__{name}__"
        old = getattr(sys, dunder)
        current = getattr(sys, name)
        try:
            os.fstat(fd)
        except OSError:
            new = None
        else:
            new = _stream(fd, name, old, unbuffered)
        setattr(sys, dunder, new)
        if current is old or current is None:
            setattr(sys, name, new)


def _stream(fd: int, name: str, old: object, unbuffered: bool) -> io.TextIOWrapper:
    writes = fd != 0
    raw_write = writes and unbuffered
    buffer: Any = open(fd, "wb" if writes else "rb", 0 if raw_write else -1, closefd=False)
    raw = buffer if raw_write else buffer.raw
    raw.name = f"<{name}>"
    like = next(
        (s for s in (old, sys.__stdin__, sys.__stdout__, sys.__stderr__) if s is not None), None
    )
    encoding = getattr(like, "encoding", None) or "utf-8"
    if fd == 2:
        errors = "backslashreplace"
    else:
        errors = getattr(like, "errors", None) or "strict"
        if errors == "backslashreplace":
            errors = "strict"
    kinds: dict[str, Any] = {
        "encoding": encoding,
        "errors": errors,
        "newline": "\n",
        "line_buffering": not unbuffered and (raw.isatty() or fd == 2),
        "write_through": unbuffered,
    }
    if type(old) is io.TextIOWrapper:
        stream = old
        stream.__init__(buffer, **kinds)  # type: ignore[misc]
    else:
        stream = io.TextIOWrapper(buffer, **kinds)
    stream.mode = "w" if writes else "r"  # type: ignore[misc]
    return stream


def _libraries() -> None:
    """What lives in modules that are loaded and differs between processes."""
    main_thread = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()
    loaded: Any = sys.modules
    if (tempfile := loaded.get("tempfile")) is not None:
        tempfile.tempdir = None  # TMPDIR may be another one
    if (process := loaded.get("multiprocessing.process")) is not None:
        # A fresh key and name counter; `spawn` starts its children in the directory that was
        # current when multiprocessing was imported.
        process._current_process = type(process._current_process)()
        process._parent_process = None
        process._process_counter = itertools.count(1)
        process._children = set()
        process.ORIGINAL_DIR = _working_directory()
    if (random := loaded.get("numpy.random")) is not None:
        # Python's own generator is reseeded by fork; these would repeat themselves in all
        # children of one keeper. A fresh process seeds all of them from the system.
        random.seed()
    if (torch := loaded.get("torch")) is not None:
        torch.default_generator.seed()
    if (c10d := loaded.get("torch.distributed.distributed_c10d")) is not None:
        _part_in_peace(c10d, loaded.get("torch.distributed"))


_PARTING_SECONDS = 0.05


def _part_in_peace(c10d: Any, package: Any) -> None:
    """Give gloo's threads a moment before the groups are taken down.

    After each collective a thread of gloo lets go of its tensors, for which it needs the
    interpreter lock; a group's destructor joins that thread holding the lock. A fresh
    process seldom meets itself there, because its first ``destroy_process_group`` still
    has much to import; one that has everything loaded would deadlock most of the time.
    """
    if not hasattr(c10d, "destroy_process_group") or package is None:
        return
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_PARTING_SECONDS)
        return destroy(*args, **kwargs)

    c10d.destroy_process_group = package.destroy_process_group = destroy_process_group


_kept: list[object] = []  # what a running frame of the interpreter may still point at
_inherited: dict[str, tuple[str | None, str | None]] = {}
_stay = False


def inherit(environment: Mapping[str, tuple[str | None, str | None]], ourselves: bool) -> None:
    """Told by the preloading keeper: what imports did that each worker's imports would do.

    ``environment``: variables they changed, with the values before and after (None: absent);
    a worker that starts with another value keeps its own. ``ourselves``: the program imports
    this package, so its modules stay loaded.
    """
    global _stay
    _inherited.update(environment)
    _stay = _stay or ourselves


def _forget_ourselves() -> None:
    """Take our modules out of ``sys.modules``, unless the program's imports asked for them."""
    if _stay:
        return
    for name in our_modules():
        if name in sys.modules:
            _kept.append(sys.modules.pop(name))


@functools.lru_cache(maxsize=1)
def our_modules() -> tuple[str, ...]:
    """The loaded modules of this package.

    To be called once before the fork: looking through ``sys.modules`` counts references to
    thousands of names, and each of their pages would be copied for each worker.
    """
    return tuple(n for n in list(sys.modules) if (n + ".").startswith(_PACKAGE + "."))


# ---------------------------------------------------------------------------------------
# The program itself
# ---------------------------------------------------------------------------------------


def _fresh_main() -> ModuleType:
    _kept.append(sys.modules.get("__main__"))
    main = ModuleType("__main__")
    main.__dict__.update(
        __loader__=BuiltinImporter, __annotations__={}, __builtins__=builtins, __spec__=None
    )
    sys.modules["__main__"] = main
    return main


def _start_script(script: str) -> BaseException | int:
    path = os.path.join(_working_directory() or "", script)
    try:
        importer = pkgutil.get_importer(path)
    except Exception:
        importer = None
    if importer is not None:  # a directory or an archive with a __main__ in it
        search_path.force(path)
        _fresh_main()
        return _run_module("__main__", alter_argv=False)
    search_path.first = script_directory(script)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.orig_argv[0]}: can't open file {path!r}: "
            f"[Errno {error.errno}] {os.strerror(error.errno or 0)}",
            file=sys.stderr,
        )
        return 2
    main = _fresh_main()
    return _run_source(source, path, main)


def _run_source(source: bytes, path: str, main: ModuleType) -> BaseException | int:
    space = main.__dict__
    space.update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), space)
    except BaseException as error:
        failure: BaseException | int = _without_our_frame(error)
    else:
        failure = 0
    if not isinstance(failure, SystemExit):
        failure = _report(failure)
        for name in ("__file__", "__cached__"):  # as the interpreter does
            space.pop(name, None)
    return failure


def _run_module(module: str, *, alter_argv: bool) -> BaseException | int:
    try:
        runpy._run_module_as_main(module, alter_argv)  # type: ignore[attr-defined]
    except BaseException as error:
        failure: BaseException | int = _without_our_frame(error)
    else:
        failure = 0
    return failure if isinstance(failure, SystemExit) else _report(failure)


def _without_our_frame(error: BaseException) -> BaseException:
    """The error with a traceback that begins at the program (one frame further in)."""
    first = error.__traceback__
    return error.with_traceback(first.tb_next if first is not None else None)


def _report(failure: BaseException | int) -> BaseException | int:
    """Show an uncaught error as the interpreter does and return what the process ends with."""
    if not isinstance(failure, BaseException):
        return failure
    if _end.in_worker() and not isinstance(failure, KeyboardInterrupt):
        write_error_file(failure)
    hook_exit = _print_error(failure)
    if hook_exit is not None:
        return hook_exit
    return failure if type(failure) is KeyboardInterrupt else 1


def _print_error(error: BaseException) -> SystemExit | None:
    """PyErr_Print. Returns the SystemExit that the program's hook raised, if it did."""
    kind, trace = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    sys.audit("sys.excepthook", hook, kind, error, trace)
    if hook is None:
        print("sys.excepthook is missing", file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
        return None
    second: BaseException | None = None
    try:
        hook(kind, error, trace)
    except BaseException as raised:
        second = _without_our_frame(raised)
    if isinstance(second, SystemExit):
        return second
    if second is not None:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
    return None


def write_error_file(error: BaseException) -> bool:
    """Leave the error where the elastic contract wants it, unless somebody already has.

    Path: ``TORCHELASTIC_ERROR_FILE``; nothing happens when it is unset or empty. Appears at
    once and complete; an existing file is left alone. True if it was written. No error of
    its own leaves this function.
    """
    path = os.environ.get(errorfile.VARIABLE)
    if not path or os.path.exists(path):
        return False
    try:
        errorfile.write(path, errorfile.describe(error))
    except Exception:  # the program's error must be shown whatever happens here
        return False
    return True


# ---------------------------------------------------------------------------------------
# The end
# ---------------------------------------------------------------------------------------


class _End:
    """What remains to be said when the program has ended.

    Registered with ``atexit`` when this module is imported, that is before the program's own
    imports register anything: the first to register is the last to be called.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._status: int | None = None
        self._on_finish: Callable[[int], None] | None = None
        atexit.register(self._last)

    def begin(self, on_finish: Callable[[int], None] | None) -> None:
        self._pid = os.getpid()
        self._status = None
        self._on_finish = on_finish

    def in_worker(self) -> bool:
        """False in a process that the program itself forked and that runs on to the end."""
        return os.getpid() == self._pid

    def leave(self, failure: BaseException | int) -> NoReturn:
        if isinstance(failure, SystemExit):
            self._status = _status_of(failure.code)
            raise failure
        if isinstance(failure, KeyboardInterrupt):
            # The interpreter turns one that reaches the top into a death by SIGINT, after
            # all else is done. It was already shown: keep the interpreter from doing it again.
            self._status = -2
            _once_silent()
            raise failure
        assert isinstance(failure, int)
        self._status = failure
        raise SystemExit(failure)

    def _last(self) -> None:
        if self._on_finish is not None and self._status is not None and self.in_worker():
            self._on_finish(self._status)


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -1 << 63 <= code < 1 << 63 else 255
    return 1


def _once_silent() -> None:
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    last = (sys.last_type, sys.last_value, sys.last_traceback)

    def silent(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.excepthook = hook
        sys.last_type, sys.last_value, sys.last_traceback = last
        error.__traceback__ = last[2]

    sys.excepthook = silent


_end = _End()
