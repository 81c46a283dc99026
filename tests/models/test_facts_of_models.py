"""Facts of public models against hand computations, and refusals of what is not understood."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.tools.models.config_keys import ALIASES, class_defaults
from hetlb.tools.models.degrees import refusal
from hetlb.tools.models.families import FAMILIES, model_type_of
from hetlb.tools.models.model_facts import ModelFacts, read_facts
from hetlb.tools.models.model_file import load_facts
from hetlb.tools.plan.common.plan_tables import PlanModelTable, read_model
from hetlb.tools.plan.common.remarks import remarks

DATA = Path(__file__).parent / "data"
CACHES: Mapping[str, Any] = json.loads((DATA / "caches.json").read_text())
PARAMETERS: Mapping[str, Any] = json.loads((DATA / "parameters.json").read_text())
PUBLISHED: Mapping[str, Any] = json.loads((DATA / "published.json").read_text())
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MOE = PARAMETERS["Qwen--Qwen3-30B-A3B"]["config"]


def facts(raw: Mapping[str, Any], **changes: Any) -> ModelFacts:
    return read_facts({**raw, **changes}, "m")


@pytest.mark.parametrize("name", CACHES)
def test_cache_of_public_models(name: str) -> None:
    known = CACHES[name]
    found = facts(known["config"]).kv_bytes_per_token
    if known["kv_bytes_per_token"] is None:  # DeepSeek-V4-Flash: about 6.9 kB
        assert 6_800 < found < 7_000
    else:
        assert found == known["kv_bytes_per_token"], known["derivation"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_public_models(name: str) -> None:
    known, found = PARAMETERS[name], facts(PARAMETERS[name]["config"])
    assert found.parameters == known["parameters"]
    active = known["active_parameters"] or known["parameters"]
    assert found.active_parameters == pytest.approx(active, rel=0.08)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_of_models_of_all_families(name: str) -> None:
    known, found = PUBLISHED[name], facts(PUBLISHED[name]["config"])
    assert found.parameters == pytest.approx(known["parameters"], rel=1e-6)
    assert found.kv_bytes_per_token == known["kv_bytes_per_token"]
    assert found.kv_windows == tuple((tokens, float(size)) for tokens, size in known["kv_windows"])


def test_windows_and_states_are_beside_what_grows() -> None:
    gemma = facts(CACHES["google--gemma-4-26B-A4B"]["config"])
    assert gemma.kv_windows == ((1024, 204_800.0),)
    assert gemma.kinds == {"full": 5, "window": 25}
    assert gemma.kv_bytes(100) == 100 * (20_480 + 204_800)
    assert gemma.kv_bytes(5000) == 5000 * 20_480 + 1024 * 204_800
    hybrid = facts(CACHES["nvidia--Nemotron-H-56B-Base-8K"]["config"])
    assert hybrid.kinds == {"full": 10, "state": 54, "none": 54}
    assert hybrid.kv_bytes(0) == hybrid.state_bytes > 0
    oss = facts(CACHES["openai--gpt-oss-120b"]["config"])
    assert oss.kv_windows == ((128, 36_864.0),)


def test_engines_give_room_for_groups_of_as_many_layers() -> None:
    """10 layers in full and 52 with a window are seven groups of 10; 23 states are four groups of 6."""
    gemma = facts(CACHES["gemma3-27b"]["config"])
    assert gemma.kinds == {"full": 10, "window": 52}
    assert gemma.needed.windows == ((1024, 52 * 8192.0),)
    assert gemma.allocated.windows == ((1024, 60 * 8192.0),)
    assert gemma.kv_need is not None
    assert gemma.kv_need.tokens(5000) == 5000 + 6 * 1024
    nemotron = facts(CACHES["nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]["config"])
    page = 16 * 1024 * math.ceil(nemotron.state_bytes / 23 / (16 * 1024))
    assert nemotron.allocated.state == 24 * page > nemotron.state_bytes
    for name in ("openai--gpt-oss-120b", "deepseek-ai--DeepSeek-R1", "google--gemma-4-26B-A4B"):
        same = facts(CACHES[name]["config"])
        assert same.allocated == same.needed


def test_weights_by_quantisation() -> None:
    oss = facts(CACHES["openai--gpt-oss-120b"]["config"])
    assert 60.5e9 < oss.weight_bytes < 65.5e9  # its checkpoint: 65.2e9 bytes, made for one GPU of 80 GB
    full = facts(MOE).weight_bytes
    assert full == 2 * facts(MOE).parameters
    fp8 = facts(MOE, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert fp8.weight_bytes == pytest.approx(full / 2, rel=0.03)
    awq = facts(LLAMA, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    embeddings = 2 * 2 * 128_256 * 4096
    inside = 2 * facts(LLAMA).parameters - embeddings
    assert awq.weight_bytes == pytest.approx(embeddings + inside * (4 + 20 / 128) / 16, rel=0.001)


def scheme(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **changes}


def test_ignored_modules_keep_their_bytes() -> None:
    all_of_them = facts(MOE, quantization_config=scheme()).weight_bytes
    ignored = ["lm_head", "re:.*self_attn.*"]
    without = facts(MOE, quantization_config=scheme(ignore=ignored)).weight_bytes
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    assert without - all_of_them == pytest.approx(attention * (16 - 4.5) / 8, rel=1e-6)
    names = [f"model.layers.{i}.self_attn.{m}_proj" for i in range(48) for m in "qkvo"]
    assert facts(MOE, quantization_config=scheme(ignore=names)).weight_bytes == without
    globs = ["model.layers.*.self_attn*"]
    assert facts(MOE, quantization_config=scheme(ignore=globs)).weight_bytes == without
    fused = [f"model.layers.{i}.self_attn.{m}_proj" for i in range(48) for m in ("qkv", "o")]
    assert facts(MOE, quantization_config=scheme(ignore=fused)).weight_bytes == without


def test_weights_in_8_bits_are_no_cache_in_8_bits() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert facts(LLAMA, quantization_config=fp8).kv_bytes_per_token == 131_072
    cached = scheme(kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert facts(LLAMA, quantization_config=cached).kv_bytes_per_token == 65_536
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert facts(LLAMA, quantization_config=modelopt).kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": ["CLIPModel"], "model_type": "clip"}, "architectures"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo", "kv_sharing": 2}, "kv_sharing"),
        (
            {"architectures": ["FooForCausalLM"], "model_type": "foo", "sliding_window": 4096},
            "sliding_window",
        ),
        ({"architectures": None, "model_type": "foo"}, "model_type"),
        ({"kv_sharing_interval": 2}, "kv_sharing_interval"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"layer_types": ["full_attention"] * 31 + ["mystery_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types"),
        ({"n_layer": 16}, "n_layer"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method"),
        ({"quantization_config": scheme(kv_cache_scheme={"num_bits": 1})}, "kv_cache_scheme"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=key):
        facts(LLAMA, **changes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    assert main(["model", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(path) in err
    assert key in err


@pytest.mark.parametrize(
    "name",
    [
        *("meta-llama--Meta-Llama-3.1-8B", "deepseek-ai--DeepSeek-R1", "Qwen--Qwen3.5-35B-A3B", "gemma3-27b"),
        *("EXAONE-4.0-32B", "Qwen--Qwen3-30B-A3B-FP8", "stepfun-ai--Step-3.7-Flash"),
    ],
)
def test_a_model_of_tomorrow_is_read_by_its_keys(name: str) -> None:
    config = json.loads(json.dumps(CACHES[name]["config"]))
    table = config.get("text_config", config)
    config["architectures"] = ["TomorrowForConditionalGeneration"]
    table["architectures"], table["model_type"] = ["TomorrowForCausalLM"], "tomorrow"
    found, known = facts(config), facts(CACHES[name]["config"])
    assert (found.needed, found.kinds) == (known.needed, known.kinds)
    assert found.weight_bytes == pytest.approx(known.weight_bytes, rel=0.06)


def safetensors(tensors: Mapping[str, tuple[str, list[int], int]]) -> bytes:
    """The header of a file with these tensors of a type, a shape and bytes; their values are a hole."""
    header, at = {}, 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text


def folder_of(
    tmp_path: Path, config: Mapping[str, Any], *files: Mapping[str, Any], index: bool = True
) -> Path:
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        data = safetensors(tensors)
        with (tmp_path / name).open("wb") as file:
            file.write(data)
            file.truncate(len(data) + sum(size for _, _, size in tensors.values()))
    weights = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    total = sum(size for tensors in files for _, _, size in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": weights}
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    else:
        (tmp_path / names[0]).rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_weights_are_what_the_checkpoint_has(tmp_path: Path) -> None:
    """Of any quantisation, without the draft layers behind the last; experts apart."""
    layer = {"layers.0.mlp.experts.w1": ("U8", [10, 10], 100), "layers.0.mlp.gate": ("BF16", [8, 2], 32)}
    draft = {"model.layers.48.mlp.experts.w1": ("U8", [10, 10], 100), "mtp.fc": ("BF16", [4], 8)}
    config = {**MOE, "quantization_config": {"quant_method": "of tomorrow"}}
    found = load_facts(folder_of(tmp_path, config, layer, {**draft, "lm_head.weight": ("F32", [5], 20)}))
    assert (found.weight_bytes, found.expert_bytes) == (152, 100)
    assert found.parameters == facts(MOE).parameters  # packed values are not counted
    assert found.needed == facts(MOE).needed
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="quant_method"):  # the sum has the draft layers in it
        load_facts(tmp_path)


def test_parameters_are_counted_of_plain_weights_alone(tmp_path: Path) -> None:
    layer = {"layers.0.mlp.experts.w1": ("F32", [16, 10], 640), "layers.0.mlp.gate": ("F32", [10, 4], 160)}
    found = load_facts(folder_of(tmp_path, MOE, layer, index=False) / "config.json")
    assert (found.parameters, found.weight_bytes, found.expert_bytes) == (200, 400, 320)  # held in 16 bits
    assert found.active_parameters == 200 - 160 + 160 * 8 // 128


def test_an_index_without_its_files_has_the_sum(tmp_path: Path) -> None:
    folder_of(tmp_path, LLAMA, {"lm_head.weight": ("BF16", [7], 14), "model.norm.weight": ("BF16", [3], 6)})
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert load_facts(tmp_path).weight_bytes == 20


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "expected a header"),
        (b"\xff" * 8, "expected a header"),
        (b"\x02" + b"\0" * 7 + b"[]", "expected an object"),
        (b"\x04" + b"\0" * 7 + b"[[[[", "expected JSON"),
        (safetensors({"a": ("BF16", [-1], 2)}), "expected shape and data_offsets"),
        (safetensors({"a": ("BF16", [1 << 40] * 2, 2)}), "expected shape and data_offsets"),
        (safetensors({"a": ("BF16", [1] * 99, 2)}), "expected shape and data_offsets"),
        (safetensors({"a": ("BF16", [1], 1 << 60)}), "expected shape and data_offsets"),
    ],
)
def test_a_checkpoint_of_a_stranger_is_one_line(tmp_path: Path, header: bytes, message: str) -> None:
    folder_of(tmp_path, LLAMA, {"a": ("BF16", [1], 2)}, index=False)
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ConfigError, match=message) as caught:
        load_facts(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_names_files_beside_it_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for weights, message in (({"a": "../../etc/passwd"}, "names of files beside it"), ([1], "an object")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(ConfigError, match=message):
            load_facts(tmp_path)


def test_keys_that_decide_nothing_are_taken() -> None:
    inert = {"rope_theta": 1e6, "bos_token_id": 1, "attention_dropout": 0.0, "max_position_embeddings": 8192}
    assert facts(LLAMA, **inert, use_cache=True, torch_dtype="float32", pretraining_tp=1) == facts(LLAMA)


def test_a_window_without_a_list_holds_for_all_layers_as_in_vllm() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert facts(mistral, sliding_window=4096).kv_windows == ((4096, 131_072.0),)
    assert facts(mistral, sliding_window=None).kv_bytes_per_token == 131_072
    whole = facts(mistral, sliding_window=262_144, max_position_embeddings=131_072)
    assert (whole.kv_bytes_per_token, whole.kv_windows) == (131_072, ())
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    unused = facts(qwen, sliding_window=4096, use_sliding_window=False, max_window_layers=28)
    assert (unused.kv_bytes_per_token, unused.kv_windows) == (131_072, ())


@given(tokens=st.floats(1.0, 1e5))
def test_a_batch_reaches_no_more_experts_than_equal_popularity_would(tokens: float) -> None:
    found = facts(MOE)
    equal = 1.0 - (1.0 - 8 / 128) ** tokens
    assert 0.0 <= found.touched_experts(tokens) <= max(tokens * 8 / 128, equal) + 1e-9
    assert found.touched_experts(1.0) == pytest.approx(8 / 128)
    assert found.touched_experts(tokens) <= found.touched_experts(tokens + 1.0) < 1.0
    assert facts(LLAMA).touched_experts(tokens) == 0.0


WRONG = (None, -1, 0, 1.5, "x", "", [], {}, [1], ["x"], True, 10**30, {"a": 1}, [{}], float("inf"))


@given(data=st.data())
def test_any_value_is_understood_or_refused(data: st.DataObject) -> None:
    known = [each["config"] for each in (*CACHES.values(), *PARAMETERS.values())]
    config = json.loads(json.dumps(data.draw(st.sampled_from(known))))
    table = config
    while isinstance(inner := table[key := data.draw(st.sampled_from(sorted(table)))], dict) and inner:
        table = inner
    table[key] = data.draw(st.sampled_from(WRONG))
    with contextlib.suppress(ConfigError):
        json.dumps(facts(config).json())


def test_experts_stay_whole_with_expert_parallelism() -> None:
    minimax = facts(PARAMETERS["MiniMaxAI--MiniMax-M2.5"]["config"])
    document = minimax.json()
    assert document["tensor_parallel_sizes"] == [1, 2, 4]  # 1536 / 8 is no whole block of 128
    assert document["expert_parallel"] is True
    assert not refusal(minimax.shape, 4, expert_parallel=True)  # its publisher's command
    assert refusal(minimax.shape, 8)
    assert not refusal(minimax.shape, 8, expert_parallel=True)
    assert refusal(facts(LLAMA).shape, 2, expert_parallel=True)


def test_tables_hold_together() -> None:
    named = ("Qwen3_5MoeForCausalLM", "GPT2LMHeadModel", "RWForCausalLM", "StableLmForCausalLM", "BloomModel")
    found = ["qwen3_5_moe_text", "gpt2", "falcon", "stablelm", "bloom"]
    assert [model_type_of(each) for each in named] == found
    assert model_type_of("MambaByteForCausalLM") is model_type_of("LlamaForSequenceClassification") is None
    assert set(class_defaults()) <= set(FAMILIES)
    names = [name for spellings in ALIASES.values() for name in spellings]
    assert len(names) == len(set(names))


def test_the_command_prints_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gpt-oss-120b"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(CACHES["openai--gpt-oss-120b"]["config"]))
    assert main(["model", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "gpt-oss-120b"
    assert document["kv_windows"] == [{"tokens": 128, "bytes_per_token": 36_864}]
    assert document["layers"] == {"full": 18, "window": 18}
    assert main(["model", str(path)]) == 0
    out = capsys.readouterr().out
    assert "116,829,156,672, 5,711,982,912 of them active" in out


def test_the_file_that_modelopt_writes_beside_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    beside = {
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert main(["model", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == 65_536


def test_the_size_of_a_mixer_is_stated_beside_its_expansion() -> None:
    falcon = {
        "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "expand": 16,
        "hidden_size": 4096, "intermediate_size": 8192, "state_size": 16, "conv_kernel": 4,
        "vocab_size": 65_024, "num_hidden_layers": 64, "time_step_rank": 256,
        "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
    }  # fmt: skip
    found = facts(falcon)
    assert found.parameters == 7_272_665_088  # tiiuae/falcon-mamba-7b
    assert found.state_bytes == 64 * 8192 * (16 + 3) * 2


def test_sparse_attention_is_counted_in_the_rows_that_vllm_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    config = {**CACHES["deepseek-ai--DeepSeek-R1"]["config"], **index, "model_type": "deepseek_v32"}
    config["architectures"] = ["DeepseekV32ForCausalLM"]
    found = facts(config)
    assert found.kv_bytes_per_token == 61 * 2 * (512 + 64 + 128)
    assert found.allocated.per_token == 61 * (656 + 132)
    v4 = facts(CACHES["deepseek-ai--DeepSeek-V4-Flash"]["config"])
    assert v4.allocated.per_token == 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert v4.allocated.windows == ((128, 43 * 584.0),)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["model", str(tmp_path / "config.json")]) == 0
    assert "48,068 bytes a token (--kv-cache-dtype auto: fp8_ds_mla)" in capsys.readouterr().out
    # A stated size of the cache is the engine's: its rows are in force no more.
    stated = PlanModelTable(name="m", config="config.json", kv_bytes_per_value=2.0)
    assert read_model(stated, tmp_path / "c.yaml", "model").kv_bytes_per_token == 85_888
    plain = PlanModelTable(name="m", config="config.json")
    said, unsaid = (remarks(read_model(each, tmp_path / "c.yaml", "model"), []) for each in (plain, stated))
    rows = "the rows of vLLM's --kv-cache-dtype fp8_ds_mla, its default"
    assert (said, unsaid) == ([f"KV cache of m: 48,068 bytes a token, {rows}"], [])


#: Of `config.json` of Qwen3-VL-2B-Instruct: 2.13 billion parameters by its model card, 0.41 of images.
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 2048, "num_hidden_layers": 28, "vocab_size": 151936,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024, "in_channels": 3,
        "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "model_type": "qwen3_vl",
    },
}  # fmt: skip


def test_weights_hold_the_encoder_of_images() -> None:
    found = facts(QWEN3_VL)
    assert found.parameters == pytest.approx(2.1275e9, rel=0.001)
    assert found.encoder_parameters == pytest.approx(0.19 * found.parameters, rel=0.01)
    assert (found.weight_bytes, found.uncounted) == (2 * found.parameters, ())
    assert found.active_parameters == found.parameters - found.encoder_parameters


def test_an_encoder_without_sizes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3_VL, "audio_config": {"n_fft": 400}}))
    assert main(["model", str(path)]) == 0
    assert "parameters of encoders in them; sizes of audio_config are not known" in capsys.readouterr().out
    assert facts(QWEN3_VL, audio_config={"n_fft": 400}).uncounted == ("audio_config",)


@given(st.sampled_from(sorted(QWEN3_VL["vision_config"])), st.sampled_from(WRONG))
def test_any_size_of_an_encoder_is_understood_or_refused(key: str, value: object) -> None:
    encoder = {**QWEN3_VL["vision_config"], key: value}
    with contextlib.suppress(ConfigError):
        assert facts(QWEN3_VL, vision_config=encoder).encoder_parameters >= 0


def test_a_file_without_a_type_of_model_is_said_to_have_none() -> None:
    with pytest.raises(ConfigError, match=r"hetlb understands, got none$"):
        read_facts({}, "m")
    with pytest.raises(ConfigError, match=r"hetlb understands, got 'strange'$"):
        read_facts({"model_type": "strange"}, "m")
