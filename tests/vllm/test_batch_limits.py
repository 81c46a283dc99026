"""Limits of a batch without flags, by GPU, held against the installed vLLM's."""

from __future__ import annotations

import json

import pytest
from forks import answered

from hetlb.balancer.config.engine_defaults import batch_limits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

_GIB = 1 << 30
#: GPUs as CUDA names them, and GiB as it counts them.
GPUS = (
    ("NVIDIA H100 80GB HBM3", 79), ("NVIDIA H200", 139), ("NVIDIA H20", 95), ("NVIDIA B200", 178),
    ("NVIDIA B300 SXM6 AC", 268), ("NVIDIA GB200", 184), ("NVIDIA A100-SXM4-80GB", 79),
    ("NVIDIA A100-SXM4-40GB", 39), ("NVIDIA L40S", 44), ("NVIDIA GeForce RTX 4090", 23),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94), ("AMD Instinct MI300X", 191),
    ("AMD Instinct MI355X", 287), ("Tesla V100-SXM2-32GB", 31),
)  # fmt: skip


def test_limits_equal_vllms() -> None:
    asked = json.dumps([(name, size * _GIB) for name, size in GPUS])
    said = answered("ask_batch_limits.py", question=asked).splitlines()[-1]
    theirs = dict(zip(GPUS, map(tuple, json.loads(said)), strict=True))
    assert {gpu: batch_limits(gpu[0], gpu[1] * _GIB) for gpu in GPUS} == theirs
    # By the name alone, too, where it tells the memory.
    named = [gpu for gpu in GPUS if "40GB" not in gpu[0]]
    assert {gpu: batch_limits(gpu[0], None) for gpu in named} == {gpu: theirs[gpu] for gpu in named}
