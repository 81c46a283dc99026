"""The same money spent otherwise: one kind of GPU, one degree, no pipelines, other divisions of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetlb.tools.plan.highs import INFINITY
from hetlb.tools.plan.rent_program import Configuration, Problem, RentPlan, SolvedPlan


def baselines(
    planned: SolvedPlan, solved: Callable[[Problem], RentPlan | None], ties: Sequence[Configuration] = ()
) -> dict[str, dict[str, float]]:
    """Return the same budget (or target) spent otherwise, each planned by `solved` as the plan itself was.

    `ties` are the table's: one degree for all takes them, too.
    """
    problem, plan, every = planned.problem, planned.plan, planned.problem.configurations
    tied = (*every, *ties)
    of_gpu = {
        gpu: replace(problem, configurations=tuple(c for c in every if set(c.gpus) == {gpu}))
        for gpu in sorted({gpu for c in every for gpu in c.gpus})
    }
    of_degree = by_degree(replace(problem, configurations=tied))
    variants = {"homogeneous ({})": of_gpu}
    if any(len(c.stages) > 1 for c in every):
        variants["without pipelines"] = {"": without_pipelines(problem)}
    if problem.budget_per_hour < INFINITY or problem.request_rate:
        variants["homogeneous ({}), any number"] = {
            gpu: replace(each, available={gpu: INFINITY}) for gpu, each in of_gpu.items()
        }
    variants |= {"uniform composition": {"": uniform(problem)}, "one TP for all ({})": of_degree}
    found = {}
    for label, options in variants.items():
        plans = [(name, each) for name, option in options.items() if (each := solved(option))]
        if plans:
            name, best = max(plans, key=lambda each: problem.worth(each[1]))
            found[label.format(name)] = best.throughput, best.cost_per_hour
    found["round robin over the plan"] = round_robin_rate(problem, plan.counts), plan.cost_per_hour
    found["in proportion over the plan"] = proportional_rate(problem, plan.counts), plan.cost_per_hour
    return {label: {"throughput_req_s": rate, "cost_per_hour": cost} for label, (rate, cost) in found.items()}


def by_degree(problem: Problem) -> dict[str, Problem]:
    """Return the problem with one tensor-parallel degree for all instances, for each degree."""
    single = [c for c in problem.configurations if c.stages and c.stages[0].data_parallel_size == 1]
    degrees = sorted({c.stages[0].tensor_parallel_size for c in single})
    return {
        f"TP {degree}": replace(
            problem,
            configurations=tuple(c for c in single if c.stages[0].tensor_parallel_size == degree),
        )
        for degree in degrees
    }


def without_pipelines(problem: Problem) -> Problem:
    """Return the problem with instances of one stage alone."""
    return replace(problem, configurations=tuple(c for c in problem.configurations if len(c.stages) <= 1))


def uniform(problem: Problem) -> Problem:
    """Return the budget divided evenly over the available kinds of GPUs."""
    gpus = {gpu for c in problem.configurations for gpu in c.gpus}
    if problem.budget_per_hour == INFINITY:
        return problem
    part, available = problem.budget_per_hour / len(gpus), {}
    for gpu in sorted(gpus):
        price = problem.prices[gpu]
        available[gpu] = min(problem.available.get(gpu, 0), part // price if price > 0 else INFINITY)
    return replace(problem, available=available)


def round_robin_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Return the requests/s if each instance of a model gets equally many of each type.

    The slowest instance decides.
    """
    rate = INFINITY
    for model in problem.models:
        own = [c for c in problem.configurations if c.model == model and counts.get(c.name, 0) > 0]
        number = sum(counts[c.name] for c in own)
        for c in own:
            load = c.load({w.name: w.share / number for w in problem.workloads if w.model == model})
            rate = min(rate, 1.0 / load if load > 0 else INFINITY)
    return rate if rate < INFINITY else 0.0


def proportional_rate(problem: Problem, counts: Mapping[str, int]) -> float:
    """Return the requests/s if each type is divided in proportion to the instances' rates on it.

    The rule of the paper's example (section 4.2): time = sum over types of requests / sum of rates.
    """
    rate = INFINITY
    for model in problem.models:
        seconds = 0.0
        for workload in problem.workloads:
            if workload.model == model:
                total = math.fsum(
                    c.throughput.get(workload.name, 0.0) * counts.get(c.name, 0)
                    for c in problem.configurations
                )
                seconds += workload.share / total if total > 0 else INFINITY
        rate = min(rate, 1.0 / seconds if seconds > 0 else INFINITY)
    return rate
