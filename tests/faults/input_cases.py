"""Rows J and P: malformed bodies and heads; none may reach an engine in two readings."""

from __future__ import annotations

import contextlib
import gzip
import json

from faults.cases import case
from faults.client import body_of, request
from faults.rig import Rig
from faults.upstream_cases import refused, whole


def turned_away(
    row: str, name: str, *bodies: bytes, status: tuple[int, ...] = (400,), known: str | None = None
) -> None:
    """Bodies that are refused in OpenAI's form, and reach no engine."""

    @case(row, name, outcomes={"bad_request": len(bodies)}, known=known)
    async def is_refused(rig: Rig) -> None:
        for body in bodies:
            async with rig.client() as client:
                client.send(request(rig.label(), body))
                answer = await client.answer()
            assert answer.status in status, (body[:60], answer.status, answer.body[:200])
            refused(answer, answer.status, retry=False)
        assert not rig.engine.visits


def field(name: str, value: str) -> bytes:
    """A completion with one more field, as raw JSON."""
    return b'{"model":"m","prompt":"x","%s":%s}' % (name.encode(), value.encode())


turned_away(
    "J1",
    "no-object",
    b"",
    b"not json",
    b"[]",
    b'"text"',
    b"null",
    b"1",
    b"{",
    b"{}}",
    b'{"model":"m"',
    b"\xff\xfe{}",
    '{"model":"m"}'.encode("utf-16"),
    b'{"model":"m","prompt":"\xff"}',
    b'{"model":"m","prompt":"\xed\xa0\x80"}',
)
turned_away("J1", "lone-surrogate", b'{"model":"m","prompt":"\\ud800"}')
turned_away("J2", "deep", b"[" * 100_000, b'{"model":"m","x":' + b"[" * 100_000, b'{"a":' * 50_000)
turned_away("J2", "seventy-million", b"[" * 70_000_000, status=(413,))
turned_away("J2", "eight-million", b"[" * 8_000_000)
turned_away(
    "J3",
    "numbers",
    field("max_tokens", "NaN"),
    field("max_tokens", "1e9999"),
    field("max_tokens", "1" * 5000),
    field("temperature", "NaN"),
    field("temperature", "Infinity"),
    field("n", "-Infinity"),
    field("n", "1" * 5000),
)
turned_away(
    "J3",
    "numbers-unread",
    field("temperature", "1e9999"),
    field("temperature", "1" * 5000),
    known="a number too large for any type passes in a field that hetlb does not read",
)
turned_away(
    "J4",
    "types",
    field("max_tokens", "-1"),
    field("max_tokens", "1.5"),
    field("max_tokens", '"5.5"'),
    field("max_tokens", '"five"'),
    field("n", "1000000000"),
    field("n", "0"),
    field("n", "-1"),
    field("n", "1.5"),
    field("best_of", "1000000000"),
    field("stream", "2"),
    field("max_tokens", "[]"),
    field("model", "7"),
)
turned_away("J5", "huge-model", b'{"model":"%s"}' % (b"m" * (1 << 20)), b'{"model":"%s"}' % (b"m" * 513))
turned_away("J5", "unknown-model", b'{"model":"nobody"}', b'{"model":"../m"}', status=(404,))


@case("J3", "duplicate-keys", outcomes={"ok": 1})
async def the_last_one_wins(rig: Rig) -> None:
    """Python's reading, and so vLLM's, is the last value; the body goes on as it came."""
    body = b'{"model":"nobody","prompt":"x","stream":true,"model":"m"}'
    answer = await rig.raw(request("q", body))
    assert (answer.status, answer.done) == (200, True)
    assert json.loads((await rig.engine.visit()).body)["model"] == "m"


@case("J4", "no-more-than-one-instance-has", outcomes={"ok": 3}, policy={"name": "least-kv"})
async def bookings_are_clamped(rig: Rig) -> None:
    assert rig.engine.metrics is not None
    rig.engine.metrics += b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    await rig.becomes("i0", kv_cache_tokens=1600)
    rig.engine.mode = "held"
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number, fields in enumerate(
            ({"max_tokens": 10**6}, {"n": 1000, "max_tokens": 1000}, {"logprobs": 10**6})
        ):
            client = await stack.enter_async_context(rig.client())
            client.send(request(f"q{number}", body_of(f"q{number}", **fields)))
            clients.append(client)
            await rig.becomes("i0", in_flight=number + 1)
            assert (await rig.instance("i0"))["kv_reserved_tokens"] <= 1600 * (number + 1)
        rig.engine.released.set()
        for client in clients:
            assert (await client.answer()).status == 200


def passes(name: str, body: bytes) -> None:
    @case("J5", name, outcomes={"ok": 2})
    async def is_large_and_passes(rig: Rig) -> None:
        answer = await rig.raw(request("q", body))
        assert answer.status == 200, answer.body[:200]
        assert (await rig.engine.visit()).body == body
        whole(await rig.ask())


