"""Reader of a metrics page in Prometheus' text form: the series of some names, line by line.

A page may be of any size and come in any pieces; what is kept of it is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

#: Lines of one name that are kept: an engine has one for each of its ranks, priorities and models.
MOST_SERIES: Final = 4096
#: Maximum bytes of a line.
_MOST_LINE: Final = 64 << 10

Series = dict[str, dict[str, float]]


class SeriesReader:
    """Values by name and labels (as text) of the names that are `wanted`, of what was fed.

    `prefixes` that begin a line are in `seen`. A repeated series replaces itself.
    """

    def __init__(self, wanted: Iterable[str], prefixes: Iterable[str]) -> None:
        self.series: Series = {}
        self.seen: set[str] = set()
        self._wanted = frozenset(name.encode() for name in wanted)
        self._prefixes = [each.encode() for each in prefixes]
        self._rest = b""  # the unfinished line at the end of what was fed
        self._skips = False  # that line is too long to be read

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the page."""
        end = data.rfind(b"\n")
        if end < 0:
            if not self._skips:
                self._rest += data
                if len(self._rest) > _MOST_LINE:
                    self._rest, self._skips = b"", True
            return
        lines = self._rest + data[:end]
        if self._skips:
            cut = lines.find(b"\n")
            lines = lines[cut + 1 :] if cut >= 0 else b""
        self._rest, self._skips = data[end + 1 :], False
        if len(self._rest) > _MOST_LINE:
            self._rest, self._skips = b"", True
        self._read(lines)

    def end(self) -> None:
        """Read the last line, which may have no end."""
        self._read(self._rest)
        self._rest = b""

    def _read(self, lines: bytes) -> None:
        for prefix in self._prefixes:
            if lines.startswith(prefix) or lines.find(b"\n" + prefix) >= 0:
                self.seen.add(prefix.decode())
        wanted = self._wanted
        for line in lines.split(b"\n"):
            brace = line.find(b"{")
            name = line[:brace] if brace >= 0 else line.split(None, 1)[0] if line[:1] > b" " else b""
            if name not in wanted:
                name = name.rstrip()
                if name not in wanted:
                    continue
            found = _sample(line[len(name) :].decode("utf-8", "replace"))
            if found is None:
                continue
            labels, value = found
            kept = self.series.setdefault(name.decode(), {})
            if labels in kept or len(kept) < MOST_SERIES:
                kept[labels] = value


def _sample(rest: str) -> tuple[str, float] | None:
    """Return labels and value (NaN if it is no number) of what follows a name; None where it is no sample."""
    labels, begun = "", rest.lstrip()
    if begun.startswith("{"):
        labels, _, rest = begun[1:].rpartition("}")
        labels = labels.strip()
    fields = rest.split()
    if not rest[:1].isspace() or not 1 <= len(fields) <= 2:  # a time stamp may follow
        return None
    try:
        return labels, float(fields[0])
    except ValueError:
        return labels, math.nan
