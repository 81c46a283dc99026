"""Mistakes in the canaries of a fleet file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetlb.inputs.mistakes import one_of

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet import Fleet


def canary_mistakes(fleet: Fleet) -> Iterator[str]:
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
