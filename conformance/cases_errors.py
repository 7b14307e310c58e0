"""Error files, records, root causes (T96 to T102)."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from harness import Impl, case, env, folder, normal, outcome, plain, raised


def recorded(impl: Impl, function: Any, *, text: str = "", error_file: str | None = "") -> Any:
    """Run a recorded function; what came out and what is in the error file."""
    with folder() as d:
        path = d / "error.json"
        if text:
            path.write_text(text)
        where = str(path) if error_file == "" else error_file
        with env(TORCHELASTIC_ERROR_FILE=where):
            # The handler's hook on sys.excepthook and faulthandler are none of the observation.
            seen = outcome(lambda: impl.errors.record(function)())
        content = json.loads(path.read_text()) if path.exists() and path.read_text() else None
    return {"outcome": seen, "file": _file(content)}


def _file(content: Any) -> Any:
    if not isinstance(content, dict) or not isinstance(content.get("message"), dict):
        return content
    message = dict(content["message"])
    extra = dict(message.get("extraInfo") or {})
    if "timestamp" in extra:
        stamp = extra["timestamp"]
        extra["timestamp"] = [type(stamp).__name__, abs(int(stamp) - time.time()) < 60]
    if "timestamp_ns" in extra:
        stamp = extra["timestamp_ns"]
        good = abs(int(stamp) / 1e9 - time.time()) < 60
        extra["timestamp_ns"] = f"[{type(stamp).__name__}, {good}]"
    if "py_callstack" in extra:
        lines = extra["py_callstack"].strip().splitlines()
        extra["py_callstack"] = [lines[0], lines[-1]]
    message["extraInfo"] = extra
    return {**content, "message": message}


def _good() -> int:
    return 7


def _bad() -> None:
    raise ValueError("bad luck")


def _chained() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise RuntimeError("outer") from error


@case("T96.record")
def record(impl: Impl) -> Any:
    """What record does with values, exceptions and exits."""

    class Odd(BaseException):
        pass

    def odd() -> None:
        raise Odd("x")

    def interrupted() -> None:
        raise KeyboardInterrupt

    def empty() -> None:
        raise RuntimeError

    def lines() -> None:
        raise RuntimeError('a\nb \u00e4 "quoted"')

    shown = {
        "good": recorded(impl, _good),
        "bad": recorded(impl, _bad),
        "chained": recorded(impl, _chained),
        "exit 0": recorded(impl, lambda: sys.exit(0)),
        "exit None": recorded(impl, lambda: sys.exit()),
        "exit 3": recorded(impl, lambda: sys.exit(3)),
        "exit text": recorded(impl, lambda: sys.exit("text")),
        "interrupted": recorded(impl, interrupted),
        "no text": recorded(impl, empty),
        "lines": recorded(impl, lines),
        "no file": recorded(impl, _bad, error_file=None),
        "empty path": recorded(impl, _bad, error_file=None),
        "old file": recorded(impl, _bad, text='{"message": "old", "timestamp": 1}'),
        "good, old file": recorded(impl, _good, text='{"message": "old", "timestamp": 1}'),
    }
    try:
        recorded(impl, odd)
    except Odd:
        shown["base exception"] = "came out"
    return shown


@case("T96.record_is_decorator")
def decorator(impl: Impl) -> Any:
    """record keeps the function's name; passes arguments."""

    @impl.errors.record
    def named(a: int, *, b: int) -> list[int]:
        """Doc."""
        return [a, b]

    return {"name": named.__name__, "doc": named.__doc__, "value": named(1, b=2)}


@case("T96.custom_handler")
def custom_handler(impl: Impl) -> Any:
    """An error handler of the user's own, and which of its methods are called."""
    calls: list[str] = []

    class Mine(impl.errors.ErrorHandler):  # type: ignore[misc, name-defined]
        def initialize(self) -> None:
            calls.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            calls.append(f"record_exception {type(e).__name__}")

        def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
            calls.append(f"dump_error_file {error_code}")

    def child_failed() -> None:
        with folder() as d:
            path = d / "error.json"
            path.write_text('{"message": "m", "timestamp": 1}')
            failure = impl.errors.ProcessFailure(0, 1, 5, str(path))
            raise impl.errors.ChildFailedError("name", {0: failure})

    handler = Mine()
    shown = [
        outcome(lambda: impl.errors.record(_good, handler)()),
        outcome(lambda: impl.errors.record(_bad, handler)()),
        outcome(lambda: impl.errors.record(child_failed, handler)()),
        outcome(lambda: impl.errors.record(lambda: sys.exit(3), handler)()),
    ]
    return {"outcomes": shown, "calls": calls}


