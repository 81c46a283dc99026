"""A large form that has not come whole: when to choose an instance for it, and what an engine gets of it.

Promise: no engine gets the last byte of a form before all of it passed the reader, so that none runs one
that is malformed, cut short or dropped; all of it is kept until then, for another engine if one fails; an
instance is chosen when the rest is about to come, so that no slow client holds a place on an engine that
could not begin.

Only forms go on while they arrive. Of JSON enough is known when it is whole: the length of the prompt, and
a `model` may stand behind it.
"""

from __future__ import annotations

from typing import Final

from hetlb.proxy.body import Call
from hetlb.proxy.multipart import FormReader

#: Smaller ones are there before it would make a difference.
LEAST_BYTES: Final = 1 << 20
#: An instance is chosen when at its pace the rest comes within so many seconds.
_AHEAD_S: Final = 1.0
#: The pace is taken with so many seconds more: the first bytes come all at once.
_MORE_S: Final = 0.05
#: From then on the rest has so many seconds: until it is there, the place stands empty.
REST_S: Final = 10.0


class Upload:
    """A form of `length` bytes on its way."""

    __slots__ = ("_form", "length", "pieces", "received", "whole")

    def __init__(self, content_type: bytes, length: int) -> None:
        """Raises `GateError` (400) where the end of such a form would be doubtful."""
        self._form = FormReader(content_type)
        self.length = length
        self.received = 0
        #: What came and passed the reader, in order.
        self.pieces: list[bytes] = []
        #: Whether all of it did.
        self.whole = False

    @property
    def call(self) -> Call:
        """What it has said so far."""
        return self._form.call

    def add(self, piece: bytes) -> None:
        """More of it came. Raises `GateError` (400)."""
        self.received += len(piece)
        self._form.feed(piece)
        if self.received == self.length:
            self._form.finish()
            self.whole = True
        self.pieces.append(piece)

    def choosable(self, took_s: float) -> bool:
        """Whether it is time to choose an instance, `took_s` after its first byte."""
        if self.whole:
            return True
        left = self.length - self.received
        return self.call.model is not None and left * (took_s + _MORE_S) <= self.received * _AHEAD_S
