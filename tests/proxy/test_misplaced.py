"""Requests that were placed by a wrong profile and have no token yet are taken back, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib

from helpers import turns_until
from proxy.test_proxying import Client, Start, post
from proxy.upstreams import DONE, LAST, LAST_TOKEN, SSE_HEAD, TOKEN, USAGE, Upstream, Visit, chunk

REQUESTS = 8
#: An answer of two tokens that ends as it should: an odd one would send its client's next requests elsewhere.
ANSWER = SSE_HEAD + chunk(TOKEN) + chunk(LAST_TOKEN) + chunk(USAGE) + chunk(DONE) + LAST
#: A prompt of two seconds by the profile.
ASK = b'{"model":"m","prompt":"%b","stream":true}' % (b"word " * 16_000)


async def test_requests_without_a_token_go_to_a_server_that_turns_out_faster(
    start: Start,
) -> None:
    """The first server answers at once, so it is faster than its profile: others are taken back to it."""
    begin, end, taken_back = asyncio.Event(), asyncio.Event(), 0

    async def quick(visit: Visit) -> None:
        await begin.wait()
        visit.send(ANSWER)

    async def slow(visit: Visit) -> None:
        nonlocal taken_back
        left, ended = asyncio.ensure_future(visit.until_left()), asyncio.ensure_future(end.wait())
        await asyncio.wait([left, ended], return_when=asyncio.FIRST_COMPLETED)
        taken_back += left.done()
        ended.cancel()
        if not left.done():
            left.cancel()
            visit.send(ANSWER)
        visit.writer.close()

    async with Upstream(quick) as first, Upstream(slow) as second, contextlib.AsyncExitStack() as stack:
        proxy = await start(first.url, second.url, policy="hetlb")
        clients = [await stack.enter_async_context(Client(proxy)) for _ in range(REQUESTS)]
        for client in clients:
            client.send(post(ASK))
        await turns_until(lambda: len(first.visits) + len(second.visits) == REQUESTS)
        at_second = len(second.visits)
        assert at_second
        begin.set()
        await turns_until(lambda: len(proxy.exchanges) + len(proxy.scheduler.instances[1].leases) == REQUESTS)
        end.set()
        answers = [await client.answer() for client in clients]
        assert [each.status for each in answers] == [200] * REQUESTS
        assert any(each.retries and each.lease and each.lease.instance == "i0" for each in proxy.exchanges)
        await turns_until(lambda: taken_back)
        ended = proxy.driver.totals.instances["i1"].requests
        retries = sum(each.retries for each in proxy.exchanges)
        assert (ended.get("upstream_busy"), ended["misplaced"]) == (None, retries)
        assert len(first.visits) + len(second.visits) == REQUESTS + retries
