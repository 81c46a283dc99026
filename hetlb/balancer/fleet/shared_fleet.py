"""Interface of the exchange with other schedulers of the fleet (`peers`), and changes by operators.

A change is carried out here, and at every peer of this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import WakeTable
from hetlb.balancer.core.facts import SleepSet
from hetlb.balancer.core.types import AdminState, Command, Request

#: Longest notice, in seconds: an instance that leaves later has been given none yet.
MOST_NOTICE_S: Final = 86_400
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Notice: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MOST_NOTICE_S)]


class SetPolicy(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Another policy."""

    name: _Name


class SetState(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Administrative state of an instance, with the seconds until it is gone where that is known."""

    instance: _Name
    state: AdminState
    deadline_s: _Notice | None = None

    def __post_init__(self) -> None:
        """Refuse a time that is none. Raises `ValueError`, in decoding `DecodeError`."""
        if self.deadline_s is not None and math.isnan(self.deadline_s):
            raise ValueError("a notice with no time")


class Register(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """An instance that registers; `table` is a JSON object with the keys of an instance."""

    name: _Name
    table: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Unregister(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An instance taken out."""

    instance: _Name


class ReloadFile(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Another look at the fleet file."""


OperatorChange: TypeAlias = SetPolicy | SetState | Register | Unregister | ReloadFile


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
