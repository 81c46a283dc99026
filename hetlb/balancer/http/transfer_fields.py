"""Fields that select KV and encoder caches of other requests: only hetlb sets them, no client sees them.

They are removed from what clients send, in `vllm_xargs` and `sampling_params.extra_args` too, and emptied in
what engines answer, however their names are escaped and wherever reads are cut.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from hetlb.errors import NOT_JSON

FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
#: Objects in which an engine looks for them too.
_HOLDERS: Final = ("vllm_xargs", "sampling_params", "extra_args")
#: Depth of the deepest place of a field: `sampling_params.extra_args`.
_DEEPEST_LEVEL: Final = 2
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def without_transfer_fields(body: bytes, depth: int = 0) -> bytes:
    """Return a JSON object without these fields; the same bytes without any. Raises `msgspec.DecodeError`."""
    fields = _object.decode(body)
    changed = False
    for name in FIELDS:
        changed = fields.pop(name, None) is not None or changed
    for name in _HOLDERS if depth < _DEEPEST_LEVEL else ():
        held = bytes(fields.get(name, b""))
        if held[:1] == b"{" and (kept := without_transfer_fields(held, depth + 1)) != held:
            fields[name] = msgspec.Raw(kept)
            changed = True
    return msgspec.json.encode(fields) if changed else body


def has_transfer_fields(value: bytes) -> bool:
    """Return True if a form's value, a JSON object, has such a field, or cannot be read."""
    try:
        return not _object.decode(value).keys().isdisjoint(FIELDS)
    except NOT_JSON:
        return True


def _escaped(name: str) -> str:
    """Return the pattern of a name of which any character may be escaped."""
    return "".join(
        rf"(?:{each}|\\u00{ord(each) >> 4}[{ord(each) & 15:x}{ord(each) & 15:X}])" for each in name
    )


_NAME: Final = re.compile(f'"(?:{"|".join(map(_escaped, FIELDS))})"'.encode())
#: Bytes of the longest name in quotes, every character escaped.
_REACH_BYTES: Final = 2 + 6 * max(map(len, FIELDS))
#: End of every name.
_COMMON: Final = b"_transfer_params"
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


def harmless(data: bytes) -> bool:
    """Return True if every field in an answer is `null`, as most of vLLM's are; False: take a closer look."""
    at = data.find(_COMMON)
    while at >= 0:
        at += len(_COMMON)
        if data[at : at + 6] != b'":null':
            return False
        at = data.find(_COMMON, at)
    return data.find(b"\\u00") < 0


class TransferFilter:
    """Empties the fields' values in a JSON answer, or in events: `{...}` becomes as many blanks in braces.

    `feed` takes the bytes as they come and returns as many, so no length or frame of the answer changes.
    """

    __slots__ = ("_before", "_depth", "_escaped", "_place")

    def __init__(self) -> None:
        self._place = _OUTSIDE
        #: End of what came before: a name may lie across two reads.
        self._before = b""
        self._depth = 0
        #: True behind a backslash in a string.
        self._escaped = False

    def feed(self, data: bytes) -> bytes:
        if self._place == _OUTSIDE:
            seen = self._before + data if self._before else data
            if harmless(seen):
                self._before = seen[-_REACH_BYTES:]
                return data
        else:
            seen = data
        start = len(seen) - len(data)
        out = bytearray(seen)
        self._empty(seen, out)
        self._before = seen[-_REACH_BYTES:] if self._place == _OUTSIDE else b""
        return bytes(out[start:])

    def _empty(self, seen: bytes, out: bytearray) -> None:
        """Blank the values that are in `seen`, in `out`."""
        at, end = 0, len(seen)
        while at < end:
            if self._place == _OUTSIDE:
                found = _NAME.search(seen, at)
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
        """Return the place behind the first byte after a name's or a colon's blanks."""
        if self._place == _NAMED:
            return _BEFORE if byte == 0x3A else _OUTSIDE
        if byte in b"{[":
            self._depth = 1
            return _NEST
        return _STRING if byte == 0x22 else _OUTSIDE

    def _blank(self, seen: bytes, out: bytearray, at: int) -> int:
        """Blank up to the next byte that matters; the position behind it."""
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
