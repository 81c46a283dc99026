"""Architectures with layer parts of their own: Falcon, Gemma 3n and 4, Llama 4, Nemotron, others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetlb.errors import ConfigError
from hetlb.tools.models.attention import attention_of, grouped, head_size, latent, window_of
from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.feed_forward import dense, experts_of, feed_forward, is_sparse, mixture
from hetlb.tools.models.layer import Family, FeedForward, Heads, Layer, Mixer, Scope, Weights, linear, plain
from hetlb.tools.models.recurrent import delta_net, kimi_delta, lightning, mamba1, mamba2, short_conv


def mixer_of(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return the mixer of a layer by its kind, and if there are several of that kind by the model's keys."""
    if kind is Scope.STATE:
        keys.note(
            "mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state", "mamba_conv", "mamba_expand"
        )
        if keys.value("conv_L_cache") is not None:
            return short_conv(family, keys, layer, kind)
        heads = keys.value("mamba_heads", keys.value("num_heads"))
        return (mamba1 if heads is None else mamba2)(family, keys, layer, kind)
    if kind is Scope.LINEAR:
        keys.expect("attn_output_gate", (True,), True)
        kimi = keys.value("linear_attn_config") is not None or keys.value("linear_num_heads") is not None
        return (kimi_delta if kimi else delta_net)(family, keys, layer, kind)
    return (latent if kind is Scope.LATENT else grouped)(family, keys, layer, kind)


def minimax_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return lightning attention, or attention."""
    return (lightning if kind is Scope.LINEAR else grouped)(family, keys, layer, kind)


def no_feed_forward(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return nothing: the mixer is the layer."""
    return FeedForward()


# --- older architectures --------------------------------------------------------------------------------


def falcon_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return Falcon's attention: `num_kv_heads` counts in the new architecture alone."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    stated, multi_query = keys.value("num_key_value_heads"), keys.flag("multi_query", True)
    if keys.flag("new_decoder_architecture"):
        kv = keys.whole("num_key_value_heads") if stated else heads
    else:
        kv = 1 if multi_query else heads
    return attention_of(family, keys, kind, Heads(heads, kv, size, size), name="self_attention")


def half_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return the feed-forward part of the first Qwen: its stated size is of both halves of the gate."""
    return dense(family, keys, size=keys.whole("intermediate_size") // 2)


def multi_query_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return StarCoder's attention: one KV head with `multi_query`."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    kv = 1 if keys.flag("multi_query", True) else heads
    if keys.whole("num_key_value_heads", kv) != kv:
        raise ConfigError(f"num_key_value_heads: expected {kv}, got {keys.value('num_key_value_heads')}")
    return attention_of(family, keys, kind, Heads(heads, kv, size, size))


def inner_attention(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return attention with its KV heads in `attn_config` (MPT, DBRX)."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    inner = keys.inner("attn_config")
    kv = inner.whole("kv_n_heads", heads) if inner is not None and inner.stated("kv_n_heads") else heads
    if inner is not None and inner.value("attn_type", "multihead_attention") == "multiquery_attention":
        kv = 1
    return attention_of(family, keys, kind, Heads(heads, kv, size, size))


def dbrx_experts(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return DBRX's experts, which are in `ffn_config`."""
    inner = keys.inner("ffn_config")
    if inner is None:
        raise ConfigError("ffn_config: expected a table, got none")
    size, count = inner.whole("ffn_hidden_size", 3584), inner.whole("num_experts", 4)
    hidden = keys.whole("hidden_size")
    weights = (
        Weights("ffn.experts", count * 3 * hidden * size, experts=count),
        *plain("ffn.router", hidden * count),
    )
    return FeedForward(
        weights, (), ("ffn_hidden_size", size), count, float(inner.whole("num_experts_per_tok", 1))
    )


def chatglm_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return ChatGLM's attention: `multi_query_group_num` counts unless `multi_query_attention` is off."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    groups = keys.whole("num_key_value_heads", heads)
    kv = groups if keys.flag("multi_query_attention", True) else heads
    return attention_of(family, keys, kind, Heads(heads, kv, size, size), name="self_attention")


