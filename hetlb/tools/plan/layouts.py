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

from hetlb.tools.plan.common.fleet_run import OVERLOAD, SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import NO_LIMITS, Option, Part
from hetlb.tools.plan.trace_throughput import Rows
from hetlb.tools.sim.alone import batch_of
from hetlb.tools.sim.fleet_simulation import StoppedError
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.records import steady_figures

#: Length of a run at a rate in simulated seconds, and bounds of its requests.
_RUN_S = 120.0
_LEAST_REQUESTS, _MOST_REQUESTS = 300, 2000
#: Requests of a run without a rate for every sequence that the fleet runs together, and the most of them.
_SEQUENCE_REQUESTS, _MOST_FILLING = 8, 24_000
#: Least throughput of a layout that takes another one's place, over that one's.
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
    """A layout of one machine. `worth`: None where not simulated; `cost_per_hour`: None without prices."""

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
    limits: SolveLimits = NO_LIMITS

    def simulate(self, layouts: Mapping[str, Layout], request_rate: float) -> LayoutsWorth:
        """Return the instances of these layouts, by machine, under the default policy at a rate.

        An infinite rate is more than they serve. Raises `StoppedError` after the limits.
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
        outputs, over = [output for _, output in rows], lambda: self.limits.over
        records = run_fleet(servers, planned, outputs, seed=self.seed, stopped=over).records
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
    """Return the layouts with most tokens/s for every number of GPUs, and one with the largest instances."""
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
    """Return the layout of most goodput; within 1 % the cheapest with known prices, then most tokens/s."""
    assert each.worth is not None
    return (-round(each.worth.slo_attainment, 2), each.cost_per_hour or 0.0, -each.throughput_tok_s)


# --- whole fleets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetLayouts:
    """A layout of every machine that has one, and their worth together; None where not simulated."""

    layouts: dict[str, Layout]
    worth: LayoutsWorth | None = None


def choose_together(
    fleet: LayoutFleet,
    evaluated: Mapping[tuple[object, ...], Sequence[Evaluated]],
    *,
    simulated: bool = True,
) -> tuple[FleetLayouts, FleetLayouts]:
    """Return layouts that serve best together, and each machine's own best, which they were changed from."""
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
