"""Ways of resuming answers, as the fleet file states them."""

from __future__ import annotations

from collections.abc import Iterator

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import FleetFile, Resume


def ways_of(file: FleetFile) -> dict[tuple[str, str], Resume]:
    """Return the way of resuming answers by model and class ("" without one)."""
    found: dict[tuple[str, str], Resume] = {}
    for model in file.models:
        stated: Resume = file.proxy.resume if model.resume is None else model.resume
        found[model.name, ""] = stated
        for name, table in model.classes.items():
            found[model.name, name] = stated if table.resume is None else table.resume
    return found


def mistakes(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each `resume: true`: its type, a boolean, admits it."""
    stated: dict[str, Resume] = {"proxy.resume": fleet.file.proxy.resume}
    for m, model in enumerate(fleet.file.models):
        key = f"models[{m}]"
        stated |= {f"{key}.resume": model.resume or False}
        stated |= {
            f"{key}.classes.{name}.resume": each.resume or False for name, each in model.classes.items()
        }
    for where, how in stated.items():
        if how is True:
            yield f"{where}: expected ids or false, got true"
