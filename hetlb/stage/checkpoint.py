"""A model's folder as it is downloaded: config.json and safetensors files.

What loads is a model that `stage.model` computes exactly; anything else is one `ConfigError` line.
Only tensors of the wanted layers are read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetlb.config.yaml_file import read_object
from hetlb.errors import ConfigError

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
_ROPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, and scaling `default`, `linear` or `llama3`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, size: int) -> list[float]:
        """Radians per position of each pair of a head of `size` values (Llama 3.1's scaling: its
        reference code, `apply_scaling`).
        """
        plain = [self.theta ** (-2.0 * i / size) for i in range(size // 2)]
        if self.kind == "linear":
            return [each / self.factor for each in plain]
        if self.kind == "llama3":
            return [self._llama3(each) for each in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        length = 2.0 * math.pi / frequency
        if length < self.original_positions / self.high_freq_factor:
            return frequency
        if length > self.original_positions / self.low_freq_factor:
            return frequency / self.factor
        smooth = (self.original_positions / length - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1.0 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-type model. `windows` holds the sliding window of each layer, None for all tokens."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str
    fingerprint: str

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim * itemsize


class _Keys:
    """Typed look-ups in config.json."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise self.error(key, "a whole number from 1", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def error(self, key: str, expected: str, value: object) -> ConfigError:
        return ConfigError(f"{self.path}: {key}: expected {expected}, got {str(value)[:60]!r}")


def load_config(folder: Path) -> ModelConfig:
    """Read config.json of a model. Raises `ConfigError`."""
    path = folder / "config.json"
    keys = _Keys(path, read_object(path))
    raw = keys.raw
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise keys.error("model_type", f"one of {', '.join(FAMILIES)}", family)
    if raw.get("quantization_config"):
        raise keys.error("quantization_config", "none (weights in bf16, fp16 or fp32)", "one")
    if raw.get("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", "silu", raw["hidden_act"])
    layers, hidden, heads = (
        keys.whole("num_hidden_layers"),
        keys.whole("hidden_size"),
        keys.whole("num_attention_heads"),
    )
    kv_heads = keys.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of {heads}", kv_heads)
    max_positions = keys.whole("max_position_embeddings", 2048)
    bias = keys.flag("attention_bias", family == "qwen2")
    return ModelConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=keys.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.whole("head_dim", hidden // heads),
        vocabulary=keys.whole("vocab_size"),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, max_positions),
        max_positions=max_positions,
        tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=keys.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(keys, family, layers),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        fingerprint=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    )


def _rope(keys: _Keys, max_positions: int) -> Rope:
    """`rope_parameters` as transformers 5 writes it, else `rope_theta` and `rope_scaling`."""
    scaling = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise keys.error("rope_scaling", "a mapping", scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPES:
        raise keys.error("rope_scaling.rope_type", f"one of {', '.join(_ROPES)}", kind)
    inner = _Keys(keys.path, scaling)
    theta = inner.number("rope_theta", keys.number("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, inner.number("factor"))
    return Rope(
        theta,
        kind,
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.whole("original_max_position_embeddings", max_positions),
    )


def _windows(keys: _Keys, family: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window by layer. Qwen slides only with `use_sliding_window`, from `max_window_layers` on."""
    if keys.raw.get("sliding_window") is None or family == "llama":
        return (None,) * layers
    window = keys.whole("sliding_window")
    if family == "mistral":
        return (window,) * layers
    if not keys.flag("use_sliding_window", False):
        return (None,) * layers
    kinds = keys.raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = keys.raw.get("max_window_layers")
    full = layers if full is None else full
    if type(full) is not int or full < 0:
        raise keys.error("max_window_layers", "a whole number from 0", full)
    return tuple(window if layer >= full else None for layer in range(layers))


def layer_tensors(config: ModelConfig, layer: int) -> list[str]:
    """Names of one layer's tensors in the files."""
    at = f"model.layers.{layer}."
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{each}_proj.weight" for each in "qkvo"]
    names += [f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
    if config.qkv_bias:
        names += [f"self_attn.{each}_proj.bias" for each in "qkv"]
    if config.output_bias:
        names.append("self_attn.o_proj.bias")
    if config.mlp_bias:
        names += [f"mlp.{each}_proj.bias" for each in ("gate", "up", "down")]
    if config.qk_norm:
        names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return [at + name for name in names]


EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"


def stage_tensors(config: ModelConfig, first: int, end: int) -> list[str]:
    """Names of all tensors that a stage with the layers [first, end) needs."""
    names = [name for layer in range(first, end) for name in layer_tensors(config, layer)]
    if first == 0 or (end == config.layers and config.tied):
        names.append(EMBEDDING)
    if end == config.layers:
        names += [FINAL_NORM] if config.tied else [FINAL_NORM, HEAD]
    return names


def tensor_files(folder: Path, names: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """Safetensors files with the names to read from each. Raises `ConfigError`."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors", names
        return
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise ConfigError(f"{index}: weight_map: expected a mapping from tensors to files")
    by_file: dict[str, list[str]] = {}
    for name in names:
        file = files.get(name)
        if not isinstance(file, str) or "/" in file:
            raise ConfigError(f"{index}: weight_map.{name}: expected a file name, got {str(file)[:60]!r}")
        by_file.setdefault(file, []).append(name)
    for file, wanted in by_file.items():
        yield folder / file, wanted