@case("T96.patched_handler")
def patched_handler(impl: Impl) -> Any:
    """get_error_handler is looked up in the errors module."""
    target = impl.module_name("elastic.multiprocessing.errors") + ".get_error_handler"
    with mock.patch(target) as get:
        impl.errors.record(_good)()
        raised(lambda: impl.errors.record(_bad)())
    return [c[0] for c in get.return_value.method_calls]


@case("T96.initialize")
def initialize(impl: Impl) -> Any:
    """initialize switches faulthandler on; a failure of it is only a warning."""
    import faulthandler

    faulthandler.disable()
    impl.errors.get_error_handler().initialize()
    enabled = faulthandler.is_enabled()
    with mock.patch("faulthandler.enable", side_effect=RuntimeError):
        what = raised(lambda: impl.errors.get_error_handler().initialize())
    return {"enabled": enabled, "failing": what}


@case("T97.child_failed")
def child_failed(impl: Impl) -> Any:
    """ChildFailedError under record: the root's file becomes the own one."""

    def go(text: str | None, code: int, old: str = "") -> Any:
        with folder() as d:
            path = d / "child.json"
            if text is not None:
                path.write_text(text)
            failure = impl.errors.ProcessFailure(0, 997, code, str(path))

            def function() -> None:
                raise impl.errors.ChildFailedError("name", {0: failure})

            return recorded(impl, function, text=old)

    nested = json.dumps(
        {"message": {"message": "m", "extraInfo": {"timestamp": "5", "py_callstack": "x\ny"}}}
    )
    return {
        "nested": _no_time(go(nested, 7)),
        "nested, signal": _no_time(go(nested, -9)),
        "nested, 0": _no_time(go(nested, 0)),
        "flat": go('{"message": "m", "timestamp": 1}', 7),
        "none": go(None, 7),
        "own there": _no_time(go(nested, 7, '{"message": "mine", "timestamp": 1}')),
    }


def _no_time(seen: Any) -> Any:
    if seen["file"]:
        seen["file"]["message"]["extraInfo"].pop("timestamp", None)
    return seen


@case("T98.failures")
def failures(impl: Impl) -> Any:
    """ProcessFailure by what is in its file."""

    def of(text: str | None, code: int = 1) -> Any:
        with folder() as d:
            path = d / "error.json"
            if text is not None:
                path.write_text(text)

            def go() -> Any:
                f = impl.errors.ProcessFailure(
                    local_rank=0, pid=997, exitcode=code, error_file=str(path)
                )
                now = abs(f.timestamp - time.time()) < 60
                return {
                    "file": "N/A" if f.error_file == "<N/A>" else os.path.basename(f.error_file),
                    "data": plain(f.error_file_data),
                    "message": plain(f.message),
                    "timestamp": "now" if now else f.timestamp,
                    "type": type(f.timestamp).__name__,
                    "signal": f.signal_name(),
                }

            return outcome(go)

    nested = {"message": {"message": "m", "extraInfo": {"timestamp": 10, "py_callstack": "c"}}}
    as_text = {"message": {"message": "m", "extraInfo": {"timestamp": "10"}}}
    return {
        "nested": of(json.dumps(nested)),
        "text time": of(json.dumps(as_text)),
        "flat": of('{"message": "m", "timestamp": 10}'),
        "flat text": of('{"message": "m", "timestamp": "10"}'),
        "flat, no time": of('{"message": "m"}'),
        "none": of(None),
        "none, 138": of(None, 138),
        "none, -11": of(None, -11),
        "none, -9": of(None, -9),
        "none, -127": of(None, -127),
        "none, 0": of(None, 0),
    }


@case("T99.garbage")
def garbage(impl: Impl) -> Any:
    """ProcessFailure with a file that makes no sense."""
    shown = {}
    for label, text in (
        ("empty", ""),
        ("half", '{"message": {"mess'),
        ("not json", "hello"),
        ("unknown key", '{"a": 1}'),
        ("no extraInfo", '{"message": {"message": "m"}}'),
        ("list", "[]"),
    ):
        with folder() as d:
            path = d / "error.json"
            path.write_text(text)
            shown[label] = raised(lambda p=str(path): impl.errors.ProcessFailure(0, 997, 1, p))
    return shown


