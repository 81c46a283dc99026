"""A rented fleet under the production scheduler, in virtual time: the real rate of a plan.

Requests come at more than the planned rate, their types mixed in the plan's proportions. The rate is of
tokens while they keep coming (`steady_figures`), in requests of the planned mix.
Models share nothing but the bill: each is simulated by itself,
and the fleet serves the whole mix as fast as the slowest model serves its part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetlb.balancer.config.profile_file import Profile
from hetlb.balancer.core.policies.base import PlannedType
from hetlb.balancer.core.policies.worth import ALIKE_LOG_LENGTHS, busy_s, log_ratio
from hetlb.tools.plan.common.fleet_run import OVERLOAD, SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.highs import LinearProgram, SolveLimits
from hetlb.tools.plan.planning import Table
from hetlb.tools.plan.rent_program import Configuration, Problem, RentPlan
from hetlb.tools.plan.throughput import interleave, with_bubbles
from hetlb.tools.plan.workloads import RequestType
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.records import RequestResult, steady_figures

#: Length of a run, as a multiple of a request's time in the instance with the slowest turnover; bounds of its
#: requests.
_RUN_STAYS = 10
_LEAST_REQUESTS, _MOST_REQUESTS = 2000, 24000
#: Least share of a simulated type.
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Rates of the whole fleet in its steady part; `makespan_s` until the last of `records` ended."""

    request_throughput: float
    total_token_throughput: float
    records: tuple[RequestResult, ...]
    makespan_s: float


def instance_names(plan: RentPlan) -> dict[str, list[str]]:
    """Return the names of the instances of every configuration: its own and a number."""
    return {name: [f"{name}-{index}" for index in range(count)] for name, count in plan.counts.items()}


def planned_types(plan: RentPlan, kinds: Sequence[RequestType]) -> tuple[PlannedType, ...]:
    """Return the types of a plan as policies know them, with each instance's share of each type."""
    names = instance_names(plan)
    found = []
    for kind in kinds:
        rates = {c: rate for (name, c), rate in plan.rates.items() if name == kind.name}
        total = math.fsum(rates.values())
        shares = tuple(
            (instance, rate / total / len(names[c]))
            for c, rate in sorted(rates.items())
            if rate > _LEAST_SHARE * total
            for instance in names[c]
        )
        found.append(PlannedType(kind.model, kind.input_tokens, kind.output_tokens, kind.share, shares))
    return tuple(found)


def worth_of(problem: Problem, plan: RentPlan) -> tuple[tuple[str, float], ...]:
    """Return the price of each instance's time in a plan, in requests/s: its contribution to the plan.

    Prices are computed from the times that the policy uses, so that they match its costs. Types with equal
    prompts count as one, since the policy predicts the length of an answer by its prompt.
    """
    program = LinearProgram()
    rate = program.column(1.0)
    together = _told_apart(problem.workloads)
    serving: list[list[tuple[int, float]]] = [[] for _ in together]
    rows: dict[str, int] = {}
    for name, engine in engines_of(problem, plan).items():
        limits, columns = engine.limits, []
        sizes = limits.kv_cache_tokens, limits.max_num_seqs, limits.max_num_batched_tokens
        for kinds, served in zip(together, serving, strict=True):
            fit = [kind for kind in kinds if kind.longest_tokens <= limits.max_sequence_tokens]
            if fit and fit[0].model == problem.by_name[name].model:
                busy = [
                    kind.share
                    * busy_s(engine.latency, *sizes, kind.input_tokens, kind.output_tokens, limits.need)
                    for kind in fit
                ]
                whole = math.fsum(kind.share for kind in kinds) / math.fsum(kind.share for kind in fit)
                columns.append(program.column())
                served.append((columns[-1], 1.0 / (whole * math.fsum(busy))))
        rows[name] = program.row([(column, 1.0) for column in columns], upper=float(plan.counts[name]))
    for served in serving:  # in units of its share of each
        program.row([(rate, -1.0), *served], lower=0.0)
    solution = program.solve(SolveLimits())
    if solution is None:
        return ()
    price = {name: abs(float(solution.duals[row])) for name, row in rows.items()}
    return tuple((own, price[name]) for name, names in instance_names(plan).items() for own in names)


