"""A model's `config.json`, and what ModelOpt writes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetlb.config.yaml_file import read_object
from hetlb.errors import ConfigError
from hetlb.models.facts import ModelFacts, quantization_of, read_facts


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
