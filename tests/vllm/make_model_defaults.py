"""Prints `hetlb/models/defaults.json`: what transformers' classes take for keys that a file leaves out.

Run in the environment of `tests/vllm/install.sh`; its arguments are model types, its input the keys that are
read. `tests/vllm/test_model_facts.py` holds the file against it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def defaults(model_type: str, keys: set[str]) -> dict[str, Any]:
    """Defaults that say something, by the spelling of the class."""
    try:
        found = CONFIG_MAPPING[model_type]
    except KeyError:
        return {}
    return {
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
    print(json.dumps({each: found for each in asked["types"] if (found := defaults(each, keys))}))


if __name__ == "__main__":
    main()
