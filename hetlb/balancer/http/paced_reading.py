"""Reading from a socket, as the state `Reading` of its connection says: as it comes, in turns, or not."""

from __future__ import annotations

import asyncio
from typing import Final, cast

from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.http.connection_states import HELD_BACK, READ_ON, TURN_TAKEN, Reading
from hetlb.turns import Turns

_OPEN: Final = Reading.OPEN
_TURN: Final = Reading.TURN


class PacedReader(asyncio.Protocol):
    """Base of both kinds of connections. No more is read from the socket than can be looked at."""

    __slots__ = ("_queued", "_transport", "_turns", "reading")

    def __init__(self, turns: Turns) -> None:
        self._transport: asyncio.Transport | None = None
        self._turns = turns
        #: True while it is in the queue of turns.
        self._queued = False
        self.reading = _OPEN

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class

    def _give(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Let another protocol have the transport, which is read as its bytes come."""
        transport = self._transport
        assert transport is not None, "expected a connection that is open"
        if self.reading is not _OPEN:
            self._resume_reading()
        transport.set_protocol(protocol)
        return transport

    def turn_came(self) -> None:
        """Read on: the others had their turn."""
        raise NotImplementedError

    def _continue_later(self) -> None:
        if self.reading is not _TURN:
            self._stop_reading(TURN_TAKEN)
        if not self._queued:
            self._queued = True
            self._turns.later(self._take_turn)

    def _take_turn(self) -> None:
        self._queued = False
        if self.reading is _TURN:
            self.turn_came()

    def _hold_back(self) -> None:
        self._stop_reading(HELD_BACK)

    def _stop_reading(self, transition: Transition[Reading]) -> None:
        reads = self.reading is _OPEN
        self.reading = transition.take(self.reading)
        if reads and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self.reading = READ_ON.take(self.reading)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
