"""Plans in the fleet file, as `hetlb rent` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import PlannedTypeTable
from hetlb.balancer.core.policies.base import PlannedType
from hetlb.inputs.mistakes import one_of


def planned_types(tables: Sequence[PlannedTypeTable], model: str) -> tuple[PlannedType, ...]:
    """Return the types of a plan; one that names no model is of `model`."""
    return tuple(
        PlannedType(
            each.model or model,
            each.input_tokens,
            each.output_tokens,
            each.share,
            tuple(each.instances.items()),
        )
        for each in tables
    )


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each name of an instance that the fleet lacks."""
    policy, known = fleet.file.policy, fleet.listed
    stated = {"worth": policy.worth}
    stated |= {f"types[{t}].instances": each.instances for t, each in enumerate(policy.types)}
    for key, instances in stated.items():
        for name in instances:
            if name not in known:
                yield f"policy.{key}: {one_of(name, known)}"
