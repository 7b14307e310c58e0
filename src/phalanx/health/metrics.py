"""``/metrics`` in the Prometheus text format."""

from __future__ import annotations

import re
from collections.abc import Iterable

from phalanx.health.source import Metric

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Newer libraries take any text as a name, and quote it; not every reader does.
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")


def render(metrics: Iterable[Metric]) -> bytes:
    """The text. Imports prometheus_client, so only somebody who asks pays for it.

    Metrics of one name must agree in kind and label names. Raises ValueError for a name or
    label that Prometheus does not allow, or a kind that there is not.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family

    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for metric in metrics:
        family = families.get(metric.name)
        if family is None:
            kind = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}.get(metric.kind)
            if kind is None:
                raise ValueError(f"metric {metric.name}: {metric.kind!r} is no kind of metric")
            if not _NAME.fullmatch(metric.name):
                raise ValueError(f"{metric.name!r} is no name of a metric")
            family = kind(metric.name, metric.help, labels=sorted(metric.labels))
            families[metric.name] = family
        family.add_metric([str(metric.labels[k]) for k in sorted(metric.labels)], metric.value)

    class Collector:
        def collect(self) -> Iterable[Family]:
            return families.values()

    # Its own registry: the global one belongs to the user's program.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type]
    return bytes(generate_latest(registry))
