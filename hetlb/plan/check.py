"""Re-verifies a plan from the inputs alone: memory, instance counts, completeness and order.

Promise: nothing is taken from the search but its answer; a plan that breaks a constraint raises `PlanError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hetlb.errors import PlanError
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
