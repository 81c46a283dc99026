"""Re-verifies a plan from the inputs alone: memory, instance counts, completeness and order.

Promise: nothing is taken from the search but its answer; a plan that breaks a constraint raises `PlanError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hetlb.core.stages import SINK, SOURCE, Hop, StageNetwork
from hetlb.errors import PlanError
from hetlb.plan.placement.cluster import Cluster, Placement
from hetlb.plan.placement.flow import Flow
from hetlb.plan.tp_search import Machine, MachinePlan, Option, PlanModel


def check(model: PlanModel, machines: Sequence[Machine], plans: Sequence[MachinePlan]) -> None:
    """Raise `PlanError` unless `plans` is a correct ranking of every machine."""
    if [plan.machine for plan in plans] != list(machines):
        raise PlanError("plan: expected one ranking per machine in the order of the file")
    for plan in plans:
        machine = plan.machine
        divisors = {d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0}
        listed = [option.tensor_parallel_size for option in plan.ranking]
        if set(listed) != divisors or len(listed) != len(divisors):
            raise PlanError(
                f"{machine.name}: expected each of the degrees {sorted(divisors)} once, got {listed}"
            )
        for option in plan.ranking:
            _check_option(model, machine, option)
        order = [(not option.feasible, -option.throughput_tok_s) for option in plan.ranking]
        if order != sorted(order):
            raise PlanError(f"{machine.name}: expected the highest throughput first and the infeasible last")


def _check_option(model: PlanModel, machine: Machine, option: Option) -> None:
    where = f"{machine.name}, degree {option.tensor_parallel_size}"
    if option.instances * option.tensor_parallel_size != machine.gpus:
        raise PlanError(f"{where}: expected all {machine.gpus} GPUs used, got {option.instances} instances")
    usable = Fraction(repr(machine.gpu_memory_utilization)) * machine.memory_bytes
    weights = Fraction(repr(model.parameters)) * Fraction(repr(model.bytes_per_parameter))
    room = option.tensor_parallel_size * (usable - machine.reserved_bytes_per_gpu) - weights
    need = model.kv_bytes_per_token * (model.max_input_tokens + model.max_output_tokens)
    tokens = max(0, room // model.kv_bytes_per_token)
    if option.kv_cache_tokens != tokens:
        raise PlanError(f"{where}: expected {tokens} KV tokens, got {option.kv_cache_tokens}")
    profiled = option.tensor_parallel_size in {degree for degree, _ in machine.profiles}
    if option.feasible != (room >= need and profiled):
        raise PlanError(f"{where}: expected feasible to be {room >= need and profiled}")
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
