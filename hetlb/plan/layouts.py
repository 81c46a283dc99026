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
from dataclasses import dataclass
from itertools import groupby

from hetlb.config.cluster import Cluster
from hetlb.config.plan_tables import Machine, Model
from hetlb.config.profile_file import ModelInfo, Profile
from hetlb.plan.common.capacity import divide_layers
from hetlb.plan.common.composition import (
    ACTIVATION_BYTES,
    LinkSeconds,
    StageProfile,
    compose_profile,
    engine_stages,
)
from hetlb.plan.common.fleet_run import SimulatedServer, run_fleet
from hetlb.plan.throughput import Mix, SloLimits, bubbles, engine_spec, slowed
from hetlb.plan.tp_search import Estimator, Rows, memory, misfit
from hetlb.workload.arrivals import make_plan
from hetlb.workload.records import summarize
from hetlb.workload.traces import Row

#: A run at a rate lasts so long in simulated time, within these numbers of requests.
_RUN_S = 120.0
_FEWEST, _MOST = 300, 2000
#: All at once: requests for every sequence that the fleet runs together.
_TURNS = 4
#: A layout takes the place of another where the fleet gains this much.
_GAIN = 1.01
#: The most layouts of a machine that are simulated, and instances of a fleet.
MOST_SIMULATED = 12
MOST_INSTANCES = 64
#: Link between stages inside a machine: bytes/s of a PCIe 4.0 link, seconds per batch.
_LINK_BYTES_S = 25e9
_LINK_BATCH_S = 5e-5
#: Values of a token between layers where the model's shape is not known.
_USUAL_HIDDEN = 8192


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Degrees of one instance."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def name(self) -> str:
        """Name in tables and of instances."""
        stages = f"pp{self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        return f"tp{self.tensor_parallel_size}{stages}"


#: Instances of a machine, the largest first.
Layout = tuple[Part, ...]


@dataclass(frozen=True)
class LayoutInstance:
    """A part that runs: its profile with the KV cache it has there, and its tokens/s alone while full."""

    part: Part
    profile: Profile
    throughput_tok_s: float


def gpus_of(layout: Layout) -> int:
    """GPUs that a layout uses."""
    return sum(part.gpus for part in layout)


def counted(layout: Layout) -> list[tuple[Part, int]]:
    """Each part with its number, the largest first."""
    return [(part, len(list(alike))) for part, alike in groupby(layout)]


def layout_name(layout: Layout) -> str:
    """`1 x tp4 + 1 x tp2`."""
    return " + ".join(f"{count} x {part.name}" for part, count in counted(layout))


def instances_of(
    cluster: Cluster,
    machine: Machine,
    estimate: Estimator,
    most_stages: int,
    mix: Mix,
) -> dict[Part, LayoutInstance]:
    """Every part that runs on a machine; `estimate` gives tokens/s of a profile with so many KV tokens.

    Pipelines count with the bubbles that they have on this mix of requests.

    Of pipelines on equally many GPUs only the fastest is kept.
    """
    found: dict[Part, LayoutInstance] = {}
    best: dict[int, LayoutInstance] = {}
    for stages in range(1, most_stages + 1):
        for degree, measured in machine.profiles.items():
            part = Part(degree, stages)
            if part.gpus > machine.gpus or misfit(cluster, machine, degree, stages):
                continue
            tokens = memory(cluster, machine, part.gpus).kv_cache_tokens
            profile = _profile(cluster.model, machine, part, measured, tokens, mix)
            instance = LayoutInstance(part, profile, estimate(profile, tokens))
            if stages == 1:
                found[part] = instance
            elif part.gpus not in best or instance.throughput_tok_s > best[part.gpus].throughput_tok_s:
                best[part.gpus] = instance
    return found | {instance.part: instance for instance in best.values()}


def _profile(model: Model, machine: Machine, part: Part, profile: Profile, tokens: int, mix: Mix) -> Profile:
    stages, shape = part.pipeline_parallel_size, model.shape
    hidden = shape.attention_heads * shape.head_dim if shape is not None else _USUAL_HIDDEN
    links = [LinkSeconds(ACTIVATION_BYTES * hidden / _LINK_BYTES_S, _LINK_BATCH_S)] * (stages - 1)
    held = [
        StageProfile(profile, float(share), machine.gpu, part.tensor_parallel_size)
        for share in divide_layers([1] * stages, shape.layers if shape is not None else None)
    ]
    info = ModelInfo(name=model.name, kv_bytes_per_token=model.kv_bytes_per_token)
    whole = compose_profile(
        f"{profile.name}-pp{stages}" if stages > 1 else profile.name, info, held, tokens, links
    )
    if stages == 1:
        return whole
    return slowed(whole, bubbles(engine_spec(whole), mix, engine_stages(held, links)))


def layouts_of(gpus: int, parts: Sequence[Part], *, partly: bool) -> list[Layout]:
    """Every multiset of parts on a machine; `partly`: those too that leave room for one more part."""
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


# --- what a layout is worth -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """Requests per second for the whole fleet, infinite where all wait at the start; latencies to be met."""

    request_rate: float
    slo: SloLimits


@dataclass(frozen=True, slots=True)
class Worth:
    """A fleet under the router. `goodput_req_s`: the rate times the share of requests that met the limits."""

    total_token_throughput: float
    goodput_req_s: float
    slo_attainment: float
    requests: int

    @property
    def figure(self) -> float:
        """The figure that is maximised: goodput at a rate, else tokens/s."""
        return self.goodput_req_s if self.goodput_req_s > 0 else self.total_token_throughput


