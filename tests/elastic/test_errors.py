"""phalanx.elastic.multiprocessing.errors: record, failures, which one was the cause."""

from __future__ import annotations

import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    first_failure,
    get_error_handler,
    record,
)

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND


class Sentinel(Exception):
    pass


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@record
def raises():
    raise Sentinel("foobar")


@record
def leaves(code):
    sys.exit(code)


def error_file(path: Path, text: str = "m", at_ns: int = NOW) -> str:
    extra = {"py_callstack": f"Traceback:\n  {text}", "timestamp": str(at_ns // SECOND)}
    extra["timestamp_ns"] = str(at_ns)
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    return str(path)


def failure(code: int, at_ns: int, rank: int = 0, path: str = "", **more) -> ProcessFailure:
    return ProcessFailure(rank, 100 + rank, code, path, observed_ns=at_ns, **more)


# ------------------------------------------------------------------ record


def test_record_writes_and_raises_again(own_file):
    before = time.time_ns()
    with pytest.raises(Sentinel):
        raises()
    message = json.loads(own_file.read_text())["message"]
    assert message["message"] == "Sentinel: foobar"
    assert 'raise Sentinel("foobar")' in message["extraInfo"]["py_callstack"]
    assert isinstance(message["extraInfo"]["timestamp"], str)
    assert before <= int(message["extraInfo"]["timestamp_ns"]) <= time.time_ns()


def test_record_of_a_function_that_returns(own_file):
    assert record(lambda a, b: a + b)(1, b=2) == 3
    assert not own_file.exists()


@pytest.mark.parametrize(("code", "passes"), [(0, False), (1, True), (None, True), ("text", True)])
def test_record_and_exit(own_file, code, passes):
    if passes:
        with pytest.raises(SystemExit) as caught:
            leaves(code)
        assert caught.value.code == code
    else:
        assert leaves(code) is None
    assert not own_file.exists()


@pytest.mark.parametrize("value", [None, ""])
def test_record_without_a_file(monkeypatch, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    if value is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
    with pytest.raises(Sentinel):
        raises()
    assert os.listdir(tmp_path) == []


def test_record_passes_a_childs_file_on(own_file, tmp_path):
    own_file.write_text("old")
    child = error_file(tmp_path / "child.json", "child's error")

    @record
    def main():
        raise ChildFailedError("trainer", {0: ProcessFailure(0, 997, 3, child)})

    with pytest.raises(ChildFailedError):
        main()
    expected = json.loads(Path(child).read_text())
    expected["message"]["errorCode"] = 3
    assert json.loads(own_file.read_text()) == expected


def test_record_child_without_a_file(own_file):
    @record
    def main():
        raise ChildFailedError("trainer", {0: ProcessFailure(0, 997, 3, "")})

    with pytest.raises(ChildFailedError):
        main()
    assert not own_file.exists()


def test_flat_child_file_is_passed_on_without_an_exit_code(own_file, tmp_path):
    child = tmp_path / "child.json"
    child.write_text('{"message": "m", "timestamp": "10"}')
    ErrorHandler().dump_error_file(str(child), 7)
    assert json.loads(own_file.read_text()) == {"message": "m", "timestamp": "10"}


def test_unreadable_child_file_does_not_hide_the_child(own_file, tmp_path):
    (tmp_path / "child.json").write_text("{")
    ErrorHandler().dump_error_file(str(tmp_path / "child.json"), 7)
    assert not own_file.exists()


def test_record_uses_the_handler_it_is_given(own_file):
    calls = []

    class Mine(ErrorHandler):
        def initialize(self):
            calls.append("initialize")

        def record_exception(self, e):
            calls.append(repr(e))

    def main():
        raise Sentinel("x")

    with pytest.raises(Sentinel):
        record(main, Mine())()
    assert calls == ["initialize", "Sentinel('x')"]
    assert not own_file.exists()


def test_trouble_while_recording_is_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(Sentinel):
        raises()

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.warns(UserWarning, match="could not be written"):
        ErrorHandler().record_exception(Mute())


def test_initialize_survives_without_stderr(monkeypatch):
    import faulthandler

    def refuse(**_):
        raise RuntimeError("sys.stderr is None")

    monkeypatch.setattr(faulthandler, "enable", refuse)
    with pytest.warns(UserWarning, match="faulthandler"):
        get_error_handler().initialize()


def test_dev_null_as_error_file_stays_dev_null(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.devnull)
    with pytest.raises(Sentinel):
        raises()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


# ------------------------------------------------------------------ ProcessFailure


def test_failure_with_a_file(tmp_path):
    path = error_file(tmp_path / "e.json", at_ns=NOW + 5)
    found = ProcessFailure(local_rank=1, pid=997, exitcode=1, error_file=path)
    assert found.error_file == path
    assert found.timestamp == NOW // SECOND
    assert found.timestamp_ns == NOW + 5
    assert found.message["message"] == "m"
    assert found.signal_name() == "<N/A>"
    assert found.timestamp_isoformat()[10] == "_"


@pytest.mark.parametrize(
    ("content", "message", "timestamp"),
    [
        ('{"message": "m", "timestamp": 10}', "m", 10),
        ('{"message": "m", "timestamp": "10"}', "m", 10),
        ('{"message": {"message": "m", "extraInfo": {"timestamp": "10"}}}', None, 10),
    ],
)
def test_failure_formats(tmp_path, content, message, timestamp):
    (tmp_path / "e.json").write_text(content)
    found = ProcessFailure(0, 997, 1, str(tmp_path / "e.json"))
    assert found.timestamp == timestamp
    assert message is None or found.message == message


@pytest.mark.parametrize("content", ["", "{", '{"message": {"mess', '{"unknown": 1}', "7"])
def test_failure_with_a_broken_file_is_one_without(tmp_path, content):
    (tmp_path / "e.json").write_text(content)
    found = failure(-9, NOW, path=str(tmp_path / "e.json"))
    assert found.error_file == "<N/A>"
    assert found.message == "Signal 9 (SIGKILL) received by PID 100"
    assert found.error_file_data == {"message": "<NONE>"}


def test_made_by_hand_a_file_without_a_message_is_an_error(tmp_path):
    (tmp_path / "e.json").write_text('{"unknown": 1}')
    with pytest.raises(KeyError, match="message"):
        ProcessFailure(0, 997, 1, str(tmp_path / "e.json"))


def test_failure_without_a_file():
    killed = ProcessFailure(0, 997, -signal.SIGSEGV, "none.json")
    assert killed.signal_name() == "SIGSEGV"
    assert killed.message == "Signal 11 (SIGSEGV) received by PID 997"
    assert abs(killed.timestamp - time.time()) < 60
    left = ProcessFailure(0, 997, 138, "none.json")
    assert left.message.startswith("To enable traceback see:")
    assert left.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    # A later failure has nothing of an earlier one.
    assert "errorTraits" not in ProcessFailure(0, 997, -9, "none.json").error_file_data
    assert ProcessFailure(0, 997, -99, "none.json").signal_name() == "<N/A>"


# ------------------------------------------------------------------ the cause


def test_earliest_is_the_cause_and_ties_go_to_the_first():
    failures = {2: failure(1, NOW + 1), 0: failure(1, NOW), 1: failure(1, NOW)}
    assert ChildFailedError("t", failures).get_first_failure()[0] == 0
    assert first_failure(failures) == 0


def test_signal_death_30_ms_before_a_collateral_exception_is_the_cause(tmp_path):
    # In the same second, and polled in the other order.
    collateral = error_file(tmp_path / "e.json", "Connection reset by peer", NOW + 960_000_000)
    failures = {
        0: failure(1, NOW + 990_000_000, 0, collateral),
        1: failure(-9, NOW + 930_000_000, 1),
    }
    assert ChildFailedError("t", failures).get_first_failure()[0] == 1


def test_crash_that_was_noticed_a_little_after_its_collateral_is_the_cause(tmp_path):
    collateral = error_file(tmp_path / "e.json", "Connection reset by peer", NOW)
    failures = {0: failure(1, NOW + 9, 0, collateral), 1: failure(-9, NOW + SECOND // 20, 1)}
    assert first_failure(failures) == 1
    failures[1] = failure(-9, NOW + SECOND, 1)
    assert first_failure(failures) == 1  # a lost connection is never the cause of a crash
    failures[0] = failure(1, NOW + 9, 0, error_file(tmp_path / "f.json", "no such key", NOW))
    assert first_failure(failures) == 0


def test_exception_before_its_victims_signal_death_is_the_cause(tmp_path):
    # The process takes long to end after it has raised: its file knows better.
    cause = error_file(tmp_path / "e.json", at_ns=NOW)
    failures = {0: failure(-6, NOW + 10, 0), 1: failure(1, NOW + SECOND, 1, cause)}
    assert ChildFailedError("t", failures).get_first_failure()[0] == 1


def test_whom_the_agent_stopped_is_never_the_cause_if_there_is_another():
    failures = {
        0: failure(-15, NOW, 0, stopped_by_agent=True),
        1: failure(1, NOW + SECOND, 1),
        2: failure(-9, NOW - SECOND, 2, stopped_by_agent=True),
    }
    assert ChildFailedError("t", failures).get_first_failure()[0] == 1
    del failures[1]
    assert ChildFailedError("t", failures).get_first_failure()[0] == 2


def test_in_one_second_a_crash_comes_before_an_exception_before_a_request_to_end():
    # Nothing better than whole seconds is known: as with times that were set by hand.
    killed, raised, ended = (failure(code, NOW) for code in (-9, 1, -15))
    for each in (killed, raised, ended):
        each.timestamp = 10
    order = {0: ended, 1: raised, 2: killed}
    assert ChildFailedError("t", order).get_first_failure()[0] == 2
    del order[2]
    assert ChildFailedError("t", order).get_first_failure()[0] == 1


def test_a_timestamp_set_by_hand_counts():
    late, early = failure(1, NOW), failure(1, NOW + SECOND)
    early.timestamp = 10
    assert ChildFailedError("t", {0: late, 1: early}).get_first_failure()[0] == 1


def test_failures_of_pytorchs_class_are_understood():
    class Foreign:
        local_rank, pid, exitcode, error_file = 0, 1, 1, "<N/A>"
        message, timestamp = "m", NOW // SECOND - 1

        def signal_name(self):
            return "<N/A>"

        def timestamp_isoformat(self):
            return "then"

    error = ChildFailedError("t", {0: failure(1, NOW), 1: Foreign()})  # type: ignore[dict-item]
    assert error.get_first_failure()[0] == 1


# ------------------------------------------------------------------ the report


def test_report_layout(tmp_path):
    path = error_file(tmp_path / "e.json", "boom", NOW)
    error = ChildFailedError(
        "train.py",
        {
            0: failure(1, NOW + 5, 0),
            1: failure(1, NOW + 9, 1, path),
            2: failure(-11, NOW + SECOND, 2),
        },
    )
    lines = str(error).split("\n")
    assert lines[0] == ""
    ruler = lines[1]
    assert set(ruler) == {"="} and len(ruler) <= 60
    assert lines[2] == "train.py FAILED"
    assert lines[3] == "-" * len(ruler)
    assert lines[4] == "Failures:"
    assert lines[5] == "[0]:"
    middle = lines.index("Root Cause (first observed failure):")
    assert lines[middle - 1] == lines[3]
    assert lines[middle + 1] == "[1]:"
    assert "  rank      : 1 (local_rank: 1)" in lines[middle:]
    assert "  exitcode  : 1 (pid: 101) " in lines[middle:]
    assert f"  error_file: {path}" in lines[middle:]
    assert "  traceback : Traceback:" in lines[middle:]
    assert "    boom" in lines[middle:]
    assert lines[-1] == ruler
    assert "  exitcode  : -11 (pid: 102)  (SIGSEGV)" in lines[:middle]


def test_report_of_one_failure_and_its_victims():
    failures = {rank: failure(-15, NOW, rank, stopped_by_agent=True) for rank in range(6)}
    failures[4] = failure(7, NOW + 1, 4)
    text = str(ChildFailedError("t", failures))
    assert "<NO_OTHER_FAILURES>" in text
    assert "stopped by the agent afterwards: rank 0-3, 5)" in text
    assert text.count("exitcode") == 1


def test_report_shows_what_is_known_without_a_file():
    found = failure(
        1,
        NOW,
        stderr_tail=("Traceback (most recent call last):", "ValueError: bad"),
        log_files=("/logs/0/stderr.log",),
    )
    text = str(ChildFailedError("t", {0: found}))
    assert "  traceback : last lines of stderr:\n  Traceback (most" in text
    assert "\n  ValueError: bad\n" in text
    assert "log_files : /logs/0/stderr.log" in text
    killed = failure(-9, NOW, stderr_tail=("step 7",), explanation="probably out of memory")
    text = str(ChildFailedError("t", {0: killed}))
    assert "traceback : Signal 9 (SIGKILL) received by PID 100\n  last lines of stderr:" in text
    assert "cause     : probably out of memory" in text


def test_report_asks_the_handler_about_a_signal(monkeypatch):
    class Knows(ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message, error_file):
            return f"{message}; the sun was low ({error_file})"

    monkeypatch.setattr("phalanx.elastic.multiprocessing.errors.get_error_handler", Knows)
    assert "the sun was low (<N/A>)" in str(ChildFailedError("t", {0: failure(-9, NOW)}))


def test_child_failed_error_needs_a_failure_and_can_be_pickled():
    with pytest.raises(AssertionError):
        ChildFailedError("t", {})
    error = ChildFailedError("t", {3: failure(1, NOW)})
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.failures == error.failures


# ------------------------------------------------------------------ with torch

WITH_TORCH = """
import os, sys
from phalanx.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing import errors as theirs

def attempt(recorder, path, error):
    def main():
        raise error
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    try:
        recorder(main)()
    except Exception as raised:
        assert raised is error

attempt(theirs.record, "theirs.json", ValueError("theirs"))
attempt(record, "ours.json", ValueError("ours"))
found = theirs.ProcessFailure(0, 1, 1, "ours.json")
assert found.message["message"] == "ValueError: ours", found
attempt(record, "agent.json", theirs.ChildFailedError("t", {0: found}))
"""


@pytest.mark.torch
@pytest.mark.process
def test_both_ways_with_torch(tmp_path):
    pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-c", WITH_TORCH], cwd=tmp_path, capture_output=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    # A worker that uses torch's record, under our agent.
    found = ProcessFailure(0, 1, 1, str(tmp_path / "theirs.json"))
    assert found.message["message"] == "ValueError: theirs"
    # torch writes whole seconds; the file's age says the rest.
    assert found.timestamp_ns // SECOND in (found.timestamp, found.timestamp + 1)
    # Our record around an agent of torch's.
    message = json.loads((tmp_path / "agent.json").read_text())["message"]
    assert message["message"] == "ValueError: ours" and message["errorCode"] == 1
