"""The simulated fleet under real traffic: sequences, samples, embeddings, context limits, restarts, waves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import generated_traffic as generate
import pytest

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec, Outcome
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest, Waves, make_plan
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS, Row

FAST = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)

UNBOUNDED = QueueLimits(max_requests=None, max_bytes=None, timeout_s=None)


def simulate(
    plan: Sequence[PlannedRequest],
    *,
    policy: str = "least-requests",
    speeds: Sequence[float] = (1.0,),
    context: Sequence[int | None] = (None, None),
    prefix_cache: bool = False,
    limits: QueueLimits = UNBOUNDED,
    places: int = 64,
    predictor: str = "empirical",
    **options: Any,
) -> FleetResult:
    specs, engines = [], {}
    for i, speed in enumerate(speeds):
        capacity = Capacity(40_000, 16, places, 2048, context[i], 40_000)
        latency = FAST.scaled(speed)
        specs.append(InstanceSpec(f"i{i}", "m", latency=latency, capacity=capacity))
        engines[f"i{i}"] = EngineSpec(
            latency,
            EngineLimits.from_capacity(capacity),
            prefix_cache=prefix_cache,
            max_model_len=context[i],
        )
    setup = SchedulerSetup(
        tuple(specs), policy, PolicyParams(), limits, predictor,
        lengths=LengthDistribution([20, 60, 100]), initial_health=Health.UP,
    )  # fmt: skip
    return FleetSimulation(setup, engines, plan, model="m", **options).run()


def planned(rows: list[Row], rate: float = float("inf"), seed: int = 0) -> list[PlannedRequest]:
    return make_plan(rows, None, rate, random.Random(seed), hash_block_tokens=HASH_BLOCK_TOKENS)


def test_every_sequence_of_a_request_is_one_in_the_engine() -> None:
    result = simulate([PlannedRequest(0, 0.0, Row(None, 100, 30, sequences=3, n=2))])
    alone = simulate([PlannedRequest(i, 0.0, Row(None, 100, 30)) for i in range(6)])
    record = result.records[0]
    assert (record.prompt_tokens, record.output_tokens, record.sequences) == (300, 180, 6)
    assert record.first_token_s == alone.records[0].first_token_s
    assert record.last_token_s == alone.records[5].last_token_s
    assert record.tpot_s == pytest.approx(alone.records[0].tpot_s)


def test_a_request_has_ended_when_its_last_sequence_has() -> None:
    # Four places: the other four sequences wait in the engine.
    first, second = (
        simulate([PlannedRequest(0, 0.0, Row(None, 100, 30, sequences=count))], places=4).records[0]
        for count in (4, 8)
    )
    assert second.e2el_s == pytest.approx(2 * first.e2el_s, rel=0.02)
    assert second.ttft_s == first.ttft_s


def test_samples_share_the_blocks_of_their_prompt() -> None:
    row = Row(None, 1600, 10, n=8)
    shared = simulate(planned([row, row]), prefix_cache=True)
    alone = simulate(planned([row, row]))
    hit, computed = (shared.counted["i0"][key] for key in ("prefix_hit_tokens", "prefilled_tokens"))
    # A prompt of 1,600 tokens is longer than half an iteration: the second sample finds what the first read.
    assert computed < 5 * 1600
    assert hit + computed == 16 * 1600
    assert shared.records[0].e2el_s < alone.records[0].e2el_s


def test_an_embedding_is_read_and_has_no_tokens() -> None:
    rows = generate.embeddings(5, random.Random(0), inputs=20)
    for policy in sorted(POLICIES):
        result = simulate(planned(rows), policy=policy, places=8)
        assert result.outcomes == [Outcome.OK] * 5, policy
        assert result.summary()["total_output_tokens"] == 0
        assert result.summary()["total_input_tokens"] == sum(20 * row.input_tokens for row in rows)


def test_what_an_instance_cannot_hold_goes_to_one_that_can() -> None:
    rows = [Row(None, 9000 if i % 5 == 0 else 200, 20) for i in range(50)]
    for policy in sorted(set(POLICIES) - {"single"}):
        result = simulate(planned(rows), policy=policy, speeds=(1.0, 1.0), context=(32_768, 8192))
        assert all(record.ok for record in result.records), policy
        longs = [r for r, row in zip(result.records, rows, strict=True) if row.input_tokens == 9000]
        assert {record.instance for record in longs} == {"i0"}, policy


def test_what_waits_too_long_or_finds_no_room_has_failed_with_its_reason() -> None:
    plan = [PlannedRequest(i, 0.0, Row(None, 200, 200)) for i in range(200)]
    limits = QueueLimits(max_requests=50, max_bytes=None, timeout_s=1.0)
    result = simulate(plan, policy="hetlb", limits=limits, places=16)
    errors = {record.error for record in result.records}
    assert errors == {"", "queue_full", "queue_expired"}
    assert {Outcome.REJECTED_FULL, Outcome.EXPIRED_QUEUE} < set(result.outcomes)
    assert result.summary()["failed"] == sum(not record.ok for record in result.records)
    assert all(record.end_s is not None for record in result.records)


@pytest.mark.parametrize("policy", ["hetlb", "prefix", "least-requests"])
def test_a_restarted_proxy_loses_nothing(policy: str) -> None:
    rows = generate.agents(300, random.Random(1))
    plan = planned(rows, 10.0)
    result = simulate(
        plan, policy=policy, speeds=(1.0, 2.0), prefix_cache=True, predictor="online", restarts_s=(5.0, 12.0)
    )
    assert result.outcomes == [Outcome.OK] * 300
    assert [r.output_tokens for r in result.records] == [p.output_tokens for p in plan]
    again = simulate(
        plan, policy=policy, speeds=(1.0, 2.0), prefix_cache=True, predictor="online", restarts_s=(5.0, 12.0)
    )
    assert again.summary() == result.summary()


def test_a_prefix_cache_is_each_engine_s_own_affair() -> None:
    rows = generate.shared_prompts(60, random.Random(1), prefix_tokens=2048)
    cached, plain = (simulate(planned(rows), prefix_cache=on) for on in (True, False))
    assert "prefix_hit_tokens" not in plain.counted["i0"]
    assert cached.counted["i0"]["prefix_hit_tokens"] > 40 * 2000
    assert cached.summary()["duration"] < plain.summary()["duration"]


def test_waves_pause_and_lose_no_time_of_their_own() -> None:
    waves = Waves(5.0, 15.0)
    steady = make_plan([Row(None, 1, 1)], 400, 20.0, random.Random(1))
    plan = make_plan([Row(None, 1, 1)], 400, 20.0, random.Random(1), waves=waves)
    assert all(each.scheduled_s % 20.0 < 5.0 for each in plan)
    assert [each.scheduled_s for each in plan] == sorted(each.scheduled_s for each in plan)
    for before, after in zip(steady, plan, strict=True):
        assert after == replace(before, scheduled_s=waves.due_s(before.scheduled_s))
