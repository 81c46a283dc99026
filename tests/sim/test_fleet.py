"""The simulated fleet: every request ends once, the same seed gives the same result, queueing laws hold."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import PREDICTORS
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Capacity, Health, InstanceSpec, Outcome
from hetlb.tools.sim.alone import run_alone
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.simulation_sweep import fixed_split
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

FAST = LatencyModel(k1=1e-4, k2=1e-3, k3=0.0, k4=1e-2, k5=5e-8, k6=6e-5, k7=0.0, k8=1.3e-2)

PROFILES = Path(__file__).resolve().parents[1] / "vllm" / "profiles"


def fleet(
    *speeds: float, policy: str = "paper", predictor: str = "empirical", seed: int = 0, kv: int = 60_000
) -> tuple[SchedulerSetup, dict[str, EngineSpec]]:
    latencies = {f"i{i}": FAST.scaled(speed) for i, speed in enumerate(speeds)}
    capacity = Capacity(kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=128)
    setup = SchedulerSetup(
        specs=tuple(
            InstanceSpec(name, "m", latency=latency, capacity=capacity) for name, latency in latencies.items()
        ),
        policy=policy,
        params=PolicyParams(),
        limits=QueueLimits(max_requests=None, max_bytes=None, timeout_s=None),
        predictor=predictor,
        seed=seed,
        lengths=LengthDistribution([20, 60, 100, 300]),
        initial_health=Health.UP,
    )
    limits = EngineLimits.from_capacity(capacity)
    return setup, {name: EngineSpec(latency, limits) for name, latency in latencies.items()}


def load(count: int, rate: float, seed: int = 0) -> list[PlannedRequest]:
    rng = random.Random(seed)
    now, plan = 0.0, []
    for i in range(count):
        plan.append(PlannedRequest(i, now, Row(None, rng.randrange(10, 800), rng.choice([20, 60, 100, 300]))))
        now += rng.expovariate(rate) if rate else 0.0
    return plan


def simulate(
    setup: SchedulerSetup, engines: dict[str, EngineSpec], plan: list[PlannedRequest]
) -> FleetResult:
    simulation = FleetSimulation(setup, engines, plan, model="m")
    result = simulation.run()
    for instance in simulation.scheduler.instances:
        assert (instance.work_ns, instance.kv_tokens, instance.in_flight) == (0, 0, 0)
    return result


@pytest.mark.parametrize(
    ("policy", "predictor"),
    sorted({*((policy, "online") for policy in POLICIES), *(("hetlb", each) for each in PREDICTORS)}),
)
@pytest.mark.parametrize("rate", [0.0, 20.0])
def test_every_request_completes_with_its_tokens(policy: str, predictor: str, rate: float) -> None:
    setup, engines = fleet(1.0, 3.0, policy=policy, predictor=predictor)
    plan = load(150, rate)
    result = simulate(setup, engines, plan)
    assert result.outcomes == [Outcome.OK] * 150
    for planned, record in zip(plan, result.records, strict=True):
        assert record.ok
        assert record.output_tokens == planned.output_tokens
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert planned.scheduled_s < record.first_token_s <= record.last_token_s
    summary = result.summary()
    assert sum(entry["completed"] for entry in summary["instances"]) == 150
    assert summary["total_output_tokens"] == sum(planned.output_tokens for planned in plan)


@settings(max_examples=examples(15))
@given(st.integers(0, 1000), st.sampled_from(("paper", "random", "p2c")))
def test_the_same_seed_gives_the_same_result(seed: int, policy: str) -> None:
    setup, engines = fleet(1.0, 2.0, policy=policy, predictor="normal", seed=seed)
    plan = load(80, 30.0, seed)
    assert simulate(setup, engines, plan).summary() == simulate(setup, engines, plan).summary()


def test_a_lone_request_takes_what_the_formulas_say() -> None:
    setup, engines = fleet(1.0)
    result = simulate(setup, engines, [PlannedRequest(0, 5.0, Row(None, 400, 50))])
    record = result.records[0]
    assert record.ttft_s == pytest.approx(FAST.prefill_s(400))
    steps = sum(FAST.step_s(1, 400 + j) for j in range(1, 50))
    assert record.e2el_s == pytest.approx(FAST.prefill_s(400) + steps)


def test_requests_that_arrive_together_share_their_first_iteration() -> None:
    setup, engines = fleet(1.0)
    result = simulate(setup, engines, [PlannedRequest(i, 0.0, Row(None, 100, 2)) for i in range(10)])
    assert len({record.first_token_s for record in result.records}) == 1


def test_an_arrival_in_mid_stretch_starts_at_the_next_iteration() -> None:
    setup, engines = fleet(1.0)
    result = simulate(
        setup,
        engines,
        [PlannedRequest(0, 0.0, Row(None, 100, 1000)), PlannedRequest(1, 3.0, Row(None, 100, 5))],
    )
    late = result.records[1]
    assert late.first_token_s is not None
    step = FAST.step_s(1, 400)
    mixed = FAST.mixed_step_s(100, 1, 100, 1, 400)
    assert 3.0 < late.first_token_s <= 3.0 + step + mixed * 1.05


def test_a_server_that_takes_its_time_with_requests_delays_each_by_that_much() -> None:
    setup, engines = fleet(1.0)
    slow = {
        name: replace(spec, latency=replace(spec.latency, request_s=0.25)) for name, spec in engines.items()
    }
    plan = [PlannedRequest(i, 40.0 * i, Row(None, 100 + i, 30)) for i in range(5)]
    for prompt, late in zip(
        simulate(setup, engines, plan).records, simulate(setup, slow, plan).records, strict=True
    ):
        assert late.ttft_s == pytest.approx((prompt.ttft_s or 0.0) + 0.25)
        assert late.tpot_s == pytest.approx(prompt.tpot_s)
    busy = load(200, 8.0)
    assert simulate(setup, slow, busy).outcomes == [Outcome.OK] * 200


def test_a_later_clock_changes_nothing_but_the_times() -> None:
    setup, engines = fleet(1.0, 3.0)
    plan = load(150, 20.0)
    early = simulate(setup, engines, plan)
    moved = [replace(planned, scheduled_s=planned.scheduled_s + 1024.0) for planned in plan]
    late = FleetSimulation(setup, engines, moved, model="m", start_s=1024.0).run()
    assert late.counted == early.counted
    for before, after in zip(early.records, late.records, strict=True):
        assert after.instance == before.instance
        assert after.e2el_s == pytest.approx(before.e2el_s)


@pytest.mark.parametrize("policy", ["hetlb", "paper"])
def test_a_year_without_requests_is_over_at_once(policy: str) -> None:
    """Each second of it was a round over the engines: arrivals in a wrong unit made a run without an end."""

    def ends(pause_s: float) -> list[float]:
        plan = load(20, 2.0)
        later = [
            replace(each, index=each.index + 20, scheduled_s=each.scheduled_s + pause_s) for each in plan
        ]
        result = simulate(*fleet(1.0, 3.0, policy=policy), [*plan, *later])
        assert result.outcomes == [Outcome.OK] * 40
        return [(each.last_token_s or 0.0) - pause_s for each in result.records[20:]]

    assert ends(2.0**40) == pytest.approx(ends(2.0**12), abs=0.05)  # a late clock has larger steps


def test_littles_law_holds() -> None:
    setup, engines = fleet(1.0)
    plan = load(1500, 6.0)
    result = simulate(setup, engines, plan)
    end = max(record.last_token_s or 0.0 for record in result.records)
    in_system = sum(record.e2el_s for record in result.records) / end
    rate = len(plan) / end
    mean_time = sum(record.e2el_s for record in result.records) / len(plan)
    assert in_system == pytest.approx(rate * mean_time)
    # Far below saturation nothing waits: the mean time is close to a lone request's.
    alone = simulate(setup, engines, load(1, 0.0)).records[0].e2el_s
    assert mean_time < 4 * alone


def test_gaps_of_tokens_add_up_to_the_time_between_first_and_last() -> None:
    setup, engines = fleet(1.0, 2.0, kv=9000)
    result = simulate(setup, engines, load(120, 0.0))
    between = sum(record.e2el_s - record.ttft_s for record in result.records)
    gaps = result.gaps.weighted()
    assert sum(each["preemptions"] for each in result.counted.values()) > 0, (
        "expected a KV cache small enough to preempt"
    )
    assert sum(gap * count for gap, count in gaps) == pytest.approx(between, rel=1e-9)
    tokens = sum(record.output_tokens - 1 for record in result.records)
    assert sum(count for _, count in gaps) == tokens


def test_what_never_fits_fails_and_the_rest_completes() -> None:
    setup, engines = fleet(1.0, kv=1024)
    plan = [
        PlannedRequest(0, 0.0, Row(None, 5000, 10)),  # refused by the scheduler
        PlannedRequest(1, 0.0, Row(None, 1000, 500)),  # refused by the engine
        PlannedRequest(2, 0.0, Row(None, 100, 10)),
    ]
    result = simulate(setup, engines, plan)
    assert result.outcomes == [Outcome.BAD_REQUEST, Outcome.UPSTREAM_REFUSED, Outcome.OK]
    assert result.summary()["failed"] == 2


def test_the_paper_beats_round_robin_on_unequal_instances() -> None:
    plan = load(600, 0.0)
    throughput = {}
    for policy in ("rr", "paper"):
        setup, engines = fleet(1.0, 4.0, policy=policy)
        throughput[policy] = simulate(setup, engines, plan).summary()["output_throughput"]
    assert throughput["paper"] > 1.25 * throughput["rr"]


def test_bound_is_the_sum_of_lone_runs_and_split_is_near_it() -> None:
    _, engines = fleet(1.0, 2.0)
    plan = load(400, 0.0)
    speeds = {name: run_alone(each, plan, IterationRule.TOKEN).tokens_per_s for name, each in engines.items()}
    alone = []
    for name in engines:
        one, one_engine = fleet(1.0) if name == "i0" else fleet(2.0)
        alone.append(simulate(one, one_engine, plan).summary()["total_token_throughput"])
    bound = sum(speeds.values())
    assert bound == pytest.approx(sum(alone))
    from hetlb.balancer.core.predictor import make_predictor

    lengths = {planned.index: planned.output_tokens for planned in plan}
    predictor = make_predictor("oracle", rng=random.Random(0), oracle=lengths)
    split = fixed_split(engines, plan, IterationRule.TOKEN, speeds, predictor, model="m")
    assert 0.8 * bound < split < 1.1 * bound


def test_an_engine_that_slows_down_ends_its_iteration_and_goes_on_slower() -> None:
    setup, engines = fleet(1.0)
    plan = [PlannedRequest(0, 0.0, Row(None, 100, 200))]
    alone = simulate(setup, engines, plan).records[0]
    assert alone.first_token_s is not None
    assert alone.last_token_s is not None
    at = (alone.first_token_s + alone.last_token_s) / 2
    changed = {name: replace(spec, changes=((at, 3.0),)) for name, spec in engines.items()}
    slowed = simulate(setup, changed, plan).records[0]
    assert slowed.first_token_s == alone.first_token_s
    assert slowed.last_token_s is not None
    step = FAST.step_s(1, 300)
    assert slowed.last_token_s == pytest.approx(at + 3.0 * (alone.last_token_s - at), abs=3 * step)
    forgiven = {
        name: replace(spec, changes=((at, 3.0), (slowed.last_token_s, 1.0))) for name, spec in engines.items()
    }
    assert simulate(setup, forgiven, plan).records[0].last_token_s == slowed.last_token_s


def test_hetlb_keeps_its_throughput_with_wrong_profiles() -> None:
    setup, engines = fleet(1.0, 5.0, policy="hetlb")
    plan = load(1500, 0.0)
    right = simulate(setup, engines, plan).summary()["total_token_throughput"]
    believed = tuple(
        replace(spec, latency=spec.latency.scaled(wrong))
        for spec, wrong in zip(setup.specs, (1.3, 0.7), strict=True)
        if spec.latency is not None
    )
    wrong = simulate(replace(setup, specs=believed), engines, plan).summary()["total_token_throughput"]
    assert wrong >= 0.95 * right


def test_a_first_burst_without_profiles_is_near_what_the_fast_server_gives_alone() -> None:
    """Two servers on CPU, 10 to 1 in decode: neither their speeds nor their slots are known."""
    setup, engines = fleet(1.0, 1.0, policy="hetlb", predictor="online")
    for name, file in (("i0", "tiny-slow"), ("i1", "tiny-fast")):
        profile = load_profile(PROFILES / f"{file}.yaml")
        engines[name] = EngineSpec(profile.latency, EngineLimits.from_capacity(profile.capacity))
    rng = random.Random(1)
    plan = [
        PlannedRequest(i, 0.0, Row(None, round(rng.gauss(128, 32)), round(rng.gauss(64, 16))))
        for i in range(160)
    ]
    unknown = tuple(replace(spec, latency=None, capacity=Capacity()) for spec in setup.specs)
    both = simulate(replace(setup, specs=unknown), engines, plan).summary()
    fast = simulate(replace(setup, specs=setup.specs[1:]), engines, plan).summary()
    assert both["total_token_throughput"] >= 0.6 * fast["total_token_throughput"]
    assert both["completed"] == fast["completed"] == 160