passes("a-million-ids", b'{"model":"m","prompt":[%s]}' % b",".join([b"7"] * 1_000_000))
passes("many-messages", b'{"model":"m","messages":[%s]}' % b",".join([b'{"role":"user"}'] * 300_000))
passes(
    "many-tools", b'{"model":"m","prompt":"x","tools":[%s]}' % b",".join([b'{"type":"function"}'] * 10_000)
)
passes("many-stops", b'{"model":"m","prompt":"x","stop":[%s]}' % b",".join([b'"s"'] * 10_000))


def closes(row: str, name: str, status: int, *heads: bytes) -> None:
    """Messages that are refused and end their connection: what follows on it cannot be trusted."""

    @case(row, name, outcomes={"bad_request": len(heads)})
    async def is_refused_and_closed(rig: Rig) -> None:
        for head in heads:
            async with rig.client() as client:
                client.send(head)
                answer = await client.answer()
                assert answer.status == status, (head[:80], answer.status)
                assert answer.header("connection") == "close"
                assert await client.eof() == b""
        assert not rig.engine.visits


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\n"
BODY = b'{"model":"m","prompt":"x"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

closes("J6", "over-the-limit", 413, HEAD + b"Content-Length: 99999999\r\n\r\n")
closes(
    "J6",
    "chunks-over-the-limit",
    413,
    HEAD + CHUNKED + b"\r\n" + (b"100000\r\n" + b"x" * 1048576 + b"\r\n") * 65,
)
closes(
    "J6",
    "gzip",
    415,
    *(
        HEAD + LENGTH + b"Content-Encoding: %b\r\n\r\n" % encoding + gzip.compress(b"0" * 10_000)
        for encoding in (b"gzip", b"deflate", b"br", b"identity, gzip")
    ),
)


@case("J6", "more-than-it-says", outcomes={"bad_request": 2})
async def lies_about_its_length(rig: Rig) -> None:
    """What follows a body is the next request, and no request begins with a brace."""
    async with rig.client() as client:
        client.send(HEAD + b"Content-Length: 10\r\n\r\n" + BODY)
        assert (await client.answer()).status == 400
        assert (await client.answer()).status == 400
        assert await client.eof() == b""
    assert not rig.engine.visits


@case("J7", "json-for-a-stream", outcomes={"ok": 1})
async def no_stream_though_asked(rig: Rig) -> None:
    answer = await rig.ask("ok-json", stream=True)
    assert (answer.status, answer.end, answer.header("content-type")) == (200, "clean", "application/json")


@case("J7", "stream-for-json", outcomes={"ok": 1})
async def a_stream_though_not_asked(rig: Rig) -> None:
    whole(await rig.ask("sse-for-plain", stream=False))


@case("J7", "stream-for-json-cut", outcomes={"broken_stream": 1})
async def a_stream_though_not_asked_that_breaks(rig: Rig) -> None:
    assert (await rig.ask("fin", stream=False)).honest


closes(
    "P1",
    "framing",
    400,
    HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    *(
        HEAD + b"Content-Length: " + value + b"\r\n\r\n" + BODY
        for value in (b"26, 26", b"+26", b"-26", b"0x1a", b"2_6", b"", b"026", b"26 26", b"26;", b"1e1")
    ),
    *(
        HEAD + b"Transfer-Encoding: " + value + b"\r\n\r\n" + CHUNKS
        for value in (
            b",chunked",
            b"chunked,",
            b"gzip, chunked",
            b"chunked, chunked",
            b"xchunked",
            b"\x0bchunked",
            b"identity",
            b"chunked;q=1",
            b'"chunked"',
            b"",
        )
    ),
    HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
    HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    b"POST /v1/completions HTTP/1.0\r\nHost: p\r\n" + CHUNKED + b"\r\n" + CHUNKS,
)
closes(
    "P1",
    "chunks",
    400,
    *(
        HEAD + CHUNKED + b"\r\n" + chunks
        for chunks in (
            b"1a;x=y\r\n" + BODY + b"\r\n0\r\n\r\n",
            b"0x1a\r\n" + BODY + b"\r\n0\r\n\r\n",
            b"1a\n" + BODY + b"\r\n0\r\n\r\n",
            b"1a\r\n" + BODY + b"0\r\n\r\n",
            b"-1\r\n\r\n",
            b"fffffffffffffffff\r\n",
            b" 1a\r\n",
            b"1a \r\n",
            b"\r\n",
            b"1a\r\n" + BODY + b"XX0\r\n\r\n",
            b"0\r\nContent-Length: 5\r\n\r\n",
            b"0\r\nHost: x\r\n\r\n",
        )
    ),
)
closes(
    "P2",
    "bytes",
    400,
    b"POST /v1/completions HTTP/1.1\nHost: p\n" + b"Content-Length: 0\n\n\r\n\r\n",
    HEAD + b"X-A: b\r\n folded\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"X-A: b\0c\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"X-A: b\rc\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"X-A : b\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"X-\xff: b\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b": b\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"no colon\r\n" + LENGTH + b"\r\n" + BODY,
    b"POST  /v1/completions HTTP/1.1\r\nHost: p\r\n\r\n",
    b"post /v1/completions HTTP/1.1\r\nHost: p\r\n\r\n",
)
closes(
    "P2", "too-much", 431, HEAD + b"X-A: " + b"y" * 17_000 + b"\r\n\r\n", HEAD + b"X-A: y\r\n" * 70 + b"\r\n"
)
closes(
    "P3",
    "host",
    400,
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: p\r\nHost: p\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: p\r\nHost: q\r\n\r\n",
    *(
        b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
        for host in (
            b"",
            b"a b",
            b"a@b",
            b"x/v1/models?",
            b"a,b",
            b"p:99999",
            b"p:",
            b"[::1",
            b"p#x",
            b"p:80:80",
        )
    ),
)
closes(
    "P4",
    "targets",
    400,
    *(
        b"GET " + target + b" HTTP/1.1\r\nHost: p\r\n\r\n"
        for target in (b"http://evil/v1/models", b"http://a:80@evil/v1/models", b"evil:80", b"*")
    ),
    b"CONNECT evil:80 HTTP/1.1\r\nHost: evil:80\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: p\r\n\r\n",
)


