"""Fields that select another request's KV cache reach no engine, and an engine's reach no client."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving
from proxy.upstreams import SSE_HEAD, chunk, plain

from hetlb.balancer.http.transfer_fields import FIELDS, TransferFilter, without_transfer_fields

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
}
STOLEN = json.dumps(PARAMS).encode()
ESCAPED = b"\\u006bv_tran\\u0073fer_params"


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("/v1/completions", b'"prompt":"x"'),
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"x"}]'),
        ("/v1/responses", b'"input":"x"'),
        ("/v1/messages", b'"messages":[{"role":"user","content":"x"}],"max_tokens":3'),
        ("/v1/completions/render", b'"prompt":"x"'),
        ("/inference/v1/generate", b'"token_ids":[1,2]'),
        ("/v1/embeddings", b'"input":"x"'),
        ("/extra", b'"prompt":"x"'),
    ],
)
@pytest.mark.parametrize(
    "field",
    [
        b'"kv_transfer_params":%b' % STOLEN,
        b'"%b" : %b' % (ESCAPED, STOLEN),
        b'"kv_transfer_params":%b,"kv_transfer_params":null' % STOLEN,
        b'"kv_transfer_params":null,"kv_transfer_params":%b' % STOLEN,
        b'"ec_transfer_params":%b' % STOLEN,
        b'"vllm_xargs":{"a":1,"kv_transfer_params":%b}' % STOLEN,
        b'"vllm_xargs":{"%b":"x"}' % ESCAPED,
        b'"sampling_params":{"extra_args":{"kv_transfer_params":%b}}' % STOLEN,
    ],
    ids=["plain", "escaped", "then null", "after null", "encoder", "xargs", "escaped xargs", "extra args"],
)
async def test_no_engine_gets_them(tmp_path: Path, path: str, head: bytes, field: bytes) -> None:
    tables: dict[str, Any] = {"proxy": {"extra_paths": ["/extra"]}}
    async with Engine() as engine, serving(tmp_path, document(engine, **tables)) as running:
        await running.up("i0")
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{running.port}{path}"
            body = b'{"model":"m",%b,%b,"user":"u"}' % (head, field)
            async with session.post(url, data=body, headers={"content-type": "application/json"}) as reply:
                assert reply.status == 200
        sent = json.loads((await engine.asked_for()).body)
    assert not _names(sent) & set(FIELDS)
    assert sent["user"] == "u"
    assert sent.get("vllm_xargs", {"a": 1}) in ({"a": 1}, {})


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "value", ['{"kv_transfer_params":"x"}', '{"\\u006bv_transfer_params":1,"a":NaN}', " " * 600]
)
async def test_no_form_holds_them(tmp_path: Path, value: str) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        async with aiohttp.ClientSession() as session:
            form = aiohttp.FormData()
            form.add_field("model", "m")
            form.add_field("vllm_xargs", value)
            form.add_field("file", b"sound", filename="a.wav")
            url = f"http://127.0.0.1:{running.port}/v1/audio/transcriptions"
            async with session.post(url, data=form) as reply:
                assert reply.status == 400
                assert "vllm_xargs" in await reply.text()
        assert not engine.asked


USAGE = b'"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}'
ANSWER = b'{"id":"c","choices":[{"text":"%b"}],' + USAGE + b"%b}"
TEXT = b'\\"kv_transfer_params\\": {\\"a\\": 1}'
EVENT = b'data: {"id":"c","choices":[{"index":0,"text":"t"}]%b}\n\n'


def leaks(more: bytes = b"") -> list[bytes]:
    return [
        b',"kv_transfer_params":%b%b' % (STOLEN, more),
        b',"%b"\t:\r\n %b%b' % (ESCAPED, STOLEN, more),
        b',"ec_transfer_params":["h"],"kv_transfer_params":%b%b' % (STOLEN, more),
        b',"response":{"kv_transfer_params":%b}%b' % (STOLEN, more),
        b',"kv_transfer_params":"remote_\\"host"%b' % more,
    ]


@pytest.mark.parametrize("field", leaks(), ids=range(5))
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_no_client_gets_an_engines(tmp_path: Path, field: bytes, framing: str) -> None:
    whole = ANSWER % (TEXT, field)
    answer = plain(whole)
    if framing == "chunks":
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = head + b"".join(chunk(whole[at : at + 3]) for at in range(0, len(whole), 3)) + b"0\r\n\r\n"
    async with Engine(answer) as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        reply = await running.ask()
        assert len(reply.body) == len(whole)
        assert b"remote" not in reply.body
        assert reply.json["choices"][0]["text"] == json.loads(b'"%b"' % TEXT)
        assert reply.json["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("field", [*leaks(), *leaks(b',"usage":null')], ids=range(10))
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_no_stream_brings_an_engines(tmp_path: Path, field: bytes, size: int) -> None:
    events = EVENT % b"" * 4 + EVENT % field + EVENT % b"" + EVENT % field + b"data: [DONE]\n\n"
    pieces = [events[at : at + size] for at in range(0, len(events), size)]
    if size == 1 << 20:  # each event in a read of its own: the short way past the watcher
        pieces = [each + b"\n\n" for each in events.split(b"\n\n")[:-1]]
    answer = SSE_HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    async with Engine(answer) as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        reply = await running.ask()
        assert len(reply.body) == len(events.replace(b"\r\n", b"\n"))
        assert b"remote" not in reply.body
        for line in reply.body.split(b"\n\n")[:-2]:
            assert json.loads(line[6:])["choices"][0]["text"] == "t"


async def test_a_sound_is_not_touched(tmp_path: Path) -> None:
    sound = b'"kv_transfer_params":{"a":1}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: %d\r\n\r\n" % len(sound)
    async with Engine(head + sound) as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        assert (await running.ask()).body == sound


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["kv_transfer_params", '"}]', "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values, st.randoms(use_true_random=False), st.booleans())
def test_wherever_reads_are_cut_the_filter_says_the_same(
    value: Any, rng: random.Random, spaced: bool
) -> None:
    data = json.dumps(value, indent=1 if spaced else None).encode()
    cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), 4)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole, cut = TransferFilter(), TransferFilter()
    out = whole.feed(data)
    assert b"".join(map(cut.feed, parts)) == out
    assert json.loads(out) == _emptied(value)


def _emptied(value: Any, ours: bool = False) -> Any:
    if ours and isinstance(value, dict | list):
        return type(value)()
    if ours and isinstance(value, str):
        return " " * (len(json.dumps(value)) - 2)
    if isinstance(value, dict):
        return {name: _emptied(each, name in FIELDS) for name, each in value.items()}
    return [_emptied(each) for each in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_a_body_without_them_is_not_touched(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert without_transfer_fields(body) is body
