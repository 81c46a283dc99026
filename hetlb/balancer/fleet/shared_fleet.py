"""Interface of the exchange with other schedulers of the fleet (`peers`), for `pick` and for pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import WakeTable
from hetlb.balancer.core.facts import SleepSet
from hetlb.balancer.core.types import Command, Request
from hetlb.balancer.fleet.operator_changes import OperatorChange


class Right(Protocol):
    """Right that one process at a time has."""

    def held(self) -> bool: ...
    def release(self) -> None: ...


class SleepWatch(Protocol):
    """Sleep and wake of instances; of several processes the one with the right decides and tells others."""

    def configure(self, tables: Mapping[str, WakeTable]) -> None: ...
    def start(self) -> None: ...
    def share(self, right: Right | None, tell: Callable[[], object]) -> None: ...
    def take(self) -> list[SleepSet]: ...
    def live(self) -> list[SleepSet]: ...
    def adopt(self, change: SleepSet) -> None: ...
    async def close(self) -> None: ...


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

    def share_sleep(self, sleep: SleepWatch, folder: Path) -> None: ...
    async def spread(self, change: OperatorChange) -> list[str]: ...
    def reloaded(self, before: Fleet, after: Fleet) -> None: ...
    def start(self) -> None: ...
    async def caught_up(self, most_s: float, least: int = 0) -> bool: ...
    async def close(self) -> None: ...
