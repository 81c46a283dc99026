"""Results of a simulated fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetlb.core.objective import ServiceClass
from hetlb.core.types import Outcome
from hetlb.workload.records import Gaps, RequestResult, summarize


@dataclass(slots=True)
class FleetResult:
    """Result of a run: a record per planned request, in plan order, and counts per instance."""

    records: list[RequestResult]
    outcomes: list[Outcome]
    gaps: Gaps
    preemptions: dict[str, int]
    kv_peak: dict[str, float]
    #: With prefix caches: prompt tokens found there, and computed.
    prefix_hits: dict[str, tuple[int, int]] | None = None
    #: Requests whose KV cache was to be transferred; of them, those that were too late and computed again.
    transfers: int = 0
    expired: int = 0
    #: LoRA adapters loaded, by instance; None where no request asked for one.
    adapter_loads: dict[str, int] | None = None
    classes: Mapping[str, ServiceClass] | None = None

    def summary(self) -> dict[str, Any]:
        """The figures of the run, as `vllm bench serve` names them.

        With prefix caches every instance has `prefix_hit_tokens` and `prefilled_tokens` too, with LoRA
        adapters `adapter_loads`.
        """
        found = summarize(
            self.records,
            self.gaps,
            instances=self.preemptions,
            preemptions=self.preemptions,
            kv_peak=self.kv_peak,
            classes=self.classes,
        )
        if self.prefix_hits is not None:
            for entry in found["instances"]:
                hit, computed = self.prefix_hits[entry["name"]]
                entry |= {"prefix_hit_tokens": hit, "prefilled_tokens": computed}
        if self.adapter_loads is not None:
            for entry in found["instances"]:
                entry["adapter_loads"] = self.adapter_loads[entry["name"]]
        return found
