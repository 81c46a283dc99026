"""Layouts: every multiset of instances, partly used machines, and fleets chosen together."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.tools.models.model_facts import read_facts
from hetlb.tools.plan.cluster import Cluster, ClusterLimits
from hetlb.tools.plan.common.plan_tables import Machine, Model
from hetlb.tools.plan.layouts import (
    Layout,
    LayoutFleet,
    LayoutTarget,
    choose_together,
    gpus_of,
    layout_name,
    layouts_of,
)
from hetlb.tools.plan.throughput import SloLimits
from hetlb.tools.plan.tp_search import Option, Part, Throughput, best_pipelines, search
from hetlb.tools.plan.trace_throughput import Throughputs, spread

PROFILING = Path(__file__).parents[2] / "profiling"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
MODEL = Model(
    name="m",
    parameters=8.03e9,
    kv_bytes_per_token=131_072,
    facts=read_facts(LLAMA, "m"),
)
LIMITS = ClusterLimits(max_input_tokens=2048, max_output_tokens=1024)
ROWS = [(100 + 37 * i % 900, 20 + 53 * i % 400) for i in range(80)]
MIX = [(1.0, ROWS)]


def box(name: str, system: str, gpus: int, degrees: tuple[int, ...] = (1, 2, 4)) -> Machine:
    memory = 48_305_799_168 if system == "l40s" else 85_899_345_920
    profiles = {tp: load_profile(PROFILING / f"{system}-llama-3.1-8b-tp{tp}.yaml") for tp in degrees}
    return Machine(name, system, gpus, memory, 0.9, 2_147_483_648, profiles)


def cluster(*machines: Machine, model: Model = MODEL) -> Cluster:
    return Cluster(path=Path("c.yaml"), model=model, limits=LIMITS, machines=machines)


def instances_of(whole: Cluster, throughput: Throughput, most_stages: int = 1) -> dict[Part, Option]:
    """Options of the one machine of a cluster, by its part."""
    (machine,) = whole.machines
    ranking = search(whole, throughput)[machine.kind]
    pipelines = best_pipelines(whole, machine, throughput, most_stages, MIX)
    return {option.part: option for option in [*ranking, *pipelines] if option.feasible}


def fleet(machines: list[Machine], rate: float, slo: SloLimits | None = None) -> LayoutFleet:
    def throughput(profile: Profile) -> float:
        return 1.0 / profile.latency.step_s(64, 64 * 500)

    instances = {m.kind: instances_of(cluster(m), throughput) for m in machines}
    return LayoutFleet(machines, instances, ROWS, LayoutTarget(rate, slo or SloLimits()))


@settings(max_examples=60)
@given(
    gpus=st.integers(1, 10),
    sizes=st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1),
    partly=st.booleans(),
)
def test_every_multiset_is_listed_once(gpus: int, sizes: set[int], partly: bool) -> None:
    found = layouts_of(gpus, [Part(size) for size in sizes], partly=partly)
    assert len(set(found)) == len(found)

    def count(left: int, allowed: tuple[int, ...]) -> int:
        """Multisets by recursion on the largest size allowed; the empty one counts."""
        if not allowed:
            return 1 if partly or left < min(sizes) else 0
        size, rest = allowed[0], allowed[1:]
        return sum(count(left - size * n, rest) for n in range(left // size + 1))

    everything = count(gpus, tuple(sorted(sizes, reverse=True)))
    empty = 1 if partly or gpus < min(sizes) else 0
    assert len(found) == everything - empty
    for layout in found:
        assert gpus_of(layout) <= gpus
        assert list(layout) == sorted(layout, reverse=True)
        assert partly or gpus - gpus_of(layout) < min(sizes)


def test_four_beside_two_on_six_gpus() -> None:
    machine = box("six", "a100_sxm", 6)
    evaluated = fleet([machine], math.inf).evaluate(machine, math.inf)
    names = [layout_name(each.layout) for each in evaluated]
    assert "1 x tp4 + 1 x tp2" in names
    assert evaluated == sorted(evaluated, key=lambda each: -each.throughput_tok_s)


def test_what_vllm_refuses_is_in_no_layout() -> None:
    machine = box("six", "a100_sxm", 6, (2,))
    machine = replace(machine, profiles=dict.fromkeys((2, 3, 6), machine.profiles[2]))
    found = instances_of(cluster(machine), lambda profile: 1.0)
    assert set(found) == {Part(2)}


def test_a_pipeline_holds_what_its_gpus_hold_together() -> None:
    machine = box("four", "l40s", 4)
    big = msgspec.structs.replace(MODEL, parameters=45e9)  # 90 GB: one or two GPUs do not hold it
    found = instances_of(
        cluster(machine, model=big), lambda profile: float(profile.engine.kv_cache_tokens or 0), 4
    )
    assert Part(1) not in found
    assert Part(2) not in found
    pipelines = [each for each in found.values() if each.part.pipeline_parallel_size > 1]
    assert {each.part.gpus for each in pipelines} == {3, 4}
    for each in pipelines:
        if each.part.gpus < 4:
            continue
        assert each.memory == found[Part(4)].memory
        assert each.profile is not None
        assert each.profile.engine.kv_cache_tokens == each.memory.kv_cache_tokens
        assert each.profile.source is not None
        assert not each.profile.source.measured


@pytest.mark.parametrize("rate", [4.0, 40.0, math.inf])
def test_together_is_at_least_one_by_one(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetlb.tools.plan.layouts._MOST_REQUESTS", 120)  # of 2,000: as many for each layout
    machines = [box("a", "a100_sxm", 2, (1, 2)), box("l", "l40s", 2, (1, 2))]
    whole = fleet(machines, rate, SloLimits(0.3, 0.03))
    share = rate / 2
    evaluated = {m.kind: whole.evaluate(m, share) for m in machines}
    choice, one_by_one = choose_together(whole, evaluated)
    assert choice.worth is not None
    assert one_by_one.worth is not None
    assert choice.worth.figure >= one_by_one.worth.figure
    again: dict[str, Layout] = choice.layouts
    assert whole.simulate(again, rate) == choice.worth


def test_cheaper_is_better_where_both_meet_the_target() -> None:
    machine = replace(box("a", "a100_sxm", 4), price_per_gpu_hour=2.0)
    evaluated = fleet([machine], 1.0, SloLimits(1.0, 0.1)).evaluate(machine, 1.0)
    assert evaluated[0].cost_per_hour == 2.0
    assert gpus_of(evaluated[0].layout) == 1
    assert evaluated[0].worth is not None
    assert evaluated[0].worth.slo_attainment == 1.0


def test_a_fleet_serves_what_its_instances_serve_alone() -> None:
    throughput = Throughputs(ROWS, "simulate").of
    machines = [box("a", "a100_sxm", 1, (1,)), box("l", "l40s", 2, (1,))]
    instances = {m.kind: instances_of(cluster(m), throughput) for m in machines}
    one = Part(1)
    alone = sum(m.gpus * instances[m.kind][one].throughput_tok_s for m in machines)
    whole = LayoutFleet(machines, instances, ROWS, LayoutTarget(math.inf, SloLimits()))
    served = whole.simulate({"a": (one,), "l": (one, one)}, math.inf).total_token_throughput
    assert served == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_of_a_trace_has_its_mean_lengths(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(1 + int(rng.lognormvariate(6, 0.9)), 1 + int(rng.lognormvariate(5, 0.8))) for _ in range(8000)]
    chosen = spread(rows, 400)
    assert len(chosen) == 400
    rest = iter(rows)
    assert all(row in rest for row in chosen)  # in the order of the trace
    for of in (0, 1):
        means = [sum(row[of] for row in some) / len(some) for some in (chosen, rows)]
        assert means[0] == pytest.approx(means[1], rel=0.05)
    assert spread(rows[:100], 400) == rows[:100]


@pytest.mark.parametrize("kind", ["simulate", "static"])
def test_profiles_of_one_name_have_throughputs_of_their_own(kind: str) -> None:
    one = load_profile(PROFILING / "l40s-llama-3.1-8b-tp1.yaml")
    other = msgspec.structs.replace(load_profile(PROFILING / "a100_sxm-llama-3.1-8b-tp1.yaml"), name=one.name)
    throughputs = Throughputs([(200, 50)] * 40, kind)
    assert throughputs.of(other) > throughputs.of(one) > 0.0
