"""The search: memory to the byte, brute force as the oracle, plans broken on purpose are found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.clusters import Steps

from hetlb.balancer.config.profile_file import DecodeCoefficients, PrefillCoefficients, Profile
from hetlb.balancer.core.latency import LatencyModel
from hetlb.errors import PlanError
from hetlb.tools.models.degrees import Heads, ModelShape, refusal
from hetlb.tools.plan.check import check
from hetlb.tools.plan.cluster import Cluster, ClusterLimits
from hetlb.tools.plan.common.plan_tables import Machine, Model
from hetlb.tools.plan.highs import SolveLimits
from hetlb.tools.plan.tp_search import NOT_MEASURED, Memory, Part, memory, search
from hetlb.tools.plan.trace_throughput import Batch, pack, static_estimate
from hetlb.tools.sim.deadline import look

V100 = 34_359_738_368
RESERVED = 2_147_483_648
MODEL = Model(name="m", parameters=8.03e9, bytes_per_parameter=2, kv_bytes_per_token=131_072)
LIMITS = ClusterLimits(max_input_tokens=2048, max_output_tokens=1024)


def profiles(*degrees: int) -> dict[int, Profile]:
    """Profiles that are known by their names alone."""
    prefill = PrefillCoefficients(k1=1.0, k2=0.0, k3=0.0, k4=0.0)
    decode = DecodeCoefficients(k5=1.0, k6=0.0, k7=0.0, k8=0.0)
    return {d: Profile(version=1, name=f"p{d}", prefill=prefill, decode=decode) for d in degrees}


BOX = Machine("box", "V100", 8, V100, 0.9, RESERVED, profiles(1, 2, 4, 8))


def cluster(*machines: Machine, model: Model = MODEL, limits: ClusterLimits = LIMITS) -> Cluster:
    return Cluster(path=Path("c.yaml"), model=model, limits=limits, machines=machines)


WHOLE = cluster(BOX)


def test_memory_by_hand() -> None:
    # 0.9 * 34359738368 = 30923764531.2; - 2147483648 = 28776280883.2; - 16060000000 = 12716280883.2
    one = memory(WHOLE, BOX, Part(1))
    assert (one.kv_cache_tokens, one.missing_bytes) == (97_017, 0)
    # 4 * 28776280883.2 - 16060000000 = 99045123532.8
    assert memory(WHOLE, BOX, Part(4)).kv_cache_tokens == 99_045_123_532 // 131_072


def test_the_limit_is_exact_to_the_byte() -> None:
    machine = replace(BOX, gpu_memory_utilization=1.0, reserved_bytes_per_gpu=0, gpus=1)
    need = 16_060_000_000 + 131_072 * 3072
    assert memory(WHOLE, replace(machine, memory_bytes=need), Part(1)).missing_bytes == 0
    assert memory(WHOLE, replace(machine, memory_bytes=need - 1), Part(1)).missing_bytes == 1
    assert memory(WHOLE, replace(machine, memory_bytes=1000), Part(1)).kv_cache_tokens == 0


def test_the_stage_with_the_most_layers_limits_a_pipeline() -> None:
    layered = cluster(BOX, model=msgspec.structs.replace(MODEL, layers=32))
    # 11 of 32 layers: 28776280883.2 - 16060000000 * 11 / 32 bytes, by 131072 * 11 / 32 a token.
    assert memory(layered, BOX, Part(1, 3)).kv_cache_tokens == 516_150


def test_infeasible_degrees_come_last_with_their_reason() -> None:
    box = replace(BOX, memory_bytes=V100 // 2, profiles=profiles(2, 4))
    rankings = search(cluster(box), lambda profile: {"p2": 2.5, "p4": 10.0}[profile.name])
    ranking = rankings[box.kind]
    assert [option.part for option in ranking] == [Part(4), Part(2), Part(1), Part(8)]
    one, eight = ranking[2:]
    # 0.9 * 17179869184 - 2147483648 - 16060000000 = -2745601382.4; 402653184 are needed
    assert one.memory.missing_bytes == 3_148_254_567
    assert one.reason == "does not fit: 3148254567 bytes missing"
    assert (one.throughput_tok_s, one.memory.kv_cache_tokens) == (0.0, 0)
    assert eight.reason == "no profile for tensor_parallel_size 8"
    assert [option.feasible for option in ranking] == [True, True, False, False]
    check(cluster(box), rankings)


def test_machines_of_one_kind_are_searched_once() -> None:
    asked: list[str] = []

    def throughput(profile: Profile) -> float:
        asked.append(profile.name)
        return 1.0

    machines = [replace(BOX, name=f"box-{i}") for i in range(3000)]
    rankings = search(cluster(*machines), throughput)
    assert asked == ["p1", "p2", "p4", "p8"]
    assert {machine.kind for machine in machines} == rankings.keys()
    check(cluster(*machines), rankings)


@settings(max_examples=60)
@given(
    gpus=st.integers(1, 12),
    memory_bytes=st.integers(0, 40),
    utilization=st.sampled_from([0.5, 0.9, 0.95, 1.0]),
    speeds=st.lists(st.floats(0.5, 9.0), min_size=13, max_size=13),
    missing=st.sets(st.integers(1, 12)),
)
def test_brute_force_finds_the_same_best(
    gpus: int, memory_bytes: int, utilization: float, speeds: list[float], missing: set[int]
) -> None:
    model = Model(name="m", parameters=20, bytes_per_parameter=1, kv_bytes_per_token=2)
    known = profiles(*(d for d in range(1, gpus + 1) if gpus % d == 0 and d not in missing))
    machine = Machine("x", "g", gpus, memory_bytes, utilization, 1, known)
    whole = cluster(machine, model=model, limits=ClusterLimits(max_input_tokens=3, max_output_tokens=1))
    rankings = search(whole, lambda profile: speeds[int(profile.name[1:])])
    check(whole, rankings)
    first = rankings[machine.kind][0]
    best = None
    for degree in range(1, gpus + 1):
        # In hundredths, whole numbers: utilization has two digits.
        room = degree * (round(utilization * 100) * memory_bytes - 100) - 2000
        if gpus % degree == 0 and degree not in missing and room >= 800:
            rate = (gpus // degree) * speeds[degree]
            if best is None or rate > best[0]:
                best = (rate, degree)
    assert (first.part.tensor_parallel_size if first.feasible else None) == (best[1] if best else None)


@pytest.mark.parametrize(
    "change",
    [
        {"memory": Memory(1, 0)},
        {"memory": Memory(690_000, 5)},
        {"throughput_tok_s": 0.0},
        {"reason": "why"},
        {"part": Part(3)},
    ],
)
def test_broken_plans_are_found_out(change: dict[str, object]) -> None:
    rankings = search(WHOLE, lambda profile: 1.0)
    check(WHOLE, rankings)
    first, *others = rankings[BOX.kind]
    with pytest.raises(PlanError):
        check(WHOLE, {BOX.kind: [replace(first, **change), *others]})
    with pytest.raises(PlanError, match="highest throughput first"):
        check(WHOLE, {BOX.kind: [*reversed(others), first]})
    with pytest.raises(PlanError, match="one ranking per kind of machine"):
        check(WHOLE, {})


def test_an_estimate_that_is_no_throughput_is_refused() -> None:
    with pytest.raises(PlanError, match="box, tp1: expected a throughput above 0, got nan"):
        search(WHOLE, lambda *_: float("nan"))


def test_packing_is_greedy_in_trace_order() -> None:
    rows = [(10, 5), (20, 5), (30, 30), (200, 1), (1, 1)]
    assert pack(rows, 100, 8) == [Batch(3, 20.0, 30), Batch(1, 1.0, 1)]
    assert pack(rows, 100, 2) == [Batch(2, 15.0, 5), Batch(2, 15.5, 30)]


def test_static_estimate_by_hand() -> None:
    latency = LatencyModel(0.01, 0.1, 0.0, 1.0, 0.001, 0.01, 0.0, 0.5)
    # one batch: B 2, I 15, O 3; prefill 0.01*30 + 0.2 + 1 = 1.5; cached 16+17+18 = 51
    # decode 3*(0.02 + 0.5) + 0.002*51 = 1.662; tokens 10+3+20+2 = 35
    assert static_estimate(latency, [(10, 3), (20, 2)], 100, 8) == pytest.approx(35 / 3.162)
    assert static_estimate(latency, [(10, 3)], 5, 8) == 0.0


def test_experts_stay_whole_at_a_degree_that_vllm_takes_in_no_other_way() -> None:
    """Experts of 192 units cannot be split over 8 GPUs, in blocks of 128; their makers keep them whole."""
    shape = ModelShape(
        layers=62,
        heads=(Heads(queries=48, keys=8, key_size=128, value_size=128),),
        vocab_size=200_064,
        experts=(("intermediate_size", 1536),),
        block=(128, 128),
    )
    facts = replace(MODEL.known, shape=shape)
    of = cluster(BOX, model=msgspec.structs.replace(MODEL, facts=facts))
    assert refusal(shape, 8)
    assert not refusal(shape, 8, expert_parallel=True)
    rankings = search(of, lambda profile: 1.0)
    check(of, rankings)
    by_degree = {option.part.tensor_parallel_size: option for option in rankings[BOX.kind]}
    profiles = {degree: by_degree[degree].profile for degree in (4, 8)}
    assert [each and each.engine.enable_expert_parallel for each in profiles.values()] == [None, True]


def test_after_the_time_a_machine_has_the_degrees_that_were_measured() -> None:
    measured: list[str] = []

    def throughput(profile: Profile) -> float:
        look()
        measured.append(profile.name)
        return 1.0

    with SolveLimits(deadline=2.5, clock=Steps()).stopping():
        ranking = search(WHOLE, throughput)[BOX.kind]
    assert measured == ["p1", "p2"]
    assert [option.feasible for option in ranking] == [True, True, False, False]
    assert {option.reason for option in ranking[2:]} == {NOT_MEASURED}
    check(WHOLE, {BOX.kind: ranking})
