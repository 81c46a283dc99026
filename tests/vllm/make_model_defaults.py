"""Prints `hetlb/tools/models/defaults.json`: what transformers' classes take for keys that a file leaves out.

Run in the environment of `tests/vllm/install.sh`; its input has the model types and the keys that are read.
`tests/vllm/test_model_facts.py` holds the file against it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

#: Classes that are not in transformers, or leave out what their models have.
OWN: dict[str, dict[str, Any]] = {
    # vLLM's own class.
    "chatglm": {
        "num_layers": 28,
        "padded_vocab_size": 65024,
        "hidden_size": 4096,
        "ffn_hidden_size": 13696,
        "kv_channels": 128,
        "num_attention_heads": 32,
        "multi_query_group_num": 1,
    },
    # All published mixtures.
    "gemma4_text": {"top_k_experts": 8},
}
#: Types with the defaults of another class.
ALIKE = {"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3", "mimo_v2": "mimo_v2_flash"}


def defaults(model_type: str, keys: set[str]) -> dict[str, Any]:
    """Defaults that say something, by the spelling of the class."""
    own = OWN.get(model_type, {})
    try:
        found = CONFIG_MAPPING[ALIKE.get(model_type, model_type)]
    except KeyError:
        return own
    return own | {
        field.name: field.default
        for field in dataclasses.fields(found)
        if field.name in keys
        and field.default is not dataclasses.MISSING
        and field.default not in (None, False)
        and isinstance(field.default, int | float | str | bool)
    }


def main() -> None:
    """Read {"types": [..], "keys": [..]} and print the defaults by type."""
    asked = json.load(sys.stdin)
    keys = set(asked["keys"])
    found = {each: defaults(each, keys) for each in sorted(asked["types"])}
    rows = [f" {json.dumps(each)}: {json.dumps(values)}" for each, values in found.items() if values]
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main()
