"""An engine's own histograms since its start, from its metrics page: how fast it was before hetlb came.

Read at the first page of an instance without a profile. Means are ratios of sums over all series, so ranks
and engines that repeat a figure change none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from hetlb.balancer.core.facts import EngineHistory, EngineSample
from hetlb.balancer.engines.engine_metrics import EnginePage, SeriesReader
from hetlb.balancer.engines.engine_tables import spelled

#: Tokens after the first of an answer, and requests, that make a mean.
_LEAST_TOKENS: Final = 100.0
_LEAST_REQUESTS: Final = 4.0
#: Largest figure of a mean, and of a series: more is nonsense.
_MOST: Final = 1e7
_MOST_SUM: Final = 1e15
#: By prefix: seconds between tokens (the first that is there), seconds of a prompt's computation, iterations,
#: requests, prompt tokens, prompt tokens from the cache, and tokens of answers. "" for what is not told.
_NAMES: Final = (
    (
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "vllm:request_prefill_time_seconds",
        "vllm:iteration_tokens_total_count",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total",
    ),
    (
        ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "",
        "",
        "sglang:num_requests_total",
        "sglang:prompt_tokens_total",
        "sglang:cached_tokens_total",
        "sglang:generation_tokens_total",
    ),
)
_READ: Final = frozenset(
    name
    for steps, prefill, *counts in _NAMES
    for name in (
        *counts,
        *(f"{histogram}_{part}" for histogram in (*steps, prefill) for part in ("sum", "count")),
    )
)


@lru_cache(1024)
def _known(name: bytes) -> tuple[str, str]:
    found = spelled(name.decode("utf-8", "replace"))[1]
    return "", found if found in _READ else ""


def _passed(start: bytes) -> str | None:
    return "" if not start or start[:1] == b"#" else None


class HistoryPage:
    """A metrics page of which the history is read, too. It is fed in pieces of any size."""

    def __init__(self) -> None:
        self._page = EnginePage()
        self._history = SeriesReader(_known, _passed)

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the page."""
        self._page.feed(data)
        self._history.feed(data)

    def sample(self) -> EngineSample:
        """Return the sample of the whole page, with the history if it tells one."""
        self._history.end()
        return replace(self._page.sample(), history=_history_of(self._history.series))


def _history_of(series: Mapping[str, Mapping[str, float]]) -> EngineHistory | None:
    sums = {name: math.fsum(found.values()) for name, found in series.items() if _sane(found)}
    for steps, prefill, iterations, requests, prompts, cached, answers in _NAMES:
        step = next((name for name in steps if sums.get(f"{name}_count", 0.0) >= _LEAST_TOKENS), None)
        answered = sums.get(requests, 0.0)
        if step is None or answered < _LEAST_REQUESTS or prompts not in sums:
            continue
        read = sums.get(f"{prefill}_count", 0.0)
        generated, turns = sums.get(answers, 0.0), sums.get(iterations, 0.0)
        found = EngineHistory(
            prompt=max(1.0, (sums[prompts] - min(sums[prompts], sums.get(cached, 0.0))) / answered),
            prefill_s=(sums.get(f"{prefill}_sum", 0.0) / read or None) if read >= _LEAST_REQUESTS else None,
            output=sums[f"{step}_count"] / answered,
            step_s=sums.get(f"{step}_sum", 0.0) / sums[f"{step}_count"],
            batch=max(1.0, generated / turns) if turns > 0.0 else 1.0,
        )
        figures = (found.prompt, found.prefill_s or 1.0, found.output, found.step_s, found.batch)
        if all(0.0 < each < _MOST for each in figures):
            return found
    return None


def _sane(found: Mapping[str, float]) -> bool:
    return all(0.0 <= value <= _MOST_SUM for value in found.values())
