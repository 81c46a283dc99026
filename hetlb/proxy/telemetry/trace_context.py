"""Trace context of one request (W3C): its ids, and the `traceparent` header that its engine gets."""

from __future__ import annotations

import re
from typing import Final

#: The flag of a trace whose spans are kept.
SAMPLED: Final = 1
_CONTINUED = re.compile(rb"(?<=\n)traceparent:[^\n]*\n")
#: State that another vendor's trace left behind means nothing in this one.
_BEGUN = re.compile(rb"(?<=\n)(?:traceparent|tracestate):[^\n]*\n")


class Trace:
    """The ids of one request: its parent's, its own, and the one whose children an engine makes."""

    __slots__ = ("engine_id", "flags", "parent_id", "span_id", "trace_id")

    def __init__(
        self, trace_id: int, parent_id: int | None, span_id: int, engine_id: int, flags: int
    ) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = span_id
        self.engine_id = engine_id
        self.flags = flags

    @property
    def sampled(self) -> bool:
        """True if its spans are kept."""
        return bool(self.flags & SAMPLED)

    @property
    def header(self) -> bytes:
        """The header for the engine, without a line end."""
        return b"traceparent: 00-%032x-%016x-%02x" % (self.trace_id, self.engine_id, self.flags)

    def onto(self, lines: bytes) -> bytes:
        """A head's lines (names in lower case, CR LF behind each) with `header` instead of the client's."""
        taken = _CONTINUED if self.parent_id is not None else _BEGUN
        return b"%b%b\r\n" % (taken.sub(b"", lines), self.header)
