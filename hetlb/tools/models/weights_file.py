"""Weights of a model by its checkpoint: the bytes of each tensor, as the headers of safetensors state them.

Example: in `model.safetensors` stand eight bytes of a length, then as many bytes of JSON,
`{"lm_head.weight": {"dtype": "BF16", "shape": [128256, 4096], "data_offsets": [0, 1050673152]}}`. The tensors
behind are not read. Without the files, the sum in `model.safetensors.index.json` counts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hetlb.errors import ConfigError
from hetlb.files import read_bytes, reader

_INDEX: Final = "model.safetensors.index.json"
_WHOLE: Final = "model.safetensors"
#: Largest header of a file, as safetensors has it; most files of a checkpoint, and dimensions of a tensor.
_MAX_HEADER_BYTES: Final = 100_000_000
_MAX_FILES: Final = 10_000
_MAX_DIMENSIONS: Final = 16
_EXPERTS: Final = re.compile(r"\.experts\.")
_LAYER: Final = re.compile(r"\blayers\.(\d{1,9})\.")
_DRAFT: Final = re.compile(r"\bmtp\b")
#: Types of weights that are not quantised, with the bytes of a value.
_PLAIN: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_HELD_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Sizes of the weights that an engine loads; None: unknown. Parameters are known if none is quantised."""

    size_bytes: int
    expert_bytes: int | None = None
    parameters: int | None = None
    expert_parameters: int = 0


def has_checkpoint(folder: Path) -> bool:
    """Return True if a folder has weights or their index."""
    return (folder / _INDEX).is_file() or (folder / _WHOLE).is_file()


def read_checkpoint(folder: Path, layers: int, tied: bool) -> Checkpoint | None:
    """Return the weights beside a `config.json`, None without any. Raises `ConfigError`.

    Draft layers (`mtp`, or a number from `layers` on) are left out, as is an output that is `tied`.
    """
    index, names = folder / _INDEX, []
    if index.is_file():
        document = _object(_decoded(index, read_bytes(index, ConfigError)), f"{index}")
        weights = _object(document.get("weight_map"), f"{index}: weight_map")
        names = sorted({str(each) for each in weights.values()})
        if any(Path(name).name != name for name in names) or len(names) > _MAX_FILES:
            raise ConfigError(
                f"{index}: weight_map: expected at most {_MAX_FILES:,} names of files beside it"
            )
        if not all((folder / name).is_file() for name in names):
            total = _object(document.get("metadata", {}), f"{index}: metadata").get("total_size")
            drafts = any(_is_draft(name, layers) for name in weights)
            return Checkpoint(total) if type(total) is int and total > 0 and not drafts else None
    else:
        names = [_WHOLE]
    tensors = [
        each
        for name in names
        for each in _tensors(folder / name)
        if not (_is_draft(each[0], layers) or (tied and each[0] == "lm_head.weight"))
    ]
    return _summed(tensors) if tensors else None


def _is_draft(name: str, layers: int) -> bool:
    found = _LAYER.search(name)
    return _DRAFT.search(name) is not None or (found is not None and 0 < layers <= int(found[1]))


def _summed(tensors: list[tuple[str, str, int, int]]) -> Checkpoint:
    """Return the sums over tensors. If all weights have 32 bits, 16 count: so engines load them."""
    types = {kind for _, kind, _, _ in tensors}
    wide = types <= {"F32", "F64"}
    sizes = {True: 0, False: 0}
    counts = {True: 0, False: 0}
    for name, _, count, size in tensors:
        expert = _EXPERTS.search(name) is not None
        sizes[expert] += count * _HELD_BYTES if wide else size
        counts[expert] += count
    plain = types <= _PLAIN.keys()
    return Checkpoint(
        sizes[True] + sizes[False],
        sizes[True],
        counts[True] + counts[False] if plain else None,
        counts[True] if plain else 0,
    )


def _tensors(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, type, number of values and bytes of each tensor of a file. Raises `ConfigError`."""
    try:
        with reader(path) as file:
            most = os.fstat(file.fileno()).st_size - 8
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(most, _MAX_HEADER_BYTES):
                raise ConfigError(f"{path}: expected a header of safetensors, got {length:,} bytes of it")
            header = _object(_decoded(path, file.read(length)), f"{path}")
    except OSError as caught:
        raise ConfigError(f"{path}: expected a readable file: {caught.strerror}") from caught
    for name, each in header.items():
        if name == "__metadata__":
            continue
        tensor = _object(each, f"{path}: {name[:80]!r}")
        shape: Any = tensor.get("shape")
        offsets: Any = tensor.get("data_offsets")
        if not (_sizes(shape, _MAX_DIMENSIONS, 8 * most) and _sizes(offsets, 2, most)) or len(offsets) != 2:
            raise ConfigError(f"{path}: {name[:80]!r}: expected shape and data_offsets, got {each!r:.80}")
        yield name, str(tensor.get("dtype")), math.prod(shape), max(0, offsets[1] - offsets[0])


def _sizes(value: Any, most: int, largest: int) -> bool:
    """Return True for a list of at most `most` sizes up to `largest`."""
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(each) is int and 0 <= each <= largest for each in value)


def _decoded(path: Path, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as caught:
        raise ConfigError(f"{path}: expected JSON: {caught}") from caught


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, got {value!r:.80}")
    return value
