"""The `/metrics` page of vLLM 0.32: its names, labels and types, with one series per engine of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Histogram
from prometheus_client.core import Metric

from hetlb.tools.emulator.kv_transfer import KvExchange
from hetlb.tools.emulator.real_time import RealTimeEngine
from hetlb.tools.emulator.sleep_mode import SleepMode
from hetlb.tools.openai.application import counter, gauge, page

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
#: vLLM's own upper bounds of its histogram of tokens per iteration.
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_Of = Callable[[RealTimeEngine], float]
_GAUGES: dict[str, _Of] = {
    "num_requests_running": lambda it: it.running,
    "num_requests_waiting": lambda it: it.waiting,
    "kv_cache_usage_perc": lambda it: it.model.kv.pool.usage,
}
_COUNTERS: dict[str, _Of] = {
    "num_preemptions": lambda it: it.model.preemptions,
    "prompt_tokens": lambda it: it.prompt_tokens,
    "generation_tokens": lambda it: it.model.generated_tokens,
}
_PREFIX_CACHE: dict[str, _Of] = {
    "prefix_cache_queries": lambda it: it.prompt_tokens,
    "prefix_cache_hits": lambda it: it.model.kv.hit_tokens,
}
#: With speculative decoding. A draft is one decode step: a token of its own, and the accepted ones.
_DRAFTS: dict[str, _Of] = {
    "spec_decode_num_drafts": lambda it: it.drafts,
    "spec_decode_num_accepted_tokens": lambda it: it.model.generated_tokens - it.drafts,
}


class VllmMetrics:
    """The page of a server of these engines; `kv_cache_tokens` is the capacity of each by the profile."""

    def __init__(
        self,
        runners: Sequence[RealTimeEngine],
        model_name: str,
        kv_cache_tokens: int,
        kv: KvExchange | None = None,
        sleep: SleepMode | None = None,
    ) -> None:
        self._sleep = sleep
        self._engines = [
            ({"engine": str(n), "model_name": model_name}, runner) for n, runner in enumerate(runners)
        ]
        self._kv_cache_tokens = kv_cache_tokens
        self._kv = kv
        self._iteration_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Histogram of number of tokens per engine_step.",
            ("engine", "model_name"),
            buckets=_ITERATION_TOKENS,
            registry=None,
        )
        for labels, runner in self._engines:
            runner.on_iteration = self._iteration_tokens.labels(**labels).observe

    def text(self) -> bytes:
        """Return the page now."""
        return page(self._families())

    def _families(self) -> Iterator[Metric]:
        engines = self._engines
        first_labels, first = engines[0]
        caches, drafts = first.model.kv.shared, first.tokens_per_step > 1.0
        for name, of in _GAUGES.items():
            yield gauge(f"vllm:{name}", name, [(labels, of(runner)) for labels, runner in engines])
        for name, of in (_COUNTERS | (_PREFIX_CACHE if caches else {}) | (_DRAFTS if drafts else {})).items():
            yield counter(f"vllm:{name}", name, [(labels, of(runner)) for labels, runner in engines])
        waiting = [
            (labels | {"reason": reason}, runner.waiting if reason == "capacity" else 0)
            for labels, runner in engines
            for reason in ("capacity", "deferred")
        ]
        yield gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", waiting)
        ended = [
            (labels | {"finished_reason": reason}, count)
            for labels, runner in engines
            for reason, count in runner.finished.items()
        ]
        yield counter("vllm:request_success", "Ended requests by reason.", ended)
        if (kv := self._kv) is not None:
            expired, failed = [(first_labels, kv.expired)], [(first_labels, kv.failed)]
            yield counter("vllm:nixl_num_kv_expired_reqs", "Leases that ended unfetched.", expired)
            yield counter("vllm:nixl_num_failed_transfers", "Failed KV transfers.", failed)
            computed = sum(runner.prompt_tokens for _, runner in engines) - kv.fetched_tokens
            sources = {"local_compute": computed, "external_kv_transfer": kv.fetched_tokens}
            by_source = [(first_labels | {"source": source}, count) for source, count in sources.items()]
            yield counter("vllm:prompt_tokens_by_source", "Prompt tokens by source.", by_source)
        if self._sleep is not None:
            states = {"awake": not self._sleep.asleep, "weights_offloaded": self._sleep.asleep}
            slept = [
                (labels | {"sleep_state": name}, int(on))
                for labels, _ in engines
                for name, on in states.items()
            ]
            yield gauge("vllm:engine_sleep_state", "Engine sleep state.", slept)
        yield from self._iteration_tokens.collect()
        info = [
            (
                {
                    "block_size": str(runner.model.limits.block_size),
                    "cache_dtype": "auto",
                    "enable_prefix_caching": str(caches),
                    "engine": labels["engine"],
                    "kv_cache_size_tokens": str(self._kv_cache_tokens),
                    "num_gpu_blocks": str(runner.model.limits.kv_blocks),
                },
                1,
            )
            for labels, runner in engines
        ]
        yield gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", info)
        yield gauge("process_start_time_seconds", "Unix time of its start.", [({}, first.began_at)])
