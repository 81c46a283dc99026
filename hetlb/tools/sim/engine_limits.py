"""Limits of one vLLM engine, with vLLM's own defaults for unstated ones."""

from __future__ import annotations

from dataclasses import dataclass

from hetlb.balancer.config.engine_defaults import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
)
from hetlb.balancer.core.instance import DEFAULT_MAX_LORAS
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.types import Capacity
from hetlb.tools.sim.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class EngineLimits(PickleByFields):
    """Limits of one engine: tokens, blocks of `block_size` tokens, sequences; and two of its switches.

    `enable_prefix_caching` (on by default): freed blocks keep their content.
    `async_scheduling`: the next batch is fixed when the running one starts.
    `max_loras`: LoRA adapters of a batch. `need`: of sequences with layers that do not keep every token.
    """

    kv_cache_tokens: int
    block_size: int = DEFAULT_BLOCK_TOKENS
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    max_loras: int = DEFAULT_MAX_LORAS
    need: KvNeed | None = None

    def __post_init__(self) -> None:
        for name in ("kv_cache_tokens", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_loras"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"engine.{name}: expected at least 1, got {value}")
        if self.kv_blocks < 1:
            raise ValueError(
                f"engine.kv_cache_tokens: expected at least one block of {self.block_size} tokens, "
                f"got {self.kv_cache_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # vLLM refuses this too: every running request must be able to decode in every iteration.
            raise ValueError(
                f"engine.max_num_batched_tokens: expected at least engine.max_num_seqs "
                f"({self.max_num_seqs}), got {self.max_num_batched_tokens}"
            )

    @property
    def kv_blocks(self) -> int:
        """Whole blocks of the KV cache."""
        return self.kv_cache_tokens // self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens (prompt + output) of one sequence: its last token needs no slot."""
        return (self.kv_blocks * self.block_size if self.need is None else self.pool().most_tokens()) + 1

    def pool(self) -> BlockPool:
        """Return an empty pool of these blocks."""
        return BlockPool(self.kv_blocks, self.block_size, self.need, self.in_flight_tokens)

    def batch_of(self, tokens: float) -> float:
        """Return the number of sequences that run at once, if each holds `tokens` tokens on average."""
        needed = tokens if self.need is None else self.need.tokens(tokens)
        return min(float(self.max_num_seqs), self.kv_cache_tokens / max(1.0, needed))

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether the whole KV cache is enough for such a sequence."""
        return prompt_tokens + max(output_tokens, 1) <= self.max_sequence_tokens

    @property
    def in_flight_tokens(self) -> int:
        """Most tokens scheduled and not computed."""
        return self.max_num_batched_tokens * (2 if self.async_scheduling else 1)

    def told_kv_tokens(self, max_model_len: int) -> int:
        """Return the KV cache as vLLM tells it, for sequences of `max_model_len` tokens."""
        if self.need is None:
            return self.kv_cache_tokens
        longest = self.need.scaled(max_model_len, max_model_len, self.in_flight_tokens)
        return self.kv_cache_tokens * max_model_len // longest

    @classmethod
    def from_capacity(cls, capacity: Capacity) -> EngineLimits:
        """Make the limits of one engine that a profile or a server states, vLLM's defaults for the rest.

        Raises `ValueError` naming the key if the KV capacity is missing or figures contradict.
        """
        if capacity.kv_cache_tokens is None:
            raise ValueError(
                "engine.kv_cache_tokens: expected the capacity in tokens, but the key is missing"
            )
        seqs, batched = capacity.max_num_seqs, capacity.max_num_batched_tokens
        tokens, need = capacity.kv_cache_tokens // (capacity.engines or 1), capacity.kv_need
        if batched is None:
            batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 0)
        if seqs is None:
            seqs = min(DEFAULT_MAX_NUM_SEQS, batched)
        if need is not None:
            in_flight = batched * (2 if capacity.async_scheduling else 1)
            tokens = need.scaled(tokens, capacity.max_model_len, in_flight)
        return cls(
            kv_cache_tokens=tokens,
            block_size=capacity.block_size or DEFAULT_BLOCK_TOKENS,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            enable_prefix_caching=capacity.enable_prefix_caching is not False,
            async_scheduling=capacity.async_scheduling is True,
            max_loras=capacity.max_loras or DEFAULT_MAX_LORAS,
            need=need,
        )
