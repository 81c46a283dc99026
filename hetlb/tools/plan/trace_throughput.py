"""Tokens/s of one instance on rows of a trace: by the engine model, or by algorithm 1 of Xiong et al.

(arXiv 2504.15303, static: batches of requests that are prefilled and decoded together.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetlb.balancer.config.engine_defaults import DEFAULT_MAX_NUM_SEQS
from hetlb.balancer.config.profile_file import Profile
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.types import Capacity
from hetlb.errors import ConfigError
from hetlb.tools.plan.cluster import Cluster
from hetlb.tools.plan.common.fleet_run import arrivals
from hetlb.tools.plan.throughput import GOLDEN_SHARE
from hetlb.tools.sim.alone import full_tokens_per_s, requests_while_full
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.trace_formats import read_trace

#: Requests of a trace: (input tokens, output tokens).
Rows = Sequence[tuple[int, int]]
#: Least share of a trace's rows that must be within the cluster's limits.
_LEAST_ROW_SHARE = 0.5


@dataclass(frozen=True)
class RowSample:
    """Rows of a trace for estimates; `within` of its `total` rows are within the cluster's limits."""

    rows: list[tuple[int, int]]
    within: int
    total: int


def sample_rows(cluster: Cluster, trace: Path, count: int) -> RowSample:
    """Return rows within the cluster's limits, spread evenly over all lengths, in the trace's order."""
    limits = cluster.limits
    rows = [(row.input_tokens, max(1, row.output_tokens)) for row in read_trace(trace)]
    within = [(i, o) for i, o in rows if i <= limits.max_input_tokens and o <= limits.max_output_tokens]
    if not within or len(within) < _LEAST_ROW_SHARE * len(rows):
        wanted, got = ("some row", "none") if not within else ("at least half of the rows", len(within))
        raise ConfigError(
            f"{cluster.path}: limits: expected {wanted} of {trace} within {limits.max_input_tokens} input "
            f"and {limits.max_output_tokens} output tokens, got {got} of {len(rows)}"
        )
    return RowSample(spread(within, count), len(within), len(rows))


def spread(rows: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return at most `count` rows in their order, with the lengths of all of them.

    Example: 400 of 8,000. By prompts they are 20 groups of equal size. Each is sorted by answers, up in one
    and down in the next. Of every 20 rows in that order one is taken, at another place each time.
    """
    if len(rows) <= count:
        return rows
    groups = math.isqrt(count)
    order: list[int] = []
    by_prompt = sorted(range(len(rows)), key=lambda index: rows[index])
    for group in range(groups):
        own = by_prompt[group * len(rows) // groups : (group + 1) * len(rows) // groups]
        order += sorted(own, key=lambda index: rows[index][1], reverse=group % 2 == 1)
    places = ((number + number * GOLDEN_SHARE % 1.0) * len(rows) / count for number in range(count))
    return [rows[index] for index in sorted(order[int(place)] for place in places)]


class Throughputs:
    """Tokens/s of one instance on these rows, by the engine model (`simulate`) or algorithm 1 (`static`)."""

    def __init__(self, rows: Rows, kind: str) -> None:
        self.kind = kind
        self._rows = rows
        self._known: dict[tuple[LatencyModel, Capacity], float] = {}

    def of(self, profile: Profile) -> float:
        """Return tokens/s of one instance of this profile. Raises `ProfileError` if it is no engine's."""
        key = (profile.latency, profile.capacity)
        if key not in self._known:
            if self.kind == "simulate":
                self._known[key] = self._while_full(engine_of(profile))
            else:
                tokens = profile.engine.kv_cache_tokens or 0
                seqs = profile.engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
                self._known[key] = static_estimate(
                    profile.latency, self._rows, tokens, seqs, profile.capacity.kv_need
                )
        return self._known[key]

    def _while_full(self, spec: EngineSpec) -> float:
        """Return the tokens/s while requests wait: a sample of any length gives the same."""
        planned = arrivals(self._rows, math.inf, random.Random(0))
        count = requests_while_full(spec, planned)
        planned = arrivals(self._rows, math.inf, random.Random(0), count)
        return full_tokens_per_s(spec, planned, IterationRule.TOKEN)


# --- algorithm 1 ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests prefilled and decoded together: their mean input, their longest output."""

    size: int
    input_tokens: float
    output_tokens: int


def pack(rows: Rows, kv_cache_tokens: int, max_num_seqs: int, need: KvNeed | None = None) -> list[Batch]:
    """Return the largest batches that fit the KV cache, in trace order; too large rows are left out."""
    batches: list[Batch] = []
    size = inputs = longest = 0
    held = 0.0
    for input_tokens, output_tokens in rows:
        own = float(input_tokens + output_tokens)
        own = own if need is None else need.tokens(own)
        if own > kv_cache_tokens:
            continue
        if size and (size >= max_num_seqs or held + own > kv_cache_tokens):
            batches.append(Batch(size, inputs / size, longest))
            size = inputs = longest = 0
            held = 0.0
        size, inputs, held = size + 1, inputs + input_tokens, held + own
        longest = max(longest, output_tokens)
    if size:
        batches.append(Batch(size, inputs / size, longest))
    return batches


def static_estimate(
    latency: LatencyModel, rows: Rows, kv_cache_tokens: int, max_num_seqs: int, need: KvNeed | None = None
) -> float:
    """Return the tokens/s (input and output) of one instance on these rows, by the paper's algorithm 1.

    It promises the order of degrees, not the absolute figure: a real engine refills its batch.
    """
    seconds = sum(
        latency.paper_prefill_s(batch.size, batch.input_tokens)
        + latency.paper_decode_s(batch.size, batch.input_tokens, batch.output_tokens)
        for batch in pack(rows, kv_cache_tokens, max_num_seqs, need)
    )
    longest = kv_cache_tokens if need is None else need.longest(kv_cache_tokens)
    tokens = sum(i + o for i, o in rows if i + o <= longest)
    return tokens / seconds if seconds > 0 else 0.0
