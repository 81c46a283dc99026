"""Re-verifies plans from the inputs alone: memory, counts, completeness and order; limits, rates and cost.

Nothing is taken from the search but its answer; a plan that breaks a constraint raises `PlanError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import scipy  # its modules load at their first use: they take half a second

from hetlb.errors import PlanError
from hetlb.tools.models.degrees import refusal
from hetlb.tools.paths.stages import SINK, SOURCE, Hop, StageNetwork
from hetlb.tools.plan.cluster import Cluster
from hetlb.tools.plan.common.capabilities import fact_of, refused
from hetlb.tools.plan.common.plan_tables import Machine
from hetlb.tools.plan.disaggregation.split_cluster import (
    GroupStage,
    Role,
    ServerGroup,
    SplitCluster,
    SplitPlan,
)
from hetlb.tools.plan.placement.flow import Flow
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.tools.plan.rent_program import Configuration, Problem, RentPlan
from hetlb.tools.plan.tp_search import NOT_MEASURED, Option, Rankings


def check(cluster: Cluster, rankings: Rankings) -> None:
    """Raise `PlanError` unless every kind of machine has a correct ranking."""
    kinds = {machine.kind: machine for machine in cluster.machines}
    if kinds.keys() != rankings.keys():
        raise PlanError("plan: expected one ranking per kind of machine")
    for kind, machine in kinds.items():
        ranking = rankings[kind]
        expected = {d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0}
        expected |= machine.profiles.keys()
        whole = [option.part for option in ranking if option.part.data_parallel_size > 1]
        listed = [option.part.gpus for option in ranking if option.part.data_parallel_size == 1]
        if len(set(whole)) < len(whole) or not machine.ranked.keys() <= {part.ranks for part in whole}:
            raise PlanError(f"{machine.name}: expected each data-parallel layout once, got {whole}")
        if set(listed) != expected or len(listed) != len(expected):
            raise PlanError(
                f"{machine.name}: expected each of the degrees {sorted(expected)} once, got {listed}"
            )
        for option in ranking:
            _check_option(cluster, machine, option)
        order = [
            (not option.feasible, -(machine.gpus // option.part.gpus) * option.throughput_tok_s)
            for option in ranking
        ]
        if order != sorted(order):
            raise PlanError(f"{machine.name}: expected the highest throughput first and the infeasible last")


def _check_option(cluster: Cluster, machine: Machine, option: Option) -> None:
    model = cluster.model
    degree, ranks = option.part.tensor_parallel_size, option.part.data_parallel_size
    where = f"{machine.name}, {option.part.name}"
    usable = Fraction(repr(machine.gpu_memory_utilization)) * machine.memory_bytes
    weights = Fraction(repr(model.parameters)) * Fraction(repr(model.bytes_per_parameter))
    if ranks > 1:  # each has the attention of its requests whole, and a part of the experts
        weights -= weights * model.known.expert_bytes / model.known.weight_bytes * Fraction(ranks - 1, ranks)
    room = degree * (usable - machine.reserved_bytes_per_gpu) - weights
    longest = cluster.limits.max_input_tokens + cluster.limits.max_output_tokens
    copies = Fraction(repr(model.known.replication(degree)))
    need = Fraction(repr(model.known.allocated.of(longest))) * copies
    tokens = ranks * max(0, room // (model.kv_bytes_per_token * copies))
    if option.memory.kv_cache_tokens != tokens:
        raise PlanError(f"{where}: expected {tokens} KV tokens, got {option.memory.kv_cache_tokens}")
    profiled = degree in machine.profiles if ranks == 1 else option.profile is not None
    stated = profiled and ranks == 1 and bool(machine.profiles[degree].engine.enable_expert_parallel)
    accepted = model.shape is None or any(
        not refusal(model.shape, degree, expert_parallel=whole)
        for whole in {stated, stated or bool(model.shape.experts)}
    )
    late = option.reason == NOT_MEASURED
    if option.feasible != (room >= need and profiled and accepted and not late):
        raise PlanError(f"{where}: expected feasible to be {room >= need and profiled and accepted}")
    if option.feasible != (option.throughput_tok_s > 0):
        raise PlanError(f"{where}: expected a throughput above 0 if and only if it is feasible")
    missing = max(Fraction(0), need - room)
    if not missing <= option.memory.missing_bytes < missing + 1:
        raise PlanError(
            f"{where}: expected about {float(missing):.0f} bytes missing, got {option.memory.missing_bytes}"
        )


def check_placement(cluster: PlaceCluster, placement: Placement, flow: Flow, bound: float) -> None:
    """Raise `PlanError` unless `flow` is a flow of `placement` within all capacities and below `bound`."""
    layers = cluster.model.layers
    nodes = {node.name: node for node in cluster.nodes}
    for name, (first, end) in placement.items():
        if name not in nodes:
            raise PlanError(f"{name}: expected a node of the cluster")
        if not (0 <= first < end <= layers and end - first <= cluster.most_layers(nodes[name])):
            raise PlanError(
                f"{name}: expected 1 to {cluster.most_layers(nodes[name])} layers, got [{first}, {end})"
            )
    slack = 1e-5 * max(1.0, flow.tokens_per_s)  # a solver's rounding
    into = dict.fromkeys(nodes, 0.0)
    out = dict.fromkeys(nodes, 0.0)
    entered = left = 0.0
    for (sender, receiver), rate in flow.links.items():
        where = f"{sender} to {receiver}"
        linked = (sender, receiver) in cluster.links
        if not linked or not 0.0 < rate <= cluster.link_rate((sender, receiver)) + slack:
            raise PlanError(f"{where}: expected a link with room for {rate} tokens/s")
        if not _continues(cluster, placement, sender, receiver):
            raise PlanError(f"{where}: expected the layers behind {sender}'s")
        if sender == SOURCE:
            entered += rate
        else:
            out[sender] += rate
        if receiver == SINK:
            left += rate
        else:
            into[receiver] += rate
    for name, node in nodes.items():
        held = placement.get(name)
        most = cluster.kind(node).rate(held[1] - held[0]) if held else 0.0
        if abs(into[name] - out[name]) > slack or into[name] > most + slack:
            raise PlanError(
                f"{name}: expected {into[name]} tokens/s in and out within {most}, got {out[name]} out"
            )
    if max(abs(entered - flow.tokens_per_s), abs(left - flow.tokens_per_s)) > slack:
        raise PlanError(
            f"the flow: expected {flow.tokens_per_s} tokens/s from the source to the sink, got {entered}"
        )
    if flow.tokens_per_s > bound + slack:
        raise PlanError(f"the flow: expected at most the bound {bound}, got {flow.tokens_per_s}")


def _continues(cluster: PlaceCluster, placement: Placement, sender: str, receiver: str) -> bool:
    if sender == SOURCE:
        return placement[receiver][0] == 0
    if receiver == SINK:
        return placement[sender][1] == cluster.model.layers
    at, (first, end) = placement[sender][1], placement[receiver]
    return first == at or (cluster.partial_inference and first < at < end)


def check_path(network: StageNetwork, hops: Sequence[Hop]) -> None:
    """Raise `PlanError` unless a path computes every layer once and in order, over links that exist."""
    stages = {stage.name: stage for stage in network.stages}
    at, sender = 0, SOURCE
    for hop in hops:
        stage = stages.get(hop.stage)
        if stage is None or not stage.first <= hop.first < hop.end <= stage.end:
            raise PlanError(f"{hop}: expected layers that the stage holds")
        if hop.first != at or (hop.first != stage.first and not network.partial_inference):
            raise PlanError(f"{hop}: expected to go on at layer {at}")
        if (sender, hop.stage) not in network.links:
            raise PlanError(f"{hop}: expected a link from {sender}")
        at, sender = hop.end, hop.stage
    if at != network.layers or (sender, SINK) not in network.links:
        raise PlanError(f"the path: expected to end behind layer {network.layers}, got {at}")


# --- renting ---------------------------------------------------------------------------------------------

#: Rounding error allowed in a sum of rates or prices.
_ROUNDING = 1e-6


def check_rent(problem: Problem, plan: RentPlan) -> None:
    """Raise `PlanError` unless the plan keeps every limit and serves its rates, by the inputs alone."""
    known = {c.name: c for c in problem.configurations}
    for name, count in plan.counts.items():
        if name not in known:
            raise PlanError(f"plan: {name}: expected a configuration of the problem")
        if not isinstance(count, int) or count < 1:
            raise PlanError(f"plan: {name}: expected a number of instances from 1, got {count!r}")
    cost = sum(
        problem.prices[gpu] * each * count
        for name, count in plan.counts.items()
        for gpu, each in known[name].gpus.items()
    )
    if abs(cost - plan.cost_per_hour) > _ROUNDING * max(1.0, cost):
        raise PlanError(f"plan: cost_per_hour: expected {cost:g}, got {plan.cost_per_hour:g}")
    if cost > problem.budget_per_hour * (1.0 + _ROUNDING):
        raise PlanError(f"plan: cost_per_hour: expected at most {problem.budget_per_hour:g}, got {cost:g}")
    used: dict[str, int] = {}
    for name, count in plan.counts.items():
        for gpu, each in known[name].gpus.items():
            used[gpu] = used.get(gpu, 0) + each * count
    for gpu, count in used.items():
        if count > problem.available.get(gpu, 0):
            raise PlanError(
                f"plan: {gpu}: expected at most {problem.available.get(gpu, 0):g} GPUs, got {count}"
            )
    _check_rates(problem, plan, known)
    if problem.request_rate is not None:
        if plan.throughput < problem.request_rate * (1.0 - _ROUNDING):
            raise PlanError(
                f"plan: throughput_req_s: expected at least {problem.request_rate:g}, got {plan.throughput:g}"
            )
        if plan.bound > cost * (1.0 + _ROUNDING):
            raise PlanError(f"plan: bound: expected at most the cost {cost:g}, got {plan.bound:g}")
    elif plan.bound < plan.throughput * (1.0 - _ROUNDING):
        raise PlanError(
            f"plan: bound: expected at least the throughput {plan.throughput:g}, got {plan.bound:g}"
        )


def _check_rates(problem: Problem, plan: RentPlan, known: Mapping[str, Configuration]) -> None:
    models = {workload.name: workload.model for workload in problem.workloads}
    by_configuration: dict[str, dict[str, float]] = {name: {} for name in plan.counts}
    for (workload, name), rate in plan.rates.items():
        if name not in plan.counts:
            raise PlanError(f"plan: {workload}: expected instances that are rented, got {name}")
        if known[name].model != models.get(workload):
            raise PlanError(f"plan: {workload}: expected instances of its model, got {name}")
        if not rate >= 0:
            raise PlanError(f"plan: {workload} on {name}: expected a rate from 0, got {rate}")
        by_configuration[name][workload] = rate
    for each in problem.workloads:
        served = sum(rate for (name, _), rate in plan.rates.items() if name == each.name)
        asked = each.share * plan.throughput
        if abs(served - asked) > _ROUNDING * max(1e-9, asked):
            raise PlanError(f"plan: {each.name}: expected {asked:g} requests/s, got {served:g}")
    for name, rates in by_configuration.items():
        load = _least_instances(known[name], rates)
        if load > plan.counts[name] * (1.0 + _ROUNDING):
            raise PlanError(
                f"plan: {name}: expected at most {plan.counts[name]} instances' worth of work, got {load:g}"
            )


def _least_instances(configuration: Configuration, rates: Mapping[str, float]) -> float:
    """Return the fewest instances that serve these rates, by scipy and not by the planner's own program."""
    if not configuration.mixes:
        return configuration.load(rates)
    names = sorted(rates)
    modes = configuration.modes
    matrix = [[-mode.get(name, 0.0) for mode in modes] for name in names]
    found = scipy.optimize.linprog([1.0] * len(modes), A_ub=matrix, b_ub=[-rates[name] for name in names])
    return float(found.fun) if found.status == 0 else float("inf")


