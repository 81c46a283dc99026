"""Request bodies of a load test: prompts as token ids or text, with the prefixes that its rows share.

Seed and salt decide every byte. Prompts begin alike exactly where their rows say so (a session, a
block of `hash_ids`, the same text of a file), so no prefix cache helps where none would in life; another
salt shares nothing with any run before. Bodies are made when they are due, in microseconds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.datasets import BYTES_PER_TOKEN
from hetlb.workload.traces import Row, spans_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

#: Names the service class of a request.
CLASS_HEADER = "x-hetlb-class"

#: Ids of prompts: four digits each, inside the vocabulary of even the tiny models of `tests/vllm`, and
#: past the low ids where special tokens live.
TOKEN_IDS = range(1000, 2000)
#: The JSON of the prompt, or of the list of prompts.
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
    """Prompts of exact length in token ids, or in words of `BYTES_PER_TOKEN` bytes (`text=True`).

    As text, the rows that have a text of their own keep it.
    """

    def __init__(
        self,
        rows: Sequence[Row] | Mapping[int, Row],
        salt: str,
        *,
        text: bool = False,
        hash_block_tokens: int = 512,
    ) -> None:
        """`rows` by index of the planned request; one of the `hash_ids` stands for `hash_block_tokens`."""
        self._rows = rows
        self._salt = salt.encode()
        self._block_tokens = hash_block_tokens
        self._text = text
        self._units = _WORDS if text else _IDS
        self._quotes = (b'"', b'"') if text else (b"[", b"]")
        self._unit_bytes = BYTES_PER_TOKEN if text else len(_IDS[0])
        each = rows.values() if isinstance(rows, Mapping) else rows
        longest = max((row.input_tokens for row in each), default=0)
        pool = random.Random(salt).choices(self._units, k=max(longest, hash_block_tokens) + _POOL_STARTS)
        self._pool = b"".join(pool)

    def __call__(self, planned: PlannedRequest) -> bytes:
        """Return the JSON of the prompts, a list if several, each of `planned.prompt_tokens` tokens."""
        if self._text and (text := self._rows[planned.index].text) is not None:
            return msgspec.json.encode(text if planned.prompts == 1 else [text] * planned.prompts)
        if planned.prompts == 1:
            return self._prompt(planned, b"request %d" % planned.index)
        names = (b"request %d/%d" % (planned.index, i) for i in range(planned.prompts))
        return b"[%b]" % b",".join([self._prompt(planned, name) for name in names])

    def _prompt(self, planned: PlannedRequest, own: bytes) -> bytes:
        row, length = self._rows[planned.index], planned.prompt_tokens
        spans = spans_of(row.hash_ids, length, self._block_tokens)
        made = b"".join([self._block(b"block %b" % name.encode(), tokens) for name, tokens in spans])
        missing = length - sum(tokens for _, tokens in spans)
        if row.session and planned.prompts == 1:
            own = b"session %b" % row.session.encode()
        made += self._block(own, missing)
        opening, closing = self._quotes
        return b"%b%b%b" % (opening, made[: length * self._unit_bytes - 1], closing)

    def _block(self, name: bytes, length: int) -> bytes:
        """Make `length` tokens that the name decides; two names begin differently."""
        digest = hashlib.blake2b(b"%b/%b" % (self._salt, name), digest_size=16).digest()
        units, size = self._units, self._unit_bytes
        head = b"".join(
            units[int.from_bytes(digest[2 * i : 2 * i + 2]) % len(units)] for i in range(_NAME_TOKENS)
        )
        start = int.from_bytes(digest[8:]) % _POOL_STARTS * size
        return (head + self._pool[start : start + length * size])[: length * size]


def own_headers(
    rows: Sequence[Row], salt: str, session_header: str = "", tenant_header: str = ""
) -> Callable[[PlannedRequest], dict[str, str]]:
    """The headers of a row: class, tenant, and its conversation by a digest that the salt decides too."""

    def headers(planned: PlannedRequest) -> dict[str, str]:
        row, found = rows[planned.index], {}
        if row.session and session_header:
            digest = hashlib.blake2b(f"{salt}/{row.session}".encode(), digest_size=12)
            found[session_header] = digest.hexdigest()
        if row.tenant and tenant_header:
            found[tenant_header] = row.tenant
        if row.service:
            found[CLASS_HEADER] = row.service
        return found

    return headers


class RequestBodies:
    """`POST /v1/completions` or `/v1/chat/completions`; of embeddings `/v1/embeddings`.

    With `ignore_eos` every answer has the planned length; without it that is the most it may have. Given
    `eos_max_tokens`, an emulated engine alone is told where the model stops, behind this one `max_tokens`. A
    tenant is the `user` of its requests, an adapter their model. `headers` gives each request's own.
    """

    def __init__(
        self,
        model: str,
        prompt: Prompt,
        *,
        path: str = COMPLETIONS,
        ignore_eos: bool,
        stream: bool = True,
        eos_max_tokens: int | None = None,
        headers: Callable[[PlannedRequest], dict[str, str]] = lambda _: {},
    ) -> None:
        self.headers = headers
        self.stream = stream
        self._eos_max_tokens = eos_max_tokens
        self._path = path
        self.prompt = prompt
        self._model = msgspec.json.encode(model)
        options: dict[str, object] = {"stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        if ignore_eos:
            options["ignore_eos"] = True
        self._options = msgspec.json.encode(options)[1:-1]

    def path(self, planned: PlannedRequest) -> str:
        """The endpoint."""
        return self._path if planned.generates else EMBEDDINGS

    def streams(self, planned: PlannedRequest) -> bool:
        """True if the answer comes as events: never embeddings."""
        return planned.generates and self.stream

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""
        prompt = self.prompt(planned)
        model = msgspec.json.encode(planned.adapter) if planned.adapter else self._model
        more = b"" if planned.tenant is None else b',"user":%b' % msgspec.json.encode(planned.tenant)
        if not planned.generates:
            return b'{"model":%b,"input":%b%b}' % (model, prompt, more)
        # Greedy sampling has one answer: vLLM refuses more.
        more += b',"temperature":0' if planned.n == 1 else b',"temperature":1,"n":%d' % planned.n
        output = planned.answer_tokens
        if self._eos_max_tokens is not None:
            more += b',"vllm_xargs":{"output_tokens":%d}' % output
            output = self._eos_max_tokens
        head = b'{"model":%b,%b%b' % (model, self._options, more)
        if self._path == CHAT:
            message = b'"messages":[{"role":"user","content":%b}]' % prompt
            return b'%b,"max_completion_tokens":%d,%b}' % (head, output, message)
        return b'%b,"max_tokens":%d,"prompt":%b}' % (head, output, prompt)


class CompletionBodies(RequestBodies):
    """Completions of a bare plan: prompts that share no beginning. Draw a new `rng` for every run.

    With that of an earlier run against the same engines their prefix caches would be measured.
    """

    def __init__(
        self,
        model: str,
        plan: Sequence[PlannedRequest],
        rng: random.Random,
        *,
        stream: bool = True,
        eos_max_tokens: int | None = None,
    ) -> None:
        rows = {planned.index: Row(None, planned.prompt_tokens, planned.output_tokens) for planned in plan}
        prompts, ignore = MadePrompts(rows, f"{rng.random()}"), eos_max_tokens is None
        super().__init__(model, prompts, ignore_eos=ignore, stream=stream, eos_max_tokens=eos_max_tokens)
