"""Re-verifies plans from the inputs alone: memory, counts, completeness and order; limits, rates and cost.

Nothing is taken from the search but its answer; a plan that breaks a constraint raises `PlanError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from scipy.optimize import linprog

from hetlb.core.paths.stages import SINK, SOURCE, Hop, StageNetwork
from hetlb.errors import PlanError
from hetlb.plan.model_shape import refusal
from hetlb.plan.placement.cluster import Cluster, Placement
from hetlb.plan.placement.flow import Flow
from hetlb.plan.rent import Configuration, Plan, Problem
from hetlb.plan.tp_search import Machine, MachinePlan, Option, PlanModel


def check(model: PlanModel, machines: Sequence[Machine], plans: Sequence[MachinePlan]) -> None:
    """Raise `PlanError` unless `plans` is a correct ranking of every machine."""
    if [plan.machine for plan in plans] != list(machines):
        raise PlanError("plan: expected one ranking per machine in the order of the file")
    for plan in plans:
        machine = plan.machine
        expected = {d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0}
        expected |= {degree for degree, _ in machine.profiles}
        listed = [option.tensor_parallel_size for option in plan.ranking]
        if set(listed) != expected or len(listed) != len(expected):
            raise PlanError(
                f"{machine.name}: expected each of the degrees {sorted(expected)} once, got {listed}"
            )
        for option in plan.ranking:
            _check_option(model, machine, option)
        order = [(not option.feasible, -option.throughput_tok_s) for option in plan.ranking]
        if order != sorted(order):
            raise PlanError(f"{machine.name}: expected the highest throughput first and the infeasible last")


def _check_option(model: PlanModel, machine: Machine, option: Option) -> None:
    where = f"{machine.name}, degree {option.tensor_parallel_size}"
    if option.instances != machine.gpus // option.tensor_parallel_size:
        raise PlanError(
            f"{where}: expected as many as fit {machine.gpus} GPUs, got {option.instances} instances"
        )
    usable = Fraction(repr(machine.gpu_memory_utilization)) * machine.memory_bytes
    weights = Fraction(repr(model.parameters)) * Fraction(repr(model.bytes_per_parameter))
    room = option.tensor_parallel_size * (usable - machine.reserved_bytes_per_gpu) - weights
    need = model.kv_bytes_per_token * (model.max_input_tokens + model.max_output_tokens)
    tokens = max(0, room // model.kv_bytes_per_token)
    if option.kv_cache_tokens != tokens:
        raise PlanError(f"{where}: expected {tokens} KV tokens, got {option.kv_cache_tokens}")
    profiled = option.tensor_parallel_size in {degree for degree, _ in machine.profiles}
    accepted = model.shape is None or not refusal(model.shape, option.tensor_parallel_size)
    if option.feasible != (room >= need and profiled and accepted):
        raise PlanError(f"{where}: expected feasible to be {room >= need and profiled and accepted}")
    if option.feasible != (option.throughput_tok_s > 0):
        raise PlanError(f"{where}: expected a throughput above 0 if and only if it is feasible")
    if option.feasible == bool(option.reason):
        raise PlanError(f"{where}: expected a reason if and only if it is infeasible")
    missing = max(Fraction(0), need - room)
    if not missing <= option.missing_bytes < missing + 1:
        raise PlanError(
            f"{where}: expected about {float(missing):.0f} bytes missing, got {option.missing_bytes}"
        )


def check_placement(
    cluster: Cluster, placement: Placement, flow: Flow, bound: float, *, partial_inference: bool
) -> None:
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
    slack = 1e-5 * max(1.0, flow.tokens_per_s)  # what a solver rounds
    into = dict.fromkeys(nodes, 0.0)
    out = dict.fromkeys(nodes, 0.0)
    entered = left = 0.0
    for (sender, receiver), rate in flow.links.items():
        where = f"{sender} to {receiver}"
        link = cluster.links.get((sender, receiver))
        if link is None or not 0.0 < rate <= cluster.link_rate((sender, receiver), link) + slack:
            raise PlanError(f"{where}: expected a link with room for {rate} tokens/s")
        if not _continues(placement, layers, sender, receiver, partial_inference=partial_inference):
            raise PlanError(f"{where}: expected the layers behind those of {sender}")
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


def _continues(
    placement: Placement, layers: int, sender: str, receiver: str, *, partial_inference: bool
) -> bool:
    if sender == SOURCE:
        return placement[receiver][0] == 0
    if receiver == SINK:
        return placement[sender][1] == layers
    at, (first, end) = placement[sender][1], placement[receiver]
    return first == at or (partial_inference and first < at < end)


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


# --- what to rent ---------------------------------------------------------------------------------------

#: What floating point may add to a sum of rates or prices.
_ROUNDING = 1e-6


def check_rent(problem: Problem, plan: Plan) -> None:
    """Raise `PlanError` unless the plan keeps every limit and serves what it says, by the inputs alone."""
    known = {c.name: c for c in problem.configurations}
    for name, count in plan.counts.items():
        if name not in known:
            raise PlanError(f"plan: {name}: expected a configuration of the problem")
        if not isinstance(count, int) or count < 1:
            raise PlanError(f"plan: {name}: expected a number of instances from 1, got {count!r}")
    cost = sum(known[name].price_per_hour * count for name, count in plan.counts.items())
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


def _check_rates(problem: Problem, plan: Plan, known: Mapping[str, Configuration]) -> None:
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
    """The fewest instances that serve these rates, by scipy and not by the planner's own program."""
    if not configuration.mixes:
        return configuration.load(rates)
    names = sorted(rates)
    modes = configuration.modes
    matrix = [[-mode.get(name, 0.0) for mode in modes] for name in names]
    found = linprog([1.0] * len(modes), A_ub=matrix, b_ub=[-rates[name] for name in names])
    return float(found.fun) if found.status == 0 else float("inf")
