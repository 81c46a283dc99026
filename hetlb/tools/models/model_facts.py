"""Facts of a model by its `config.json`: parameters, bytes of weights and cache, layers by kind, degrees.

The one place that planners, simulator and profiler ask. Draft layers (MTP) are left out of the weights: an
engine loads them only to speculate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hetlb.balancer.config.profile_file import kv_need
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.errors import ConfigError
from hetlb.tools.models.config_keys import ALIASES, ConfigKeys, class_defaults
from hetlb.tools.models.degrees import ModelShape, accepted
from hetlb.tools.models.encoders import encoder_parameters
from hetlb.tools.models.families import (
    FAMILIES,
    GENERATES,
    INNER_TABLES,
    OTHER_TASK,
    family_by_keys,
    model_type_of,
)
from hetlb.tools.models.feed_forward import feed_forward
from hetlb.tools.models.kv_groups import KvBytes, allocated
from hetlb.tools.models.layer import (
    AttentionWork,
    Family,
    Layer,
    Scope,
    Weights,
    attention_work,
    linear,
    plain,
)
from hetlb.tools.models.quantization import PLAIN_BITS, Quantization, read_quantization
from hetlb.tools.models.special import mixer_of
from hetlb.tools.models.weights_file import Checkpoint

#: Errors of values of a wrong kind, deep in a file.
_WRONG_VALUES: Final = (
    IndexError, TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError, OverflowError,
)  # fmt: skip
#: vLLM's cache of sparse attention by default (`--kv-cache-dtype auto` or `fp8`).
_PACKED: Final = "fp8_ds_mla"
#: Number of layers if a model does not state it.
_USUAL_LAYERS: Final = 32
#: Sizes that a file of one table always states.
_MAIN_KEYS: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelFacts:
    """All facts about a model. Sizes are in bytes; `kv_windows`: (tokens, bytes per token).

    Mixtures of experts: each token takes `chosen` of `experts` in every sparse layer. `expert_bytes` and
    `expert_parameters` are of all experts together.

    Parameters: `embedding_parameters` are of an input table, which is looked up and never read whole.
    `head_parameters` are of the output, computed for the last token of a prompt. `copied_parameters` are
    computed by each GPU of a tensor-parallel group. `encoder_parameters` are of encoders of images and sound,
    which text does not pass. `uncounted` are the tables of encoders without known sizes. A share
    `format_share` of the passed parameters is multiplied in `weight_format`, the others in bf16.

    Cache: `kv_heads` are pairs of KV heads (0 of a latent) and their share of a token's bytes. `set_aside` is
    the cache that an engine gives a sequence, None if it is as large as the need. `kv_cache_dtype`: vLLM's
    own format of rows.
    """

    name: str
    parameters: int
    active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: float
    kv_windows: tuple[tuple[int, float], ...] = ()
    state_bytes: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    shape: ModelShape | None = None
    layers: int = 0
    hidden_size: int = 0
    attention_heads: int = 0
    experts: int = 0
    chosen: float = 0.0
    expert_bytes: int = 0
    expert_parameters: int = 0
    embedding_parameters: int = 0
    kv_bytes_per_value: float = 2.0
    kv_heads: tuple[tuple[int, float], ...] = ()
    set_aside: KvBytes | None = None
    attention: tuple[AttentionWork, ...] = ()
    weight_format: str = "bf16"
    format_share: float = 0.0
    kv_cache_dtype: str = ""
    head_parameters: int = 0
    copied_parameters: int = 0
    encoder_parameters: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def needed(self) -> KvBytes:
        """Return the cache that a sequence fills."""
        return KvBytes(self.kv_bytes_per_token, self.kv_windows, self.state_bytes)

    @property
    def allocated(self) -> KvBytes:
        """Return the cache that an engine gives a sequence (see `kv_groups`)."""
        return self.set_aside or self.needed

    @property
    def expert_parallel(self) -> bool:
        """Return True if vLLM can divide whole experts over GPUs."""
        return self.experts > 0

    @property
    def whole_experts_sizes(self) -> list[int]:
        """Return the tensor-parallel degrees that vLLM takes with whole experts alone."""
        if self.shape is None or not self.expert_parallel:
            return []
        return sorted({*accepted(self.shape, expert_parallel=True)} - {*accepted(self.shape)})

    @property
    def kv_need(self) -> KvNeed | None:
        """Return the allocation of a sequence, in tokens of a KV cache; None if it equals its tokens."""
        given = self.allocated
        return kv_need(given.per_token, given.windows, given.state)

    @property
    def cached_token_bytes(self) -> float:
        """Return the bytes of a token in a KV cache: of layers that keep all tokens, or else of windows."""
        given = self.allocated
        return given.per_token or math.fsum(size for _, size in given.windows)

    @property
    def width(self) -> float:
        """Values of one token between layers: stated, or by parameters = 12 * layers * width^2."""
        return self.hidden_size or math.sqrt(self.parameters / (12.0 * (self.layers or _USUAL_LAYERS)))

    @property
    def passed_parameters(self) -> int:
        """Return the parameters that each token is multiplied with: active ones but the input table."""
        return self.active_parameters - self.embedding_parameters

    def replication(self, tensor_parallel_size: int) -> float:
        """Return the number of copies of a token's cache on the GPUs of a group.

        Every GPU keeps a whole latent, and at least one KV head.
        """
        t = tensor_parallel_size
        return (
            math.fsum(share * (max(1.0, t / heads) if heads else t) for heads, share in self.kv_heads) or 1.0
        )

    def with_weights(self, parameters: float, bytes_each: float | None) -> ModelFacts:
        """Return these facts for a stated number of parameters, and stated bytes of each."""
        grown = parameters / self.parameters
        size = grown if bytes_each is None else bytes_each * parameters / self.weight_bytes
        return replace(
            self,
            parameters=round(parameters),
            active_parameters=round(self.active_parameters * grown),
            weight_bytes=round(self.weight_bytes * size),
            expert_bytes=round(self.expert_bytes * size),
            expert_parameters=round(self.expert_parameters * grown),
        )

    def weighed(self, found: Checkpoint) -> ModelFacts:
        """Return these facts with the bytes of a checkpoint."""
        expert_bytes = found.expert_bytes
        if expert_bytes is None:
            expert_bytes = round(self.expert_bytes * found.size_bytes / max(1, self.weight_bytes))
        if found.parameters is None:
            return replace(self, weight_bytes=found.size_bytes, expert_bytes=expert_bytes)
        idle = round(found.expert_parameters * (1 - self.chosen / self.experts)) if self.experts else 0
        return replace(
            self,
            weight_bytes=found.size_bytes,
            expert_bytes=expert_bytes,
            parameters=found.parameters,
            active_parameters=found.parameters - idle - self.encoder_parameters,
            expert_parameters=found.expert_parameters,
        )

    def kv_bytes(self, tokens: float) -> float:
        """Return the bytes of cache that one sequence of `tokens` fills."""
        return self.needed.of(tokens)

    def prompt_attention_flops(self, tokens: float, gpus: int = 1) -> float:
        """Return the FLOPs of the attention of one prompt on each GPU of a group."""
        return math.fsum(each.of_prompt(tokens, gpus) for each in self.attention)

    def step_attention_flops(self, context: float, gpus: int = 1) -> float:
        """Return the FLOPs of the attention of one sequence in a decode step on each GPU of a group."""
        return math.fsum(each.of_step(context, gpus) for each in self.attention)

    @property
    def passed_expert_parameters(self) -> float:
        """Return the parameters of experts that each token is multiplied with."""
        return self.expert_parameters * self.chosen / self.experts if self.experts else 0.0

    def touched_experts(self, tokens: float) -> float:
        """Return the share of the experts that a batch of tokens reaches.

        Some experts are chosen more often than others: the popularity of an expert is exponentially
        distributed. With equal popularity 32 tokens of Qwen3.6-35B-A3B would reach 64 % of the experts;
        steps on B300 show 48 to 52 %.
        """
        if not self.experts or tokens <= 0:
            return 0.0
        chosen = min(self.chosen, self.experts) * tokens
        return chosen / (max(0.0, self.experts - self.chosen) + chosen)

    def json(self) -> dict[str, Any]:
        """Return the document of `hetlb model --json`."""
        return {
            "name": self.name,
            "parameters": self.parameters or None,
            "active_parameters": self.active_parameters or None,
            "encoder_parameters": self.encoder_parameters,
            "encoders_not_counted": list(self.uncounted),
            "weight_bytes": self.weight_bytes or None,
            "kv_bytes_per_token": _number(self.kv_bytes_per_token),
            "kv_windows": [
                {"tokens": tokens, "bytes_per_token": _number(size)} for tokens, size in self.kv_windows
            ],
            "state_bytes": self.state_bytes,
            "kv_allocated": {
                "bytes_per_token": _number(self.allocated.per_token),
                "windows": [
                    {"tokens": tokens, "bytes_per_token": _number(size)}
                    for tokens, size in self.allocated.windows
                ],
                "state_bytes": _number(self.allocated.state),
                "engine": "vllm",
                "kv_cache_dtype": self.kv_cache_dtype or None,
            },
            "layers": dict(self.kinds),
            "tensor_parallel_sizes": None if self.shape is None else accepted(self.shape),
            "expert_parallel": None if self.shape is None else self.expert_parallel,
            "whole_experts_sizes": self.whole_experts_sizes,
        }


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def stated_facts(
    name: str,
    parameters: float,
    kv_bytes_per_token: float,
    bytes_per_parameter: float = 2.0,
    layers: int = 0,
    hidden_size: int = 0,
    attention_heads: int = 0,
) -> ModelFacts:
    """Return the facts of a dense model with full attention in all layers; 0 means unknown."""
    count = round(parameters)
    found = ModelFacts(
        name=name,
        parameters=count,
        active_parameters=count,
        weight_bytes=round(parameters * bytes_per_parameter),
        kv_bytes_per_token=kv_bytes_per_token,
        kinds={"full": layers} if layers else {},
        layers=layers,
        hidden_size=hidden_size,
        attention_heads=attention_heads,
    )
    # The heads are as wide together as the hidden state.
    pair_flops = 4.0 * found.width
    return replace(found, attention=(AttentionWork(layers or _USUAL_LAYERS, pair_flops, pair_flops),))


def read_facts(raw: Mapping[str, Any], name: str, *, weighed: bool = False) -> ModelFacts:
    """Return the facts of a `config.json`. Raises `ConfigError` naming an unknown key.

    If the weights are `weighed` by the checkpoint, a quantisation may be unknown.
    """
    config, architecture = _language_model(raw)
    model_type, family = _family(raw, config, architecture)
    keys = ConfigKeys(config, _defaults(model_type, inner=config is not raw))
    try:
        layers = _layers(family, keys)
        rest = _embeddings(family, keys, raw)
        expert_type = keys.value("expert_dtype")
        keys.expect("is_encoder_decoder", (False,), False)
        keys.refuse_unread()
    except _WRONG_VALUES as error:
        raise ConfigError(f"model_type {model_type}: expected other values, {error}"[:200]) from error
    try:
        quantization = read_quantization(quantization_of(raw), expert_type, weighed=weighed)
    except _WRONG_VALUES as error:
        raise ConfigError(f"quantization_config: expected other values, {error}"[:200]) from error
    found = _facts(name, keys, model_type, layers, rest, quantization)
    encoders, uncounted = encoder_parameters(raw, found.hidden_size)
    return replace(
        found,
        parameters=found.parameters + encoders,
        weight_bytes=found.weight_bytes + round(encoders * PLAIN_BITS / 8),
        encoder_parameters=encoders,
        uncounted=uncounted,
    )


def _defaults(model_type: str, inner: bool) -> Mapping[str, Any]:
    """Return the default of a missing key. A file of one table states its main sizes; inner ones may not."""
    found = class_defaults().get(model_type, {})
    if inner:
        return found
    main = {name for key in _MAIN_KEYS for name in ALIASES[key]}
    return {key: value for key, value in found.items() if key not in main}


def _language_model(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return the table of the language model and its architecture, if the file names one."""
    architecture = _architecture(raw)
    inner: Mapping[str, Any] = raw
    for key in INNER_TABLES:
        table = inner.get(key)
        if isinstance(table, dict):
            inner = table
    if inner is raw:
        return raw, architecture
    if architecture is not None and OTHER_TASK.search(architecture):
        raise ConfigError(f"architectures: expected a model that generates text, got {architecture!r}")
    return inner, _architecture(inner)


