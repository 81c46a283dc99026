"""One placement from start to end: bound, search, simulation and failures, each within its share of the time.

At every moment there is a best plan so far: the time limit and an interrupt end whatever is running, and
what is known by then is the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hetlb.errors import PlanError
from hetlb.plan.check import check_placement
from hetlb.plan.highs import SolveLimits
from hetlb.plan.placement.estimate import Estimator
from hetlb.plan.placement.even_flow import balanced_flow
from hetlb.plan.placement.failures import Loss, losses
from hetlb.plan.placement.flow import max_flow, pipelines
from hetlb.plan.placement.flow_bounds import flow_bound
from hetlb.plan.placement.heuristics import Intervals, petals, separate_pipelines, swarm
from hetlb.plan.placement.place_cluster import PlaceCluster
from hetlb.plan.placement.place_deploy import advice, stage_commands, vllm_plan
from hetlb.plan.placement.place_search import PlacementCandidate, PlacementSearch
from hetlb.plan.placement.simulator import PlacementSimulator
from hetlb.sim.pipelines import PipelineResult

#: Shares of the time for the bound, and by the end of which the search ends; the rest is for failures.
_BOUND_SHARE, _SEARCH_SHARE = 0.1, 0.9
#: The same with a placement given: there is no search.
_GIVEN_SHARE = 0.7

OnPhase = Callable[[str, PlacementCandidate | None], object]


@dataclass
class PlacePlan:
    """A placement with what is known of it. `baselines` by the name of their rule."""

    cluster: PlaceCluster
    simulator: PlacementSimulator
    chosen: PlacementCandidate
    bound: float
    highest_flow: PlacementCandidate | None = None
    result: PipelineResult | None = None
    losses: list[Loss] = field(default_factory=list)
    baselines: dict[str, Intervals] = field(default_factory=dict)
    interrupted: bool = False


def plan_placement(
    cluster: PlaceCluster,
    simulator: PlacementSimulator,
    limits: SolveLimits,
    *,
    lengths: list[tuple[int, int]],
    simulate_s: float | None = None,
    given: Intervals | None = None,
    on_phase: OnPhase | None = None,
) -> PlacePlan:
    """Search for a placement, or evaluate a given one. Raises `PlanError` where no token gets through."""
    seconds, partial = limits.left_s, simulator.partial_inference
    bound = flow_bound(cluster, limits.within(_BOUND_SHARE * seconds))
    searching = limits.within((_GIVEN_SHARE if given is not None else _SEARCH_SHARE) * seconds)
    highest = None
    if given is not None:
        chosen = PlacementCandidate(given, balanced_flow(cluster, given, partial_inference=partial))
    else:
        search = PlacementSearch(
            cluster,
            Estimator(cluster, lengths),
            None if simulate_s is None else simulator.judge(simulate_s),
            partial_inference=partial,
            bound=bound,
            progress=on_phase,
        )
        found = search.run(searching)
        if not found.candidates:
            if limits.interrupted:
                raise KeyboardInterrupt
            raise PlanError("expected a way from source through all layers to sink, got none")
        chosen, highest, bound = found.best, found.highest_flow, found.bound
    check_placement(cluster, chosen.placement, chosen.flow, bound, partial_inference=partial)
    plan = PlacePlan(cluster, simulator, chosen, bound, highest, baselines=_baselines(cluster, limits.seed))
    if simulate_s is not None:
        plan.result = simulator.result_of(chosen.placement)
        if plan.result is None:
            plan.result = simulator.run(chosen.placement, chosen.flow, simulate_s, searching)
    if not limits.interrupted:
        plan.losses = losses(cluster, chosen.placement, limits, partial_inference=partial)
    plan.interrupted = limits.interrupted
    return plan


def _baselines(cluster: PlaceCluster, seed: int) -> dict[str, Intervals]:
    found = {
        "swarm": swarm(cluster),
        "separate-pipelines": separate_pipelines(cluster),
        "petals": petals(cluster, random.Random(seed)),
    }
    return {name: placement for name, placement in found.items() if placement is not None}


def document_of(plan: PlacePlan, *, scheduler: str, load: str, solve_s: float, folder: str) -> dict[str, Any]:
    """The figures of the contract, and what they rest on under further keys."""
    cluster, flow, partial = plan.cluster, plan.chosen.flow, plan.simulator.partial_inference
    simulated = None
    if plan.result is not None:
        simulated = {
            "scheduler": scheduler,
            "load": load,
            "seconds": plan.result.window_s,
            **plan.result.document(),
        }
    highest = plan.highest_flow
    vllm = vllm_plan(cluster, plan.chosen.placement, flow, plan.baselines.get("separate-pipelines"))
    return {
        "max_flow_tokens_per_s": flow.tokens_per_s,
        "upper_bound_tokens_per_s": plan.bound,
        "gap": plan.bound / flow.tokens_per_s - 1.0 if flow.tokens_per_s else None,
        "partial_inference": partial,
        "placement": {name: list(interval) for name, interval in plan.chosen.placement.items()},
        "flows": [
            {"from": sender, "to": receiver, "tokens_per_s": rate}
            for (sender, receiver), rate in flow.links.items()
        ],
        "pipelines": [
            {"nodes": list(pipeline.nodes), "tokens_per_s": pipeline.tokens_per_s}
            for pipeline in pipelines(flow)
        ],
        "simulated": simulated,
        "highest_flow": None
        if highest is None
        else {
            "max_flow_tokens_per_s": highest.flow.tokens_per_s,
            "placement": {name: list(interval) for name, interval in highest.placement.items()},
        },
        "baselines": {
            name: {
                "max_flow_tokens_per_s": max_flow(
                    cluster, placement, partial_inference=partial or name == "petals"
                ).tokens_per_s
            }
            for name, placement in plan.baselines.items()
        },
        "losses": [_loss_document(loss) for loss in plan.losses],
        "solve_s": solve_s,
        "interrupted": plan.interrupted,
        "commands": stage_commands(cluster, plan.chosen.placement, folder),
        "vllm": vllm,
        "advice": advice(flow.tokens_per_s, vllm),
    }


def _loss_document(loss: Loss) -> dict[str, Any]:
    move = loss.move
    return {
        "nodes": list(loss.nodes),
        "tokens_per_s": loss.tokens_per_s,
        "move": None
        if move is None
        else {
            "node": move.node,
            "layers": [move.first, move.end],
            "loaded": move.loaded,
            "tokens_per_s": move.tokens_per_s,
        },
    }
