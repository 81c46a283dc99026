"""Filter that empties the fields about KV transfers in what engines answer.

`transfer_fields.py` finds them. Their names may be escaped, and reads cut anywhere.
"""

from __future__ import annotations

import re
from typing import Final

from hetlb.balancer.http.transfer_fields import LONGEST_NAME_BYTES, NAME

_BLANKS: Final = re.compile(rb"[ \t\r\n]*")
_IN_STRING: Final = re.compile(rb'[^"\\]*')
_IN_NEST: Final = re.compile(rb'[^"\[\]{}]*')

#: Places in an answer: outside a field, behind its name, before its value, in a value that is a string, in
#: one that is an object or a list, in a string there.
_OUTSIDE: Final = 0
_NAMED: Final = 1
_BEFORE: Final = 2
_STRING: Final = 3
_NEST: Final = 4
_NEST_STRING: Final = 5


class TransferFilter:
    """Empties the fields' values in a JSON answer, or in events: `{...}` becomes as many blanks in braces.

    `feed` takes the bytes as they come and returns as many, so no length or frame of the answer changes.
    """

    __slots__ = ("_before", "_depth", "_escaped", "_place")

    def __init__(self, before: bytes = b"") -> None:
        """`before` is the end of what came before: a name may lie across two reads."""
        self._place = _OUTSIDE
        self._before = before
        self._depth = 0
        #: True behind a backslash in a string.
        self._escaped = False

    def feed(self, data: bytes) -> bytes:
        seen = self._before + data
        out = bytearray(seen)
        self._empty(seen, out)
        begin, self._before = len(self._before), b""
        if self._place == _OUTSIDE:
            self._before = seen[-LONGEST_NAME_BYTES:]
        return bytes(out[begin:])

    def _empty(self, seen: bytes, out: bytearray) -> None:
        """Find the values in `seen`, and overwrite each with blanks at the same place in `out`."""
        at, end = 0, len(seen)
        while at < end:
            if self._place == _OUTSIDE:
                found = NAME.search(seen, at)
                if found is None:
                    return
                at, self._place = found.end(), _NAMED
            elif self._place in (_NAMED, _BEFORE):
                blanks = _BLANKS.match(seen, at)
                at = at if blanks is None else blanks.end()
                if at < end:
                    self._place = self._begin(seen[at])
                    at += 1
            else:
                at = self._blank(seen, out, at)

    def _begin(self, byte: int) -> int:
        """Return the next place, by the first byte behind the blanks after a name or a colon."""
        if self._place == _NAMED:
            return _BEFORE if byte == 0x3A else _OUTSIDE
        if byte in b"{[":
            self._depth = 1
            return _NEST
        return _STRING if byte == 0x22 else _OUTSIDE

    def _blank(self, seen: bytes, out: bytearray, at: int) -> int:
        """Blank bytes up to the next special one; return the position behind it."""
        if self._escaped:
            self._escaped = False
            out[at] = 0x20
            return at + 1
        found = (_IN_NEST if self._place == _NEST else _IN_STRING).match(seen, at)
        stop = at if found is None else found.end()
        out[at:stop] = b" " * (stop - at)
        if stop == len(seen):
            return stop
        byte = seen[stop]
        if self._place == _NEST:
            if byte == 0x22:
                self._place = _NEST_STRING
            else:
                self._depth += 1 if byte in b"{[" else -1
                if not self._depth:
                    self._place = _OUTSIDE
        elif byte == 0x5C:
            self._escaped = True
        else:
            self._place = _OUTSIDE if self._place == _STRING else _NEST
        if self._place != _OUTSIDE:
            out[stop] = 0x20
        return stop + 1
