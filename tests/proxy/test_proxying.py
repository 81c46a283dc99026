"""Requests on real sockets: what clients and engines see, and that nothing is left afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers import HANG_S, turns_until
from proxy.upstreams import (
    DONE,
    LAST,
    PLAIN_BODY,
    SSE_HEAD,
    STREAM,
    TOKEN,
    USAGE,
    Upstream,
    Visit,
    chunk,
    closing,
    holding,
    plain,
    resetting,
)  # fmt: skip

from hetlb.balancer.core.facts import AdminStateSet
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.http.connection_states import ClientState, Reading

Start = Callable[..., Any]

ASK = b'{"model":"m","prompt":"hello","max_tokens":5}'
ASK_STREAM = b'{"model":"m","prompt":"hello","stream":true}'


def post(body: bytes = ASK, *extra: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: proxy", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes, clean: bool) -> None:
        self.status, self.headers, self.body, self.clean = status, headers, body, clean

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Client:
    def __init__(self, proxy: Any) -> None:
        self.port = proxy.port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(HANG_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            status = int(first.split()[1])
            if "content-length" in headers:
                try:
                    return Answer(
                        status, headers, await self.reader.readexactly(int(headers["content-length"])), True
                    )
                except asyncio.IncompleteReadError as error:
                    return Answer(status, headers, error.partial, False)
            if headers.get("transfer-encoding") != "chunked":
                return Answer(status, headers, await self.reader.read(), True)
            body = b""
            try:
                while size := int(await self.reader.readline() or b"x", 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                assert await self.reader.readexactly(2) == b"\r\n"
            except (ValueError, asyncio.IncompleteReadError, ConnectionError):
                return Answer(status, headers, body, False)
            return Answer(status, headers, body, True)

    async def eof(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self.reader.read()


async def ask(proxy: Any, data: bytes) -> Answer:
    async with Client(proxy) as client:
        client.send(data)
        answer = await client.answer()
    await proxy.settled()
    return answer


# --- the way through ---


async def test_a_plain_request(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        sent = post(
            ASK, "X-Request-Id: mine", "Authorization: Bearer secret", "X-Forwarded-For: 1.2.3.4",
            "Cookie: a=b",
            "Connection: x-hop", "X-Hop: y", "Traceparent: 00-aa-bb-01", "Proxy-Authorization: z",
            "Te: trailers",
            "Accept-Encoding: gzip", "Forwarded: for=x", "X-Real-IP: 1.1.1.1", "Upgrade: h2c",
        )  # fmt: skip
        answer = await ask(proxy, sent)
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-hetlb-instance"] == "i0"
        visit = await engine.visit()
        head = visit.head.decode().lower()
        assert visit.body == ASK
        assert f"host: {engine.url[7:]}\r\n" in head
        assert "accept-encoding: identity" in head
        assert "traceparent: 00-aa-bb-01" in head
        assert "x-request-id: mine" in head
        for gone in ("secret", "1.2.3.4", "cookie", "hop", "proxy-auth", "\r\nte:", "gzip", "forwarded",
        "upgrade",
                     "1.1.1.1", "connection"):  # fmt: skip
            assert gone not in head
    assert proxy.ended == [("ok", "answer", 200)]
    assert proxy.exchanges[0].usage_prompt_tokens == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/version"])
async def test_a_path_with_a_slash_behind_it_leads_to_the_path(start: Start, path: str) -> None:
    """As FastAPI does, and so vLLM."""
    async with Upstream() as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(path=f"{path}/?a=b"))
        assert (answer.status, answer.headers["location"]) == (307, f"{path}?a=b")
        answer = await ask(proxy, post(path="/nothing/"))
        assert answer.status == 404
    assert not engine.visits


async def test_a_byte_order_mark_before_json_is_read(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(b"\xef\xbb\xbf" + ASK))
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
        assert (await engine.visit()).body == ASK


async def test_a_stream_whose_usage_was_not_asked_for(start: Start) -> None:
    async with Upstream(STREAM) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert json.loads((await engine.visit()).body)["stream_options"] == {"include_usage": True}
    assert (answer.clean, answer.body) == (True, TOKEN + TOKEN + DONE)
    assert proxy.ended == [("ok", "answer", 200)]


async def test_a_stream_whose_usage_was_asked_for(start: Start) -> None:
    body = b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}'
    async with Upstream(STREAM) as engine:
        answer = await ask(await start(engine.url), post(body))
        assert (await engine.visit()).body == body
    assert answer.body == TOKEN + TOKEN + USAGE + DONE


async def test_tokens_of_a_stream_in_one_read_without_usage_are_counted(start: Start) -> None:
    async with Upstream(SSE_HEAD + chunk(TOKEN * 3 + DONE) + LAST) as engine:
        proxy = await start(engine.url)
        await ask(proxy, post(ASK_STREAM))
        assert proxy.driver.totals.instances["i0"].output_tokens == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_cut_at_every_byte(start: Start, streamed: bool) -> None:
    sent = post(ASK_STREAM if streamed else ASK)
    async with Upstream(STREAM if streamed else plain()) as engine:
        proxy = await start(engine.url)
        for at in range(1, len(sent)):
            async with Client(proxy) as client:
                client.send(sent[:at])
                await client.writer.drain()
                await asyncio.sleep(0)
                client.send(sent[at:])
                answer = await client.answer()
            assert answer.status == 200
            assert answer.body == (TOKEN + TOKEN + DONE if streamed else PLAIN_BODY)
        await proxy.settled()


@pytest.mark.parametrize("raw", [plain(), STREAM], ids=["plain", "stream"])
async def test_an_answer_cut_at_every_byte(start: Start, raw: bytes) -> None:
    where = iter(range(1, len(raw)))

    async def script(visit: Any) -> None:
        at = next(where)
        visit.send(raw[:at])
        await visit.writer.drain()
        await asyncio.sleep(0)
        visit.send(raw[at:])

    async with Upstream(script) as engine, Client(proxy := await start(engine.url)) as client:
        for _ in range(1, len(raw)):
            client.send(post(ASK_STREAM))
            answer = await client.answer()
            assert answer.clean
            assert answer.body == (TOKEN + TOKEN + DONE if raw is STREAM else PLAIN_BODY)
        assert engine.connections == 1
    await proxy.settled()


async def test_a_refused_head_request_has_no_body_and_the_next_answer_is_its_own(start: Start) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url)) as client:
        client.send(b"HEAD /nothing HTTP/1.1\r\nHost: proxy\r\n\r\n" + post())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, PLAIN_BODY)
    await proxy.settled()


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(start: Start) -> None:
    async def script(visit: Any) -> None:
        assert [v for v in engine.visits if not v.left.is_set()] == [visit]
        visit.left.set()
        visit.send(plain(json.dumps(json.loads(visit.body)["n"]).encode()))

    async with Upstream(script) as engine, Client(proxy := await start(engine.url)) as client:
        client.send(b"".join(post(b'{"model":"m","n":%d}' % n) for n in range(1, 201)))
        assert [int((await client.answer()).body) for _ in range(200)] == list(range(1, 201))
        assert engine.connections == 1
    await proxy.settled()


async def test_chunked_request_body_and_continue(start: Start) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url)) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nTransfer-Encoding: chunked\r\n"
                    b"Expect: 100-continue\r\n\r\n")  # fmt: skip
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for byte in ASK:
            client.send(chunk(bytes([byte])))
        client.send(LAST)
        assert (await client.answer()).status == 200
        assert (await engine.visit()).body == ASK
        assert b"transfer-encoding" not in engine.visits[0].head.lower()
    await proxy.settled()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_http_1_0_clients_get_close_delimited_streams(start: Start, version: str) -> None:
    async with Upstream(STREAM) as engine, Client(proxy := await start(engine.url)) as client:
        client.send(post(ASK_STREAM, "Connection: close", version=version))
        answer = await client.answer()
        assert ("transfer-encoding" in answer.headers) is (version == "1.1")
        assert answer.headers["connection"] == "close"
        assert answer.body == TOKEN + TOKEN + DONE
        assert await client.eof() == b""
    await proxy.settled()


async def test_http_1_0_keep_alive_is_said(start: Start) -> None:
    async with Upstream() as engine, Client(proxy := await start(engine.url)) as client:
        for _ in range(2):
            client.send(post(ASK, "Connection: keep-alive", version="1.0"))
            assert (await client.answer()).headers["connection"] == "keep-alive"
    await proxy.settled()


async def test_a_close_delimited_answer_is_framed_anew(start: Start) -> None:
    async with Upstream(closing(b"HTTP/1.1 200 OK\r\n\r\nbody")) as engine:
        answer = await ask(await start(engine.url), post())
    assert (answer.headers["transfer-encoding"], answer.body, answer.clean) == ("chunked", b"body", True)


async def test_interim_answers_are_skipped(start: Start) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + plain()
    async with Upstream(raw) as engine:
        assert (await ask(await start(engine.url), post())).body == PLAIN_BODY


async def test_large_bodies_pass(start: Start) -> None:
    body = b'{"model":"m","prompt":"' + b"x" * 8_000_000 + b'"}'
    async with Upstream(plain(b"y" * 8_000_000)) as engine:
        answer = await ask(await start(engine.url), post(body))
        assert (await engine.visit()).body == body
    assert answer.body == b"y" * 8_000_000


# --- turned away ---


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (400, b"GET /v1/models HTTP/1.1\r\n\r\n"),
        (404, b"GET /metrics HTTP/1.1\r\nHost: p\r\n\r\n"),
        (404, post(path="/sleep")),
        (404, post(path="/v1/nothing")),
        (405, b"GET /v1/completions HTTP/1.1\r\nHost: p\r\n\r\n"),
        (405, post(path="/v1/models")),
        (413, b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 99999999\r\n\r\n"),
        (413, b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nTransfer-Encoding: chunked\r\n\r\n"
              + chunk(b"x" * 70_000) * 130),
        (415, post(ASK, "Content-Encoding: gzip")),
        (415, post(ASK, "Content-Encoding: identity", "Content-Encoding: gzip")),
        (417, post(ASK, "Expect: 200-ok")),
        (404, post(b"x" * 99, "Expect: 100-continue", path="/v1/nothing")),
        (400, post(b"not json")),
        (404, post(b'{"model":"other"}')),
    ],
    ids=lambda value: repr(value[:50]) if isinstance(value, bytes) else str(value),
)  # fmt: skip
async def test_refusals_have_openais_form_and_reach_no_engine(start: Start, status: int, data: bytes) -> None:
    async with Upstream() as engine:
        answer = await ask(await start(engine.url, max_body_bytes=8 << 20), data)
        assert answer.status == status
        assert set(answer.error) == {"message", "type", "code", "param"}
        assert not engine.visits
        if status == 405:
            assert answer.headers["allow"]
        if status in (404, 405, 413):
            assert answer.headers["x-request-id"]


async def test_an_unknown_model_is_answered_with_the_names_that_are_known(start: Start) -> None:
    answer = await ask(await start("http://127.0.0.1:1"), post(b'{"model":"other"}'))
    assert answer.error["message"] == "The model `other` does not exist. Valid names: m."


async def test_own_pages(start: Start) -> None:
    proxy = await start("http://127.0.0.1:1")
    async with Client(proxy) as client:
        for path in ("/health", "/ping", "/version", "/v1/models", "/v1/models/m"):
            client.send(f"GET {path} HTTP/1.1\r\nHost: p\r\n\r\n".encode())
            assert (await client.answer()).status == 200


@pytest.mark.parametrize("path", ["org%2Fm-7B", "org/m-7B", "org%2fm-7B", "%6Frg/m%2D7B"])
async def test_a_model_is_asked_for_by_its_name_encoded_or_not(start: Start, path: str) -> None:
    proxy = await start("http://127.0.0.1:1")
    proxy.server.router._view.models = lambda: [{"id": "org/m-7B", "object": "model"}]
    found = await ask(proxy, f"GET /v1/models/{path} HTTP/1.1\r\nHost: p\r\n\r\n".encode())
    assert (found.status, json.loads(found.body)["id"]) == (200, "org/m-7B")
    other = await ask(proxy, f"GET /v1/models/{path}x HTTP/1.1\r\nHost: p\r\n\r\n".encode())
    assert other.status == 404


# --- pages of other origins ---

CHAT = "Origin: https://chat.example"
PREFLIGHT = (
    b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: p\r\nOrigin: %b\r\n"
    b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n\r\n"
)


async def test_without_the_key_nothing_is_said_to_browsers(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        preflight = await ask(proxy, PREFLIGHT % b"https://chat.example")
        answer = await ask(proxy, post(ASK, CHAT))
        assert (preflight.status, answer.status) == (405, 200)
        for each in (preflight, answer):
            assert not [name for name in each.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", ["https://chat.example", "*"])
async def test_an_allowed_page_may_ask_and_read(start: Start, allowed: str) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, cors_origins=(allowed,))
        preflight = await ask(proxy, PREFLIGHT % b"https://chat.example")
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        served = await ask(proxy, post(ASK, CHAT))
        refused = await ask(proxy, post(b"not json", CHAT))
        unknown = await ask(proxy, post(b'{"model":"other"}', CHAT))
        own = await ask(proxy, b"GET /v1/models HTTP/1.1\r\nHost: p\r\nOrigin: https://chat.example\r\n\r\n")
        assert [each.status for each in (served, refused, unknown, own)] == [200, 400, 404, 200]
        for each in (preflight, served, refused, unknown, own):
            assert each.headers["access-control-allow-origin"] == "https://chat.example"
            assert each.headers["vary"] == "Origin"
        assert "origin" not in engine.visits[0].head.decode().lower()


async def test_other_pages_get_no_permission(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, cors_origins=("https://chat.example",))
        preflight = await ask(proxy, PREFLIGHT % b"https://elsewhere.example")
        plain = await ask(proxy, post())
        for each in (preflight, plain):
            assert "access-control-allow-origin" not in each.headers


# --- engines that fail ---


async def test_a_refused_connection_goes_elsewhere(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start("http://127.0.0.1:1", engine.url)
        for _ in range(3):
            assert (await ask(proxy, post())).headers["x-hetlb-instance"] == "i1"
    assert {e[0] for e in proxy.ended} == {"ok"}


@pytest.mark.parametrize("host", ["a..b", "x" * 64], ids=["empty-label", "long-label"])
async def test_a_host_that_can_be_no_name_is_a_failed_connection(start: Start, host: str) -> None:
    async with Upstream() as engine:
        proxy = await start(f"http://{host}:80", engine.url)
        for _ in range(3):
            assert (await ask(proxy, post())).headers["x-hetlb-instance"] == "i1"
    assert proxy.driver.totals.retries == 1


@pytest.mark.parametrize("dies", [closing(b""), resetting(b"")], ids=["fin", "rst"])
async def test_an_engine_that_drops_a_request_is_replaced_once(start: Start, dies: Any) -> None:
    async with Upstream(dies) as bad, Upstream() as good:
        proxy = await start(bad.url, good.url)
        answer = await ask(proxy, post())
        assert (answer.status, len(bad.visits), len(good.visits)) == (200, 1, 1)
    async with Upstream(dies) as one, Upstream(dies) as two, Upstream(dies) as three:
        proxy = await start(one.url, two.url, three.url)
        answer = await ask(proxy, post())
        assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert len(one.visits) + len(two.visits) + len(three.visits) == 2
    assert proxy.ended == [("no_response", "wait", 502)]


@pytest.mark.parametrize(
    "script",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
        closing(b"HTTP/1.1 200 OK\r\nContent-"),
        closing(plain()[: -len(PLAIN_BODY)]),
        SSE_HEAD + b"zz\r\n",
    ],
    ids=range(9),
)
async def test_answers_that_are_none_are_tried_once_elsewhere_and_then_a_502(
    start: Start, script: Any
) -> None:
    async with Upstream(script) as one, Upstream(script) as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert len(one.visits) == len(two.visits) == 1
        await one.closed()
    assert proxy.ended[0][0] == "no_response"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (b"400 Bad Request", "upstream_refused"),
        (b"429 Too Many Requests", "upstream_busy"),
        (b"500 X", "upstream_error"),
        (b"503 Y", "upstream_error"),
    ],
)
async def test_error_answers_of_all_pass_verbatim(start: Start, status: bytes, outcome: str) -> None:
    body = b'{"error":{"message":"no"}}'
    async with Upstream(plain(body, status)) as one, Upstream(plain(body, status)) as two:
        proxy = await start(one.url, two.url)
        answer = await ask(proxy, post())
        assert (answer.status, answer.body) == (int(status[:3]), body)
        assert len(one.visits) == len(two.visits) == 1
    assert proxy.ended[0][0] == outcome


@pytest.mark.parametrize(
    "script",
    [
        closing(SSE_HEAD + chunk(TOKEN)),
        resetting(SSE_HEAD + chunk(TOKEN)),
        closing(SSE_HEAD + chunk(TOKEN) + LAST),
        closing(SSE_HEAD + chunk(TOKEN) + b"zz\r\n"),
        closing(SSE_HEAD + chunk(TOKEN) + b"ff\r\ndata: half"),
        closing(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TOKEN),
    ],
    ids=["fin", "rst", "no-done", "bad-chunk", "mid-event", "close-delimited"],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_terminator(
    start: Start, script: Any
) -> None:
    async with Upstream(script) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK_STREAM))
        assert len(engine.visits) == 1
    if answer.status == 502:
        # The end came in the same read as the beginning: nothing had reached the client yet.
        assert proxy.ended[0][0] == "no_response"
        return
    assert answer.status == 200
    assert answer.body.startswith(TOKEN)
    last = answer.body.rstrip(b"\n").rpartition(b"\n")[2] if b"half" not in answer.body else None
    if last is not None:
        assert "error" in json.loads(last.removeprefix(b"data: "))
    assert not answer.clean
    assert proxy.ended[0][:2] == ("broken_stream", "answer")


async def test_a_short_plain_answer_is_visibly_cut(start: Start) -> None:
    async with Upstream(closing(plain()[:-5])) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post())
    assert (answer.clean, answer.body) == (False, PLAIN_BODY[:-5])
    assert proxy.ended[0][:2] == ("broken_stream", "answer")


@pytest.mark.parametrize("how", ["fin", "rst", "silent"])
async def test_a_stream_is_whole_once_its_end_came(start: Start, how: str) -> None:
    async def engine_dies(visit: Visit) -> None:
        visit.send(SSE_HEAD + chunk(TOKEN) + chunk(DONE))
        if how == "silent":
            await visit.until_left()
        elif how == "rst":
            await visit.writer.drain()
            visit.reset()

    async with Upstream(engine_dies) as engine:
        proxy = await start(engine.url, idle_timeout_s=0.05)
        if how == "silent":
            asking = asyncio.create_task(ask(proxy, post(ASK_STREAM)))
            await turns_until(lambda: proxy.driver.exchanges)
            while not asking.done():
                proxy.driver.swept(0.0)
                await asyncio.sleep(0)
            answer = await asking
        else:
            answer = await ask(proxy, post(ASK_STREAM))
    assert (answer.clean, answer.body) == (True, TOKEN + DONE)
    assert proxy.ended == [("ok", "answer", 200)]


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (b'{"error":{"message":"dead"}}', "broken_stream"),
        # vLLM's before 0.10.
        (b'{"object":"error","message":"dead","code":500}', "broken_stream"),
        (b'{"object":"error","message":"too long","code":400}', "refused"),
        (b'{"object":"chat.completion.chunk","choices":[{"text":"\\"object\\":\\"error\\""}]}', "ok"),
        (
            b'{"error":{"message":"long","type":"invalid_request_error","code":"context_length_exceeded"}}',
            "refused",
        ),
        (b'{"error":{"message":"long","code":"400"}}', "refused"),
        (b'{"error":{"message":"dead","code":true}}', "broken_stream"),
        # Of the Responses API, and of Anthropic's.
        (b'{"type":"error","code":"server_error","message":"dead","param":null}', "broken_stream"),
        (b'{"type":"error","code":"invalid_prompt","message":"no"}', "refused"),
        (
            b'{"type":"response.failed","response":{"error":{"code":"server_error"},"usage":null}}',
            "broken_stream",
        ),
        (b'{"type": "response.failed", "response": {"error": {"code": "invalid_image"}}}', "refused"),
        (b'{"type":"response.completed","response":{"id":"r","error":null}}', "ok"),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"dead"}}', "broken_stream"),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}', "refused"),
    ],
)
async def test_an_error_event_is_passed_on_and_counts_as_failure(
    start: Start, event: bytes, outcome: str
) -> None:
    event = b"data: " + event + b"\n\n"
    async with Upstream(SSE_HEAD + chunk(TOKEN) + chunk(event) + chunk(DONE) + LAST) as engine:
        proxy = await start(engine.url)
        answer = await ask(proxy, post(ASK_STREAM))
    assert (answer.clean, answer.body) == (True, TOKEN + event + DONE)
    assert proxy.ended[0][0].removeprefix("upstream_") == outcome


async def test_surplus_bytes_are_dropped_and_the_connection_with_them(start: Start) -> None:
    async with (
        Upstream(plain() + plain(b"smuggled")) as engine,
        Client(proxy := await start(engine.url)) as client,
    ):
        for _ in range(2):
            client.send(post())
            assert (await client.answer()).body == PLAIN_BODY
        assert engine.connections == 2
    await proxy.settled()


async def test_a_connection_closed_while_idle_is_replaced_unnoticed(start: Start) -> None:
    async def dead(visit: Any) -> None:
        # The request came on a connection that the engine was about to close.
        visit.reset()

    async with Upstream(plain(), dead, plain()) as engine, Client(proxy := await start(engine.url)) as client:
        for _ in range(2):
            client.send(post())
            assert (await client.answer()).body == PLAIN_BODY
        assert (len(engine.visits), engine.connections) == (3, 2)
    await proxy.settled()
    assert [e[0] for e in proxy.ended] == ["ok", "ok"]
    assert proxy.driver.totals.retries == 0


async def test_silence_before_the_first_byte_is_a_504(start: Start) -> None:
    async with Upstream(holding()) as one, Upstream(holding()) as two:
        proxy = await start(one.url, two.url, first_byte_timeout_s=0.01)
        answer = await ask(proxy, post())
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        await turns_until(lambda: len(one.visits) + len(two.visits) == 1)  # it may read after that
        await one.closed()
        await two.closed()
    assert proxy.ended == [("no_response", "wait", 504)]


async def test_silence_inside_a_stream_ends_it(start: Start) -> None:
    async with Upstream(holding(SSE_HEAD + chunk(TOKEN))) as engine:
        proxy = await start(engine.url, idle_timeout_s=0.01)
        answer = await ask(proxy, post(ASK_STREAM))
        await engine.closed()
    assert answer.body.startswith(TOKEN + b'data: {"error"')
    assert not answer.clean
    assert proxy.ended == [("broken_stream", "answer", 200)]


# --- clients that leave ---


@pytest.mark.parametrize("half", [False, True], ids=["gone", "half-closed"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("phase", ["wait", "answer"])
async def test_a_client_that_leaves_closes_the_engines_connection(
    start: Start, phase: str, streamed: bool, half: bool
) -> None:
    body = SSE_HEAD + chunk(TOKEN) if streamed else plain()[:-5]
    async with Upstream(holding(b"" if phase == "wait" else body)) as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM if streamed else ASK))
            visit = await engine.visit()
            if phase == "answer":
                await client.reader.readuntil(b"\r\n\r\n")
            if half:
                client.writer.write_eof()
            else:
                client.writer.transport.abort()
            async with asyncio.timeout(HANG_S):
                await visit.left.wait()
        await proxy.settled()
        assert proxy.driver.pools.open_connections == 0
    assert proxy.ended == [("client_gone", phase, 200 if phase == "answer" else 0)]


async def test_a_client_that_leaves_the_queue(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        async with Client(proxy) as client:
            client.send(post())
            await turns_until(lambda: len(proxy.scheduler.queue))
        await turns_until(lambda: not proxy.driver.exchanges)
        assert proxy.ended == [("client_gone", "queue", 0)]
        await proxy.settled()
        assert not engine.visits


async def test_a_client_that_leaves_while_connecting(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.send(post())
            await turns_until(lambda: proxy.driver.exchanges)
            [exchange] = proxy.driver.exchanges.values()
            assert exchange.phase == "connect"
            [connection] = proxy.server.connections
            connection.connection_lost(None)
            await turns_until(lambda: proxy.ended)
        assert proxy.ended == [("client_gone", "connect", 0)]
        await proxy.settled()


async def test_a_queued_request_runs_when_the_instance_is_back(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url)
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        async with Client(proxy) as client:
            client.send(post())
            await turns_until(lambda: len(proxy.scheduler.queue))
            proxy.scheduling.change(AdminStateSet("i0", AdminState.READY))
            assert (await client.answer()).status == 200
        await proxy.settled()


async def test_no_instance_within_the_limit_is_a_503(start: Start) -> None:
    async with Upstream() as engine:
        proxy = await start(engine.url, limits=QueueLimits(no_instance_timeout_s=0.01))
        proxy.scheduling.change(AdminStateSet("i0", AdminState.DRAIN))
        answer = await ask(proxy, post())
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    assert proxy.ended == [("no_instance", "queue", 503)]


async def test_a_slow_client_holds_its_engine_back(start: Start) -> None:
    piece = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
    sent = 0

    async def flood(visit: Any) -> None:
        nonlocal sent
        visit.writer.transport.set_write_buffer_limits(high=0)
        visit.send(SSE_HEAD)
        while True:
            visit.send(piece)
            sent += len(piece)
            await visit.writer.drain()

    async with Upstream(flood) as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.writer.transport.pause_reading()
            client.send(post(ASK_STREAM))
            await engine.visit()
            # Until the engine is stuck for many turns of the loop.
            last, still = -1, 0
            async with asyncio.timeout(HANG_S):
                while still < 2000:
                    await asyncio.sleep(0)
                    last, still = sent, still + 1 if sent == last else 0
            (connection,) = proxy.server.connections
            assert connection._transport.get_write_buffer_size() < 1 << 20
            assert sent < 32 << 20
        await proxy.settled()
    assert proxy.ended == [("client_gone", "answer", 200)]


async def test_a_client_that_pipelines_and_never_reads_gets_no_more_answers(start: Start) -> None:
    proxy = await start("http://127.0.0.1:1")
    async with Client(proxy) as client:
        client.writer.transport.pause_reading()
        client.writer.transport.set_write_buffer_limits(high=0)
        (connection,) = await _connections(proxy)
        one = b"GET /v1/models HTTP/1.1\r\nHost: p\r\n\r\n"

        async def flood() -> None:
            while True:
                client.send(one * 1000)
                await client.writer.drain()

        task = asyncio.create_task(flood())
        await turns_until(
            lambda: connection._stalled_since is not None and connection.reading is Reading.HELD
        )
        assert connection._transport.get_write_buffer_size() < 1 << 20
        assert len(connection._reader.buffer) < 1 << 20
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _connections(proxy: Any) -> list[Any]:
    await turns_until(lambda: proxy.server.connections)
    return list(proxy.server.connections)


@pytest.mark.parametrize(
    "data", [b"GET /", b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_slow_heads_and_bodies_are_a_408(start: Start, data: bytes) -> None:
    proxy = await start("http://127.0.0.1:1", head_timeout_s=0.01, body_timeout_s=0.01)
    async with Client(proxy) as client:
        client.send(data)
        assert (await client.answer()).status == 408
        assert await client.eof() == b""


async def test_a_body_that_comes_steadily_may_take_longer_than_its_time(start: Start) -> None:
    proxy = await start("http://127.0.0.1:1", body_timeout_s=30.0)
    async with Client(proxy) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 2000000\r\n\r\n")
        client.send(b" " * 1_000_000)
        (connection,) = proxy.server.connections
        await turns_until(lambda: connection._reader.held >= 1_000_000)
        connection._since = proxy.driver.now() - 100.0  # 10 kB/s
        connection.sweep(proxy.driver.now())
        assert connection.state is ClientState.BODY
        connection._since -= 50.0
        connection.sweep(proxy.driver.now())
        assert (await client.answer()).status == 408


async def test_the_time_of_a_head_begins_with_its_first_byte(start: Start) -> None:
    proxy = await start("http://127.0.0.1:1")
    async with Client(proxy) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: p\r\n\r\n")
        await client.answer()
        (connection,) = proxy.server.connections
        connection._since -= 60.0  # idle for a minute, then half a head
        client.send(b"GET /health HTTP/1.1\r\n")
        await turns_until(lambda: connection.state is ClientState.HEAD)
        connection.sweep(proxy.driver.now())
        client.send(b"Host: p\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_idle_client_connections_are_closed(start: Start) -> None:
    proxy = await start("http://127.0.0.1:1", keepalive_timeout_s=0.01)
    async with Client(proxy) as client:
        assert await client.eof() == b""


# --- the end ---


@pytest.mark.parametrize("streamed", [False, True])
async def test_shutdown_waits_for_the_grace_and_then_says_so(start: Start, streamed: bool) -> None:
    async with Upstream(holding(SSE_HEAD + chunk(TOKEN) if streamed else b"")) as engine:
        proxy = await start(engine.url)
        async with Client(proxy) as client:
            client.send(post(ASK_STREAM if streamed else ASK))
            await engine.visit()
            if streamed:
                await client.reader.readuntil(b"\n\n")
            proxy.server.stop_accepting()
            await proxy.driver.drain(0.01)
            if streamed:
                assert b'data: {"error"' in await client.eof()
            else:
                assert (await client.answer()).status == 503
        await engine.closed()
    assert proxy.ended[0][0] == "shutdown"


async def test_a_third_leave_at_random_moments_and_nothing_is_left(start: Start) -> None:
    import random

    rng = random.Random(7)

    async def script(visit: Any) -> None:
        for part in (SSE_HEAD, *[chunk(TOKEN)] * 4, chunk(DONE), LAST):
            visit.send(part)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    async with Upstream(script) as one, Upstream(script) as two:
        proxy = await start(one.url, two.url)

        async def client_of(leaves_after: int | None) -> None:
            async with Client(proxy) as client:
                client.send(post(ASK_STREAM))
                if leaves_after is None:
                    assert (await client.answer()).clean
                else:
                    for _ in range(leaves_after):
                        await asyncio.sleep(0)

        for _ in range(3):
            await asyncio.gather(
                *(client_of(rng.randrange(60) if rng.random() < 0.3 else None) for _ in range(50))
            )
        await proxy.settled()
        assert {outcome for outcome, _, _ in proxy.ended} <= {"ok", "client_gone"}
        assert sum(proxy.driver.totals.requests.values()) == len(proxy.ended) <= 150
