"""Requests of many sequences and mixed context limits are served as soon as by a policy that never waits."""

from __future__ import annotations

import random

import generated_traffic as generate
import pytest
from generated_traffic import Lengths
from sim.test_traffic import FAST

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec, Outcome
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.workload.arrivals import PlannedRequest, make_plan
from hetlb.tools.workload.rows import Row

ANSWER = Lengths(60, 0.5, 5, 300)
KV_TOKENS = 400_000


def run(
    plan: list[PlannedRequest], policy: str, places: tuple[int, ...], context: tuple[int, ...]
) -> FleetResult:
    specs, engines = [], {}
    for i, (slots, longest) in enumerate(zip(places, context, strict=True)):
        capacity = Capacity(KV_TOKENS, 16, slots, 2048, longest, KV_TOKENS)
        specs.append(InstanceSpec(f"i{i}", "m", latency=FAST, capacity=capacity))
        limits = EngineLimits.from_capacity(capacity)
        engines[f"i{i}"] = EngineSpec(FAST, limits, max_model_len=longest)
    setup = SchedulerSetup(
        tuple(specs), policy, PolicyParams(), QueueLimits(max_requests=None, timeout_s=300.0), "online",
        initial_health=Health.UP, lengths=LengthDistribution([60]),
    )  # fmt: skip
    return FleetSimulation(setup, engines, plan, model="m").run()


def requests_per_s(places: int) -> float:
    """Return about the requests/s that one instance serves with `places` places in use."""
    rows = generate.independent(400, random.Random(9), answer=ANSWER)
    plan = make_plan(rows, None, float("inf"), random.Random(9))
    return float(run(plan, "single", (places,), (131_072,)).summary()["request_throughput"])


def among(rows: list[Row], group: Row) -> list[Row]:
    """A group after a third of the rows."""
    return [*rows[: len(rows) // 3], group, *rows[len(rows) // 3 :]]


@pytest.mark.parametrize(
    ("group", "places", "count"),
    [
        (Row(None, 200, 60, sequences=16), (16, 16), 200),
        (Row(None, 200, 60, sequences=300), (256,), 900),
        (Row(None, 200, 0, sequences=80, endpoint="embeddings"), (64,), 400),
    ],
    ids=["16 prompts on 16 places", "300 prompts on 256 places", "80 embeddings on 64 places"],
)
def test_a_request_of_many_sequences_takes_places_as_they_free(
    group: Row, places: tuple[int, ...], count: int
) -> None:
    rate = 0.5 * len(places) * requests_per_s(places[0])
    rows = among(generate.independent(count, random.Random(1), answer=ANSWER), group)
    plan = make_plan(rows, None, rate, random.Random(1))
    took_s = {}
    for policy in ("hetlb", "least-requests"):
        result = run(plan, policy, places, (131_072,) * len(places))
        assert set(result.outcomes) == {Outcome.OK}, policy
        record = result.records[count // 3]
        assert record.sequences == group.sequences
        took_s[policy] = (record.end_s or 0.0) - record.scheduled_s
    assert took_s["hetlb"] <= 2.0 * took_s["least-requests"]


def test_what_only_a_large_instance_can_take_leaves_no_small_one_idle() -> None:
    """A burst of 400 short and 40 long prompts on context limits of 131,072 and 8,192 tokens."""
    rng = random.Random(2)
    rows = [Row(None, rng.randrange(10_000, 40_000), 60) for _ in range(40)]
    rows = generate.among(generate.independent(400, rng, answer=ANSWER), rows, rng)
    plan = make_plan(rows, None, float("inf"), rng)
    ended_s, short_s = {}, {}
    for policy in ("hetlb", "least-requests"):
        result = run(plan, policy, (64, 64), (131_072, 8192))
        assert set(result.outcomes) == {Outcome.OK}, policy
        ended_s[policy] = max(record.end_s or 0.0 for record in result.records)
        on_small = [record.end_s or 0.0 for record in result.records if record.instance == "i1"]
        short_s[policy] = len(on_small)
    assert ended_s["hetlb"] <= 1.1 * ended_s["least-requests"]
    assert short_s["hetlb"] >= short_s["least-requests"]