def _failure(impl: Impl, rank: int, stamp: int, code: int = 1, message: str = "m") -> Any:
    f = impl.errors.ProcessFailure(
        local_rank=rank, pid=990 + rank, exitcode=code, error_file="<N/A>"
    )
    f.timestamp = stamp
    f.message = message
    return f


@case("T100.first_failure")
def first_failure(impl: Impl) -> Any:
    """Which failure is the first."""
    error = impl.errors.ChildFailedError
    by_time = error(
        "n", {0: _failure(impl, 0, 30), 1: _failure(impl, 1, 10), 2: _failure(impl, 2, 20)}
    )
    tie = error("n", {2: _failure(impl, 2, 10), 0: _failure(impl, 0, 10)})
    rank, failure = by_time.get_first_failure()
    return {
        "by time": [rank, failure.local_rank],
        "tie": tie.get_first_failure()[0],
        "nobody": raised(lambda: error("n", {})),
        "attributes": [by_time.name, sorted(by_time.failures)],
    }


@case("T101.collateral")
def collateral(impl: Impl) -> Any:
    """Within one second: a signal death, its collateral exception, one that the agent ended."""
    error = impl.errors.ChildFailedError
    killed = _failure(impl, 1, 10, -signal.SIGKILL)
    exception = _failure(impl, 0, 10)
    ended = _failure(impl, 2, 10, -signal.SIGTERM)
    return {
        "exception first in dict": error("n", {0: exception, 1: killed}).get_first_failure()[0],
        "ended first in dict": error("n", {2: ended, 0: exception}).get_first_failure()[0],
    }


@case("T100.message")
def message(impl: Impl) -> Any:
    """The whole summary, byte for byte but for times and hosts."""
    error = impl.errors.ChildFailedError
    one = error("train.py", {0: _failure(impl, 0, 10, -11)})
    two = error(
        "train.py",
        {
            0: _failure(impl, 0, 30, 1, "Traceback:\n  line\nValueError: x"),
            3: _failure(impl, 1, 10, -9, "Signal 9 (SIGKILL) received by PID 991"),
        },
    )
    wide = error("w" * 70, {0: _failure(impl, 0, 10, 1, "x" * 100)})
    nested = _failure(impl, 0, 10)
    nested.message = {"message": "ValueError: y", "extraInfo": {"py_callstack": "call\nstack"}}
    return {
        "one": normal(str(one)),
        "two": normal(str(two)),
        "wide": normal(str(wide)),
        "nested": normal(str(error("n", {0: nested}))),
        "format": normal(two.format_msg("#", "~")),
        "iso": len(one.failures[0].timestamp_isoformat()),
    }


@case("T97.handler_methods")
def handler_methods(impl: Impl) -> Any:
    """ErrorHandler's methods by hand."""
    handler = impl.get("elastic.multiprocessing.errors.error_handler:ErrorHandler")()
    data = {"message": {"message": "m", "extraInfo": {"timestamp": "1"}}}
    handler.override_error_code_in_rootcause_data("f", data, 7)
    flat = {"message": "m", "timestamp": 1}
    handler.override_error_code_in_rootcause_data("f", flat, 7)
    zero = {"message": {"message": "m"}}
    handler.override_error_code_in_rootcause_data("f", zero, 0)
    with folder() as d:
        path = d / "x.json"
        handler._write_error_file(str(path), '{"a": 1}')
        written = path.read_text()
        handler._rm(str(path))
        removed = not path.exists()
        with env(TORCHELASTIC_ERROR_FILE=str(d / "own")):
            own = Path(handler._get_error_file_path() or "").name
            missing = raised(lambda: handler.dump_error_file(str(d / "nothing"), 1))
        with env(TORCHELASTIC_ERROR_FILE=None):
            none = handler._get_error_file_path()
            path.write_text('{"message": "m", "timestamp": 1}')
            nowhere = raised(lambda: handler.dump_error_file(str(path), 1))
        unwritable = raised(lambda: handler._write_error_file("/does/not/exist/x", "{}"))
    return {
        "codes": [data["message"].get("errorCode"), flat, zero],
        "written": written,
        "removed": removed,
        "own": own,
        "none": none,
        "missing root": missing,
        "no own path": nowhere,
        "unwritable": unwritable,
    }
