"""The simulator of pipelines against times worked out by hand, and against its own laws of conservation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetlb.balancer.core.length_samples import LengthDistribution, SamplePredictor
from hetlb.tools.paths.path_scheduler import PathScheduler
from hetlb.tools.paths.stages import (
    SINK,
    SOURCE,
    BatchLimits,
    Curve,
    LinkSpec,
    PathLease,
    StageNetwork,
    StageSpec,
)
from hetlb.tools.sim.pipelines import OfflineLoad, PipelineSimulation

LIMITS = BatchLimits(prompts=1, prompt_tokens=4096, decodes=64, decode_context=100_000)
#: 1 ms a layer for 10 prompt tokens, 2 ms for a batch of decodes however large.
PROMPT, DECODE = Curve((0, 1000), (0.0, 0.1)), Curve((0, 1, 1000), (0.0, 0.002, 0.002))


def stage(name: str, first: int, end: int, kv: int = 10**6) -> StageSpec:
    return StageSpec(name, first, end, PROMPT, DECODE, kv, LIMITS)


def network(*stages: StageSpec, layers: int, partial: bool = False, bytes_per_s: float = 1e3) -> StageNetwork:
    """Activations of one byte, so that copying them takes no time to speak of."""
    names = [each.name for each in stages]
    links = {(a, b): LinkSpec(bytes_per_s, 0.01) for a in names for b in names if a != b}
    links |= {(SOURCE, name): LinkSpec(1e12, 0.005) for name in names}
    links |= {(name, SINK): LinkSpec(1e12, 0.005) for name in names}
    return StageNetwork(layers, stages, links, 1, 1, partial, {})


def simulation(
    net: StageNetwork, lengths: list[tuple[int, int]], policy: str = "hetlb"
) -> tuple[PipelineSimulation, PathScheduler, list[PathLease]]:
    seen: list[PathLease] = []
    scheduler = PathScheduler(net, SamplePredictor(LengthDistribution([20]), capped=False), policy=policy)
    run = PipelineSimulation(
        net,
        scheduler,
        iter(lengths),
        watch=seen.append,
    )
    return run, scheduler, seen


def test_one_request_takes_the_time_worked_out_by_hand() -> None:
    net = network(stage("a", 0, 2), stage("b", 2, 5), layers=5)
    run, scheduler, _ = simulation(net, [(100, 3)])
    result = run.run_online([0.0], measured_s=10.0)
    # Prompt: 5 ms, 2 layers x 10 ms, 100 kB at 1 MB/s + 10 ms, 3 layers x 10 ms, 5 ms.
    assert list(result.prompts.seconds) == pytest.approx([0.005 + 0.02 + 0.1 + 0.01 + 0.03 + 0.005])
    # A token alone: twice 2 ms a layer; 1 kB takes 1 ms.
    decode = 0.005 + 2 * 0.004 + 0.001 + 0.01 + 3 * 0.004 + 0.005
    assert list(result.decodes.seconds) == pytest.approx([decode, decode])
    assert (result.output_tokens, result.prompt_tokens, result.completed) == (3, 100, 1)
    assert scheduler.in_flight == 0
    assert all(ledger.kv_token_layers == 0 for ledger in scheduler.ledgers.values())


def test_a_prompt_delays_what_comes_behind_it_on_a_link() -> None:
    net = network(stage("a", 0, 1), stage("b", 1, 2), layers=2)
    run, _, _ = simulation(net, [(10, 1), (500, 1)])
    # The second one leaves stage a at 55 ms + and needs 0.5 s of the link, the first one was through before.
    result = run.run_online([0.0, 0.0], measured_s=10.0)
    first, second = sorted(result.prompts.seconds)
    assert first == pytest.approx(0.005 + 0.001 + 0.01 + 0.01 + 0.001 + 0.005)
    assert second == pytest.approx(0.005 + 0.001 + 0.05 + 0.5 + 0.01 + 0.05 + 0.005)


def test_a_stage_entered_behind_its_first_layer_computes_only_the_rest() -> None:
    net = network(stage("a", 0, 3), stage("b", 2, 5), layers=5, partial=True, bytes_per_s=1e9)
    run, _, seen = simulation(net, [(100, 1)])
    result = run.run_online([0.0], measured_s=10.0)
    assert [(hop.first, hop.end) for hop in seen[0].hops] == [(0, 3), (3, 5)]
    assert list(result.prompts.seconds) == pytest.approx([0.07], abs=1e-5)


@pytest.mark.parametrize("policy", ["hetlb", "random", "shortest-queue", "swarm"])
def test_every_request_ends_and_gives_back_what_it_held(policy: str) -> None:
    net = network(
        stage("a", 0, 2), stage("b", 0, 2), stage("c", 2, 4), stage("d", 2, 4), layers=4, bytes_per_s=1e5
    )
    run, scheduler, seen = simulation(net, [(50 + i, 5 + i % 40) for i in range(60)], policy)
    result = run.run_online([i * 0.05 for i in range(60)], measured_s=200.0)
    assert result.completed == 60
    assert result.unfinished == 0
    assert result.output_tokens == sum(5 + i % 40 for i in range(60))
    assert len(seen) == 60
    assert scheduler.in_flight == 0
    assert all(ledger.kv_token_layers == 0 for ledger in scheduler.ledgers.values())
    assert all(node.kv_used == 0 for node in run._nodes.values())
    scheduler.check_integrity()


def test_the_same_seed_gives_the_same_run_and_an_offline_load_fills_the_cache() -> None:
    def lengths() -> Iterator[tuple[int, int]]:
        while True:
            yield from [(100, 30), (40, 10), (200, 60)]

    results = []
    for _ in range(2):
        net = network(stage("a", 0, 2, kv=8000), stage("b", 2, 4, kv=8000), layers=4, bytes_per_s=1e6)
        scheduler = PathScheduler(
            net, SamplePredictor(LengthDistribution([33]), capped=False), policy="hetlb"
        )
        run = PipelineSimulation(net, scheduler, lengths())
        results.append(run.run_offline(OfflineLoad(initial=4), warm_up_s=5.0, measured_s=30.0))
    assert results[0].document() == results[1].document()
    assert results[0].decode_tokens_per_s > 0.0
    # Booked use reaches 0.8 of 8,000 token-layers; what is held stays below all of it.
    assert 0.3 < results[0].kv_peak["a"] <= 1.0


def test_frames_keep_a_batch_together() -> None:
    """Two requests in one batch of a: as two messages the first begins a batch of its own on b."""
    limits = BatchLimits(prompts=8, prompt_tokens=4096, decodes=64, decode_context=100_000)
    stages = [
        StageSpec(name, first, first + 1, PROMPT, DECODE, 10**6, limits)
        for name, first in (("a", 0), ("b", 1))
    ]
    net = network(*stages, layers=2, bytes_per_s=1e3)
    found = {}
    for frames in (False, True):
        scheduler = PathScheduler(net, SamplePredictor(LengthDistribution([20]), capped=False))
        run = PipelineSimulation(net, scheduler, iter([(10, 1)] * 2), frames=frames)
        found[frames] = sorted(run.run_online([0.0, 0.0], measured_s=10.0).prompts.seconds)
        assert scheduler.in_flight == 0
    # a: 5 ms, one layer on 20 tokens 2 ms; the link 10 ms for each 10 kB and 10 ms; b; 5 ms.
    together = 0.005 + 0.002 + 0.02 + 0.01 + 0.002 + 0.005
    assert found[True] == pytest.approx([together, together])
    first = 0.005 + 0.001 + 0.01 + 0.01 + 0.001 + 0.005
    assert found[False] == pytest.approx([first, first + 0.01], abs=0.002)


def filled() -> PipelineSimulation:
    """Two stages for each half of the layers, and requests without end."""

    def lengths() -> Iterator[tuple[int, int]]:
        while True:
            yield from [(100, 30), (40, 10), (200, 60)]

    stages = [
        stage(name, first, first + 2, kv=16_000) for name, first in zip("abcd", (0, 0, 2, 2), strict=True)
    ]
    net = network(*stages, layers=4, bytes_per_s=1e6)
    predictor = SamplePredictor(LengthDistribution([33]), capped=False)
    return PipelineSimulation(net, PathScheduler(net, predictor), lengths())


def test_a_run_that_is_continued_is_one_run() -> None:
    whole, parts = filled(), filled()
    load = OfflineLoad(initial=5)
    at_once = whole.run_offline(load, warm_up_s=5.0, measured_s=60.0)
    parts.run_offline(load, warm_up_s=5.0, measured_s=20.0)
    assert parts.extend(60.0).document() | {"busy": {}} == at_once.document() | {"busy": {}}


def test_a_cluster_that_begins_full_serves_at_once_what_it_serves_later() -> None:
    load = OfflineLoad()
    run = filled()
    full = run.run_offline(load, warm_up_s=2.0, measured_s=20.0, filled=True)
    empty = filled().run_offline(load, warm_up_s=100.0, measured_s=100.0)
    assert full.decode_tokens_per_s == pytest.approx(empty.decode_tokens_per_s, rel=0.15)
    assert all(node.kv_used > 0 for node in run._nodes.values())
