"""Bits of weights and of cached values under a `quantization_config`; `model_facts.py` sums their bytes.

Formats: fp8 with scales by block or channel, mxfp4 and nvfp4 with scales by group (OCP MX 1.0; 16 values at
NVIDIA), GPTQ and AWQ with scales and zeros by group, bitsandbytes, and the schemes of compressed-tensors,
ModelOpt and Quark. Modules that a file lists as ignored keep 2 bytes. Other methods are refused by name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from hetlb.errors import ConfigError
from hetlb.tools.models.expressions import Expression

#: Bits of a value of an unquantised module, whatever type the file names: vLLM casts float32.
PLAIN_BITS: Final = 16.0
#: Bits a value with the scale of its group: 8 per 32 (MX), 8 per 16 (NVIDIA).
_MXFP4_BITS, _NVFP4_BITS, _MXFP8_BITS = 4.25, 4.5, 8.25
_SCALE_BITS = 16
#: bitsandbytes: a 32-bit scale per 64 values; doubly quantised 8 bits, and 32 bits per 256 of them.
_NF4_BITS, _NF4_DOUBLE_BITS = 4.5, 4.127
#: Methods of experts alone.
_EXPERTS_ONLY: Final = ("mxfp4", "gpt_oss_mxfp4")

#: Bits of a module's value, by its full name and whether it is routed experts.
BitsOf = Callable[[str, bool], float]


@dataclass(frozen=True)
class Quantization:
    """Bits of weights and cache. `block`: (rows, columns); a GPU holds whole blocks.

    `computed_in`: format of the products of quantised weights: bf16 if the activations stay in it.
    """

    bits_of: BitsOf = lambda name, experts: PLAIN_BITS
    cache_bits: float = PLAIN_BITS
    block: tuple[int, int] = (1, 1)
    computed_in: str = "bf16"


def read_quantization(
    config: Mapping[str, Any] | None, expert_type: str | None = None, *, weighed: bool = False
) -> Quantization:
    """Return the scheme of a `quantization_config`. Raises `ConfigError` naming the key.

    With `weighed`, the checkpoint states the bytes of the weights. Then the method may be unknown, and only
    the cache is read from it.
    """
    if not config:
        return Quantization()
    if not isinstance(config, dict):
        raise ConfigError(f"quantization_config: expected a table, got {config!r}"[:200])
    method = _method(config)
    if method not in _READERS and weighed:
        return Quantization(cache_bits=_cache_bits(config), block=_block(config))
    if method not in _READERS:
        raise ConfigError(
            f"quantization_config.quant_method: expected one of {', '.join(sorted(_READERS))}, got {method!r}"
        )
    bits = _READERS[method](config)
    ignored = Patterns(config, config.get("quantization"))
    experts_only = method in _EXPERTS_ONLY
    expert_bits = {None: None, "fp4": _MXFP4_BITS, "fp8": 8.0}.get(expert_type, 0.0)
    if expert_bits == 0.0:
        raise ConfigError(f"expert_dtype: expected fp4 or fp8, got {expert_type!r}")

    def bits_of(name: str, experts: bool) -> float:
        # Embeddings stay; so does the output, unless a method covers it.
        if name.startswith("embed"):
            return PLAIN_BITS
        if name == "lm_head" and not config.get("lm_head"):
            return PLAIN_BITS
        if (experts_only and not experts) or ignored.match(name):
            return PLAIN_BITS
        return min(bits(name), expert_bits) if experts and expert_bits is not None else bits(name)

    return Quantization(bits_of, _cache_bits(config), _block(config), _computed_in(method, config))


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table that ModelOpt nests, or the table itself."""
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    inner = _inner(config)
    by_modelopt = (config.get("producer") or {}).get("name") == "modelopt" or inner.get("quant_algo")
    if by_modelopt and (not method or method.startswith("modelopt")):
        return "modelopt"
    if not method and config.get("config_groups"):
        return "compressed-tensors"
    return method


class Patterns:
    """Modules left as they are: by name, name of a part that holds them, glob, `re:` expression."""

    _KEYS: Final = (
        "ignore",
        "modules_to_not_convert",
        "exclude_modules",
        "ignored_layers",
        "exclude",
        "llm_int8_skip_modules",
    )

    def __init__(self, *tables: Mapping[str, Any] | None) -> None:
        listed = [
            pattern
            for table in tables
            if isinstance(table, dict)
            for key in self._KEYS
            for pattern in (table.get(key) or ())
        ]
        self._expressions = [_expression(each[3:]) for each in listed if str(each).startswith("re:")]
        self._plain = {_tail(str(each)) for each in listed if not str(each).startswith("re:")}
        self._globs = [
            re.compile(fnmatch.translate(each)) for each in sorted(self._plain) if "*" in each or "?" in each
        ]

    def match(self, name: str) -> bool:
        """Return True if a module, a part of it or a module around it is listed."""
        if any(e.match(f"{before}{name}") for e in self._expressions for before in ("model.", "")):
            return True
        for each in (name, *_members(name)):
            if any(g.match(each) or g.match(f"{each}.") for g in self._globs):
                return True
            parts = each.split(".")
            if any(".".join(parts[:n]) in self._plain for n in range(1, len(parts) + 1)):
                return True
            if self._plain & set(parts):
                return True
        return False


