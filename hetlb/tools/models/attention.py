"""Attention of a layer: grouped-query in all spellings, latent, compressed."""

from __future__ import annotations

from hetlb.errors import ConfigError
from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.layer import Family, Heads, Mixer, Scope, Weights, linear, plain

#: Sizes of DeepSeek-V2 and later, for classes without a default.
_NOPE_SIZE, _ROPE_SIZE, _VALUE_SIZE = 128, 64, 128
#: Bytes of a token in vLLM's `fp8_ds_mla`, by the sizes that its kernels take: a latent of DeepSeek-V3.2
#: with its rotary key in bf16 and four scales; of DeepSeek-V4. An index key is fp8 and has a scale.
_PACKED_LATENT = {(512, 64): 656.0}
_PACKED_COMPRESSED = {512: 584.0}
_INDEX_SCALE_BYTES = 4


def window_of(keys: ConfigKeys, kind: Scope) -> int:
    """Return the tokens that a layer of this kind sees, 0: all."""
    if kind is Scope.WINDOW:
        return keys.whole("sliding_window")
    if kind is Scope.CHUNK:
        return keys.whole("attention_chunk_size")
    return 0


def kept(kind: Scope, values: float, window: int) -> dict[str, float]:
    """Return the cache of a layer as arguments of `Mixer`."""
    return {"window": values, "window_tokens": window} if window else {"grows": values}


