"""Data-parallel servers with whole experts: their memory by hand, an estimate, a profile of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile, profiles_of
from hetlb.cli.main import main
from hetlb.errors import PlanError
from hetlb.tools.plan.check import check_split
from hetlb.tools.plan.cluster import load_cluster, load_split
from hetlb.tools.plan.common.data_parallel import Degrees, data_parallel_degrees, rank_tokens
from hetlb.tools.plan.configurations import candidates
from hetlb.tools.plan.disaggregation.cost import GroupTable, ProfileCost
from hetlb.tools.plan.disaggregation.split_cluster import Role, SplitPlan
from hetlb.tools.plan.disaggregation.split_servers import servers_of
from hetlb.tools.plan.disaggregation.split_simulation import simulate_plan
from hetlb.tools.plan.market import load_market
from hetlb.tools.plan.tp_search import Part, memory

#: A small model of DeepSeek's kind: a latent cache of (64 + 32) values in 4 layers, 3 of them with experts.
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 1024,
    "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 64, "q_lora_rank": 128,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 32000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
#: Of one GPU: the weights fit 8.
MEMORY = 700_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    rows = "".join(f",{100 + 7 * n % 50},{10 + 3 * n % 20}\n" for n in range(40))
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    (tmp_path / "facts.yaml").write_text("engine: {max_num_seqs: 32}\n")
    facts = ["--facts", str(tmp_path / "facts.yaml")]
    source = ["--from", "roofline", "--gpu", "H200", "--config", str(tmp_path / "config.json"), *facts]
    assert main(["profile", *source, "--tp", "8", "--out", str(tmp_path / "tp8.yaml"), "--json"]) == 0
    return tmp_path


def cluster(folder: Path, profiles: dict[Any, str], gpu: str = "H200") -> Path:
    machine = {"name": "box", "gpu": gpu, "gpus": 8, "memory_bytes": MEMORY, "profiles": profiles}
    document = {"model": {"name": "m", "config": "config.json"}, "machines": [machine]}
    document["limits"] = {"max_input_tokens": 2000, "max_output_tokens": 100}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return folder / "cluster.yaml"


def searched(folder: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    flags = ["--trace", str(folder / "trace.csv"), "--write-fleet", str(folder / "fleet.yaml"), "--json"]
    assert main(["search", "--config", str(path), *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_memory_of_a_rank_by_hand(folder: Path) -> None:
    loaded = load_cluster(cluster(folder, {8: "tp8.yaml"}))
    model, facts = loaded.model, loaded.model.known
    assert facts.expert_bytes == 3 * 64 * 3 * 1024 * 2048 * 2
    dense = facts.weight_bytes - facts.expert_bytes
    token = 4 * (64 + 32) * 2
    usable = Fraction(9, 10) * MEMORY
    for tp, dp in [(1, 8), (2, 4), (4, 2)]:
        # A rank keeps a token on each of its GPUs.
        by_hand = int((tp * usable - dense - Fraction(facts.expert_bytes, dp)) / (tp * token))
        assert rank_tokens(model, tp * usable, Degrees(tp, dp)) == by_hand
        assert memory(loaded, loaded.machines[0], Part(tp, 1, dp)).kv_cache_tokens == dp * by_hand
    assert set(data_parallel_degrees(model, 8)) == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}


def test_a_latent_cache_that_is_not_copied_is_planned_and_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = searched(folder, cluster(folder, {8: "tp8.yaml"}), capsys)
    ranking = {
        (each["tensor_parallel_size"], each["data_parallel_size"]): each
        for each in document["machines"][0]["ranking"]
    }
    ranked, copied = ranking[1, 8], ranking[8, 1]
    assert ranked["feasible"]
    assert ranked["estimated"]
    assert not copied["estimated"]
    assert ranked["kv_cache_tokens"] > 2 * copied["kv_cache_tokens"]
    [command] = document["commands"]
    chosen = document["fleet"]["layouts"]["box"][0]
    assert chosen["data_parallel_size"] > 1
    assert f"--data-parallel-size {chosen['data_parallel_size']}" in command
    assert "--enable-expert-parallel" in command
    # The fleet's profile is of one rank, and simulated with all.
    fleet = load_fleet(folder / "fleet.yaml")
    [profile] = profiles_of(fleet).values()
    assert profile.engine.data_parallel_size == chosen["data_parallel_size"]
    run = ["simulate", "--config", str(folder / "fleet.yaml"), "--trace", str(folder / "trace.csv")]
    assert main([*run, "--request-rate", "inf", "--json"]) == 0


def test_a_profile_of_its_own_is_no_estimate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = yaml.safe_load((folder / "tp8.yaml").read_text())
    profile["engine"] |= {"tensor_parallel_size": 1, "data_parallel_size": 8, "enable_expert_parallel": True}
    (folder / "tp1dp8.yaml").write_text(yaml.safe_dump(profile))
    assert load_profile(folder / "tp1dp8.yaml").engine.data_parallel_size == 8
    document = searched(folder, cluster(folder, {8: "tp8.yaml", "tp1dp8": "tp1dp8.yaml"}, "No GPU"), capsys)
    found = [each for each in document["machines"][0]["ranking"] if each["data_parallel_size"] == 8]
    assert [(each["feasible"], each["estimated"]) for each in found] == [(True, False)]
    reasons = {each["reason"] for each in document["machines"][0]["ranking"]}
    assert "no profile for tp2dp4, and no peak figures of No GPU" in reasons


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        (
            {"tp1dp16": "ranks.yaml"},
            "profiles.tp1dp16: expected at most the 8 GPUs of a machine for data-parallel ranks, got 16: "
            "ranks over machines are not planned",
        ),
        ({9: "tp8.yaml"}, "profiles.9: expected a degree of at most the 8 GPUs, got 9"),
        ({"dp8": "tp8.yaml"}, "profiles.dp8: expected a tensor-parallel degree or tp1dp8 as the key"),
        ({"tp8dp1": "ranks.yaml"}, "expected a profile of 1 data-parallel ranks, got one of 8"),
        ({"tp1dp8": "tp8.yaml"}, "expected a profile of degree 1, got one of degree 8"),
    ],
)
def test_a_wrong_key_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], profiles: dict[Any, str], words: str
) -> None:
    profile = yaml.safe_load((folder / "tp8.yaml").read_text())
    profile["engine"]["data_parallel_size"] = 8
    (folder / "ranks.yaml").write_text(yaml.safe_dump(profile))
    path = cluster(folder, profiles)
    assert main(["search", "--config", str(path), "--trace", str(folder / "trace.csv")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        (
            16,
            {},
            "gpus: expected at most the 8 GPUs of a machine for data-parallel ranks, got 16: ranks over ",
        ),
        (8, {}, "profile: expected one stage of 8 data-parallel ranks, got 2: pipelines of ranks are not "),
        (8, {"pipeline_parallel_size": 2}, "expected one stage of 8 data-parallel ranks, got 2: pipelines"),
    ],
)
def test_ranks_over_machines_and_pipelines_of_ranks_are_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], ranks: int, more: dict[str, Any], words: str
) -> None:
    profile = yaml.safe_load((folder / "tp8.yaml").read_text())
    profile["engine"] |= {"data_parallel_size": ranks, "tensor_parallel_size": 1}
    (folder / "ranks.yaml").write_text(yaml.safe_dump(profile))
    document = {
        "version": 1,
        "budget_per_hour": 16,
        "models": [{"name": "m", "config": "config.json"}],
        "offers": [{"gpu": "H200", "price_per_hour": 2.0, "memory_bytes": MEMORY}],
        "configurations": [{"name": "wide", "gpus": {"H200": 16}, "profile": "ranks.yaml", **more}],
        "workloads": [{"name": "chat", "share": 1, "input_tokens": 2000, "output_tokens": 100}],
    }
    path = folder / "market.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["rent", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_rent_has_data_parallel_servers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.plan.rent_simulation._MOST_REQUESTS", 300)
    offer = {"gpu": "H200", "price_per_hour": 2.0, "available": 8, "memory_bytes": MEMORY}
    peaks = {"flops": 989e12, "bandwidth_bytes_per_s": 4.8e12}
    document = {
        "version": 1,
        "budget_per_hour": 16,
        "models": [{"name": "m", "config": "config.json"}],
        "offers": [offer | {"roofline": peaks}],
        "workloads": [{"name": "chat", "share": 1, "input_tokens": 2000, "output_tokens": 100}],
    }
    path = folder / "market.yaml"
    path.write_text(yaml.safe_dump(document))
    found = {each.name: each for each in candidates(load_market(path), {"m": 2100})}
    ranked = found["h200-tp1dp8"]
    assert (ranked.gpus, ranked.origin) == ({"H200": 8}, "roofline")
    assert ranked.profile is not None
    assert ranked.profile.engine.data_parallel_size == 8
    copied = found["h200-tp8"].profile
    assert copied is not None
    assert 8 * (ranked.profile.engine.kv_cache_tokens or 0) > 2 * (copied.engine.kv_cache_tokens or 0)
    flags = ["--config", str(path), "--time-limit", "200", "--no-cache", "--json"]
    assert main(["rent", *flags, "--write-fleet", str(folder / "rented.yaml")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "h200-tp1dp8" in document["throughput_table"]


def test_split_has_data_parallel_groups(folder: Path) -> None:
    peaks = {"flops": 989e12, "bandwidth_bytes_per_s": 4.8e12}
    box = {"gpu": "H200", "gpus": 8, "memory_bytes": MEMORY, "roofline": peaks}
    document = {
        "model": {"name": "m", "config": "config.json"},
        "machines": [box | {"name": "a"}, box | {"name": "b"}],
        "workload": {"input_tokens": 2000, "output_tokens": 100},
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    of = load_split(path)
    cost = ProfileCost(of)
    table = GroupTable(of, cost)
    [group] = [g for g in table._promising(((0, 8),), Role.BOTH) if g.stages[0].degrees == (1, 8)]
    group = replace(group, capacity=cost.capacity(group.stages, group.role, group.kv_cache_tokens))
    plan = SplitPlan((group,), {}, {0: group.capacity})
    check_split(of, plan, cost.capacity)
    [server] = servers_of(of, plan)
    assert "--tensor-parallel-size 1 --data-parallel-size 8" in server.command()
    assert "--enable-expert-parallel" in server.command()
    served = simulate_plan(of, plan, cost, count=3000).request_throughput
    assert served == pytest.approx(group.capacity, rel=0.25)
    broken = replace(plan, groups=(replace(group, kv_cache_tokens=2 * group.kv_cache_tokens),))
    with pytest.raises(PlanError, match="expected room for at most"):
        check_split(of, broken, cost.capacity)


def test_a_degree_that_takes_whole_experts_is_not_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of MiniMax-M2.5 are 1,536 wide: an eighth is no whole block of 128 quantised weights."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    wide = LATENT | {"moe_intermediate_size": 1536, "n_shared_experts": 0, "quantization_config": blocks}
    path = folder / "config.json"
    path.write_text(json.dumps(wide))
    flags = ["--gpu", "H200", "--tp", "8", "--config", str(path), "--out", str(folder / "p.yaml")]
    assert main(["profile", "--from", "roofline", *flags]) == 0
    assert load_profile(folder / "p.yaml").engine.enable_expert_parallel
    capsys.readouterr()
    assert main(["model", str(path)]) == 0
    assert "tensor parallel 1, 2, 4; expert parallel (with whole experts also 8)" in capsys.readouterr().out
