"""Metrics: groups, handlers, and the prof decorator."""

import pytest

import phalanx.elastic.metrics.api as metrics_api
from phalanx.elastic import metrics


class Collector(metrics.MetricHandler):
    def __init__(self):
        self.data = []

    def emit(self, metric_data):
        self.data.append(metric_data)

    @property
    def pairs(self):
        return [(each.name, each.value) for each in self.data]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(metrics_api, "_metrics_map", {})
    monkeypatch.setattr(metrics_api, "_default_metrics_handler", metrics.NullMetricHandler())


@pytest.fixture
def collector():
    handler = Collector()
    metrics.configure(handler)
    return handler


@metrics.prof
def well():
    return "fine"


@metrics.prof(group="mine")
def badly(error):
    raise error


class Thing:
    @metrics.prof
    def method(self):
        """What it does."""
        return self


def test_default_goes_nowhere():
    metrics.put_metric("n", 1)
    assert isinstance(metrics.getStream("any").handler, metrics.NullMetricHandler)


def test_groups_have_their_own_handler():
    general, special = Collector(), Collector()
    metrics.configure(general)
    metrics.configure(special, "special")
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "special")
    assert general.pairs == [("a", 1)] and general.data[0].group_name == "torchelastic"
    assert special.pairs == [("b", 2)] and special.data[0].timestamp > 1e9


def test_console(capsys):
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "g", "n", 3))
    assert capsys.readouterr().out == "[1.5][g]: n=3\n"


def test_prof_of_a_function(collector):
    assert well() == "fine"
    assert [name for name, _ in collector.pairs] == [
        "test_metrics.well.success",
        "test_metrics.well.duration.ms",
    ]
    assert collector.data[0].value == 1


def test_prof_of_a_method_keeps_its_face(collector):
    thing = Thing()
    assert thing.method() is thing
    assert collector.data[0].name == "Thing.method.success"
    assert Thing.method.__doc__ == "What it does." and Thing.method.__name__ == "method"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RuntimeError("x"), ["failure", "duration.ms"]), (KeyboardInterrupt(), ["duration.ms"])],
)
def test_prof_counts_exceptions_only(collector, error, outcome):
    with pytest.raises(type(error)):
        badly(error)
    assert [each.name.split("badly.")[1] for each in collector.data] == outcome
    assert {each.group_name for each in collector.data} == {"mine"}


def test_put_metric_is_looked_up_when_called(monkeypatch):
    seen = []
    monkeypatch.setattr(metrics_api, "put_metric", lambda *args: seen.append(args))
    well()
    assert seen[0] == ("test_metrics.well.success", 1, "torchelastic")


def test_deprecated_names_still_work(collector):
    with pytest.warns(FutureWarning, match="prof"):
        decorate = metrics.profile("old")
    assert decorate(lambda: 5)() == 5
    assert collector.data[0].name == "<lambda>.success" and collector.data[0].group_name == "old"
    with pytest.warns(FutureWarning, match="put_metric"):
        metrics.publish_metric("old", "n", 1)
    assert collector.pairs[-1] == ("n", 1)


def test_config_and_initialize():
    assert metrics.MetricsConfig().params == {}
    assert metrics.MetricsConfig({"a": "b"}).params == {"a": "b"}
    assert metrics.initialize_metrics(metrics.MetricsConfig()) is None
    assert metrics.get_elapsed_time_ms(0) > 1e12
