"""Fields of an engine about KV transfers reach no client."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving
from proxy.test_transfer_fields import ESCAPED, STOLEN, values
from proxy.upstreams import SSE_HEAD, chunk, plain

from hetlb.balancer.http.transfer_fields import FIELDS, TransferWatch

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


@given(values, st.randoms(use_true_random=False), st.booleans())
def test_wherever_reads_are_cut_the_filter_says_the_same(
    value: Any, rng: random.Random, spaced: bool
) -> None:
    data = json.dumps(value, indent=1 if spaced else None).encode()
    cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), 4)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole, cut = TransferWatch(), TransferWatch()
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
