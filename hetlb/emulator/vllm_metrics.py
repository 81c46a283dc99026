"""The `/metrics` page of vLLM 0.32, with one series per engine of the server (label `engine`).

Names, labels and types are vLLM's; what the emulator does not model is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from hetlb.emulator.kv_transfer import KvExchange
from hetlb.emulator.real_time import RealTimeEngine
from hetlb.openai.metrics_page import counter, gauge, page
from hetlb.sim.kv_blocks import SharedKvBlocks

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

#: Families with one series per engine: name, help text and value.
_Of = Callable[[RealTimeEngine], float]
_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    ("num_requests_running", "Number of requests in model execution batches.", lambda it: it.running),
    ("num_requests_waiting", "Number of requests waiting to be processed.", lambda it: it.waiting),
    ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda it: it.model.kv.pool.usage),
)
_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    ("num_preemptions", "Cumulative number of preemption from the engine.", lambda it: it.model.preemptions),
    ("prompt_tokens", "Number of prefill tokens processed.", lambda it: it.prompt_tokens),
    ("generation_tokens", "Number of generation tokens processed.", lambda it: it.model.generated_tokens),
)
_PREFIX_CACHE: tuple[tuple[str, str, _Of], ...] = (
    ("prefix_cache_queries", "Number of tokens queried in the prefix cache.", lambda it: it.prompt_tokens),
    (
        "prefix_cache_hits",
        "Number of tokens found in the prefix cache.",
        lambda it: it.model.kv.hit_tokens,
    ),
)
#: With speculative decoding. A draft is one decode step: a token of its own, and those accepted.
_DRAFTS: tuple[tuple[str, str, _Of], ...] = (
    ("spec_decode_num_drafts", "Number of spec decoding drafts.", lambda it: _drafts(it)),
    (
        "spec_decode_num_accepted_tokens",
        "Number of accepted tokens.",
        lambda it: it.model.generated_tokens - _drafts(it),
    ),
)


def _drafts(engine: RealTimeEngine) -> int:
    return int(engine.model.generated_tokens / engine.tokens_per_step)


def render(
    runners: Sequence[RealTimeEngine], model_name: str, kv_cache_tokens: int, kv: KvExchange | None = None
) -> bytes:
    """The page of a server of these engines; `kv_cache_tokens` is the capacity of each by the profile."""
    engines = [({"engine": str(n), "model_name": model_name}, runner) for n, runner in enumerate(runners)]
    return page(_families(engines, kv_cache_tokens, kv))


_Engines = list[tuple[dict[str, str], RealTimeEngine]]


def _families(engines: _Engines, kv_cache_tokens: int, kv: KvExchange | None) -> Iterator[Metric]:
    for name, text, of in _GAUGES:
        yield gauge(f"vllm:{name}", text, [(labels, of(runner)) for labels, runner in engines])
    waiting = [
        (labels | {"reason": reason}, runner.waiting if reason == "capacity" else 0)
        for labels, runner in engines
        for reason in ("capacity", "deferred")
    ]
    yield gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", waiting)
    caches = isinstance(engines[0][1].model.kv, SharedKvBlocks)
    drafts = engines[0][1].tokens_per_step > 1.0
    for name, text, of in (*_COUNTERS, *(_PREFIX_CACHE if caches else ()), *(_DRAFTS if drafts else ())):
        yield counter(f"vllm:{name}", text, [(labels, of(runner)) for labels, runner in engines])
    ended = [
        (labels | {"finished_reason": reason}, count)
        for labels, runner in engines
        for reason, count in runner.finished.items()
    ]
    yield counter("vllm:request_success", "Count of successfully processed requests.", ended)
    if kv is not None:
        yield from _kv_transfer(engines, kv)
    yield _iteration_tokens(engines)
    info = [
        (
            {
                "block_size": str(runner.model.limits.block_size),
                "cache_dtype": "auto",
                "enable_prefix_caching": str(caches),
                "engine": labels["engine"],
                "kv_cache_size_tokens": str(kv_cache_tokens),
                "num_gpu_blocks": str(runner.model.limits.kv_blocks),
            },
            1,
        )
        for labels, runner in engines
    ]
    yield gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", info)
    began_at = engines[0][1].began_at
    text = "Start time of the process since unix epoch in seconds."
    yield gauge("process_start_time_seconds", text, [({}, began_at)])


def _kv_transfer(engines: _Engines, kv: KvExchange) -> Iterator[Metric]:
    labels = engines[0][0]
    computed = sum(runner.prompt_tokens for _, runner in engines) - kv.fetched_tokens
    sources = (("local_compute", computed), ("external_kv_transfer", kv.fetched_tokens))
    text = "Number of NIXL requests whose KV blocks expired."
    yield counter("vllm:nixl_num_kv_expired_reqs", text, [(labels, kv.expired)])
    yield counter(
        "vllm:nixl_num_failed_transfers", "Number of failed NIXL KV transfers.", [(labels, kv.failed)]
    )
    by_source = [(labels | {"source": source}, tokens) for source, tokens in sources]
    yield counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", by_source)


def _iteration_tokens(engines: _Engines) -> Metric:
    """vLLM's histogram of tokens per iteration."""
    text = "Histogram of number of tokens per engine_step."
    family = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=("engine", "model_name"))
    for labels, runner in engines:
        tokens = runner.iteration_tokens
        bounds = [*(str(float(bound)) for bound in tokens.BOUNDS), "+Inf"]
        sums = [*accumulate(tokens.counts), tokens.count]
        family.add_metric(list(labels.values()), list(zip(bounds, sums, strict=True)), tokens.total)
    return family
