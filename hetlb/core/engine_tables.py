"""Engines that hetlb knows by their metrics page: what each calls its figures, and what each lacks.

Names are those of the engines' own documentation as of 2026: vLLM, SGLang, llama.cpp's server, TensorRT-LLM
(`trtllm-serve`), Text Generation Inference. What is not on a page is booked by hetlb alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Path of the page of an engine whose `/metrics` is a list of iterations as JSON: TensorRT-LLM.
OTHER_PAGE: Final = "/prometheus/metrics"


@dataclass(frozen=True, slots=True)
class EngineTable:
    """Names of one engine's figures, the present one first; () for what it does not tell.

    `prefix` begins the names of all its metrics; `tokens` are counters of what it computes, which are
    summed; `lacks` says what follows from what it does not tell.
    """

    name: str
    title: str
    prefix: str
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...] = ()
    kv_tokens: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


_SLOTS: Final = "no slots: state max_num_seqs of its instance"
_NO_KV: Final = "no KV use: its KV cache is booked by hetlb's ledger alone"
_NO_SIZE: Final = "no size of its KV cache: state kv_cache_tokens of its instance"
_NO_IDS: Final = "no token ids in streams: answers go on elsewhere by text alone"

VLLM: Final = EngineTable(
    "vllm",
    "vLLM",
    "vllm:",
    ("vllm:num_requests_running",),
    ("vllm:num_requests_waiting",),
    # The second name is that of vLLM before 0.10 (V0); a router that reads only dead names balances blindly.
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    tokens=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
)
SGLANG: Final = EngineTable(
    "sglang",
    "SGLang",
    "sglang:",
    ("sglang:num_running_reqs",),
    ("sglang:num_queue_reqs",),
    ("sglang:token_usage",),
    ("sglang:max_total_num_tokens",),
    ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    ("figures only with --enable-metrics", _SLOTS, _NO_IDS),
)
LLAMA_CPP: Final = EngineTable(
    "llama.cpp",
    "llama.cpp",
    "llamacpp:",
    ("llamacpp:requests_processing",),
    ("llamacpp:requests_deferred",),
    tokens=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
    lacks=("figures only with --metrics", f"{_SLOTS} (its --parallel)", _NO_KV, _NO_SIZE, _NO_IDS),
)
TENSORRT_LLM: Final = EngineTable(
    "tensorrt-llm",
    "TensorRT-LLM",
    "trtllm_",
    ("trtllm_num_requests_running",),
    ("trtllm_num_requests_waiting",),
    ("trtllm_kv_cache_utilization",),
    lacks=("figures only with return_perf_metrics and iteration statistics", _SLOTS, _NO_SIZE, _NO_IDS),
)
TGI: Final = EngineTable(
    "tgi",
    "Text Generation Inference",
    "tgi_",
    ("tgi_batch_current_size",),
    ("tgi_queue_size",),
    lacks=(_SLOTS, _NO_KV, _NO_SIZE, _NO_IDS),
)
TABLES: Final = (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, TGI)


def table_of(page: str) -> EngineTable | None:
    """The table of the engine whose metrics page this is, None where no engine is known by it."""
    text = "\n" + page
    return next((each for each in TABLES if f"\n{each.prefix}" in text), None)


def as_table() -> str:
    """The table of docs/engines.md."""
    rows = [
        f"| {each.title} | {_names(each.running)} | {_names(each.waiting)} | {_names(each.kv_usage)} "
        f"| {'; '.join(each.lacks) or '-'} |"
        for each in TABLES
    ]
    return "\n".join(["| engine | running | waiting | KV use | lacks |", "|---|---|---|---|---|", *rows])


def _names(names: tuple[str, ...]) -> str:
    return f"`{names[0]}`" if names else "-"