@lru_cache
def _expression(text: str) -> Expression:
    try:
        return Expression(text)
    except ValueError as error:
        shown = repr(text[:80])
        raise ConfigError(
            f"quantization_config.ignore: expected a plain expression, got {shown}: {error}"
        ) from error


def _tail(pattern: str) -> str:
    """Return a name from its `layers.` on. The part before that depends on the file."""
    at = pattern.rfind("layers.") if "layers." in pattern else -1
    return pattern[at:] if at >= 0 else pattern.removeprefix("model.").removeprefix("language_model.")


def _members(name: str) -> tuple[str, ...]:
    """Return names of modules in a group of modules, and of the group that engines fuse it into."""
    if name.endswith(".experts"):
        return (f"{name}.0.gate_proj", f"{name}.0.w1", f"{name}.0.up_proj", f"{name}.0")
    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        if name.rsplit(".", 1)[-1] in parts:
            return (f"{name.rsplit('.', 1)[0]}.{fused}",)
    return ()


# --- methods --------------------------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> Callable[[str], float]:
    block = config.get("weight_block_size")
    scale = 32.0 / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 else 0.0
    return lambda name: 8.0 + scale


def _mxfp4(config: Mapping[str, Any]) -> Callable[[str], float]:
    return lambda name: _MXFP4_BITS


def _grouped(config: Mapping[str, Any]) -> Callable[[str], float]:
    bits = config.get("bits", config.get("w_bit", config.get("weight_bits", 4)))
    group = config.get("group_size", config.get("q_group_size", 128))
    if bits not in (2, 3, 4, 8) or not isinstance(group, int):
        raise ConfigError(
            f"quantization_config.bits: expected 2, 3, 4 or 8 bits in groups, got {bits!r}, {group!r}"
        )
    each = bits + ((_SCALE_BITS + bits) / group if group > 0 else 0.0)
    special = config.get("dynamic") or config.get("extra_config")
    if special and any(not str(key).startswith("-:") for key in special):
        raise ConfigError(f"quantization_config.dynamic: expected no bits by module, got {special!r}"[:200])
    skipped = [_expression(str(key)[2:]) for key in special or ()]
    if skipped:
        return lambda name: PLAIN_BITS if any(e.match(f"model.{name}") for e in skipped) else each
    return lambda name: each


def _bitsandbytes(config: Mapping[str, Any]) -> Callable[[str], float]:
    if config.get("load_in_8bit"):
        return lambda name: 8.0
    return lambda name: _NF4_DOUBLE_BITS if config.get("bnb_4bit_use_double_quant") else _NF4_BITS


def _compressed(config: Mapping[str, Any]) -> Callable[[str], float]:
    groups = config.get("config_groups") or {}
    schemes = []
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name}"
        targets = group.get("targets") or ["Linear"]
        schemes.append((targets, _scheme_bits(group.get("weights"), where, config.get("format"))))
    if not schemes:
        raise ConfigError("quantization_config.config_groups: expected at least one group, got none")
    return lambda name: _bits_of_targets(name, schemes)


def _bits_of_targets(name: str, schemes: list[tuple[list[str], float]]) -> float:
    """Return the bits of the group that names a module, or of that for all linear modules."""
    usual = PLAIN_BITS
    for targets, bits in schemes:
        for target in targets:
            if target == "Linear":
                usual = bits
            elif target.startswith("re:"):
                expression = _expression(target[3:])
                names = (name, *_members(name))
                if any(expression.match(f"model.{each}") or expression.match(each) for each in names):
                    return bits
            elif Patterns({"ignore": [target]}).match(name):
                return bits
    return usual


def _scheme_bits(weights: Any, where: str, form: Any) -> float:
    if weights is None:
        return PLAIN_BITS
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 16:
        raise ConfigError(f"{where}.weights.num_bits: expected 1 to 16, got {bits!r}")
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy == "block" or weights.get("block_structure"):
        size = weights.get("block_structure") or [128, 128]
        return bits + 32.0 / (size[0] * size[1]) if isinstance(size, list) else float(bits)
    if isinstance(group, int) and group > 0:
        scale = 8 if kind == "float" else _SCALE_BITS
        return bits + scale / group + (bits / group if weights.get("symmetric") is False else 0.0)
    return float(bits)


_ALGORITHMS: Final = {
    "FP8": 8.0,
    "FP8_PER_CHANNEL_PER_TOKEN": 8.0,
    "FP8_PB_WO": 8.0,
    "NVFP4": _NVFP4_BITS,
    "NVFP4_AWQ": _NVFP4_BITS,
    "W4A16_NVFP4": _NVFP4_BITS,
    "W4A16_AWQ": 4.125,
    "W4A8_AWQ": 4.125,
    "MXFP8": _MXFP8_BITS,
    "MXFP4": _MXFP4_BITS,
    "W4A8_MXFP4_FP8": _MXFP4_BITS,
    "INT8_SQ": 8.0,
}


