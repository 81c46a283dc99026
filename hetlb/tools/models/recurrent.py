"""Layers that keep a state in place of tokens: Mamba, gated delta nets, linear attention, convolutions."""

from __future__ import annotations

import math

from hetlb.tools.models.attention import head_size
from hetlb.tools.models.config_keys import ConfigKeys
from hetlb.tools.models.layer import Family, Mixer, Scope, linear, plain

#: Bytes of a value of the model's own type, and of a 32-bit state.
_VALUE_BYTES, _STATE_BYTES = 2, 4


def _state_bytes_of_value(keys: ConfigKeys) -> int:
    return _STATE_BYTES if keys.value("state_dtype") == "float32" else _VALUE_BYTES


def mamba2(_: Family, keys: ConfigKeys, layer: int, kind: Scope, name: str = "mixer") -> Mixer:
    """Return a Mamba 2 layer (arXiv 2405.21060)."""
    hidden, state, kernel = keys.whole("hidden_size"), keys.whole("mamba_state"), keys.whole("mamba_conv")
    groups = keys.whole("mamba_groups")
    heads = keys.whole("mamba_heads") if keys.value("mamba_heads") else keys.whole("num_heads")
    stated = keys.value("mamba_head_dim", keys.value("head_dim") if keys.value("num_heads") else None)
    inner = keys.value("mamba_d_ssm") or keys.value("mamba_expand", 2) * hidden
    size = stated if isinstance(stated, int) else inner // heads
    inner = heads * size
    convolved = inner + 2 * groups * state
    keys.note("mamba_expand", "chunk_size", "mamba_chunk_size")
    bias = keys.flag("mamba_proj_bias", keys.flag("use_bias"))
    weights = (
        linear(f"{name}.in_proj", hidden, inner + convolved + heads, bias)
        + linear(f"{name}.out_proj", inner, hidden, bias)
        + plain(f"{name}.conv1d", convolved * (kernel + keys.flag("mamba_conv_bias", True)))
        + plain(f"{name}.rest", 3 * heads + (inner if keys.flag("mamba_rms_norm", True) else 0))
    )
    held = (kernel - 1) * convolved * _VALUE_BYTES + heads * size * state * _state_bytes_of_value(keys)
    groups_whole = (("n_groups", groups),) if groups > 1 else ()
    return Mixer(kind, weights, state_bytes=held, whole=(("mamba heads", heads), *groups_whole))


def mamba1(_: Family, keys: ConfigKeys, layer: int, kind: Scope, name: str = "mamba") -> Mixer:
    """Return a Mamba layer (arXiv 2312.00752)."""
    hidden, state, kernel = keys.whole("hidden_size"), keys.whole("mamba_state"), keys.whole("mamba_conv")
    # Without other layers `intermediate_size` belongs to the mixer, whatever `expand` says.
    own = None if keys.stated("attn_layer_period") else keys.value("intermediate_size")
    inner = keys.value("mamba_d_inner") or own or keys.value("mamba_expand", 2) * hidden
    keys.expect("d_inner", (inner,), inner)
    stated = keys.value("mamba_dt_rank", keys.value("time_step_rank"))
    rank = stated if isinstance(stated, int) else math.ceil(hidden / 16)
    bias = keys.flag("mamba_proj_bias", keys.flag("use_bias"))
    norms = rank + 2 * state if keys.stated("attn_layer_period") else 0  # Jamba norms its projections
    weights = (
        linear(f"{name}.in_proj", hidden, 2 * inner, bias)
        + linear(f"{name}.x_proj", inner, rank + 2 * state)
        + linear(f"{name}.dt_proj", rank, inner, True)
        + linear(f"{name}.out_proj", inner, hidden, bias)
        + plain(f"{name}.conv1d", inner * (kernel + keys.flag("mamba_conv_bias", True)))
        + plain(f"{name}.rest", inner * state + inner + norms)
    )
    held = (kernel - 1) * inner * _VALUE_BYTES + inner * state * _state_bytes_of_value(keys)
    return Mixer(kind, weights, state_bytes=held, whole=(("mamba channels", inner),))


