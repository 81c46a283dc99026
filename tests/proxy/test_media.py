"""Images, sounds and videos in a request: found wherever APIs put them, counted in tokens."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.test_proxying import ask, post
from proxy.upstreams import Upstream, plain

from hetlb.balancer.clients.token_estimator import START_TOKENS_PER_MEDIUM, TokenEstimator
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.openai_body import MOST_MEDIA, read_json

Start = Callable[..., Any]
IMAGE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0" * 100_000


def data_url(image: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(image).decode()}"


INLINE = data_url(IMAGE)
BASE64 = b64encode(IMAGE).decode()
CHAT = [
    {"type": "image_url", "image_url": {"url": INLINE}},
    {"type": "image_url", "image_url": {"detail": "high", "url": INLINE}},
    {"type": "image_url", "image_url": INLINE},
    {"type": "input_image", "image_url": INLINE},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
]
REMOTE = [
    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
    {"type": "image_url", "image_url": {"detail": "low", "url": "http://a/b.png"}},
    {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}},
    {"type": "input_image", "image_url": "https://a/b.png"},
    {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
    {"type": "video_url", "video_url": {"url": "https://a/b.mp4"}},
]
OTHER = [
    {"type": "input_audio", "input_audio": {"data": BASE64[200:], "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": data_url(b"RIFF" + b"x" * 5000, "audio/wav")}},
]


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize("part", [*CHAT, *REMOTE, *OTHER])
def test_media_of_every_api_are_found(part: Any, spaces: tuple[str, str]) -> None:
    text = {"type": "text", "text": "what is this?"}
    for kind, key in ((Kind.CHAT, "messages"), (Kind.MESSAGES, "messages"), (Kind.RESPONSES, "input")):
        body = {"model": "m", key: [{"role": "user", "content": [text, part, part]}]}
        call = read_json(kind, json.dumps(body, separators=spaces).encode())
        assert call.media == 2
        assert call.text_bytes < 600


@pytest.mark.parametrize(
    "text",
    [
        "plain [1] text", '"image_url":{"url":"https://a/b.png"}', '{"data": "' + "A" * 100 + '"}',
        'see "data:image/png;base64,AAAA"', "https://a/b.png",
    ],
)  # fmt: skip
def test_text_that_speaks_of_images_is_text(text: str) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": text},
    ]
    call = read_json(Kind.CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert call.media == 0
    assert call.text_bytes == len(json.dumps(messages).encode())


@pytest.mark.parametrize("part", [CHAT[0] | {"image_url": {"url": "data:;base64,"}}, REMOTE[0]])
def test_a_body_full_of_media_costs_the_loop_no_more_than_its_bytes(part: Any) -> None:
    """450,000 of them cost 0.5 s in one turn, as each was counted; engines take a few hundred."""
    messages = [{"role": "user", "content": [part] * (2 * MOST_MEDIA)}]
    call = read_json(Kind.CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert call.media == MOST_MEDIA


@given(st.binary(max_size=200))
def test_nothing_breaks_it(raw: bytes) -> None:
    text = json.dumps([[{"data": raw.decode("latin-1")}]])
    read_json(Kind.CHAT, b'{"messages": %b}' % text.encode())


def test_escaped_slashes() -> None:
    """Some JSON encoders write `\\/`."""
    url = data_url(bytes(range(256)) * 10).replace("/", "\\/")
    body = b'{"messages": [{"content": [{"image_url": "%b"}]}]}' % url.encode()
    assert read_json(Kind.CHAT, body).media == 1


# --- tokens ---


def test_tokens_per_medium_are_learnt() -> None:
    estimator = TokenEstimator()
    for _ in range(50):
        estimator.learn("m", 3000, 0, 1000)  # text of 3 bytes a token
    for _ in range(100):
        estimator.learn("m", 300, 2, 100 + 2 * 1500)
    assert estimator.tokens("m", b"", 300, 1) == pytest.approx(1600, rel=0.05)
    # And the images have not taught it anything about text.
    assert estimator.tokens("m", b"", 3000) == pytest.approx(1000, rel=0.02)
    assert estimator.tokens("other", b"", 400, 1) == 100 + START_TOKENS_PER_MEDIUM


def test_counts_that_cannot_be_teach_nothing() -> None:
    estimator = TokenEstimator()
    for tokens in (0, -1, 1 << 40, 50):
        estimator.learn("m", 400, 1, tokens)
    assert estimator.tokens("m", b"", 400, 1) == 100 + START_TOKENS_PER_MEDIUM


def test_a_tokenizer_is_not_asked_about_images() -> None:
    estimator = TokenEstimator({"m": len})
    assert estimator.tokens("m", b"abcd", 4) == 4
    assert estimator.tokens("m", b"abcd" * 1000, 400, 1) == 100 + START_TOKENS_PER_MEDIUM


async def test_an_image_counts_as_the_engine_counted_earlier_ones(start: Start) -> None:
    """On real sockets: the estimate of a chat with an image converges to the engine's own count."""
    content = [{"type": "text", "text": "what is this?"}, CHAT[0]]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    usage = b'{"choices":[],"usage":{"prompt_tokens":2030,"total_tokens":2040,"completion_tokens":10}}'
    async with Upstream(plain(usage)) as engine:
        proxy = await start(engine.url)
        for _ in range(60):
            await ask(proxy, post(body, path="/v1/chat/completions"))
    first, *_, last = proxy.exchanges
    assert first.estimated_prompt_tokens < 700
    assert last.estimated_prompt_tokens == pytest.approx(2030, rel=0.05)
    assert last.prompt_tokens_total == 2030
