"""The table of GPUs, and the roofline of its peak figures against kernel tables of real GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.config.gpus import GPUS, find_gpu, gpu_named
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.tools.models.layer import AttentionWork, causal_pairs
from hetlb.tools.models.model_facts import read_facts, stated_facts
from hetlb.tools.plan.common.composition import roofline_of
from hetlb.tools.plan.common.plan_tables import Model, RooflineTable
from hetlb.tools.profiler.grid import StepKind
from hetlb.tools.profiler.sources import Roofline, assumed_launch, data_sheet

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
CACHES = Path(__file__).parents[1] / "models" / "data" / "caches.json"
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
#: Milliseconds of one prompt by its tokens, at TP 1, by kernel tables of vLLM: aiconfigurator-core 0.12.0
#: (NVIDIA, Apache-2.0), Llama-3.1-8B and DeepSeek-V3.
DENSE_MS = {
    "a100_sxm": {2048: 125.2, 8192: 557.0, 32768: 3430.1, 131072: 32945.8},
    "h100_sxm": {2048: 43.5, 8192: 199.7, 32768: 1082.1, 131072: 9563.4},
    "h200_sxm": {2048: 43.4, 8192: 198.9, 32768: 1109.9, 131072: 9695.5},
    "b200_sxm": {2048: 22.3, 8192: 97.5, 32768: 557.3, 131072: 4938.7},
    "l40s": {2048: 144.9, 8192: 699.8, 32768: 3969.2, 131072: 34253.5},
    "rtx_pro_6000_server": {2048: 87.6, 8192: 378.4, 32768: 2187.5, 131072: 19993.6},
}
LATENT_MS = {"h100_sxm": {8192: 1201.6, 131072: 77562.4}, "b200_sxm": {8192: 648.6, 32768: 3472.6}}
#: The same of groups of GPUs, prompts of 8,192, 32,768 and 131,072 tokens: (model, GPU, GPUs).
GROUP_MS = {
    ("deepseek-ai--DeepSeek-V3", "h100_sxm", 8): (434.3, 1735.5, 14370.9),
    ("deepseek-ai--DeepSeek-V3", "b200_sxm", 4): (299.6, 1325.7, 11113.4),
    ("Qwen--Qwen3-30B-A3B", "h200_sxm", 4): (70.9, 374.4, 3455.2),
    ("openai--gpt-oss-120b", "h200_sxm", 8): (55.4, 215.0, 1329.3),
    ("openai--gpt-oss-120b", "rtx_pro_6000_server", 8): (335.6, 1361.9, 6279.8),
}
#: And of decode steps of 32 and of 128 sequences with 1,024 tokens.
GROUP_STEP_MS = {
    ("Qwen--Qwen3-30B-A3B", "h200_sxm", 4): (6.80, 9.33),
    ("openai--gpt-oss-120b", "h200_sxm", 8): (4.74, 6.39),
}
PARAMETERS = Path(__file__).parents[1] / "models" / "data" / "parameters.json"


def estimated_ms(config: dict[str, object], gpu: str, tokens: int) -> float:
    roofline = Roofline.of_gpu(gpu_named(gpu, "gpu"), read_facts(config, "m"), 1)
    return 1e3 * roofline.seconds(StepKind.PREFILL, 1, tokens)


def group_of(model: str, gpu: str, gpus: int) -> Roofline:
    config = LATENT if "DeepSeek" in model else json.loads(PARAMETERS.read_text())[model]["config"]
    return Roofline.of_gpu(gpu_named(gpu, "gpu"), read_facts(config, model), gpus)


@pytest.mark.parametrize("gpu", DENSE_MS)
def test_long_prompts_take_as_long_as_kernel_tables_say(gpu: str) -> None:
    for tokens, known_ms in DENSE_MS[gpu].items():
        assert estimated_ms(LLAMA_8B, gpu, tokens) == pytest.approx(known_ms, rel=0.15), tokens


@pytest.mark.parametrize("gpu", LATENT_MS)
def test_long_prompts_of_latent_attention_in_fp8_too(gpu: str) -> None:
    for tokens, known_ms in LATENT_MS[gpu].items():
        assert estimated_ms(LATENT, gpu, tokens) == pytest.approx(known_ms, rel=0.15), tokens


@pytest.mark.parametrize("group", GROUP_MS)
def test_experts_and_latents_on_several_gpus_too(group: tuple[str, str, int]) -> None:
    for tokens, known_ms in zip((8192, 32768, 131072), GROUP_MS[group], strict=True):
        found = 1e3 * group_of(*group).seconds(StepKind.PREFILL, 1, tokens)
        assert found == pytest.approx(known_ms, rel=0.15), tokens


@pytest.mark.parametrize("group", GROUP_STEP_MS)
def test_steps_of_experts_on_several_gpus_too(group: tuple[str, str, int]) -> None:
    for batch, known_ms in zip((32, 128), GROUP_STEP_MS[group], strict=True):
        found = 1e3 * group_of(*group).seconds(StepKind.DECODE, batch, 1024)
        assert found == pytest.approx(known_ms, rel=0.2), batch


@given(st.integers(1, 300), st.integers(0, 320))
def test_pairs_are_the_keys_that_each_query_sees(tokens: int, most: int) -> None:
    seen = sum(min(position, most) if most else position for position in range(1, tokens + 1))
    assert causal_pairs(tokens, most) == seen


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_a_window_costs_no_more_than_full_attention(tokens: int, window: int) -> None:
    windowed, full = AttentionWork(4, 8.0, 8.0, window), AttentionWork(4, 8.0, 8.0)
    assert windowed.of_prompt(tokens) <= full.of_prompt(tokens)
    assert windowed.of_step(tokens) == 4 * 8.0 * min(tokens, window)


def test_weights_in_fp8_are_multiplied_in_fp8_if_the_gpu_can() -> None:
    facts = read_facts(LATENT, "m")
    assert (facts.weight_format, facts.format_share > 0.9) == ("fp8", True)
    assert GPUS["H100"].flops("fp8") == 2 * GPUS["H100"].flops("bf16") + 1e12
    assert GPUS["A100"].flops("fp8") == GPUS["A100"].flops("bf16")
    assert GPUS["H100"].flops("fp4") == GPUS["H100"].flops("fp8")


def test_stated_peaks_of_a_known_gpu_hold_for_weights_in_fp8_too() -> None:
    model = Model(name="m", facts=read_facts(LATENT, "m"))
    table = RooflineTable(flops=989e12, bandwidth_bytes_per_s=3.35e12)
    plain, known = (roofline_of(table, model, gpu, 8) for gpu in ("unknown", "H100"))
    assert known.format_flops == pytest.approx(2 * (plain.format_flops or 0.0), rel=0.01)
    assert known.seconds(StepKind.PREFILL, 1, 8192) < plain.seconds(StepKind.PREFILL, 1, 8192)
    fp8 = RooflineTable(flops=1979e12, bandwidth_bytes_per_s=3.35e12)
    assert roofline_of(fp8, model, "H100", 8).format_flops == 1979e12


def test_stated_sizes_have_attention_too() -> None:
    known = read_facts(LLAMA_8B, "m").prompt_attention_flops(32768)
    stated = stated_facts("m", 8.03e9, 131072, layers=32, hidden_size=4096).prompt_attention_flops(32768)
    assert stated == pytest.approx(known)
    assert stated_facts("m", 8.03e9, 131072).prompt_attention_flops(32768) == pytest.approx(known, rel=0.2)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100_sxm", "H100"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("L40", "L40"),
        ("RTX PRO 6000", "RTX-PRO-6000"),
    ],
)
def test_names_of_drivers_and_clouds_are_known(name: str, found: str) -> None:
    assert gpu_named(name, "gpu").name == found


def test_another_name_is_one_line_with_the_nearest() -> None:
    assert find_gpu("") is None
    with pytest.raises(ConfigError, match=r"--gpu: expected a GPU of .*, got 'H10O'; did you mean H100"):
        gpu_named("H10O", "--gpu")


def test_a_profile_needs_no_fact_to_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    sources = ["--from", "roofline", "--gpu", "H100", "--config", str(config)]
    assert main(["profile", *sources, "--tp", "1,2", "--out", str(tmp_path / "h100.yaml")]) == 0
    one, two = (load_profile(tmp_path / f"h100-tp{degree}.yaml") for degree in (1, 2))
    assert one.latency.prefill_s(131072, 1) == pytest.approx(DENSE_MS["h100_sxm"][131072] / 1e3, rel=0.15)
    assert one.latency.prefill_s(8192, 1) > two.latency.prefill_s(8192, 1)
    assert 400_000 < (one.engine.kv_cache_tokens or 0) < 500_000
    assert (one.source is not None, one.source and one.source.measured) == (True, False)
    capsys.readouterr()
    assert main(["profile", *sources, "--tp", "3", "--out", str(tmp_path / "x.yaml")]) == 2
    assert "--tp: expected a degree that vLLM takes, got 3" in capsys.readouterr().err
    assert main(["profile", "--gpu", "H100", "--out", "x.yaml"]) == 2
    assert "--gpu: expected --from roofline --gpu NAME --config CONFIG.json" in capsys.readouterr().err


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--gpus", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["gpus"]] == list(GPUS)
    assert main(["profile", "--gpus"]) == 0
    assert "RTX-PRO-6000" in capsys.readouterr().out


def test_a_pass_of_experts_is_launched_on_one_gpu_in_half_the_time_of_two() -> None:
    facts = read_facts(json.loads((CACHES).read_text())["openai--gpt-oss-120b"]["config"], "m")
    one, two = assumed_launch(facts, 1), assumed_launch(facts, 2)
    assert (one.graph_s, one.eager_s) == (two.graph_s / 2, two.eager_s / 2)
    assert any(line.startswith("experts: ") for line in data_sheet(GPUS["H200"], facts, 8).assumed)
