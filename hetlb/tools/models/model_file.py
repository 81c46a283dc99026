"""A model's `config.json`, and the file that ModelOpt writes beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetlb.balancer.config.profile_file import KvWindow, ModelInfo
from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import read_object
from hetlb.tools.models.model_facts import ModelFacts, quantization_of, read_facts


def load_facts(path: Path, name: str | None = None) -> ModelFacts:
    """Read a `config.json`, and ModelOpt's file beside it. Raises `ConfigError` naming file and key."""
    raw = read_object(path)
    beside = path.parent / "hf_quant_config.json"
    if beside.is_file() and not quantization_of(raw):
        raw = {**raw, "quantization_config": read_object(beside)}
    try:
        return read_facts(raw, name or _name(raw, path))
    except ConfigError as caught:
        raise ConfigError(f"{path}: {caught}") from caught


def _name(raw: Mapping[str, Any], path: Path) -> str:
    stated = raw.get("_name_or_path")
    if isinstance(stated, str) and stated:
        return stated
    return path.parent.resolve().name if path.name == "config.json" else path.stem


def model_info(facts: ModelFacts, name: str | None = None) -> ModelInfo:
    """Return the `model` of a profile, with the cache that engines give a sequence."""
    given = facts.allocated
    return ModelInfo(
        name=name or facts.name,
        kv_bytes_per_token=math.ceil(given.per_token) or None,
        kv_windows=tuple(KvWindow(tokens=w, bytes_per_token=size) for w, size in given.windows) or None,
        state_bytes=math.ceil(given.state) or None,
    )
