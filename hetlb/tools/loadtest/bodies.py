"""Request bodies of a load test: prompts as token ids or text, with the prefixes that its rows share.

Seed and salt decide every byte. Two prompts share a beginning if, and only if, their rows do (a session, a
block of `hash_ids`, the same text of a file); another salt shares nothing with any run before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import HASH_BLOCK_TOKENS, spans_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

#: Names the service class of a request.
CLASS_HEADER = "x-hetlb-class"

#: Ids of prompts: four digits each, inside the vocabulary of even the tiny models of `tests/vllm`, and
#: past the low ids where special tokens live.
TOKEN_IDS = range(1000, 2000)

_IDS = [b"%d," % token for token in TOKEN_IDS]
_WORDS = [
    f"{first}{vowel}{last} ".encode()
    for first in "bcdfghjklmnprstvwz"
    for vowel in "aeiou"
    for last in "bcdfghklmnprst"
][: len(TOKEN_IDS)]
#: Tokens of the digest at the beginning of a block; the rest is a slice of text that all blocks share.
_NAME_TOKENS = 4
_POOL_STARTS = 1 << 14


@dataclass
class RequestBodies:
    """Bodies of a plan for `/v1/completions`, `/v1/chat/completions` or, of embeddings, `/v1/embeddings`.

    Prompts have their exact length in token ids or, as `text`, in words of `BYTES_PER_TOKEN` bytes, but for
    rows with a text of their own. With `ignore_eos` every answer has the planned length; without it that
    is the most. With `eos_max_tokens` every `max_tokens` has this value, and `vllm_xargs` gives an emulated
    engine the planned length. A tenant is the `user` of its requests, an adapter their model. Headers name
    the conversation and the tenant of a request, if known.
    """

    model: str
    plan: Sequence[PlannedRequest]
    salt: str
    endpoint: str = COMPLETIONS
    text: bool = False
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    ignore_eos: bool = True
    stream: bool = True
    eos_max_tokens: int | None = None
    session_header: str = ""
    tenant_header: str = ""

    def __post_init__(self) -> None:
        self.text = self.text or self.endpoint == CHAT
        self._units = _WORDS if self.text else _IDS
        self._quotes = (b'"', b'"') if self.text else (b"[", b"]")
        self._unit_bytes = len(self._units[0])
        longest = max((planned.prompt_tokens for planned in self.plan), default=0)
        size = max(longest, self.hash_block_tokens) + _POOL_STARTS
        self._pool = b"".join(random.Random(self.salt).choices(self._units, k=size))
        options: dict[str, object] = {"stream": self.stream}
        if self.stream:
            options["stream_options"] = {"include_usage": True}
        if self.ignore_eos and self.eos_max_tokens is None:
            options["ignore_eos"] = True
        self._options = msgspec.json.encode(options)[1:-1]

    def path(self, planned: PlannedRequest) -> str:
        return self.endpoint if planned.generates else EMBEDDINGS

    def streams(self, planned: PlannedRequest) -> bool:
        """Return True if the answer comes as events: never embeddings."""
        return planned.generates and self.stream

    def headers(self, planned: PlannedRequest) -> dict[str, str]:
        """Return the class, tenant, and the conversation by a digest that the salt decides too."""
        row, found = planned.row, {}
        if row.session and self.session_header:
            digest = hashlib.blake2b(f"{self.salt}/{row.session}".encode(), digest_size=12)
            found[self.session_header] = digest.hexdigest()
        if row.tenant and self.tenant_header:
            found[self.tenant_header] = row.tenant
        if row.service:
            found[CLASS_HEADER] = row.service
        return found

    def body(self, planned: PlannedRequest) -> bytes:
        prompt, row = self.prompt(planned), planned.row
        model = msgspec.json.encode(row.adapter or self.model)
        more = b',"user":%b' % msgspec.json.encode(row.tenant) if row.tenant else b""
        if not planned.generates:
            return b'{"model":%b,"input":%b%b}' % (model, prompt, more)
        # Greedy sampling has one answer: vLLM refuses more.
        more += b',"temperature":0' if row.n == 1 else b',"temperature":1,"n":%d' % row.n
        output = planned.answer_tokens
        if self.eos_max_tokens is not None:
            more += b',"vllm_xargs":{"output_tokens":%d}' % output
            output = self.eos_max_tokens
        head = b'{"model":%b,%b%b' % (model, self._options, more)
        if self.endpoint == CHAT:
            message = b'"messages":[{"role":"user","content":%b}]' % prompt
            return b'%b,"max_completion_tokens":%d,%b}' % (head, output, message)
        return b'%b,"max_tokens":%d,"prompt":%b}' % (head, output, prompt)

    def prompt(self, planned: PlannedRequest) -> bytes:
        row, index = planned.row, planned.index
        if self.text and row.text is not None:
            return msgspec.json.encode(row.text if row.sequences == 1 else [row.text] * row.sequences)
        if row.sequences == 1:
            own = f"session {row.session}" if row.session else f"request {index}"
            return self._made(planned, own)
        several = [self._made(planned, f"request {index}/{i}") for i in range(row.sequences)]
        return b"[%b]" % b",".join(several)

    def _made(self, planned: PlannedRequest, own: str) -> bytes:
        """Return a prompt that continues the spans of its row with text drawn from the name `own`."""
        length = planned.prompt_tokens
        spans = spans_of(planned.row.hash_ids, length, self.hash_block_tokens)
        made = b"".join([self._block(f"block {name}", tokens) for name, tokens in spans])
        made += self._block(own, length - sum(tokens for _, tokens in spans))
        opening, closing = self._quotes
        return b"%b%b%b" % (opening, made[: length * self._unit_bytes - 1], closing)

    def _block(self, name: str, length: int) -> bytes:
        """Make `length` tokens from a name, the same each time; tokens of two names begin differently."""
        digest = hashlib.blake2b(f"{self.salt}/{name}".encode(), digest_size=16).digest()
        units, size = self._units, self._unit_bytes
        head = b"".join(
            units[int.from_bytes(digest[2 * i : 2 * i + 2]) % len(units)] for i in range(_NAME_TOKENS)
        )
        start = int.from_bytes(digest[8:]) % _POOL_STARTS * size
        return (head + self._pool[start : start + length * size])[: length * size]
