"""The metrics page of a stage: vLLM's names where they mean the same, `hetlb_stage_*` elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # the coordinator writes pages too, and does without numpy
    from hetlb.stage.batching import Batcher, Work
    from hetlb.stage.kv import BlockPool
    from hetlb.stage.messages import Welcome


@dataclass(slots=True)
class StageCounters:
    """Work of a stage since it started. Tokens are those that passed it."""

    batches: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0

    def batch(self, works: Sequence[Work], seconds: float) -> None:
        """A batch is done."""
        self.batches += 1
        self.busy_s += seconds
        for work in works:
            if work.position < work.lease.sampling.prompt_tokens:
                self.prompt_tokens += work.count
            else:
                self.generation_tokens += work.count


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def page(metrics: Iterable[Metric]) -> str:
    """Prometheus text of some metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(metrics))
    return generate_latest(registry).decode()


def gauge(name: str, help: str, value: float, **labels: str) -> Metric:
    """One gauge with one series."""
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, help: str, value: float, **labels: str) -> Metric:
    """One counter with one series; `_total` is added to its name."""
    family = CounterMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def render(welcome: Welcome, pool: BlockPool, batcher: Batcher, counters: StageCounters) -> str:
    """The page of a stage."""
    model = {"model_name": welcome.model}
    holding = len(batcher.leases)
    return page(
        [
            gauge("vllm:num_requests_running", "Requests that hold KV or wait here.", holding, **model),
            gauge("vllm:num_requests_waiting", "Passes that wait for a batch.", batcher.waiting, **model),
            gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", pool.usage, **model),
            gauge(
                "vllm:cache_config_info",
                "KV blocks of one layer each.",
                1,
                num_gpu_blocks=str(pool.blocks),
                block_size=str(pool.block_size),
            ),
            counter("vllm:prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens, **model),
            counter("vllm:generation_tokens", "Answer tokens computed.", counters.generation_tokens, **model),
            counter(
                "vllm:num_preemptions", "Requests that lost their KV blocks.", counters.preemptions, **model
            ),
            counter("hetlb_stage_batches", "Batches run.", counters.batches),
            counter("hetlb_stage_busy_seconds", "Seconds in batches.", counters.busy_s),
            gauge("hetlb_stage_first_layer", "First layer held.", welcome.first),
            gauge("hetlb_stage_end_layer", "Layer behind the last one held.", welcome.end),
            gauge("hetlb_stage_waiting_bytes", "Bytes of rows that wait.", batcher.waiting_bytes),
        ]
    )
