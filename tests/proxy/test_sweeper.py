"""The timer of sweeps: it notices each standstill of this process, however short it is behind a sweep."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from hetlb.balancer.exchange.driver_timers import BEAT_S, STALL_S, SWEEP_S, Sweeper


def stand_still() -> None:
    time.sleep(STALL_S + 1.5 * BEAT_S)


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("place", ["between", "in a sweep"])
async def test_each_standstill_beside_open_requests_is_noticed(phase: float, place: str) -> None:
    loop = asyncio.get_running_loop()
    swept: list[float] = []
    stands = place == "in a sweep"

    def sweep(late_s: float) -> None:
        swept.append(late_s)
        if stands and len(swept) == 1:
            stand_still()

    sweeper = Sweeper(loop, sweep, [1])
    begun = loop.time()
    if stands:
        while len(swept) < 2:
            await asyncio.sleep(BEAT_S)
    else:
        while not swept:
            await asyncio.sleep(BEAT_S)
        await asyncio.sleep(phase * SWEEP_S)
        stand_still()
        await asyncio.sleep(0)
    assert sweeper.stalled_since(begun)
    sweeper.close()


async def test_sweeps_come_at_their_time_with_and_without_open_requests() -> None:
    loop = asyncio.get_running_loop()
    for busy in ((), (1,)):
        swept: list[float] = []
        sweeper = Sweeper(loop, lambda late_s, swept=swept: swept.append(loop.time()), busy)  # type: ignore[misc]
        while len(swept) < 3:
            await asyncio.sleep(BEAT_S)
        assert all(later - earlier > 0.9 * SWEEP_S for earlier, later in itertools.pairwise(swept))
        sweeper.close()
