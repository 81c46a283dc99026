"""Engines that have no room and say so, and who goes first where there is none."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import turns_until
from proxy.test_proxying import Client, Start, ask, post
from proxy.upstreams import STREAM, Upstream, plain

from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import AdminState, Health

AGAIN = b"retry-after: 3\r\n"
NO_ROOM = b'{"error":{"message":"no room"}}'


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable"])
@pytest.mark.parametrize("reply", [plain(), STREAM])
async def test_another_instance_takes_what_a_busy_one_turns_away(
    start: Start, status: bytes, reply: bytes
) -> None:
    async with Upstream(plain(NO_ROOM, status, AGAIN)) as busy, Upstream(reply) as free:
        proxy = await start(busy.url, free.url, policy="single")
        answer = await ask(proxy, post())
        assert answer.status == 200
        assert answer.headers["x-hetlb-instance"] == "i1"
        assert (len(busy.visits), len(free.visits)) == (1, 1)
        await proxy.settled()
    [exchange] = proxy.exchanges
    assert (exchange.outcome, exchange.retries) == ("ok", 1)
    assert all(each.evidence.health.state is Health.UP for each in proxy.scheduler.instances)
    assert proxy.driver.totals.instances["i0"].requests == {"upstream_busy": 1}


async def test_where_no_other_has_room_the_engines_own_answer_is_passed_on(start: Start) -> None:
    both = plain(NO_ROOM, b"429 Too Many Requests", AGAIN)
    async with Upstream(both) as one, Upstream(both) as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post())
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, NO_ROOM, "3")
        assert (len(one.visits), len(two.visits)) == (1, 1)
        await proxy.settled()
    assert proxy.ended == [("upstream_busy", "answer", 429)]


@pytest.mark.parametrize("again", [b"", b"retry-after: soon\r\n", b"retry-after: -1\r\n"])
async def test_without_a_time_another_instance_is_asked_all_the_same(start: Start, again: bytes) -> None:
    async with Upstream(plain(NO_ROOM, b"503 Y", again)) as one, Upstream() as two:
        proxy = await start(one.url, two.url, policy="single")
        assert (await ask(proxy, post())).status == 200
        assert (len(one.visits), len(two.visits)) == (1, 1)
        await proxy.settled()


async def order_of(start: Start, bodies: list[bytes], headers: list[str], **table: Any) -> list[int]:
    """In which order requests that wait together are sent, one at a time."""
    async with Upstream() as engine:
        proxy = await start(engine.url, limits=QueueLimits(), **table)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        clients = [Client(proxy) for _ in bodies]
        for number, (client, body, header) in enumerate(zip(clients, bodies, headers, strict=True)):
            await client.__aenter__()
            client.send(post(body, header, f"x-request-id: {number}"))
            await turns_until(lambda number=number: len(proxy.scheduler.queue) == number + 1)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.READY))
        for client in clients:
            assert (await client.answer()).status == 200
            await client.__aexit__(None, None, None)
        await proxy.settled()
        return [exchange.request.id for exchange in sorted(proxy.exchanges, key=lambda e: e.lease.id)]


def completion(priority: str) -> bytes:
    return b'{"model":"m","prompt":"x","max_tokens":4%b}' % (
        f',"priority":{priority}'.encode() if priority else b""
    )


async def test_of_waiting_requests_the_lower_priority_value_goes_first(start: Start) -> None:
    bodies = [completion(value) for value in ("", "5", "-1", "0", "5")]
    ids = await order_of(start, bodies, ["x-a: b"] * 5)
    assert [each - min(ids) for each in ids] == [2, 0, 3, 1, 4]


@pytest.mark.parametrize("priority", ["-1", '"-5"', "-1000000"])
async def test_a_priority_passes_no_other_tenant(start: Start, priority: str) -> None:
    """Forty requests of a team with a priority, twenty of another without: each other one is the other's."""
    bodies = [completion(priority)] * 40 + [completion("")] * 20
    claims = ["x-team: urgent"] * 40 + ["x-team: modest"] * 20
    ids = await order_of(start, bodies, claims, tenant_header="X-Team")
    first = min(ids)
    modest = [place for place, number in enumerate(ids) if number - first >= 40]
    assert max(modest) <= 2 * 20 + 2
    # And a request with it that comes later passes its own team alone.
    ids = await order_of(
        start, [completion("")] * 4 + [completion(priority)],
        ["x-team: one", "x-team: other"] * 2 + ["x-team: one"], tenant_header="X-Team",
    )  # fmt: skip
    assert ids.index(max(ids)) <= 1


async def test_a_priority_is_a_number_within_reason(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        for value, told in (
            ('"high"', "priority"),
            ("1.5", "priority"),
            (str(1 << 70), "priority"),
        ):
            answer = await ask(proxy, post(completion(value)))
            assert answer.status == 400
            assert told in answer.error["message"]
        # vLLM takes any integer; beyond what hetlb counts with it is the least urgent.
        assert (await ask(proxy, post(completion(str(1 << 40))))).status == 200


async def test_a_header_says_whose_share_a_request_is_of(start: Start) -> None:
    bodies = [completion("")] * 5
    claims = ["x-team: many"] * 4 + ["x-team: one"]
    ids = await order_of(start, bodies, claims, tenant_header="X-Team")
    assert ids.index(max(ids)) <= 1
    ids = await order_of(start, bodies, claims)
    assert ids == sorted(ids)


async def test_bodies_that_have_not_come_whole_are_bounded_together(start: Start) -> None:
    body = completion("")[:-1] + b" " * 1000 + b"}"
    async with Upstream() as engine:
        proxy = await start(engine.url, max_held_bytes=1500)
        async with Client(proxy) as first, Client(proxy) as second:
            first.send(post(body)[:-10])
            await turns_until(lambda: proxy.server.held_bytes > 1000)
            second.send(post(body)[:-10])
            refused = await second.answer()
            assert (refused.status, refused.error["code"]) == (429, "too_many_bytes")
            assert refused.headers["x-should-retry"] == "true"
            first.send(post(body)[-10:])
            assert (await first.answer()).status == 200
        async with Client(proxy) as third:
            third.send(post(body)[:-10])
            await turns_until(lambda: proxy.server.held_bytes > 1000)
        await turns_until(lambda: not proxy.server.held_bytes)
        await proxy.settled()


async def test_a_body_that_trickles_is_given_up(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        for sent, answered in ((6000, False), (5000, True)):
            body = completion("")[:-1] + b" " * 7000 + b"}"
            request = post(body)
            head = len(request) - len(body)
            async with Client(proxy) as client:
                client.send(request[: head + sent])
                await turns_until(lambda sent=sent: proxy.server.held_bytes == sent)
                [connection] = proxy.server.connections
                connection.sweep(connection._since + 5.5)  # 1,024 bytes a second would be 5,632 by now
                if answered:
                    assert (await client.answer()).status == 408
                else:
                    client.send(request[head + sent :])
                    assert (await client.answer()).status == 200
            await turns_until(lambda: not proxy.server.connections)
