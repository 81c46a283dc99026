"""Configurations and their throughput: layers, KV capacity, pipelines, saturation, the cache, types."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
import yaml

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.latency import LatencyModel
from hetlb.errors import ConfigError
from hetlb.tools.models.model_facts import read_facts
from hetlb.tools.plan.common.capacity import divide_layers
from hetlb.tools.plan.configurations import candidates, capacity_of
from hetlb.tools.plan.market import Market, load_market
from hetlb.tools.plan.rent_program import ConfigurationStage
from hetlb.tools.plan.throughput import Measured, SloLimits, interleave, rate_within, saturated_rate
from hetlb.tools.plan.workloads import RequestType, cluster
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.study import engine_of

PROFILING = Path(__file__).parents[2] / "profiling"


def market(tmp_path: Path) -> Market:
    """Two kinds of GPU, one with profiles of degree 1 and 2, the other with a roofline."""
    profiles = {"m": {tp: str(PROFILING / f"l40s-llama-3.1-8b-tp{tp}.yaml") for tp in (1, 2)}}
    document = {
        "version": 1,
        "budget_per_hour": 4,
        "models": [{"name": "m", "parameters": 8e9, "kv_bytes_per_token": 131072, "layers": 32}],
        "offers": [
            {"gpu": "L", "price_per_hour": 0.8, "available": 4, "gpus_per_machine": 2,
             "memory_bytes": 48305799168, "profiles": profiles},
            {"gpu": "A", "price_per_hour": 0.5, "available": 2, "gpus_per_machine": 2,
             "memory_bytes": 24000000000, "roofline": {"flops": 150e12, "bandwidth_bytes_per_s": 700e9}},
        ],
    }  # fmt: skip
    path = tmp_path / "market.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_market(path)


def test_layers_follow_the_memory_of_the_stages() -> None:
    # The paper's example: 24 layers, memory 1:2.
    shares = divide_layers([1, 2], 24)
    assert [share * 24 for share in shares] == [8, 16]
    # 10 layers on three alike: the remainder goes somewhere, none is lost.
    assert sum(divide_layers([1] * 3, 10)) == 1


def test_kv_capacity_comes_from_the_stage_with_the_least_room(tmp_path: Path) -> None:
    found = market(tmp_path)
    # One L: 0.9 * 48305799168 - 16e9 bytes, by 131072 a token.
    assert capacity_of(found, found.models["m"], [ConfigurationStage("L", 1, Fraction(1))]) == 209619
    both = [ConfigurationStage("L", 1, Fraction(1, 2)), ConfigurationStage("A", 1, Fraction(1, 2))]
    # The A holds half of the weights and half of every token: 0.9 * 24e9 - 8e9 bytes, by 65536.
    assert capacity_of(found, found.models["m"], both) == 207519


def test_what_is_enumerated_fits_and_knows_its_origin(tmp_path: Path) -> None:
    found = {each.name: each for each in candidates(market(tmp_path), {"m": 3000})}
    assert {"l-tp1", "l-tp2", "l-tp1-pp2", "a-tp1", "l-a-tp1-pp2", "l-a-tp1-pp2-by-speed"} <= found.keys()
    assert found["l-tp1"].origin == "measured"
    assert found["a-tp1"].origin == "roofline"
    assert found["l-a-tp1-pp2"].origin == "composed: measured and roofline"
    assert found["l-a-tp1-pp2"].gpus == {"L": 1, "A": 1}
    assert market(tmp_path).prices == {"L": 0.8, "A": 0.5}
    assert all(each.profile is not None for each in found.values())
    with pytest.raises(ConfigError, match=r"hold a model, got none for m \(16 GB of weights, a request of "):
        candidates(market(tmp_path), {"m": 10_000_000})


def test_what_vllm_refuses_is_not_enumerated(tmp_path: Path) -> None:
    known = market(tmp_path)
    raw = {"model_type": "llama", "num_attention_heads": 31, "num_hidden_layers": 32, "vocab_size": 128_256}
    facts = read_facts({**raw, "hidden_size": 31 * 128, "intermediate_size": 14336}, "m")
    models = {"m": msgspec.structs.replace(known.models["m"], facts=facts)}
    found = candidates(msgspec.structs.replace(known, models=models), {"m": 3000})
    assert {each.stages[0].tensor_parallel_size for each in found} == {1}


# --- throughput -----------------------------------------------------------------------------------------


def plain(kv_cache_tokens: int = 100_000, seqs: int = 32) -> EngineSpec:
    """A decode step takes 10 ms, prompts 10 us a token."""
    latency = LatencyModel(k1=1e-5, k2=0.0, k3=0.0, k4=1e-3, k5=0.0, k6=0.0, k7=0.0, k8=1e-2)
    return EngineSpec(latency, EngineLimits(kv_cache_tokens, max_num_seqs=seqs))


def test_saturation_is_the_batch_over_the_time_of_an_answer() -> None:
    # 32 sequences of 100 steps of 10 ms; a prompt of 16 tokens adds nearly nothing.
    assert saturated_rate(plain(), [(1.0, [(16, 100)])]) == pytest.approx(32.0, rel=0.05)
    # KV for 8 of them when they are fully grown, for 16 that are half-grown.
    assert saturated_rate(plain(kv_cache_tokens=8 * 128), [(1.0, [(16, 100)])]) < 18


def test_what_does_not_fit_is_not_served() -> None:
    assert saturated_rate(plain(kv_cache_tokens=64), [(1.0, [(60, 20)])]) == 0.0


def test_types_are_interleaved_in_their_proportions() -> None:
    rows = interleave([(0.75, [(1, 1)]), (0.25, [(2, 2)])], 100)
    assert rows.count((1, 1)) == 75
    assert rows[:8].count((2, 2)) == 2


def test_an_slo_lowers_the_rate() -> None:
    mix = [(1.0, [(100, 50)])]
    loose = rate_within(plain(), mix, SloLimits())
    tight = rate_within(plain(), mix, SloLimits(ttft_s=0.02))
    assert 0 < tight < loose <= saturated_rate(plain(), mix)


def test_throughputs_are_kept_by_content(tmp_path: Path) -> None:
    profile = load_profile(PROFILING / "l40s-llama-3.1-8b-tp1.yaml")
    kind = RequestType("w", "m", 1.0, ((200, 20),))
    path = tmp_path / "cache" / "t.jsonl"
    first = Measured(path)
    rate = first.alone(profile, kind)
    again = Measured(path)
    assert (again.alone(profile, kind), again.runs, first.runs) == (rate, 0, 1)
    again.alone(profile, replace(kind, rows=((200, 21),)))
    assert again.runs == 1
    path.write_text(path.read_text() + "half a line")
    assert Measured(path).alone(profile, kind) == rate
    key = path.read_text().split('"')[1]
    path.write_bytes(b'\xff\n["%b", -1]\n[]\n' % key.encode())
    assert Measured(path).alone(profile, kind) == rate
    assert Measured(tmp_path).alone(profile, kind) == rate
    assert engine_of(profile).limits.kv_cache_tokens == profile.engine.kv_cache_tokens


# --- types ----------------------------------------------------------------------------------------------


def test_clusters_of_a_trace_are_its_types() -> None:
    rows = [(1000 + i, 10) for i in range(30)] + [(100, 300 + i) for i in range(10)]
    found = cluster(rows, 2, "m")
    assert [round(each.share, 3) for each in found.types] == [0.75, 0.25]
    assert found.types[0].output_tokens == 10
    assert found.explained > 0.99
    assert found.input_error < 0.02
    assert cluster(rows, 2, "m") == found
    assert len(cluster([(5, 5)] * 4, 3, "m").types) == 1
