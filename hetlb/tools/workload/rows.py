"""Rows, one request each, hetlb's own traces of them, and their prompts as named spans of tokens.

Names tell what text prompts share without any text. They come from the columns of a trace: `hash_ids` name
what a prompt begins with, and the turns of a session continue one another (a prompt is the whole conversation
so far: the last turn's prompt, its answer, and what is new). Equal names are equal text; a name always has
the same length. A cycled trace shares nothing with its first pass.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import TypeAlias

from hetlb.balancer.clients.prompt_keys import FIRST_TOKENS, cuts
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.objective import ServiceClass
from hetlb.errors import ConfigError, TraceError
from hetlb.tools.workload.record_file import LATEST_S, MOST_TOKENS, CsvRow, Record, RecordFile

REQUIRED_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
#: Kinds of requests of a row: text, or vectors of texts (`POST /v1/embeddings`).
ENDPOINTS = ("completions", "embeddings")
#: All columns with a meaning.
_KNOWN = {
    *REQUIRED_COLUMNS,
    *("session_id", "turn", "hash_ids", "prompt", "tenant", "sequences", "n", "endpoint", "adapter", "class"),
}
#: A block or a span of a prompt: `NAME`, or `NAME=TOKENS`.
_SPAN = re.compile(r"([\w-]+)(?:=(\d+))?")
#: Most prompts or samples of a request: more is a mistake.
_MAX_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One request to ask.

    `arrival_s` is None in traces without arrival times. `input_tokens` is the length of each of its
    `sequences` prompts, `output_tokens` the length of each of the `n` answers to each. `session` names the
    conversation and `turn` its place there: a prompt holds the conversation so far. `hash_ids` name what the
    prompt begins with, in order: `NAME` is one block of tokens (of a size that the reader knows),
    `NAME=TOKENS` a span of a stated length. `adapter` is the LoRA adapter it asks for, `service` the
    name of its class, `text` the prompt if the source has one. `streamed`: a simulated answer shows its
    first token when it comes, not with its end.
    """

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    text: str | None = None
    session: str = ""
    hash_ids: tuple[str, ...] = ()
    turn: str = ""
    tenant: str = ""
    sequences: int = 1
    n: int = 1
    endpoint: str = "completions"
    adapter: str = ""
    service: str = ""
    streamed: bool = True
    extra: dict[str, str] = field(default_factory=dict, compare=False)


def classes_of(fleet: Fleet, model: str, rows: Iterable[Row]) -> dict[str, ServiceClass]:
    """Return the service classes of a model. Raises `ConfigError` if a row names another one."""
    classes = fleet.service_classes.get(model, {})
    for row in rows:
        if row.service and row.service not in classes:
            known = ", ".join(classes) or f"none, as {model} has no classes in {fleet.path}"
            raise ConfigError(f"--trace: class: expected one of {known}, got {row.service!r}")
    return classes


def spans_of(hash_ids: Iterable[str], tokens: int, block_tokens: int) -> list[tuple[str, int]]:
    """Return the names and lengths of the spans that the first `tokens` tokens of a prompt begin with."""
    spans = []
    for each in hash_ids:
        name, equals, length = each.partition("=")
        size = min(int(length) if equals else block_tokens, tokens)
        if size == 0:
            break
        spans.append((name, size))
        tokens -= size
    return spans


def is_own(file: RecordFile) -> bool:
    """Return True if a file has the columns of hetlb's own traces."""
    return set(REQUIRED_COLUMNS) <= set(file.names.values())


def own_rows(file: RecordFile) -> list[Row]:
    """Return every row of hetlb's own form, in file order. Raises `TraceError`, also without a row."""
    if not file.records:
        raise TraceError(f"{file.path}: expected at least one row after the header, got none")
    return [_row(CsvRow(each.where, _cells(each), TraceError)) for each in file.records]


def _cells(record: Record) -> dict[str, str]:
    """Return the values of a record as cells of a CSV file."""
    return {key: "" if value is None else str(value) for key, value in record.values.items()}


def _row(line: CsvRow) -> Row:
    endpoint = line.get("endpoint") or ENDPOINTS[0]
    if endpoint not in ENDPOINTS:
        raise line.error("endpoint", f"one of {', '.join(ENDPOINTS)}")
    return Row(
        line.number("arrival_s", "seconds from the start", LATEST_S) if line.get("arrival_s") else None,
        line.whole("input_tokens", 1, MOST_TOKENS),
        line.whole("output_tokens", 0, MOST_TOKENS),
        text=line.cells.get("prompt") or None,
        session=line.cells.get("session_id", ""),
        hash_ids=tuple(each.group() for each in _SPAN.finditer(line.get("hash_ids"))),
        turn=line.cells.get("turn", ""),
        tenant=line.cells.get("tenant", ""),
        sequences=line.whole("sequences", 1, _MAX_SEQUENCES) if line.get("sequences") else 1,
        n=line.whole("n", 1, _MAX_SEQUENCES) if line.get("n") else 1,
        endpoint=endpoint,
        adapter=line.get("adapter"),
        service=line.get("class"),
        extra={name: cell for name, cell in line.cells.items() if name not in _KNOWN},
    )


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
