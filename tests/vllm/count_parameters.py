"""Counts parameters of the default models of transformers, on the meta device; run in its environment.

Reads a list of model types from stdin; its last line is {type: [config, parameters]}. Types whose default
configuration makes no model are left out.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Defaults that make no model, or one of one kind of layer.
CHANGES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 1024, "n_layer": 6, "n_head": 16},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    "deepseek_v4": {"num_hidden_layers": 8},
    "dots1": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {"num_hidden_layers": 4, "mamba_d_ssm": 8192},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4},
    "gemma4_text": {"num_hidden_layers": 6},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "minimax": {"num_hidden_layers": 6},
}


def main() -> None:
    """Count every type that was asked for."""
    transformers.logging.set_verbosity_error()
    counted = {}
    for model_type in json.load(sys.stdin):
        try:
            config = CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {}))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            print(model_type, repr(error)[:100], file=sys.stderr)
            continue
        document = json.loads(config.to_json_string(use_diff=True)) | {
            "architectures": [type(model).__name__]
        }
        counted[model_type] = [document, sum(each.numel() for each in model.parameters())]
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
