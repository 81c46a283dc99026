"""Files of records as people have them: CSV, JSON lines, a JSON list or one JSON document.

Text is UTF-8, packed by gzip or not; lines end with LF or CRLF. A CSV file is separated by commas, semicolons
or tabs. A key is known by its letters and digits alone (`squashed`): `Request tokens`, `request_tokens` and
`RequestTokens` are one. Errors name file, line or entry, key and value.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hetlb.errors import InputError, TraceError, visible
from hetlb.files import MAX_BYTES, size_of
from hetlb.inputs import number_of
from hetlb.tools.workload.input_limit import TextLines, text_lines

#: Largest count of tokens: a larger one is a mistake, not a prompt.
MOST_TOKENS = (1 << 31) - 1
#: Upper bound of other counts.
MOST_COUNT = 1 << 53
#: Largest plausible seconds of an answer, and of any clock.
LONGEST_S, LATEST_S = 1e8, 1e12
#: Seconds of units as they stand in names of keys and beside values.
UNITS_S = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "milli", "millis", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "usec", "micro", "micros", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nano", "nanos", "nanoseconds", "unixnano"), 1e-9),
}
#: Largest number of a clock, in its smallest unit.
_MOST_CLOCK = LATEST_S / 1e-9
#: Numbers of a clock that counts from 1970, from September 2001 to November 2286, in each unit.
_EPOCH_FROM_S, _EPOCH_TO_S = 1e9, 1e10
_EPOCH_UNITS_S = (1.0, 1e-3, 1e-6, 1e-9)
#: Words of a key: `arrival_time_ns`, `arrivalTimeNs`, `Time (ms)`.
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
#: Keys of objects are read to this depth.
_MOST_DEPTH = 6
#: Largest number of columns of a CSV file.
_MOST_COLUMNS = 4096
#: Most characters of a CSV row, of one line or several.
MOST_ROW = 8 << 20
#: Values that take as much memory as a record, beside its own.
_ROW_VALUES = 4
#: Lines of plain text that tell what it is.
_SHOWN_LINES = 1000
_CSV_MARKS = re.compile(r"[,;\t]")


def squashed(key: str) -> str:
    """Return the letters and digits of a key, in lower case."""
    return re.sub(r"[^a-z0-9]", "", key.lower())


@dataclass(frozen=True, slots=True)
class Record:
    """One record: `where` it stands, and its values by key; values of a CSV file are text."""

    where: str
    values: Mapping[str, Any]

    def get(self, key: str | None) -> Any:
        """Return a value, None if it is missing, null or an empty cell."""
        value = None if key is None else self.values.get(key)
        return None if isinstance(value, str) and not value.strip() else value

    def text(self, key: str | None) -> str:
        """Return a value as text, "" if it is missing."""
        value = self.get(key)
        return "" if value is None else str(value)

    def error(self, key: str, expected: str, value: object) -> TraceError:
        """Create the error of one value."""
        return TraceError(f"{self.where}: {key}: expected {expected}, got {value!r:.60}")

    def typed(self, key: str, value: object, kind: type) -> Any:
        """Return a list or an object, an empty one if it is missing. Raises `TraceError`."""
        if value is None:
            return kind()
        if not isinstance(value, kind):
            raise self.error(key, "a list" if kind is list else "an object", value)
        return value

    def number(self, key: str, value: object, words: str, least: float, most: float) -> float:
        """Return a number within bounds. NaN is in none, and a whole number may have any number of digits."""
        found = value
        if isinstance(value, str):
            found = number_of(value)
        if isinstance(found, int | float) and not isinstance(found, bool) and least <= found <= most:
            return float(found)
        bounds = f" from {least:g} to {most:g}" if math.isfinite(most) else ""
        raise TraceError(f"{self.where}: {key}: expected {words}{bounds}, got {value!r:.40}")

    def tokens(self, key: str, value: object, least: int = 0) -> int:
        """Return a number of tokens; `374.0` is one, too."""
        found = self.number(key, value, "tokens", least, MOST_TOKENS)
        if not found.is_integer():
            raise self.error(key, "a whole number of tokens", value)
        return int(found)

    def seconds(self, key: str, value: object, unit_s: float = 1.0, least: float = 0.0) -> float:
        """Return a duration in seconds; by a rounding error it may be below `least`."""
        low, high = least * (1.0 - 1e-6) / unit_s, LONGEST_S / unit_s
        return max(least, self.number(key, value, "seconds", low, high) * unit_s)

    def moment(self, key: str, value: object, unit_s: float) -> float:
        """Return a time in seconds, of a number in units of `unit_s` or of a date (then since 1970)."""
        if isinstance(value, str) and (at_s := date_s(value)) is not None:
            return at_s
        return self.number(key, value, "a time", -LATEST_S / unit_s, LATEST_S / unit_s) * unit_s


def date_s(text: str) -> float | None:
    """Return the seconds since 1970 of an ISO date, None for other text. A date without a zone is in UTC."""
    if not re.match(r"\s*\d{4}-\d\d-\d\d", text):
        return None
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file and its records; in file order.

    `shape` is how they are written, `names` has each key by its squashed form. `begin` is the first line,
    of plain text more.
    """

    path: Path
    begin: str
    shape: str
    records: list[Record]
    names: dict[str, str] = field(default_factory=dict)
    #: Number of list entries or lines other than objects.
    odd: int = 0

    def name(self, *aliases: str) -> str | None:
        """Return the first key of the file among aliases, which are squashed; None if it has none."""
        return next((self.names[alias] for alias in aliases if alias in self.names), None)

    def has(self, *keys: str) -> bool:
        """Return True if the file has all these squashed keys."""
        return all(key in self.names for key in keys)

    @property
    def described(self) -> str:
        """Shape and keys, for a person."""
        names = list(self.names.values())
        if not names:
            return self.shape if self.begin.strip("[] \t\r\n") else "nothing"
        return f"{self.shape} with {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")


