"""Interface of the exchange with other schedulers of the fleet (`shared_view`), for `pick` and for pages."""

from __future__ import annotations

from typing import Protocol

from hetlb.balancer.interfaces import SharedBookings


class PeerBookings(SharedBookings, Protocol):
    """Bookings of this scheduler and of its peers, as pages show them."""

    delay_s: float

    @property
    def peer_leases(self) -> int: ...


class SharedFleet(Protocol):
    """Exchange of bookings with other schedulers of the fleet."""

    @property
    def peers(self) -> int: ...
    @property
    def view(self) -> PeerBookings: ...

    connected: bool
    sent: int
    received: int
    rejected: int

    def start(self) -> None: ...
    async def close(self) -> None: ...
