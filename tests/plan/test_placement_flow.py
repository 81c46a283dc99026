"""Maximum flows of placements against a linear program, Helix's figures and their own conservation laws."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.clusters import (
    HELIX,
    helix_cluster,
    helix_expected,
    kind,
    needs_helix,
    random_cluster,
    random_placement,
    small_cluster,
)
from scipy.optimize import linprog

from hetlb.errors import PlanError
from hetlb.tools.paths.stages import SINK, SOURCE
from hetlb.tools.plan.check import check_placement
from hetlb.tools.plan.placement.flow import Flow, PlacementFlows, max_flow, pipelines
from hetlb.tools.plan.placement.flow_bounds import compute_bound, flow_bound
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.tools.plan.placement.place_files import load_placement


def flow_by_linear_program(cluster: PlaceCluster, placement: Placement, *, partial: bool) -> float:
    """The same flow from the definition: one variable per valid link, nodes as constraints."""
    layers = cluster.model.layers
    edges = []
    for sender, receiver in cluster.links:
        if sender == SOURCE:
            valid = receiver in placement and placement[receiver][0] == 0
        elif receiver == SINK:
            valid = placement[sender][1] == layers
        else:
            at, (first, end) = placement[sender][1], placement[receiver]
            valid = first == at or (partial and first < at < end)
        if valid:
            edges.append((sender, receiver))
    if not edges:
        return 0.0
    names = [node.name for node in cluster.nodes]
    conservation = np.zeros((len(names), len(edges)))
    throughput = np.zeros((len(names), len(edges)))
    for column, (sender, receiver) in enumerate(edges):
        for row, name in enumerate(names):
            conservation[row, column] = (receiver == name) - (sender == name)
            throughput[row, column] = receiver == name
    rates = [
        cluster.kind(node).rate(placement[node.name][1] - placement[node.name][0]) for node in cluster.nodes
    ]
    most = sum(rates)
    answer = linprog(
        [-float(sender == SOURCE) for sender, _ in edges],
        A_ub=throughput,
        b_ub=rates,
        A_eq=conservation,
        b_eq=np.zeros(len(names)),
        bounds=[(0.0, min(most, cluster.link_rate(edge))) for edge in edges],
    )
    return -float(answer.fun)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10**6), partial=st.booleans())
def test_the_flow_equals_the_linear_program_and_obeys_all_capacities(seed: int, partial: bool) -> None:
    rng = random.Random(seed)
    cluster = random_cluster(rng, nodes=rng.randint(3, 9), layers=rng.randint(3, 6))
    cluster = replace(cluster, partial_inference=partial)
    placement = random_placement(rng, cluster)
    flow = max_flow(cluster, placement)
    expected = flow_by_linear_program(cluster, placement, partial=partial)
    assert flow.tokens_per_s == pytest.approx(expected, rel=1e-7, abs=1e-7)
    bound = flow_bound(cluster)
    assert bound <= compute_bound(cluster) * (1.0 + 1e-9)
    check_placement(cluster, placement, flow, bound)
    balanced = PlacementFlows(cluster).balanced(placement)
    check_placement(cluster, placement, balanced, bound)
    for each in (flow, balanced):
        found = pipelines(each)
        assert sum(path.tokens_per_s for path in found) == pytest.approx(
            each.tokens_per_s, rel=1e-4, abs=1e-6
        )
        for path in found:
            ends = [placement[name][1] for name in path.nodes]
            assert ends == sorted(ends)
            assert ends[-1] == cluster.model.layers


@needs_helix
@pytest.mark.parametrize("name", ["single24", "dist24", "cluster10"])
def test_helix_flows_are_exact(name: str) -> None:
    cluster, pruned = helix_cluster(name), helix_cluster(name, pruned=True)
    for entry in helix_expected(name)["placements"].values():
        placement = load_placement(HELIX / name / entry["file"], cluster)
        for rule, expected in entry["max_flow_tokens_per_s"].items():
            of = pruned if rule.endswith("pruned_links") else cluster
            flow = max_flow(replace(of, partial_inference=rule == "partial_on"), placement)
            assert abs(flow.tokens_per_s - expected) < 1e-9, (entry["file"], rule)
    stated = helix_expected(name)["compute_upper_bound_tokens_per_s"]
    assert compute_bound(cluster) == pytest.approx(stated, abs=1e-9)


def test_replicas_share_a_balanced_flow_by_speed() -> None:
    # One machine that all pass, then three replicas: any of them could carry the whole flow.
    cluster = small_cluster(
        ["head", "tail", "tail", "wide"],
        [kind("head", [90.0]), kind("tail", [100.0]), kind("wide", [200.0])],
        2,
    )
    placement = {"n0": (0, 1), "n1": (1, 2), "n2": (1, 2), "n3": (1, 2)}
    flow = PlacementFlows(cluster).balanced(placement)
    assert flow.tokens_per_s == pytest.approx(90.0)
    assert flow.through("n1") == pytest.approx(22.5, rel=1e-3)
    assert flow.through("n3") == pytest.approx(45.0, rel=1e-3)


def test_a_plan_that_breaks_a_rule_is_found() -> None:
    cluster = small_cluster(["a", "a"], [kind("a", [10.0, 5.0])], 2)
    placement = {"n0": (0, 1), "n1": (1, 2)}
    flow = max_flow(cluster, placement)
    check_placement(cluster, placement, flow, 100.0)
    broken: list[tuple[Placement, Flow, float]] = [
        ({"n0": (0, 1), "n1": (0, 3)}, flow, 100.0),
        ({"n0": (0, 1), "n1": (0, 2)}, flow, 100.0),
        (placement, Flow(flow.tokens_per_s, {**flow.links, (SOURCE, "n0"): 20.0}), 100.0),
        (placement, Flow(30.0, flow.links), 100.0),
        (placement, Flow(flow.tokens_per_s, {**flow.links, ("n0", SINK): 1.0}), 100.0),
        (placement, flow, 5.0),
    ]
    for wrong_placement, wrong_flow, bound in broken:
        with pytest.raises(PlanError):
            check_placement(cluster, wrong_placement, wrong_flow, bound)
