"""Frames of a WebSocket as they come from one side, read a turn of the event loop at a time (`hetlb.turns`).

What has come and was not read yet waits here; its side is not read meanwhile, so that it is little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetlb.turns import turns
from hetlb.websocket import FrameReader, ProtocolError

#: Frames between two looks at the clock.
_AT_ONCE: Final = 32

Message = tuple[int, bytes]


class FrameFlow:
    """One direction. `take` gets bytes that were read and the messages that end in them.

    It may raise `ProtocolError`, as the reader does: `failed` is told of it, and nothing more is read.
    `hold` is told when something waits (True) and when nothing does any more.
    """

    __slots__ = ("_at", "_failed", "_hold", "_reader", "_rest", "_take", "_turns", "closed", "waits")

    def __init__(
        self,
        reader: FrameReader,
        take: Callable[[bytes, list[Message]], None],
        failed: Callable[[ProtocolError], None],
        hold: Callable[[bool], None],
    ) -> None:
        self._reader = reader
        self._take = take
        self._failed = failed
        self._hold = hold
        self._turns = turns()
        #: Bytes that came, and the position up to which they were read.
        self._rest = b""
        self._at = 0
        #: True while something waits for its turn.
        self.waits = False
        self.closed = False

    def feed(self, data: bytes) -> None:
        """More came."""
        if self.waits:
            self._rest, self._at = self._rest[self._at :] + data, 0
        else:
            self._rest, self._at = data, 0
            self._go_on()

    def close(self) -> None:
        """Nothing more is read."""
        self.closed = True
        self._rest, self._at = b"", 0

    def _go_on(self) -> None:
        """Read until the turn is over."""
        end = self._turns.begin()
        try:
            while self._at < len(self._rest):
                found: list[Message] = []
                start = self._at
                self._at = self._reader.read(self._rest, start, _AT_ONCE, found)
                self._take(self._rest[start : self._at], found)
                if self._turns.over(end):
                    break
        except ProtocolError as error:
            self.close()
            self._failed(error)
        left = self._at < len(self._rest)
        if left:
            self._turns.later(self._go_on)
        else:
            self._rest, self._at = b"", 0
        if left is not self.waits and not self.closed:
            self.waits = left
            self._hold(left)
