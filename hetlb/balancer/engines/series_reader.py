"""Reader of a metrics page in the text forms of Prometheus and OpenMetrics: series by name, line by line.

A page may be of any size and come in any pieces; what is kept of it is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

#: Lines of one name that are kept: an engine has one for each of its ranks, priorities and models.
MOST_SERIES: Final = 4096
#: Maximum bytes of a line, and of a name.
_MAX_LINE_BYTES: Final = 64 << 10
_MAX_NAME_BYTES: Final = 128
#: Labels, a value, a time stamp and an exemplar, behind a name.
_SAMPLE: Final = re.compile(
    r'\s*(?:\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\})?\s*([^\s{]\S*)(?:\s+[^\s#]\S*)?\s*(?:\s#.*)?$',
    re.DOTALL,
)

Series = dict[str, dict[str, float]]


class SeriesReader:
    """Values by name and labels (as text) of the lines so far.

    `known` returns the prefix and the name for the name of a line, "" for what is not read. Prefixes are in
    `seen`. A repeated series replaces itself; of several spellings of a name the first is read.
    """

    def __init__(self, known: Callable[[bytes], tuple[str, str]]) -> None:
        self.series: Series = {}
        self.seen: set[str] = set()
        self._known = known
        self._spelled: dict[str, bytes] = {}
        self._rest = b""  # the unfinished line at the end of the input
        self._skips = False  # that line is too long to be read

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the page."""
        end = data.rfind(b"\n")
        if end < 0:
            if not self._skips:
                self._rest += data
                if len(self._rest) > _MAX_LINE_BYTES:
                    self._rest, self._skips = b"", True
            return
        lines = self._rest + data[:end]
        if self._skips:
            cut = lines.find(b"\n")
            lines = lines[cut + 1 :] if cut >= 0 else b""
        self._rest, self._skips = data[end + 1 :], False
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._skips = b"", True
        self._read(lines)

    def end(self) -> None:
        """Read the last line, which may have no end."""
        self._read(self._rest)
        self._rest = b""

    def _read(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            line = line.lstrip() if line[:1] <= b" " else line
            if line[:1] == b"#" or not line:
                continue
            quoted = line[:2] == b'{"'  # its name is the first of the labels
            name = line[2:].partition(b'"')[0] if quoted else line.split(None, 1)[0].partition(b"{")[0]
            if len(name) > _MAX_NAME_BYTES:
                continue
            prefix, known = self._known(name)
            if prefix:
                self.seen.add(prefix)
            if not known or self._spelled.setdefault(known, name) != name:
                continue
            rest = b"{" + line[len(name) + 3 :].lstrip(b", ") if quoted else line[len(name) :]
            found = _SAMPLE.fullmatch(rest.decode("utf-8", "replace"))
            if found is None:
                continue
            labels = (found.group(1) or "").strip()
            kept = self.series.setdefault(known, {})
            if labels in kept or len(kept) < MOST_SERIES:
                kept[labels] = _number(found.group(2))


def _number(text: str) -> float:
    """Return the value of a sample, NaN if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
