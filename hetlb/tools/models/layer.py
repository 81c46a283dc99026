"""Parts of a model: weights by module, and the KV cache or state of a layer.

Parameters are counted, caches are in values (not bytes); state is in bytes, as its type is the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from hetlb.tools.models.config_keys import ConfigKeys


class Scope(StrEnum):
    """The earlier tokens a layer attends to."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    LINEAR = "linear"
    STATE = "state"
    LATENT = "latent"
    COMPRESSED = "compressed"
    CROSS = "cross"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one module, named as in checkpoints. `matrix`: quantisation may cover it.

    `experts`: routed experts that the parameters are of; 0 if every token passes all of them. `copied`: each
    GPU of a tensor-parallel group holds and computes all of it.
    """

    name: str
    parameters: int
    matrix: bool = True
    experts: int = 0
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of attention heads, and the sizes of a key and of a value of one head.

    Tensor parallelism divides the heads. Without KV heads the cache is a latent.
    """

    queries: int
    keys: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Mixer:
    """A layer's attention, or the mixer in its place.

    `grows`: values kept for every token; `window`: values per token for the last `window_tokens`.
    `whole`: further (key, size) pairs that tensor parallelism must divide. Sparse attention sees
    `chosen_tokens` at most (0: all), chosen by an index of `index_flops` for each pair of tokens.
    `packed_grows`, `packed_window`: bytes of vLLM's own rows (fp8_ds_mla) in place of values; 0: none.
    """

    kind: Scope
    weights: tuple[Weights, ...] = ()
    grows: float = 0.0
    window_tokens: int = 0
    window: float = 0.0
    state_bytes: int = 0
    heads: Heads | None = None
    whole: tuple[tuple[str, int], ...] = ()
    chosen_tokens: int = 0
    index_flops: float = 0.0
    packed_grows: float = 0.0
    packed_window: float = 0.0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A layer's feed-forward part: dense sizes as (key, size), and experts.

    A token takes `chosen` experts.
    """

    weights: tuple[Weights, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    expert_size: tuple[str, int] | None = None
    experts: int = 0
    chosen: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Models with two attentions a layer have two of these."""

    mixer: Mixer
    feed_forward: FeedForward = field(default_factory=FeedForward)
    rest: tuple[Weights, ...] = ()

    @property
    def weights(self) -> tuple[Weights, ...]:
        return self.mixer.weights + self.feed_forward.weights + self.rest


def linear(
    name: str, rows: int, columns: int, bias: bool = False, copied: bool = False
) -> tuple[Weights, ...]:
    """Return a matrix, and its bias if it has one."""
    found = (Weights(name, rows * columns, copied=copied),)
    return (*found, Weights(f"{name}.bias", columns, matrix=False)) if bias else found


def plain(name: str, parameters: int) -> tuple[Weights, ...]:
    """Return parameters that are never quantised."""
    return (Weights(name, parameters, matrix=False),) if parameters else ()


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


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """FLOPs of attention in `layers` layers that are alike, for each pair of a query and a key.

    Example: a prompt of 4 tokens has 4 * 5 / 2 = 10 pairs if causal; a decode step at context 4 has 4.
    A pair costs two FLOPs for each number of the key and of the value: 2 * heads * (key + value).
    `pair_flops` is the cost in a prompt, `step_flops` in a decode step: with latent attention (MLA) a step
    multiplies the longer latent vectors. A query attends to at most `most_tokens` keys (a window, or the keys
    that an index chooses); 0: all. `index_flops` is the cost of the index, which reads every pair.
    """

    layers: int
    pair_flops: float
    step_flops: float
    most_tokens: int = 0
    index_flops: float = 0.0

    def of_prompt(self, tokens: float, gpus: int = 1) -> float:
        """Return the FLOPs of one prompt on each GPU of a group: its heads, and the whole index."""
        seen = causal_pairs(tokens, self.most_tokens)
        return self.layers * (self.pair_flops * seen / gpus + self.index_flops * causal_pairs(tokens))

    def of_step(self, context: float, gpus: int = 1) -> float:
        """Return the FLOPs of a decode step of one sequence with `context` tokens in the cache."""
        seen = min(context, self.most_tokens) if self.most_tokens else context
        return self.layers * (self.step_flops * seen / gpus + self.index_flops * context)


def causal_pairs(tokens: float, most_tokens: int = 0) -> float:
    """Return the query-key pairs of a prompt. A query sees at most `most_tokens` keys; 0: all before it."""
    if not most_tokens or tokens <= most_tokens:
        return tokens * (tokens + 1.0) / 2.0
    return most_tokens * (most_tokens + 1.0) / 2.0 + (tokens - most_tokens) * most_tokens


def attention_work(mixers: Iterable[Mixer]) -> tuple[AttentionWork, ...]:
    """Return the attention work of a model's layers, equal layers summed.

    Linear attention, states and convolutions compare no query with a key: such layers are left out.
    """
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
