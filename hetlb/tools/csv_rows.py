"""CSV rows with typed cells; errors name file, line, column and value."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetlb.errors import InputError
from hetlb.files import read_text
from hetlb.tools.workload.input_limit import max_input_bytes

#: Upper bound of counts.
MOST_COUNT = 1 << 53


class CsvRow:
    """Row of a file; its methods raise the file's error class."""

    __slots__ = ("_error", "cells", "where")

    def __init__(self, where: str, cells: dict[str, str], error: type[InputError]) -> None:
        self.where = where
        self.cells = cells
        self._error = error

    def text(self, column: str) -> str:
        """Return non-empty printable text of a cell."""
        value = self.cells[column].strip()
        if not value or not value.isprintable():
            raise self.error(column, "a name")
        return value

    def whole(self, column: str, least: int, most: int = MOST_COUNT) -> int:
        """Integer from `least` to `most`."""
        text = self.cells[column].strip()
        is_number = text.isascii() and text.isdigit()
        if is_number and (len(text) > len(str(most)) or int(text) > most):
            raise self.error(column, f"a whole number from {least} to {most}")
        if not is_number or int(text) < least:
            raise self.error(column, f"a whole number from {least}")
        return int(text)

    def number(self, column: str, expected: str = "a number from 0", *, positive: bool = False) -> float:
        """Finite number, at least 0 or above it; `expected` describes it in errors."""
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (positive and value == 0):
            raise self.error(column, expected)
        return value

    def get(self, column: str) -> str:
        """Return the text of an optional column, "" if missing."""
        return self.cells.get(column, "").strip()

    def error(self, column: str, expected: str) -> InputError:
        """Create the error of a cell."""
        return self._error(f"{self.where}: {column}: expected {expected}, got {self.cells[column][:60]!r}")


def csv_rows(path: Path, columns: Sequence[str], error: type[InputError]) -> Iterator[CsvRow]:
    """Read the rows of a file with at least these columns and one row. Raises `error`."""
    lines = csv.reader(io.StringIO(read_text(path, error, max_input_bytes()), newline=""))
    try:
        header = [name.strip() for name in next(lines, [])]
        if not set(columns) <= set(header):
            raise error(f"{path}: header: expected the columns {','.join(columns)}, got {','.join(header)!r}")
        found = False
        for cells in lines:
            if not cells:
                continue
            where = f"{path}: line {lines.line_num}"
            if len(cells) != len(header):
                raise error(f"{where}: expected {len(header)} columns, got {len(cells)}")
            found = True
            yield CsvRow(where, dict(zip(header, cells, strict=True)), error)
    except csv.Error as caught:
        raise error(f"{path}: expected comma-separated values: {caught}") from caught
    if not found:
        raise error(f"{path}: expected at least one row after the header, got none")