def opt_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return learnt positions (two more than the context) and the projections of a narrow embedding."""
    hidden = keys.whole("hidden_size")
    narrow = keys.whole("word_embed_proj_dim", hidden)
    found = plain("embed_positions", (keys.whole("max_position_embeddings", 2048) + 2) * hidden)
    if narrow != hidden:
        vocab = keys.whole("vocab_size")
        found += plain("project", 2 * narrow * hidden) + plain("embed_tokens", vocab * (narrow - hidden))
    return found


def positions_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return learnt positions."""
    places = keys.value("n_positions", keys.value("max_seq_len", 1024))
    learnt = keys.flag("learned_pos_emb", True)
    inner = keys.inner("attn_config")
    if inner is not None and inner.value("alibi"):
        learnt = False
    return plain("wpe", places * keys.whole("hidden_size")) if learnt else ()


def bloom_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return the norm after the embedding."""
    return plain("word_embeddings_layernorm", 2 * keys.whole("hidden_size"))


def decilm_layers(family: Family, keys: ConfigKeys) -> Sequence[Layer]:
    """Return the layers of a pruned Llama: `block_configs` states attention and feed-forward of each."""
    blocks, heads, size = keys.value("block_configs"), keys.whole("num_attention_heads"), head_size(keys)
    hidden, count = keys.whole("hidden_size"), keys.whole("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise ConfigError(f"block_configs: expected {count} layers")
    keys.note("num_key_value_heads", "intermediate_size")
    found = []
    for i, block in enumerate(blocks):
        attention, feed = block.get("attention", {}), block.get("ffn", {})
        for table, name in ((attention, "attention"), (feed, "ffn")):
            for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
                if table.get(key):
                    raise ConfigError(f"block_configs[{i}].{name}.{key}: expected none, got {table[key]!r}")
        mixer, part = Mixer(Scope.NONE), FeedForward()
        if not attention.get("no_op"):
            group = attention.get("n_heads_in_group")
            if type(group) is not int or group < 1:
                raise ConfigError(
                    f"block_configs[{i}].attention.n_heads_in_group: expected a number, got {group!r}"
                )
            mixer = attention_of(family, keys, Scope.FULL, Heads(heads, heads // group, size, size))
        if not feed.get("no_op"):
            part = dense(family, keys, size=_decilm_size(feed.get("ffn_mult"), hidden, i))
        found.append(Layer(mixer, part, plain("norms", 2 * hidden)))
    return found


def _decilm_size(times: Any, hidden: int, layer: int) -> int:
    if not isinstance(times, int | float) or times <= 0:
        raise ConfigError(f"block_configs[{layer}].ffn.ffn_mult: expected a number, got {times!r}")
    return -(-int(2 * times * hidden / 3) // 256) * 256  # as Llama rounds: up to a multiple of 256


# --- Gemma ----------------------------------------------------------------------------------------------


def shared_cache(keys: ConfigKeys, layer: int) -> bool:
    """Return True for a layer that reads the cache of a layer before it."""
    first = keys.whole("num_hidden_layers") - keys.count("num_kv_shared_layers")
    return layer >= first > 0


def gemma3n_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return Gemma 3n's attention: the last layers keep no keys of their own, but have the weights."""
    found = grouped(family, keys, layer, kind)
    return Mixer(Scope.CROSS, found.weights, heads=found.heads) if shared_cache(keys, layer) else found


def gemma3n_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return Gemma 3n's feed-forward part with its AltUp, Laurel and per-layer input."""
    hidden, size = keys.whole("hidden_size"), keys.at("intermediate_size", layer)
    inputs, rank = keys.whole("altup_num_inputs"), keys.whole("laurel_rank")
    each = keys.whole("hidden_size_per_layer_input")
    part = dense(family, keys, size=size)
    more = (
        linear("laurel", hidden, 2 * rank)
        + linear("per_layer_input", hidden, 2 * each)
        + plain("altup", inputs**2 + inputs**3 + hidden * inputs + 5 * hidden - 2 * hidden)
    )
    return FeedForward(part.weights + more, part.sizes)