@case("P5", "paths", outcomes={"bad_request": 13})
async def paths_that_lead_elsewhere(rig: Rig) -> None:
    for path in ("/v1/../admin", "/v1/%2e%2e/admin", "/v1%2fmodels", "//v1/models", "/v1\\models",
                 "/v1/models;x", "/v1/models%00", "/v1/models#x", "/%61dmin", "/v1/fleet", "/metrics",
                 "/v1/./models", "/sleep"):  # fmt: skip
        answer = await rig.raw(f"GET {path} HTTP/1.1\r\nHost: p\r\nConnection: close\r\n\r\n".encode())
        assert answer.status == 404, (path, answer.status)
    assert not rig.engine.visits


@case("P6", "injection", outcomes={"ok": 2, "bad_request": 2})
async def names_that_forge(rig: Rig) -> None:
    answer = await rig.raw(request("a", b'{"model":"m\\r\\nx-evil: 1\\u001b[2J","prompt":"x"}'))
    assert (answer.status, answer.header("x-evil")) == (404, None)
    answer = await rig.raw(request("a\x1b[31m", body_of("q")))
    assert answer.status == 400
    for label in ("a b=c d", "x" * 500):
        async with rig.client() as client:
            client.send(request(label, body_of("q"), "X-Forwarded-For: 6.6.6.6", "X-Real-IP: 6.6.6.6",
                                "Forwarded: for=6.6.6.6", "X-Hetlb-Instance: forged"))  # fmt: skip
            answer = await client.answer()
        assert (answer.status, answer.header("x-hetlb-instance")) == (200, "i0")
        assert answer.header("x-request-id") not in (None, label)
    for visit in rig.engine.visits:
        assert b"6.6.6.6" not in visit.head
        assert visit.id.startswith("hetlb-")


@case("P7", "hop-by-hop", outcomes={"ok": 2})
async def nominated_headers(rig: Rig) -> None:
    for nominated in ("authorization, content-length, host, x-hop", "upgrade"):
        label = rig.label()
        async with rig.client() as client:
            client.send(request(label, body_of(label), f"Connection: {nominated}", "X-Hop: 1",
                                "Upgrade: websocket", "Proxy-Authorization: y", "Proxy-Connection: close",
                                "TE: trailers", "HTTP2-Settings: x", "Keep-Alive: 3"))  # fmt: skip
            assert (await client.answer()).status == 200
    for visit in rig.engine.visits:
        assert json.loads(visit.body)["model"] == "m"  # the length was not taken away
        assert {"host", "content-length", "x-request-id"} <= visit.headers.keys()
        gone = {
            "connection",
            "upgrade",
            "proxy-authorization",
            "proxy-connection",
            "te",
            "http2-settings",
            "keep-alive",
        }
        assert not gone & visit.headers.keys()
    assert "x-hop" not in rig.engine.visits[0].headers


@case("P8", "http10", outcomes={"ok": 1})
async def old_clients(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(request("q", body_of("q"), version="1.0"))
        answer = await client.answer()
    assert (answer.status, answer.end, answer.done, answer.tokens("q")) == (200, "closed", True, 4)


closes(
    "P8", "no-http", 400,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/2.0\r\nHost: p\r\n\r\n",
    b"GET /v1/models HTTP/1.2\r\nHost: p\r\n\r\n",
    b"GET /v1/models\r\n\r\n",
)  # fmt: skip
