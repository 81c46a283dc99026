"""What a prompt begins with, by name: so that who has read it before can be asked again.

Promise: names are digests or what the client itself called its conversation; no text of a prompt is kept. Of
a text the first 1, 2, 4, ... 64 KiB have a name each: the next turn of a conversation begins with what the
last one was, up to its closing bracket.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

_FIRST_BYTES: Final = 1 << 10
_LAST_BYTES: Final = 64 << 10
_SESSION = re.compile(rb"[\x21-\x7e]{1,256}")


def prefix_keys_of(
    session: bytes | None, text: bytes, tokens: int, owner: str | None = None
) -> tuple[tuple[str, int | None], ...]:
    """Names with their tokens (None: the whole conversation) for a prompt of `tokens` tokens.

    `session` is the value of the session header; one that is no plain word is taken for missing. Names of
    different owners differ: where a prompt is sent must not tell a tenant that another has sent it.
    """
    found: list[tuple[str, int | None]] = []
    if session is not None and _SESSION.fullmatch(session) is not None:
        name = session.decode("ascii")
        found.append((f"session:{name}" if owner is None else f"session:{name} of {owner}", None))
    length = len(text)
    if length >= _FIRST_BYTES:
        digest = blake2b(b"" if owner is None else owner.encode() + b"\0", digest_size=12)
        done, size = 0, _FIRST_BYTES
        while size <= length and size <= _LAST_BYTES:
            digest.update(text[done:size])
            found.append((f"text:{digest.hexdigest()}", tokens * size // length))
            done, size = size, size * 2
    return tuple(found)
