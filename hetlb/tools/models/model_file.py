"""A model's `config.json`, and the weights and the file of ModelOpt beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetlb.balancer.config.profile_file import KvWindow, ModelInfo
from hetlb.errors import ConfigError
from hetlb.inputs.yaml_file import read_object
from hetlb.tools.models.model_facts import ModelFacts, quantization_of, read_facts
from hetlb.tools.models.weights_file import has_checkpoint, read_checkpoint


def load_facts(path: Path, name: str | None = None) -> ModelFacts:
    """Read a `config.json` or the folder with it, and the weights and ModelOpt's file beside it.

    Raises `ConfigError` naming file and key.
    """
    path = path / "config.json" if path.is_dir() else path
    raw = read_object(path)
    beside = path.parent / "hf_quant_config.json"
    if beside.is_file() and not quantization_of(raw):
        raw = {**raw, "quantization_config": read_object(beside)}
    if path.name == "config.json" and has_checkpoint(path.parent):
        facts = _facts(raw, path, name, weighed=True)
        found = read_checkpoint(path.parent, facts.layers, tied=facts.embedding_parameters == 0)
        if found is not None:
            return facts.weighed(found)
    return _facts(raw, path, name)


def _facts(raw: Mapping[str, Any], path: Path, name: str | None, *, weighed: bool = False) -> ModelFacts:
    try:
        return read_facts(raw, name or _name(raw, path), weighed=weighed)
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
