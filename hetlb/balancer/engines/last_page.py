"""Metrics pages of one engine, look after look: the groups of lines that are read stand where they stood.

Example: a page of vLLM has 764 lines in 92 groups, each behind its `# TYPE`, and 13 groups are read. The next
page has the same groups, some bytes further on. These alone are read, unless their text is as before. A page
of another process, or with more groups, is read whole.
"""

from __future__ import annotations

from typing import Final

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.engines.engine_metrics import EnginePage

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
