"""`hetlb model`: the facts of a model's `config.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hetlb.errors import visible
from hetlb.tools.models.kv_groups import KvBytes
from hetlb.tools.models.model_facts import ModelFacts
from hetlb.tools.models.model_file import load_facts

#: Lengths of sequences, in tokens, for the shown sizes of the cache.
_SHOWN_TOKENS = (1_000, 10_000, 100_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG.json", type=Path, help="a model's config.json, or its folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = load_facts(args.config)
    print(json.dumps(facts.json(), indent=2) if args.json else "\n".join(map(visible, _lines(facts))))
    return 0


def _lines(facts: ModelFacts) -> list[str]:
    document = facts.json()
    sparse = facts.active_parameters < facts.parameters
    active = f", {facts.active_parameters:,} of them active" if sparse else ""
    rows = f" (--kv-cache-dtype auto: {facts.kv_cache_dtype})" if facts.kv_cache_dtype else ""
    given = [] if facts.allocated == facts.needed else ["  vLLM gives  " + _cache(facts.allocated) + rows]
    degrees = ", ".join(map(str, document["tensor_parallel_sizes"]))
    return [
        facts.name,
        f"  parameters  {facts.parameters:,}{active}",
        f"  weights     {facts.weight_bytes:,} bytes{_encoders(facts)}",
        "  layers      " + ", ".join(f"{count} {kind}" for kind, count in document["layers"].items()),
        "  cache       " + _cache(facts.needed),
        "              "
        + ", ".join(
            f"{facts.kv_bytes(tokens) / 1e6:,.4g} MB at {tokens:,} tokens" for tokens in _SHOWN_TOKENS
        ),
        *given,
        f"  degrees     tensor parallel {degrees}" + _experts(facts),
    ]


def _encoders(facts: ModelFacts) -> str:
    counted = facts.encoder_parameters
    words = f", {counted:,} parameters of encoders in them" if counted else ""
    unknown = ", ".join(facts.uncounted)
    return words + (f"; sizes of {unknown} are not known" if unknown else "")


def _experts(facts: ModelFacts) -> str:
    if not facts.expert_parallel:
        return ""
    more = ", ".join(map(str, facts.whole_experts_sizes))
    return "; expert parallel" + (f" (with whole experts also {more})" if more else "")


def _cache(of: KvBytes) -> str:
    windows = [f"{size:,g} bytes for each of the last {tokens:,} tokens" for tokens, size in of.windows]
    state = [f"{of.state:,g} bytes of state"] if of.state else []
    return "; ".join([f"{of.per_token:,g} bytes a token", *windows, *state])
