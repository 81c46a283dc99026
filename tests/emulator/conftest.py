"""An emulated engine per test, fast, and checked for leaks when the test is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import msgspec
import pytest
import pytest_asyncio
import uvloop
from helpers import turns_until

from hetlb.balancer.config.profile_file import Profile
from hetlb.tools.emulator import EmulatedEngine

Start: TypeAlias = Callable[..., Awaitable[EmulatedEngine]]

PROFILE = {
    "version": 1,
    "name": "test",
    "model": {"name": "tiny"},
    "engine": {
        "kv_cache_tokens": 8192,
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    },
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
}


def make_profile(**engine: Any) -> Profile:
    """The profile above with other limits."""
    return msgspec.convert({**PROFILE, "engine": {**PROFILE["engine"], **engine}}, Profile)  # type: ignore[dict-item]


async def idle(engine: EmulatedEngine) -> None:
    """Wait until no sequence runs or waits: all were answered, or aborted since their clients left."""
    await turns_until(lambda: not engine.running and not engine.waiting)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of `hetlb engine`, and for tests of connections the standard library's."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return loops | {"asyncio": asyncio.new_event_loop} if item.path.stem == "test_connections" else loops


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Start engines a hundred times as fast as their profile; none may hold anything in the end."""
    async with AsyncExitStack() as stack:
        engines: list[EmulatedEngine] = []

        async def start_engine(profile: Profile | None = None, **more: Any) -> EmulatedEngine:
            engine = EmulatedEngine(profile or make_profile(), **{"time_scale": 0.01, **more})
            engines.append(engine)
            return await stack.enter_async_context(engine)

        yield start_engine
        for engine in engines:
            await idle(engine)
            for model in engine.models:
                model.check_integrity()
                assert model.kv.pool.used_blocks == 0
            assert (engine.running, engine.waiting) == (0, 0)


@pytest_asyncio.fixture
async def engine(start: Start) -> EmulatedEngine:
    """One engine."""
    return await start()
