"""A split request that raises ends alone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import aiohttp
import pytest
from helpers import turns_until
from options.split.split_rig import Rig, rig
from proxy.one_alone import LABEL, Double, doubled, nothing_escapes

from hetlb.balancer.exchange import exchange
from hetlb.options.split.kv_transfers import Split
from hetlb.tools.sim.integrity import check_scheduler

pytestmark = pytest.mark.skipif(
    exchange.__file__.endswith(".so"), reason="methods of compiled classes cannot be replaced"
)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return doubled(monkeypatch, (Split,))


async def split(at: Rig, label: str) -> int:
    asked = {"model": "m", "max_tokens": 6, "prompt": [1] * 500}
    headers = {"x-request-id": label, "connection": "close"}
    async with at.session.post(at.url + "/v1/completions", json=asked, headers=headers) as reply:
        await reply.read()
        return reply.status


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_split_request_that_raises_ends_alone(connector: str, tmp_path: Path, double: Double) -> None:
    async with rig(tmp_path, connector, lease_s=3.0) as at:
        assert await split(at, LABEL) == 200
    methods = sorted(name for owner, name in double.called if owner is Split)
    assert len(methods) >= 4
    for name in methods:
        async with rig(tmp_path, connector, lease_s=3.0) as at:
            double.raising, double.left = (Split, name), 1
            with nothing_escapes(), contextlib.suppress(aiohttp.ClientError):
                assert await split(at, LABEL) in (200, 500), name
            assert not double.left, name
            double.raising = None
            assert await split(at, "served") == 200
            at.service.driver.swept(0.0)
            await turns_until(lambda busy=at.busy: not [each for each in busy() if "verdict" not in each])
            check_scheduler(at.service.scheduler)