def gemma3n_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return the embedding of each layer, and the projections into and out of AltUp's inputs."""
    layers, each = keys.whole("num_hidden_layers"), keys.whole("hidden_size_per_layer_input")
    hidden = keys.whole("hidden_size")
    return (
        plain("embed_tokens_per_layer", keys.whole("vocab_size_per_layer_input") * layers * each)
        + linear("per_layer_model_projection", hidden, layers * each)
        + plain("per_layer_projection_norm", each)
        + linear("altup_projections", hidden, 2 * (keys.whole("altup_num_inputs") - 1) * hidden)
    )


def gemma4_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return Gemma 4's attention: full layers have heads of their own; keys may serve as values."""
    size, kv = keys.whole("head_dim"), keys.whole("num_key_value_heads")
    alike = keys.flag("attention_k_eq_v") and kind is Scope.FULL
    wide = keys.whole("global_head_dim", 512) if keys.value("global_head_dim") or kind is Scope.FULL else size
    few = keys.value("num_global_key_value_heads")
    if kind is Scope.FULL:
        size, kv = wide, (keys.whole("num_global_key_value_heads") if alike and few else kv)
    own = (keys.value("per_layer_config") or {}).get(str(layer)) or {}
    if set(own) - {"head_dim", "num_key_value_heads"}:
        raise ConfigError(f"per_layer_config.{layer}: expected head_dim, num_key_value_heads, got {own!r}")
    size, kv = own.get("head_dim", size), own.get("num_key_value_heads", kv)
    heads = Heads(keys.whole("num_attention_heads"), kv, size, size)
    if not shared_cache(keys, layer):
        return attention_of(family, keys, kind, heads, values=not alike)
    hidden = keys.whole("hidden_size")
    weights = linear("self_attn.q_proj", hidden, heads.queries * size)
    weights += linear("self_attn.o_proj", heads.queries * size, hidden) + plain("self_attn.q_norm", size)
    return Mixer(Scope.CROSS, weights, heads=heads)


def gemma4_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return Gemma 4's feed-forward part: a dense one, beside it experts, and a per-layer input."""
    hidden, size = keys.whole("hidden_size"), keys.at("intermediate_size", layer)
    twice = keys.flag("use_double_wide_mlp") and shared_cache(keys, layer)
    part = dense(family, keys, size=size * (1 + twice))
    each = keys.count("hidden_size_per_layer_input")
    more = (linear("per_layer_input", hidden, 2 * each) + plain("per_layer_norm", hidden)) if each else ()
    enabled = keys.flag("enable_moe_block", bool(experts_of(keys)))
    if not (enabled and experts_of(keys)):
        return FeedForward(part.weights + more, part.sizes)
    apart = replace(family, feed_name="moe")
    sparse = mixture(apart, keys, layer, more=plain("norms", 4 * hidden + experts_of(keys)))
    return FeedForward(
        part.weights + sparse.weights + more, part.sizes, sparse.expert_size, sparse.experts, sparse.chosen
    )


def gemma4_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return the embedding of each layer."""
    layers, each = keys.whole("num_hidden_layers"), keys.count("hidden_size_per_layer_input")
    vocab = keys.count("vocab_size_per_layer_input")
    if not each:
        return ()
    return (
        plain("embed_tokens_per_layer", vocab * layers * each)
        + linear("per_layer_model_projection", keys.whole("hidden_size"), layers * each)
        + plain("per_layer_projection_norm", each)
    )


# --- mixtures -------------------------------------------------------------------------------------------


def llama4_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return Llama 4's feed-forward part: experts beside a shared one, or a dense part of another size."""
    size, wide = keys.whole("intermediate_size"), keys.whole("intermediate_size_mlp", 16384)
    if is_sparse(keys, layer) and experts_of(keys):
        return mixture(family, keys, layer, size=size, shared=size)
    return dense(family, keys, "intermediate_size_mlp", wide)


def gpt_oss_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return attention with a sink per head."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    sinks = plain("self_attn.sinks", heads)
    return attention_of(
        family, keys, kind, Heads(heads, keys.whole("num_key_value_heads"), size, size), more=sinks
    )


