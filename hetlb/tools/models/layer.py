"""Parts of a model: weights by module, and the KV cache or state of a layer.

Parameters are counted, caches are in values (not bytes); state is in bytes, as its type is the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


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

    `experts`: routed experts that the parameters are of; 0 if every token passes all of them.
    """

    name: str
    parameters: int
    matrix: bool = True
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads that tensor parallelism divides; key and value sizes of one head. No KV heads: a latent cache."""

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
    """A layer's feed-forward part: dense sizes as (key, size), and experts: a token takes `chosen`."""

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


def linear(name: str, rows: int, columns: int, bias: bool = False) -> tuple[Weights, ...]:
    """Return a matrix, and its bias if it has one."""
    found = (Weights(name, rows * columns),)
    return (*found, Weights(f"{name}.bias", columns, matrix=False)) if bias else found


def plain(name: str, parameters: int) -> tuple[Weights, ...]:
    """Return parameters that are never quantised."""
    return (Weights(name, parameters, matrix=False),) if parameters else ()
