"""Responses that an engine keeps, found again at the instance that gave them; the header of a priority."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from helpers import HANG_S
from hypothesis import given
from hypothesis import strategies as st
from proxy.test_proxying import Client, Start, ask, post
from proxy.upstreams import LAST, SSE_HEAD, Script, Upstream, Visit, chunk, plain

from hetlb.balancer.clients.api_keys import client_keys
from hetlb.balancer.core.facts import AdminStateSet, InstanceRemoved
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.exchange.kept_places import MOST_IDS, KeptPlaces, Place

ASKED = b'{"model":"m","input":"y"}'
CREATED = b'event: response.created\ndata: {"response":{"id":"resp_%b","status":"in_progress"}}\n\n'


def response(name: str) -> bytes:
    return plain(b'{"id":"resp_%b","object":"response","output":[],"status":"completed"}' % name.encode())


def get(name: str, *extra: str, method: str = "GET") -> bytes:
    lines = [f"{method} /v1/responses/{name} HTTP/1.1", "Host: p", *extra]
    return "\r\n".join([*lines, "", ""]).encode()


def again(name: str) -> bytes:
    return post(
        b'{"model":"m","input":"y","previous_response_id":"%b"}' % name.encode(), path="/v1/responses"
    )


@pytest.mark.parametrize("policy", ["rr", "single", "hetlb"])
async def test_later_requests_go_where_the_answer_is(start: Start, policy: str) -> None:
    async with Upstream(response("a")) as one, Upstream(response("b")) as two:
        proxy = await start(one.url, two.url, policy=policy)
        places = {}
        for _ in range(4):
            answer = await ask(proxy, post(ASKED, path="/v1/responses"))
            places[json.loads(answer.body)["id"]] = answer.headers["x-hetlb-instance"]
        for name, place in places.items():
            for data in (get(name), post(b"", path=f"/v1/responses/{name}/cancel"), again(name)) * 2:
                answer = await ask(proxy, data)
                assert (answer.status, answer.headers["x-hetlb-instance"]) == (200, place)
        await proxy.settled()


async def byte_by_byte(visit: Visit) -> None:
    visit.send(SSE_HEAD)
    for each in CREATED % b"s":
        visit.send(chunk(bytes([each])))
        await visit.writer.drain()
    visit.send(LAST)


@pytest.mark.parametrize("script", [SSE_HEAD + chunk(CREATED % b"s") + LAST, byte_by_byte])
async def test_the_id_of_a_stream_is_read(start: Start, script: Script | bytes) -> None:
    body = b'{"model":"m","input":"y","stream":true,"background":true}'
    async with Upstream(script, response("s")) as one, Upstream() as two:
        proxy = await start(one.url, two.url)
        first = await ask(proxy, post(body, path="/v1/responses"))
        assert first.body == CREATED % b"s"
        assert (await ask(proxy, get("resp_s"))).headers["x-hetlb-instance"] == "i0"
        assert not two.visits


async def test_an_event_without_an_id_is_not_held(start: Start) -> None:
    event, passed = b'data: {"type":"response.created"}\n\n', asyncio.Event()

    async def script(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(event))
        await passed.wait()
        visit.send(LAST)

    async with Upstream(script) as engine:
        proxy = await start(engine.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(post(b'{"model":"m","input":"y","stream":true}', path="/v1/responses"))
        async with asyncio.timeout(HANG_S):
            assert event in await reader.readuntil(event)
        passed.set()
        writer.close()
        await proxy.settled()


async def test_an_unknown_id_is_said_and_reaches_no_engine(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        asked: tuple[tuple[int, bytes], ...] = (
            (400, again("resp_1")),
            (404, get("resp_1")),
            (404, get("resp_" + "x" * 9000)),
            (404, get("resp_1/input_items")),
            (404, post(b"{}", path="/v1/responses/resp_1/cancel")),
            (405, get("resp_1", method="DELETE")),
        )
        for status, data in asked:
            assert (await ask(proxy, data)).status == status
        assert "`input`" in (await ask(proxy, again("resp_1"))).error["message"]
        batch = await ask(proxy, post(b"{}", path="/v1/batches"))
        assert batch.status == 404
        assert "hetlb batch" in batch.error["message"]
        assert not engine.visits


async def test_an_instance_that_has_no_store_says_so_itself(start: Start) -> None:
    none = plain(b'{"error":{"message":"no such response"}}', b"404 Not Found")
    async with Upstream(response("a"), none) as one, Upstream() as two:
        proxy = await start(one.url, two.url, policy="single")
        await ask(proxy, post(ASKED, path="/v1/responses"))
        for data in (get("resp_a"), again("resp_a")):
            answer = await ask(proxy, data)
            assert (answer.status, answer.error["message"]) == (404, "no such response")
        assert not two.visits
        await proxy.settled()


async def test_an_instance_that_takes_nothing_now_or_has_left(start: Start) -> None:
    async with Upstream(response("a")) as one, Upstream() as two:
        proxy = await start(one.url, two.url, policy="single")
        await ask(proxy, post(ASKED, path="/v1/responses"))
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        answers = [await ask(proxy, data) for data in (get("resp_a"), again("resp_a"))]
        assert [each.status for each in answers] == [503, 503]
        assert all("retry-after" in each.headers for each in answers)
        proxy.scheduling.change(InstanceRemoved("i0"))
        assert [(await ask(proxy, data)).status for data in (get("resp_a"), again("resp_a"))] == [404, 400]
        assert not two.visits


async def test_the_answer_of_one_key_is_no_other_keys(start: Start, tmp_path: Path) -> None:
    """Another key gets what an unknown id gets, and cannot claim the id by an answer with the same one."""
    keys = tmp_path / "keys.yaml"
    digests = {name: sha256(f"key-{name}".encode()).hexdigest() for name in "ab"}
    keys.write_text("".join(f"- {{name: {name}, sha256: {each}}}\n" for name, each in digests.items()))
    async with Upstream(response("a")) as engine:
        proxy = await start(engine.url)
        proxy.server.router.keys = client_keys(keys)
        mine, other = "Authorization: Bearer key-a", "Authorization: Bearer key-b"
        await ask(proxy, post(ASKED, mine, path="/v1/responses"))
        await ask(proxy, post(ASKED, other, path="/v1/responses"))
        unknown = await ask(proxy, get("resp_x", other))
        answer = await ask(proxy, get("resp_a", other))
        assert (answer.status, answer.error) == (404, unknown.error)
        assert (await ask(proxy, get("resp_a", mine))).status == 200


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["x", "y", None]))))
def test_the_first_key_keeps_an_id(notes: list[tuple[str, str | None]]) -> None:
    places, first = KeptPlaces(), {}
    for name, owner in notes:
        places.note(name, Place("i", "m", owner))
        first.setdefault(name, owner)
    assert {name: each.owner for name, each in places.by_id.items()} == first


def test_the_places_are_bounded_and_the_oldest_goes_first() -> None:
    places = KeptPlaces()
    for number in range(MOST_IDS + 10):
        places.note(str(number), Place("i", "m", None))
    assert len(places.by_id) == MOST_IDS
    assert places.of("9", None) is None
    assert places.of("10", None) is not None


def test_one_key_with_many_answers_pushes_out_its_own() -> None:
    places = KeptPlaces()
    for name, count in (("ann", 100), ("bob", 2 * MOST_IDS), ("cid", 100)):
        for number in range(count):
            places.note(f"{name}{number}", Place("i0", "m", name))
    assert len(places.by_id) == MOST_IDS
    for name in ("ann", "cid"):
        assert all(places.of(f"{name}{number}", name) for number in range(100))
    assert places.of(f"bob{2 * MOST_IDS - 1}", "bob")
    assert sum(map(len, places._owned.values())) == MOST_IDS


# --- the header of a priority ---


async def waiting_order(start: Start, headers: list[str]) -> list[Any]:
    from proxy.test_busy import completion, order_of

    return await order_of(start, [completion("")] * len(headers), headers)


async def test_a_priority_in_the_header_orders_what_waits(start: Start) -> None:
    order = await waiting_order(start, ["x-vllm-priority: 5", "x-a: b", "X-Vllm-Priority: -5"])
    assert order == [3, 2, 1]


async def test_the_header_goes_before_the_body_and_on_to_the_engine(start: Start) -> None:
    body = b'{"model":"m","prompt":"x","priority":7}'
    async with Upstream() as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.send(post(body, "X-Vllm-Priority: -3 "))
            assert (await client.answer()).status == 200
        assert b"x-vllm-priority: -3" in (await engine.visit()).head.lower()
        await proxy.settled()
    assert proxy.exchanges[0].request.priority == -3


@pytest.mark.parametrize("stated", ["1.5", "high", "0x10", "9" * 20, ""])
async def test_a_header_that_is_no_whole_number_is_refused(start: Start, stated: str) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(b'{"model":"m","prompt":"x"}', f"X-Vllm-Priority: {stated}"))
        assert answer.status == 400
        assert "X-Vllm-Priority" in answer.error["message"]
        twice = post(b'{"model":"m","prompt":"x"}', "X-Vllm-Priority: 1", "x-vllm-priority: 2")
        assert (await ask(proxy, twice)).status == 400
        assert not engine.visits