def delta_net(_: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return a gated delta net (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""
    hidden = keys.whole("hidden_size")
    key_heads, value_heads = keys.whole("linear_num_key_heads"), keys.whole("linear_num_value_heads")
    key_size, value_size = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
    kernel = keys.whole("linear_conv_kernel_dim")
    keyed, valued = key_heads * key_size, value_heads * value_size
    convolved = 2 * keyed + valued
    weights = (
        linear("linear_attn.in_proj_qkv", hidden, convolved)
        + linear("linear_attn.in_proj_z", hidden, valued)
        + linear("linear_attn.in_proj_ba", hidden, 2 * value_heads)
        + linear("linear_attn.out_proj", valued, hidden)
        + plain("linear_attn.conv1d", convolved * kernel)
        + plain("linear_attn.rest", 2 * value_heads + value_size)
    )
    held = (kernel - 1) * convolved * _VALUE_BYTES
    held += value_heads * key_size * value_size * _state_bytes_of_value(keys)
    return Mixer(
        kind,
        weights,
        state_bytes=held,
        whole=(("linear_num_key_heads", key_heads), ("linear_num_value_heads", value_heads)),
    )


def kimi_delta(_: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return Kimi's delta attention (arXiv 2510.26692)."""
    hidden = keys.whole("hidden_size")
    inner = keys.inner("linear_attn_config")
    table = keys if inner is None else inner
    heads = table.whole("num_heads") if inner else keys.whole("linear_num_heads")
    size = table.whole("head_dim") if inner else keys.whole("linear_head_dim")
    kernel = table.whole("short_conv_kernel_size") if inner else keys.whole("linear_conv_kernel_dim")
    wide = heads * size
    full_gate = inner is not None and inner.flag("use_full_rank_gate")
    gate = (
        linear("self_attn.g_proj", hidden, wide)
        if full_gate
        else linear("self_attn.g_a_proj", hidden, size) + linear("self_attn.g_b_proj", size, wide)
    )
    weights = (
        linear("self_attn.q_proj", hidden, wide)
        + linear("self_attn.k_proj", hidden, wide)
        + linear("self_attn.v_proj", hidden, wide)
        + linear("self_attn.f_a_proj", hidden, size)
        + linear("self_attn.f_b_proj", size, wide)
        + linear("self_attn.b_proj", hidden, heads)
        + gate
        + linear("self_attn.o_proj", wide, hidden)
        + plain("self_attn.conv", 3 * wide * kernel)
        + plain("self_attn.rest", heads + wide + size)
    )
    held = 3 * (kernel - 1) * wide * _VALUE_BYTES + heads * size * size * _STATE_BYTES
    return Mixer(kind, weights, state_bytes=held, whole=(("linear attention heads", heads),))


def lightning(_: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return lightning attention (arXiv 2401.04658), as in MiniMax-01 and M1."""
    hidden, heads, size = keys.whole("hidden_size"), keys.whole("num_attention_heads"), head_size(keys)
    wide = heads * size
    weights = (
        linear("self_attn.qkv_proj", hidden, 3 * wide)
        + linear("self_attn.output_gate", hidden, wide)
        + linear("self_attn.out_proj", wide, hidden)
        + plain("self_attn.norm", wide)
    )
    return Mixer(
        kind, weights, state_bytes=heads * size * size * _VALUE_BYTES, whole=(("num_attention_heads", heads),)
    )


def short_conv(_: Family, keys: ConfigKeys, layer: int, kind: Scope) -> Mixer:
    """Return a gated short convolution, as in LFM2."""
    hidden, kernel, bias = keys.whole("hidden_size"), keys.whole("conv_L_cache"), keys.flag("conv_bias")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        keys.expect(key, (hidden,), hidden)
    weights = (
        linear("conv.in_proj", hidden, 3 * hidden, bias)
        + linear("conv.out_proj", hidden, hidden, bias)
        + plain("conv.conv", hidden * (kernel + bias))
    )
    return Mixer(kind, weights, state_bytes=(kernel - 1) * hidden * _VALUE_BYTES)
