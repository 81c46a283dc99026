"""Prometheus' text of metric families made at each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: Labels of one series, and its value.
Series = Iterable[tuple[Mapping[str, str], float]]


def gauge(name: str, text: str, series: Series) -> Metric:
    return _filled(GaugeMetricFamily(name, text), series)


def counter(name: str, text: str, series: Series) -> Metric:
    """Return a counter; `_total` is added to its name."""
    return _filled(CounterMetricFamily(name, text), series, "_total")


def _filled(family: Metric, series: Series, suffix: str = "") -> Metric:
    for labels, value in series:
        family.add_sample(family.name + suffix, dict(labels), value)
    return family


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def page(families: Iterable[Metric]) -> bytes:
    return generate_latest(_Families(families))  # type: ignore[arg-type, unused-ignore]
