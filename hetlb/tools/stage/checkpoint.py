"""A model's folder as it is downloaded: config.json and safetensors files.

What loads is a model that `stage.torch_runner` computes exactly; anything else is one `ConfigError` line.
Only tensors of the wanted layers are read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hetlb.errors import ConfigError
from hetlb.files import content
from hetlb.inputs.mistakes import one_of
from hetlb.inputs.yaml_file import Positive, convert, read_object

_Size: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
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
        """Radians per position of each pair of a head of `size` values."""
        plain = [self.theta ** (-2.0 * i / size) for i in range(size // 2)]
        if self.kind == "linear":
            return [each / self.factor for each in plain]
        return [self._llama3(each) for each in plain] if self.kind == "llama3" else plain

    def _llama3(self, frequency: float) -> float:
        """Scaling of Llama 3.1 (its reference code, `apply_scaling`)."""
        length = 2.0 * math.pi / frequency
        if length < self.original_positions / self.high_freq_factor:
            return frequency
        if length > self.original_positions / self.low_freq_factor:
            return frequency / self.factor
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_positions / length - low) / (high - low)
        return (1.0 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-type model. `windows` holds the sliding window of each layer, None for all tokens."""

    layers: int
    hidden: int
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
        """Return the bytes of one token in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim * itemsize


class _Scaling(msgspec.Struct, kw_only=True):
    """`rope_parameters` as transformers 5 writes it, or `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: _Size | None = None


class _ConfigJson(msgspec.Struct, kw_only=True):
    """The keys of config.json that decide the computation; null is as if there were no key."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    num_hidden_layers: _Size
    hidden_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Positive | None = None
    max_position_embeddings: _Size | None = None
    rope_theta: Positive | None = None
    rope_parameters: _Scaling | None = None
    rope_scaling: _Scaling | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] | None = None
    layer_types: list[str] | None = None
    quantization_config: Any = None
    dtype: str | None = None
    torch_dtype: str | None = None


def load_config(path: Path) -> ModelConfig:
    """Read the config.json of a model, or the one in its folder. Raises `ConfigError`."""
    path = path if path.is_file() else path / "config.json"
    found = read_object(path)
    try:
        raw = convert({key: found[key] for key in _ConfigJson.__struct_fields__ if key in found}, _ConfigJson)
        if raw.quantization_config:
            raise ConfigError("quantization_config: expected none (weights in bf16, fp16 or fp32), got one")
        heads, family = raw.num_attention_heads, raw.model_type
        kv_heads = raw.num_key_value_heads or heads
        if heads % kv_heads:
            raise ConfigError(f"num_key_value_heads: expected a divisor of {heads}, got {kv_heads}")
        max_positions = raw.max_position_embeddings or 2048
        rope = _rope(raw, max_positions)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    bias = family == "qwen2" if raw.attention_bias is None else raw.attention_bias
    return ModelConfig(
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.head_dim or raw.hidden_size // heads,
        vocabulary=raw.vocab_size,
        norm_eps=raw.rms_norm_eps or 1e-6,
        rope=rope,
        max_positions=max_positions,
        tied=bool(raw.tie_word_embeddings),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=bool(raw.mlp_bias),
        qk_norm=family == "qwen3",
        windows=_windows(raw),
        dtype=raw.dtype or raw.torch_dtype or "float32",
        fingerprint=hashlib.sha256(content(path)).hexdigest()[:16],
    )


def _rope(raw: _ConfigJson, max_positions: int) -> Rope:
    """Return the rotary embedding. Raises `ConfigError`."""
    scaling = raw.rope_parameters or raw.rope_scaling or _Scaling()
    kind = scaling.rope_type or scaling.type or "default"
    if kind not in _ROPES:
        raise ConfigError(f"rope_scaling.rope_type: {one_of(kind, _ROPES)}")
    theta = scaling.rope_theta or raw.rope_theta or 10000.0
    if kind == "default":
        return Rope(theta)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.factor is None or (kind == "llama3" and (low is None or high is None)):
        raise ConfigError(f"rope_scaling: expected all factors of rope_type {kind}, but a key is missing")
    positions = scaling.original_max_position_embeddings or max_positions
    return Rope(theta, kind, scaling.factor, low or 1.0, high or 4.0, positions)


def _windows(raw: _ConfigJson) -> tuple[int | None, ...]:
    """Sliding window by layer. Qwen slides only with `use_sliding_window`, from `max_window_layers` on."""
    layers, window = raw.num_hidden_layers, raw.sliding_window
    if raw.model_type == "mistral":
        return (window,) * layers
    if raw.model_type == "llama" or not raw.use_sliding_window:
        return (None,) * layers
    kinds = raw.layer_types
    if kinds is not None and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = layers if raw.max_window_layers is None else raw.max_window_layers
    return tuple(window if layer >= full else None for layer in range(layers))


def layer_tensors(config: ModelConfig, layer: int) -> list[str]:
    """Return the names of one layer's tensors in the files."""
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
    """Return the names of all tensors that a stage with the layers [first, end) needs."""
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
