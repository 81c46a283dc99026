"""Tables that the files of all planners share: the model, peak figures of a GPU, links.

Whatever is wrong comes out as one `ConfigError` line that names file, key, value and what was expected.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hetlb.config.cluster import model_kv_bytes
from hetlb.config.quantities import Quantity, read_bytes, read_parameters, read_rate
from hetlb.config.yaml_file import NonNegative, Positive, PositiveInt, Share, read_object
from hetlb.errors import ConfigError
from hetlb.plan.model_shape import text_config

#: Bytes/s between GPUs of one machine and between machines where the file does not say: PCIe 4 x16, 5 Gbit/s.
INSIDE, BETWEEN = 25e9, 0.625e9
#: Keys of a `config.json` for what a table does not state.
_THEIRS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "attention_heads": "num_attention_heads",
}


class PlanModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model. `config` is its `config.json`, which gives layers, hidden size, heads and the KV size."""

    name: str
    parameters: Quantity | None = None
    bytes_per_parameter: Positive = 2.0
    kv_bytes_per_token: Quantity | None = None
    kv_bytes_per_value: Positive = 2.0
    config: str | None = None
    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    attention_heads: PositiveInt | None = None


class RooflineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Peak figures of one GPU, and the shares of them that are reached: an estimate, never measured."""

    flops: Positive
    bandwidth_bytes_per_s: Positive
    flops_efficiency: Share = 0.5
    bandwidth_efficiency: Share = 0.7
    overhead_ms: NonNegative = 2.0


class LinkRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes/s between GPUs inside a machine, by kind of GPU (or `default`), and between machines."""

    inside: dict[str, Positive] = {}
    between: Positive = BETWEEN
    latency_s: NonNegative = 2e-4

    def rate_inside(self, gpu: str, usual: float = INSIDE) -> float:
        """Bytes/s inside a machine of these GPUs."""
        return self.inside.get(gpu, self.inside.get("default", usual))

    def check(self, path: Path) -> None:
        """Raise `ConfigError` for a rate that lost its unit."""
        for gpu, rate in self.inside.items():
            read_rate(rate, f"{path}: links.inside.{gpu}")
        read_rate(self.between, f"{path}: links.between")


class LinkTable(LinkRates, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Link rates with sites, or a matrix of all.

    A matrix has a row per machine (`split`: or per GPU), in file order; its diagonal is the rate inside.
    """

    between_sites: Positive | None = None
    matrix: tuple[tuple[NonNegative, ...], ...] | None = None

    @property
    def apart(self) -> float:
        """Bytes/s between machines of two sites."""
        return self.between if self.between_sites is None else self.between_sites

    def check(self, path: Path) -> None:
        """Raise `ConfigError` for a rate that lost its unit."""
        super().check(path)
        read_rate(self.apart, f"{path}: links.between_sites")
        for i, row in enumerate(self.matrix or ()):
            for j, rate in enumerate(row):
                read_rate(rate, f"{path}: links.matrix[{i}][{j}]")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model with what planning needs of it; sizes in bytes, None where nothing was stated."""

    name: str
    weight_bytes: float | None
    parameters: float | None
    bytes_per_parameter: float
    kv_bytes_per_token: int | None
    layers: int | None
    hidden_size: int | None
    attention_heads: int | None = None


def read_model(table: PlanModelTable, path: Path, where: str, needed: tuple[str, ...] = ()) -> Model:
    """Resolve the model of a table at `where`; `needed` keys must be known. Raises `ConfigError`."""
    parameters = table.parameters
    if parameters is not None:
        parameters = read_parameters(parameters, f"{path}: {where}.parameters")
    kv_bytes = table.kv_bytes_per_token
    if kv_bytes is not None:
        kv_bytes = read_bytes(kv_bytes, f"{path}: {where}.kv_bytes_per_token")
    if table.config is not None:
        kv_bytes = model_kv_bytes(path, f"{where}.", kv_bytes, table.config, table.kv_bytes_per_value)
    raw = {} if table.config is None else text_config(read_object(path.parent / table.config))
    shape = {
        key: getattr(table, key) if getattr(table, key) is not None else raw.get(theirs)
        for key, theirs in _THEIRS.items()
    }
    model = Model(
        name=table.name,
        weight_bytes=None if parameters is None else parameters * table.bytes_per_parameter,
        parameters=parameters,
        bytes_per_parameter=table.bytes_per_parameter,
        kv_bytes_per_token=kv_bytes,
        **{key: value if type(value) is int and value > 0 else None for key, value in shape.items()},
    )
    for key in needed:
        if getattr(model, key) is None:
            raise ConfigError(f"{path}: {where}.{key}: expected a value or {where}.config, got neither")
    return model
