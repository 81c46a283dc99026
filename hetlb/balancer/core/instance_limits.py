"""Limits of one instance, and its latency model, which do not depend on its requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

from hetlb.balancer.core.latency import DEFAULT_LATENCY, LatencyModel, ideal_batch, processing_s
from hetlb.balancer.core.speed import SpeedTracker
from hetlb.balancer.core.types import Capacity, InstanceSpec, Request

if TYPE_CHECKING:
    from hetlb.balancer.core.adapters import AdapterSlots

#: KV capacity of an engine that has not told its own, in tokens.
DEFAULT_KV_CACHE_TOKENS: Final = 131_072
#: vLLM's own default of `max_num_seqs`, which no metric tells.
DEFAULT_MAX_NUM_SEQS: Final = 256
#: vLLM's own default of `max_loras`.
DEFAULT_MAX_LORAS: Final = 1
#: vLLM's own default of `max_num_batched_tokens`.
DEFAULT_TOKEN_BUDGET: Final = 2048
#: Largest workload in seconds: far beyond any real one, and its nanoseconds still add up.
MAX_WORKLOAD_S: Final = 1e9


class ChangeCounter:
    """Number of changes to the parameters of a fleet's instances."""

    def __init__(self) -> None:
        self.count = 0


#: Latency model and tokens per iteration of one engine; slots and KV cache in tokens of all; engines.
Parameters: TypeAlias = tuple[LatencyModel, int, int, int, int]


class InstanceLimits:
    """Limits and speed of an instance: configured, reported by its engine, or learnt from answers."""

    __slots__ = (
        "adapters", "capacity", "changes", "engine", "engines", "kv_cache_tokens", "kv_need", "latency",
        "longest_request_tokens", "max_num_seqs", "name", "nominal", "parameters", "parameters_version",
        "profiled", "spec", "speed", "token_budget",
    )  # fmt: skip

    def __init__(self, spec: InstanceSpec, now: float, changes: ChangeCounter) -> None:
        self.spec = spec
        self.name = spec.name
        self.changes = changes
        self.profiled = spec.profiled
        #: Model of the profile, of the data sheet of its GPU, or the default; and the same corrected by its
        #: answers.
        self.nominal: LatencyModel = spec.latency or DEFAULT_LATENCY
        self.latency = self.nominal
        self.speed = SpeedTracker(self.profiled, now)
        #: Instances with equal ones are of one kind.
        self.parameters: Parameters = (self.latency, 0, 0, 0, 1)
        #: Number of changes of the parameters.
        self.parameters_version = 0
        self.capacity = Capacity()
        #: Kind of its engine, "" while unknown.
        self.engine = ""
        #: Data-parallel engines behind its URL: each has `1 / engines` of its sequences and KV cache.
        self.engines = 1
        #: Its LoRA adapters, None where it lists none.
        self.adapters: AdapterSlots | None = None
        #: Most tokens (prompt and output) of one sequence, None while unknown.
        self.longest_request_tokens: int | None = None
        #: Sequences that all its engines run at once, tokens its KV cache holds, and tokens that an iteration
        #: computes at most; defaults while unknown.
        self.max_num_seqs = DEFAULT_MAX_NUM_SEQS
        self.kv_cache_tokens = DEFAULT_KV_CACHE_TOKENS
        self.token_budget = DEFAULT_TOKEN_BUDGET
        self.learn_capacity(spec.capacity)

    @property
    def gives_ids(self) -> bool:
        """True if its engine takes token ids for a prompt and gives the answer's."""
        return self.engine == "vllm"

    def needed(self, tokens: float) -> float:
        """Return the tokens of its KV cache that a sequence of `tokens` needs."""
        need = self.kv_need
        return tokens if need is None else need.tokens(tokens)

    def paper_work(self, request: Request, predicted: float) -> tuple[int, float, float]:
        """Return ideal batch, processing time and work in seconds (booked in the ledger) of a request.

        Xiong et al., arXiv 2504.15303: `T = (T_prefill(b) + T_decode(b)) / b` at the ideal batch b.
        Data-parallel engines run a batch each: T is divided by their number.
        """
        prompt, engines = request.prompt_tokens, self.engines
        cache, slots = self.kv_cache_tokens // engines, self.max_num_seqs // engines
        batch = ideal_batch(cache, self.needed(prompt + predicted), 0.0, slots)
        t_s = processing_s(self.latency, batch, prompt, predicted) / engines
        work_s = t_s * request.sequences
        return batch * engines, t_s, work_s if work_s < MAX_WORKLOAD_S else MAX_WORKLOAD_S

    @property
    def caches_prefixes(self) -> bool:
        """True if its engine keeps prompts for others: vLLM's default while it has not told."""
        return self.capacity.enable_prefix_caching is not False

    def learn_capacity(self, newer: Capacity) -> None:
        """Take over the engine's report of its capacity; figures it does not know stay."""
        capacity = self.capacity = self.capacity.updated(newer)
        self.token_budget = capacity.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        self.kv_need = need = capacity.kv_need
        cache, single = capacity.kv_cache_tokens, capacity.kv_tokens_per_request
        longest = (capacity.max_model_len, single, cache)
        if need is not None:
            ahead = self.token_budget * (2 if capacity.async_scheduling else 1)
            cache, single = [
                None if each is None else need.scaled(each, capacity.max_model_len, ahead)
                for each in (cache, single)
            ]
            held = None if cache is None else need.longest(cache if single is None else single)
            longest = (capacity.max_model_len, None if held is None or held == math.inf else int(held), None)
        known = [limit for limit in longest if limit is not None]
        self.longest_request_tokens = min(known) if known else None
        if self.adapters is not None:
            self.adapters.slots = capacity.max_loras or DEFAULT_MAX_LORAS
        engines = capacity.engines or 1
        if capacity.max_num_seqs is not None:
            self.max_num_seqs = capacity.max_num_seqs * engines
        else:
            self.max_num_seqs = self.max_num_seqs * engines // self.engines
        self.engines = self.speed.engines = engines
        self.kv_cache_tokens = cache or DEFAULT_KV_CACHE_TOKENS * engines
        self._update()

    def take_speed(self) -> None:
        """Scale the latency model by the factor of the speed tracker."""
        factor = self.speed.factor
        self.latency = self.nominal if factor == 1.0 else self.nominal.scaled(factor)
        self._update()

    def _update(self) -> None:
        slots, cache = self.max_num_seqs, self.kv_cache_tokens
        parameters = (self.latency, self.token_budget, slots, cache, self.engines)
        if parameters != self.parameters:
            self.parameters = parameters
            self.parameters_version += 1
            self.changes.count += 1
            self.changed()

    def changed(self) -> None:
        """Forget results computed from the earlier parameters."""
        raise NotImplementedError
