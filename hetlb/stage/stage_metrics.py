"""Metrics pages of stages and coordinators: vLLM's names where they mean the same, else `hetlb_stage_*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetlb.openai.metrics_page import counter, gauge, page

if TYPE_CHECKING:  # the coordinator writes pages too, and does without numpy
    from hetlb.stage.batching import Batcher, Work
    from hetlb.stage.coordinator import Coordinator
    from hetlb.stage.kv import StageBlocks
    from hetlb.stage.stage_messages import Welcome


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


def render(welcome: Welcome, pool: StageBlocks, batcher: Batcher, counters: StageCounters) -> bytes:
    """The page of a stage."""
    gauges: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "Requests that hold KV or wait here.", len(batcher.leases)),
        ("vllm:num_requests_waiting", "Passes that wait for a batch.", batcher.waiting),
        ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", pool.usage),
    ]
    counts = [
        ("vllm:prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens),
        ("vllm:generation_tokens", "Answer tokens computed.", counters.generation_tokens),
        ("vllm:num_preemptions", "Requests that lost their KV blocks.", counters.preemptions),
    ]
    own: list[tuple[str, str, float]] = [
        ("hetlb_stage_first_layer", "First layer held.", welcome.first),
        ("hetlb_stage_end_layer", "Layer behind the last one held.", welcome.end),
        ("hetlb_stage_waiting_bytes", "Bytes of rows that wait.", batcher.waiting_bytes),
    ]
    model = {"model_name": welcome.model}
    sizes = {"num_gpu_blocks": str(pool.blocks), "block_size": str(pool.block_size)}
    return page(
        [
            *(gauge(name, text, [(model, value)]) for name, text, value in gauges),
            gauge("vllm:cache_config_info", "KV blocks of one layer each.", [(sizes, 1)]),
            *(counter(name, text, [(model, value)]) for name, text, value in counts),
            counter("hetlb_stage_batches", "Batches run.", [({}, counters.batches)]),
            counter("hetlb_stage_busy_seconds", "Seconds in batches.", [({}, counters.busy_s)]),
            *(gauge(name, text, [({}, value)]) for name, text, value in own),
        ]
    )


def render_coordinator(coordinator: Coordinator, prompt_tokens: int, generated_tokens: int) -> bytes:
    """The page of a coordinator."""
    scheduler, model = coordinator.scheduler, {"model_name": coordinator.group.model}
    usage = min(1.0, scheduler.kv_usage()) if scheduler.passable else 0.0
    lost = coordinator.preemptions
    families = [
        gauge("vllm:num_requests_running", "Sequences on a path.", [(model, scheduler.in_flight)]),
        gauge("vllm:num_requests_waiting", "Sequences without a path.", [(model, scheduler.waiting)]),
        gauge("vllm:kv_cache_usage_perc", "Booked share of the fullest layer's KV cache.", [(model, usage)]),
        counter("vllm:prompt_tokens", "Prompt tokens.", [(model, prompt_tokens)]),
        counter("vllm:generation_tokens", "Answer tokens.", [(model, generated_tokens)]),
        counter("vllm:num_preemptions", "Sequences that lost their KV.", [(model, lost)]),
        counter("hetlb_stage_replays", "Paths that broke.", [({}, coordinator.replays)]),
    ]
    if tokens := coordinator.kv_tokens:
        sizes = {"block_size": "1", "num_gpu_blocks": str(tokens), "kv_cache_size_tokens": str(tokens)}
        families.append(gauge("vllm:cache_config_info", "Tokens of the smallest layer.", [(sizes, 1)]))
    stages = [({"stage": each["name"]}, each) for each in coordinator.documents()]
    booked = [(label, each["kv_reserved_token_layers"]) for label, each in stages]
    return page(
        [
            *families,
            gauge(
                "hetlb_stage_up", "1 while it is used.", [(at, each["state"] == "up") for at, each in stages]
            ),
            gauge(
                "hetlb_stage_in_flight", "Paths through it.", [(at, each["in_flight"]) for at, each in stages]
            ),
            gauge("hetlb_stage_kv_reserved_token_layers", "Booked KV.", booked),
        ]
    )
