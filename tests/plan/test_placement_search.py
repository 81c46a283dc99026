"""Searches, bounds and the integer program against every placement of small clusters."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.clusters import (
    Steps,
    helix_cluster,
    kind,
    needs_helix,
    random_cluster,
    random_placement,
    small_cluster,
)

from hetlb.tools.paths.stages import SINK, SOURCE, Edge, LinkSpec
from hetlb.tools.plan.highs import Interrupt, SolveLimits
from hetlb.tools.plan.placement.block_columns import BlockChain
from hetlb.tools.plan.placement.estimate import Estimator
from hetlb.tools.plan.placement.flow import Flow, PlacementFlows, max_flow
from hetlb.tools.plan.placement.flow_bounds import flow_bound, highest_flow
from hetlb.tools.plan.placement.heuristics import chains, petals, separate_pipelines, swarm
from hetlb.tools.plan.placement.place_cluster import PlaceCluster, Placement
from hetlb.tools.plan.placement.place_plan import PlacementSimulator, PlacePlan, losses, plan_placement
from hetlb.tools.plan.placement.place_search import BASELINES, DOUBT_S, PlacementSearch, _classes
from hetlb.tools.sim.deadline import is_over

LENGTHS = [(100, 20), (50, 40)]


def steps(count: float, *, seed: int = 0, interrupt: Interrupt | None = None) -> SolveLimits:
    return SolveLimits(deadline=count, seed=seed, interrupt=interrupt, clock=Steps())


def best_of_all(cluster: PlaceCluster) -> float:
    layers = cluster.model.layers
    choices = [
        [(first, first + length) for length in range(1, cluster.most_layers(node) + 1)
         for first in range(layers - length + 1)]
        for node in cluster.nodes
    ]  # fmt: skip
    names = [node.name for node in cluster.nodes]
    return max(
        max_flow(cluster, dict(zip(names, intervals, strict=True))).tokens_per_s
        for intervals in itertools.product(*choices)
    )


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_the_integer_program_finds_the_best_placement(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [kind("x", [rng.uniform(50, 100), rng.uniform(20, 60)]), kind("y", [rng.uniform(10, 80)])]
    cluster = small_cluster([rng.choice("xy") for _ in range(4)], kinds, 3)
    best = best_of_all(cluster)
    proven, placement = highest_flow(cluster, SolveLimits(gap=1e-6), flow_bound(cluster))
    assert proven == pytest.approx(best, rel=1e-5, abs=1e-6)
    if best > 0.0:
        assert placement is not None
        assert max_flow(cluster, placement).tokens_per_s == pytest.approx(best, rel=1e-5)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_a_search_finds_the_best_placement_and_bounds_hold(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [kind("x", [rng.uniform(50, 100), rng.uniform(20, 60)]), kind("y", [rng.uniform(10, 80)])]
    cluster = small_cluster([rng.choice("xy") for _ in range(4)], kinds, 3)
    best = best_of_all(cluster)
    bound = flow_bound(cluster)
    assert best <= bound * (1.0 + 1e-9)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None, bound=bound).run(steps(4000.0))
    if best > 0.0:
        assert found.highest_flow.flow.tokens_per_s == pytest.approx(best, rel=1e-5)
        # The integer program proves it, whatever the bound was before.
        assert found.bound <= best * (1.0 + 2e-4)
    else:
        assert not found.candidates


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), partial=st.booleans())
def test_no_placement_exceeds_the_bound(seed: int, partial: bool) -> None:
    rng = random.Random(seed)
    cluster = random_cluster(rng, nodes=rng.randint(2, 10), layers=rng.randint(3, 8))
    cluster = replace(cluster, partial_inference=partial)
    bound = flow_bound(cluster)
    for _ in range(20):
        flow = max_flow(cluster, random_placement(rng, cluster))
        assert flow.tokens_per_s <= bound * (1.0 + 1e-9)


@needs_helix
def test_the_optimum_of_helix_small_cluster_is_proven() -> None:
    cluster = helix_cluster("cluster10")
    bound = flow_bound(cluster)
    assert bound == pytest.approx(286.5874097546421, rel=1e-8)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None, bound=bound).run(steps(40_000.0))
    assert found.highest_flow.flow.tokens_per_s == pytest.approx(286.5874097546421, abs=1e-9)


@needs_helix
@pytest.mark.parametrize("name", ["single24", "cluster10"])
def test_a_chain_of_blocks_reaches_the_bound(name: str) -> None:
    cluster = helix_cluster(name)
    bound = flow_bound(cluster)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None, bound=bound).run(steps(40_000.0))
    assert fits(cluster, found.highest_flow.placement)
    assert found.highest_flow.flow.tokens_per_s == pytest.approx(bound, rel=1e-8)


@settings(max_examples=examples(6))
@given(seed=st.integers(0, 10**6))
def test_chains_of_blocks_fit(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [kind("x", [90.0, 50.0, 35.0]), kind("y", [60.0, 25.0])]
    cluster = small_cluster([rng.choice("xy") for _ in range(rng.randint(3, 12))], kinds, rng.randint(3, 6))
    bound = flow_bound(cluster)
    chain = BlockChain(cluster).highest(0.0, bound, SolveLimits())
    assert chain is None or fits(cluster, chain)


def test_many_machines_are_placed_near_the_bound_at_once() -> None:
    kinds = [
        kind("a", [9000 / j for j in range(1, 13)]),
        kind("b", [4000 / j for j in range(1, 8)]),
        kind("c", [1500 / j for j in range(1, 5)]),
    ]
    cluster = small_cluster(["a"] * 10 + ["b"] * 30 + ["c"] * 60, kinds, 80)
    bound = flow_bound(cluster)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None, bound=bound).run(steps(60.0))
    assert found.highest_flow.flow.tokens_per_s >= 0.9 * bound


def test_a_chain_through_regions_has_wide_blocks_where_links_are_slow() -> None:
    kinds = [kind("a", [9000 / j for j in range(1, 13)]), kind("b", [4000 / j for j in range(1, 8)])]
    cluster = small_cluster(["a"] * 10 + ["b"] * 20, kinds, 40)
    cluster = replace(
        cluster, nodes=tuple(replace(node, region=f"r{i % 2}") for i, node in enumerate(cluster.nodes))
    )
    region = {node.name: node.region for node in cluster.nodes}
    bound = flow_bound(cluster)

    def link(edge: Edge, spec: LinkSpec) -> LinkSpec:
        """Between regions a fifth of the flow."""
        if region.get(edge[0]) == region.get(edge[1]) or SOURCE in edge or SINK in edge:
            return spec
        return replace(spec, bytes_per_s=0.2 * bound * cluster.model.activation_bytes)

    cluster = replace(cluster, links={edge: link(edge, spec) for edge, spec in cluster.links.items()})
    placement = BlockChain(cluster).highest(0.0, bound, SolveLimits())
    assert placement is not None
    assert fits(cluster, placement)
    assert max_flow(cluster, placement).tokens_per_s >= 0.95 * bound


def fits(cluster: PlaceCluster, placement: Placement) -> bool:
    nodes = {node.name: node for node in cluster.nodes}
    return all(
        0 <= first < end <= cluster.model.layers and end - first <= cluster.most_layers(nodes[name])
        for name, (first, end) in placement.items()
    )


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_heuristics_fit_their_nodes(seed: int) -> None:
    rng = random.Random(seed)
    cluster = random_cluster(rng, nodes=rng.randint(1, 12), layers=rng.randint(4, 9))
    for placement in (
        swarm(cluster),
        petals(cluster, rng),
        separate_pipelines(cluster),
        chains(cluster, rng),
    ):
        assert placement is None or fits(cluster, placement)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), partial=st.booleans())
def test_an_even_flow_is_a_flow_of_one_over_links_in_use(seed: int, partial: bool) -> None:
    rng = random.Random(seed)
    cluster = replace(
        random_cluster(rng, nodes=rng.randint(2, 9), layers=rng.randint(3, 6)), partial_inference=partial
    )
    flows = PlacementFlows(cluster)
    held = flows.held(chains(cluster, rng) if seed % 2 else petals(cluster, rng))
    shares = flows.even(held)
    assert (flows.value(held) > 0.0) == bool(shares)
    if not shares:
        return
    assert set(shares) <= set(flows.edges(dict(zip(flows.names, held, strict=True))))
    for name in (SOURCE, SINK, *flows.names):
        into = sum(share for (_, receiver), share in shares.items() if receiver == name)
        out = sum(share for (sender, _), share in shares.items() if sender == name)
        wanted = {SOURCE: (0.0, 1.0), SINK: (1.0, 0.0)}.get(name, (out, out))
        assert (into, out) == pytest.approx(wanted, abs=1e-3)


def test_an_even_flow_divides_by_speed() -> None:
    cluster = small_cluster(["x", "y"], [kind("x", [90.0]), kind("y", [30.0])], 1)
    fast = {edge: replace(spec, bytes_per_s=1e12) for edge, spec in cluster.links.items()}
    shares = PlacementFlows(replace(cluster, links=fast)).even([(0, 1), (0, 1)])
    assert [shares[SOURCE, name] for name in ("n0", "n1")] == pytest.approx([0.75, 0.25], rel=0.01)


class Known:
    """A run whose throughput is known at once, whatever its window."""

    def __init__(self, placement: Placement, flow: Flow) -> None:
        self._figure = 1000.0 - len(set(placement.values())) + flow.tokens_per_s / 1000.0

    def advance(self, window_s: float) -> float | None:
        return None if is_over() else self._figure


def test_a_search_is_repeatable_and_its_judge_has_the_last_word() -> None:
    kinds = [kind("x", [100.0, 45.0, 30.0]), kind("y", [60.0, 25.0])]
    cluster = small_cluster(["x", "x", "y", "y", "y"], kinds, 6)
    runs = [
        PlacementSearch(cluster, Estimator(cluster, LENGTHS), Known, longest_s=80.0).run(steps(400.0, seed=3))
        for _ in range(2)
    ]
    assert runs[0].best.placement == runs[1].best.placement
    assert runs[0].best.simulated is not None
    assert all(fits(cluster, candidate.placement) for candidate in runs[0].candidates)
    judged = [each.simulated for each in runs[0].candidates if each.simulated is not None]
    assert runs[0].best.simulated >= max(judged) / (1.0 + DOUBT_S / 80.0)
    # Half of the candidates of a window go on to the next one, which is twice as long, and the best rule.
    windows = [each.window_s for each in runs[0].candidates if each.simulated is not None]
    assert windows[0] == 80.0
    for window in (20.0, 40.0):
        entered = sum(each >= window for each in windows)
        more = sum(each > window for each in windows) - (entered + 1) // 2
        assert more in (0, 1)
    rules = [each for each in runs[0].candidates if each.rule and each.simulated is not None]
    assert max(rules, key=lambda each: each.simulated or 0.0).window_s == 80.0


@pytest.mark.parametrize("looks", [40.0, 100.0, 250.0, 600.0])
def test_simple_rules_are_simulated_first_and_no_answer_is_below_the_best_of_them(looks: float) -> None:
    kinds = [kind("x", [100.0, 45.0, 30.0]), kind("y", [60.0, 25.0])]
    cluster = small_cluster(["x", "x", "y", "y", "y"], kinds, 6)
    search = PlacementSearch(cluster, Estimator(cluster, LENGTHS), Known, longest_s=160.0)
    found = search.run(steps(looks, seed=1))
    rules = {each.rule: each.simulated for each in found.candidates if each.rule}
    assert set(rules) <= set(BASELINES)
    best = [figure for figure in rules.values() if figure is not None]
    assert best, "expected a simple rule with a flow here"
    assert found.best.simulated is not None
    assert found.best.simulated >= max(best)


class Level(Known):
    """A run in which all candidates serve nearly as much."""

    def advance(self, window_s: float) -> float | None:
        figure = super().advance(window_s)
        return None if figure is None else 1000.0 + figure / 1000.0


def test_what_a_short_window_cannot_tell_from_a_rule_is_answered_by_the_rule() -> None:
    kinds = [kind("x", [100.0, 45.0, 30.0]), kind("y", [60.0, 25.0])]
    cluster = small_cluster(["x", "x", "y", "y", "y"], kinds, 6)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), Level).run(steps(400.0))
    assert found.best.rule in BASELINES


@pytest.mark.parametrize("seconds", [0.0, -2.0])
def test_a_search_whose_time_is_up_before_it_begins_ends_with_its_starts(seconds: float) -> None:
    """As where the solver has used all of the time."""
    cluster = small_cluster(["x"] * 4, [kind("x", [100.0, 45.0])], 4)
    found = PlacementSearch(cluster, Estimator(cluster, LENGTHS), Known).run(steps(seconds))
    assert found.best.flow.tokens_per_s > 0.0


def test_an_interrupt_leaves_the_best_so_far() -> None:
    cluster = small_cluster(["x"] * 4, [kind("x", [100.0, 45.0])], 4)

    interrupt = Interrupt()

    def stop(phase: str, best: object) -> None:
        interrupt.requested = True

    search = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None, progress=stop)
    found = search.run(steps(10_000.0, interrupt=interrupt))
    assert found.best.flow.tokens_per_s > 0.0


def planned(limits: SolveLimits) -> PlacePlan:
    """A whole plan, simulated, of more machines than the integer program takes."""
    kinds = [kind("x", [100.0, 45.0, 30.0], kv=10_000), kind("y", [60.0, 25.0], kv=10_000)]
    cluster = small_cluster(["x", "y", "y"] * 11, kinds, 6)
    return plan_placement(PlacementSimulator(cluster, LENGTHS), limits, simulate_s=4.0)


def test_a_plan_ends_with_its_time() -> None:
    looks = 60.0
    limits = steps(looks)
    plan = planned(limits)
    assert plan.chosen.flow.tokens_per_s > 0.0
    assert limits.clock() <= 1.1 * looks


@pytest.mark.parametrize("looks", [10, 60, 200])
def test_an_interrupt_at_any_moment_leaves_a_plan(looks: int) -> None:
    interrupt, clock = Interrupt(), Steps()

    def looked() -> float:
        interrupt.requested = clock.now >= looks
        return clock()

    limits = SolveLimits(deadline=1000.0, interrupt=interrupt, clock=looked)
    plan = planned(limits)
    assert plan.interrupted
    assert plan.chosen.flow.tokens_per_s > 0.0
    assert clock.now <= looks + 50


def test_losses_say_what_is_left_and_the_cheapest_move() -> None:
    # n2 idles behind n1; without n0 only n2 can take its layer, and one layer is enough.
    cluster = small_cluster(["x", "x", "x"], [kind("x", [100.0, 45.0])], 2)
    placement = {"n0": (0, 1), "n1": (1, 2), "n2": (1, 2)}
    found = {loss.nodes[0]: loss for loss in losses(PlacementFlows(cluster), placement, SolveLimits())}
    assert found["n0"].tokens_per_s == 0.0
    assert found["n0"].move is not None
    assert (found["n0"].move.layers, found["n0"].move.loaded) == ((0, 1), 1)
    assert found["n0"].move.tokens_per_s == pytest.approx(100.0)
    # n1 and n2 are alike: one line for both.
    assert found["n1"].nodes == ("n1", "n2")
    assert found["n1"].tokens_per_s == pytest.approx(100.0)
    assert found["n1"].move is None
    assert losses(PlacementFlows(cluster), placement, SolveLimits(deadline=0.0)) == []


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=examples(10))
def test_machines_alike_are_exchanged_without_a_new_candidate(seed: int) -> None:
    """A search that takes both for different simulates one placement twice."""
    rng = random.Random(seed)
    cluster = small_cluster(["x", "y", "x", "x"], [kind("x", [100.0, 45.0]), kind("y", [60.0, 25.0])], 4)
    search = PlacementSearch(cluster, Estimator(cluster, LENGTHS), None)
    layout = [(0, 2), (2, 4), (2, 4), (0, 2)]
    rng.shuffle(layout)
    alike = [0, 2, 3]
    exchanged, order = layout[:], rng.sample(alike, 3)
    for node, other in zip(alike, order, strict=True):
        exchanged[node] = layout[other]
    assert search._keep(layout) is search._keep(exchanged)


def test_machines_with_other_links_are_not_alike() -> None:
    cluster = small_cluster(["x", "x", "x"], [kind("x", [100.0, 45.0])], 4)
    assert _classes(cluster) == [[0, 1, 2]]
    slow = small_cluster(["x", "x", "x"], [kind("x", [100.0, 45.0])], 4, rates={("n0", "n1"): 1e6})
    assert len(_classes(slow)) > 1