def _architecture(table: Mapping[str, Any]) -> str | None:
    """Return the first architecture of a table, None without one."""
    named = table.get("architectures")
    if not named:
        return None
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ConfigError(f"architectures: expected a list of names, got {named!r}"[:200])
    return named[0]


def _family(
    raw: Mapping[str, Any], config: Mapping[str, Any], architecture: str | None
) -> tuple[str, Family]:
    """Return the model type and the family: by the architecture, by the model type, else by the keys."""
    model_type = str(config.get("model_type"))
    listed = None if architecture is None else model_type_of(architecture)
    if listed is not None and model_type not in FAMILIES:
        return listed, FAMILIES[listed]
    if listed is not None and FAMILIES[listed] is not FAMILIES[model_type]:
        return model_type, FAMILIES[listed]
    named = architecture or _architecture(raw)
    generates = named is not None and GENERATES.fullmatch(named) is not None
    if (
        listed is None
        and named is not None
        and not generates
        and (architecture is not None or model_type not in FAMILIES)
    ):
        raise ConfigError(f"architectures: expected a model that generates text, got {named!r}")
    if model_type in FAMILIES:
        return model_type, FAMILIES[model_type]
    if not generates:
        got = "none" if "model_type" not in config else repr(model_type)
        raise ConfigError(f"model_type: expected a model that hetlb understands, got {got}")
    return model_type, family_by_keys(config)


