"""KV cache that a sequence needs where not every layer keeps every token: windows end, a state is constant.

One form, in tokens of the layers that keep all: n tokens need `grows * n + window * min(n, window_tokens) +
state`. Where no layer keeps all, a token is one of the windows, or a whole state. `scaled` is the KV cache in
such tokens: vLLM 0.32 tells how many sequences of `max_model_len` tokens fit, times `max_model_len`
(`get_kv_cache_capacity` in its `v1/core/kv_cache_utils.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetlb.balancer.core.pickle_by_fields import PickleByFields


@dataclass(frozen=True, slots=True)
class KvNeed(PickleByFields):
    """Tokens that a sequence needs, as the module says; `grows` is 1, or 0 if no layer keeps all tokens."""

    grows: float
    window: float
    window_tokens: float
    state: float

    def beside(self, tokens: float) -> float:
        """Return the part of a sequence's need that does not grow with every token: window and state."""
        return self.window * (tokens if tokens < self.window_tokens else self.window_tokens) + self.state

    def tokens(self, tokens: float) -> float:
        """Return the whole need of a sequence of `tokens`."""
        return self.grows * tokens + self.beside(tokens)

    def longest(self, cache: float) -> float:
        """Return the most tokens of a sequence that a KV cache holds."""
        full = self.beside(self.window_tokens)
        if cache >= self.grows * self.window_tokens + full:
            return cache - full if self.grows > 0.0 else math.inf
        return max(0.0, cache - self.state) / (self.grows + self.window)

    def scaled(self, cache: int, max_model_len: int | None, batched_tokens: int) -> int:
        """Convert a KV cache as vLLM reports it to tokens of this form.

        It stays as it is if `max_model_len` is unknown. vLLM counts the tokens of an iteration in addition to
        a window.
        """
        if max_model_len is None:
            return cache
        length = float(max_model_len)
        seen = min(length, self.window_tokens + batched_tokens)
        return max(1, round(cache * (self.grows * length + self.window * seen + self.state) / length))