@dataclass(frozen=True)
class Evaluated:
    """A layout of one machine. `worth`: None where not simulated; `cost_per_hour`: None without prices."""

    layout: Layout
    throughput_tok_s: float
    cost_per_hour: float | None
    worth: Worth | None = None


@dataclass
class LayoutFleet:
    """Machines with what can run on each, and the requests to expect."""

    machines: Sequence[Machine]
    instances: Mapping[tuple[object, ...], Mapping[Part, LayoutInstance]]
    rows: Rows
    target: LayoutTarget
    seed: int = 0

    def running(self, machine: Machine) -> Mapping[Part, LayoutInstance]:
        """Instances that can run on a machine."""
        return self.instances[machine.kind]

    def simulate(self, layouts: Mapping[str, Layout], request_rate: float) -> Worth:
        """The instances of these layouts, by machine, under the default policy at a rate."""
        servers = [
            SimulatedServer(f"{machine.name}-{index}", engine_spec(self.running(machine)[part].profile))
            for machine in self.machines
            for index, part in enumerate(layouts.get(machine.name, ()))
        ]
        at_once = math.isinf(request_rate)
        wanted = self._together(servers) * _TURNS if at_once else request_rate * _RUN_S
        count = round(min(_MOST, max(_FEWEST, wanted)))
        rows = [Row(None, i, o) for i, o in self.rows]
        random.Random(self.seed).shuffle(rows)
        plan = make_plan(rows, count, request_rate, random.Random(self.seed))
        records = run_fleet(servers, plan, [row.output_tokens for row in rows], seed=self.seed).records
        met = self.target.slo.share_met(records)
        steady = summarize(records)["steady"]
        return Worth(
            steady["total_token_throughput"], 0.0 if at_once else met * request_rate, met, len(records)
        )

    def _together(self, servers: Sequence[SimulatedServer]) -> float:
        mean = sum(i + o / 2 for i, o in self.rows) / len(self.rows)
        return sum(
            min(limits.max_num_seqs, limits.kv_cache_tokens / max(1.0, mean))
            for limits in (server.engine.limits for server in servers)
        )

    def evaluate(self, machine: Machine, request_rate: float | None) -> list[Evaluated]:
        """Layouts of one machine, best first; with a rate those that could serve it best are simulated."""
        running = self.running(machine)
        at_rate = request_rate is not None and math.isfinite(request_rate)
        found = []
        price = machine.price_per_gpu_hour
        for layout in layouts_of(machine.gpus, list(running), partly=at_rate and price is not None):
            tokens = sum(running[part].throughput_tok_s for part in layout)
            found.append(Evaluated(layout, tokens, None if price is None else price * gpus_of(layout)))
        found.sort(key=lambda each: (-each.throughput_tok_s, len(each.layout), each.layout))
        if not at_rate:
            return found
        assert request_rate is not None
        simulated = [
            Evaluated(each.layout, each.throughput_tok_s, each.cost_per_hour, worth)
            for each in _worth_simulating(found)
            for worth in [self.simulate({machine.name: each.layout}, request_rate)]
        ]
        simulated.sort(key=_rank)
        return simulated


def _worth_simulating(found: Sequence[Evaluated]) -> list[Evaluated]:
    """Layouts with the most tokens/s for every number of GPUs, and the one with the largest instances."""
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
    """Most goodput; within 1 % the cheapest where prices are known, then the one with the most tokens/s."""
    assert each.worth is not None
    return (-round(each.worth.slo_attainment, 2), each.cost_per_hour or 0.0, -each.throughput_tok_s)


# --- whole fleets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetChoice:
    """Layouts by machine, and what they serve; `one_by_one` is the fleet of each machine's own best.

    The worths are None where the fleet was too large to simulate.
    """

    layouts: dict[str, Layout]
    worth: Worth | None
    one_by_one: dict[str, Layout]
    one_by_one_worth: Worth | None
    simulations: int


def choose_together(
    fleet: LayoutFleet,
    evaluated: Mapping[str, Sequence[Evaluated]],
) -> FleetChoice:
    """Layouts of all machines that serve best together: at least what the best of each by itself do.

    Starts with those, and tries for one machine after the other what else it could have, until nothing helps.
    """
    first = {name: each[0].layout for name, each in evaluated.items() if each}
    if not first or sum(map(len, first.values())) > MOST_INSTANCES:
        return FleetChoice(first, None, first, None, 0)
    rate = fleet.target.request_rate
    start = fleet.simulate(first, rate)
    chosen, best, count = dict(first), start, 1
    # A machine alone is its own best; at a rate it has been simulated already.
    names = [name for name in first if len(first) > 1]
    at_rate = math.isfinite(rate)
    improved = True
    while improved:
        improved = False
        for name in names:
            options = evaluated[name][: MOST_SIMULATED // len(names) + 1]
            for option in options:
                close = at_rate or option.throughput_tok_s >= 0.98 * options[0].throughput_tok_s
                if option.layout == chosen[name] or not close or count >= 2 * MOST_SIMULATED:
                    continue
                worth = fleet.simulate({**chosen, name: option.layout}, rate)
                count += 1
                if worth.figure > _GAIN * best.figure:
                    chosen, best, improved = {**chosen, name: option.layout}, worth, True
    return FleetChoice(chosen, best, first, start, count)