def unit_of(file: RecordFile, key: str, usual_s: float | None) -> float:
    """Return the unit of the times under a key, in seconds; of dates 1.

    It stands in the name of the key, or the least time counts from 1970 in one unit alone (2001 to 2286), or
    it is the usual one of the format. Raises `TraceError` if the unit stays open.
    """
    last = _WORDS.findall(key)[-1:]
    if last and last[0].lower() in UNITS_S:
        return UNITS_S[last[0].lower()]
    least, first = math.inf, None
    for record in file.records:
        value = record.get(key)
        if value is None or (isinstance(value, str) and date_s(value) is not None):
            continue
        found = record.number(
            key, value, "a number or a date (2026-01-31 10:00:00)", -_MOST_CLOCK, _MOST_CLOCK
        )
        if found < least:
            least, first = found, record
    if first is None:
        return 1.0
    for size in _EPOCH_UNITS_S:
        if _EPOCH_FROM_S <= least * size < _EPOCH_TO_S:
            return size
    if usual_s is None:
        expected = f"a date, a time since 1970, or a unit in the name ({key}_s, {key}_ms, {key}_ns)"
        raise first.error(key, expected, first.get(key))
    return usual_s


def open_records(path: Path) -> RecordFile:
    """Read a file. Raises `TraceError`; text of another form has no records."""
    with text_lines(path, MOST_ROW) as lines:
        head = lines.head()
        if head not in ("{", "["):
            return _of_csv(path, lines)
        # A document may be one line: the limit of the file bounds it.
        lines.most = sys.maxsize
        return (_of_lines if head == "{" else _of_list)(path, lines)


def _with_records(
    path: Path, begin: str, shape: str, records: list[Record], odd: int = 0, columns: Iterable[str] = ()
) -> RecordFile:
    """Return a file of these records, with `columns` or the keys of all of them."""
    names: dict[str, str] = {}
    for key in columns or dict.fromkeys(key for each in records for key in each.values):
        names.setdefault(squashed(key), key)
    return RecordFile(path, begin, shape, records, names, odd)


def replaced(file: RecordFile, records: list[Record]) -> RecordFile:
    """Return a file with other records."""
    return _with_records(file.path, file.begin, file.shape, records)


