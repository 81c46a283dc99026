"""The clock of an emulated engine: iterations begin and end in real time."""

from __future__ import annotations

import asyncio
import time

from helpers import FAST, HANG_S

from hetlb.tools.emulator.real_time import EmulatedSequence, RealTimeEngine
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel


async def test_an_engine_that_waits_for_kv_goes_on_at_the_next_arrival() -> None:
    """An iteration ends late, what waits has no room until a KV cache has come, another came meanwhile."""
    model = EngineModel(FAST.scaled(0.01), EngineLimits(kv_cache_tokens=128, block_size=16))
    runner = RealTimeEngine(model)
    fetches: list[EmulatedSequence] = []
    runner.on_fetch = fetches.append
    waits = EmulatedSequence(64, 1)
    waits.remote_tokens = 64
    runner.submit((waits, EmulatedSequence(16, 1), EmulatedSequence(96, 1)))
    assert fetches == [waits]
    ended = time.monotonic() + 0.1  # the iteration takes a millisecond
    while time.monotonic() < ended:
        pass
    runner.submit((EmulatedSequence(16, 1),))
    while runner.finished["stop"] < 1:
        await asyncio.sleep(0)
    runner.complete_fetch(waits, loaded=True)
    async with asyncio.timeout(HANG_S):
        while runner.running or runner.waiting:
            await asyncio.sleep(0)
    assert runner.finished["stop"] == 4
    runner.close()
