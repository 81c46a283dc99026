"""Sends to a server that fails in one way each time: as many as clients ask for, and a few beside them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving
from proxy.test_proxying import Start, ask, post
from proxy.upstreams import Script, Upstream, Visit, plain

from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.resend_budget import Resends
from hetlb.balancer.core.types import Hold

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e1", "remote_block_ids": [1]}


async def closes(visit: Visit) -> None:
    visit.writer.close()


async def resets(visit: Visit) -> None:
    visit.reset()


async def after_its_head(visit: Visit) -> None:
    visit.send(plain(b"x" * 50)[:-50])
    await visit.writer.drain()
    visit.writer.close()


WAYS: dict[str, Script | bytes] = {
    "closes": closes,
    "resets": resets,
    "its head alone": after_its_head,
    "500": plain(b"{}", b"500 X"),
    "503": plain(b"{}", b"503 X"),
    "429": plain(b"{}", b"429 X"),
    "404": plain(b"{}", b"404 X"),
    "no HTTP": b"nonsense\r\n\r\n",
    "no JSON": plain(b"<html>"),
}


# A policy sees the end of a request, not the bytes of its answer: each way under two, two ways under each.
@pytest.mark.parametrize(
    ("policy", "way"),
    [
        (policy, way)
        for policy in POLICIES
        for way in WAYS
        if policy in ("hetlb", "rr") or way in ("500", "404")
    ],
)
async def test_beside_one_that_answers_it_gets_a_few(start: Start, policy: str, way: str) -> None:
    requests = 30
    async with Upstream(WAYS[way]) as bad, Upstream() as good:
        proxy = await start(bad.url, good.url, policy=policy)
        for _ in range(requests):
            await ask(proxy, post())
        await proxy.settled()
        # A request that it refuses as such is a refusal until two others have answered the like.
        assert len(bad.visits) <= 8


class Failing(Engine):
    """An engine that is healthy and fails each request."""

    def __init__(self, way: Script | bytes) -> None:
        super().__init__()
        self._way = way

    async def _route(self, visit: Visit) -> None:
        if not visit.head.startswith(b"POST"):
            await super()._route(visit)
            return
        self.asked.append(visit)
        if isinstance(self._way, bytes):
            visit.send(self._way)
        else:
            await self._way(visit)


@pytest.mark.parametrize("way", WAYS)
async def test_alone_it_gets_each_request_once(tmp_path: Path, way: str) -> None:
    async with Failing(WAYS[way]) as bad, serving(tmp_path, document(bad)) as running:
        for _ in range(12):
            assert (await running.ask()).status >= (200 if way == "no JSON" else 400)
        assert len(bad.asked) <= 12


class Prefilling(Engine):
    """A prefill engine; it also answers whole requests."""

    async def _route(self, visit: Visit) -> None:
        if b'"do_remote_decode":true' in visit.body:
            body = {"choices": [{"index": 0, "text": "?"}], "kv_transfer_params": PARAMS}
            visit.send(plain(msgspec.json.encode(body)))
        else:
            await super()._route(visit)


class ClosesWithBlocks(Engine):
    """A decode engine that closes each request with transferred blocks, so each release too."""

    def __init__(self) -> None:
        super().__init__()
        self.with_blocks = 0

    async def _route(self, visit: Visit) -> None:
        if b"kv_transfer_params" in visit.body:
            self.with_blocks += 1
            visit.writer.close()
        else:
            await super()._route(visit)


@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests"])
async def test_a_decode_engine_that_closes_each_release_gets_a_few(tmp_path: Path, policy: str) -> None:
    async with Prefilling() as first, ClosesWithBlocks() as second:
        fleet = document(first, second, policy={"name": policy})
        fleet["models"][0]["kv_transfer"] = {"connector": "nixl", "lease_s": 60}
        for role, instance in zip(("prefill", "decode"), fleet["models"][0]["instances"], strict=True):
            instance["role"] = role
        async with serving(tmp_path, fleet) as running:
            replies = await asyncio.gather(*[running.ask() for _ in range(40)])
            assert {each.status for each in replies} == {200}
            splits = running.service.driver.splits
            assert splits is not None
            release = splits.release  # type: ignore[attr-defined]
            before = second.with_blocks
            now = running.service.now()
            for number in range(50):
                release(Hold(-1 - number, "i0", "i1", 10, 10, 1.0, now + 60.0), "m", b'{"a":1}')
            while splits._releases:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            assert second.with_blocks - before <= 5


@given(st.lists(st.floats(0.0, 1.0), max_size=400))
def test_pauses_grow_until_an_answer(steps: list[float]) -> None:
    budget, now, sent = Resends(), 0.0, []
    for step in steps:
        now += step
        if budget.take(now):
            assert budget.wait_s(now) >= 0.0
            sent.append(now)
        else:
            assert budget.wait_s(now) > 0.0
    pauses = [later - earlier for earlier, later in pairwise(sent[3:])]
    assert all(pause >= min(30.0, 0.25 * 2**number) - 1e-9 for number, pause in enumerate(pauses))
    budget.answered()
    assert [budget.take(now) for _ in range(5)] == [True, True, True, True, False]
