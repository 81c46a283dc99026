"""Reader of a metrics page in the text forms of Prometheus and OpenMetrics: series by name, line by line.

A page may be of any size and come in any pieces. Time is linear in its size and memory is bounded. Most
lines have unused names; the first bytes of one are enough to skip the others like it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

#: Maximum kept lines of one name; an engine has one for each of its ranks, priorities and models.
MOST_SERIES: Final = 4096
#: Maximum bytes of a line, of a name, and of all kept labels of a page.
MAX_LINE_BYTES: Final = 64 << 10
_MAX_NAME_BYTES: Final = 128
MAX_LABEL_BYTES: Final = 512 << 10
#: Number of first bytes that identify a line to skip, and number of such lines remembered.
START_BYTES: Final = 32
_MOST_STARTS: Final = 4096
#: Possessive repeats alone: none of them gives back what it took, so a text is read once.
_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_VALUE: Final = r"\s*+([^\s{]\S*+)"
_STAMP: Final = r"(?:\s++[^\s#]\S*+)?+"
_EXEMPLAR: Final = r"\s*+(?:#.*+)?+"
#: Labels (128 at most), a value, a time stamp and an exemplar, behind a name.
_SAMPLE: Final = re.compile(
    (
        rf'\s*+(?:\{{([^"{{}}]*+(?:{_STRING}[^"{{}}]*+){{0,128}}+)\}})?+' + _VALUE + _STAMP + _EXEMPLAR
    ).encode(),
    re.DOTALL,
)
#: The name and the string of a label, or whatever else stands there.
_LABEL: Final = re.compile(
    rf'([a-zA-Z_][a-zA-Z0-9_]*+)(?:\s*+=\s*+({_STRING}))?+|{_STRING}|[^"a-zA-Z_]++|"', re.S
)

Series = dict[str, dict[str, float]]
#: First bytes of skipped lines, by the one prefix of all names on the page.
_passed_over: Final[dict[str, set[bytes]]] = {"": set()}


def labels_of(text: str) -> dict[str, str]:
    """Return the labels of a series by name, without the escapes of their values."""
    found = {each[1]: each[2][1:-1] for each in _LABEL.finditer(text) if each[2]}
    if "\\" in text:
        found = {name: _plain(value) for name, value in found.items()}
    return found


def _plain(value: str) -> str:
    """Return a value without its escapes; no engine has a NUL in one."""
    value = value.replace("\\\\", "\0").replace('\\"', '"')
    return value.replace("\\n", "\n").replace("\0", "\\")


class SeriesReader:
    """Values by name and labels (as text) of the lines so far.

    `known` returns the prefix and the name for the name of a line, "" for an unused one. `passed` returns
    the prefix if every line with such first bytes can be skipped, else None. Prefixes are in `seen`. A
    repeated series replaces the earlier one; of several spellings of a name the first is read.
    """

    def __init__(
        self, known: Callable[[bytes], tuple[str, str]], passed: Callable[[bytes], str | None]
    ) -> None:
        self.series: Series = {}
        self.seen: set[str] = set()
        self._known = known
        self._passed = passed
        self._spelled: dict[str, bytes] = {}
        self._starts = _passed_over[""]
        self._label_bytes = 0
        self._rest = bytearray()  # the unfinished line at the end of the input
        self._skips = False  # that line is too long to be read

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the page."""
        end = data.rfind(b"\n")
        if end >= 0:
            lines = bytes(self._rest) + data[:end]
            if self._skips:
                lines = lines.partition(b"\n")[2]
            self._rest, self._skips = bytearray(), False
            self._read(lines)
        if not self._skips:
            self._rest += data[end + 1 :]
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest, self._skips = bytearray(), True

    def end(self) -> None:
        """Read the last line, which may have no end."""
        self._read(bytes(self._rest))
        self._rest = bytearray()

    def _read(self, lines: bytes) -> None:
        starts = self._starts
        for line in lines.split(b"\n"):
            if line[:START_BYTES] not in starts:
                self._line(line)
                starts = self._starts

    def _line(self, line: bytes) -> None:
        """Read a line, or remember its start as one to skip."""
        start = line[:START_BYTES]
        passed = self._passed(start)
        if passed is not None:
            self._see(passed)
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts.add(start)
            return
        line = line.strip()
        if not line or line[:1] == b"#" or len(line) > MAX_LINE_BYTES:
            return
        quoted = line[:2] == b'{"'  # its name is the first of the labels
        name = line[2:].partition(b'"')[0] if quoted else line.split(None, 1)[0].partition(b"{")[0]
        if len(name) > _MAX_NAME_BYTES:
            return
        prefix, known = self._known(name)
        self._see(prefix)
        if not known or self._spelled.setdefault(known, name) != name:
            return
        found = _SAMPLE.fullmatch(b"{" + line[len(name) + 3 :].lstrip(b", ") if quoted else line[len(name) :])
        if found is None:
            return
        labels = (found[1] or b"").strip().decode("utf-8", "replace")
        kept = self.series.setdefault(known, {})
        if labels not in kept:
            if len(kept) >= MOST_SERIES or self._label_bytes + len(labels) > MAX_LABEL_BYTES:
                return
            self._label_bytes += len(labels)
        kept[labels] = _number(found[2])

    def _see(self, prefix: str) -> None:
        if prefix and prefix not in self.seen:
            self.seen.add(prefix)
            self._starts = _passed_over.setdefault(prefix, set()) if len(self.seen) == 1 else set()


def _number(text: bytes) -> float:
    """Return the value of a sample, NaN if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
