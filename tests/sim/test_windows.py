"""Windows and states in the simulated engine: what sequences hold, and how many run at once."""

from __future__ import annotations

import itertools

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.iteration_times import IterationRule

LATENCY = LatencyModel(k1=1e-4, k2=1e-3, k3=2e-6, k4=1e-2, k5=5e-8, k6=6e-5, k7=1e-7, k8=1.3e-2)
NEEDS = st.sampled_from(
    [
        KvNeed(1.0, 1.0, 7.0, 0.0),
        KvNeed(1.0, 5.2, 20.0, 3.5),
        KvNeed(1.0, 0.0, 0.0, 9.0),
        KvNeed(0.0, 1.0, 12.0, 0.0),
        KvNeed(0.0, 0.0, 0.0, 1.0),
    ]
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[EngineLimits, list[tuple[int, int, int]]]:
    size = draw(st.sampled_from([1, 3, 4, 16]))
    seqs = draw(st.integers(1, 8))
    limits = EngineLimits(
        kv_cache_tokens=size * draw(st.integers(8, 120)),
        block_size=size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.integers(0, 40)),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        need=draw(NEEDS),
    )
    longest = min(200, limits.max_sequence_tokens)
    found = []
    for arrival in sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))):
        prompt = draw(st.integers(1, max(1, longest - 1)))
        output = draw(st.integers(0, max(0, longest - prompt)))
        if limits.fits(prompt, output):
            found.append((arrival, prompt, output))
    return limits, found


@given(load=loads(), shared=st.booleans(), aborted=st.integers(0, 30))
@settings(max_examples=examples(150))
def test_blocks_are_the_sum_over_the_sequences(
    load: tuple[EngineLimits, list[tuple[int, int, int]]], shared: bool, aborted: int
) -> None:
    """Everything is counted again after every step; all sequences end, and all blocks are given back."""
    limits, asked = load
    engine = EngineModel(LATENCY, limits, IterationRule.TOKEN, prefix_cache=shared)
    pieces = (("common", 4),) if shared else ()
    sequences = [
        EngineSequence(prompt, output, n, pieces=pieces if prompt > 4 else ())
        for n, (_, prompt, output) in enumerate(asked)
    ]
    for step in itertools.count():
        for (arrival, _, _), sequence in zip(asked, sequences, strict=True):
            if arrival == step:
                engine.submit(sequence)
        if step == aborted and sequences and asked[0][0] <= step:
            engine.abort(sequences[0])
        begun = engine.begin_iteration()
        engine.check_integrity()
        if begun is None and step > 60:
            break
        if begun is not None:
            engine.end_iteration()
            engine.check_integrity()
    assert engine.idle
    assert engine.kv.pool.used_blocks == 0
    assert all(each.state in ("finished", "aborted") for each in sequences)


@given(load=loads())
@settings(max_examples=examples(100))
def test_stretches_are_their_steps(load: tuple[EngineLimits, list[tuple[int, int, int]]]) -> None:
    limits, asked = load
    fast, slow = EngineModel(LATENCY, limits), EngineModel(LATENCY, limits)
    for engine in (fast, slow):
        for _, prompt, output in asked:
            engine.submit(EngineSequence(prompt, output))
    while (stretch := fast.begin_run()) is not None:
        for step in range(stretch.steps):
            assert slow.begin_iteration() is not None
            middle_s = (stretch.elapsed_s(step) + stretch.elapsed_s(step + 1)) / 2
            assert fast.kv_used_blocks_at(middle_s) == slow.kv.pool.used_blocks
            slow.end_iteration()
        fast.end_iteration()
        fast.check_integrity()
    assert slow.begin_iteration() is None
    assert (fast.preemptions, fast.generated_tokens) == (slow.preemptions, slow.generated_tokens)
    assert fast.kv.peak_blocks == slow.kv.peak_blocks


@pytest.mark.parametrize(
    ("need", "running"),
    [
        (None, 39),  # 625 blocks, 16 for each
        (KvNeed(1.0, 1.0, 128.0, 0.0), 24),  # and 9 of a window; 16 while its prompt is computed
        (KvNeed(1.0, 0.0, 0.0, 1000.0), 7),  # and a state as large as 62.5
        (KvNeed(0.0, 1.0, 128.0, 0.0), 68),  # a window alone
    ],
)
def test_as_many_run_at_once_as_their_layers_keep(need: KvNeed | None, running: int) -> None:
    engine = EngineModel(LATENCY, EngineLimits(10_000, 16, 100, 25_600, need=need))
    for _ in range(100):
        engine.submit(EngineSequence(256, 100))
    engine.begin_iteration()
    assert engine.running == running
