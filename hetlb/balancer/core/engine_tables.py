"""Engines that hetlb knows by their metrics page: what each calls its figures, and what each lacks.

Names are those of the engines' own documentation as of 2026: vLLM, SGLang, llama.cpp's server, TensorRT-LLM
(`trtllm-serve`), Text Generation Inference, LMDeploy, Triton. What is not on a page is booked by hetlb alone.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

#: Path of the page of an engine whose `/metrics` is a list of iterations as JSON: TensorRT-LLM.
OTHER_PAGE: Final = "/prometheus/metrics"


@dataclass(frozen=True, slots=True)
class EngineTable:
    """Names of one engine's figures, the present one first; () for what it does not tell.

    `prefix` begins the names of all its metrics; `lacks` says what follows from what it does not tell. A name
    may be followed by the one label that its series must have: `name{kind="max"}`. `all_requests` are those
    that run and those that wait; `kv_tokens` are tokens, or blocks of `block_tokens` each. `engine_label`
    tells the data-parallel engines of a server apart; `tokens` are counters of what it computes, which are
    summed.
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
    engine_label: str = "engine"
    all_requests: tuple[str, ...] = ()
    block_tokens: tuple[str, ...] = ()

    @property
    def tells_usage(self) -> bool:
        """True if each version tells how full its KV cache is."""
        return bool(self.kv_usage) and _NO_KV not in self.lacks

    @property
    def figures(self) -> tuple[str, ...]:
        """Names that are read."""
        return (
            *self.running, *self.waiting, *self.kv_usage, *self.kv_tokens, *self.all_requests,
            *self.block_tokens, *self.tokens,
        )  # fmt: skip


_SLOTS: Final = "no slots: state max_num_seqs"
_NO_KV: Final = "no KV use"
_NO_SIZE: Final = "no KV size: state kv_cache_tokens in a profile"
_NO_IDS: Final = "no token ids in streams"

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
    engine_label="dp_rank",
)
LLAMA_CPP: Final = EngineTable(
    "llama.cpp",
    "llama.cpp",
    "llamacpp:",
    ("llamacpp:requests_processing",),
    ("llamacpp:requests_deferred",),
    # Gone since the middle of 2025.
    ("llamacpp:kv_cache_usage_ratio",),
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
LMDEPLOY: Final = EngineTable(
    "lmdeploy",
    "LMDeploy",
    "lmdeploy:",
    ("lmdeploy:num_requests_running",),
    ("lmdeploy:num_requests_waiting",),
    ("lmdeploy:gpu_cache_usage_perc", "lmdeploy:kv_cache_usage_perc"),
    lacks=("figures only with --enable-metrics", _SLOTS, _NO_SIZE, _NO_IDS),
)
_TRITON_REQUESTS: Final = "nv_trt_llm_request_metrics"
_TRITON_BLOCKS: Final = "nv_trt_llm_kv_cache_block_metrics"
#: Triton with the backend of TensorRT-LLM; with that of vLLM its page has the names of vLLM.
TRITON: Final = EngineTable(
    "triton",
    "Triton",
    "nv_",
    (f'{_TRITON_REQUESTS}{{request_type="scheduled"}}', f'{_TRITON_REQUESTS}{{request_type="active"}}'),
    (f'{_TRITON_REQUESTS}{{request_type="waiting"}}',),
    (f'{_TRITON_BLOCKS}{{kv_cache_block_type="fraction"}}',),
    (f'{_TRITON_BLOCKS}{{kv_cache_block_type="max"}}',),
    lacks=(_SLOTS, _NO_IDS),
    all_requests=(f'{_TRITON_REQUESTS}{{request_type="active"}}',),
    block_tokens=(f'{_TRITON_BLOCKS}{{kv_cache_block_type="tokens_per"}}',),
)
TABLES: Final = (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, TGI, LMDEPLOY, TRITON)


def table_by(prefixes: Container[str]) -> EngineTable | None:
    """Return the table of the engine whose names begin with one of these, None where none is known."""
    return next((each for each in TABLES if each.prefix in prefixes), None)