def quantization_of(raw: Mapping[str, Any]) -> Any:
    inner: Any = raw
    found = raw.get("quantization_config") or raw.get("compression_config")
    for key in INNER_TABLES:
        if isinstance(inner.get(key), dict):
            inner = inner[key]
            found = found or inner.get("quantization_config") or inner.get("compression_config")
    return found


def _layers(family: Family, keys: ConfigKeys) -> Sequence[Layer]:
    if family.layers is not None:
        return family.layers(family, keys)
    norm = family.norms * keys.whole("hidden_size") * (2 if family.norm_bias else 1)
    mixer, feed = family.mixer or mixer_of, family.feed or feed_forward
    return [
        Layer(mixer(family, keys, i, kind), feed(family, keys, i), plain("norms", norm))
        for i, kind in enumerate(family.kinds(family, keys))
    ]


def _embeddings(family: Family, keys: ConfigKeys, raw: Mapping[str, Any]) -> tuple[Weights, ...]:
    vocab, hidden = keys.whole("vocab_size"), keys.whole("hidden_size")
    tied = keys.flag("tie_word_embeddings")
    if not keys.stated("tie_word_embeddings") and isinstance(raw.get("tie_word_embeddings"), bool):
        tied = raw["tie_word_embeddings"]
    norm = hidden * (2 if family.norm_bias else 1) if family.norms else 0
    found = plain("embed_tokens", vocab * hidden) + plain("norm", norm)
    if not tied:
        found += linear("lm_head", hidden, vocab, family.has(family.head_bias, keys))
    return found + (family.beside(keys) if family.beside is not None else ())


