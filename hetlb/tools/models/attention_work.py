"""FLOPs of attention: pairs of a query and a key that a prompt or a decode step computes.

A pair costs two FLOPs for each value of the key, and two for each of the value: 2 * heads * (key + value). A
prompt of n tokens has n * (n + 1) / 2 pairs in a causal layer; a decode step at context c has c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hetlb.tools.models.layer import Mixer, Scope


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """FLOPs of `layers` layers alike, for each pair of a query and a key.

    `pair_flops` are of prompts, `step_flops` of decode steps: a latent is multiplied itself then. A query
    sees `most_tokens` keys at most (a window, or the keys that an index chooses); 0: all. `index_flops` are
    of each pair, seen or not.
    """

    layers: int
    pair_flops: float
    step_flops: float
    most_tokens: int = 0
    index_flops: float = 0.0

    def of_prompt(self, tokens: float) -> float:
        """Return the FLOPs of one prompt."""
        seen = causal_pairs(tokens, self.most_tokens)
        return self.layers * (self.pair_flops * seen + self.index_flops * causal_pairs(tokens))

    def of_step(self, context: float) -> float:
        """Return the FLOPs of a decode step of one sequence with `context` tokens in the cache."""
        seen = min(context, self.most_tokens) if self.most_tokens else context
        return self.layers * (self.step_flops * seen + self.index_flops * context)


def causal_pairs(tokens: float, most_tokens: int = 0) -> float:
    """Return the query-key pairs of a prompt. A query sees at most `most_tokens` keys; 0: all before it."""
    if not most_tokens or tokens <= most_tokens:
        return tokens * (tokens + 1.0) / 2.0
    return most_tokens * (most_tokens + 1.0) / 2.0 + (tokens - most_tokens) * most_tokens


def attention_work(mixers: Iterable[Mixer]) -> tuple[AttentionWork, ...]:
    """Return the work of a model's layers, equal ones together. States and convolutions have no pairs."""
    found: Counter[tuple[float, float, int, float]] = Counter()
    for mixer in mixers:
        heads = mixer.heads
        if heads is None or mixer.kind in (Scope.LINEAR, Scope.STATE, Scope.NONE):
            continue
        pair = 2.0 * heads.queries * (heads.key_size + heads.value_size)
        # A latent (no KV heads) serves as key and value of all heads.
        step = pair if heads.keys else 4.0 * heads.queries * (mixer.grows or mixer.window)
        if mixer.kind is Scope.COMPRESSED:
            # One latent for every `grows / size` tokens, beside a window.
            found[pair * mixer.grows / heads.key_size, pair * mixer.grows / heads.key_size, 0, 0.0] += 1
            step = pair
        found[pair, step, mixer.window_tokens or mixer.chosen_tokens, mixer.index_flops] += 1
    return tuple(
        AttentionWork(layers, pair, step, most, index) for (pair, step, most, index), layers in found.items()
    )
