"""Fit of a live sweep to an engine whose times are known: every point of its grid within 3 %."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hetlb.balancer.config.profile_file import (
    EngineInfo,
    HostTime,
    Profile,
    ProfileSource,
    load_profile,
    sections,
)
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import LaunchTime
from hetlb.balancer.core.types import Capacity
from hetlb.tools.profiler.grid import DEFAULT_GRID, Point, Size, StepKind, clip
from hetlb.tools.profiler.sources import Measurements, profile_of
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence

PROFILES = Path(__file__).parents[2] / "profiling"
LIMITS = EngineLimits(200_000, 16, 256, 8192)
MOST = 0.03
#: An engine by the tables of its GPU, and how long its host launches kernels: none, as a dense model, as a
#: mixture of experts, and with graphs of fewer tokens.
ENGINES = [
    ("h100_sxm-llama-3.1-8b-tp4", None),
    ("h100_sxm-llama-3.1-8b-tp8", None),
    ("l40s-llama-3.1-8b-tp1", None),
    ("h100_sxm-llama-3.1-8b-tp4", LaunchTime(512, 5e-3, 9e-3)),
    ("h100_sxm-llama-3.1-8b-tp4", LaunchTime(512, 1.65e-2, 4e-2)),
    ("a100_sxm-qwen3-14b-tp1", LaunchTime(128, 2.5e-2, 7e-2)),
]


@cache
def engine(name: str) -> LatencyModel:
    return load_profile(PROFILES / f"{name}.yaml").latency


@cache
def seconds_of(model: LatencyModel, size: Size) -> float:
    """Return how long an engine takes for a point, whose prompts it divides by its budget."""
    batch, length, prompt = size.batch, size.length, size.prefill_tokens
    if size.phase is StepKind.DECODE:
        return model.step_s(batch, batch * length)
    if size.phase is StepKind.MIXED:
        return model.mixed_step_s(prompt, 1, prompt, batch, batch * length)
    run, seconds, first = EngineModel(model, LIMITS), 0.0, 0
    for _ in range(batch):
        run.submit(EngineSequence(length, 1, None))
    while first < batch:
        stretch = run.begin_run()
        assert stretch is not None
        seconds += stretch.duration_s
        first += len(run.end_iteration().first)
    return seconds


def sizes() -> list[Size]:
    limits = Capacity(
        kv_cache_tokens=LIMITS.kv_cache_tokens,
        block_size=LIMITS.block_size,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=65_536,
    )
    return clip(DEFAULT_GRID, limits)


@cache
def profiled(model: LatencyModel) -> Profile:
    """Return the profile of a sweep over an engine."""
    points = []
    for size in sizes():
        passes = 1
        if size.phase is StepKind.PREFILL:
            passes = -(-size.tokens // LIMITS.max_num_batched_tokens)
        seconds = seconds_of(model, size)
        points.append(Point(size.phase, size.batch, size.length, seconds, passes, size.prefill_tokens))
    found = Measurements(
        points=tuple(points),
        source=ProfileSource(kind="live"),
        engine=EngineInfo(),
        host=HostTime(),
        tile=None,
        name="p",
    )
    return profile_of(found)[0]


@pytest.mark.parametrize(("name", "launch"), ENGINES)
def test_every_point_of_a_known_engine_is_within_three_percent(name: str, launch: LaunchTime | None) -> None:
    true = replace(engine(name), launch=launch)
    profile = profiled(true)
    found = profile.latency
    off = {size: seconds_of(found, size) / seconds_of(true, size) - 1.0 for size in sizes()}
    assert {str(size): share for size, share in off.items() if abs(share) > MOST} == {}
    assert {size.phase for size in off} == set(StepKind)
    if launch is None:
        assert found.launch is None
    else:
        assert profile.launch is not None
        assert profile.launch.graph_tokens == launch.graph_tokens
        # Beyond the graphs, between the points, too.
        for tokens in (20, 450, 600, 2500):
            mixed = [model.mixed_step_s(tokens, 1, tokens, 8, 8 * 600) for model in (found, true)]
            assert mixed[0] == pytest.approx(mixed[1], rel=0.08), tokens


@pytest.mark.parametrize(
    ("name", "launch", "host_s"),
    [
        ("b200_sxm-llama-3.1-8b-tp1", LaunchTime(512, 1.87e-2, 4.5e-2), 5.4e-5),
        ("h100_sxm-llama-3.1-8b-tp8", LaunchTime(512, 1.37e-2, 4.5e-2), 4.2e-5),
        ("h100_sxm-llama-3.1-8b-tp8", None, 6e-5),
    ],
)
def test_the_host_time_of_a_sequence_is_found_however_fast_the_gpu(
    name: str, launch: LaunchTime | None, host_s: float
) -> None:
    true = replace(engine(name), launch=launch, host_s=1e-3, host_sequence_s=host_s)
    found = profiled(true).latency
    off = {size: seconds_of(found, size) / seconds_of(true, size) - 1.0 for size in sizes()}
    assert {str(size): share for size, share in off.items() if abs(share) > MOST} == {}


def test_a_profile_with_launch_times_is_read_as_it_was_written() -> None:
    true = replace(engine("h100_sxm-llama-3.1-8b-tp4"), launch=LaunchTime(512, 1.65e-2, 4e-2))
    profile = profiled(true)
    assert sections(profile.latency)["launch"] == profile.launch
