"""A small HTTP server that says how this process is: ``/livez /readyz /status /metrics``."""

from phalanx.health.server import HealthServer
from phalanx.health.source import HealthSource, LoopHealth, Metric

__all__ = ["HealthServer", "HealthSource", "LoopHealth", "Metric"]
