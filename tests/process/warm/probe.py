"""Says all that a program can see of the process it runs in, as JSON in the file argv[1].

Further words: modules to import first.
"""

# ruff: noqa: E402
import importlib
import sys

here = dict(globals())

for name in sys.argv[2:]:
    importlib.import_module(name)

import _thread
import atexit
import contextvars
import decimal
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import posix
import random
import resource
import signal
import subprocess
import tempfile
import threading
import tracemalloc
import types
import warnings
import weakref


def stream(it):
    if it is None:
        return None
    buffer = it.buffer
    raw = getattr(buffer, "raw", buffer)
    return {
        "type": type(it).__name__,
        "buffer": type(buffer).__name__,
        "raw": type(raw).__name__,
        **{
            name: repr(getattr(it, name))
            for name in ("encoding", "errors", "line_buffering", "write_through", "mode", "name")
        },
        "newlines": it.newlines,
        "raw name": raw.name,
        "raw mode": raw.mode,
        "closefd": raw.closefd,
        "fd": it.fileno(),
        "seekable": it.seekable(),
        "tty": it.isatty(),
        "attributes": sorted(vars(it)),
    }


def descriptors():
    found = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}").partition("[")[0]
        except OSError:
            pass
        else:
            found[fd] += f" inheritable={os.get_inheritable(fd)}"
    return found


def described(value):
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, dict):
        return f"dict of {len(value)}"
    return repr(value).partition(" at 0x")[0]


def preparation():
    data = multiprocessing.spawn.get_preparation_data("p")
    assert len(data.pop("authkey")) == 32
    return data


def child_environment():
    out = subprocess.run(["env", "-0"], stdout=subprocess.PIPE, check=True).stdout
    return out.decode("utf-8", "surrogateescape").split("\0")


def proc(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read().decode("utf-8", "surrogateescape").split("\0")


with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)

handlers = {}
for number in sorted(signal.valid_signals()):
    handlers[int(number)] = described(signal.getsignal(number))

thread = threading.Thread(target=int)
process = multiprocessing.Process(target=int)
first_draws = [random.random(), random.random()]
assert first_draws[0] != first_draws[1]

seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "executable": [sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix],
    "options": [sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.pycache_prefix],
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()],
    "tracing": [repr(sys.gettrace()), repr(sys.getprofile()), tracemalloc.is_tracing()],
    "hooks": [
        described(getattr(sys, name))
        for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
    ],
    "async hooks": repr(sys.get_asyncgen_hooks()),
    "error": repr(sys.exc_info()),
    "last": [hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback", "ps1")],
    "stdin": stream(sys.stdin),
    "stdout": stream(sys.stdout),
    "stderr": stream(sys.stderr),
    "same": [getattr(sys, n) is getattr(sys, f"__{n}__") for n in ("stdin", "stdout", "stderr")],
    "environ": list(os.environ.items()),
    "environment of a child": child_environment(),
    "posix": [[os.fsdecode(k), os.fsdecode(v)] for k, v in posix.environ.items()],
    "proc": [proc("cmdline"), proc("environ"), proc("comm")],
    "cwd": os.getcwd(),
    "umask": os.umask(0o77),
    "nice": os.nice(0),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "main": {name: described(value) for name, value in here.items()},
    "main order": list(here),
    "main spec": described(__spec__),
    "main loader": [getattr(__loader__, n, None) for n in ("name", "path")],
    "main module": [
        sys.modules["__main__"].__dict__ is globals(),
        type(sys.modules["__main__"]).__name__,
        "__mp_main__" in sys.modules,
    ],
    "signals": handlers,
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "kernel's signals": [status[n].strip() for n in ("SigIgn", "SigCgt", "SigBlk", "SigPnd")],
    "wakeup": signal.set_wakeup_fd(-1),
    "timers": [signal.getitimer(n) for n in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
    "threads": [
        threading.main_thread().name,
        threading.main_thread() is threading.current_thread(),
        threading.main_thread().ident == threading.get_ident(),
        threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
        threading.active_count(),
        thread.name,
        _thread._count(),
        status["Threads"].strip(),
    ],
    "multiprocessing": [
        multiprocessing.parent_process(),
        multiprocessing.current_process().name,
        multiprocessing.current_process()._identity,
        multiprocessing.current_process().pid == os.getpid(),
        multiprocessing.get_start_method(allow_none=True),
        len(multiprocessing.active_children()),
        len(multiprocessing.current_process().authkey),
        process.name,
    ],
    "for spawn": preparation(),
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.garbage)],
    "warnings": [repr(f) for f in warnings.filters],
    "logging": [
        logging.root.level,
        len(logging.root.handlers),
        logging.root.manager.disable,
        logging.raiseExceptions,
    ],
    "locale": [locale.getlocale(), locale.setlocale(locale.LC_ALL), locale.localeconv()],
    "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding()],
    "decimal": repr(decimal.getcontext()),
    "context": len(list(contextvars.copy_context())),
    "temporary": [tempfile.gettempdir(), tempfile.template],
    "faulthandler": faulthandler.is_enabled(),
    "resources": [resource.getrlimit(n) for n in range(9)],
    "descriptors": descriptors(),
    "ours": sorted(n for n in sys.modules if n.partition(".")[0] == "phalanx"),
    "finalizers": sum(1 for f in weakref.finalize._registry if "phalanx" in repr(f)),
    "children": len(os.listdir("/proc/self/task")),
    "no threads left over": [t.name for t in threading.enumerate()],
}

if "torch" in sys.modules:
    import torch

    seen["torch"] = [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.multiprocessing.get_sharing_strategy(),
        torch.cuda.is_initialized(),
        torch.are_deterministic_algorithms_enabled(),
        "torch._dynamo" in sys.modules,
    ]
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        seen["torch's children"] = file.read().split()

atexit.register(print, "at exit", sep="")
with open(sys.argv[1], "w") as file:
    json.dump(seen, file)
