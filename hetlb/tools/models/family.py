"""Differences of architectures from Llama that no configuration states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.layer import FeedForward, Layer, Mixer, Scope, Weights

#: A fixed trait, or the config key that states it.
Trait: TypeAlias = bool | str
Kinds: TypeAlias = Callable[["Family", ConfigKeys], Sequence[Scope]]
MixerOf: TypeAlias = Callable[["Family", ConfigKeys, int, Scope], Mixer]
FeedForwardOf: TypeAlias = Callable[["Family", ConfigKeys, int], FeedForward]


def only_full(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return full attention for every layer."""
    return [Scope.FULL] * keys.whole("num_hidden_layers")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. `mixer`, `feed` None: by the layer's kind; dense or sparse feed-forward parts."""

    kinds: Kinds = only_full
    mixer: MixerOf | None = None
    feed: FeedForwardOf | None = None
    #: Whole layers at once, for architectures with layers of other parts.
    layers: Callable[[Family, ConfigKeys], Sequence[Layer]] | None = None
    #: Parameters beside layers, embeddings and output.
    beside: Callable[[ConfigKeys], tuple[Weights, ...]] | None = None
    gated: bool = True
    #: Of queries, keys and values; of the attention's output; of the feed-forward part; or of all three.
    biases: Trait | tuple[Trait, Trait, Trait] = ("attention_bias", "attention_bias", "mlp_bias")
    #: Norms of queries and keys: none, per "head", or over "all" heads; or the key that switches "head" on.
    qk_norm: str = ""
    #: Vectors of the hidden size in a layer's norms; LayerNorm has a bias for each.
    norms: int = 2
    norm_bias: bool = False
    #: Values that a query head's gate has: "" none, "value" one per value, "head" one per head.
    out_gate: str = ""
    router_bias: Trait = False
    shared_gate: bool = False
    head_bias: Trait = False
    feed_name: str = "mlp"

    def bias(self, part: int, keys: ConfigKeys) -> bool:
        """Return True if a part has biases: 0 queries, keys and values; 1 the output; 2 the feed-forward."""
        return self.has(self.biases[part] if isinstance(self.biases, tuple) else self.biases, keys)

    def has(self, trait: Trait, keys: ConfigKeys) -> bool:
        """Return the value of a trait."""
        return trait if isinstance(trait, bool) else keys.flag(trait, False)
