"""Let vLLM group the layers of models by its own code; print the bytes that it gives a sequence.

Reads a list of models as JSON, each a list of [scope, window tokens, bytes], a layer's part of the cache
each: bytes of a token, of a state at once. Prints {"per_token", "windows": {tokens: bytes}, "state"} of each.
"""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

LAYOUT = SimpleNamespace(is_block_outermost=False)


class Backend:
    """An attention backend that changes nothing."""

    @staticmethod
    def customize_spec(spec: KVCacheSpec) -> KVCacheSpec:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]


def configured(parts: list[list[Any]]) -> Any:
    """Return what vLLM's functions read of its configuration, with blocks as it aligns them for states."""
    attention = [part for part in parts if part[0] != "state"]
    states = [part[2] for part in parts if part[0] == "state"]
    latent = any(part[0] == "latent" for part in attention)
    cache = SimpleNamespace(
        cache_dtype="auto",
        block_size=16,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
        kv_cache_dtype_skip_layers=None,
        get_resolved_kv_cache_layout=lambda: LAYOUT,
    )
    model = SimpleNamespace(dtype=torch.int8, use_mla=latent, architecture="", get_num_kv_heads=lambda _: 1)
    config = SimpleNamespace(
        cache_config=cache,
        model_config=model,
        parallel_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    if states and attention:
        size = round(attention[0][2])
        model.get_head_size = lambda: size if latent else size // 2
        shaped = mock.Mock(spec=["get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config"])
        shaped.get_mamba_state_shape_from_config.return_value = ((max(states),),)
        shaped.get_mamba_state_dtype_from_config.return_value = (torch.int8,)
        with (
            mock.patch(
                "vllm.model_executor.models.ModelRegistry.resolve_model_cls", return_value=(shaped, "")
            ),
            mock.patch("vllm.config.vllm.set_current_vllm_config", return_value=contextlib.nullcontext()),
            mock.patch.object(Platform, "_find_non_ssm_backends", return_value=[Backend]),
        ):
            Platform._align_hybrid_block_size(config, Backend)
    return config


def spec_of(config: Any, scope: str, tokens: int, size: float) -> KVCacheSpec:
    """Return a layer's cache as vLLM describes it, with values of one byte."""
    cache, whole = config.cache_config, round(size)
    if scope == "state":
        return MambaSpec(cache.block_size, ((whole,),), (torch.int8,), cache.mamba_page_size_padded)
    sizes = {"block_size": cache.block_size, "num_kv_heads": 1, "dtype": torch.int8}
    if scope == "latent":
        return MLAAttentionSpec(**sizes, head_size=whole)
    sizes |= {"head_size": whole // 2, "head_size_v": whole - whole // 2}
    if scope == "window":
        return SlidingWindowSpec(**sizes, sliding_window=tokens)
    if scope == "chunk":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=tokens)
    return FullAttentionSpec(**sizes)


def given(parts: list[list[Any]]) -> dict[str, Any]:
    """Return the bytes that vLLM gives a sequence."""
    config = configured(parts)
    specs = {f"layer.{number}": spec_of(config, *part) for number, part in enumerate(parts)}
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    block_bytes = kv_cache_utils._get_kv_cache_bytes_per_block(groups, LAYOUT)
    found: dict[str, Any] = {"per_token": 0.0, "windows": {}, "state": 0.0}
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if isinstance(spec, MambaSpec):
            found["state"] += block_bytes
        elif window:
            found["windows"][window] = found["windows"].get(window, 0.0) + block_bytes / spec.block_size
        else:
            found["per_token"] += block_bytes / spec.block_size
    return found


print(json.dumps([given(each) for each in json.load(sys.stdin)]))
