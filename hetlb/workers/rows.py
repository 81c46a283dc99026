"""Ended requests of several workers as one history.

Promise: what workers tell stays packed until somebody looks, which is seldom: to unpack the rows of every
request, and to free them again, would cost the supervisor more than all else that it does for one. Rows stand
in the order in which they ended: one counts once no worker can have an older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from hetlb.proxy.telemetry.history import ENDED_KEPT, History

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[Any, ...]])


def pack(rows: Sequence[tuple[Any, ...]]) -> bytes:
    """Rows of a `History` as they are sent."""
    return _encoder.encode(rows)


class FleetRows:
    """What all workers told, `history` for people."""

    def __init__(self, size: int = ENDED_KEPT) -> None:
        self.history = History(size, self._unpack)
        self._size = size
        #: How many rows each holds, and they themselves.
        self._packed: deque[tuple[int, bytes]] = deque()
        self._count = 0
        #: Rows of some workers that are newer than what others have told.
        self._early: list[tuple[Any, ...]] = []
        self._until = 0.0

    def told(self, count: int, packed: bytes) -> None:
        """A worker told of so many rows."""
        self._packed.append((count, packed))
        self._count += count
        while self._count - self._packed[0][0] >= self._size:  # as many newer ones would take their places
            missed, _ = self._packed.popleft()
            self._count -= missed
            self.history.added += missed

    def whole_until(self, until: float) -> None:
        """All that ended until then was told by all workers."""
        self._until = until

    def _unpack(self) -> None:
        rows, until = self._early, self._until
        if self._packed:
            for _, packed in self._packed:
                rows += _decoder.decode(packed)
            self._packed.clear()
            self._count = 0
        if rows:
            ready = sorted((row for row in rows if row[0] <= until), key=lambda row: row[0])
            self._early = [row for row in rows if row[0] > until][-self._size :]
            self.history.extend(ready)
