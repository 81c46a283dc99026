"""Engines that hetlb knows by their metrics page: the names of their figures, and the figures they lack.

Names come from the engines' own documentation as of 2026: vLLM, SGLang, llama.cpp's server, TensorRT-LLM
(`trtllm-serve`), Text Generation Inference, LMDeploy, Triton, and engines that keep vLLM's names behind
another prefix or none (Aphrodite, FastDeploy, NIM). Figures that a page lacks are hetlb's bookings alone.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

#: Paths of the page: of most; of TensorRT-LLM, whose `/metrics` is a list of iterations as JSON; of NIM.
PAGES: Final = ("/metrics", "/prometheus/metrics", "/v1/metrics")


@dataclass(frozen=True, slots=True)
class EngineTable:
    """Names of one engine's figures, the present one first; () for figures that it lacks.

    `prefix` begins the names of all its metrics; `lacks` has the consequences of missing figures. A name
    may be followed by the one label that its series must have: `name{kind="max"}`. `all_requests` count
    running and waiting ones; `kv_tokens` are tokens, or blocks of `block_tokens` each. `engine_label`
    tells the data-parallel engines of a server apart; `tokens` count what it computes, answers first, and are
    summed. `tells_config` is True with vLLM's series of the configuration.
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
    tells_config: bool = False

    @property
    def tells_usage(self) -> bool:
        """True if each version tells how full its KV cache is."""
        return bool(self.kv_usage) and _NO_KV not in self.lacks

    @property
    def figures(self) -> tuple[str, ...]:
        """Names to read."""
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
    # The second name is its parts, by reason.
    ("vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"),
    # The second name comes from vLLM before 0.10 (V0); a router that reads only dead names balances blindly.
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    tokens=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    tells_config=True,
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
#: Triton with the backend of TensorRT-LLM; with the backend of vLLM its page has the names of vLLM.
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
#: Engines that keep vLLM's names. A feature that one of them lacks counts as lacking for all.
LIKE_VLLM: Final = replace(
    VLLM, name="like-vllm", title="with vLLM's names (Aphrodite, NIM, ...)", prefix="*:", lacks=(_NO_IDS,)
)
TABLES: Final = (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, TGI, LMDEPLOY, TRITON, LIKE_VLLM)

#: Prefixes as they begin a name: Ray puts its own before them, exporters turn the colon into a line.
_PREFIX: Final = re.compile(
    r"(?:ray_)?+(?:(" + "|".join(each.prefix[:-1] for each in TABLES[:-1]) + "))[:_](.*+)"
)
_PREFIXES: Final = {each.prefix[:-1]: each.prefix for each in TABLES}
#: Names of vLLM that others keep: alone or behind a prefix, which ends within the start of a line.
_KEPT: Final = re.compile(r"(?:[a-zA-Z0-9_]{1,31}+:)?+([a-z_]++)")
_FIGURES: Final = frozenset(each.removeprefix(VLLM.prefix) for each in VLLM.figures) | {"cache_config_info"}


def spelled(name: str) -> tuple[str, str]:
    """Return the prefix of its table, "" if there is none, and a page's name as the tables spell it."""
    found = _PREFIX.fullmatch(name)
    if found is not None:
        prefix = _PREFIXES[found.group(1)]
        return prefix, prefix + found.group(2)
    kept = _KEPT.fullmatch(name)
    if kept is not None and kept.group(1) in _FIGURES:
        return LIKE_VLLM.prefix, VLLM.prefix + kept.group(1)
    return "", name


def table_by(prefixes: Container[str]) -> EngineTable | None:
    """Return the table of the engine with names that begin with one of these, None if none is known."""
    return next((each for each in TABLES if each.prefix in prefixes), None)
