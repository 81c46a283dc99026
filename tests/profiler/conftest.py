"""Engines to profile: emulated ones, fifty times as fast as their profile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import msgspec
import pytest_asyncio

from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.emulator import EmulatedEngine

Start: TypeAlias = Callable[..., Awaitable[EmulatedEngine]]

PROFILE = {
    "version": 1,
    "name": "test",
    "model": {"name": "tiny"},
    "engine": {
        "kv_cache_tokens": 65536,
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 2048,
    },
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
}


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Start engines with the profile above and other limits."""
    async with AsyncExitStack() as stack:

        async def start_engine(
            data_parallel_size: int = 1, time_scale: float = 0.02, prefix_caching: bool = False, **engine: Any
        ) -> EmulatedEngine:
            limits = {**PROFILE["engine"], **engine}  # type: ignore[dict-item]
            profile = msgspec.convert({**PROFILE, "engine": limits}, Profile)
            return await stack.enter_async_context(
                EmulatedEngine(
                    profile,
                    time_scale=time_scale,
                    prefix_caching=prefix_caching,
                    data_parallel_size=data_parallel_size,
                )
            )

        yield start_engine
