"""Layouts of machines: which instances run on their GPUs, and which layouts of a fleet serve best together.

A layout is a multiset of instances, each of some tensor- and pipeline-parallel degree, on some or all of the
GPUs of a machine: TP 4 beside TP 2 on six GPUs is one. By itself a layout is worth the sum of what its
instances do alone. Under a request rate and latency targets it is worth the requests that meet them
(goodput), simulated under the production scheduler. Machines are first laid out one by one, each at its share
of the rate; then the fleet is simulated as a whole, and a machine's layout is replaced where the fleet gains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from hetlb.tools.plan.cluster import Cluster
from hetlb.tools.plan.common.capabilities import Form
from hetlb.tools.plan.common.composition import MOST_STAGES
from hetlb.tools.plan.common.fleet_run import OVERLOAD, SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.common.servers import ProfileOf, VllmServer, numbered
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import Option, Part, Rankings, best_pipelines
from hetlb.tools.plan.trace_throughput import Rows, RowSample, Throughputs
from hetlb.tools.sim.alone import batch_of
from hetlb.tools.sim.deadline import StoppedError
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.records import steady_figures

#: Length of a run at a rate in simulated seconds, and bounds of its requests.
_RUN_S = 120.0
_LEAST_REQUESTS, _MOST_REQUESTS = 300, 2000
#: Requests of a run without a rate for every sequence that the fleet runs together, and the most of them.
_SEQUENCE_REQUESTS, _MOST_FILLING = 8, 24_000
#: Least throughput of a layout over another one's, to replace it.
_LEAST_GAIN = 1.01
#: The most simulated layouts of a machine, and instances of a fleet.
MOST_SIMULATED = 12
MOST_INSTANCES = 64

#: Instances of a machine, the largest first.
Layout = tuple[Part, ...]


def gpus_of(layout: Layout) -> int:
    return sum(part.gpus for part in layout)


def counted(layout: Layout) -> list[tuple[Part, int]]:
    """Return each part with its number, the largest first."""
    return [(part, len(list(alike))) for part, alike in groupby(layout)]


def layout_name(layout: Layout) -> str:
    """Return `1 x tp4 + 1 x tp2`."""
    return " + ".join(f"{count} x {part.name}" for part, count in counted(layout))


def layouts_of(gpus: int, parts: Sequence[Part], *, partly: bool) -> list[Layout]:
    """Return every multiset of parts on a machine; `partly`: also with room left for one more part."""
    ordered = sorted(parts, key=lambda part: (-part.gpus, part))
    least = min((part.gpus for part in parts), default=gpus + 1)
    found: list[Layout] = []

    def extend(layout: Layout, left: int, first: int) -> None:
        if layout and (partly or left < least):
            found.append(layout)
        for index in range(first, len(ordered)):
            if ordered[index].gpus <= left:
                extend((*layout, ordered[index]), left - ordered[index].gpus, index)

    extend((), gpus, 0)
    return found


# --- worth of a layout ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """Requests per second for the whole fleet, infinite for more than it serves; latencies to be met."""

    request_rate: float
    slo: SloLimits


@dataclass(frozen=True, slots=True)
class LayoutsWorth:
    """A fleet under the router. `goodput_req_s`: the rate times the share of requests that met the limits."""

    total_token_throughput: float
    goodput_req_s: float
    slo_attainment: float
    requests: int

    @property
    def figure(self) -> float:
        """The maximised figure: goodput at a rate, else tokens/s."""
        return self.goodput_req_s if self.goodput_req_s > 0 else self.total_token_throughput


@dataclass(frozen=True)
class Evaluated:
    """A layout of one machine. `worth`: None if not simulated; `cost_per_hour`: None without prices."""

    layout: Layout
    throughput_tok_s: float
    cost_per_hour: float | None
    worth: LayoutsWorth | None = None


@dataclass
class LayoutFleet:
    """Machines with the instances that each kind of them can run, and the requests to expect."""

    machines: Sequence[Machine]
    instances: Mapping[tuple[object, ...], Mapping[Part, Option]]
    rows: Rows
    target: LayoutTarget
    seed: int = 0

    def simulate(self, layouts: Mapping[str, Layout], request_rate: float) -> LayoutsWorth:
        """Return the instances of these layouts, by machine, under the default policy at a rate.

        An infinite rate is more than they serve. Raises `StoppedError` at the deadline.
        """
        servers, rate = self._servers(layouts), request_rate
        if math.isinf(request_rate):
            count = max(_LEAST_REQUESTS, self._filling(servers))
            tokens_s = math.fsum(
                self.instances[machine.kind][part].throughput_tok_s
                for machine in self.machines
                for part in layouts.get(machine.name, ())
            )
            rate = OVERLOAD * tokens_s * len(self.rows) / sum(i + o for i, o in self.rows)
        else:
            count = round(min(_MOST_REQUESTS, max(_LEAST_REQUESTS, request_rate * _RUN_S)))
        rows = list(self.rows)
        random.Random(self.seed).shuffle(rows)
        planned = arrivals(rows, rate, random.Random(self.seed), count)
        records = run_fleet(servers, planned, [output for _, output in rows], seed=self.seed).records
        met = self.target.slo.share_met(records)
        tokens_s = steady_figures(records)["total_token_throughput"]
        goodput = met * request_rate if math.isfinite(request_rate) else 0.0
        return LayoutsWorth(tokens_s, goodput, met, len(records))

    def _filling(self, servers: Sequence[SimulatedServer]) -> int:
        """Return the requests that keep all servers full for most of a run."""
        mean = sum(i + o / 2 for i, o in self.rows) / len(self.rows)
        return _SEQUENCE_REQUESTS * sum(s.engine.ranks * batch_of(s.engine, mean) for s in servers)

    def can_be_filled(self, layouts: Mapping[str, Layout]) -> bool:
        """Return False if more requests are needed to fill these layouts than are simulated."""
        return self._filling(self._servers(layouts)) <= _MOST_FILLING

    def _servers(self, layouts: Mapping[str, Layout]) -> list[SimulatedServer]:
        return [
            SimulatedServer(f"{machine.name}-{index}", engine_of(profile))
            for machine in self.machines
            for index, part in enumerate(layouts.get(machine.name, ()))
            if (profile := self.instances[machine.kind][part].profile) is not None
        ]

    def evaluate(self, machine: Machine, request_rate: float) -> list[Evaluated]:
        """Return layouts of one machine, best first; at a finite rate only possible winners are simulated."""
        running, price, found = self.instances[machine.kind], machine.price_per_gpu_hour, []
        at_rate = math.isfinite(request_rate)
        for layout in layouts_of(machine.gpus, list(running), partly=at_rate and price is not None):
            tokens = sum(running[part].throughput_tok_s for part in layout)
            found.append(Evaluated(layout, tokens, None if price is None else price * gpus_of(layout)))
        found.sort(key=lambda each: (-each.throughput_tok_s, len(each.layout), each.layout))
        if not at_rate:
            return found
        simulated: list[Evaluated] = []
        with suppress(StoppedError):
            for each in _worth_simulating(found):
                worth = self.simulate({machine.name: each.layout}, request_rate)
                simulated.append(replace(each, worth=worth))
        return sorted(simulated, key=_rank) or found


def _worth_simulating(found: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the layouts to simulate: for every number of GPUs the ones with most tokens/s.

    One with the largest instances is always among them.
    """
    by_gpus: dict[int, list[Evaluated]] = {}
    for each in found:
        by_gpus.setdefault(gpus_of(each.layout), []).append(each)
    each_size = max(2, MOST_SIMULATED // max(1, len(by_gpus)))
    chosen = []
    for alike in by_gpus.values():
        largest = max(alike, key=lambda each: (each.layout[0].gpus, each.throughput_tok_s))
        chosen += alike[: each_size - 1]
        if largest not in chosen:
            chosen.append(largest)
    return chosen


def _rank(each: Evaluated) -> tuple[float, float, float]:
    """Return a sort key: the best goodput first, within 1 % the cheapest, then the most tokens/s.

    Prices count if they are known.
    """
    assert each.worth is not None
    return (-round(each.worth.slo_attainment, 2), each.cost_per_hour or 0.0, -each.throughput_tok_s)


# --- whole fleets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetLayouts:
    """A layout of every machine that has one, and their worth together; None if not simulated."""

    layouts: dict[str, Layout]
    worth: LayoutsWorth | None = None


def choose_together(
    fleet: LayoutFleet,
    evaluated: Mapping[tuple[object, ...], Sequence[Evaluated]],
    *,
    simulated: bool = True,
) -> tuple[FleetLayouts, FleetLayouts]:
    """Return the layouts that serve best together, and each machine's own best layouts.

    The search for the former starts from the latter.
    """
    options = {machine.name: found for machine in fleet.machines if (found := evaluated[machine.kind])}
    first = FleetLayouts({name: found[0].layout for name, found in options.items()})
    if not simulated or not options or sum(map(len, first.layouts.values())) > MOST_INSTANCES:
        return first, first
    if math.isinf(fleet.target.request_rate) and not fleet.can_be_filled(first.layouts):
        return first, first
    rate = fleet.target.request_rate
    try:
        worth = best = fleet.simulate(first.layouts, rate)
    except StoppedError:
        return first, first
    chosen, count = dict(first.layouts), 1
    at_rate = math.isfinite(rate)
    improved = len(options) > 1  # a machine alone is its own best; at a rate it has been simulated already
    while improved:
        improved = False
        for name, found in options.items():
            for option in found[: MOST_SIMULATED // len(options) + 1]:
                close = at_rate or option.throughput_tok_s >= 0.98 * found[0].throughput_tok_s
                if option.layout == chosen[name] or not close or count >= 2 * MOST_SIMULATED:
                    continue
                changed = {**chosen, name: option.layout}
                try:
                    tried = fleet.simulate(changed, rate)
                except StoppedError:
                    return FleetLayouts(chosen, best), replace(first, worth=worth)
                count += 1
                if tried.figure > _LEAST_GAIN * best.figure:
                    chosen, best, improved = changed, tried, True
    return FleetLayouts(chosen, best), replace(first, worth=worth)


# --- the layouts of a cluster ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutsFound:
    """All that a search found; rankings, options that run and their layouts by the kind of machine."""

    cluster: Cluster
    sample: RowSample
    estimate: str
    target: LayoutTarget
    rankings: Rankings
    instances: Mapping[tuple[object, ...], Mapping[Part, Option]]
    evaluated: Mapping[tuple[object, ...], list[Evaluated]]
    choice: FleetLayouts
    one_by_one: FleetLayouts


def lay_out(
    cluster: Cluster,
    sample: RowSample,
    target: LayoutTarget,
    rankings: Rankings,
    throughputs: Throughputs,
    most_stages: int | None,
) -> LayoutsFound:
    """Return the layouts of every machine by itself, then of all of them together."""
    kinds = {machine.kind: machine for machine in cluster.machines}
    instances = {}
    for kind, machine in kinds.items():
        found = {option.part: option for option in rankings[kind] if option.feasible}
        stages = most_stages
        if stages is None:
            # Unasked, pipelines are for GPUs that would be left over without them.
            layouts = layouts_of(machine.gpus, list(found), partly=False)
            whole = any(gpus_of(each) == machine.gpus for each in layouts)
            stages = 1 if whole else min(MOST_STAGES, machine.gpus)
        pipelines = best_pipelines(cluster, machine, throughputs.of, stages, [(1.0, sample.rows)])
        instances[kind] = found | {option.part: option for option in pipelines}
    fleet = LayoutFleet(cluster.machines, instances, sample.rows, target)
    # Each machine gets a share of the rate in proportion to its most.
    most = {kind: _most(machine, instances[kind]) for kind, machine in kinds.items()}
    total = sum(most[machine.kind] for machine in cluster.machines)
    evaluated = {
        kind: fleet.evaluate(machine, target.request_rate * most[kind] / total if total else math.inf)
        for kind, machine in kinds.items()
    }
    # The static estimate needs constants alone; a simulation needs all that an engine has.
    simulated = throughputs.kind == "simulate" or math.isfinite(target.request_rate)
    choice, one_by_one = choose_together(fleet, evaluated, simulated=simulated)
    return LayoutsFound(
        cluster, sample, throughputs.kind, target, rankings, instances, evaluated, choice, one_by_one
    )


def _most(machine: Machine, instances: Mapping[Part, Option]) -> float:
    per_gpu = (each.throughput_tok_s / part.gpus for part, each in instances.items())
    return machine.gpus * max(per_gpu, default=0.0)


def servers_of(found: LayoutsFound, data_parallel: bool) -> list[VllmServer]:
    """Return servers of the chosen layouts by machine; with `data_parallel` equal parts are one server."""
    model, result = found.cluster.model, []
    for machine in found.cluster.machines:
        gpu, index = 0, 0
        for part, count in counted(found.choice.layouts.get(machine.name, ())):
            profile = _profile(found, machine, part)
            together = data_parallel and part.data_parallel_size == 1
            for replicas in [count] if together else [1] * count:
                server = VllmServer(
                    name=f"{machine.name}-{part.name}-{index}",
                    model=model.name,
                    form=Form(
                        part.tensor_parallel_size,
                        part.pipeline_parallel_size,
                        data_parallel_size=part.data_parallel_size,
                    ),
                    gpus=[(machine.name, tuple(range(gpu, gpu + replicas * part.gpus)))],
                    utilization=machine.gpu_memory_utilization,
                    replicas=replicas,
                    max_model_len=found.cluster.limits.tokens,
                    engine=found.instances[machine.kind][part].profile,
                    profile=profile,
                )
                result.append(server)
                gpu, index = gpu + replicas * part.gpus, index + 1
    return numbered(result)


def _profile(found: LayoutsFound, machine: Machine, part: Part) -> ProfileOf:
    """Return the file of a profile; a composed one, or one without a cache size, is yet to be written."""
    profile = found.instances[machine.kind][part].profile
    assert profile is not None
    degree = part.tensor_parallel_size
    if part.data_parallel_size > 1:
        stated = machine.ranked.get(part.ranks)
        if stated is not None and stated[1].engine.kv_cache_tokens is not None:
            return found.cluster.path.parent / stated[0]
    elif part.pipeline_parallel_size == 1 and machine.profiles[degree].engine.kv_cache_tokens is not None:
        return found.cluster.path.parent / machine.profile_paths[degree]
    named = msgspec.structs.replace(profile, name=f"{machine.name}-{part.name}")
    return lambda: named
