"""Rows: one request to ask each, and hetlb's own traces of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

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
