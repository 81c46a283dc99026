"""Composed pipelines: one stage is its own profile, equal stages are no better than replicas, and a different
model, stage by stage, agrees.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import EngineInfo, HostTime, MixedSteps, Profile, load_profile
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import DecodeTable, MixedTerm, PnormPrefill
from hetlb.tools.plan.common.capacity import divide_layers
from hetlb.tools.plan.common.composition import (
    LinkSeconds,
    StageProfile,
    compose_latency,
    compose_profile,
    engine_stages,
)
from hetlb.tools.plan.common.plan_tables import Model
from hetlb.tools.plan.throughput import bubbles, interleave, saturated_rate, slowed
from hetlb.tools.sim.alone import batch_of, full_part
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence
from hetlb.tools.sim.staged_engine import EngineStage, StagedEngine
from hetlb.tools.sim.study import engine_of

PROFILING = Path(__file__).parents[2] / "profiling"
MODEL = Model(name="m")

small = st.floats(1e-9, 1e-5)
long = st.floats(1e-4, 5e-2)


@st.composite
def latencies(draw: st.DrawFn) -> LatencyModel:
    """A model in which every term is at work, with or without the better forms."""
    better = draw(st.booleans())
    k4, k8 = draw(long), draw(long)
    first = draw(long)
    return LatencyModel(
        *(draw(small), draw(small), draw(small), k4),
        *(draw(small), draw(small), draw(small), k8),
        better_prefill=PnormPrefill(
            k4, draw(small), draw(st.floats(0, 1e-10)), 4.0, tile=draw(st.integers(1, 64))
        )
        if better
        else None,
        better_decode=DecodeTable(draw(small), draw(small), (1, 8, 64), (first, first * 1.1, first * 1.5))
        if better
        else None,
        mixed=draw(st.none() | st.builds(MixedTerm, small, st.floats(0, 1e-9), small, small)),
        host_s=draw(st.just(0.0) | long),
    )


@given(latencies())
def test_one_stage_is_its_own_profile_term_for_term(latency: LatencyModel) -> None:
    assert compose_latency([1.0], [latency], LinkSeconds()) == latency
    # The formulas themselves, of two stages of which one holds everything, lose no term either.
    both = compose_latency([0.5, 0.5], [latency, latency], LinkSeconds())
    for field in fields(LatencyModel):
        assert (getattr(both, field.name) is None) == (getattr(latency, field.name) is None), field.name
    assert both.host_s == latency.host_s


@given(
    latencies(),
    st.integers(2, 8),
    st.integers(0, 4),
    st.integers(1, 2048),
    st.integers(0, 64),
    st.integers(1, 3000),
)
def test_equal_stages_take_for_a_load_what_one_engine_takes_for_their_part_of_it(
    latency: LatencyModel, stages: int, prompts: int, length: int, batch: int, context: int
) -> None:
    whole = compose_latency([1 / stages] * stages, [latency] * stages, LinkSeconds())

    def seconds(model: LatencyModel, times: int) -> float:
        tokens = times * prompts * length
        return model.mixed_step_s(
            tokens, times * prompts, length if prompts else 0, times * batch, times * batch * context,
            tokens * length,
        )  # fmt: skip

    if prompts or batch:
        assert seconds(whole, stages) == pytest.approx(seconds(latency, 1), rel=1e-9)


@given(latencies(), latencies(), st.integers(1, 31))
def test_a_turn_is_never_shorter_than_its_slowest_stage(
    one: LatencyModel, two: LatencyModel, layers: int
) -> None:
    one, two = (replace(each, better_prefill=None, better_decode=None) for each in (one, two))
    shares = [layers / 32, 1 - layers / 32]
    whole = compose_latency(shares, [one, two], LinkSeconds(1e-6, 1e-3))
    load = (512.0, 1.0, 512.0, 32.0, 32 * 700.0, 512.0 * 512)
    half = tuple(each / 2 if at not in (1, 2) else each for at, each in enumerate(load))
    parts = [
        share * (each.mixed_step_s(*half) - each.host_s)
        for share, each in zip(shares, (one, two), strict=True)
    ]
    if (one.mixed is None) == (two.mixed is None):
        assert whole.mixed_step_s(*load) >= max(2 * max(parts), sum(parts)) * 0.97


def stages_of(profile: Profile, count: int, tokens: int) -> tuple[Profile, tuple[EngineStage, ...]]:
    parts = [StageProfile(profile, 1 / count, "G", 1)] * count
    return compose_profile("p", MODEL, parts, tokens), engine_stages(parts)


def test_a_composed_profile_keeps_mixed_steps_host_time_and_the_engine() -> None:
    profile = load_profile(PROFILING / "h100_sxm-llama-3.1-8b-tp1.yaml")
    assert profile.mixed is not None
    profile = Profile(**{f: getattr(profile, f) for f in profile.__struct_fields__} | {
        "host": HostTime(iteration_s=2e-3, request_s=5e-3)})  # fmt: skip
    pipeline, _ = stages_of(profile, 2, 900_000)
    assert pipeline.host == profile.host
    assert isinstance(pipeline.mixed, MixedSteps)
    assert pipeline.mixed.context_s == pytest.approx(profile.mixed.context_s)
    assert pipeline.mixed.pair_s == pytest.approx(profile.mixed.pair_s / 4)
    assert pipeline.engine.version == profile.engine.version
    alone, _ = stages_of(profile, 1, profile.engine.kv_cache_tokens or 0)
    assert alone.latency == profile.latency
    assert isinstance(alone.engine, EngineInfo)


@pytest.mark.parametrize("name", ["h100_sxm-llama-3.1-8b-tp1", "l40s-llama-3.1-8b-tp2"])
@pytest.mark.parametrize("row", [(2455, 18), (496, 253), (100, 400)])
def test_a_pipeline_does_not_beat_the_same_gpus_as_replicas_of_its_memory(
    name: str, row: tuple[int, int]
) -> None:
    profile = load_profile(PROFILING / f"{name}.yaml")
    tokens = profile.engine.kv_cache_tokens or 0
    mix = [(1.0, [row])]
    # Each replica is given the pipeline's share of sequences and KV cache: memory explains nothing.
    pipeline, stages = stages_of(profile, 2, 2 * tokens)
    replica, _ = stages_of(profile, 1, tokens)
    two = 2 * saturated_rate(engine_of(replica), mix)
    assert saturated_rate(engine_of(pipeline), mix, stages) <= two * 1.02
    assert saturated_rate(engine_of(pipeline), mix) <= two * 1.02


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 120)), min_size=1, max_size=40),
    st.integers(1200, 20_000),
    st.integers(1, 64),
)
def test_one_stage_by_itself_is_the_engine_model(rows: list[tuple[int, int]], tokens: int, seqs: int) -> None:
    rows = [(i, o) for i, o in rows if i + o <= tokens // 16 * 16]
    if not rows:
        return
    latency = load_profile(PROFILING / "h100_sxm-llama-3.1-8b-tp1.yaml").latency
    limits = EngineLimits(tokens, max_num_seqs=seqs, enable_prefix_caching=False)
    model = EngineModel(latency, limits)
    part = full_part(model, [EngineSequence(i, o) for i, o in rows], len(rows))
    rate = staged_rate([EngineStage(latency, 1.0)], limits, rows)
    if model.preemptions == 0:
        assert rate == pytest.approx((part.last - part.first) / part.seconds, rel=1e-9)
    assert math.isfinite(rate)


def staged_rate(stages: list[EngineStage], limits: EngineLimits, rows: list[tuple[int, int]]) -> float:
    part = full_part(StagedEngine(stages, limits), [EngineSequence(i, o) for i, o in rows], len(rows))
    return (part.last - part.first) / part.seconds


@pytest.mark.parametrize("row", [(2455, 18), (496, 253)])
def test_bubbles_bring_the_composed_engine_to_the_rate_of_its_stages(row: tuple[int, int]) -> None:
    profile = load_profile(PROFILING / "h100_sxm-llama-3.1-8b-tp1.yaml")
    pipeline, stages = stages_of(profile, 2, 900_000)
    mix = [(1.0, [row])]
    share = bubbles(engine_of(pipeline), mix, stages)
    slow = engine_of(slowed(pipeline, share))
    assert saturated_rate(slow, mix) == pytest.approx(saturated_rate(slow, mix, stages), rel=0.02)
    # Prompts that fill every batch leave no bubbles; one among decodes does.
    assert share > 0.97 if row == (2455, 18) else share < 0.85


def test_a_long_prompt_is_computed_by_all_stages_at_once() -> None:
    latency = LatencyModel(k1=1e-5, k2=0.0, k3=0.0, k4=0.0, k5=0.0, k6=0.0, k7=0.0, k8=1e-9)
    limits = EngineLimits(100_000, max_num_batched_tokens=1000, max_num_seqs=8)
    stages = [EngineStage(latency, 0.5)] * 2
    # 8 parts of 1,000 tokens and of 5 ms a stage: one after the other on each, the last ends behind both.
    assert 1 / staged_rate(stages, limits, [(8000, 1)]) == pytest.approx(0.045, rel=1e-3)
    # With a link of 2 ms a part takes 12 ms; two are in flight, and the next begins when the first has ended.
    slow = [EngineStage(latency, 0.5, link_token_s=1e-6, link_batch_s=1e-3), EngineStage(latency, 0.5)]
    assert 1 / staged_rate(slow, limits, [(8000, 1)]) == pytest.approx(4 * 0.012 + 0.005, rel=1e-3)


@given(st.lists(st.fractions(Fraction(1, 100), 100), min_size=1, max_size=8), st.integers(8, 128))
def test_layers_are_whole_and_all_of_them(weights: list[Fraction], layers: int) -> None:
    shares = divide_layers(weights, layers)
    assert sum(shares) == 1
    assert all((share * layers).denominator == 1 and share > 0 for share in shares)


def test_a_mix_is_batched_by_its_mean_length() -> None:
    spec = engine_of(load_profile(PROFILING / "h100_sxm-llama-3.1-8b-tp1.yaml"))
    assert batch_of(spec, 10.0) == spec.limits.max_num_seqs
    assert len(interleave([(1.0, [(1, 1)])], 5)) == 5
