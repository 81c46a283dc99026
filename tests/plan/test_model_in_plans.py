"""Plans for models of experts, windows and quantised weights: memory, cost, degrees, what is said of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hetlb.balancer.config.engine_defaults import batch_limits
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.main import main
from hetlb.errors import ConfigError, ProfileError
from hetlb.tools.plan.cluster import load_cluster
from hetlb.tools.plan.common.plan_tables import Model, PlanModelTable, read_model
from hetlb.tools.plan.common.remarks import other_model, remarks
from hetlb.tools.plan.configurations import candidates
from hetlb.tools.plan.market import load_market
from hetlb.tools.sim.study import engine_of

DATA = Path(__file__).parents[1] / "models/data"
CACHES = json.loads((DATA / "caches.json").read_text())
PARAMETERS = json.loads((DATA / "parameters.json").read_text())
PROFILING = Path(__file__).parents[2] / "profiling"
H100 = "flops: 989e12, bandwidth_bytes_per_s: 3.35e12"
MARKET = f"""version: 1
target: {{request_rate: 5}}
models: [{{name: m, MODEL}}]
offers:
  - {{gpu: H100, price_per_hour: 2.99, available: 16, memory_bytes: 85899345920, roofline: {{{H100}}}}}
workloads: [{{name: w, input_tokens: 1000, output_tokens: 300, share: 1}}]
"""


def market(tmp_path: Path, config: dict[str, Any] | None, stated: str = "") -> Path:
    words = [] if config is None else ["config: config.json"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "market.yaml"
    path.write_text(MARKET.replace("MODEL", ", ".join(words + ([stated] if stated else []))))
    return path


def rented(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    flags = ["--no-cache", "--no-simulate", "--json"]
    assert main(["rent", "--config", str(path), *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_gpt_oss_fits_one_gpu_and_costs_what_its_active_parameters_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.plan.throughput._MOST_REQUESTS", 1500)  # a batch is 1,024
    oss = rented(market(tmp_path, CACHES["openai--gpt-oss-120b"]["config"]), capsys)
    by_hand = "parameters: 5.1e9, kv_bytes_per_token: 73728, layers: 36, hidden_size: 2880"
    hand = rented(market(tmp_path, None, by_hand), capsys)
    assert [each["gpus"] for each in oss["instances"]] == [{"H100": 1}]
    assert oss["cost_per_hour"] <= 1.1 * hand["cost_per_hour"]
    assert oss["model"]["active_parameters"] == 5_711_982_912
    words = shlex.split(oss["commands"][0], comments=True)
    assert words[words.index("--max-num-batched-tokens") + 1] == "8192"
    assert words[words.index("--max-num-seqs") + 1] == "1024"


def test_experts_stay_whole_where_a_degree_needs_it(tmp_path: Path) -> None:
    path = market(tmp_path, PARAMETERS["MiniMaxAI--MiniMax-M2.5"]["config"])
    found = {each.name: each for each in candidates(load_market(path), {"m": 1300})}
    whole = {
        name: bool(each.profile and each.profile.engine.enable_expert_parallel)
        for name, each in found.items()
    }
    assert whole["h100-tp4"] is False  # 1536 / 4 is three blocks of 128
    assert whole["h100-tp8"] is True


def model_of(tmp_path: Path, config: dict[str, Any], **stated: Any) -> Model:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model(PlanModelTable(name="m", config="config.json", **stated), tmp_path / "f.yaml", "model")


def test_stated_values_win_and_are_named_where_they_are_far_off(tmp_path: Path) -> None:
    llama = PARAMETERS["meta-llama--Meta-Llama-3.1-8B"]["config"]
    found = model_of(tmp_path, llama)
    assert (found.parameters, found.weight_bytes) == (8_030_261_248, 16_060_522_496)
    assert found.notes == ()
    stated = model_of(tmp_path, llama, parameters=8.1e9, kv_bytes_per_token=65_536, bytes_per_parameter=1.0)
    assert (stated.parameters, stated.kv_bytes_per_token) == (8.1e9, 65_536)
    assert stated.weight_bytes == pytest.approx(8.1e9)
    assert len(stated.notes) == 2
    assert "kv_bytes_per_token: 65536 was stated, its config.json gives 131072" in stated.notes[1]
    with pytest.raises(ConfigError, match=r"model\.layers: expected 32 as its config\.json has, got 40"):
        model_of(tmp_path, llama, layers=40)


def test_a_missing_config_is_named_by_the_key_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    with pytest.raises(ConfigError, match=r"f\.yaml: model\.config: .* got 'gone\.json': no such file"):
        read_model(PlanModelTable(name="m", config="gone.json"), path, "model")


def test_a_latent_cache_may_be_stated_and_stands_on_every_gpu(tmp_path: Path) -> None:
    r1 = CACHES["deepseek-ai--DeepSeek-R1"]["config"]
    found = model_of(tmp_path, r1, kv_bytes_per_token=70_272)
    assert (found.kv_bytes_per_token, found.notes) == (70_272, ())
    assert found.kv_bytes_at(8) == 8 * 70_272
    llama = model_of(tmp_path, PARAMETERS["meta-llama--Meta-Llama-3.1-8B"]["config"])
    assert [llama.kv_bytes_at(t) / 131_072 for t in (1, 8, 16)] == [1, 1, 2]


def test_windows_end_and_states_count_beside_what_grows(tmp_path: Path) -> None:
    oss = model_of(tmp_path, CACHES["openai--gpt-oss-120b"]["config"])
    assert oss.kv_bytes_per_token == 36_864  # of the layers that keep all: the unit of a cache's tokens
    assert (oss.needed(100), oss.needed(12_800)) == (200, 12_928)
    hybrid = model_of(tmp_path, CACHES["nvidia--Nemotron-H-56B-Base-8K"]["config"])
    assert hybrid.needed(1000) == pytest.approx(1000 + hybrid.known.allocated.state / 40_960)
    dense = model_of(tmp_path, PARAMETERS["meta-llama--Meta-Llama-3.1-8B"]["config"])
    assert (dense.kv_bytes_at(1), dense.needed(777)) == (131_072, 777)
    path = market(tmp_path, CACHES["openai--gpt-oss-120b"]["config"])
    (single,) = [each for each in candidates(load_market(path), {"m": 1300}) if each.name == "h100-tp1"]
    assert single.profile is not None
    room = 0.9 * 85_899_345_920 - load_market(path).models["m"].weight_bytes
    assert single.profile.engine.kv_cache_tokens == pytest.approx(room / 36_864, abs=1)
    assert engine_of(single.profile).limits.need == oss.known.kv_need


def test_a_profile_of_another_model_is_named(tmp_path: Path) -> None:
    profile = load_profile(PROFILING / "l40s-llama-3.1-8b-tp1.yaml")
    assert profile.model is not None
    own = Model(name="org/" + profile.model.name.rpartition("/")[2], kv_bytes_per_token=131_072)
    assert not other_model(own, profile)
    other = Model(name="openai/gpt-oss-120b", kv_bytes_per_token=73_728)
    (line,) = remarks(other, [profile, profile])
    assert f"a profile of {profile.model.name}" in line
    assert "not of openai/gpt-oss-120b" in line


def test_a_cache_that_no_gpu_holds_is_refused(tmp_path: Path) -> None:
    text = (PROFILING / "l40s-llama-3.1-8b-tp1.yaml").read_text()
    tokens = load_profile(PROFILING / "l40s-llama-3.1-8b-tp1.yaml").engine.kv_cache_tokens
    path = tmp_path / "p.yaml"
    path.write_text(text.replace(f"kv_cache_tokens: {tokens}", "kv_cache_tokens: 6000000"))
    with pytest.raises(ProfileError, match=r"kv_cache_tokens: expected at most \d+"):
        load_profile(path)
    # 340,000 tokens fit a GPU without weights, and not beside them.
    path.write_text(text.replace(f"kv_cache_tokens: {tokens}", "kv_cache_tokens: 340000"))
    (tmp_path / "c.yaml").write_text(
        "version: 1\n"
        "model: {name: meta-llama/Meta-Llama-3.1-8B, parameters: 8.03e9, kv_bytes_per_token: 131072}\n"
        "limits: {max_input_tokens: 1000, max_output_tokens: 100}\n"
        "machines: [{name: a, gpu: l40s, gpus: 1, memory_bytes: 48305799168, profiles: {1: p.yaml}}]\n"
    )
    with pytest.raises(ConfigError, match=r"machines\[0\].profiles.1: expected a profile whose weights"):
        load_cluster(tmp_path / "c.yaml")


def test_vllm_s_limits_by_gpu() -> None:
    gib = 1 << 30
    assert batch_limits("L40S", 45 * gib) == (2048, 256)
    assert batch_limits("NVIDIA A100-SXM4-80GB", 80 * gib) == (2048, 256)
    assert batch_limits("H100", 80 * gib) == (8192, 1024)
    assert batch_limits("B200", 178 * gib) == (16_384, 1024)
    assert batch_limits(None, None) == (2048, 256)
    # Without the memory, by the name.
    assert batch_limits("h100_sxm", None) == (8192, 1024)
    assert batch_limits("b200_sxm", None) == (16_384, 1024)
    assert batch_limits("rtx_pro_6000_server", None) == (8192, 1024)
    assert batch_limits("A100-SXM4-80GB", None) == (2048, 256)
    assert batch_limits("l40s", None) == (2048, 256)
