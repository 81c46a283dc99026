"""Results of a simulated fleet: records, counts, and its KV use and queues over time.

A series has a bounded number of evenly spaced moments however long the run is (if they become too many,
every second one is dropped and the interval doubles), so that the same run gives the same series.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import Outcome
from hetlb.tools.workload.records import Counted, Gaps, RequestResult, summarize

#: Most moments of a series: it holds at least half of it (fewer only if a run is very short).
_MOST_MOMENTS = 800


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """A fleet `at_s` seconds from the start: requests `held` at the proxy, bound to no instance.

    By instance: the fraction of its KV blocks in use, and the sequences waiting in it.
    """

    at_s: float
    held: int
    kv_usage: dict[str, float]
    waiting: dict[str, int]


@dataclass(slots=True)
class FleetSeries:
    """Moments of a simulated fleet, `interval_s` seconds apart."""

    interval_s: float = 0.01
    moments: list[FleetMoment] = field(default_factory=list)

    def add(self, moment: FleetMoment) -> float:
        """Add a moment; returns when the next one is due."""
        self.moments.append(moment)
        if len(self.moments) > _MOST_MOMENTS:
            del self.moments[1::2]
            self.interval_s *= 2
        return self.moments[-1].at_s + self.interval_s


@dataclass(slots=True)
class FleetResult:
    """Result of a run: a record per planned request, in plan order, and what the engines counted.

    With prefix caches every instance has `prefix_hit_tokens` and `prefilled_tokens`, with LoRA adapters
    `adapter_loads`.
    """

    records: list[RequestResult]
    outcomes: list[Outcome]
    gaps: Gaps
    counted: Counted
    #: Requests with a KV transfer; prompts computed again after a late transfer.
    transfers: int = 0
    expired: int = 0
    classes: Mapping[str, ServiceClass] | None = None

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run, as `vllm bench serve` names them."""
        return summarize(
            self.records, self.gaps, instances=self.counted, counted=self.counted, classes=self.classes
        )
