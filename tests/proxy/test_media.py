"""Images in a request: found wherever APIs put them, their size read from the header, counted in tokens."""

from __future__ import annotations

import json
import random
import struct
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy.test_proxying import ask, post
from proxy.upstreams import Upstream, plain

from hetlb.image_tokens import NAMED_RULES
from hetlb.proxy.http.endpoints import Kind
from hetlb.proxy.http.media import UNKNOWN_SIZE, find_media, image_size
from hetlb.proxy.http.openai_body import read_json
from hetlb.proxy.token_estimator import START_TOKENS_PER_IMAGE, TokenEstimator

Start = Callable[..., Any]
#: First bytes of images of 321 x 123 pixels, as Pillow 12 writes them.
WEBP = {
    "lossy": "52494646a4000000574542505650382098000000900c009d012a41017b00",
    "lossless": "5249464628000000574542505650384c1b0000002f40811e000750e42ad4",
    "extended": "52494646b800000057454250565038580a000000080000004001007a0000",
}


def png(width: int, height: int) -> bytes:
    return (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0" + b"x" * 50
    )


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\xf7\0\0" + b"x" * 50


def jpeg(width: int, height: int, metadata: int = 0, marker: int = 0xC0) -> bytes:
    """With so many bytes of metadata before the frame header."""
    segments = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"
    while metadata > 0:
        size = min(metadata, 65_000)
        segments += b"\xff\xe1" + struct.pack(">H", size + 2) + random.Random(size).randbytes(size)
        metadata -= size
    frame = b"\xff" + bytes([marker, 0, 17, 8]) + struct.pack(">HH", height, width) + b"\3\1\x22"
    return b"\xff\xd8" + segments + b"\xff\xff\xdb\0\x05abc" + frame + b"x" * 50


def size_of(image: bytes) -> tuple[int, int]:
    encoded = b64encode(image)
    # Wherever it stands in a body.
    assert image_size(b'{"' + encoded + b'"', 2, 2 + len(encoded)) == image_size(encoded, 0, len(encoded))
    return image_size(encoded, 0, len(encoded))


@given(st.integers(1, 65_535), st.integers(1, 65_535), st.integers(0, 400_000))
def test_the_size_is_read_from_the_header(width: int, height: int, metadata: int) -> None:
    for image in (png(width, height), gif(width, height), jpeg(width, height, metadata)):
        assert size_of(image) == (width, height)
    assert size_of(jpeg(width, height, marker=0xC2)) == (width, height)


@pytest.mark.parametrize("kind", WEBP)
def test_webp(kind: str) -> None:
    assert size_of(bytes.fromhex(WEBP[kind]) + b"x" * 50) == (321, 123)


@pytest.mark.parametrize(
    "image",
    [
        b"", b"\x89PNG", png(0, 5), png(1 << 20, 5), b"\xff\xd8\xff", jpeg(5, 5)[:20], b"GIF89a",
        b"\xff\xd8" + b"\xff\xe1\0\2" * 100, b"RIFF\0\0\0\0WEBPVP9 " + b"x" * 50,
        b"BM" + b"x" * 60, b"text" * 20,
    ],
)  # fmt: skip
def test_what_is_no_image_we_know_has_no_size(image: bytes) -> None:
    assert size_of(image) == UNKNOWN_SIZE


@given(st.binary(max_size=200), st.integers(0, 220), st.integers(0, 220))
def test_nothing_breaks_it(raw: bytes, start: int, end: int) -> None:
    image_size(raw, min(start, len(raw)), min(end, len(raw)))
    image_size(b64encode(b"\xff\xd8" + raw), 0, 4 * len(raw))
    find_media(b'[[{"data": "' + raw + b'"}]]')


def test_escaped_slashes() -> None:
    """Some JSON encoders write `\\/`."""
    encoded = b64encode(jpeg(640, 480, 3000)).replace(b"/", b"\\/")
    assert b"\\" in encoded
    assert image_size(encoded, 0, len(encoded)) == (640, 480)


