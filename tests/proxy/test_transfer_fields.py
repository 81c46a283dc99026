"""Fields that select another request's KV cache reach no engine, and an engine's reach no client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving

from hetlb.balancer.http.transfer_fields import FIELDS, without_transfer_fields

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


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_a_body_without_them_is_not_touched(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert without_transfer_fields(body) is body
