"""Features of a request body: fields that not every request has, and media. A server may refuse some."""

from __future__ import annotations

from typing import Final

import msgspec

from hetlb.errors import NOT_JSON

#: Longest body read for them, most features of one, and longest name.
_MAX_READ_BYTES: Final = 1 << 20
_MOST_FEATURES: Final = 16
_MOST_CHARACTERS: Final = 64
#: Fields that each engine takes.
_COMMON: Final = frozenset({
    "model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "temperature", "top_p", "stop", "seed", "user", "presence_penalty",
    "frequency_penalty", "metadata",
})  # fmt: skip
#: Media by the field that holds them; in text the quotes would be escaped.
_MEDIA: Final = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"input_image"', b'"audio_url"')
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def features_of(body: bytes) -> tuple[str, ...]:
    """Return the features of a body; none of a form or a very long body."""
    if len(body) > _MAX_READ_BYTES or body[:1] != b"{":
        return ()
    try:
        names = _object.decode(body).keys() - _COMMON
    except NOT_JSON:
        return ()
    found = [each for each in names if len(each) <= _MOST_CHARACTERS]
    found += [each.strip(b'"').decode() for each in _MEDIA if body.find(each) >= 0]
    return tuple(sorted(found)[:_MOST_FEATURES])