def _facts(
    name: str,
    keys: ConfigKeys,
    model_type: str,
    layers: Sequence[Layer],
    rest: Sequence[Weights],
    quantization: Quantization,
) -> ModelFacts:
    cache = quantization.cache_bits / 8
    windows: dict[int, float] = {}
    for layer in layers:
        if layer.mixer.window:
            tokens = layer.mixer.window_tokens
            windows[tokens] = windows.get(tokens, 0.0) + layer.mixer.window
    modules = [(f"layers.{i}.{w.name}", w) for i, layer in enumerate(layers) for w in layer.weights]
    modules += [(w.name, w) for w in rest]
    size, quantized = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for full_name, weights in modules:
        bits = quantization.bits_of(full_name, weights.experts > 0) if weights.matrix else PLAIN_BITS
        size[weights.experts > 0] += weights.parameters * bits / 8
        quantized[weights.experts > 0] += weights.parameters if bits < PLAIN_BITS else 0
    sparse = [layer.feed_forward for layer in layers if layer.feed_forward.experts]
    experts = sum(w.parameters for _, w in modules if w.experts)
    idle = math.fsum(
        w.parameters * (1 - layer.feed_forward.chosen / layer.feed_forward.experts)
        for layer in layers
        for w in layer.weights
        if w.experts
    )
    parameters = sum(w.parameters for _, w in modules)
    tied = not any(w.name == "lm_head" for w in rest)
    looked_up = 0 if tied else keys.whole("vocab_size") * keys.whole("hidden_size")
    in_format = quantized[False] + quantized[True] * ((experts - idle) / experts if experts else 0.0)
    return ModelFacts(
        name=name,
        parameters=parameters,
        active_parameters=round(parameters - idle),
        weight_bytes=round(size[True] + size[False]),
        kv_bytes_per_token=math.fsum(layer.mixer.grows for layer in layers) * cache,
        kv_windows=tuple((tokens, values * cache) for tokens, values in sorted(windows.items())),
        state_bytes=sum(layer.mixer.state_bytes for layer in layers),
        kinds=_counts(layers),
        shape=_shape(keys, model_type, layers, quantization),
        layers=len(layers),
        hidden_size=keys.whole("hidden_size"),
        attention_heads=keys.value("num_attention_heads", 0),
        experts=max((part.experts for part in sparse), default=0),
        chosen=max((part.chosen for part in sparse), default=0.0),
        expert_bytes=round(size[True]),
        expert_parameters=experts,
        embedding_parameters=looked_up,
        kv_bytes_per_value=cache,
        kv_heads=_kv_heads(layers),
        set_aside=allocated([layer.mixer for layer in layers], cache),
        attention=attention_work(layer.mixer for layer in layers),
        weight_format=quantization.computed_in,
        format_share=min(1.0, in_format / max(1.0, parameters - idle - looked_up)),
        kv_cache_dtype=_PACKED if any(layer.mixer.packed_grows for layer in layers) else "",
        head_parameters=keys.whole("vocab_size") * keys.whole("hidden_size"),
        copied_parameters=sum(w.parameters for _, w in modules if w.copied),
    )


