"""Interface of the exchange with other schedulers of the fleet (`peers`), for `pick` and for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.types import Command, Request
from hetlb.balancer.fleet.operator_changes import OperatorChange

if TYPE_CHECKING:
    from hetlb.balancer.option_record import SleepWatch


class SharedBookings(Protocol):
    """Bookings of this scheduler and of its peers."""

    def on_arrival(self, request: Request, now: float) -> list[Command]: ...


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

    def share_sleep(self, sleep: SleepWatch) -> None: ...
    async def spread(self, change: OperatorChange) -> list[str]: ...
    def reloaded(self, before: Fleet, after: Fleet) -> None: ...
    def start(self) -> None: ...
    async def caught_up(self, most_s: float, least: int = 0) -> bool: ...
    async def close(self) -> None: ...
