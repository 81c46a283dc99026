"""Records of ended requests from several relays as one history.

What relays report stays packed until a page reads it, which is seldom: to unpack the record of every request,
and to free it again, would cost the scheduler process more than all else that it does for one. Records stand
in the order in which the requests ended: one is shown once no relay can have an older one.
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
    """Encode rows of a `History`."""
    return _encoder.encode(rows)


class FleetRecords:
    """The records of all relays; `history` is what pages read."""

    def __init__(self, size: int = ENDED_KEPT) -> None:
        self.history = History(size, self._unpack)
        self._size = size
        #: Batches: how many rows each holds, and the rows.
        self._packed: deque[tuple[int, bytes]] = deque()
        self._count = 0
        #: Rows of some relays that are newer than what others have reported.
        self._early: list[tuple[Any, ...]] = []
        self._until = 0.0

    def add(self, count: int, packed: bytes) -> None:
        """Add a batch of one relay."""
        self._packed.append((count, packed))
        self._count += count
        while self._count - self._packed[0][0] >= self._size:  # as many newer ones would take their places
            missed, _ = self._packed.popleft()
            self._count -= missed
            self.history.added += missed

    def complete_until(self, until: float) -> None:
        """All requests that ended until then were reported by all relays."""
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
