"""Shows that no body, however wrong, is more than a 4xx, which names the field where one is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulator.conftest import Start
from emulator.wire import Client
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.tools.emulator.counting import VOCABULARY_TOKENS
from hetlb.tools.emulator.generation import Generation, Reader
from hetlb.tools.openai.requests import ApiError

READER = Reader(("tiny", "alias"), 2048)
KINDS = {"completion": READER.completion, "chat": READER.chat}
GOOD = {
    "completion": {"prompt": "Hello"},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
}


def refusal(kind: str, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        KINDS[kind](body)
    assert caught.value.status in (400, 404)
    assert json.loads(caught.value.body())["error"]["code"] == caught.value.status
    return caught.value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3)
    ),
    max_leaves=8,
)
keys = st.sampled_from(
    [
        *("model", "prompt", "messages", "input", "instructions", "n", "echo", "temperature", "ignore_eos"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "vllm_xargs"),
        *("stream", "stream_options"),
    ]
)


@given(kind=st.sampled_from(list(KINDS)), changes=st.dictionaries(keys, json_values, max_size=5))
@settings(max_examples=examples(150))
def test_any_object_is_a_generation_or_a_refusal(kind: str, changes: dict[str, Any]) -> None:
    """A generation that is accepted fits the context, whatever was asked for."""
    body = json.dumps({**GOOD[kind], **changes}).encode()
    try:
        generation = KINDS[kind](body)
    except ApiError:
        refusal(kind, body)
        return
    assert isinstance(generation, Generation)
    assert generation.model in READER.served
    assert (generation.fields.n or 1) >= 1
    for prompt in generation.prompts:
        output, reason = generation.length(prompt, 0, 2048)
        assert reason in ("length", "stop")
        assert output >= 1
        assert prompt.tokens + output <= 2048


@given(kind=st.sampled_from(list(KINDS)), body=st.binary(max_size=60))
def test_any_bytes_are_refused(kind: str, body: bytes) -> None:
    refusal(kind, body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": [' + b"7," * 1_000_000 + b"7]}",
        b'{"prompt": ' + json.dumps(["x"] * 1025).encode() + b"}",
        b'{"prompt": "x", "max_tokens": 1e400}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "n": 16385}',
        b'{"prompt": "x", "temperature": Infinity}',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf[]",
    ],
    ids=range(10),
)
def test_absurd_bodies(body: bytes) -> None:
    refusal("completion", body)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": []}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"model": 5}, "model"),
        ({"model": "none"}, "model"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [VOCABULARY_TOKENS]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5] * 2049}, "input_tokens"),
        ({"vllm_xargs": {"output_tokens": 0}}, "vllm_xargs"),
    ],
)
def test_one_field_that_is_wrong(changes: dict[str, Any], param: str) -> None:
    error = refusal("completion", json.dumps({**GOOD["completion"], **changes}).encode())
    assert error.param == param
    assert error.message


def test_numbers_in_strings() -> None:
    """As vLLM takes them."""
    for value in ("5", "5.0", '"5"'):
        assert READER.completion(b'{"prompt": "x", "max_tokens": %b}' % value.encode()).fields.cap == 5
    assert READER.completion(b'{"prompt": "x", "stream": "true"}').fields.stream
    assert not READER.completion(b'{"prompt": "x", "stream": null, "n": null}').fields.stream


async def test_the_server_survives_bad_bodies(start: Start) -> None:
    """Ten bad requests and a good one on the same connection."""
    engine = await start()
    async with await Client.connect(engine.url) as client:
        for body in (b"", b"{", b"[]", b"{}", b'{"prompt": 5}', b'{"prompt": "x", "n": -1}', b"[" * 100_000):
            response = await client.ask("POST", "/v1/completions", body)
            assert (response.status, list(response.json)) == (400, ["error"])
        assert (await client.ask("POST", "/v1/completions", {"prompt": "x"})).status == 200
