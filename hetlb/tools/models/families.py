"""Architectures that hetlb understands, by the names in `architectures` and `model_type`.

A model of an unknown name is read by its keys (`family_by_keys`). Sources: the model code of vLLM 0.32 and
transformers 5.19 (Apache-2.0); counts are held against transformers by `tests/vllm/test_model_facts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hetlb.tools.models import special
from hetlb.tools.models.attention import compressed
from hetlb.tools.models.layer import Family
from hetlb.tools.models.layer_kinds import (
    all_full_numbers,
    all_latent,
    all_state,
    attention_indices,
    attention_period,
    chunks,
    compressed_layers,
    every,
    full_or_listed,
    kimi_layers,
    lfm_layers,
    linear_every,
    mimo_pattern,
    nemotron_pattern,
    numbered_types,
    qwen_windows,
    window_everywhere,
    with_states,
)

#: Names of model types, by `model_type`, and what their keys do not say.
_ROWS: Final = (
    ("llama granite granite_swa solar", Family(kinds=window_everywhere)),
    (
        "mistral ministral ministral3 phi3 phi4mm phi4_multimodal",
        Family(kinds=window_everywhere, biases=False),
    ),
    (
        "mistral4 glm4_moe_lite glm_moe_dsa deepseek_v3 deepseek_v32 kimi_k2 axk1",
        Family(kinds=all_latent, router_bias=True),
    ),
    ("mixtral", Family(kinds=window_everywhere, biases=False, feed_name="block_sparse_moe")),
    ("qwen", Family(feed=special.half_feed, biases=(True, False, "mlp_bias"))),
    (
        "qwen2 qwen2_vl qwen2_5_vl qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text",
        Family(kinds=qwen_windows, biases=(True, False, False)),
    ),
    ("qwen2_moe", Family(kinds=qwen_windows, biases=("qkv_bias", False, "mlp_bias"), shared_gate=True)),
    (
        "qwen3 qwen3_vl_text qwen3_moe qwen3_vl_moe_text qwen3_omni_moe_text",
        Family(kinds=qwen_windows, biases=("attention_bias", "attention_bias", False), qk_norm="head"),
    ),
    (
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        Family(kinds=linear_every, qk_norm="head", out_gate="value", shared_gate=True),
    ),
    ("mimo", Family(kinds=qwen_windows, biases=("attention_bias", False, False))),
    (
        "mimo_v2_flash mimo_v2",
        Family(
            kinds=mimo_pattern,
            mixer=special.mimo_mixer,
            biases=("attention_bias", False, "mlp_bias"),
            router_bias=True,
        ),
    ),
    ("gemma helium minicpm deepseek", Family()),
    ("gemma2", Family(kinds=every(2), norms=4)),
    ("vaultgemma", Family(kinds=every(2), norms=2)),
    ("gemma3_text", Family(kinds=every(6, "sliding_window_pattern"), qk_norm="head", norms=4)),
    (
        "gemma3n_text",
        Family(
            kinds=every(5),
            mixer=special.gemma3n_mixer,
            feed=special.gemma3n_feed,
            beside=special.gemma3n_beside,
            qk_norm="head",
            norms=6,
        ),
    ),
    (
        "gemma4_text",
        Family(
            kinds=every(6),
            mixer=special.gemma4_mixer,
            feed=special.gemma4_feed,
            beside=special.gemma4_beside,
            qk_norm="head",
            norms=4,
        ),
    ),
    ("phi", Family(gated=False, biases=True, norms=1, norm_bias=True, head_bias=True)),
    (
        "phimoe",
        Family(
            kinds=window_everywhere, norm_bias=True, head_bias="lm_head_bias", feed_name="block_sparse_moe"
        ),
    ),
    (
        "gpt_oss",
        Family(kinds=every(2), mixer=special.gpt_oss_mixer, feed=special.gpt_oss_feed, router_bias=True),
    ),
    ("granitemoe", Family(kinds=full_or_listed, biases=("attention_bias", "attention_bias", False))),
    ("granitemoeshared", Family(kinds=full_or_listed, feed=special.granite_feed)),
    ("granitemoehybrid", Family(kinds=with_states(full_or_listed), feed=special.granite_feed)),
    ("bamba", Family(kinds=with_states(attention_indices))),
    ("cohere", Family(qk_norm="use_qk_norm", norms=1)),
    ("cohere2", Family(kinds=every(4, "sliding_window_pattern"), norms=1)),
    ("olmo", Family(norms=0)),
    ("olmo2 olmoe flex_olmo", Family(qk_norm="all")),
    ("olmo3", Family(kinds=every(4), qk_norm="all")),
    ("stablelm", Family(biases=("use_qkv_bias", False, "mlp_bias"), qk_norm="", norm_bias=True)),
    ("starcoder2", Family(kinds=window_everywhere, gated=False, biases="use_bias", norm_bias=True)),
    ("glm", Family(biases=("attention_bias", False, "mlp_bias"))),
    ("glm4", Family(biases=("attention_bias", False, "mlp_bias"), norms=4)),
    ("glm4v_text", Family(biases=(True, False, "mlp_bias"), norms=4)),
    (
        "glm4_moe glm4v_moe_text",
        Family(
            kinds=full_or_listed,
            biases=("attention_bias", False, "mlp_bias"),
            qk_norm="use_qk_norm",
            router_bias=True,
        ),
    ),
    ("smollm3", Family(kinds=qwen_windows)),
    ("seed_oss", Family(biases=("attention_bias", "attention_out_bias", "mlp_bias"))),
    ("exaone baichuan telechat2", Family(biases=False)),
    (
        "exaone4 exaone4_5_text",
        Family(kinds=every(4, "sliding_window_pattern"), biases=False, qk_norm="head"),
    ),
    (
        "exaone_moe",
        Family(kinds=every(4, "sliding_window_pattern"), biases=False, qk_norm="head", router_bias=True),
    ),
    ("apertus", Family(gated=False, qk_norm="head")),
    ("arcee", Family(gated=False)),
    ("nemotron jais2", Family(gated=False, norm_bias=True)),
    ("nemotron-nas", Family(layers=special.decilm_layers)),
    ("cwm", Family(kinds=every(4))),
    ("nanochat", Family(gated=False, norms=0)),
    ("orion", Family(norm_bias=True)),
    ("internlm internlm2", Family(biases=("bias", "bias", "mlp_bias"))),
    ("internlm3", Family(biases=("qkv_bias", "bias", "bias"))),
    ("hunyuan_v1_dense hunyuan_v1_moe", Family(qk_norm="head")),
    ("ernie4_5", Family(biases="use_bias")),
    ("ernie4_5_moe", Family(biases="use_bias", router_bias=True)),
    ("gpt2", Family(beside=special.positions_beside, gated=False, biases=True, norm_bias=True)),
    (
        "gpt_bigcode",
        Family(
            mixer=special.multi_query_mixer,
            beside=special.positions_beside,
            gated=False,
            biases=True,
            norm_bias=True,
        ),
    ),
    (
        "gptj codegen",
        Family(gated=False, biases=(False, False, True), norms=1, norm_bias=True, head_bias=True),
    ),
    ("gpt_neox", Family(gated=False, biases=("attention_bias", "attention_bias", True), norm_bias=True)),
    ("bloom", Family(beside=special.bloom_beside, gated=False, biases=True, norm_bias=True)),
    (
        "mpt",
        Family(mixer=special.inner_attention, beside=special.positions_beside, gated=False, biases=False),
    ),
    ("opt", Family(beside=special.opt_beside, gated=False, biases=True, norm_bias=True)),
    ("falcon", Family(mixer=special.falcon_mixer, gated=False, biases="bias", norm_bias=True)),
    (
        "chatglm",
        Family(mixer=special.chatglm_mixer, biases=("add_qkv_bias", "add_bias_linear", "add_bias_linear")),
    ),
    ("dbrx", Family(mixer=special.inner_attention, feed=special.dbrx_experts, biases=False)),
    ("llama4_text", Family(kinds=chunks, feed=special.llama4_feed)),
    ("deepseek_v2", Family(kinds=all_latent)),
    (
        "deepseek_v4",
        Family(
            kinds=compressed_layers,
            mixer=compressed,
            feed=special.deepseek_v4_feed,
            beside=special.deepseek_v4_beside,
            router_bias=True,
        ),
    ),
    (
        "kimi_linear",
        Family(
            kinds=kimi_layers,
            feed=special.kimi_feed,
            biases=(False, "attention_bias", "mlp_bias"),
            router_bias=True,
            feed_name="block_sparse_moe",
        ),
    ),
    (
        "minimax minimax_m1 minimax_text_01",
        Family(kinds=numbered_types, mixer=special.minimax_mixer, biases=False, feed_name="block_sparse_moe"),
    ),
    (
        "minimax_m2",
        Family(
            kinds=all_full_numbers,
            biases=False,
            qk_norm="layer",
            router_bias=True,
            feed_name="block_sparse_moe",
        ),
    ),
    (
        "minimax_m3",
        Family(
            mixer=special.minimax_m3_mixer,
            biases=False,
            qk_norm="use_qk_norm",
            router_bias=True,
            feed_name="block_sparse_moe",
        ),
    ),
    (
        "nemotron_h",
        Family(
            kinds=with_states(nemotron_pattern),
            layers=special.nemotron_layers,
            gated=False,
            router_bias=True,
            feed_name="mixer",
        ),
    ),
    ("jamba", Family(kinds=with_states(attention_period), biases=False, feed_name="feed_forward")),
    (
        "lfm2 lfm2_moe",
        Family(
            kinds=with_states(lfm_layers),
            feed=special.lfm_feed,
            biases=False,
            qk_norm="head",
            router_bias="use_expert_bias",
        ),
    ),
    (
        "step3p5 step3p7",
        Family(
            kinds=full_or_listed, mixer=special.step_mixer, biases=False, qk_norm="head", router_bias=True
        ),
    ),
    ("dots1", Family(kinds=qwen_windows, qk_norm="head", router_bias=True)),
    ("bailing_moe", Family(biases=("use_qkv_bias", "use_bias", "mlp_bias"), qk_norm="use_qk_norm")),
    (
        "bailing_moe_v2",
        Family(
            biases=("use_qkv_bias", "use_bias", "mlp_bias"),
            qk_norm="use_qk_norm",
            router_bias="moe_router_enable_expert_bias",
        ),
    ),
    (
        "afmoe",
        Family(
            kinds=every(4, "global_attn_every_n_layers"),
            qk_norm="head",
            norms=4,
            out_gate="value",
            router_bias=True,
        ),
    ),
    ("longcat_flash", Family(kinds=all_latent, layers=special.longcat_layers, router_bias=True)),
    ("hy_v3", Family(qk_norm="head", router_bias=True)),
    ("solar_open", Family(router_bias=True)),
    ("mamba falcon_mamba mamba2", Family(kinds=all_state, feed=special.no_feed_forward, norms=1)),
    ("falcon_h1", Family(layers=special.falcon_h1_layers)),
)
#: By `model_type`, which has the defaults of the configuration class.
FAMILIES: Final[Mapping[str, Family]] = {name: family for names, family in _ROWS for name in names.split()}

#: Keys of mechanisms, the more special first, with a model type that has them: an unknown model with such a
#: key is read alike, and refused if it has keys beside that are not understood.
_LIKE: Final = (
    ("linear_attn_config", "kimi_linear"),
    ("compress_ratios", "deepseek_v4"),
    ("kv_lora_rank", "deepseek_v3"),
    ("hybrid_override_pattern", "nemotron_h"),
    ("hybrid_layer_pattern", "mimo_v2"),
    ("attn_layer_period", "jamba"),
    ("attn_layer_indices", "bamba"),
    ("mamba_n_heads", "bamba"),
    ("conv_L_cache", "lfm2"),
    ("linear_num_value_heads", "qwen3_next"),
    ("attn_type_list", "minimax"),
    ("attention_chunk_size", "llama4_text"),
    ("sliding_window_pattern", "exaone4"),
    ("use_sliding_window", "qwen3"),
)
#: Full attention in all layers, or the kinds of a list.
_LISTED: Final = Family(kinds=full_or_listed)
#: Activations of feed-forward parts of two matrices.
_UNGATED: Final = ("relu", "relu2", "xielu", "gelu", "gelu_new")


def family_by_keys(config: Mapping[str, Any]) -> Family:
    """Return the family of a model known by its keys alone."""
    found = next((FAMILIES[like] for key, like in _LIKE if config.get(key) is not None), _LISTED)
    two = any(key.endswith("_act") and value in _UNGATED for key, value in config.items())
    return replace(found, gated=not two)


#: Architectures not named after their `model_type`, with the `model_type` of equal layers.
_NAMED: Final[Mapping[str, str]] = {
    "BloomModel": "bloom",
    "ChatGLMModel": "chatglm",
    "ChatGLMForConditionalGeneration": "chatglm",
    "DeciLMForCausalLM": "nemotron-nas",
    "RWForCausalLM": "falcon",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "LlavaLlamaForCausalLM": "llama",
    "LlavaMistralForCausalLM": "mistral",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "StableLMEpochForCausalLM": "stablelm",
    "Step3p7FlashForCausalLM": "step3p7",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Phi3VForCausalLM": "phi3",
}
_CAUSAL: Final = re.compile(r"(\w+?)(ForCausalLM|LMHeadModel)")
#: Architectures that generate text, and tasks of others around the same layers.
GENERATES: Final = re.compile(r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)")
OTHER_TASK: Final = re.compile(r"Classification|Embedding|Reward|Retrieval|MaskedLM|Scor")
#: Model types by their names without "_" and "text", as names of architectures have them.
_SQUASHED: Final = {key.replace("_", "").removesuffix("text"): key for key in FAMILIES}


def model_type_of(architecture: str) -> str | None:
    """Return the `model_type` of an architecture's layers, None if it is unknown.

    If files name another `model_type`, this decides.
    """
    if architecture in _NAMED:
        return _NAMED[architecture]
    named = _CAUSAL.fullmatch(architecture)
    return None if named is None else _SQUASHED.get(named[1].replace("_", "").lower())


#: Tables of the language model inside such a file, outermost first.
INNER_TABLES: Final = ("thinker_config", "text_config", "llm_config", "language_config")
