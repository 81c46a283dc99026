"""Reading request traces: CSV files of arrival times and token counts.

Promise: a trace that loads has whole, non-negative token counts and finite arrival times; anything
else is one `TraceError` line with file, line, column and value. Further columns are kept as text.
"""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from hetlb.errors import TraceError

REQUIRED_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
#: A count above this is a mistake, not a prompt.
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `arrival_s` is None in length-only traces."""

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    extra: dict[str, str] = field(default_factory=dict, compare=False)


def read_trace(path: Path) -> list[TraceRow]:
    """Every row of the trace in file order. Raises `TraceError`; a trace without rows is an error too."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return _parse(path, csv.reader(file))
    except OSError as caught:
        raise TraceError(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    except UnicodeDecodeError as caught:
        raise TraceError(f"{path}: expected UTF-8 text: {caught.reason}") from caught
    except csv.Error as caught:
        raise TraceError(f"{path}: expected comma-separated values: {caught}") from caught


def _parse(path: Path, reader: object) -> list[TraceRow]:
    lines = iter(reader)  # type: ignore[call-overload]
    header = [name.strip() for name in next(lines, [])]
    for column in REQUIRED_COLUMNS:
        if column not in header:
            raise TraceError(
                f"{path}: header: expected the columns {','.join(REQUIRED_COLUMNS)}, got {','.join(header)!r}"
            )
    at_arrival, at_input, at_output = (header.index(column) for column in REQUIRED_COLUMNS)
    extra = [(i, name) for i, name in enumerate(header) if name not in REQUIRED_COLUMNS]
    rows: list[TraceRow] = []
    for number, cells in enumerate(lines, start=2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(f"{path}: line {number}: expected {len(header)} columns, got {len(cells)}")
        rows.append(
            TraceRow(
                _arrival(path, number, cells[at_arrival]),
                _tokens(path, number, "input_tokens", cells[at_input]),
                _tokens(path, number, "output_tokens", cells[at_output]),
                {name: cells[i] for i, name in extra},
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