def _algorithm(name: Any, where: str) -> float:
    if str(name).upper() not in _ALGORITHMS:
        raise ConfigError(f"{where}: expected one of {', '.join(_ALGORITHMS)}, got {name!r}")
    return _ALGORITHMS[str(name).upper()]


def _modelopt(config: Mapping[str, Any]) -> Callable[[str], float]:
    inner = _inner(config)
    layers = inner.get("quantized_layers") or config.get("quantized_layers")
    if str(inner.get("quant_algo")).upper() != "MIXED_PRECISION":
        bits = _algorithm(inner.get("quant_algo"), "quantization_config.quant_algo")
        return lambda name: bits
    if not layers:
        if config.get("config_groups"):
            return _compressed(config)
        raise ConfigError(
            "quantization_config.quantized_layers: expected a table for MIXED_PRECISION, got none"
        )
    known = {
        _tail(module): _algorithm(table.get("quant_algo"), f"quantization_config.quantized_layers.{module}")
        for module, table in layers.items()
    }

    def bits_of(name: str) -> float:
        for each in (name, *_members(name)):
            parts = each.split(".")
            for n in range(len(parts), 0, -1):
                if (found := known.get(".".join(parts[:n]))) is not None:
                    return found
        return PLAIN_BITS

    return bits_of


def _quark(config: Mapping[str, Any]) -> Callable[[str], float]:
    usual = (config.get("global_quant_config") or {}).get("weight")
    if isinstance(usual, list):
        usual = usual[-1]
    kinds = {"fp8_e4m3": 8.0, "int8": 8.0, "fp4": _MXFP4_BITS, "int4": 4.125, "mxfp4": _MXFP4_BITS}
    kind = (usual or {}).get("dtype")
    if kind not in kinds or config.get("layer_quant_config"):
        raise ConfigError(
            f"quantization_config.global_quant_config.weight.dtype: expected one of "
            f"{', '.join(kinds)} for all layers, got {kind!r}"
        )
    return lambda name: kinds[kind]


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Callable[[str], float]]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "deepseek_v4_fp8": _fp8,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "gptq": _grouped,
    "gptq_marlin": _grouped,
    "awq": _grouped,
    "awq_marlin": _grouped,
    "auto-round": _grouped,
    "inc": _grouped,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "quark": _quark,
}


def _computed_in(method: str, config: Mapping[str, Any]) -> str:
    """Return the format of the products of quantised weights: `bf16`, `fp8` (int8 too) or `fp4`."""
    if method in ("fp8", "fbgemm_fp8", "deepseek_v4_fp8"):
        return "fp8"
    if method == "modelopt":
        name = str(_inner(config).get("quant_algo")).upper()
        layers = _inner(config).get("quantized_layers") or config.get("quantized_layers") or {}
        names = {name} | {str(each.get("quant_algo")).upper() for each in layers.values()}
        if any("4A16" in each or each == "FP8_PB_WO" for each in names):
            return "bf16"
        return "fp4" if any(each in ("NVFP4", "NVFP4_AWQ", "MXFP4") for each in names) else "fp8"
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        found = [each.get("input_activations") for each in groups if isinstance(each, dict)]
        bits = [int(each.get("num_bits") or 16) for each in found if isinstance(each, dict)]
        return {4: "fp4", 8: "fp8"}.get(min(bits, default=16), "bf16")
    if method == "quark":
        inputs = (config.get("global_quant_config") or {}).get("input_tensors")
        kind = str(inputs.get("dtype") if isinstance(inputs, dict) else None)
        return "fp4" if "fp4" in kind else "fp8" if kind in ("fp8_e4m3", "int8") else "bf16"
    return "bf16"


# --- cache ----------------------------------------------------------------------------------------------


def _cache_bits(config: Mapping[str, Any]) -> float:
    """Return the bits of a cached value: a file may ask for an 8-bit cache, weights alone do not."""
    inner = _inner(config)
    algorithm = config.get("kv_cache_quant_algo") or inner.get("kv_cache_quant_algo")
    if algorithm is not None:
        known = {"FP8": 8.0, "INT8": 8.0, "NVFP4": _NVFP4_BITS, "NONE": PLAIN_BITS}
        if str(algorithm).upper() not in known:
            raise ConfigError(
                f"quantization_config.kv_cache_quant_algo: expected FP8 or NVFP4, got {algorithm!r}"
            )
        return known[str(algorithm).upper()]
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return PLAIN_BITS
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else {"FP8": 8}.get(str(scheme).upper())
    if type(bits) is not int or not 4 <= bits <= 16:
        raise ConfigError(f"quantization_config.kv_cache_scheme.num_bits: expected 4 to 16, got {bits!r}")
    return float(bits)


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    size = config.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(each) is int for each in size):
        return size[0], size[1]
    group = config.get("group_size")
    return (1, group) if type(group) is int and group > 0 else (1, 1)
