"""The requests of the bench as raw bytes, and HTTP chunks taken apart: shared by client and engine.

What is built here is built before a measurement. A request says in its text what the engine shall do
(see mock_engine.py) and comes with what a right answer must hold.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

MODEL = "tiny"
#: Differently beginning prompts, so that routers that compare beginnings have work as in life.
PROMPTS = 997
_WORDS = ("alpha", "bravo", "delta", "hotel", "india", "lima", "oscar", "romeo", "sierra", "tango", "zulu")
_MODES = {"plain": "p", "coalesced": "c", "paced": "s", "bytewise": "b", "digest": "d"}
_BOUNDARY = b"------------------------bench7f3a"


def chat(mode: str, number: int, prompt_bytes: int, chunks: int, pace_us: int, padding: int) -> bytes:
    """The body of a chat completion whose prompt has about `prompt_bytes`."""
    words = random.Random(number)
    text = " ".join(words.choice(_WORDS) for _ in range(min(prompt_bytes, 4000) // 6))
    text = (text * (1 + prompt_bytes // max(1, len(text))))[:prompt_bytes]
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"{_order(mode, number, chunks, pace_us, padding)} {text}"},
        ],
        "max_tokens": max(16, chunks),
        "temperature": 0.7,
    }
    if mode not in ("plain", "digest"):
        body["stream"] = True
    return json.dumps(body, separators=(",", ":")).encode()


def tag(number: int) -> bytes:
    """What the answer to this request repeats."""
    return b"q%07d" % number


def digest(body: bytes) -> bytes:
    """What the engine says of a body that came whole: its length and its CRC-32."""
    return b"%d/%08x" % (len(body), zlib.crc32(body))


def request(body: bytes, path: bytes = b"/v1/chat/completions", kind: bytes = b"application/json") -> bytes:
    """A whole request with a length."""
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (_head(path, kind), len(body), body)


def large(kind: str, size: int) -> tuple[bytes, bytes]:
    """One request at a limit and what its answer must hold. ValueError for a kind that is none.

    `json`: a prompt of `size` bytes; `tokens`: a prompt of `size` token ids; `multipart`: a file of `size`
    bytes; `bytewise-up`: a JSON body of `size` bytes in HTTP chunks of one byte.
    """
    order = _order("digest", 0, 1, 0, 0)
    path, content_type = b"/v1/chat/completions", b"application/json"
    if kind in ("json", "bytewise-up"):
        body = chat("digest", 0, size, 1, 0, 0)
    elif kind == "tokens":
        draw = random.Random(0)
        ids = [draw.randrange(100, 128000) for _ in range(size)]
        body = json.dumps({"model": MODEL, "user": order, "max_tokens": 16, "prompt": ids}).encode()
        path = b"/v1/completions"
    elif kind == "multipart":
        field = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = b"".join(
            (
                field % (_BOUNDARY, b"model", MODEL.encode()),
                field % (_BOUNDARY, b"prompt", order.encode()),
                b"--%b\r\nContent-Disposition: form-data; " % _BOUNDARY,
                b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n',
                random.Random(0).randbytes(1 << 20) * (size >> 20),
                b"\r\n--%b--\r\n" % _BOUNDARY,
            )
        )
        path, content_type = b"/v1/audio/transcriptions", b"multipart/form-data; boundary=" + _BOUNDARY
    else:
        raise ValueError(f"body {kind!r}: expected json, tokens, multipart or bytewise-up")
    if kind == "bytewise-up":
        head = _head(path, content_type)
        return b"%b\r\nTransfer-Encoding: chunked\r\n\r\n%b" % (head, bytewise(body)), digest(body)
    return request(body, path, content_type), digest(body)


def bytewise(content: bytes) -> bytes:
    """A chunked body with every byte in a chunk of its own."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"


def dechunked(body: bytes) -> bytes | None:
    """The content of a chunked body; None if it is not whole and well framed."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            return None
        try:
            size = int(body[at:end].split(b";")[0], 16)
        except ValueError:
            return None
        if size == 0:
            return b"".join(pieces) if body[end:] == b"\r\n\r\n" else None
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size
        if body[at : at + 2] != b"\r\n":
            return None
        at += 2


def _order(mode: str, number: int, chunks: int, pace_us: int, padding: int) -> str:
    return f"bench={_MODES[mode]}:{tag(number).decode()}:{chunks}:{pace_us}:{padding};"


def _head(path: bytes, kind: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\nContent-Type: %b" % (
        path,
        kind,
    )
