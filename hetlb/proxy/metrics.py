"""The proxy's own `/metrics` page: gauges read from the scheduler when asked, counters kept by the driver.

Promise: a scrape costs the hot path nothing (everything is collected at the time of the scrape), and
labels take only values that configuration or code defines, never what a client sends.
docs/metrics.md describes every name; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import hetlb
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import AdminState, Health, Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Totals:
    """Counters that only grow, bumped by the driver as requests end."""

    __slots__ = ("decisions", "instance_requests", "instance_tokens", "prompt_tokens", "requests", "retries")

    def __init__(self) -> None:
        self.requests: dict[tuple[Outcome, str], int] = {}
        self.instance_requests: dict[tuple[str, Outcome], int] = {}
        self.instance_tokens: dict[str, int] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.decisions = 0
        self.retries = 0


class MetricsSource(Protocol):
    """What a scrape reads."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def invalid_samples(self) -> Mapping[str, int]: ...
    def now(self) -> float: ...


class FleetCollector(Collector):
    """Turns the state of the scheduler and the driver's totals into metric families."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Nothing is known beforehand: registering must not read the fleet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families, in a fixed order."""
        source = self._source
        scheduler, totals, now = source.scheduler, source.totals, source.now()
        yield InfoMetricFamily(
            "hetlb_build",
            "Version and policy in force.",
            value={
                "version": hetlb.__version__,
                "policy": scheduler.policy_name,
            },
        )
        requests = CounterMetricFamily(
            "hetlb_requests",
            "Requests that ended, by outcome and the phase they ended in.",
            labels=("outcome", "phase"),
        )
        for (outcome, phase), count in totals.requests.items():
            requests.add_metric((outcome.value, phase), count)
        yield requests
        yield CounterMetricFamily("hetlb_retries", "Requests sent to another instance.", value=totals.retries)
        yield CounterMetricFamily("hetlb_decisions", "Dispatches decided.", value=totals.decisions)
        by_instance = CounterMetricFamily(
            "hetlb_instance_requests",
            "Leases that ended, by instance and outcome.",
            labels=("instance", "outcome"),
        )
        for (name, outcome), count in totals.instance_requests.items():
            by_instance.add_metric((name, outcome.value), count)
        yield by_instance
        for metric, help_text, values in (
            ("hetlb_instance_output_tokens", "Tokens generated, by instance.", totals.instance_tokens),
            ("hetlb_instance_prompt_tokens", "Prompt tokens sent, by instance.", totals.prompt_tokens),
            ("hetlb_instance_invalid_samples", "Scrapes with absurd values.", source.invalid_samples),
        ):
            family = CounterMetricFamily(metric, help_text, labels=("instance",))
            for name, count in values.items():
                family.add_metric((name,), count)
            yield family
        yield GaugeMetricFamily(
            "hetlb_queue_requests", "Requests waiting for an instance.", value=len(scheduler.queue)
        )
        yield GaugeMetricFamily(
            "hetlb_queue_bytes", "Bytes of the bodies waiting.", value=scheduler.queue.bytes
        )
        yield from self._instances(scheduler, now)

    def _instances(self, scheduler: Scheduler, now: float) -> Iterator[Metric]:
        def gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, help_text, labels=("instance", *labels))

        in_flight = gauge("hetlb_instance_in_flight", "Requests dispatched and not ended.")
        workload = gauge("hetlb_instance_workload_seconds", "Work assigned and not completed.")
        reserved = gauge("hetlb_instance_kv_reserved_tokens", "KV cache tokens promised to requests.")
        capacity = gauge("hetlb_instance_kv_cache_tokens", "KV cache tokens there are.")
        reported = gauge("hetlb_instance_kv_reported_ratio", "KV cache use the engine reports, 0 to 1.")
        running = gauge("hetlb_instance_reported_running", "Requests running, as the engine reports.")
        waiting = gauge("hetlb_instance_reported_waiting", "Requests waiting, as the engine reports.")
        age = gauge("hetlb_instance_signal_age_seconds", "Age of the engine's last report.")
        state = gauge("hetlb_instance_state", "1 for the administrative state in force.", "state")
        health = gauge("hetlb_instance_health", "1 for the health in force.", "health")
        for instance in scheduler.instances:
            label = (instance.name,)
            in_flight.add_metric(label, instance.in_flight)
            workload.add_metric(label, instance.work_s)
            reserved.add_metric(label, instance.kv_tokens)
            capacity.add_metric(label, instance.kv_cache_tokens)
            if (sample := instance.sample) is not None and instance.sample_at is not None:
                age.add_metric(label, now - instance.sample_at)
                for family, value in (
                    (reported, sample.kv_usage),
                    (running, sample.running),
                    (waiting, sample.waiting),
                ):
                    if value is not None:
                        family.add_metric(label, value)
            for admin in AdminState:
                state.add_metric((instance.name, admin.value), float(instance.admin is admin))
            for each in Health:
                health.add_metric((instance.name, each.value), float(instance.health.state is each))
        yield from (in_flight, workload, reserved, capacity, reported, running, waiting, age, state, health)


def make_registry(source: MetricsSource) -> CollectorRegistry:
    """A registry of its own: nothing global, so that tests may make many."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(source))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The page in the Prometheus text format."""
    return generate_latest(registry)