# --- prefill here, decode there ---------------------------------------------------------------------------


def check_split(
    cluster: SplitCluster, plan: SplitPlan, capacity: Callable[[Sequence[GroupStage], Role, int], float]
) -> None:
    """Raise `PlanError` unless groups fit and flows keep every limit; `capacity` is the cost model's."""
    used: dict[int, int] = {}
    for g, group in enumerate(plan.groups):
        _check_group(cluster, f"group {g}", group, capacity)
        if plan.splits and refused(group.form()):
            raise PlanError(
                f"plan: group {g}: expected a server that works, got {fact_of(group.form()).source}"
            )
        for m, n in group.composition:
            used[m] = used.get(m, 0) + n
    for m, n in used.items():
        machine = cluster.machines[m]
        if n > machine.gpus:
            raise PlanError(f"plan: {machine.name}: expected at most {machine.gpus} GPUs, got {n}")
    load = dict(plan.served)
    for (sender, receiver), rate in plan.flows.items():
        roles = plan.groups[sender].role, plan.groups[receiver].role
        if roles != (Role.PREFILL, Role.DECODE) or not rate > 0.0:
            raise PlanError(
                f"plan: flow {sender} to {receiver}: expected requests/s from a prefill group to a decode "
                f"group, got {rate} from {roles[0]} to {roles[1]}"
            )
        load[sender] = load.get(sender, 0.0) + rate
        load[receiver] = load.get(receiver, 0.0) + rate
    for g, rate in load.items():
        if rate > plan.groups[g].capacity * (1.0 + _ROUNDING):
            raise PlanError(
                f"plan: group {g}: expected at most {plan.groups[g].capacity:g} requests/s, got {rate:g}"
            )
        if g in plan.served and plan.groups[g].role is not Role.BOTH:
            raise PlanError(f"plan: group {g}: expected the role both, got {plan.groups[g].role}")
    _check_kv_links(cluster, plan)


