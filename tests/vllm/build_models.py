"""Build models by vLLM's own classes, without memory for their weights; print parameters and caches.

Reads a table of `config.json` tables by name, each of one language model, as JSON. Prints for each
{"parameters", "per_token", "windows": {tokens: bytes}, "state"}, or {"error"} where vLLM builds none.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import MambaSpec


def built(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what vLLM makes of a model in bfloat16."""
    (folder / "config.json").write_text(json.dumps(config))
    limits: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
    arguments = EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, **limits
    )
    made = arguments.create_engine_config()
    with set_current_vllm_config(made):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(made)
        found: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
        found |= {"per_token": 0.0, "windows": {}, "state": 0}
        for layer in get_layers_from_vllm_config(made, AttentionLayerBase).values():
            spec = layer.get_kv_cache_spec(made)
            if spec is None:
                continue
            if isinstance(spec, MambaSpec):
                shaped = zip(spec.shapes, spec.dtypes, strict=True)
                found["state"] += sum(math.prod(shape) * dtype.itemsize for shape, dtype in shaped)
                continue
            size = spec.unpadded_page_size_bytes / spec.block_size
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            if window:
                found["windows"][window] = found["windows"].get(window, 0.0) + size
            else:
                found["per_token"] += size
    return found


def main() -> None:
    # One with experts first: its groups of GPUs serve for all.
    asked = sorted(json.load(sys.stdin).items(), key=lambda each: "expert" not in json.dumps(each[1]))
    for name, config in asked:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = built(config, Path(folder))
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **found}), flush=True)


main()
