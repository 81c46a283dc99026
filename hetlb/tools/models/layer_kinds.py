"""Kinds of a model's layers, of the lists, patterns and rules that publishers write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetlb.errors import ConfigError
from hetlb.tools.models.attention import compress_ratios
from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.layer import Family, Kinds, Scope, only_full

#: Words of `layer_types` and their kind. Convolutions keep a state, too.
_WORDS: Final = {
    "full_attention": Scope.FULL,
    "global_attention": Scope.FULL,
    "attention": Scope.FULL,
    "sliding_attention": Scope.WINDOW,
    "local_attention": Scope.WINDOW,
    "chunked_attention": Scope.CHUNK,
    "linear_attention": Scope.LINEAR,
    "mamba": Scope.STATE,
    "conv": Scope.STATE,
    "short_conv": Scope.STATE,
    "moe": Scope.NONE,
    "mlp": Scope.NONE,
    "latent_attention": Scope.LATENT,
}
#: Letters of Nemotron-H's `hybrid_override_pattern`.
_LETTERS: Final = {"M": Scope.STATE, "*": Scope.FULL, "-": Scope.NONE, "E": Scope.NONE}


def listed(keys: ConfigKeys) -> list[Scope] | None:
    """Return the kinds in `layer_types`, None without it; kinds of draft layers stand behind the layers."""
    types = keys.texts("layer_types")
    if types is None:
        return None
    name = keys.name_of("layer_types")
    count = keys.whole("num_hidden_layers", len(types)) if keys.stated("num_hidden_layers") else len(types)
    if len(types) < count:
        raise ConfigError(f"{name}: expected {count} layers, got {len(types)}")
    for word in types:
        if word not in _WORDS:
            raise ConfigError(f"{name}: expected layers that hetlb understands, got {word!r}")
    return [_WORDS[word] for word in types[:count]]


def with_states(kinds: Kinds) -> Kinds:
    """Return a rule for models with Mamba as linear layers.

    In transformers both kinds are called linear attention.
    """

    def found(family: Family, keys: ConfigKeys) -> Sequence[Scope]:
        return [Scope.STATE if kind is Scope.LINEAR else kind for kind in kinds(family, keys)]

    return found


def window_everywhere(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return windows for all layers if there is a `sliding_window`, as vLLM does without a list.

    A window of all positions is none.
    """
    count, found, window = keys.whole("num_hidden_layers"), listed(keys), keys.count("sliding_window")
    positions = keys.value("max_position_embeddings")
    if found is not None:
        return found
    none = not window or (isinstance(positions, int) and window >= positions)
    return [Scope.FULL if none else Scope.WINDOW] * count