def head_size(keys: ConfigKeys) -> int:
    """Return the values of one head."""
    heads = keys.whole("num_attention_heads")
    return keys.whole("head_dim", max(1, keys.whole("hidden_size") // heads))


def grouped(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return grouped-query attention: K and V for each KV head."""
    heads = keys.whole("num_attention_heads")
    size = head_size(keys)
    found = Heads(heads, keys.whole("num_key_value_heads", heads), size, keys.whole("v_head_dim", size))
    return attention_of(family, keys, kind, found)


def attention_of(
    family: Family,
    keys: ConfigKeys,
    kind: Scope,
    heads: Heads,
    *,
    name: str = "self_attn",
    values: bool = True,
    more: tuple[Weights, ...] = (),
) -> Mixer:
    """Return attention with these heads; without `values` the keys serve as values."""
    if heads.queries % heads.keys and not (heads.keys % heads.queries == 0):
        raise ConfigError(
            f"{keys.name_of('num_key_value_heads')}: expected a divisor of the {heads.queries} heads, "
            f"got {heads.keys}"
        )
    hidden = keys.whole("hidden_size")
    bias, out_bias = family.bias(0, keys), family.bias(1, keys)
    queries = heads.queries * heads.key_size
    out = heads.queries * heads.value_size
    gate = {"value": out, "head": heads.queries}.get(family.out_gate, 0)
    weights = (
        linear(f"{name}.q_proj", hidden, queries, bias)
        + linear(f"{name}.k_proj", hidden, heads.keys * heads.key_size, bias)
        + (linear(f"{name}.v_proj", hidden, heads.keys * heads.value_size, bias) if values else ())
        + linear(f"{name}.o_proj", out, hidden, out_bias)
        + (linear(f"{name}.g_proj", hidden, gate) if gate else ())
        + plain(f"{name}.norms", _query_key_norms(family, keys, heads))
        + more
    )
    window = window_of(keys, kind)
    kv = heads.keys * (heads.key_size + heads.value_size)
    cache = (0.0, kv) if window else (kv, 0.0)
    return Mixer(kind, weights, cache[0], window, cache[1], heads=heads)


def _query_key_norms(family: Family, keys: ConfigKeys, heads: Heads) -> int:
    kind = family.qk_norm
    if kind not in ("", "head", "all", "layer"):
        kind = "head" if keys.flag(kind) else ""
    if kind == "all":
        return (heads.queries + heads.keys) * heads.key_size
    return {"": 0, "head": 2 * heads.key_size, "layer": (heads.queries + heads.keys) * heads.key_size}[kind]


# --- DeepSeek -------------------------------------------------------------------------------------------


def latent(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return multi-head latent attention (arXiv 2405.04434): a latent and a rotary key for all heads."""
    heads, hidden = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    rank, rope = keys.whole("kv_lora_rank"), keys.whole("qk_rope_head_dim", _ROPE_SIZE)
    nope, value = keys.whole("qk_nope_head_dim", _NOPE_SIZE), keys.whole("v_head_dim", _VALUE_SIZE)
    keys.note("num_key_value_heads", "head_dim", "qk_head_dim")
    bias = family.bias(0, keys)
    query_rank = keys.value("q_lora_rank")
    queries = heads * (nope + rope)
    if query_rank is None:
        weights = linear("self_attn.q_proj", hidden, queries)
    else:
        query_rank = keys.whole("q_lora_rank")
        weights = (
            linear("self_attn.q_a_proj", hidden, query_rank, bias, copied=True)
            + plain("self_attn.q_a_layernorm", query_rank)
            + linear("self_attn.q_b_proj", query_rank, queries)
        )
    weights += linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, bias, copied=True)
    weights += plain("self_attn.kv_a_layernorm", rank)
    weights += linear("self_attn.kv_b_proj", rank, heads * (nope + value))
    weights += linear("self_attn.o_proj", heads * value, hidden, bias)
    if keys.flag("mla_use_output_gate"):
        weights += linear("self_attn.g_proj", hidden, heads * value)
    index, index_size = _indexer(keys, layer, query_rank or hidden)
    return Mixer(
        kind,
        weights + index,
        float(rank + rope + index_size),
        heads=Heads(heads, 0, nope + rope, value),
        chosen_tokens=keys.count("index_topk"),
        index_flops=2.0 * keys.count("index_n_heads") * index_size,
        packed_grows=_packed_latent(keys.count("index_topk"), rank, rope, index_size),
    )


def _indexer(keys: ConfigKeys, layer: int, query_rank: int) -> tuple[tuple[Weights, ...], int]:
    """Return the index of DeepSeek's sparse attention: it keeps a key of its own for every token."""
    if keys.value("index_topk") is None:
        return (), 0
    heads, size, hidden = keys.whole("index_n_heads"), keys.whole("index_head_dim"), keys.whole("hidden_size")
    if not _indexes(keys, layer):
        return (), 0
    weights = (
        linear("self_attn.indexer.wq_b", query_rank, heads * size, copied=True)
        + linear("self_attn.indexer.wk", hidden, size)
        + plain("self_attn.indexer.k_norm", 2 * size)
        + linear("self_attn.indexer.weights_proj", hidden, heads)
    )
    return weights, size


def _indexes(keys: ConfigKeys, layer: int) -> bool:
    """Return False for a layer that takes the tokens that a layer before it chose."""
    types, pattern = keys.texts("indexer_types"), keys.value("index_topk_pattern")
    every, offset = keys.whole("index_topk_freq", 1), keys.whole("index_skip_topk_offset", 2)
    if types is not None:
        return types[layer % len(types)] == "full"
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] != "S"
    return max(layer - offset + 1, 0) % every == 0


def compress_ratios(keys: ConfigKeys) -> list[int] | None:
    """Return the tokens that become one in each layer of DeepSeek-V4, by numbers or by words."""
    stated, types, rates = (
        keys.wholes("compress_ratios"),
        keys.texts("layer_types"),
        keys.inner("compress_rates"),
    )
    if stated is not None or types is None:
        return stated
    by_word = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    if rates is not None:
        by_word |= {word: rates.whole(word, rate) for word, rate in by_word.items() if rate}
    if set(types) - set(by_word):
        raise ConfigError(f"layer_types: expected out of {', '.join(by_word)}, got {types[:3]!r}")
    return [by_word[word] for word in types]


def compressed(family: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return DeepSeek-V4's attention: a window, and one latent for every `compress_ratios` tokens."""
    ratio = (compress_ratios(keys) or [])[layer]
    heads, hidden, size = (keys.whole(k) for k in ("num_attention_heads", "hidden_size", "head_dim"))
    rank, groups, out_rank = keys.whole("q_lora_rank"), keys.whole("o_groups"), keys.whole("o_lora_rank")
    keys.note("num_key_value_heads", "qk_rope_head_dim", "compress_rope_theta")
    weights = (
        linear("self_attn.q_a_proj", hidden, rank)
        + linear("self_attn.q_b_proj", rank, heads * size)
        + linear("self_attn.kv_proj", hidden, size)
        + linear("self_attn.o_a_proj", heads * size // groups, groups * out_rank)
        + linear("self_attn.o_b_proj", groups * out_rank, hidden)
        + plain("self_attn.norms", rank + size + heads)
    )
    grows, packed, row = 0.0, 0.0, _PACKED_COMPRESSED.get(size, 0.0)
    index_heads, index_size = keys.whole("index_n_heads"), keys.whole("index_head_dim")
    keys.note("index_topk")
    if ratio:
        # A ratio of 4 has overlapping blocks (two values each) and an index over them.
        overlap = 2 if ratio == 4 else 1
        weights += _compressor("self_attn.compressor", hidden, size, overlap, ratio)
        grows, packed = size / ratio, row / ratio
        if overlap == 2:
            weights += linear("self_attn.indexer.wq_b", rank, index_heads * index_size)
            weights += linear("self_attn.indexer.weights_proj", hidden, index_heads)
            weights += _compressor("self_attn.indexer.compressor", hidden, index_size, overlap, ratio)
            grows += index_size / ratio
            packed += (index_size + _INDEX_SCALE_BYTES) / ratio if row else 0.0
    window = keys.whole("sliding_window")
    return Mixer(
        kind,
        weights,
        grows,
        window,
        float(size),
        heads=Heads(heads, 0, size, size),
        packed_grows=packed,
        packed_window=row,
    )


def _packed_latent(chosen: int, rank: int, rope: int, index_size: int) -> float:
    """Return the bytes of a token in vLLM's rows of sparse attention; 0 if it has none of these sizes."""
    row = _PACKED_LATENT.get((rank, rope), 0.0) if chosen else 0.0
    return row + index_size + _INDEX_SCALE_BYTES if row and index_size else row


def _compressor(name: str, hidden: int, size: int, overlap: int, ratio: int) -> tuple[Weights, ...]:
    values = overlap * size
    return (
        linear(f"{name}.wkv", hidden, values)
        + linear(f"{name}.wgate", hidden, values)
        + plain(f"{name}.rest", ratio * values + size)
    )