def _kv_heads(layers: Sequence[Layer]) -> tuple[tuple[int, float], ...]:
    """Return numbers of KV heads, each with its share of the cached values of a token."""
    kept: dict[int, float] = {}
    for layer in layers:
        heads = layer.mixer.heads.keys if layer.mixer.heads is not None else 0
        kept[heads] = kept.get(heads, 0.0) + layer.mixer.grows + layer.mixer.window
    dense = math.fsum(kept.values())
    return tuple((heads, values / dense) for heads, values in kept.items() if values)


def _counts(layers: Sequence[Layer]) -> dict[str, int]:
    found = Counter(layer.mixer.kind for layer in layers)
    return {str(kind): found[kind] for kind in Scope if found[kind]}


def _shape(
    keys: ConfigKeys, model_type: str, layers: Sequence[Layer], quantization: Quantization
) -> ModelShape:
    """Return the sizes that tensor parallelism divides, each once."""
    heads = {layer.mixer.heads: None for layer in layers if layer.mixer.heads is not None}
    whole = {pair: None for layer in layers for pair in layer.mixer.whole}
    sizes = {pair: None for layer in layers for pair in layer.feed_forward.sizes}
    experts = {layer.feed_forward.expert_size: None for layer in layers if layer.feed_forward.expert_size}
    return ModelShape(
        len(layers),
        tuple(heads),
        keys.whole("vocab_size"),
        tuple(sizes),
        tuple(pair for pair in experts if pair is not None),
        tuple(whole),
        quantization.block,
        loose=model_type.startswith("mimo_v2"),
    )
