"""Events: their form, and where they go."""

import json
import logging

import pytest

from phalanx.elastic import events
from phalanx.elastic.events import Event, EventSource, NodeState, RdzvEvent


class Collector(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def sink(monkeypatch):
    from phalanx.elastic.events import handlers

    collector = Collector()
    monkeypatch.setitem(handlers._log_handlers, "test_sink", collector)
    monkeypatch.setitem(handlers._log_handlers, "dynamic_rendezvous", collector)
    monkeypatch.setattr(events, "_events_loggers", {})
    yield collector
    for name in ("test_sink", "dynamic_rendezvous"):
        logging.getLogger(f"torchelastic-events-{name}").removeHandler(collector)


def test_event_form():
    event = Event("n", EventSource.AGENT, metadata={"k": 1, "none": None})
    assert event.timestamp == 0
    assert json.loads(str(event)) == {
        "name": "n",
        "source": "AGENT",
        "timestamp": 0,
        "metadata": {"k": 1, "none": None},
    }
    assert Event.deserialize(event.serialize()) == event
    assert Event.deserialize(event) is event


def test_rdzv_event_form():
    event = RdzvEvent("n", "run", "m", "host", 7, NodeState.INIT, rank=1)
    assert list(json.loads(str(event))) == [
        "name", "run_id", "message", "hostname", "pid", "node_state",
        "master_endpoint", "rank", "local_id", "error_trace",
    ]  # fmt: skip
    assert RdzvEvent.deserialize(event.serialize()) == event
    assert RdzvEvent.deserialize(event) is event


def test_record_goes_to_its_destination_once_and_nowhere_else(sink, caplog):
    for _ in range(2):
        events.record(Event("n", EventSource.WORKER), "test_sink")
    assert [json.loads(line)["source"] for line in sink.lines] == ["WORKER", "WORKER"]
    assert not caplog.records
    logger = logging.getLogger("torchelastic-events-test_sink")
    assert not logger.propagate and logger.level == logging.INFO


def test_null_and_unknown_destinations(monkeypatch):
    events.record(Event("n", EventSource.AGENT))
    with pytest.raises(KeyError, match="console, dynamic_rendezvous, null"):
        events.record(Event("n", EventSource.AGENT), "nowhere")
    assert isinstance(events.get_logging_handler("console"), logging.StreamHandler)
    assert isinstance(events.get_logging_handler(), logging.NullHandler)


def test_level_of_the_environment(sink, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "warning")
    events.record(Event("n", EventSource.AGENT), "test_sink")
    assert sink.lines == []


def test_rdzv_events_fill_in_what_is_known(sink):
    events.construct_and_record_rdzv_event("run", "hello", NodeState.RUNNING, rank=3)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        events.construct_and_record_rdzv_event("run", "bad", NodeState.FAILED, name="own", pid=5)
    first, second = (RdzvEvent.deserialize(line) for line in sink.lines)
    assert first.name == f"{__file__.rpartition('/')[2]}:test_rdzv_events_fill_in_what_is_known"
    assert first.hostname and first.pid > 0 and first.rank == 3 and first.error_trace == ""
    assert second.name.endswith(":own") and second.pid == 5 and "broken" in second.error_trace


def test_rdzv_events_cost_nothing_when_they_go_nowhere(monkeypatch):
    monkeypatch.setattr(events, "record_rdzv_event", lambda event: pytest.fail("recorded"))
    events.construct_and_record_rdzv_event("run", "hello", NodeState.RUNNING)
