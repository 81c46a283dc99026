"""The `/metrics` page of vLLM 0.32, with one series per engine of the server (label `engine`).

Names, labels and types are vLLM's; what the emulator does not model is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from hetlb.emulator.kv_transfer import KvExchange
from hetlb.emulator.runner import Runner

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

#: Name, type, help text and value of the families with one series per engine.
_FAMILIES: tuple[tuple[str, str, str, Callable[[Runner], float]], ...] = (
    (
        "vllm:num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        lambda runner: runner.running,
    ),
    (
        "vllm:num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        lambda runner: runner.waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda runner: runner.model.kv_usage,
    ),
    (
        "vllm:num_preemptions_total",
        "counter",
        "Cumulative number of preemption from the engine.",
        lambda runner: runner.model.preemptions,
    ),
    (
        "vllm:prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        lambda runner: runner.prompt_tokens,
    ),
    (
        "vllm:generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        lambda runner: runner.model.generated_tokens,
    ),
)

#: The same of a prefix cache.
_PREFIX_CACHE: tuple[tuple[str, str, str, Callable[[Runner], float]], ...] = (
    (
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda runner: runner.prompt_tokens,
    ),
    (
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        lambda runner: runner.model.prefix_hit_tokens,
    ),
)


def render(
    runners: Sequence[Runner], model_name: str, kv_cache_tokens: int, kv: KvExchange | None = None
) -> bytes:
    """The page of a server of these engines; `kv_cache_tokens` is the capacity of each by the profile."""
    name_label = f'model_name="{_escaped(model_name)}"'
    caching = runners[0].model.caches_prefixes
    engines = [(f'engine="{number}"', runner) for number, runner in enumerate(runners)]
    lines: list[str] = []

    def family(name: str, kind: str, text: str, series: Sequence[tuple[str, float]]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{{{labels}}} {float(value)}" for labels, value in series)

    for name, kind, text, of in (*_FAMILIES, *(_PREFIX_CACHE if caching else ())):
        family(name, kind, text, [(f"{engine},{name_label}", of(runner)) for engine, runner in engines])
        if name == "vllm:num_requests_waiting":
            family(
                "vllm:num_requests_waiting_by_reason",
                "gauge",
                "Number of waiting requests by reason.",
                [
                    (f'{engine},{name_label},reason="{reason}"', waiting)
                    for engine, runner in engines
                    for reason, waiting in (("capacity", runner.waiting), ("deferred", 0))
                ],
            )
    family(
        "vllm:request_success_total",
        "counter",
        "Count of successfully processed requests.",
        [
            (f'{engine},finished_reason="{reason}",{name_label}', count)
            for engine, runner in engines
            for reason, count in runner.finished.items()
        ],
    )
    if kv is not None:
        label = f'engine="0",{name_label}'
        text = "Number of NIXL requests whose KV blocks expired."
        family("vllm:nixl_num_kv_expired_reqs_total", "counter", text, [(label, kv.expired)])
        text = "Number of failed NIXL KV cache transfers."
        family("vllm:nixl_num_failed_transfers_total", "counter", text, [(label, kv.failed)])
        computed = sum(runner.prompt_tokens for _, runner in engines) - kv.fetched_tokens
        sources = (("local_compute", computed), ("external_kv_transfer", kv.fetched_tokens))
        family(
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "Number of prompt tokens by source.",
            [(f'{label},source="{source}"', tokens) for source, tokens in sources],
        )
    lines += _iteration_tokens(engines, name_label)
    family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        [
            (
                f'block_size="{runner.model.limits.block_size}",cache_dtype="auto",'
                f'enable_prefix_caching="{caching}",{engine},kv_cache_size_tokens="{kv_cache_tokens}",'
                f'num_gpu_blocks="{runner.model.limits.kv_blocks}"',
                1,
            )
            for engine, runner in engines
        ],
    )
    lines += [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {runners[0].began_at}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _iteration_tokens(engines: Sequence[tuple[str, Runner]], name_label: str) -> list[str]:
    """vLLM's histogram of tokens per iteration."""
    name = "vllm:iteration_tokens_total"
    lines = [f"# HELP {name} Histogram of number of tokens per engine_step.", f"# TYPE {name} histogram"]
    for engine, runner in engines:
        tokens = runner.iteration_tokens
        bounds = [*map(float, tokens.BOUNDS), "+Inf"]
        sums = [*accumulate(tokens.counts), tokens.count]
        lines += [
            f'{name}_bucket{{{engine},le="{bound}",{name_label}}} {float(below)}'
            for bound, below in zip(bounds, sums, strict=True)
        ]
        lines += [
            f"{name}_count{{{engine},{name_label}}} {float(tokens.count)}",
            f"{name}_sum{{{engine},{name_label}}} {float(tokens.total)}",
        ]
    return lines


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
