"""Plans under the production scheduler, in virtual time: the real rates of their groups and links.

Requests arrive at random (Poisson) a little faster than the plan serves them. Throughput counts
completions once the fleet is full. Groups are the engines of their latency profiles, KV caches take the links
of the plan.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from hetlb.balancer.core.types import Connector, KvLink
from hetlb.tools.plan.common.capabilities import NIXL, Status, fact_of
from hetlb.tools.plan.common.fleet_run import OVERLOAD, SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.common.servers import KV_LEASE_S
from hetlb.tools.plan.disaggregation.cost import ProfileCost
from hetlb.tools.plan.disaggregation.network import LINK_SHARE, Network
from hetlb.tools.plan.disaggregation.split_cluster import RequestLengths, Role, SplitCluster, SplitPlan
from hetlb.tools.plan.disaggregation.split_search import SplitsFound
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.sim.deadline import StoppedError
from hetlb.tools.sim.fleet_simulation import KvLinks, KvPath
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.records import RequestResult, steady_figures

#: Factor on the simulated throughput of a plan that splits. More of it can fail, so it must serve clearly
#: more.
_SPLIT_WEIGHT = 0.95
#: Plans with at least this share of the best throughput are equally good: the simplest of them is chosen.
_AS_GOOD_SHARE = 0.98
#: Length of the run, as a multiple of a request's time in the slowest group; bounds of its requests.
_RUN_STAYS = 6.0
_LEAST_REQUESTS, _MOST_REQUESTS = 2000, 8000
#: Share of the arrivals' time before the steady part: a run lasts a few times as long as a request.
_FROM_SHARE = 0.45


@dataclass(frozen=True, slots=True)
class Simulated:
    """Figures of a run in its steady part; latencies in seconds, means over its arrivals."""

    request_throughput: float
    output_throughput: float
    ttft_s: float
    tpot_s: float
    transfers: int
    requests: int


def make_servers(
    cluster: SplitCluster, plan: SplitPlan, cost: ProfileCost
) -> tuple[list[SimulatedServer], KvLinks]:
    """Return the groups of a plan with their engines, and the links between them."""
    network = Network(cluster)
    groups = dict(zip(plan.names, plan.groups, strict=True))
    prompt = cluster.workload.prompt_tokens
    paths: dict[tuple[str, str], KvPath] = {}
    rates: dict[Hashable, float] = {}
    seconds: dict[str, list[float]] = {}
    for pair in itertools.permutations(groups, 2):
        source, target = groups[pair[0]], groups[pair[1]]
        if source.role is Role.DECODE or target.role is Role.PREFILL:
            continue
        route = network.route(source, target)
        parts: list[tuple[Hashable, float]] = [(link, size / prompt) for link, size in route.link_bytes]
        for (i, j), _ in route.link_bytes:
            rates[i, j] = max(cluster.links.bytes_per_s[i][j], 1.0)
        if route.inside_s > 0.0:
            parts.append((pair, cluster.kv_bytes_per_prompt_token))
            rates[pair] = cluster.kv_bytes / (LINK_SHARE * route.inside_s)
        paths[pair] = KvPath(tuple(parts), cluster.links.latency_s if route.link_bytes else 0.0)
        seconds.setdefault(pair[1], []).append(1.0 / route.capacity)
    servers = []
    for name, group in groups.items():
        own = seconds.get(name, [cluster.kv_bytes / 5e9])
        transfer = KvLink(
            Connector.NIXL,
            lease_s=KV_LEASE_S,
            bytes_per_token=cluster.kv_bytes_per_prompt_token,
            bandwidth_bytes_per_s=cluster.kv_bytes / max(1e-9, math.fsum(own) / len(own)),
            latency_s=cluster.links.latency_s,
        )
        engine = engine_of(cost.profile(group.stages, group.kv_cache_tokens, group.role))
        servers.append(SimulatedServer(name, engine, group.role, transfer if plan.splits else None))
    return servers, KvLinks(rates, paths)


def simulate_plan(
    cluster: SplitCluster,
    plan: SplitPlan,
    cost: ProfileCost,
    *,
    policy: str = "hetlb",
    rate: float | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Simulated:
    """Simulate `count` requests under a policy and return the figures. `rate` is in requests/s."""
    servers, links = make_servers(cluster, plan, cost)
    offered = plan.throughput * OVERLOAD if rate is None else rate
    number = count or round(min(_MOST_REQUESTS, max(_LEAST_REQUESTS, _wanted(cluster, plan))))
    rng = random.Random(seed)
    rows = list(cluster.workload.rows)
    drawn = [rng.choice(rows) for _ in range(number)] if len(rows) > 1 else rows * number
    planned = arrivals(drawn, offered, rng)
    outputs = [output for _, output in rows]
    result = run_fleet(servers, planned, outputs, policy=policy, links=links, seed=seed)
    return _measure(result.records, cluster.workload, result.transfers)


#: A plan and its simulated rates.
Judged: TypeAlias = tuple[SplitPlan, Simulated]


def judge(
    cluster: SplitCluster,
    plans: Sequence[SplitPlan],
    cost: ProfileCost,
    limits: SolveLimits,
    *,
    seed: int = 0,
) -> list[Judged]:
    """Return plans by simulated throughput, the best first; no more than time allows."""
    judged: list[Judged] = []
    with suppress(StoppedError), limits.stopping():
        judged.extend((plan, simulate_plan(cluster, plan, cost, seed=seed)) for plan in plans)
    return sorted(judged, key=lambda each: -each[1].request_throughput)


def choose(
    cluster: SplitCluster, found: SplitsFound, limits: SolveLimits, count: int
) -> tuple[SplitPlan, dict[str, Any]]:
    """Return the best of `count` plans in simulation, else the first; figures of it and without splitting."""
    best, colocated = found.plans[0], found.colocated
    figures: dict[str, Any] = {
        "simulated": None,
        "colocated": None if colocated is None else {"throughput_req_s": colocated.throughput},
    }
    if count == 0 or limits.over or _wanted(cluster, best) > 2 * _MOST_REQUESTS:
        return best, figures
    cost = ProfileCost(cluster)
    judged = judge(cluster, candidates(found.plans, count), cost, limits, seed=limits.seed)
    if colocated is not None:
        # At the load of the best split plan, its limit is what it serves.
        rate = OVERLOAD * max(best.throughput, colocated.throughput)
        with suppress(StoppedError), limits.stopping():
            by_policy = {
                policy: simulate_plan(cluster, colocated, cost, policy=policy, rate=rate, seed=limits.seed)
                for policy in ("hetlb", "rr")
            }
            judged.append((colocated, by_policy["hetlb"]))
            figures["colocated"]["simulated"] = {
                policy: each.request_throughput for policy, each in by_policy.items()
            }
    if not judged:
        return best, figures
    chosen, result = simplest(judged)
    figures["simulated"] = {
        "request_throughput": result.request_throughput,
        "output_throughput": result.output_throughput,
        "mean_ttft_ms": result.ttft_s * 1e3,
        "mean_tpot_ms": result.tpot_s * 1e3,
        "policy": "hetlb",
        "requests": result.requests,
        "candidates": [
            {"throughput_req_s": plan.throughput, "simulated_req_s": each.request_throughput}
            for plan, each in judged
        ],
    }
    return chosen, figures


def simplest(judged: Sequence[Judged]) -> Judged:
    """Return the simplest of the plans that serve nearly the most in simulation."""

    def worth(each: Judged) -> float:
        return each[1].request_throughput * (_SPLIT_WEIGHT if each[0].splits else 1.0)

    most = max(map(worth, judged))
    able = [each for each in judged if worth(each) >= _AS_GOOD_SHARE * most]
    return min(able, key=lambda each: (complexity(each[0]), -worth(each)))


def complexity(plan: SplitPlan) -> tuple[int, int, bool]:
    """Return the number of commands that were never run, the GPUs of the largest server, and if it splits."""
    connector = NIXL if plan.splits else None
    untried = sum(fact_of(group.form(connector)).status is not Status.RUN for group in plan.groups)
    largest = max(sum(n for _, n in group.composition) for group in plan.groups)
    return untried, largest, plan.splits


def candidates(plans: Sequence[SplitPlan], count: int) -> list[SplitPlan]:
    """Return plans to simulate: the best by capacity, and the simplest among equally good ones."""
    able = [plan for plan in plans if plan.throughput >= _AS_GOOD_SHARE * plans[0].throughput]
    simple = min(able, key=lambda plan: (complexity(plan), -plan.throughput))
    found = different(plans, count)
    return found if any(plan is simple for plan in found) else different([*found[: count - 1], simple], count)


def why_nothing(cluster: SplitCluster) -> str:
    """Return one line with the missing memory if no group holds the model."""
    room = sum(machine.gpus * max(0.0, machine.usable_bytes) for machine in cluster.machines)
    need = cluster.model.weight_bytes + cluster.model.known.allocated.of(cluster.workload.longest_tokens)
    words = (
        f"{need / 1e9:.4g} GB for {cluster.model.name} and one request of {cluster.workload.longest_tokens}"
    )
    if room < need:
        return f"machines: expected GPU memory of at least {words} tokens, got {room / 1e9:.4g} GB"
    return f"machines: expected a group of up to 16 GPUs with {words} tokens within the SLO, got none"


def different(plans: Sequence[SplitPlan], count: int) -> list[SplitPlan]:
    """Return the first `count` different plans; groups swapped between similar machines do not count."""
    found: dict[object, SplitPlan] = {}
    for plan in plans:
        shape = tuple(
            sorted(
                (str(g.role), g.tensor_parallel_size, round(g.capacity, 9), g.kv_cache_tokens)
                for g in plan.groups
            )
        )
        if len(found) < count:
            found.setdefault(shape, plan)
    return list(found.values())


def _wanted(cluster: SplitCluster, plan: SplitPlan) -> float:
    """Return the requests of a run long enough for every group to be full for most of it."""
    context = cluster.workload.context_tokens
    stay_s = max(
        min(256.0, group.kv_cache_tokens / cluster.model.needed(context)) / group.capacity
        for group in plan.groups
        if group.role is not Role.PREFILL
    )
    return _RUN_STAYS * stay_s * plan.throughput


def _measure(records: Sequence[RequestResult], workload: RequestLengths, transfers: int) -> Simulated:
    steady = steady_figures(records, from_share=_FROM_SHARE)
    arrived = [r for r in records if r.ok and r.scheduled_s >= steady["from_s"]]
    ttft = [r.ttft_s for r in arrived if r.ttft_s is not None]
    tpot = [r.tpot_s for r in arrived if r.tpot_s is not None]
    served = steady["request_throughput"]
    return Simulated(
        served,
        served * workload.output_tokens,
        math.fsum(ttft) / max(1, len(ttft)),
        math.fsum(tpot) / max(1, len(tpot)),
        transfers,
        len(records),
    )
