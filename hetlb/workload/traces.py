"""Request traces: rows of arrival times and token counts, read from CSV files and written to them.

A trace that loads has whole, non-negative token counts and finite arrival times; anything else is one
`TraceError` line with file, line, column and value. Columns without a meaning here are kept as text.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetlb.errors import TraceError

REQUIRED_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
#: A count above this is a mistake, not a prompt.
_MAX_TOKENS = 1 << 31


#: Kinds of requests of a row: text, or vectors of texts (`POST /v1/embeddings`).
ENDPOINTS = ("completions", "embeddings")
#: Further columns with a meaning.
_OPTIONAL = (
    "session_id",
    "turn",
    "hash_ids",
    "prompt",
    "tenant",
    "sequences",
    "n",
    "endpoint",
    "adapter",
    "class",
)
#: A block or a span of a prompt: `NAME`, or `NAME=TOKENS`.
_SPAN = re.compile(r"([\w-]+)(?:=(\d+))?")
#: A request asks for at most so many prompts or samples: more is a mistake.
_MAX_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One request to ask.

    `arrival_s` is None in traces without arrival times. `input_tokens` is the length of each prompt,
    `output_tokens` of each answer. `text` is the prompt where the source has one.

    `session` names the conversation and `turn` its place there, in the words of the source: a prompt holds
    the conversation so far. `hash_ids` name what the prompt begins with, in order: `NAME` is one block of
    tokens (of a size that the reader knows), `NAME=TOKENS` a span of a stated length. Equal leading names
    are equal text.

    `sequences` prompts of this length are sent in one request, `n` answers asked for to each. `tenant` is
    whose request it is, `adapter` the LoRA adapter that it asks for, `service` the name of its class.
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
    extra: dict[str, str] = field(default_factory=dict, compare=False)


def spans_of(hash_ids: Iterable[str], tokens: int, block_tokens: int) -> list[tuple[str, int]]:
    """Names and lengths of the spans that the first `tokens` tokens of a prompt begin with."""
    spans = []
    for each in hash_ids:
        name, equals, length = each.partition("=")
        size = min(int(length) if equals else block_tokens, tokens)
        if size == 0:
            break
        spans.append((name, size))
        tokens -= size
    return spans


def read_trace(path: Path) -> list[Row]:
    """Every row of the trace in file order. Raises `TraceError`; a trace without rows is an error too."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse(path, csv.reader(file))
    except OSError as caught:
        raise TraceError(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    except UnicodeDecodeError as caught:
        raise TraceError(f"{path}: expected UTF-8 text: {caught.reason}") from caught
    except csv.Error as caught:
        raise TraceError(f"{path}: expected comma-separated values: {caught}") from caught


def _parse(path: Path, reader: object) -> list[Row]:
    lines = iter(reader)  # type: ignore[call-overload]
    header = [name.strip() for name in next(lines, [])]
    for column in REQUIRED_COLUMNS:
        if column not in header:
            raise TraceError(
                f"{path}: header: expected the columns {','.join(REQUIRED_COLUMNS)}, got {','.join(header)!r}"
            )
    at_arrival, at_input, at_output = (header.index(column) for column in REQUIRED_COLUMNS)
    optional = {name: i for i, name in enumerate(header) if name in _OPTIONAL}
    extra = [(i, n) for i, n in enumerate(header) if n not in REQUIRED_COLUMNS and n not in _OPTIONAL]
    rows: list[Row] = []
    for number, cells in enumerate(lines, start=2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(f"{path}: line {number}: expected {len(header)} columns, got {len(cells)}")
        rows.append(
            Row(
                _arrival(path, number, cells[at_arrival]),
                _tokens(path, number, "input_tokens", cells[at_input]),
                _tokens(path, number, "output_tokens", cells[at_output]),
                **_optional(path, number, {name: cells[i] for name, i in optional.items()}),
                extra={name: cells[i] for i, name in extra},
            )
        )
    if not rows:
        raise TraceError(f"{path}: expected at least one row after the header, got none")
    return rows


def _arrival(path: Path, number: int, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"{path}: line {number}: arrival_s: expected seconds from the start, got {text!r}")
    return value


def _optional(path: Path, number: int, cells: dict[str, str]) -> dict[str, Any]:
    """The fields of a `Row` that these columns give."""
    found: dict[str, Any] = {
        "text": cells.get("prompt") or None,
        "session": cells.get("session_id", ""),
        "turn": cells.get("turn", ""),
        "tenant": cells.get("tenant", ""),
        "adapter": cells.get("adapter", "").strip(),
        "service": cells.get("class", "").strip(),
        "hash_ids": tuple(each.group() for each in _SPAN.finditer(cells.get("hash_ids", ""))),
    }
    for column in ("sequences", "n"):
        if text := cells.get(column, "").strip():
            found[column] = _count(path, number, column, text)
    if endpoint := cells.get("endpoint", "").strip():
        if endpoint not in ENDPOINTS:
            raise TraceError(
                f"{path}: line {number}: endpoint: expected one of {', '.join(ENDPOINTS)}, got {endpoint!r}"
            )
        found["endpoint"] = endpoint
    return found


def _count(path: Path, number: int, column: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= _MAX_SEQUENCES:
        raise TraceError(
            f"{path}: line {number}: {column}: "
            f"expected a whole number from 1 to {_MAX_SEQUENCES}, got {text!r}"
        )
    return int(text)


def _tokens(path: Path, number: int, column: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < _MAX_TOKENS or (column == "input_tokens" and value == 0):
        least = 1 if column == "input_tokens" else 0
        raise TraceError(
            f"{path}: line {number}: {column}: expected a whole number from {least}, got {text!r}"
        )
    return value
