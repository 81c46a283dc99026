"""Mistakes in the classes, canaries and KV events of a fleet file, which most fleets lack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetlb.errors import ConfigError
from hetlb.inputs.mistakes import one_of, short
from hetlb.inputs.urls import check_publisher

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet
    from hetlb.balancer.config.fleet_tables import FleetFile


def model_mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield the mistakes of models' classes, canaries and publishers of KV events."""
    yield from _class_mistakes(fleet.file)
    yield from _canary_mistakes(fleet)
    yield from _publisher_mistakes(fleet.file)


def _class_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each name unfit for a header, and each class with contradictory keys."""
    for m, model in enumerate(file.models):
        key = f"models[{m}].classes"
        for name, table in model.classes.items():
            stated = any(ms is not None for ms in (table.ttft_ms, table.tpot_ms, table.e2e_ms))
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
                yield f"{key}: expected names of letters, digits and . _ - (64 at most), got {short(name)}"
            if stated and table.background:
                yield f"{key}.{name}.background: expected either targets or background, got both"
            if stated and table.first_token_weight is not None:
                yield f"{key}.{name}.first_token_weight: expected either targets or a weight, got both"
            if table.refuse_hopeless and not stated:
                yield f"{key}.{name}.refuse_hopeless: expected a target beside it, got none"


def _canary_mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each canary that is no instance of its model and no other model."""
    file = fleet.file
    for m, model in enumerate(file.models):
        canary, key = model.canary, f"models[{m}].canary"
        if canary is None:
            continue
        if (canary.instance is None) == (canary.name is None):
            got = "none" if canary.name is None else "both"
            yield f"{key}: expected either `instance` or `name`, got {got}"
        elif canary.name is not None:
            others = sorted({each.name for each in file.models} - {model.name})
            if canary.name not in others:
                yield f"{key}.name: {one_of(canary.name, others)}"
        elif canary.instance is not None:
            at = f"{fleet.where}models[{m}].instances["
            own = [name for name, each in fleet.listed.items() if each.key.startswith(at)]
            if canary.instance not in own and file.discovery is None:
                yield f"{key}.instance: {one_of(canary.instance, own)}"
            if model.kv_transfer is not None:
                yield f"{key}.instance: expected none with kv_transfer: prefill and decode choose apart"


def _publisher_mistakes(file: FleetFile) -> Iterator[str]:
    """Yield a line for each malformed address of KV events."""
    for m, model in enumerate(file.models):
        for i, instance in enumerate(model.instances):
            key, publisher = f"models[{m}].instances[{i}].kv_events", instance.publisher
            if publisher is None:
                continue
            try:
                check_publisher(publisher.endpoint, key)
                if publisher.replay is not None:
                    check_publisher(publisher.replay, f"{key}.replay")
            except ConfigError as error:
                yield str(error)
