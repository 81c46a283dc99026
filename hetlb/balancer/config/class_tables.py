"""Service classes as the fleet file states them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import ClassTable
from hetlb.balancer.core.objective import ServiceClass
from hetlb.inputs.mistakes import short


def service_classes(tables: Mapping[str, ClassTable]) -> dict[str, ServiceClass]:
    """Return the classes of a model by name, the default first."""
    return {name: _service_class(name, table) for name, table in tables.items()}


def _service_class(name: str, table: ClassTable) -> ServiceClass:
    targets_ms = (table.ttft_ms, table.tpot_ms, table.e2e_ms)
    ttft_s, tpot_s, e2e_s = (math.inf if target is None else target / 1e3 for target in targets_ms)
    return ServiceClass(
        name,
        ttft_s,
        tpot_s,
        e2e_s,
        attainment=table.attainment,
        background=table.background,
        first_token_weight=table.first_token_weight,
        refuse_hopeless=table.refuse_hopeless,
    )


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each name that is unfit for a header, and each class that contradicts itself."""
    for m, model in enumerate(fleet.file.models):
        yield from _class_mistakes(model.classes, f"models[{m}].classes")


def _class_mistakes(classes: Mapping[str, ClassTable], key: str) -> Iterator[str]:
    for name, table in classes.items():
        stated = any(ms is not None for ms in (table.ttft_ms, table.tpot_ms, table.e2e_ms))
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            yield f"{key}: expected names of letters, digits and . _ - (64 at most), got {short(name)}"
        if stated and table.background:
            yield f"{key}.{name}.background: expected either targets or background, got both"
        if stated and table.first_token_weight is not None:
            yield f"{key}.{name}.first_token_weight: expected either targets or a weight, got both"
        if table.refuse_hopeless and not stated:
            yield f"{key}.{name}.refuse_hopeless: expected a target beside it, got none"