def gpt_oss_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return experts with biases."""
    return mixture(family, keys, layer, expert_bias=True)


def mimo_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return MiMo-V2's attention: windows have heads of their own, values are smaller than keys."""
    swa = "swa_" if kind is Scope.WINDOW else ""
    usual = {
        "num_attention_heads": keys.whole("num_attention_heads"),
        "num_key_value_heads": keys.whole("num_key_value_heads"),
        "head_dim": head_size(keys),
        "v_head_dim": keys.whole("v_head_dim", head_size(keys)),
    }
    own = {key: keys.whole(f"swa_{key}", size) for key, size in usual.items()}
    sizes = own if swa else usual
    sinks = keys.flag("add_swa_attention_sink_bias") if swa else keys.flag("add_full_attention_sink_bias")
    keys.note("add_swa_attention_sink_bias", "add_full_attention_sink_bias")
    if swa and keys.count("attention_chunk_size") not in (0, window_of(keys, kind)):
        raise ConfigError(
            f"attention_chunk_size: expected {window_of(keys, kind)} as sliding_window, "
            f"got {keys.value('attention_chunk_size')}"
        )
    keys.note("attention_chunk_size")
    more = plain("sinks", sizes["num_attention_heads"] * sinks)
    return attention_of(family, keys, kind, Heads(*sizes.values()), more=more)


def step_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return Step's attention: windows may have more heads (`attention_other_setting`)."""
    heads, size = keys.whole("num_attention_heads"), head_size(keys)
    kv = keys.whole("num_key_value_heads")
    other, gate = keys.inner("attention_other_setting"), keys.flag("use_head_wise_attn_gate")
    if other is not None and kind is Scope.WINDOW:
        heads, kv = other.whole("num_attention_heads", heads), other.whole("num_key_value_heads", kv)
        size = other.whole("head_dim", size)
    more = linear("self_attn.g_proj", keys.whole("hidden_size"), heads) if gate else ()
    return attention_of(family, keys, kind, Heads(heads, kv, size, size), more=more)


def nemotron_layers(family: Family, keys: ConfigKeys) -> Sequence[Layer]:
    """Return Nemotron-H's layers, of one part each: Mamba 2, attention, a feed-forward part, or experts."""
    hidden, norm = keys.whole("hidden_size"), plain("norm", keys.whole("hidden_size"))
    pattern, types = keys.value("hybrid_override_pattern"), keys.texts("layer_types")
    found: list[Layer] = []
    for i, kind in enumerate(family.kinds(family, keys)):
        mixer, part = Mixer(kind), FeedForward()
        if kind is Scope.STATE:
            mixer = mamba2(family, keys, i, kind)
        elif kind is not Scope.NONE:
            mixer = grouped(family, keys, i, kind)
        elif (types[i] if types is not None else pattern[i]) in ("moe", "E"):
            width = keys.value("moe_latent_size") and keys.whole("moe_latent_size")
            inward = linear("mixer.latent", hidden, 2 * width) if width else ()
            part = mixture(family, keys, i, width=width or hidden, more=inward)
        else:
            part = dense(family, keys)
        found.append(Layer(mixer, part, norm))
    keys.note("intermediate_size", "moe_intermediate_size")
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
    ):
        keys.value(key)
    for key in ("num_shared_experts", "shared_intermediate_size", "moe_latent_size", "sliding_window"):
        keys.value(key)
    return found


def granite_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return Granite's feed-forward part: experts beside a shared one, or the shared one alone."""
    shared = keys.count("shared_intermediate_size")
    if not experts_of(keys):
        keys.note("num_experts_per_tok", "intermediate_size")
        return dense(family, keys, "shared_intermediate_size", keys.whole("shared_intermediate_size"))
    return mixture(family, keys, layer, size=keys.whole("intermediate_size"), shared=shared)


