"""Keys of a `config.json` by one name each, with the defaults of transformers' configuration classes.

Publishers spell one size in several ways (`num_hidden_layers`, `n_layer`). A key that no part of hetlb read
and that may bear on sizes is refused, so that a model with an unknown mechanism is never computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from hetlb.errors import ConfigError

#: Spellings of a key, by its usual name.
ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "num_attention_groups",
        "multi_query_group_num",
        "kv_n_heads",
    ),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "block_ff_dim"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "top_k_experts",
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "num_shared_experts": (
        "num_shared_experts",
        "n_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "shared_intermediate_size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "shared_intermediate_size",
    ),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "layer_types": ("layer_types", "layers_block_type", "attn_type_list"),
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "mamba_groups": ("n_groups", "mamba_n_groups"),
    "mamba_state": ("ssm_state_size", "mamba_d_state", "state_size"),
    "mamba_conv": ("conv_kernel", "mamba_d_conv"),
    "mamba_expand": ("expand", "mamba_expand"),
    "mamba_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "state_dtype": ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
    "moe_latent_size": ("moe_latent_size", "routed_expert_hidden_size"),
    "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
}
#: Most layers, and most of any other size: larger ones are mistakes.
MOST_LAYERS: Final = 4096
#: Largest size of anything else: larger ones are mistakes.
MOST_SIZE: Final = 1 << 32
#: Words of keys that may change sizes.
_BEARING: Final = frozenset(
    re.findall(
        r"\w+",
        """
        attention attn kv key value keys values head heads layer layers window windows expert experts
        moe mamba ssm conv conv1d convolution linear state compress compressed compression latent lora
        rank ranks share shared chunk chunked cross index indexer indices sparse sparsity block blocks
        memory local global period offset pattern interval every freq frequency group groups hidden
        intermediate inner ffn ff mlp dim dims size sizes width depth quant quantization quantized bits
        num n mtp recurrent loop loops vocab ratio ratios rate rates multi query cache topk bias pruned
        hash engram altup laurel tie tied embed embedding embeddings positions
        """,
    )
)
#: Sizes of parts that a model may not have in any layer.
_ALWAYS_KNOWN: Final = frozenset(
    name
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts_per_tok",
    )
    for name in ALIASES[key]
) | {"attention_bias", "mlp_bias"}
_WORDS: Final = re.compile(r"[A-Za-z0-9]+")
#: Keys of tokens and of generation.
_TOKENS: Final = re.compile(r"_token(_?ids?|_index|s_ids?)?$|^(bos|eos|pad)_")
_OFF: Final = (None, False, 0, "", "none", "None")


@cache
def inert_keys() -> frozenset[str]:
    """Return keys with names like sizes that decide neither weights nor cache."""
    return frozenset(
        resources.files("hetlb.tools.models").joinpath("inert_keys.txt").read_text(encoding="utf-8").split()
    )


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the default of transformers' classes for a key that a file leaves out, by `model_type`."""
    text = resources.files("hetlb.tools.models").joinpath("defaults.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found


class ConfigKeys:
    """Keys of one part of a `config.json`; notes which were read. Raises `ConfigError` naming a key."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config, self._defaults = config, defaults
        self._read: set[str] = set()

    def stated(self, key: str) -> bool:
        """Return True if the file has the key under any of its names, and not null."""
        return any(self._config.get(name) is not None for name in ALIASES.get(key, (key,)))

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; null or left out: the class's default, then `default`."""
        names = ALIASES.get(key, (key,))
        self._read.update(names)
        found = [name for name in names if self._config.get(name) is not None]
        for other in found[1:]:
            if self._config[other] != self._config[found[0]]:
                raise ConfigError(
                    f"{other}: expected {self._config[found[0]]!r} as {found[0]}, got {self._config[other]!r}"
                )
        if found:
            return self._config[found[0]]
        if not any(name in self._config for name in names):  # null says that there is none
            for name in names:
                if self._defaults.get(name) is not None:
                    return self._defaults[name]
        return default

    def note(self, *keys: str) -> None:
        """Mark keys as understood that decide nothing here."""
        for key in keys:
            self._read.update(ALIASES.get(key, (key,)))

    def name_of(self, key: str) -> str:
        """Return the name under which the file has the key."""
        names = ALIASES.get(key, (key,))
        return next((name for name in names if name in self._config), key)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1; without `default` there must be one."""
        value = self.value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{self.name_of(key)}: expected a whole number from 1, got {value!r}"[:200])
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Return a whole number from 0."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.name_of(key)}: expected a whole number from 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the truth value of a key."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name_of(key)}: expected true or false, got {value!r}")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of words, None without one."""
        value = self.value(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise ConfigError(f"{self.name_of(key)}: expected a list of words, got {value!r}"[:200])
        return value

    def wholes(self, key: str) -> list[int] | None:
        """Return a list of whole numbers, None without one; text like "4,5,6" is one too."""
        value = self.value(key)
        if isinstance(value, str):
            value = [int(part) if part.strip().isdigit() else part for part in value.split(",")]
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(v) in (int, bool) for v in value):
            raise ConfigError(f"{self.name_of(key)}: expected a list of whole numbers, got {value!r}"[:200])
        return [int(v) for v in value]

    def at(self, key: str, layer: int, default: int | None = None) -> int:
        """Return the value of a key in a layer, a whole number.

        The file states one number for all layers, or one for each.
        """
        value = self.value(key, default)
        if not isinstance(value, list):
            return self.whole(key, default)
        if not value or (len(value) > 1 and layer >= len(value)):
            raise ConfigError(f"{self.name_of(key)}: expected a value per layer, got {len(value)}")
        each = value[layer] if len(value) > 1 else value[0]
        if type(each) is not int or each < 0:
            raise ConfigError(f"{self.name_of(key)}: expected whole numbers from 0, got {each!r}")
        return each

    def inner(self, key: str) -> ConfigKeys | None:
        """Return the keys of a table inside, None without one."""
        value = self.value(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{key}: expected a table, got {value!r}"[:200])
        return None if value is None else ConfigKeys(value, {})

    def expect(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Return a value out of `allowed`."""
        value = self.value(key, default)
        if value not in allowed:
            raise ConfigError(f"{self.name_of(key)}: expected one of {list(allowed)!r}, got {value!r}"[:200])
        return value

    def refuse_unread(self) -> None:
        """Raise `ConfigError` for a key that may bear on sizes and that nothing read."""
        for key, value in self._config.items():
            if key in self._read or key in inert_keys() or key in _ALWAYS_KNOWN or _TOKENS.search(key):
                continue
            if (
                value in _OFF
                or value in ([], {})
                or _BEARING.isdisjoint(_WORDS.findall(key.replace("_", " ")))
            ):
                continue
            raise ConfigError(f"{key}: expected a key that hetlb understands, got {value!r}"[:200])
