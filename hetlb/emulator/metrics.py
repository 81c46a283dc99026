"""The `/metrics` page of vLLM 0.32, as far as this emulator has the figures.

Promise: names, labels and types are vLLM's; what the emulator does not model is left out, not made up.
"""

from __future__ import annotations

from itertools import accumulate

from hetlb.emulator.runner import Runner

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def render(runner: Runner, model_name: str, kv_cache_tokens: int) -> bytes:
    """The page. `kv_cache_tokens` is the capacity as the profile states it."""
    model = runner.model
    limits = model.limits
    labels = f'engine="0",model_name="{_escaped(model_name)}"'
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, *series: tuple[str, float]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{{{extra}}} {float(value)}" for extra, value in series)

    metric(
        "vllm:num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        (labels, runner.running),
    )
    metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        (labels, runner.waiting),
    )
    metric(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        (f'{labels},reason="capacity"', runner.waiting),
        (f'{labels},reason="deferred"', 0),
    )
    metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        (labels, model.kv_usage),
    )
    metric(
        "vllm:num_preemptions_total",
        "counter",
        "Cumulative number of preemption from the engine.",
        (labels, model.preemptions),
    )
    metric(
        "vllm:prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        (labels, runner.prompt_tokens),
    )
    metric(
        "vllm:generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        (labels, model.generated_tokens),
    )
    metric(
        "vllm:request_success_total",
        "counter",
        "Count of successfully processed requests.",
        *(
            (f'engine="0",finished_reason="{reason}",model_name="{_escaped(model_name)}"', count)
            for reason, count in runner.finished.items()
        ),
    )
    tokens = runner.iteration_tokens
    name = "vllm:iteration_tokens_total"
    lines.append(f"# HELP {name} Histogram of number of tokens per engine_step.")
    lines.append(f"# TYPE {name} histogram")
    bounds = [*map(float, tokens.BOUNDS), "+Inf"]
    sums = [*accumulate(tokens.counts), tokens.count]
    lines.extend(
        f'{name}_bucket{{engine="0",le="{bound}",model_name="{_escaped(model_name)}"}} {float(below)}'
        for bound, below in zip(bounds, sums, strict=True)
    )
    lines += [
        f"{name}_count{{{labels}}} {float(tokens.count)}",
        f"{name}_sum{{{labels}}} {float(tokens.total)}",
    ]
    metric(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        (
            f'block_size="{limits.block_size}",cache_dtype="auto",enable_prefix_caching="False",engine="0",'
            f'kv_cache_size_tokens="{kv_cache_tokens}",num_gpu_blocks="{limits.kv_blocks}"',
            1,
        ),
    )
    lines += [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {runner.began_at}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
