"""Request bodies of a load test: prompts as token ids or text, with the prefixes that its rows share.

Promise: seed and salt decide every byte. Prompts begin alike exactly where their rows say so (a session, a
block of `hash_ids`, the same text of a file), so no prefix cache helps where none would in life; another
salt shares nothing with any run before. Bodies are made when they are due, in microseconds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from hetlb.loadtest.prompts import TOKEN_IDS
from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.datasets import BYTES_PER_TOKEN
from hetlb.workload.traces import Row

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

#: The JSON of one prompt.
Prompt: TypeAlias = Callable[[PlannedRequest], bytes]

_IDS = [b"%d," % token for token in TOKEN_IDS]
_WORDS = [
    f"{first}{vowel}{last} ".encode()
    for first in "bcdfghjklmnprstvwz"
    for vowel in "aeiou"
    for last in "bcdfghklmnprst"
][: len(TOKEN_IDS)]
#: A block begins with a digest of its name in so many tokens: the rest is a slice of what all share.
_NAME_TOKENS = 4
_POOL_STARTS = 1 << 14


class MadePrompts:
    """Prompts of exact length in token ids, or in words of `BYTES_PER_TOKEN` bytes (`text=True`)."""

    def __init__(
        self, rows: Sequence[Row], salt: str, *, text: bool = False, hash_block_tokens: int = 512
    ) -> None:
        """`rows` by index of the planned request; one of the `hash_ids` stands for `hash_block_tokens`."""
        self._rows = rows
        self._salt = salt.encode()
        self._block_tokens = hash_block_tokens
        self._units = _WORDS if text else _IDS
        self._quotes = (b'"', b'"') if text else (b"[", b"]")
        self._unit_bytes = BYTES_PER_TOKEN if text else len(_IDS[0])
        longest = max((row.input_tokens for row in rows), default=0)
        pool = random.Random(salt).choices(self._units, k=max(longest, hash_block_tokens) + _POOL_STARTS)
        self._pool = b"".join(pool)

    def __call__(self, planned: PlannedRequest) -> bytes:
        """The JSON of one prompt, `planned.prompt_tokens` long."""
        row, length = self._rows[planned.index], planned.prompt_tokens
        own = b"request %d" % planned.index
        if row.hash_ids:
            blocks = -(-length // self._block_tokens)
            names = [b"block %b" % name.encode() for name in row.hash_ids[:blocks]]
            made = b"".join(self._block(name, self._block_tokens) for name in names)
            missing = length - len(names) * self._block_tokens
            made += self._block(own, max(0, missing))
        else:
            made = self._block(b"session %b" % row.session.encode() if row.session else own, length)
        opening, closing = self._quotes
        return b"%b%b%b" % (opening, made[: length * self._unit_bytes - 1], closing)

    def _block(self, name: bytes, length: int) -> bytes:
        """So many tokens that the name decides; two names begin differently."""
        digest = hashlib.blake2b(b"%b/%b" % (self._salt, name), digest_size=16).digest()
        units, size = self._units, self._unit_bytes
        head = b"".join(
            units[int.from_bytes(digest[2 * i : 2 * i + 2]) % len(units)] for i in range(_NAME_TOKENS)
        )
        start = int.from_bytes(digest[8:]) % _POOL_STARTS * size
        return (head + self._pool[start : start + length * size])[: length * size]


def given_texts(rows: Sequence[Row], otherwise: Prompt) -> Prompt:
    """The texts of the rows; `otherwise` makes those that have none."""

    def prompt(planned: PlannedRequest) -> bytes:
        text = rows[planned.index].text
        return otherwise(planned) if text is None else msgspec.json.encode(text)

    return prompt


def conversations(rows: Sequence[Row], salt: str, header: str) -> Callable[[PlannedRequest], dict[str, str]]:
    """The header that names a row's conversation, by a digest that is another for another salt."""

    def headers(planned: PlannedRequest) -> dict[str, str]:
        session = rows[planned.index].session
        if not session:
            return {}
        return {header: hashlib.blake2b(f"{salt}/{session}".encode(), digest_size=12).hexdigest()}

    return headers


def _no_headers(_: PlannedRequest) -> dict[str, str]:
    return {}


class RequestBodies:
    """`POST /v1/completions` or `/v1/chat/completions`, streamed, one prompt each.

    With `ignore_eos` every answer has the planned length; without it that is the most it may have.
    `headers` gives each request's own.
    """

    stream = True

    def __init__(
        self,
        model: str,
        prompt: Prompt,
        *,
        path: str = COMPLETIONS,
        ignore_eos: bool,
        headers: Callable[[PlannedRequest], dict[str, str]] = _no_headers,
    ) -> None:
        self.path = path
        self.headers = headers
        self._prompt = prompt
        head = {"model": model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if ignore_eos:
            head["ignore_eos"] = True
        self._head = msgspec.json.encode(head)[:-1]

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""
        output, prompt = max(1, planned.output_tokens), self._prompt(planned)
        if self.path == CHAT:
            message = b'"messages":[{"role":"user","content":%b}]' % prompt
            return b'%b,"max_completion_tokens":%d,%b}' % (self._head, output, message)
        return b'%b,"max_tokens":%d,"prompt":%b}' % (self._head, output, prompt)
