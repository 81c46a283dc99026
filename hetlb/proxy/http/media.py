"""Images, sounds and videos in a JSON body: how many bytes are no text, and the sizes of images in pixels.

A size is read from the header of an inline image (PNG, JPEG, GIF, WebP): of its base64 only what holds the
header is decoded, at most `_MOST_SEGMENTS` pieces of a JPEG. What has no size here (a remote URL, a sound,
another format) is counted as `UNKNOWN_SIZE`.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from typing import Final, TypeAlias

#: Width and height in pixels.
ImageSize: TypeAlias = tuple[int, int]

UNKNOWN_SIZE: Final[ImageSize] = (0, 0)
#: Images of one request that are looked at one by one; all further ones are of unknown size.
_MOST_IMAGES: Final = 256
#: Maximum side of an image, in pixels.
_LONGEST_SIDE: Final = 1 << 17
#: Metadata before the frame header of a JPEG, in segments of 64 KiB at most.
_MOST_SEGMENTS: Final = 64
#: With an escaped `/` in it, so much of the base64 is unescaped.
_UNESCAPED_BYTES: Final = 64 << 10

#: Parts of a content, and the beginning of a string in one: all requests with media have them.
_PARTS: Final = re.compile(rb"\[\s*\{")
_HINT: Final = re.compile(rb'"(?:data|http)')
#: A string that is a data URL, or base64 of an Anthropic image source or of `input_audio`. In text the quotes
#: would be escaped, so no prompt can look like it.
_INLINE: Final = re.compile(
    rb'(?<!\\)"data:[^"]{0,100};base64,([A-Za-z0-9+/=\\]*)"|"data":\s*"([A-Za-z0-9+/=\\]{64,})"'
)
_REMOTE: Final = re.compile(
    rb'"(?:image|video|audio)_url":\s*(?:\{[^{}"]{0,40}(?:"detail":\s*"[a-z]{0,10}",\s*)?"url":\s*)?"https?:'
    rb'|"type":\s*"url",\s*"url":\s*"https?:'
)


def find_media(raw: bytes) -> tuple[int, list[ImageSize]]:
    """Bytes of `raw` that are encoded media, and the size of each medium, remote ones too.

    `raw` is JSON: the messages or the input of a request.
    """
    if raw.find(b"[", 1) < 0 or _PARTS.search(raw, 1) is None or _HINT.search(raw) is None:
        return 0, []
    encoded = 0
    sizes: list[ImageSize] = []
    for found in _INLINE.finditer(raw):
        start, end = found.span(found.lastindex or 1)
        encoded += found.end() - found.start()
        sizes.append(image_size(raw, start, end) if len(sizes) < _MOST_IMAGES else UNKNOWN_SIZE)
    sizes += [UNKNOWN_SIZE] * sum(1 for _ in _REMOTE.finditer(raw))
    return encoded, sizes


def image_size(raw: bytes, start: int, end: int) -> ImageSize:
    """Size of the image whose base64 is `raw[start:end]`, `UNKNOWN_SIZE` if its header is none we know."""
    if raw.find(b"\\", start, min(end, start + _UNESCAPED_BYTES)) >= 0:
        raw = raw[start : min(end, start + _UNESCAPED_BYTES)].replace(b"\\/", b"/")
        start, end = 0, len(raw)
    head = _decoded(raw, start, end, 0, 32)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    elif head.startswith((b"GIF87a", b"GIF89a")):
        width, height = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        width, height = _webp_size(head)
    elif head.startswith(b"\xff\xd8"):
        width, height = _jpeg_size(raw, start, end)
    else:
        return UNKNOWN_SIZE
    if 0 < width <= _LONGEST_SIDE and 0 < height <= _LONGEST_SIDE:
        return width, height
    return UNKNOWN_SIZE


def _webp_size(head: bytes) -> ImageSize:
    """Size of a WebP file (RFC 9649): lossy, lossless or extended."""
    kind = head[12:16]
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    if kind == b"VP8L" and head[20:21] == b"\x2f":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X" and len(head) >= 30:
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return UNKNOWN_SIZE


def _jpeg_size(raw: bytes, start: int, end: int) -> ImageSize:
    """Size of a JPEG (ITU T.81): that of its frame header, found from segment to segment."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        segment = _decoded(raw, start, end, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            return UNKNOWN_SIZE
        marker = segment[1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(segment[7:9], "big"), int.from_bytes(segment[5:7], "big")
        else:
            at += 2 + int.from_bytes(segment[2:4], "big")
    return UNKNOWN_SIZE


def _decoded(raw: bytes, start: int, end: int, at: int, count: int) -> bytes:
    """Up to `count` bytes from byte `at` on of what `raw[start:end]` encodes; b"" if it is no base64."""
    first = start + at // 3 * 4
    last = min(end, start + -(-(at + count) // 3) * 4)
    text = raw[first:last].rstrip(b"=")
    text = text[: len(text) - (len(text) % 4 == 1)]
    try:
        decoded = b64decode(text + b"=" * (-len(text) % 4))
    except (Base64Error, ValueError):
        return b""
    return decoded[at % 3 : at % 3 + count]
