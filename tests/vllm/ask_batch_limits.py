"""Says how large vLLM makes the batches of a GPU where no flag does; run by vLLM's Python.

Reads a list of [name, bytes of memory] as JSON; prints the defaults of an API server of each:
[max_num_batched_tokens, max_num_seqs].
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import vllm.engine.arg_utils as arguments
from vllm.usage.usage_lib import UsageContext


def limits(name: str, memory: int) -> list[Any]:
    """Return the defaults of a GPU."""
    arguments.current_platform = SimpleNamespace(
        get_device_total_memory=lambda: memory,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    return [each[UsageContext.OPENAI_API_SERVER] for each in arguments.EngineArgs.get_batch_defaults(1)]


if __name__ == "__main__":
    print(json.dumps([limits(name, memory) for name, memory in json.load(sys.stdin)]))