def lfm_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return LFM2's feed-forward part. Its stated size is before the factor 2/3 of gated parts."""
    if experts_of(keys) and is_sparse(keys, layer):
        return mixture(family, keys, layer)
    size = keys.whole("intermediate_size")
    multiple, times = keys.whole("block_multiple_of", 256), keys.value("block_ffn_dim_multiplier", 1.0)
    if keys.flag("block_auto_adjust_ff_dim", not experts_of(keys)):
        size = -(-int((times or 1.0) * int(2 * size / 3)) // multiple) * multiple
    return dense(family, keys, size=size)


def falcon_h1_layers(family: Family, keys: ConfigKeys) -> Sequence[Layer]:
    """Return Falcon-H1's layers: attention and Mamba 2 side by side."""
    found = []
    hidden = keys.whole("hidden_size")
    keys.expect("mamba_use_mlp", (True,), True)
    for i in range(keys.whole("num_hidden_layers")):
        attention = grouped(family, keys, i, Scope.FULL)
        state = mamba2(family, keys, i, Scope.STATE, "mamba")
        mixer = Mixer(
            Scope.FULL,
            attention.weights + state.weights,
            attention.grows,
            state_bytes=state.state_bytes,
            heads=attention.heads,
            whole=state.whole,
        )
        found.append(Layer(mixer, feed_forward(family, keys, i), plain("norms", 2 * hidden)))
    return found


def longcat_layers(family: Family, keys: ConfigKeys) -> Sequence[Layer]:
    """Return LongCat's layers: two attentions, two dense parts and one mixture in each."""
    found, hidden = [], keys.whole("hidden_size")
    zero = keys.count("zero_expert_num")
    for i in range(keys.whole("num_hidden_layers")):
        part = mixture(family, keys, i)
        # Some of the experts that a token takes do nothing.
        share = part.experts / (part.experts + zero)
        router = plain("mlp.gate.zero", zero * hidden + zero)
        sparse = FeedForward(
            part.weights + router, part.sizes, part.expert_size, part.experts, part.chosen * share
        )
        first = dense(family, keys)
        both = FeedForward(
            first.weights + sparse.weights, first.sizes, sparse.expert_size, sparse.experts, sparse.chosen
        )
        norms = plain("norms", 2 * hidden)
        found.append(Layer(latent(family, keys, 2 * i, Scope.LATENT), both, norms))
        found.append(Layer(latent(family, keys, 2 * i + 1, Scope.LATENT), dense(family, keys), norms))
    return found


def deepseek_v4_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return DeepSeek-V4's experts, with the weights of its hyper-connections (arXiv 2409.19606)."""
    streams, hidden = keys.whole("hc_mult"), keys.whole("hidden_size")
    keys.note("num_hash_layers", "mlp_layer_types")
    mixed = (2 + streams) * streams
    more = plain("hyper", 2 * (mixed * streams * hidden + mixed + 3))
    return mixture(family, keys, layer, more=more)


def deepseek_v4_beside(keys: ConfigKeys) -> tuple[Weights, ...]:
    """Return the hyper-connection of the head."""
    streams = keys.whole("hc_mult")
    return plain("hyper_head", streams * streams * keys.whole("hidden_size") + streams + 1)


def kimi_feed(family: Family, keys: ConfigKeys, layer: int) -> FeedForward:
    """Return Kimi Linear's experts; with `moe_latent_size` they compute on vectors of that size."""
    if not (experts_of(keys) and is_sparse(keys, layer)):
        return dense(family, keys)
    hidden, width = keys.whole("hidden_size"), keys.value("moe_latent_size")
    if not width:
        return mixture(family, keys, layer)
    more = linear("mlp.latent", hidden, 2 * width) + plain("mlp.latent_norm", width)
    keys.note("latent_moe_use_norm", "attn_res_block_size")
    return mixture(family, keys, layer, width=keys.whole("moe_latent_size"), more=more)


def minimax_m3_mixer(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return MiniMax-M3's attention: sparse layers keep an index key of their own."""
    found = grouped(family, keys, layer, kind)
    inner = keys.inner("sparse_attention_config")
    sparse = inner.wholes("sparse_attention_freq") if inner is not None else None
    keys.expect("attention_output_gate", (False,), False)
    if inner is None or sparse is None or not sparse[layer]:
        return found
    off = inner.wholes("sparse_disable_index_value")
    if not off or not off[layer]:
        raise ConfigError("sparse_attention_config.sparse_disable_index_value: expected 1 for sparse layers")
    heads, size = inner.whole("sparse_num_index_heads", 4), inner.whole("sparse_index_dim", 128)
    hidden = keys.whole("hidden_size")
    weights = linear("self_attn.index_q_proj", hidden, heads * size)
    weights += linear("self_attn.index_k_proj", hidden, size) + plain("self_attn.index_norms", 2 * size)
    return Mixer(kind, found.weights + weights, found.grows + size, heads=found.heads)