def data_url(image: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(image).decode()}"


INLINE = data_url(png(640, 480) + b"\0" * 100_000)
BASE64 = b64encode(png(640, 480) + b"\0" * 100_000).decode()
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
@pytest.mark.parametrize(
    ("part", "size"),
    [
        *((part, (640, 480)) for part in CHAT),
        *((part, UNKNOWN_SIZE) for part in REMOTE),
        *((part, UNKNOWN_SIZE) for part in OTHER),
    ],
)
def test_media_of_every_api_are_found(part: Any, size: tuple[int, int], spaces: tuple[str, str]) -> None:
    text = {"type": "text", "text": "what is this?"}
    for kind, key in ((Kind.CHAT, "messages"), (Kind.MESSAGES, "messages"), (Kind.RESPONSES, "input")):
        body = {"model": "m", key: [{"role": "user", "content": [text, part, part]}]}
        call = read_json(kind, json.dumps(body, separators=spaces).encode())
        assert call.images == [size, size]
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
    assert call.images == []
    assert call.text_bytes == len(json.dumps(messages).encode())


def test_metadata_is_walked_through_in_so_many_steps_at_most() -> None:
    """What is decoded depends on the header, not on the image; a size behind much metadata is given up."""
    far = jpeg(640, 480, 65_000 * 63)
    assert size_of(far) == UNKNOWN_SIZE
    assert size_of(jpeg(640, 480, 65_000 * 60)) == (640, 480)


# --- tokens ---


def test_a_rule_counts_what_has_a_size_and_learns_for_what_has_none() -> None:
    rule = NAMED_RULES["qwen2.5-vl"]
    estimator = TokenEstimator(image_rules={"m": rule})
    each = rule.tokens(640, 480)
    assert estimator.estimate("m", 400, [(640, 480)] * 3) == 100 + 3 * each
    assert estimator.estimate("m", 400, [UNKNOWN_SIZE]) == 100 + START_TOKENS_PER_IMAGE
    for _ in range(500):
        estimator.learn("m", 400, [(640, 480)], 100 + each)
    assert estimator.estimate("m", 400, [UNKNOWN_SIZE]) == pytest.approx(100 + each, rel=0.02)
    assert estimator.estimate("m", 400) == pytest.approx(100, abs=1)


def test_tokens_per_image_are_learnt_where_no_rule_is_stated() -> None:
    estimator = TokenEstimator()
    for _ in range(50):
        estimator.learn("m", 3000, [], 1000)  # text of 3 bytes a token
    for _ in range(100):
        estimator.learn("m", 300, [(640, 480), UNKNOWN_SIZE], 100 + 2 * 1500)
    assert estimator.estimate("m", 300, [(10, 10)]) == pytest.approx(1600, rel=0.05)
    # And the images have not taught it anything about text.
    assert estimator.estimate("m", 3000) == pytest.approx(1000, rel=0.02)
    assert estimator.estimate("other", 400, [UNKNOWN_SIZE]) == 100 + START_TOKENS_PER_IMAGE


def test_counts_that_cannot_be_teach_nothing() -> None:
    estimator = TokenEstimator(image_rules={"ruled": NAMED_RULES["gemma-3"]})
    for tokens in (0, -1, 1 << 40, 50):
        estimator.learn("m", 400, [UNKNOWN_SIZE], tokens)
        estimator.learn("ruled", 400, [(5, 5)], tokens)
    assert estimator.estimate("m", 400, [UNKNOWN_SIZE]) == 100 + START_TOKENS_PER_IMAGE
    assert estimator.estimate("ruled", 400) == 100


def test_a_tokenizer_is_not_asked_about_images() -> None:
    estimator = TokenEstimator({"m": len}, {"m": NAMED_RULES["gemma-3"]})
    assert estimator.tokens("m", b"abcd", 4) == 4
    assert estimator.tokens("m", b"abcd" * 1000, 400, [(5, 5)]) == 100 + 260


async def test_an_image_counts_by_what_the_engine_said_of_those_before(start: Start) -> None:
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
