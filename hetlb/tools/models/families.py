"""Architectures that hetlb understands, by the names in `architectures` and `model_type`.

Other families are refused. Sources: the model code of vLLM 0.32 and transformers 5.19
(Apache-2.0); counts are held against transformers by `tests/vllm/test_model_facts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from hetlb.tools.models import special
from hetlb.tools.models.attention import compressed, latent
from hetlb.tools.models.family import Family
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

_LLAMA: Final = Family(kinds=window_everywhere)
_MISTRAL: Final = Family(kinds=window_everywhere, qkv_bias=False, out_bias=False, mlp_bias=False)
_QWEN2: Final = Family(kinds=qwen_windows, qkv_bias=True, out_bias=False, mlp_bias=False)
_QWEN3: Final = Family(kinds=qwen_windows, qk_norm="head", mlp_bias=False)
_QWEN3_MOE: Final = Family(kinds=qwen_windows, qk_norm="head", mlp_bias=False, sparse=True)
_HYBRID: Final = Family(
    kinds=linear_every,
    mixer=special.hybrid_mixer,
    qk_norm="head",
    out_gate="value",
    sparse=True,
    shared_gate=True,
)
_GEMMA: Final = Family(tied=True)
_DEEPSEEK: Final = Family(kinds=all_latent, mixer=latent, sparse=True, router_bias=True)
#: GPT-2 and its kin: LayerNorm, biases everywhere, two matrices in a feed-forward part.
_NORMED: Final = Family(
    norm_bias=True, gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, feed=special.four_times
)
_GRANITE_MOE: Final = Family(kinds=full_or_listed, sparse=True, feed=special.granite_feed)
_LFM2: Final = Family(
    kinds=with_states(lfm_layers),
    mixer=special.lfm_mixer,
    feed=special.lfm_feed,
    qkv_bias=False,
    out_bias=False,
    qk_norm="head",
    sparse=True,
    router_bias="use_expert_bias",
    tied=True,
)
_GLM4_MOE: Final = Family(
    sparse=True, qk_norm="use_qk_norm", router_bias=True, out_bias=False, kinds=full_or_listed
)
_STEP: Final = Family(
    kinds=full_or_listed,
    mixer=special.step_mixer,
    qk_norm="head",
    sparse=True,
    router_bias=True,
    qkv_bias=False,
    out_bias=False,
)
_MINIMAX_M3: Final = Family(
    mixer=special.minimax_m3_mixer,
    qk_norm="use_qk_norm",
    sparse=True,
    router_bias=True,
    qkv_bias=False,
    out_bias=False,
    feed_name="block_sparse_moe",
)
_MIMO: Final = Family(
    kinds=mimo_pattern, mixer=special.mimo_mixer, sparse=True, router_bias=True, out_bias=False
)

#: MiniMax-01, Text-01 and M1: one architecture under three names.
_MINIMAX: Final = Family(
    kinds=numbered_types,
    mixer=special.minimax_mixer,
    sparse=True,
    qkv_bias=False,
    out_bias=False,
    feed_name="block_sparse_moe",
)
#: By `model_type`, which has the defaults of the configuration class.
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL,
    "mistral4": _DEEPSEEK,
    "mixtral": Family(
        kinds=window_everywhere,
        qkv_bias=False,
        out_bias=False,
        sparse=True,
        feed_name="block_sparse_moe",
    ),
    "qwen": Family(feed=special.half_feed, qkv_bias=True, out_bias=False),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_moe": Family(
        kinds=qwen_windows, qkv_bias="qkv_bias", out_bias=False, sparse=True, shared_gate=True
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen3_omni_moe_text": _QWEN3_MOE,
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "mimo": Family(kinds=qwen_windows, qkv_bias="attention_bias", out_bias=False, mlp_bias=False),
    "mimo_v2_flash": _MIMO,
    "mimo_v2": _MIMO,
    "gemma": _GEMMA,
    "gemma2": Family(kinds=every(2), norms=4, tied=True),
    "vaultgemma": Family(kinds=every(2), norms=2, tied=True),
    "gemma3_text": Family(kinds=every(6, "sliding_window_pattern"), norms=4, qk_norm="head", tied=True),
    "gemma3n_text": Family(
        kinds=every(5),
        mixer=special.gemma3n_mixer,
        feed=special.gemma3n_feed,
        beside=special.gemma3n_beside,
        norms=6,
        qk_norm="head",
        tied=True,
    ),
    "gemma4_text": Family(
        kinds=every(6),
        mixer=special.gemma4_mixer,
        feed=special.gemma4_feed,
        beside=special.gemma4_beside,
        norms=4,
        qk_norm="head",
        tied=True,
        sparse=True,
    ),
    "phi": Family(
        gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norms=1, norm_bias=True, head_bias=True
    ),
    "phi3": Family(kinds=window_everywhere, qkv_bias=False, out_bias=False, mlp_bias=False),
    "phi4mm": Family(kinds=window_everywhere, qkv_bias=False, out_bias=False, mlp_bias=False),
    "phi4_multimodal": Family(kinds=window_everywhere, qkv_bias=False, out_bias=False, mlp_bias=False),
    "phimoe": Family(
        kinds=window_everywhere,
        sparse=True,
        norm_bias=True,
        head_bias="lm_head_bias",
        feed_name="block_sparse_moe",
    ),
    "gpt_oss": Family(
        kinds=every(2),
        mixer=special.gpt_oss_mixer,
        feed=special.gpt_oss_feed,
        sparse=True,
        router_bias=True,
    ),
    "granite": _LLAMA,
    "granite_swa": Family(kinds=window_everywhere),
    "granitemoe": Family(kinds=full_or_listed, sparse=True, mlp_bias=False),
    "granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": Family(
        kinds=with_states(full_or_listed), mixer=special.mamba2_mixer, feed=special.granite_feed, sparse=True
    ),
    "bamba": Family(kinds=with_states(attention_indices), mixer=special.mamba2_mixer),
    "cohere": Family(norms=1, qk_norm="use_qk_norm", tied=True),
    "cohere2": Family(kinds=every(4, "sliding_window_pattern"), norms=1, tied=True),
    "olmo": Family(norms=0),
    "olmo2": Family(qk_norm="all"),
    "olmo3": Family(kinds=every(4), qk_norm="all"),
    "olmoe": Family(qk_norm="all", sparse=True),
    "flex_olmo": Family(qk_norm="all", sparse=True),
    "stablelm": Family(qkv_bias="use_qkv_bias", out_bias=False, norm_bias=True, qk_norm=""),
    "starcoder2": Family(
        kinds=window_everywhere,
        gated=False,
        norm_bias=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
    ),
    "glm": Family(out_bias=False),
    "glm4": Family(norms=4, out_bias=False),
    "glm4v_text": Family(norms=4, qkv_bias=True, out_bias=False),
    "glm4_moe": _GLM4_MOE,
    "glm4v_moe_text": _GLM4_MOE,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "smollm3": Family(kinds=qwen_windows),
    "seed_oss": Family(out_bias="attention_out_bias"),
    "exaone": Family(qkv_bias=False, out_bias=False),
    "exaone4": Family(
        kinds=every(4, "sliding_window_pattern"), qk_norm="head", qkv_bias=False, out_bias=False
    ),
    "exaone4_5_text": Family(
        kinds=every(4, "sliding_window_pattern"), qk_norm="head", qkv_bias=False, out_bias=False
    ),
    "exaone_moe": Family(
        kinds=every(4, "sliding_window_pattern"),
        qk_norm="head",
        qkv_bias=False,
        out_bias=False,
        sparse=True,
        router_bias=True,
    ),
    "apertus": Family(gated=False, qk_norm="head"),
    "arcee": Family(gated=False),
    "nemotron": Family(gated=False, norm_bias=True),
    "nemotron-nas": Family(layers=special.decilm_layers),
    "helium": Family(),
    "cwm": Family(kinds=every(4)),
    "nanochat": Family(gated=False, norms=0),
    "jais2": Family(gated=False, norm_bias=True),
    "solar": _LLAMA,
    "orion": Family(norm_bias=True),
    "baichuan": Family(qkv_bias=False, out_bias=False, mlp_bias=False),
    "internlm": Family(qkv_bias="bias", out_bias="bias"),
    "internlm2": Family(qkv_bias="bias", out_bias="bias"),
    "internlm3": Family(qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias"),
    "minicpm": Family(),
    "telechat2": Family(qkv_bias=False, out_bias=False),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "hunyuan_v1_moe": Family(qk_norm="head", sparse=True),
    "ernie4_5": Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "ernie4_5_moe": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", sparse=True, router_bias=True
    ),
    "gpt2": replace(_NORMED, beside=special.positions_beside, tied=True),
    "gpt_bigcode": replace(
        _NORMED, mixer=special.multi_query_mixer, beside=special.positions_beside, tied=True
    ),
    "gptj": Family(
        feed=special.four_times,
        gated=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=True,
        norms=1,
        norm_bias=True,
        head_bias=True,
    ),
    "codegen": Family(
        feed=special.four_times,
        gated=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=True,
        norms=1,
        norm_bias=True,
        head_bias=True,
    ),
    "gpt_neox": replace(_NORMED, qkv_bias="attention_bias", out_bias="attention_bias"),
    "bloom": replace(_NORMED, beside=special.bloom_beside, tied=True),
    "mpt": Family(
        mixer=special.inner_attention,
        feed=special.four_times,
        beside=special.positions_beside,
        gated=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tied=True,
    ),
    "opt": replace(_NORMED, beside=special.opt_beside, tied=True),
    "falcon": Family(
        mixer=special.falcon_mixer,
        feed=special.four_times,
        gated=False,
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
        norm_bias=True,
        tied=True,
    ),
    "chatglm": Family(
        mixer=special.chatglm_mixer,
        qkv_bias="add_qkv_bias",
        out_bias="add_bias_linear",
        mlp_bias="add_bias_linear",
    ),
    "dbrx": Family(
        mixer=special.inner_attention,
        feed=special.dbrx_experts,
        sparse=True,
        qkv_bias=False,
        out_bias=False,
    ),
    "llama4_text": Family(kinds=chunks, feed=special.llama4_feed, sparse=True),
    "deepseek": Family(sparse=True),
    "deepseek_v2": Family(kinds=all_latent, mixer=latent, sparse=True),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "axk1": _DEEPSEEK,
    "deepseek_v4": Family(
        kinds=compressed_layers,
        mixer=compressed,
        feed=special.deepseek_v4_feed,
        beside=special.deepseek_v4_beside,
        sparse=True,
        router_bias=True,
    ),
    "kimi_linear": Family(
        kinds=kimi_layers,
        mixer=special.kimi_mixer,
        feed=special.kimi_feed,
        sparse=True,
        router_bias=True,
        qkv_bias=False,
        feed_name="block_sparse_moe",
    ),
    "minimax": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "minimax_m2": Family(
        kinds=all_full_numbers,
        qkv_bias=False,
        out_bias=False,
        sparse=True,
        router_bias=True,
        qk_norm="layer",
        feed_name="block_sparse_moe",
    ),
    "minimax_m3": _MINIMAX_M3,
    "nemotron_h": Family(
        kinds=with_states(nemotron_pattern),
        layers=special.nemotron_layers,
        gated=False,
        sparse=True,
        router_bias=True,
        feed_name="mixer",
    ),
    "jamba": Family(
        kinds=with_states(attention_period),
        mixer=special.mamba1_mixer,
        sparse=True,
        feed_name="feed_forward",
        qkv_bias=False,
        out_bias=False,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "dots1": Family(kinds=qwen_windows, qk_norm="head", sparse=True, router_bias=True),
    "bailing_moe": Family(sparse=True, qkv_bias="use_qkv_bias", out_bias="use_bias", qk_norm="use_qk_norm"),
    "bailing_moe_v2": Family(
        sparse=True,
        qkv_bias="use_qkv_bias",
        out_bias="use_bias",
        qk_norm="use_qk_norm",
        router_bias="moe_router_enable_expert_bias",
    ),
    "afmoe": Family(
        kinds=every(4, "global_attn_every_n_layers"),
        norms=4,
        qk_norm="head",
        out_gate="value",
        sparse=True,
        router_bias=True,
    ),
    "longcat_flash": Family(
        kinds=all_latent, layers=special.longcat_layers, mixer=latent, sparse=True, router_bias=True
    ),
    "hy_v3": Family(qk_norm="head", sparse=True, router_bias=True),
    "solar_open": Family(sparse=True, router_bias=True),
    "mamba": Family(
        kinds=all_state, mixer=special.mamba1_mixer, feed=special.no_feed_forward, norms=1, tied=True
    ),
    "falcon_mamba": Family(
        kinds=all_state, mixer=special.mamba1_mixer, feed=special.no_feed_forward, norms=1, tied=True
    ),
    "mamba2": Family(kinds=all_state, mixer=special.mamba2_mixer, feed=special.no_feed_forward, norms=1),
    "falcon_h1": Family(layers=special.falcon_h1_layers),
}

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


#: Architectures around a language model, which stands in a table of its own; its `model_type` decides.
WRAPPERS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        AriaForConditionalGeneration Exaone4_5_ForConditionalGeneration Maira2ForConditionalGeneration
         AudioFlamingo3ForConditionalGeneration
        AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration DeepseekVLV2ForCausalLM
        DeepseekOCRForCausalLM DotsOCRForCausalLM Gemma3ForConditionalGeneration
        Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration Glm4vForConditionalGeneration
        Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration
        GraniteSpeechForConditionalGeneration Idefics3ForConditionalGeneration InternVLChatModel
        InternVLForConditionalGeneration InternS1ForConditionalGeneration KimiVLForConditionalGeneration
        KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration Lfm2VlForConditionalGeneration
        LightOnOCRForConditionalGeneration Llama4ForConditionalGeneration LlavaForConditionalGeneration
        LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
        LlavaOnevisionForConditionalGeneration Llama_Nemotron_Nano_VL
        MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration NemotronH_Nano_VL_V2
        NemotronH_Nano_Omni_Reasoning_V3 PaliGemmaForConditionalGeneration Phi4MultimodalForCausalLM
        PixtralForConditionalGeneration Qwen2AudioForConditionalGeneration
        Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen2_5OmniModel
        Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration
        Qwen3ASRForConditionalGeneration Qwen3VLForConditionalGeneration
        Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
        Qwen3_5MoeForConditionalGeneration SmolVLMForConditionalGeneration
        Step3p7ForConditionalGeneration UltravoxModel VoxtralForConditionalGeneration
        """,
    )
)
#: Tables of the language model inside such a file, outermost first.
INNER_TABLES: Final = ("thinker_config", "text_config", "llm_config", "language_config")