def _told_apart(kinds: Sequence[RequestType]) -> list[list[RequestType]]:
    """Return the types in groups that the policy cannot tell apart: one model, equal prompts."""
    found: list[list[RequestType]] = []
    for kind in kinds:
        for group in found:
            alike = log_ratio(group[0].input_tokens, kind.input_tokens) <= ALIKE_LOG_LENGTHS
            if alike and group[0].model == kind.model:
                group.append(kind)
                break
        else:
            found.append([kind])
    return found


def engines_of(problem: Problem, plan: RentPlan) -> dict[str, EngineSpec]:
    """Return the engine of each configuration of a plan that has a profile."""
    profiles = {name: profile_of(plan, problem.by_name[name], problem.workloads) for name in plan.counts}
    return {name: engine_of(each) for name, each in profiles.items() if each is not None}


def profile_of(plan: RentPlan, configuration: Configuration, kinds: Sequence[RequestType]) -> Profile | None:
    """Return the profile of a configuration under its part of a plan: with the bubbles of a pipeline."""
    profile, stages = configuration.profile, configuration.engine_stages
    if profile is None or not stages:
        return profile
    rows = {kind.name: kind.rows for kind in kinds}
    mix = [(rate, rows[kind]) for (kind, c), rate in sorted(plan.rates.items()) if c == configuration.name]
    return with_bubbles(profile, mix, stages)


def simulate_plan(
    table: Table,
    plan: RentPlan,
    *,
    policy: str = "hetlb",
    predictor: str = "empirical",
    seed: int = 0,
    load: float = OVERLOAD,
    plain: bool = False,
) -> SimulatedFleet:
    """Return the plan's fleet at `load` times its rate (infinite: all at once); all have profiles.

    `plain`: the policy knows nothing of the plan.
    """
    kinds, engines = table.problem.workloads, engines_of(table.problem, plan)
    follows = table.lengths_known and not plain
    serve = partial(
        run_fleet,
        policy=policy,
        predictor=predictor,
        types=planned_types(plan, kinds) if follows else (),
        worth=worth_of(table.problem, plan) if follows else (),
        seed=seed,
    )
    rate, makespan_s = math.inf, 0.0
    records: list[RequestResult] = []
    for model in table.problem.models:
        own = [kind for kind in kinds if kind.model == model]
        part = math.fsum(kind.share for kind in own)
        rows, servers = _load_of(plan, engines, own, random.Random(seed))
        planned = arrivals(rows, load * plan.throughput * part, random.Random(seed))
        found = serve(servers, planned, [output for _, output in rows], model=model).records
        ended = sorted(record.last_token_s for record in found if record.last_token_s is not None)
        tokens = math.fsum(kind.share * (kind.input_tokens + kind.output_tokens) for kind in own)
        rate = min(rate, steady_figures(found)["total_token_throughput"] / tokens)
        makespan_s = max(makespan_s, ended[-1])
        records += found
    tokens = math.fsum(kind.share * (kind.input_tokens + kind.output_tokens) for kind in kinds)
    return SimulatedFleet(rate, rate * tokens, tuple(records), makespan_s)


def _load_of(
    plan: RentPlan, engines: Mapping[str, EngineSpec], kinds: Sequence[RequestType], rng: random.Random
) -> tuple[list[tuple[int, int]], list[SimulatedServer]]:
    """Return requests of one model, as many as a long run takes, and the plan's servers of that model."""
    share = math.fsum(kind.share for kind in kinds)
    tokens = math.fsum(kind.share * (kind.input_tokens + kind.output_tokens / 2) for kind in kinds) / share
    serving = {c for (name, c), _ in plan.rates.items() if name in {kind.name for kind in kinds}}
    servers, stay_s = [], 0.0
    for configuration, names in instance_names(plan).items():
        if configuration in serving:
            engine = engines[configuration]
            servers += [SimulatedServer(name, engine) for name in names]
            batch = engine.ranks * engine.limits.batch_of(tokens)
            own = math.fsum(rate for (_, c), rate in plan.rates.items() if c == configuration)
            stay_s = max(stay_s, batch / (own / len(names)))
    count = round(min(_MOST_REQUESTS, max(_LEAST_REQUESTS, _RUN_STAYS * stay_s * plan.throughput * share)))
    rows = interleave([(kind.share, kind.rows) for kind in kinds], count)
    rng.shuffle(rows)
    return rows, servers
