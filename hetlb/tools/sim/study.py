"""The study that `hetlb simulate` makes of a fleet file, and its runs as they stand in the JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.profile_file import Profile, profiles_of
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health
from hetlb.errors import ConfigError, ProfileError
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import Ran, Study, StudyCell
from hetlb.tools.workload.arrivals import Load
from hetlb.tools.workload.rows import classes_of


def make_study(
    fleet: Fleet,
    load: Load,
    *,
    predictor: str = "empirical",
    rule: IterationRule = IterationRule.TOKEN,
    model: str | None = None,
    queue_limit: int | None = None,
    prefix_cache: bool = False,
) -> Study:
    """Build the study. Raises `InputError` if the fleet lacks figures for a simulation."""
    models = list(dict.fromkeys(spec.model for spec in fleet.instances))
    if not models:
        raise ConfigError(f"{fleet.path}: models: expected at least one instance to simulate, got none")
    name = models[0] if model is None else model
    if name not in models:
        raise ConfigError(f"--model: expected one of {', '.join(models)}, got {name!r}")
    setup = SchedulerSetup(
        specs=tuple(spec for spec in fleet.instances if spec.model == name),
        policy=fleet.file.policy.name,
        params=fleet.policy_params,
        limits=QueueLimits(max_requests=queue_limit, max_bytes=None, timeout_s=None),
        predictor=predictor,
        seed=0,
        lengths=LengthDistribution(row.output_tokens for row in load.rows),
        initial_health=Health.UP,
    )
    engines = {spec.name: _engine(fleet, spec.name, prefix_cache) for spec in setup.specs}
    classes = classes_of(fleet, name, load.rows)
    # Texts and further columns of a trace may be large, and processes get a copy of all this.
    rows = [replace(row, text=None, extra={}) for row in load.rows]
    return Study(setup, engines, name, rule, replace(load, rows=rows), classes)


def engine_of(profile: Profile, where: str = "", **more: Any) -> EngineSpec:
    """Return the engine of a profile; `more` are fields of its own. Raises `ProfileError` of its gaps."""
    try:
        limits, ranks = EngineLimits.from_capacity(profile.usual_capacity), profile.engine.data_parallel_size
        return EngineSpec(profile.latency, limits, ranks=ranks or 1, **more)
    except ValueError as error:
        raise ProfileError(f"{where}{profile.name}: {error}") from error


def _engine(fleet: Fleet, name: str, prefix_cache: bool) -> EngineSpec:
    """Return the simulated engine of an instance. Raises `InputError` naming its profile's missing figure."""
    profile = profiles_of(fleet).get(name)
    if profile is None:
        raise ConfigError(f"{fleet.path}: {name}: profile: expected a latency profile to simulate, got none")
    return engine_of(
        profile,
        f"{fleet.path}: {name}: ",
        prefix_cache=prefix_cache,
        max_model_len=profile.capacity.max_model_len,
        adapter_load_s=fleet.file.policy.adapter_load_s,
    )


def watch(cells: Sequence[StudyCell]) -> list[StudyCell]:
    """Return the cells, with `watched` set on cells that a picture shows in detail.

    They are the first seed's at the highest rate: latencies of requests that came all at once say little
    beyond the throughput, so `inf` is watched only if there is no other.
    """
    rates = list(dict.fromkeys(cell.rate for cell in cells))
    finite = [rate for rate in rates if isinstance(rate, float) and math.isfinite(rate)]
    rate = max(finite) if finite else rates[0]
    return [
        StudyCell(cell.policy, cell.rate, cell.seed, watched=True)
        if cell.rate == rate and cell.seed == cells[0].seed
        else cell
        for cell in cells
    ]


def run_document(study: Study, ran: Ran, request_rate: str) -> dict[str, Any]:
    """Return one run's JSON document."""
    return {
        "policy": ran.cell.policy,
        "seed": ran.cell.seed,
        **ran.summary,
        "request_rate": request_rate,
        "predictor": study.setup.predictor,
        "iteration": study.rule.value,
        "bound": ran.bound,
        "steady_bound": ran.steady_bound,
        "split": ran.split,
    }


def by_policy_and_rate(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return runs that differ in their seed alone."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in runs:
        groups.setdefault((each["policy"], each["request_rate"]), []).append(each)
    return groups


def median_run(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge runs of several seeds: the median of each figure, `seeds` instead of `seed`."""
    figures = [{key: each[key] for key in each if key not in ("policy", "seed")} for each in runs]
    found: dict[str, Any] = _median(figures)
    return {"policy": runs[0]["policy"], "seeds": [each["seed"] for each in runs], **found}


def _median(values: Sequence[Any]) -> Any:
    """Return the median of figures; for tables and lists, of each part; for anything else, the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([each[key] for each in values]) for key in first}
    if isinstance(first, list):
        return [_median(parts) for parts in zip(*values, strict=True)]
    return median(values) if isinstance(first, int | float) else first
