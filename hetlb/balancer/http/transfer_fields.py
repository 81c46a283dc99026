"""Fields that select KV and encoder caches of other requests: only hetlb sets them, no client sees them.

They are removed from what clients send, in `vllm_xargs` and `sampling_params.extra_args` too, and emptied in
what engines answer, however their names are escaped and wherever reads are cut.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from hetlb.balancer.http.http1 import GateError

if TYPE_CHECKING:
    from hetlb.balancer.http.transfer_filter import TransferFilter

FIELDS: Final = ("kv_transfer_params", "ec_transfer_params")
#: Objects in which an engine looks for them too.
_HOLDERS: Final = ("vllm_xargs", "sampling_params", "extra_args")
#: Depth of the deepest place of a field: `sampling_params.extra_args`.
_DEEPEST_LEVEL: Final = 2
#: Bytes of an object that is written anew, beside values known to be few; a larger one has at most
#: `MOST_QUOTES`.
MAX_REWRITTEN_BYTES: Final = 256 << 10
MOST_QUOTES: Final = 1 << 17
#: End of every name.
_COMMON: Final = b"_transfer_params"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def may_hold_fields(held: bytes) -> bool:
    """Return False if a JSON object has none of these fields, however their names are escaped."""
    # From its end: that search is three times as fast.
    return held.rfind(_COMMON) >= 0 or (held.find(b"\\") >= 0 and held.find(b"\\u00") >= 0)


def fields_of(body: bytes, known_bytes: int = 0) -> dict[str, msgspec.Raw]:
    """Return all fields of a JSON object that is to be written anew.

    `known_bytes` of it belong to a few values. Raises `GateError` (400) if the rest may have very many
    fields: each is an object of its own here.
    """
    if len(body) - known_bytes > MAX_REWRITTEN_BYTES:
        quotes = at = 0
        while at < len(body):
            quotes += body.count(b'"', at, at + MAX_REWRITTEN_BYTES)
            at += MAX_REWRITTEN_BYTES
            if quotes > MOST_QUOTES:
                raise GateError(400, "The body has too many fields to remove or rename one of them.")
    return _object.decode(body)


def without_transfer_fields(body: bytes, known_bytes: int = 0, depth: int = 0) -> bytes:
    """Return a JSON object without these fields, unchanged if it has none.

    `known_bytes` of it belong to values that hold none. Raises `msgspec.DecodeError`, `GateError` (400).
    """
    fields = fields_of(body, known_bytes)
    changed = False
    for name in FIELDS:
        changed = fields.pop(name, None) is not None or changed
    for name in _HOLDERS if depth < _DEEPEST_LEVEL else ():
        held = bytes(fields.get(name, b""))
        if held[:1] != b"{" or not may_hold_fields(held):
            continue
        if (kept := without_transfer_fields(held, 0, depth + 1)) != held:
            fields[name] = msgspec.Raw(kept)
            changed = True
    return msgspec.json.encode(fields) if changed else body


def _escaped(name: str) -> str:
    """Return the pattern of a name with any character escaped or not."""
    return "".join(
        rf"(?:{each}|\\u00{ord(each) >> 4}[{ord(each) & 15:x}{ord(each) & 15:X}])" for each in name
    )


NAME: Final = re.compile(f'"(?:{"|".join(map(_escaped, FIELDS))})"'.encode())
#: Bytes of the longest name in quotes, every character escaped.
LONGEST_NAME_BYTES: Final = 2 + 6 * max(map(len, FIELDS))


def harmless(data: bytes) -> bool:
    """Return True if every field in an answer is `null`, as most of vLLM's are; False: take a closer look."""
    at = data.find(_COMMON)
    while at >= 0:
        at += len(_COMMON)
        if data[at : at + 6] != b'":null':
            return False
        at = data.find(_COMMON, at)
    return data.find(b"\\u00") < 0


class TransferWatch:
    """Watches a JSON answer, or events, for fields that say something, and has their values emptied.

    `feed` takes the bytes as they come and returns as many, so no length or frame of the answer changes.
    """

    __slots__ = ("_before", "_filter")

    def __init__(self) -> None:
        #: End of what came before: a name may lie across two reads.
        self._before = b""
        self._filter: TransferFilter | None = None

    def feed(self, data: bytes) -> bytes:
        if self._filter is None:
            seen = self._before + data if self._before else data
            if harmless(seen) or NAME.search(seen) is None:
                self._before = seen[-LONGEST_NAME_BYTES:]
                return data
            from hetlb.balancer.http.transfer_filter import TransferFilter

            self._filter = TransferFilter(self._before)
        return self._filter.feed(data)
