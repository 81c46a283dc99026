"""Request bodies for a plan: token-id prompts of exact length, and two ways to fix the length of an answer.

Nothing but the plan and the generator's seed decides a body; no two prompts of one object begin
alike (beyond their first few tokens), so no prefix cache helps any of them. A body is made in a few
microseconds when it is due, so that ten thousand long prompts need no memory beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from hetlb.workload.arrivals import PlannedRequest

#: Ids of prompts: four digits each, inside the vocabulary of even the tiny models of `tests/vllm`, and
#: past the low ids where special tokens live.
TOKEN_IDS = range(1000, 2000)
_BYTES_PER_ID = 5  # four digits and a comma


class Bodies(Protocol):
    """Body and path of each planned request."""

    def path(self, planned: PlannedRequest) -> str:
        """The endpoint."""

    def streams(self, planned: PlannedRequest) -> bool:
        """True if the answer comes as events."""

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""

    def headers(self, planned: PlannedRequest) -> Mapping[str, str]:
        """Headers of this request alone."""


class CompletionBodies:
    """`POST /v1/completions` with token-id prompts.

    The answer to each request has the planned length: with `ignore_eos` and `max_tokens`, which every
    vLLM obeys and every router can read; or, given `eos_max_tokens`, by telling an emulated engine (alone)
    where the model stops, behind one `max_tokens` for all. Draw a new `rng` for every run against the same
    engines, or the second run measures their prefix caches.
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
        self.stream = stream
        self._eos_max_tokens = eos_max_tokens
        # Every prompt is a slice of one random sequence, each from a place of its own.
        longest = max((planned.prompt_tokens for planned in plan), default=0)
        ids = rng.choices(TOKEN_IDS, k=longest + len(plan))
        self._pool = ",".join(map(str, ids)).encode()
        self._starts = dict(
            zip((planned.index for planned in plan), rng.sample(range(len(plan)), len(plan)), strict=True)
        )
        head = {"model": model, "temperature": 0, "stream": stream}
        if stream:
            head["stream_options"] = {"include_usage": True}
        self._head = msgspec.json.encode(head)[:-1]

    def path(self, planned: PlannedRequest) -> str:
        """`/v1/completions`."""
        return "/v1/completions"

    def streams(self, planned: PlannedRequest) -> bool:
        """True if answers are streamed."""
        return self.stream

    def prompt(self, planned: PlannedRequest) -> bytes:
        """The ids of one prompt, separated by commas."""
        start = self._starts[planned.index] * _BYTES_PER_ID
        return self._pool[start : start + planned.prompt_tokens * _BYTES_PER_ID - 1]

    def headers(self, planned: PlannedRequest) -> Mapping[str, str]:
        """None: no request belongs with another."""
        return {}

    def body(self, planned: PlannedRequest) -> bytes:
        """The JSON of one request."""
        output = max(1, planned.output_tokens)
        if self._eos_max_tokens is None:
            length = b'"ignore_eos":true,"max_tokens":%d' % output
        else:
            length = b'"max_tokens":%d,"vllm_xargs":{"output_tokens":%d}' % (self._eos_max_tokens, output)
        return b'%b,%b,"prompt":[%b]}' % (self._head, length, self.prompt(planned))
