"""Metrics pages of engines besides vLLM, and what of them is read.

The page of llama.cpp (MIT) was recorded of its server, commit 0c1e570, with 4 slots and 6 requests. Others
are made from the names in the documentation of their engines: SGLang (docs.sglang.io, Production Metrics;
Apache-2.0), TensorRT-LLM (trtllm-serve; Apache-2.0), TGI (huggingface.co/docs, Metrics; Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetlb.balancer.engines.engine_metrics import page_of, parse
from hetlb.balancer.engines.engine_tables import TABLES

ROOT = Path(__file__).parents[2]
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 162.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 28.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 450000.0
sglang:num_used_tokens{model_name="m",tp_rank="0"} 123859.0
process_start_time_seconds 1.7e+09
"""
LLAMA_CPP = (Path(__file__).parent / "llama_cpp_metrics.txt").read_text()
TENSORRT_LLM = """\
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.25
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 2.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 0.0
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
tgi_queue_size 7
"""


@pytest.mark.parametrize(
    ("page", "name", "figures"),
    [
        (SGLANG, "sglang", (162, 28, 0.28, 450_000)),
        (LLAMA_CPP, "llama.cpp", (4, 2, None, None)),
        (TENSORRT_LLM, "tensorrt-llm", (2, 0, 0.25, None)),
        (TGI, "tgi", (4, 7, None, None)),
    ],
)
def test_what_an_engine_tells_is_read(
    page: str, name: str, figures: tuple[int, int, float | None, int | None]
) -> None:
    sample = parse(page)
    assert sample.engine == name
    assert (sample.running, sample.waiting, sample.kv_usage, sample.capacity.kv_cache_tokens) == figures
    assert (sample.missing, sample.invalid) == ((), ())
    assert sample.began == (1.7e9 if name == "sglang" else None)


def test_what_is_absurd_or_absent_is_said() -> None:
    sample = parse(SGLANG.replace(" 0.28", " 28.0").replace("sglang:num_queue_reqs", "sglang:other"))
    assert (sample.waiting, sample.kv_usage) == (None, None)
    assert (sample.missing, sample.invalid) == (("sglang:num_queue_reqs",), ("sglang:token_usage",))


def test_an_engine_is_known_by_its_page_alone() -> None:
    own = TABLES[:-1]
    assert [page_of(f"# HELP x\n{each.prefix}x 1\n").table for each in own] == list(own)
    assert page_of("<html>\n").table is None
    assert page_of('[{"numActiveRequests": 2}]\n').table is None


def as_table() -> str:
    """Return the table of docs/engines.md."""
    rows = [
        f"| {each.title} | {_names(each.running)} | {_names(each.waiting)} | {_names(each.kv_usage)} "
        f"| {'; '.join(each.lacks) or '-'} |"
        for each in TABLES
    ]
    return "\n".join(["| engine | running | waiting | KV use | lacks |", "|---|---|---|---|---|", *rows])


def _names(names: tuple[str, ...]) -> str:
    return f"`{names[0]}`" if names else "-"


def test_the_docs_show_the_tables() -> None:
    assert as_table() in (ROOT / "docs" / "engines.md").read_text()
