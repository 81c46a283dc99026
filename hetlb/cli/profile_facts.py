"""`hetlb profile --facts FILE`: what a source does not know, by the keys of a profile and of a plan file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from hetlb.balancer.config.profile_file import EngineInfo, Hardware, HostTime
from hetlb.errors import ConfigError, InputError
from hetlb.inputs.yaml_file import load_yaml
from hetlb.tools.models.degrees import refused_degree
from hetlb.tools.models.model_file import model_info
from hetlb.tools.plan.common.composition import roofline_of
from hetlb.tools.plan.common.plan_tables import Model, PlanModelTable, RooflineTable, read_model
from hetlb.tools.profiler.sources import Measurements, assumed_launch

_Table = TypeVar("_Table", bound=msgspec.Struct)


class FactsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file as written. `host` is for points without one; `model`, `roofline` are as in a plan."""

    name: str | None = None
    licence: str | None = None
    hardware: Hardware | None = None
    model: PlanModelTable | None = None
    engine: EngineInfo = EngineInfo()
    host: HostTime | None = None
    roofline: RooflineTable | None = None


class Facts(msgspec.Struct, frozen=True):
    """Facts with the model of their `config.json`; `path` is None if no file was given."""

    path: Path | None = None
    file: FactsFile = FactsFile()
    model: Model | None = None

    @property
    def gpu(self) -> str | None:
        """Return the name of the GPU."""
        return None if self.file.hardware is None else self.file.hardware.gpu

    def completed(self, found: Measurements) -> Measurements:
        """Return the measurements with what is stated in the place of what the source knows.

        Raises `InputError` for facts of another source.
        """
        file, model = self.file, found.model
        if file.roofline is not None and found.source.kind != "roofline":
            raise InputError(f"{self.path}: roofline: expected --from roofline with it")
        if file.host is not None and found.host is not None:
            raise InputError(f"{self.path}: host: expected none, as these points hold the host's time")
        launch = found.launch
        if self.model is not None:
            named = self.model.name if model is None else model.name
            model = _over(model, model_info(self.model.known, named))
            if launch is None and self.model.facts is not None and found.host is None:
                launch = assumed_launch(self.model.facts, found.engine.tensor_parallel_size or 1)
        source = found.source
        if file.licence is not None:
            source = msgspec.structs.replace(source, licence=file.licence)
        hardware, engine = _over(found.hardware, file.hardware), _over(found.engine, file.engine)
        assert engine is not None
        return replace(found, source=source, hardware=hardware, model=model, engine=engine, launch=launch)

    def estimate(self, degree: int, gpu: str | None) -> Measurements:
        """Return the roofline's points at a degree. Raises `InputError` without the tables for it."""
        table = self.file.roofline
        if table is None or self.model is None or self.path is None:
            raise InputError("--facts: expected a file with `roofline:` and `model:` for --from roofline")
        shape = self.model.shape
        if why := "" if shape is None else refused_degree(shape, degree):
            raise InputError(f"--tp: expected a degree that vLLM takes, got {degree}: {why}")
        gpu = gpu or self.gpu
        return roofline_of(table, self.model, gpu, degree).measurements(gpu)


def read_facts_file(path: Path | None) -> Facts:
    """Read the file of `--facts`. Raises `ConfigError`."""
    if path is None:
        return Facts()
    file = load_yaml(path, FactsFile, ConfigError)
    needed = ("parameters", "kv_bytes_per_token") if file.roofline is not None else ()
    model = None if file.model is None else read_model(file.model, path, "model", needed)
    return Facts(path, file, model)


def _over(known: _Table | None, stated: _Table | None) -> _Table | None:
    """Return a table with stated values in place of known ones; either may be missing."""
    if known is None or stated is None:
        return stated if known is None else known
    values = {field.name: getattr(stated, field.name) for field in msgspec.structs.fields(stated)}
    usual = {field.name: field.default for field in msgspec.structs.fields(stated)}
    return msgspec.structs.replace(
        known, **{name: value for name, value in values.items() if value != usual[name]}
    )
