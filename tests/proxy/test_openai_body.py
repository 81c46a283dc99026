"""What a body tells the scheduler, and what bodies are turned away."""

from __future__ import annotations

import json

import pytest

from hetlb.balancer.clients.token_estimator import TokenEstimator, bytes_per_token
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import GateError
from hetlb.balancer.http.openai_body import Call, read_json


def read(kind: Kind = Kind.COMPLETION, /, **fields: object) -> Call:
    return read_json(kind, json.dumps(fields).encode())


BAD = [
    b"", b" ", b"not json", b"[]", b"[1]", b'"text"', b"null", b"true", b"1", b"{", b"}", b"{}x", b'{"a":1,}',
    b"\xef\xbb\xbf\xef\xbb\xbf{}", b'{"model":"\xff"}', b'{"x":"\xff\xfe"}', b'{"model":"\\ud800"}',
    "{}".encode("utf-16"),
    b'{"prompt":NaN}', b'{"x":Infinity}', b'{"max_tokens":1e9999}', b'{"max_tokens":' + b"9" * 5000 + b"}",
    b'{"max_tokens":-1}', b'{"max_tokens":1.5}', b'{"max_tokens":"5.5"}', b'{"max_tokens":100.5}',
    b'{"max_tokens":99999999999}', b'{"max_completion_tokens":-1}', b'{"max_output_tokens":[]}',
    b'{"n":0}', b'{"n":-1}', b'{"n":1000000000}', b'{"n":1.5}', b'{"n":"two"}', b'{"best_of":1000000000}',
    b'{"stream":"si"}', b'{"stream":2}', b'{"model":1}', b'{"model":["m"]}',
    b'{"model":"' + b"m" * 1_000_000 + b'"}', b"[" * 10_000_000, b'{"a":' * 100_000,
    b'{"messages":' + b"[" * 1_000_000, b'{"prompt":' + b'{"a":' * 100_000, b'{"prompt":"a"}\x00',
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=lambda body: repr(body[:40]))
def test_bad_bodies_are_a_400(body: bytes) -> None:
    with pytest.raises(GateError) as caught:
        read_json(Kind.COMPLETION, body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


#: As Pydantic 2 reads them for `int` and for `bool`, as vLLM's classes have it; None: refused.
AS_PYDANTIC: list[tuple[str, int | None, bool | None]] = [
    ("100.0", 100, None), ('"100"', 100, None), ('" 100 "', 100, None), ('"+7"', 7, None),
    ('"7.00"', 7, None), ('"1_000"', 1000, None), ("true", 1, True), ('"007"', 7, None), ('"7\\n"', 7, None),
    ('"\\u00a07"', 7, None), ("1.0", 1, True), ('"1"', 1, True), ("1", 1, True), ("1e2", 100, None),
    ('"1e2"', None, None), ('"100.5"', None, None), ("100.5", None, None), ('"true"', None, True),
    ('"null"', None, None), ('""', None, None), ("1e19", None, None), ("[]", None, None), ("{}", None, None),
    ('"\\u0663"', None, None), ('"0x10"', None, None), ('"1__0"', None, None), ('"_1"', None, None),
    ('"1."', None, None), ('"+ 1"', None, None), ('"On"', None, True), ('"YES"', None, True),
    ('"y"', None, True), ('"t"', None, True), ('"no"', None, False), ('"off"', None, False),
    ('"f"', None, False), ('"n"', None, False), ('" yes"', None, None), ('"2"', 2, None), ("0.5", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "integer", "truth"), AS_PYDANTIC)
def test_numbers_and_truth_values_are_read_as_vllms_classes_read_them(
    value: str, integer: int | None, truth: bool | None
) -> None:
    for name, expected in (("max_tokens", integer), ("n", integer), ("stream", truth)):
        body = b'{"model":"m","%b": %b,"prompt":"x"}' % (name.encode(), value.encode())
        if expected is None:
            with pytest.raises(GateError, match=f"^{name}: "):
                read_json(Kind.COMPLETION, body)
        else:
            call = read_json(Kind.COMPLETION, body)
            assert getattr(call, name) == expected
            assert call.body.startswith(body[:-1])  # the engine reads it itself


def test_the_last_of_two_keys_counts_as_vllm_reads_it() -> None:
    assert read_json(Kind.COMPLETION, b'{"model":"a","max_tokens":1,"model":"b","max_tokens":2}').model == "b"


@pytest.mark.parametrize(
    ("prompt", "prompts", "tokens", "longest"),
    [("text", 1, None, None), (["a", "b"], 2, None, None), (['x", "y', "z"], 2, None, None), ([], 1, None,
    None),
     ([1, 2, 3], 1, 3, 3), ([[1, 2], [3, 4, 5]], 2, 5, 3), ([[7]], 1, 1, 1), (None, 1, None, None)],
)  # fmt: skip
def test_prompts(prompt: object, prompts: int, tokens: int | None, longest: int | None) -> None:
    call = read(prompt=prompt)
    assert (call.prompts, call.prompt_tokens_total, call.longest_tokens) == (prompts, tokens, longest)
    spaced = read_json(Kind.COMPLETION, json.dumps({"prompt": prompt}, indent=1).encode())
    assert (spaced.prompts, spaced.prompt_tokens_total, spaced.longest_tokens) == (prompts, tokens, longest)


def test_caps_and_sequences() -> None:
    assert read(max_tokens=5).max_tokens == 5
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(max_tokens=None).max_tokens is None
    assert read(n=3).n == 3
    assert read(n=None).n == 1


def test_media_do_not_count_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    call = read(Kind.CHAT, messages=[{"role": "user", "content": [image]}])
    assert call.text_bytes < 100


def test_a_million_ids_are_counted() -> None:
    body = b'{"model":"m","prompt":[' + b"1," * 999_999 + b"1]}"
    assert read_json(Kind.COMPLETION, body).prompt_tokens_total == 1_000_000


def test_usage_is_asked_for_only_where_the_client_did_not_choose() -> None:
    def injected(kind: Kind, body: bytes) -> bool:
        call = read_json(kind, body)
        out = call.body
        assert (out != body) is call.hold_usage
        if call.hold_usage:
            assert json.loads(out) == json.loads(body) | {"stream_options": {"include_usage": True}}
            assert out.replace(b',"stream_options":{"include_usage":true}', b"", 1) == body
        return call.hold_usage

    assert injected(Kind.COMPLETION, b'{"prompt":"}","stream":true} \n')
    assert injected(Kind.CHAT, b'{"messages":[],"stream":true}')
    assert injected(Kind.CHAT, b'{"messages":"\\"stream_options\\"","stream":true}')
    assert not injected(Kind.CHAT, b'{"messages":[],"stream":false}')
    assert not injected(Kind.CHAT, b'{"messages":[]}')
    assert not injected(Kind.CHAT, b'{"stream":true,"stream_options":{}}')
    assert not injected(Kind.CHAT, b'{"stream":true,"stream_options":null}')
    assert not injected(Kind.CHAT, b'{"stream":true,"stream\\u005foptions":{"include_usage":true}}')
    assert not injected(Kind.RESPONSES, b'{"stream":true}')
    assert not injected(Kind.CHAT, b'{"stream":true,"messages":"' + b"x" * (256 << 10) + b'"}')


def test_bytes_per_token_are_learnt_and_bounded() -> None:
    sizes = TokenEstimator()
    assert sizes.tokens("m", b"", 400) == 100
    for _ in range(200):
        sizes.learn("m", 3000, 0, 1000)
    assert sizes.tokens("m", b"", 3000) == pytest.approx(1000, rel=0.01)
    assert sizes.tokens("other", b"", 400) == 100
    for tokens, text_bytes in ((0, 5), (-1, 5), (5, 0), (1 << 40, 5)):
        sizes.learn("other", text_bytes, 0, tokens)
    assert sizes.tokens("other", b"", 400) == 100
    assert sizes.tokens("m", b"", 0) == 1
    ratio = bytes_per_token()
    ratio.learn(1 << 40, 1)
    assert ratio.value == 16.0


def filled(unit: bytes, before: bytes, after: bytes, size: int) -> bytes:
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


@pytest.mark.parametrize(
    ("unit", "before", "after", "mib"),
    [
        (b'"a":1,', b"{", b'"model":"m","prompt":"x"}', 30),
        (b'"":0,', b'{"vllm_xargs":{', b'"b":1},"model":"m","prompt":"x"}', 30),
        (b"[],", b'{"model":"m","messages":[', b"1]}", 30),
        (b"1,", b'{"model":"m","prompt":[', b"1]}", 30),
        (b'{"role":""},', b'{"model":"m","messages":[', b"{}]}", 30),
        (b" ", b'{"model":', b'"m","prompt":"x"}', 60),
        (b" \t", b'{"model":', b'"m","prompt":"x"}', 60),
    ],
)
def test_a_body_that_would_hold_the_loop_is_refused(
    unit: bytes, before: bytes, after: bytes, mib: int
) -> None:
    with pytest.raises(GateError, match="too many values") as refused:
        read_json(Kind.CHAT, filled(unit, before, after, mib << 20))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("unit", "before", "after", "mib"),
    [
        (b"A" * 4000, b'{"model":"m","messages":[{"image_url":{"url":"data:image/png;base64,', b'"}}]}', 64),
        (b"Some words, as a text has them.\\n", b'{"model":"m","prompt":"', b'"}', 64),
        (b"12345,", b'{"model":"m","prompt":[', b"1]}", 40),
        (b'{"role":"user","content":"a few words of a turn"},', b'{"model":"m","messages":[', b"{}]}", 16),
        (b'"a":1,', b"{", b'"model":"m","prompt":"x"}', 7),
    ],
)
def test_a_large_body_of_few_values_is_none(unit: bytes, before: bytes, after: bytes, mib: int) -> None:
    assert read_json(Kind.COMPLETION, filled(unit, before, after, mib << 20)).model == "m"
