"""Metrics pages of one engine, look after look: the groups of lines that are read stand where they stood.

Example: a page of vLLM has 764 lines in 92 groups, each behind its `# TYPE`, and 13 groups are read. The next
page has the same groups, some bytes further on. These alone are read, unless their text is as before. A page
of another process, or with more groups, is read whole. A page may be of any size and come in any pieces: time
is linear in its size, and memory is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.engines.engine_metrics import EnginePage

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


#: Maximum bytes and lines of a page that is held until its end: longer ones are read whole, as they come.
MAX_HELD_BYTES: Final = 128 << 10
_MAX_LINES: Final = 2048
#: Maximum groups of a page with remembered places.
_MAX_GROUPS: Final = 512
#: Maximum bytes of the groups that are remembered.
_MAX_KEPT_BYTES: Final = 16 << 10
#: Maximum bytes of movement between two groups: values have other lengths.
_SLACK_BYTES: Final = 4096
#: Pages with other groups than the one before, after which all pages of an engine are read whole.
_MAX_MISSES: Final = 8
_GROUP: Final = b"\n# TYPE "

#: Groups of other engines' pages, by the number of all groups: pages of one build have the same groups.
_MAX_NUMBERS: Final = 64
_groups_by_number: Final[dict[int, list[tuple[int, bytes]]]] = {}


class LastPage:
    """Groups of an engine's last page that are read: their places, their text, and the sample of it."""

    __slots__ = ("_groups", "_kept", "_misses", "_of", "_sample", "whole")

    def __init__(self) -> None:
        #: Offset and first line of each group that is read, and the number of all groups.
        self._groups: list[tuple[int, bytes]] = []
        self._of = 0
        self._kept: bytes | None = None
        self._sample = EngineSample()
        self._misses = 0
        #: Pages that were read whole.
        self.whole = 0

    def read(self, page: bytes) -> EngineSample:
        """Return the sample of the engine's next page."""
        kept = self._find(page) if self._groups else None
        if kept is None:
            return self._learn(page)
        if kept != self._kept:
            sample = _read(kept).sample()
            if sample.began != self._sample.began:
                return self._learn(page)
            self._sample = sample
            self._kept = kept if len(kept) <= _MAX_KEPT_BYTES else None
        self._misses = 0
        return self._sample

    def _find(self, page: bytes) -> bytes | None:
        """Return the text of the groups where they are expected, None if the page has others."""
        if page.count(_GROUP) != self._of:
            return None
        parts: list[bytes] = []
        moved = low = 0
        for place, line in self._groups:
            size = len(line)
            at = max(low, place + moved)
            if page[at : at + size] != line:
                at = page.find(line, max(low, at - _SLACK_BYTES), at + size + _SLACK_BYTES)
                if at < 0:
                    return None
                moved = at - place
            low = at + size
            parts.append(_group_at(page, low))
        return b"".join(parts)

    def _learn(self, page: bytes) -> EngineSample:
        """Read a whole page, and remember its groups if they alone say the same."""
        self.whole += 1
        whole = _read(page)
        sample = whole.sample()
        self._groups, self._kept, self._sample = [], None, sample
        if sample.began is None or self._misses >= _MAX_MISSES:
            return sample
        self._misses += 1
        self._of = page.count(_GROUP)
        for groups in () if self._of > _MAX_GROUPS else (_groups_by_number.get(self._of, []), None):
            self._groups = _groups_of(page) if groups is None else groups
            kept = self._find(page) if self._groups else None
            if kept is not None and _read(kept).same(whole):
                self._kept = kept if len(kept) <= _MAX_KEPT_BYTES else None
                if len(_groups_by_number) >= _MAX_NUMBERS:
                    _groups_by_number.clear()
                _groups_by_number[self._of] = self._groups
                return sample
        self._groups, self._misses = [], _MAX_MISSES
        return sample


class NextPage:
    """Next metrics page of an engine, fed in pieces of any size."""

    def __init__(self, last: LastPage) -> None:
        self._last = last
        self._held: list[bytes] = []
        self._size = self._lines = 0
        self._page: EnginePage | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the page."""
        if self._page is None:
            self._held.append(data)
            self._size += len(data)
            self._lines += data.count(b"\n")
            if self._size <= MAX_HELD_BYTES and self._lines <= _MAX_LINES:
                return
            data, self._held = b"".join(self._held), []
            self._page = EnginePage()
        self._page.feed(data)

    def sample(self) -> EngineSample:
        """Return the sample of the whole page."""
        return self._last.read(b"".join(self._held)) if self._page is None else self._page.sample()


def _groups_of(page: bytes) -> list[tuple[int, bytes]]:
    """Return the groups of a page that are read: offset and first line of each."""
    groups: list[tuple[int, bytes]] = []
    at = page.find(_GROUP)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        if end < 0:
            break
        line = page[at : end + 1]
        # A group without lines may get some: it is read if its own name is.
        if _read(line[len(_GROUP) :] + _group_at(page, end + 1)).series:
            groups.append((at, line))
        at = page.find(_GROUP, end)
    return groups


def _group_at(page: bytes, start: int) -> bytes:
    """Return the lines of a group that begin at `start`: up to the next comment."""
    end = page.find(b"\n#", start - 1)
    return page[start : end + 1] if end >= start else b"" if end >= 0 else page[start:]


def _read(text: bytes) -> EnginePage:
    page = EnginePage()
    page.feed(text)
    return page