def full_or_listed(family: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return the kinds of the list, full attention without one."""
    return listed(keys) or only_full(family, keys)


def every(full_at: int, key: str = "") -> Kinds:
    """Return the rule that each `full_at`-th layer attends in full and the others to a window.

    A list of kinds in the file has priority.
    """

    def kinds(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
        found = listed(keys)
        pattern = keys.value(key, full_at) if key else full_at
        if found is not None:
            return found
        count = keys.whole("num_hidden_layers")
        if not keys.count("sliding_window"):
            return [Scope.FULL] * count
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return [Scope.FULL if pattern[i % len(pattern)] == "G" else Scope.WINDOW for i in range(count)]
        if not isinstance(pattern, int) or pattern < 1:
            raise ConfigError(f"{key}: expected a whole number from 1, got {pattern!r}")
        return [Scope.WINDOW if (i + 1) % pattern else Scope.FULL for i in range(count)]

    return kinds


def qwen_windows(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return windows from layer `max_window_layers` on, if `use_sliding_window` is set."""
    found, count = listed(keys), keys.whole("num_hidden_layers")
    window, first = keys.value("sliding_window"), keys.value("max_window_layers", 28)
    if not keys.flag("use_sliding_window"):
        window = None
    if found is not None:
        return found
    return [Scope.WINDOW if window and i >= first else Scope.FULL for i in range(count)]


def chunks(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return Llama 4's layers: every fourth attends in full, the others to their chunk."""
    found, count = listed(keys), keys.whole("num_hidden_layers")
    rotary = keys.wholes("no_rope_layers")
    step = keys.whole("no_rope_layer_interval", 4)
    if found is not None:
        return found
    if not keys.count("attention_chunk_size"):
        return [Scope.FULL] * count
    if not rotary:
        rotary = [(i + 1) % step for i in range(count)]
    if len(rotary) != count:
        raise ConfigError(f"no_rope_layers: expected {count} layers, got {len(rotary)}")
    return [Scope.CHUNK if each else Scope.FULL for each in rotary]


def linear_every(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return Qwen's hybrid layers: each `full_attention_interval`-th attends in full."""
    found, step = listed(keys), keys.whole("full_attention_interval", 4)
    if found is not None:
        return found
    count = keys.whole("num_hidden_layers")
    return [Scope.LINEAR if (i + 1) % step else Scope.FULL for i in range(count)]


def numbered_types(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return MiniMax's layers: 1 attends in full, 0 linearly."""
    value = keys.value("layer_types")
    if isinstance(value, list) and value and all(each in (0, 1) for each in value):
        return [Scope.FULL if each else Scope.LINEAR for each in value[: keys.whole("num_hidden_layers")]]
    found = listed(keys)
    if found is None:
        return [Scope.LINEAR if i % 2 else Scope.FULL for i in range(keys.whole("num_hidden_layers"))]
    return found


def all_full_numbers(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return full attention; a list of numbers must not say otherwise."""
    value, count = keys.value("layer_types"), keys.whole("num_hidden_layers")
    if value is not None and any(each not in (1, "full_attention") for each in value):
        raise ConfigError(f"{keys.name_of('layer_types')}: expected full attention alone, got {value[:5]!r}")
    return [Scope.FULL] * count


def mimo_pattern(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return MiMo-V2's layers: 1 in `hybrid_layer_pattern` is a window."""
    pattern, found = keys.wholes("hybrid_layer_pattern"), listed(keys)
    if pattern is None:
        return found or [Scope.FULL] * keys.whole("num_hidden_layers")
    if len(pattern) < keys.whole("num_hidden_layers"):
        raise ConfigError(
            f"hybrid_layer_pattern: expected {keys.whole('num_hidden_layers')} layers, got {len(pattern)}"
        )
    return [Scope.WINDOW if each else Scope.FULL for each in pattern[: keys.whole("num_hidden_layers")]]


def nemotron_pattern(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return Nemotron-H's layers, of its list or its pattern of letters."""
    found = listed(keys)
    pattern = keys.value("hybrid_override_pattern")
    if found is None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
            raise ConfigError(f"hybrid_override_pattern: expected letters of M * - E, got {pattern!r}"[:200])
        found = [_LETTERS[letter] for letter in pattern]
    count = keys.value("num_hidden_layers", len(found))
    if keys.stated("num_hidden_layers") and count != len(found):
        raise ConfigError(f"num_hidden_layers: expected {len(found)} as the list of layers, got {count}")
    return found


def attention_period(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return Jamba's layers: one of each `attn_layer_period` attends, the others are Mamba."""
    found = listed(keys)
    period, offset = keys.whole("attn_layer_period", 8), keys.count("attn_layer_offset", 4)
    if found is not None:
        return found
    return [
        Scope.FULL if i % period == offset else Scope.STATE for i in range(keys.whole("num_hidden_layers"))
    ]


def attention_indices(family: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return the layers in `attn_layer_indices` (or the list) as attention, the others as Mamba."""
    found = listed(keys)
    indices = keys.wholes("attn_layer_indices") or []
    if found is not None:
        return found
    return [Scope.FULL if i in indices else Scope.STATE for i in range(keys.whole("num_hidden_layers"))]


def all_state(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return a state for every layer."""
    return [Scope.STATE] * keys.whole("num_hidden_layers")


def all_latent(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return latent attention for every layer."""
    types, count = keys.value("layer_types"), keys.whole("num_hidden_layers")
    known = ("full_attention", "indexed_attention", "deepseek_sparse_attention", "latent_attention")
    if types is not None and any(each not in known for each in types):
        raise ConfigError(f"layer_types: expected full attention alone, got {types[:5]!r}")
    return [Scope.LATENT] * count


def kimi_layers(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return Kimi Linear's layers: numbered from 1 in two lists."""
    count, inner, found = (
        keys.whole("num_hidden_layers"),
        keys.inner("linear_attn_config"),
        keys.texts("layer_types"),
    )
    if inner is None:
        if found is None:
            return [Scope.LATENT if (i + 1) % 4 == 0 else Scope.LINEAR for i in range(count)]
        return [Scope.LINEAR if word == "linear_attention" else Scope.LATENT for word in found[:count]]
    full, linear = set(inner.wholes("full_attn_layers") or ()), set(inner.wholes("kda_layers") or ())
    if full & linear or full | linear != set(range(1, count + 1)):
        raise ConfigError(
            f"linear_attn_config: expected each of {count} layers in kda_layers or full_attn_layers once"
        )
    return [Scope.LATENT if i + 1 in full else Scope.LINEAR for i in range(count)]


def compressed_layers(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return DeepSeek-V4's layers: a ratio of 0 is a window alone. Ratios of draft layers are left out."""
    ratios, count = compress_ratios(keys), keys.whole("num_hidden_layers")
    if ratios is None or len(ratios) < count or any(ratio not in (0, 4, 128) for ratio in ratios):
        raise ConfigError(
            f"compress_ratios: expected 0, 4 or 128 for each of {count} layers, got {ratios!r}"[:200]
        )
    return [Scope.COMPRESSED if ratio else Scope.WINDOW for ratio in ratios[:count]]


def lfm_layers(_: Family, keys: ConfigKeys) -> Sequence[Scope]:
    """Return LFM2's layers: layers in `full_attn_idxs` (or the list) attend, the others convolve."""
    found, indices = listed(keys), keys.wholes("full_attn_idxs")
    if found is not None:
        return found
    if indices is None:
        raise ConfigError("layer_types: expected a list of layers, got none")
    return [Scope.FULL if i in indices else Scope.STATE for i in range(keys.whole("num_hidden_layers"))]