def _check_group(
    cluster: SplitCluster,
    where: str,
    group: ServerGroup,
    capacity: Callable[[Sequence[GroupStage], Role, int], float],
) -> None:
    layers = sum(stage.layers for stage in group.stages)
    if layers != cluster.model.layers or min(stage.layers for stage in group.stages) < 1:
        raise PlanError(
            f"plan: {where}: expected {cluster.model.layers} layers over its stages, got {layers}"
        )
    if len({stage.gpus for stage in group.stages}) != 1:
        raise PlanError(f"plan: {where}: expected one tensor-parallel degree for all stages")
    room: list[Fraction] = []
    for stage in group.stages:
        machine, share = cluster.machines[stage.machine], Fraction(stage.layers, cluster.model.layers)
        usable = Fraction(repr(machine.gpu_memory_utilization)) * machine.memory_bytes
        memory = stage.gpus * (usable - machine.reserved_bytes_per_gpu)
        weights = Fraction(repr(cluster.model.weight_bytes)) * share
        each = cluster.model.kv_bytes_at(stage.gpus // stage.ranks)
        if stage.ranks > 1:  # one rank: its GPUs, the attention of its requests, its part of the experts
            known = cluster.model.known
            memory /= stage.ranks
            weights -= (
                weights * known.expert_bytes / known.weight_bytes * Fraction(stage.ranks - 1, stage.ranks)
            )
        room.append((memory - weights) / (Fraction(repr(each)) * share))
    if group.kv_cache_tokens > min(room) * (1 + Fraction(1, 10**9)):
        raise PlanError(
            f"plan: {where}: expected room for at most {float(min(room)):.0f} KV tokens, "
            f"got {group.kv_cache_tokens}"
        )
    workload = cluster.workload
    longest = workload.longest_prompt + 1 if group.role is Role.PREFILL else workload.longest_tokens
    need = cluster.model.needed(longest)
    if group.kv_cache_tokens < need:
        raise PlanError(
            f"plan: {where}: expected room for a request that needs {need:g} tokens, "
            f"got {group.kv_cache_tokens}"
        )
    served = capacity(group.stages, group.role, group.kv_cache_tokens)
    if abs(served - group.capacity) > _ROUNDING * served:
        raise PlanError(f"plan: {where}: expected {served:g} requests/s, got {group.capacity:g}")


def _check_kv_links(cluster: SplitCluster, plan: SplitPlan) -> None:
    """Layer by layer: the stage that computed its KV cache sends it to the stage that decodes with it."""
    layer_bytes = cluster.model.known.kv_bytes(cluster.workload.prompt_tokens) / cluster.model.layers
    links: dict[tuple[int, int], float] = {}
    for (sender, receiver), rate in plan.flows.items():
        lanes: dict[tuple[int, int], float] = {}
        for one, other in zip(
            _stage_of_layers(plan.groups[sender]), _stage_of_layers(plan.groups[receiver]), strict=True
        ):
            a, b = plan.groups[sender].stages[one], plan.groups[receiver].stages[other]
            if a.machine != b.machine:
                link = a.machine, b.machine
                links[link] = links.get(link, 0.0) + rate * layer_bytes
            else:
                lanes[one, other] = lanes.get((one, other), 0.0) + rate * layer_bytes
        for (one, other), sent in lanes.items():
            a, b = plan.groups[sender].stages[one], plan.groups[receiver].stages[other]
            most = min(a.gpus, b.gpus) * cluster.links.bytes_per_s[a.machine][a.machine]
            if sent > most * (1.0 + _ROUNDING):
                name = cluster.machines[a.machine].name
                raise PlanError(f"plan: inside {name}: expected at most {most:g} bytes/s, got {sent:g}")
    for (i, j), sent in links.items():
        if sent > cluster.links.bytes_per_s[i][j] * (1.0 + _ROUNDING):
            raise PlanError(
                f"plan: {cluster.machines[i].name} to {cluster.machines[j].name}: expected at most "
                f"{cluster.links.bytes_per_s[i][j]:g} bytes/s, got {sent:g}"
            )


def _stage_of_layers(group: ServerGroup) -> list[int]:
    return [s for s, stage in enumerate(group.stages) for _ in range(stage.layers)]
