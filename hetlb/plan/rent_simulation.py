"""A rented fleet under the production scheduler, in virtual time: what a plan really serves.

All requests wait at the start, or come at more than the planned rate; types are mixed in the plan's
proportions. The rate is that of tokens while the fleet is neither filling nor emptying, in requests:
batches of alike answers that began together end together, so that completions come in waves.
Models share nothing but the bill: each is simulated by itself,
and the fleet serves the whole mix as fast as the slowest model serves its part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetlb.config.profile_file import Profile
from hetlb.core.policies.base import PlannedShares
from hetlb.plan.common.fleet_run import SimulatedServer, arrivals, run_fleet
from hetlb.plan.rent_program import RentPlan
from hetlb.plan.throughput import engine_spec, interleave
from hetlb.plan.workloads import RequestType
from hetlb.workload.records import RequestResult, tokens_within

#: A run lasts so many times as long as a request stays in the instance that turns its batch over most
#: slowly; its requests, within these bounds.
_TURNS = 10
_FEWEST, _MOST = 2000, 24000
#: The part of the completions that counts: later than filling, earlier than emptying.
_FROM, _TO = 0.25, 0.80
#: With arrivals: from this share of the time in which they come.
_ARRIVED = 0.4
#: Shares of a type below this are left out of what `planned` holds.
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Rates of the whole fleet in its steady part; `makespan_s` until the last of `records` ended."""

    request_throughput: float
    total_token_throughput: float
    records: tuple[RequestResult, ...]
    makespan_s: float


def instance_names(plan: RentPlan) -> dict[str, list[str]]:
    """Names of the instances of every configuration: its own and a number."""
    return {name: [f"{name}-{index}" for index in range(count)] for name, count in plan.counts.items()}


def planned_shares(plan: RentPlan, kinds: Sequence[RequestType]) -> tuple[PlannedShares, ...]:
    """Share of every type's requests that each instance gets."""
    names = instance_names(plan)
    found = []
    for kind in kinds:
        total = math.fsum(rate for (name, _), rate in plan.rates.items() if name == kind.name)
        shares = {
            instance: rate / total / len(names[configuration])
            for (name, configuration), rate in plan.rates.items()
            if name == kind.name and rate > _LEAST_SHARE * total
            for instance in names[configuration]
        }
        found.append(
            PlannedShares(
                kind.name,
                kind.model,
                kind.input_tokens,
                kind.output_tokens,
                kind.share,
                tuple(sorted(shares.items())),
            )
        )
    return tuple(found)


def simulate(
    plan: RentPlan,
    profiles: Mapping[str, Profile],
    kinds: Sequence[RequestType],
    *,
    policy: str = "hetlb",
    predictor: str = "empirical",
    seed: int = 0,
    load: float = math.inf,
) -> SimulatedFleet:
    """The whole fleet of a plan; `profiles` by configuration. Shares of `kinds` sum to 1.

    `load`: Poisson arrivals at so many times the planned rate, infinite where all wait at the start.
    """
    rate, makespan_s = math.inf, 0.0
    records: list[RequestResult] = []
    shares = planned_shares(plan, kinds)
    for model in dict.fromkeys(kind.model for kind in kinds):
        own = [kind for kind in kinds if kind.model == model]
        part = math.fsum(kind.share for kind in own)
        served, last_s, own_records = _simulate_model(
            plan, profiles, own, shares, policy=policy, predictor=predictor, seed=seed, load=load
        )
        rate = min(rate, served / part)
        makespan_s = max(makespan_s, last_s)
        records += own_records
    tokens = math.fsum(kind.share * (kind.input_tokens + kind.output_tokens) for kind in kinds)
    return SimulatedFleet(rate, rate * tokens, tuple(records), makespan_s)


def _simulate_model(
    plan: RentPlan,
    profiles: Mapping[str, Profile],
    kinds: Sequence[RequestType],
    shares: tuple[PlannedShares, ...],
    *,
    policy: str,
    predictor: str,
    seed: int,
    load: float,
) -> tuple[float, float, Sequence[RequestResult]]:
    model = kinds[0].model
    serving = {c for (name, c), _ in plan.rates.items() if name in {kind.name for kind in kinds}}
    names = instance_names(plan)
    servers: list[SimulatedServer] = []
    stay_s = 0.0
    mix = [(kind.share, list(kind.rows)) for kind in kinds]
    tokens = math.fsum(kind.share * (kind.input_tokens + kind.output_tokens / 2) for kind in kinds)
    tokens /= math.fsum(kind.share for kind in kinds)
    for configuration in plan.counts:
        if configuration not in serving:
            continue
        engine = engine_spec(profiles[configuration])
        servers += [SimulatedServer(name, engine) for name in names[configuration]]
        batch = min(engine.limits.max_num_seqs, engine.limits.kv_cache_tokens / tokens)
        own = math.fsum(rate for (_, c), rate in plan.rates.items() if c == configuration)
        stay_s = max(stay_s, batch / (own / len(names[configuration])))
    served = plan.throughput * math.fsum(kind.share for kind in kinds)
    count = round(min(_MOST, max(_FEWEST, _TURNS * stay_s * served)))
    rows = interleave(mix, count)
    random.Random(seed).shuffle(rows)
    at_once = math.isinf(load)
    planned = arrivals(rows, load * served, random.Random(seed))
    result = run_fleet(
        servers,
        planned,
        [output for _, output in rows],
        model=model,
        policy=policy,
        predictor=predictor,
        shares=shares,
        seed=seed,
    )
    ended = sorted(record.last_token_s for record in result.records if record.last_token_s is not None)
    from_s, to_s = _ARRIVED * planned[-1].scheduled_s, planned[-1].scheduled_s
    if at_once:
        from_s, to_s = ended[int(_FROM * len(ended))], ended[int(_TO * len(ended))]
    served = math.fsum(
        tokens_within(record, from_s, to_s) / (record.prompt_tokens + record.output_tokens)
        for record in result.records
        if record.ok
    )
    return served / (to_s - from_s) if to_s > from_s else 0.0, ended[-1], result.records