def records_at(file: RecordFile, outer: str, inner: str) -> RecordFile:
    """Return the records of `outer[].inner[]` in a document. Raises `TraceError`.

    In a table of lists (`{"successful": [{}], "errored": [{}]}`) a list's name is a key of its records.
    """
    found = []
    for document in file.records:
        for index, each in enumerate(document.typed(outer, document.values.get(outer), list)):
            where = f"{outer}[{index}].{inner}"
            lists = document.typed(f"{outer}[{index}]", each, dict).get(inner)
            named = lists.items() if isinstance(lists, dict) else [("", lists)]
            for name, values in named:
                at = f"{where}.{name}" if name else where
                for number, value in enumerate(document.typed(at, values, list)):
                    own = document.typed(f"{at}[{number}]", value, dict)
                    found.append(Record(f"{file.path}: {at}[{number}]", {name: True, **own} if name else own))
    return replaced(file, found)


def unwrapped(file: RecordFile) -> RecordFile | None:
    """Return the records within the records of a file of no known form, None if there are none.

    They are the one list of objects of a document, and flat.
    """
    records = file.records
    if len(records) == 1:
        lists = [
            value
            for value in records[0].values.values()
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        if len(lists) == 1:
            inner = _numbered(file.path, lists[0])
            return flat(replaced(file, inner))
    found = flat(file)
    return None if found is file else found


def flat(file: RecordFile) -> RecordFile:
    """Return a file with dotted keys in place of objects: `{"usage": {"input": 7}}` has `usage.input`.

    Such a key is also known by its end (`input`), unless a shorter key has that name. A value with its unit
    is one key: `{"latency": {"value": 5, "unit": "ms"}}` has `latency_ms`.
    """
    if not any(isinstance(value, dict) for each in file.records for value in each.values.values()):
        return file
    paths: dict[tuple[str, ...], None] = {}
    records = []
    for each in file.records:
        values = dict(_leaves(each.values, ()))
        paths.update(dict.fromkeys(path for path, value in values.items() if value is not None))
        records.append(Record(each.where, {".".join(path): value for path, value in values.items()}))
    names: dict[str, str] = {}
    for path in sorted(paths, key=len):
        for start in range(len(path)):
            names.setdefault(squashed("".join(path[start:])), ".".join(path))
    return RecordFile(file.path, file.begin, file.shape, records, names, file.odd)


def _leaves(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value.keys() == {"value", "unit"}:
            unit = value["unit"]
            yield (*path, key if unit == "tokens" else f"{key}_{unit}"), value["value"]
        elif isinstance(value, dict) and value and len(path) < _MOST_DEPTH:
            yield (*path, key), True
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def decode_json(where: str, text: str) -> Any:
    """Decode JSON, also with `NaN` and `Infinity` as Python writes them. Raises `TraceError`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as caught:
        raise TraceError(f"{where}: expected JSON: {caught}") from caught


def _decoded(lines: TextLines, where: str, text: str) -> Any:
    """Decode JSON whose values count. Raises `TraceError`."""
    lines.count(_ROW_VALUES + text.count(",") + text.count("[") + text.count("{"))
    return decode_json(where, text)


def _of_lines(path: Path, lines: TextLines) -> RecordFile:
    """Return the objects of JSON lines, or the one document that the text is."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    number, first = next(numbered)
    try:
        value = _decoded(lines, "", first)
    except TraceError:
        document = _decoded(lines, str(path), "\n" * (number - 1) + first + "\n" + lines.rest())
        return _with_records(path, first, "JSON", [Record(str(path), document)])
    lines.most = MAX_BYTES
    records, odd = [], 0
    while True:
        if isinstance(value, dict):
            records.append(Record(f"{path}: line {number}", value))
        else:
            odd += 1
        number, line = next(numbered, (0, ""))
        if not line:
            return _with_records(path, first, "JSON lines", records, odd)
        value = _decoded(lines, f"{path}: line {number}", line)


def _of_list(path: Path, lines: TextLines) -> RecordFile:
    """Return the objects of a JSON list."""
    text = lines.rest()
    values = _decoded(lines, str(path), text)
    records = _numbered(path, values)
    return _with_records(path, text[:4096], "a JSON list", records, len(values) - len(records))


def _numbered(path: Path, values: Iterable[Any]) -> list[Record]:
    numbered = enumerate(values, start=1)
    return [Record(f"{path}: entry {number}", each) for number, each in numbered if isinstance(each, dict)]


def _of_csv(path: Path, lines: TextLines) -> RecordFile:
    """Return the rows of a CSV file, none if the text has no columns."""
    number, first = next((found for found in enumerate(lines) if found[1].strip()), (0, ""))
    marks = _CSV_MARKS.findall(first)
    if not marks:
        begin = [first, *itertools.islice(lines, _SHOWN_LINES)]
        return _with_records(path, "\n".join(begin), "text", [])
    records = []
    columns: list[str] = []
    try:
        for at, cells in _csv_rows(path, itertools.chain((first,), lines), max(",;\t", key=marks.count)):
            if not any(cell.strip() for cell in cells):
                continue
            lines.count(len(cells) + _ROW_VALUES)
            where = f"{path}: line {number + at}"
            if not columns:
                columns = [name.strip() for name in cells]
                if len(columns) > _MOST_COLUMNS:
                    problem = f"expected at most {_MOST_COLUMNS:,} columns, got {len(columns):,}"
                    raise TraceError(f"{where}: {problem}")
                if twice := [name for name in dict.fromkeys(columns) if name and columns.count(name) > 1]:
                    problem = f"expected each column once, got {twice[0]!r:.60} again"
                    raise TraceError(f"{where}: {problem}")
            elif len(cells) != len(columns):
                raise TraceError(f"{where}: expected {len(columns)} columns, got {len(cells)}")
            else:
                records.append(Record(where, dict(zip(columns, cells, strict=True))))
    except csv.Error as error:
        raise TraceError(f"{path}: expected comma-separated values: {error}") from error
    return _with_records(path, first, "CSV", records, columns=columns)


def _csv_rows(path: Path, lines: Iterable[str], mark: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of rows, which may have several lines, with the number of their last one."""
    characters = 0

    def fed() -> Iterator[str]:
        nonlocal characters
        for line in lines:
            characters += len(line)
            if characters > MOST_ROW:
                where = f"{path}: line {rows.line_num + 1}"
                raise TraceError(f"{where}: expected a row of at most {size_of(MOST_ROW)}, got a longer one")
            # A line may end with CR alone.
            yield from io.StringIO(f"{line}\n", newline="") if "\r" in line[:-1] else (f"{line}\n",)

    rows = csv.reader(fed(), delimiter=mark)
    for cells in rows:
        characters = 0
        yield rows.line_num, cells


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

    def number(
        self,
        column: str,
        expected: str = "a number from 0",
        most: float = MOST_COUNT,
        *,
        positive: bool = False,
    ) -> float:
        """Return a number from 0, or above it, to `most`; `expected` describes it in errors."""
        value = number_of(self.cells[column])
        if not 0 <= value <= most or (positive and value == 0):
            raise self.error(column, f"{expected}, at most {most:g}" if value > most else expected)
        return value

    def get(self, column: str) -> str:
        """Return the text of an optional column, "" if missing."""
        return self.cells.get(column, "").strip()

    def error(self, column: str, expected: str) -> InputError:
        """Create the error of a cell."""
        return self._error(f"{self.where}: {column}: expected {expected}, got {self.cells[column][:60]!r}")


def csv_rows(path: Path, columns: Sequence[str], error: type[InputError]) -> Iterator[CsvRow]:
    """Read the rows of a CSV file with at least these columns and one row. Raises `error`."""
    try:
        file = open_records(path)
    except TraceError as caught:
        raise error(str(caught)) from caught
    header = [] if file.shape != "CSV" else list(file.names.values())
    if not set(columns) <= set(header):
        raise error(f"{path}: header: expected the columns {','.join(columns)}, got {','.join(header)!r}")
    if not file.records:
        raise error(f"{path}: expected at least one row after the header, got none")
    yield from (CsvRow(each.where, dict(each.values), error) for each in file.records)


def say(path: Path, note: str) -> None:
    """Print the kind of a file to stderr."""
    print(visible(f"{path}: {note}"), file=sys.stderr)
