"""Prompt contents as named spans of tokens, so that shared text is known without any text.

Names come from the columns of a trace: `hash_ids` name what a prompt begins with, and the turns of a session
continue one another (a prompt is the whole conversation so far: the last turn's prompt, its answer, and what
is new). Equal names are equal text; a name has always the same length. A cycled trace shares nothing
with its first pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import TypeAlias

from hetlb.balancer.clients.prompt_keys import FIRST_TOKENS, cuts
from hetlb.tools.workload.rows import Row, spans_of

#: A span of a prompt: its name, and its length in tokens.
Span: TypeAlias = tuple[Hashable, int]

#: Tokens of one of the `hash_ids` in Mooncake's traces; in other traces it is another power of two.
HASH_BLOCK_TOKENS = 512
_BLOCK_TOKENS = (HASH_BLOCK_TOKENS, *(1 << power for power in range(16)))


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The content of one request: the spans that its prompts begin with, and the name of its answer.

    What the spans leave of a prompt is its own. `answer` is None if no later prompt contains the answer;
    `session` is the name of the conversation, "" for none.
    """

    spans: tuple[Span, ...] = ()
    answer: Hashable | None = None
    session: str = ""

    def keys(self, own: Hashable, tokens: int) -> tuple[tuple[str, int | None], ...]:
        """Return the names of the beginning of a prompt of `tokens` tokens, cut as the proxy cuts its text.

        Each comes with its length in tokens, None for all that the session has had so far. `own` names what
        the spans leave.
        """
        found: list[tuple[str, int | None]] = [(f"session:{self.session}", None)] if self.session else []
        digest, start = blake2b(digest_size=12), 0
        spans = (*self.spans, (own, tokens - sum(length for _, length in self.spans)))
        ends = accumulate(length for _, length in spans)
        rest = iter(spans)
        name, length = next(rest)
        for cut in cuts(ends, tokens, FIRST_TOKENS):
            while start + length < cut:
                digest.update(f"{name!r};".encode())
                start += length
                name, length = next(rest)
            at = digest.copy()
            at.update(f"{name!r}:{cut - start}".encode())
            found.append((f"text:{at.hexdigest()}", cut))
        return tuple(found)


#: The content of a request that shares nothing.
UNSHARED = PromptContent()


def block_tokens(rows: Iterable[Row]) -> int:
    """Return the tokens that one of the `hash_ids` stands for.

    They are 512 if each then begins inside its prompt, else the power of two that lets them name the
    prompts whole, else the largest that fits.
    """
    named = [
        (len(row.hash_ids), row.input_tokens)
        for row in rows
        if row.hash_ids and "=" not in "".join(row.hash_ids)
    ]
    most = min(((tokens - 1) // (ids - 1) for ids, tokens in named if ids > 1), default=HASH_BLOCK_TOKENS)
    least = max((-(-tokens // ids) for ids, tokens in named), default=1)
    whole = [size for size in _BLOCK_TOKENS if least <= size <= most]
    return whole[0] if whole else min(HASH_BLOCK_TOKENS, 1 << max(1, most).bit_length() - 1)


def contents_of(rows: Sequence[Row], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> list[PromptContent]:
    """Return the content of every row, in file order.

    A turn no longer than all before it begins a conversation of its own, as does one that begins
    with other `hash_ids`.
    """
    before: dict[str, tuple[tuple[Span, ...], tuple[Span, ...], int]] = {}
    contents = []
    for row in rows:
        # Under an adapter the KV cache is another one; a block cut short by the end of the prompt is not the
        # whole block of that name.
        spans_named = spans_of(row.hash_ids, row.input_tokens, hash_block_tokens)
        head = tuple(((row.adapter, name, length), length) for name, length in spans_named)
        if not row.session:
            contents.append(PromptContent(head) if head else UNSHARED)
            continue
        began_with, spans, tokens = before.get(row.session, (head, (), 0))
        if row.input_tokens <= tokens or (head and head != began_with):
            spans, tokens = (), 0
        if not spans:
            began_with = spans = head
            tokens = sum(length for _, length in head)
        name = (row.session, row.turn)
        if row.input_tokens > tokens:
            spans = (*spans, ((*name, "prompt", tokens), row.input_tokens - tokens))
        answer = (*name, "answer")
        contents.append(PromptContent(spans, answer, row.session))
        output = max(1, row.output_tokens)
        before[row.session] = (began_with, (*spans, (answer, output)), row.input_tokens + output)
    return contents
