"""Weights of the encoders of images and sound that an engine loads beside a language model.

Example: `vision_config` of Qwen3-VL-2B has `depth` 24, `hidden_size` 1024 and `intermediate_size` 4096: 24
layers of 4 * 1024^2 + 2 * 1024 * 4096 weights, and a projection to the hidden size of the language model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from hetlb.errors import ConfigError

#: Names of the tables of encoders, and spellings of their sizes; the first that is there counts.
_TABLES: Final = re.compile(r"(vision|visual|vit|audio|speech|sound)\w*_config")
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": (
        "depth",
        "num_hidden_layers",
        "vt_num_hidden_layers",
        "num_layers",
        "layers",
        "encoder_layers",
    ),
    "hidden": ("embed_dim", "vt_hidden_size", "d_model", "hidden_size", "width"),
    "inner": ("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim"),
    "attended": ("qkv_hidden_size",),
    "patch": ("patch_size",),
    "image": ("image_size",),
    "channels": ("in_channels", "in_chans", "num_channels"),
    "frames": ("temporal_patch_size",),
    "places": ("num_position_embeddings", "position_embedding_size"),
    "merged": ("spatial_merge_size",),
    "out": ("out_hidden_size",),
}
#: Sizes up to this are believed.
_MOST: Final = 1 << 20


def encoder_parameters(raw: Mapping[str, Any], hidden_size: int) -> tuple[int, tuple[str, ...]]:
    """Return the parameters of all encoders of a `config.json`, and the tables whose sizes are not known.

    They end in the hidden state of the language model, of `hidden_size` values.
    """
    total, unknown = 0, []
    for name, table in _encoders(raw):
        found = _parameters(table, hidden_size)
        total += found or 0
        if found is None:
            unknown.append(name)
    return total, tuple(unknown)


def _encoders(raw: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    inner = raw.get("thinker_config")
    tables = {**raw, **(inner if isinstance(inner, dict) else {})}
    return [
        (name, each) for name, each in tables.items() if _TABLES.fullmatch(name) and isinstance(each, dict)
    ]


def _parameters(table: Mapping[str, Any], hidden_size: int) -> int | None:
    """Return the weights of one encoder and its projection; None if its layers are not stated."""
    size = {key: _size(table, names) for key, names in _SIZES.items()}
    layers, hidden = size["layers"], size["hidden"]
    if not layers or not hidden:
        return None
    ratio = table.get("mlp_ratio", 4)
    ratio = ratio if isinstance(ratio, int | float) and 0 < ratio < _MOST else 4
    inner = size["inner"] or round(ratio * hidden)
    # A gated feed-forward part has three matrices.
    gated = "silu" in str(table.get("hidden_act")) or str(table.get("model_type")).startswith("gemma4")
    layer = 4 * hidden * (size["attended"] or hidden) + (3 if gated else 2) * hidden * inner
    patch = (size["channels"] or 3) * size["patch"] ** 2 * (size["frames"] or 1) * hidden
    grid = (size["image"] // size["patch"]) ** 2 if size["patch"] else 0
    # Positions in two dimensions without a table of places are computed.
    places = size["places"] or (0 if "rope" in str(table.get("position_embedding_type")) else grid)
    # Qwen2-VL has the size of the language model in `hidden_size`, its own in `embed_dim`.
    out = size["out"] or hidden_size
    joined = hidden * _merged(table, size["merged"])
    projections = 1 + len(_list(table.get("deepstack_visual_indexes")))
    projection = joined * out if joined == hidden else joined * joined + joined * out
    return layers * layer + patch + places * hidden + projections * projection


def _merged(table: Mapping[str, Any], side: int) -> int:
    """Return the patches that become one token of the language model, if a projection merges them."""
    kernel = [each for each in _list(table.get("merge_kernel_size")) if type(each) is int and 0 < each < 64]
    return math.prod(kernel[:2]) if kernel else max(1, min(64, side)) ** 2


def _list(value: Any) -> list[Any]:
    return value[:64] if isinstance(value, list) else []


def _size(table: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return a size by the first of its names, 0 without one. Raises `ConfigError`."""
    for name in names:
        value = table.get(name)
        if value is None or (isinstance(value, list) and name == "image_size"):
            continue
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ConfigError(f"{name} of an encoder: expected a number up to {_MOST:,}, got {value!r:.60}")
        return value
    return 0
