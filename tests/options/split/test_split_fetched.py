"""Transfers counted as `done` or not from the decode engine's counters; pairs that fail are left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers import turns_until
from options.split.split_rig import WHOLE, Rig, rig

from hetlb.options.split.transfers import MAX_MISSED_TRANSFERS, MAX_UNJUDGED_TRANSFERS


async def checked(fleet: Rig, name: str) -> None:
    """Wait until the counters of a decode engine were read once."""
    scheduler = fleet.service.scheduler
    checks = scheduler.placement.splits.transfers.checks
    await turns_until(lambda: checks.checks(scheduler.fleet.instances[name]))


async def test_done_means_fetched(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        await checked(fleet, "e1")
        for stream in (False, True, False, True):
            assert (await fleet.ask(stream=stream))[:2] == (200, WHOLE)
        await fleet.idle()
        assert fleet.handovers == {"done": 4}
        kv = fleet.engines["e1"].kv
        assert kv is not None
        assert kv.fetched_tokens == 2000


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_pair_that_fetches_nothing_is_left_alone(tmp_path: Path, policy: str) -> None:
    """Numbers of layers that differ: every fetch fails, and the answers are right."""
    async with rig(tmp_path, layers=(16, 32), policy=policy) as fleet:
        await checked(fleet, "e1")
        for _ in range(20):
            assert (await fleet.ask())[:2] == (200, WHOLE)
        await fleet.idle()
        results = fleet.handovers
        assert "done" not in results
        # One may be on its way at a verdict.
        assert MAX_MISSED_TRANSFERS <= sum(results.values()) <= MAX_UNJUDGED_TRANSFERS + 1
        assert (await fleet.ask())[3] is None
        assert fleet.handovers == results
        admin = f"http://127.0.0.1:{fleet.service.admin.address[1]}"
        async with fleet.session.get(admin + "/v1/status") as reply:
            document = await reply.json()
        assert document["state"] == "degraded"
        assert "read at e0 do not reach e1" in document["advice"]


async def test_the_other_pair_goes_on(tmp_path: Path) -> None:
    """Two engines read prompts for one; the transfers of one of them fail."""
    async with rig(
        tmp_path, layers=(32, 16, 32), roles=("prefill", "prefill", "decode"), policy="recompute"
    ) as fleet:
        await checked(fleet, "e2")
        answers = await asyncio.gather(*(fleet.ask(prompt=[1] * (300 + 7 * n)) for n in range(24)))
        assert all(each[:2] == (200, WHOLE) for each in answers)
        await fleet.idle()
        after = [(await fleet.ask(prompt=[2] * (300 + 7 * n)))[3] for n in range(24)]
        await fleet.idle()
        assert [each[3] for each in answers].count("e1") + after.count("e1") <= MAX_UNJUDGED_TRANSFERS
        last = [(await fleet.ask(prompt=[3] * (300 + 7 * n)))[3] for n in range(24)]
        await fleet.idle()
        assert "e1" not in last
        assert last.count("e0") >= 12
        checks = fleet.service.scheduler.placement.splits.transfers.checks
        resting = [each.names for each in checks.resting(fleet.service.driver.now())]
        assert resting == [("e1", "e2")]
