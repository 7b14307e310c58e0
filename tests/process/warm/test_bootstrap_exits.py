"""A warm program ends as a fresh one does: status, output, traceback, to the letter."""

from __future__ import annotations

import re
import textwrap

import pytest

pytestmark = pytest.mark.process

CASES = {
    "falls off the end": "print('hello')",
    "exit": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit True": "import sys; sys.exit(True)",
    "exit text": "import sys; sys.exit('no more')",
    "exit tuple": "import sys; sys.exit((1, 2))",
    "exit subclass": """
        class Leave(SystemExit):
            pass
        raise Leave(9)
    """,
    "exit from a function": """
        import sys
        def f():
            try:
                sys.exit(4)
            finally:
                print("cleaned")
        f()
    """,
    "os._exit": "import os; os._exit(5)",
    "uncaught": """
        def f(n):
            return 1 / n
        f(0)
    """,
    "chained": """
        def f():
            raise KeyError("first")
        try:
            f()
        except KeyError as error:
            raise ValueError("second") from error
    """,
    "context": """
        try:
            1 / 0
        except ZeroDivisionError:
            undefined
    """,
    "base exception": """
        class Odd(BaseException):
            pass
        raise Odd("odd")
    """,
    "generator exit": "raise GeneratorExit",
    "recursion": """
        def f():
            f()
        try:
            f()
        except RecursionError as error:
            raise SystemExit(str(error))
    """,
    "bad str": """
        class Bad(Exception):
            def __str__(self):
                raise TypeError
        raise Bad
    """,
    "interrupted": "raise KeyboardInterrupt",
    "interrupted by signal": """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            print("cleaned")
    """,
    "interrupt caught": """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print("caught")
    """,
    "interrupt subclass": """
        class Mine(KeyboardInterrupt):
            pass
        raise Mine("mine")
    """,
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "broken pipe": """
        import os
        r, w = os.pipe()
        os.close(r)
        os.write(w, b"x")
    """,
    "syntax error": "x = (1,\ny = 2\n",
    "indentation": "if True:\nx = 1\n",
    "tabs": "if True:\n\tx = 1\n        y = 1\n",
    "late syntax error": "def f():\n    return\nreturn 5\n",
    "hook": """
        import sys
        def hook(kind, error, trace):
            print("hook", kind.__name__, error, trace.tb_frame.f_code.co_name, trace.tb_lineno)
            print(sys.exc_info())
        sys.excepthook = hook
        raise ValueError("v")
    """,
    "hook raises": """
        import sys
        def hook(*args):
            raise RuntimeError("in hook")
        sys.excepthook = hook
        raise ValueError("v")
    """,
    "hook exits": """
        import sys
        sys.excepthook = lambda *args: sys.exit(6)
        raise ValueError("v")
    """,
    "hook is gone": "import sys; del sys.excepthook; raise ValueError('v')",
    "hook for interrupts": """
        import sys
        sys.excepthook = lambda *args: print("hooked")
        raise KeyboardInterrupt
    """,
    "last error": """
        import atexit, sys, traceback
        @atexit.register
        def show():
            print(sys.last_type, sys.last_value, hasattr(sys, "last_exc"))
            traceback.print_last()
        1 / 0
    """,
    "last interrupt": """
        import atexit, sys, traceback
        @atexit.register
        def show():
            print(sys.last_type, sys.excepthook is sys.__excepthook__)
            traceback.print_last()
        raise KeyboardInterrupt
    """,
    "main at exit": """
        import atexit, sys
        atexit.register(lambda: print("__file__" in vars(sys.modules["__main__"])))
    """,
    "main at exit, after exit": """
        import atexit, sys
        atexit.register(lambda: print("__file__" in vars(sys.modules["__main__"])))
        sys.exit(1)
    """,
    "atexit order": """
        import atexit
        atexit.register(print, "one")
        atexit.register(print, "two")
    """,
    "atexit raises": """
        import atexit
        atexit.register(lambda: 1 / 0)
    """,
    "atexit exits": """
        import atexit, sys
        atexit.register(sys.exit, 8)
    """,
    "thread outlives main": """
        import threading
        ready = threading.Event()
        def work():
            ready.wait()
            threading.main_thread().join()
            print("thread done")
        threading.Thread(target=work).start()
        ready.set()
        print("main done")
    """,
    "thread fails": """
        import threading
        t = threading.Thread(target=lambda: 1 / 0)
        t.start()
        t.join()
    """,
    "daemon thread": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """,
    "executor": """
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(print, "worked")
    """,
    "unraisable": """
        class Bad:
            def __del__(self):
                raise ValueError("in del")
        Bad()
        kept = Bad()
    """,
    "objects at shutdown": """
        class Noisy:
            def __init__(self, name):
                self.name = name
            def __del__(self):
                print("del", self.name)
        a = Noisy("a")
        b = Noisy("b")
        b.itself = b
    """,
    "future import": """
        def f(x: undefined) -> undefined: ...
    """,
    "stderr and stdout": """
        import sys
        print("a", end="")
        print("b", file=sys.stderr, end="")
        sys.stdout.buffer.write(b"c")
    """,
    "surrogate": "print('\\udcff')",
    "forked child runs on": """
        import os, sys
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    "forked child fails": """
        import os
        pid = os.fork()
        if pid == 0:
            1 / 0
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    "print_exc": """
        import traceback
        def f():
            raise ValueError("v")
        try:
            f()
        except ValueError:
            traceback.print_exc()
    """,
    "group": """
        raise ExceptionGroup("g", [ValueError(1), KeyError("k")])
    """,
    "notes": """
        error = ValueError("v")
        error.add_note("a note")
        raise error
    """,
}


def told(outcome):
    """What there is to compare; addresses are never alike."""
    return [
        outcome.status,
        *(re.sub("0x[0-9a-f]+", "0x", text) for text in (outcome.out, outcome.err)),
    ]


@pytest.mark.parametrize("name", CASES)
def test_ends_alike(name, run_both, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(CASES[name]))
    fresh, warm = run_both([str(script), "a", "b"])
    assert told(warm) == told(fresh)
    ended = name not in ("os._exit", "terminated", "killed", "aborted")
    assert warm.finish == (f"{fresh.status}\n" if ended else "")


SOURCES = {
    "latin": b"# -*- coding: latin-1 -*-\nprint('\xe4')\n",
    "mark": b"\xef\xbb\xbfprint('with a mark')\n",
    "carriage returns": b"print(1)\r\nprint(2)\r\n",
    "empty": b"",
    "no newline": b"print(3)",
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_read_alike(name, run_both, tmp_path):
    (tmp_path / "program.py").write_bytes(SOURCES[name])
    fresh, warm = run_both(["program.py"])
    assert told(warm) == told(fresh)


@pytest.mark.parametrize("source", [b"print('\xe4')\n", b"# coding: nix\n"])
def test_no_text(source, run_both, tmp_path):
    (tmp_path / "program.py").write_bytes(source)
    fresh, warm = run_both(["program.py"])
    assert (fresh.status, fresh.out) == (warm.status, warm.out) == (1, "")
    assert warm.err.splitlines()[-1].startswith("SyntaxError: ")


WHO = """
import sys
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0])
"""


def layout(root):
    (root / "plain.py").write_text(WHO)
    (root / "fails.py").write_text("def f():\n    1 / 0\nf()\n")
    (root / "sub").mkdir()
    (root / "sub" / "inner.py").write_text(WHO + "import beside; print(beside.__file__)\n")
    (root / "sub" / "beside.py").write_text("")
    (root / "link.py").symlink_to(root / "sub" / "inner.py")
    (root / "folder").mkdir()
    (root / "folder" / "__main__.py").write_text(WHO)
    (root / "empty").mkdir()
    (root / "package").mkdir()
    (root / "package" / "__init__.py").write_text("print('package', __name__)\n")
    (root / "package" / "__main__.py").write_text(WHO + "from . import part\n")
    (root / "package" / "part.py").write_text(WHO + "if __name__ == '__main__': 1 / 0\n")
    (root / "plain.pyw").write_text(WHO)
    import zipfile

    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", WHO)


@pytest.mark.parametrize(
    "words",
    [
        ["plain.py"],
        ["./plain.py", "x"],
        ["sub/../plain.py"],
        ["sub/inner.py"],
        ["link.py"],
        ["fails.py"],
        ["plain.pyw"],
        ["missing.py"],
        ["sub/missing.py"],
        ["folder", "x"],
        ["empty"],
        ["archive.zip"],
        ["-m", "plain", "x"],
        ["-m", "fails"],
        ["-m", "package", "x", "-m"],
        ["-m", "package.part"],
        ["-m", "package.missing"],
        ["-m", "missing"],
        ["-m", "sub.inner"],
    ],
    ids=" ".join,
)
def test_started_alike(words, run_both, tmp_path):
    layout(tmp_path)
    fresh, warm = run_both(words)
    assert told(warm) == told(fresh)
    assert warm.finish == f"{fresh.status}\n"


def test_unreadable_script(run_both, tmp_path):
    (tmp_path / "loop.py").symlink_to("loop.py")
    fresh, warm = run_both(["loop.py"])
    assert (warm.status, warm.err) == (fresh.status, fresh.err)


def test_error_file(run_both, tmp_path):
    import json

    file = tmp_path / "error.json"
    (tmp_path / "fails.py").write_text("def f():\n    raise ValueError('why')\nf()\n")
    run_both(["fails.py"], env={"TORCHELASTIC_ERROR_FILE": str(file)}, only="warm")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: why"
    stack = message["extraInfo"]["py_callstack"]
    assert stack.startswith("Traceback") and "bootstrap" not in stack and "in f\n" in stack
    nanoseconds = int(message["extraInfo"]["timestamp_ns"])
    assert int(message["extraInfo"]["timestamp"]) == nanoseconds // 10**9

    (tmp_path / "fails.py").write_text("raise KeyError('other')\n")
    run_both(["fails.py"], env={"TORCHELASTIC_ERROR_FILE": str(file)}, only="warm")
    assert "ValueError" in file.read_text(), "whoever wrote first knows more"


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "print('fine')",
        "import os\nif os.fork() == 0: 1 / 0\nos.wait()",
    ],
)
def test_no_error_file(source, run_both, tmp_path):
    (tmp_path / "program.py").write_text(source)
    file = tmp_path / "error.json"
    run_both(["program.py"], env={"TORCHELASTIC_ERROR_FILE": str(file)}, only="warm")
    assert not file.exists()


def test_error_file_in_a_missing_folder_is_no_matter(run_both, tmp_path):
    (tmp_path / "program.py").write_text("1 / 0")
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "error.json")}
    fresh, warm = run_both(["program.py"], env=env)
    assert (warm.status, warm.err) == (fresh.status, fresh.err)
