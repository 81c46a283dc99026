"""Layouts of a cluster by a trace: the rows to estimate on, every machine by itself, then all together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetlb.config.cluster import Cluster
from hetlb.config.plan_tables import Machine
from hetlb.config.profile_file import Profile
from hetlb.core.latency import IterationRule, LatencyModel
from hetlb.core.types import Capacity
from hetlb.errors import ConfigError, ProfileError
from hetlb.plan.layouts import (
    Evaluated,
    FleetChoice,
    LayoutFleet,
    LayoutInstance,
    LayoutTarget,
    Part,
    choose_together,
    instances_of,
)
from hetlb.plan.throughput import Mix
from hetlb.plan.tp_search import Estimator, MachinePlan, Rows, static_estimate
from hetlb.sim.engine_limits import DEFAULT_MAX_NUM_SEQS, EngineLimits
from hetlb.sim.engine_model import EngineModel
from hetlb.sim.engine_sequence import EngineSequence
from hetlb.workload.traces import read_trace

#: The most stages of a pipeline.
MOST_STAGES = 8
#: The part of a trace's rows that must be within the cluster's limits.
_LEAST_PART = 0.5


@dataclass(frozen=True)
class RowSample:
    """Rows of a trace that are estimated on; `within` of its `total` rows are within the cluster's limits."""

    rows: list[tuple[int, int]]
    within: int
    total: int


@dataclass(frozen=True)
class LayoutsFound:
    """All that a search found."""

    cluster: Cluster
    sample: RowSample
    estimate: str
    target: LayoutTarget
    plans: list[MachinePlan]
    instances: dict[tuple[object, ...], dict[Part, LayoutInstance]]
    evaluated: dict[str, list[Evaluated]]
    choice: FleetChoice


def sample_rows(cluster: Cluster, trace: Path, count: int) -> RowSample:
    """Rows spread evenly over the trace, in its order, of those within the cluster's limits."""
    limits = cluster.limits
    rows = [(row.input_tokens, max(1, row.output_tokens)) for row in read_trace(trace)]
    within = [(i, o) for i, o in rows if i <= limits.max_input_tokens and o <= limits.max_output_tokens]
    if not within or len(within) < _LEAST_PART * len(rows):
        wanted, got = ("some row", "none") if not within else ("at least half of the rows", len(within))
        raise ConfigError(
            f"{cluster.path}: limits: expected {wanted} of {trace} within {limits.max_input_tokens} input "
            f"and {limits.max_output_tokens} output tokens, got {got} of {len(rows)}"
        )
    chosen = within
    if len(within) > count:
        chosen = [within[index * len(within) // count] for index in range(count)]
    return RowSample(chosen, len(within), len(rows))


class Throughputs:
    """Tokens/s (input and output) of one instance on these rows, each kind of instance estimated once.

    `kind`: "simulate" (the engine model) or "static" (the paper's algorithm 1).
    """

    def __init__(self, rows: Rows, kind: str) -> None:
        self.kind = kind
        self._rows = rows
        self._known: dict[tuple[LatencyModel, Capacity], float] = {}

    def of(self, profile: Profile, kv_cache_tokens: int) -> float:
        """Tokens/s of one instance of this profile. Raises `ProfileError` where it is no engine's."""
        engine = profile.engine
        capacity = Capacity(
            kv_cache_tokens=kv_cache_tokens,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
        )
        key = (profile.latency, capacity)
        if key not in self._known:
            if self.kind == "simulate":
                self._known[key] = simulated_estimate(profile.name, profile.latency, capacity, self._rows)
            else:
                seqs = engine.max_num_seqs or DEFAULT_MAX_NUM_SEQS
                self._known[key] = static_estimate(profile.latency, self._rows, kv_cache_tokens, seqs)
        return self._known[key]


def simulated_estimate(name: str, latency: LatencyModel, capacity: Capacity, rows: Rows) -> float:
    """Tokens/s (input and output) of one engine with all rows waiting at the start.

    Raises `ProfileError`, which begins with the `name` of its profile, where the capacity is no engine's.
    """
    try:
        limits = EngineLimits.from_capacity(capacity)
    except ValueError as error:
        raise ProfileError(f"{name}: {error}") from error
    engine = EngineModel(latency, limits, IterationRule.TOKEN)
    tokens, seconds = 0, 0.0
    for input_tokens, output_tokens in rows:
        if engine.limits.fits(input_tokens, output_tokens):
            engine.submit(EngineSequence(input_tokens, output_tokens))
            tokens += input_tokens + output_tokens
    while (run := engine.begin_run()) is not None:
        seconds += run.duration_s
        engine.end_iteration()
    return tokens / seconds if seconds > 0 else 0.0


def lay_out(
    cluster: Cluster,
    sample: RowSample,
    target: LayoutTarget,
    plans: list[MachinePlan],
    throughputs: Throughputs,
    most_stages: int | None,
) -> LayoutsFound:
    """Layouts of every machine by itself, then of all of them together."""
    kinds = {machine.kind: machine for machine in cluster.machines}
    instances = {
        kind: _instances(cluster, machine, throughputs.of, most_stages, [(1.0, sample.rows)])
        for kind, machine in kinds.items()
    }
    fleet = LayoutFleet(cluster.machines, instances, sample.rows, target)
    # Each machine gets its share of the rate by what it does at most.
    most = {kind: _most(machine, instances[kind]) for kind, machine in kinds.items()}
    total = sum(most[machine.kind] for machine in cluster.machines)
    by_kind = {
        kind: fleet.evaluate(machine, target.request_rate * most[kind] / total if total else None)
        for kind, machine in kinds.items()
    }
    evaluated = {machine.name: by_kind[machine.kind] for machine in cluster.machines}
    if throughputs.kind == "static" and math.isinf(target.request_rate):
        # The estimate needs constants alone; a simulation needs all that an engine has.
        layouts = {name: each[0].layout for name, each in evaluated.items() if each}
        choice = FleetChoice(layouts, None, layouts, None, 0)
    else:
        choice = choose_together(fleet, evaluated)
    return LayoutsFound(cluster, sample, throughputs.kind, target, plans, instances, evaluated, choice)


def _instances(
    cluster: Cluster,
    machine: Machine,
    throughput: Estimator,
    most_stages: int | None,
    mix: Mix,
) -> dict[Part, LayoutInstance]:
    """Instances that run on a machine; pipelines unasked where without them GPUs are left over."""
    found = instances_of(cluster, machine, throughput, most_stages or 1, mix)
    if most_stages is None:
        sizes = {part.gpus for part in found}
        reached = {0}
        for used in range(1, machine.gpus + 1):
            if any(used - size in reached for size in sizes):
                reached.add(used)
        if machine.gpus not in reached:
            stages = min(MOST_STAGES, machine.gpus)
            found = instances_of(cluster, machine, throughput, stages, mix)
    return found


def _most(machine: Machine, instances: Mapping[Part, LayoutInstance]) -> float:
    """Tokens/s of a machine at best."""
    per_gpu = (each.throughput_tok_s / part.gpus for part, each in instances.items())
    return machine.gpus * max(per_gpu, default=0.0)
