"""Journal of leases (`balancer/core/ledger.py`) in its encoding: MessagePack arrays, typed and bounded.

Times are ages in seconds: two processes need no common clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Final, TypeAlias

import msgspec

from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.types import Lease, Outcome, Request, RequestId
from hetlb.balancer.exchange.kept_places import MOST_ID_CHARACTERS
from hetlb.balancer.fleet.shared_fleet import OperatorChange

#: Changes in one message, and their bytes, at most; decoded they take some thirty times as much.
PART_CHANGES: Final = 256
PART_BYTES: Final = 512 << 10
#: Largest count of anything: what a float holds exactly, and below what an integer of the ledger may be.
_MAX_COUNT: Final = 1 << 53
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_Keys: TypeAlias = Annotated[tuple[tuple[_Name, _Tokens | None], ...], msgspec.Meta(max_length=4096)]


class RequestFacts(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Facts of a request that another process needs to book it, and to predict its length."""

    model: _Name
    prompt_tokens: _Tokens
    max_tokens: _Positive | None
    sequences: _Tokens
    longest_prompt_tokens: _Tokens
    generates: bool
    prefix_keys: _Keys
    tenant: _Name | None
    samples: _Positive
    streamed: bool

    @classmethod
    def of(cls, request: Request) -> RequestFacts:
        return cls(
            request.model, request.prompt_tokens, request.max_tokens, request.sequences,
            request.longest_prompt_tokens, request.generates, request.prefix_keys, request.tenant,
            request.samples, request.streamed,
        )  # fmt: skip

    def request(self, number: RequestId) -> Request:
        """Return the request under another id: ids of two processes may be equal."""
        return Request(
            number, self.model, self.prompt_tokens, self.max_tokens, self.sequences,
            self.longest_prompt_tokens, self.generates, prefix_keys=self.prefix_keys, tenant=self.tenant,
            samples=self.samples, streamed=self.streamed,
        )  # fmt: skip


class WireBooked(msgspec.Struct, array_like=True, tag=0, gc=False, frozen=True):
    """A lease began."""

    number: _Number
    instance: _Name
    request: RequestFacts
    work_ns: _Count
    predicted_output: _Amount
    age_s: _Amount
    begun: bool
    first_s: _Amount = 0.0

    def __post_init__(self) -> None:
        """Refuse a lease that no peer could have made. Raises `ValueError`, in decoding `DecodeError`."""
        finite = math.isfinite(self.predicted_output) and math.isfinite(self.age_s)
        if self.request.samples > max(1, self.request.sequences) or not finite:
            raise ValueError("a lease of more samples than sequences, or of no finite length")

    @classmethod
    def of(cls, change: Booked) -> WireBooked:
        return cls(
            change.number, change.instance, RequestFacts.of(change.request), change.work_ns,
            change.predicted_output, max(0.0, change.age_s), change.begun, change.first_s,
        )  # fmt: skip

    def change(self, request: Request) -> Booked:
        """Return the booking for a scheduler, with a request in place of the peer's own."""
        return Booked(
            self.number, self.instance, request, self.work_ns, self.predicted_output, self.age_s, self.begun,
            self.first_s,
        )  # fmt: skip


class WireBegun(msgspec.Struct, array_like=True, tag=1, gc=False, frozen=True):
    """The answer of a lease began."""

    number: _Number


class WireEnded(msgspec.Struct, array_like=True, tag=2, gc=False, frozen=True):
    """A lease ended."""

    number: _Number
    outcome: Outcome
    output_tokens: _Count
    cached_tokens: _Count | None
    odd: bool = False


class WireWaiting(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Sizes of what waits, by model; number of the requests, bytes of their bodies, ages of the oldest."""

    sizes: Annotated[dict[_Name, _Count], msgspec.Meta(max_length=4096)]
    requests: _Count = 0
    held_bytes: _Count = 0
    ages_s: Annotated[dict[_Name, _Amount], msgspec.Meta(max_length=4096)] = {}


class WireOperated(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """An operator changed something at the process `origin`, its change `number` (0: an earlier change).

    Of two changes of one thing the one with the larger `stamp` and origin holds, at every peer.
    """

    number: _Count
    stamp: _Amount
    origin: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    change: OperatorChange

    def __post_init__(self) -> None:
        """Refuse a stamp that none is newer than. Raises `ValueError`, in decoding `DecodeError`."""
        if math.isnan(self.stamp):
            raise ValueError("a change with no time")


class WireAdmitted(msgspec.Struct, array_like=True, tag=6, gc=False, frozen=True):
    """A request of a client's key passed its limits, with these tokens reserved.

    `fresh`: it counts among the requests of the last minute; else it only is in flight.
    """

    number: _Count
    key: _Name
    reserved: _Tokens
    fresh: bool = True


class WireUsed(msgspec.Struct, array_like=True, tag=7, gc=False, frozen=True):
    """An admitted request used tokens: all at its end (`last`), a session's in between."""

    number: _Count
    prompt_tokens: _Count
    output_tokens: _Count
    last: bool


class WireKept(msgspec.Struct, array_like=True, tag=8, gc=False, frozen=True):
    """An instance keeps a response for later requests of the key `owner`."""

    id: Annotated[str, msgspec.Meta(max_length=MOST_ID_CHARACTERS)]
    instance: _Name
    model: _Name
    owner: _Name | None


class WireSlept(msgspec.Struct, array_like=True, tag=9, gc=False, frozen=True):
    """An instance falls asleep or wakes up: the fields of a `core.facts.SleepSet`."""

    instance: _Name
    reason: _Name
    wake_s: _Amount | None
    fault: _Name


class WireDone(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """A change of an operator is in force here, or it failed."""

    origin: _Name
    number: _Count
    error: _Name = ""


#: Changes of leases and of the queue.
WireChange: TypeAlias = WireBooked | WireBegun | WireEnded | WireWaiting
#: All that peers tell each other.
PeerChange: TypeAlias = WireChange | WireOperated | WireDone | WireAdmitted | WireUsed | WireKept | WireSlept


def booked(lease: Lease, now: float) -> Booked:
    """Return a live lease as a message for other processes."""
    begun = lease.first_token_at is not None
    return Booked(
        lease.id, lease.instance, lease.request, lease.work_ns, lease.predicted_output,
        now - lease.dispatched_at, begun, lease.forecast_first_s,
    )  # fmt: skip


def live(leases: Iterable[Lease], now: float) -> list[WireChange]:
    """Return the live leases of this process as messages for another one."""
    return [WireBooked.of(booked(each, now)) for each in leases if each.own]


class LeaseJournal:
    """Changes of one scheduler's own leases, for one reader; `on_change` is called once there are some."""

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self.on_change = on_change
        self._changes: list[WireChange] = []

    def booked(self, lease: Lease, now: float) -> None:
        self._add(WireBooked.of(booked(lease, now)))

    def begun(self, lease: Lease) -> None:
        self._add(WireBegun(lease.id))

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        cached_tokens = lease.reported_cached_tokens
        self._add(WireEnded(lease.id, outcome, lease.output_tokens, cached_tokens, bool(lease.odd)))

    def _add(self, change: WireChange) -> None:
        self._changes.append(change)
        if len(self._changes) == 1:
            self.on_change()

    def take(self) -> list[WireChange]:
        """Return the changes since the last time."""
        changes, self._changes = self._changes, []
        return changes


def parts(changes: Iterable[PeerChange]) -> list[list[msgspec.Raw]]:
    """Encode changes in parts of at most `PART_CHANGES` and `PART_BYTES`; without changes in one part."""
    found: list[list[msgspec.Raw]] = [[]]
    size = 0
    for each in changes:
        encoded = msgspec.msgpack.encode(each)
        size += len(encoded)
        if found[-1] and (size > PART_BYTES or len(found[-1]) == PART_CHANGES):
            found.append([])
            size = len(encoded)
        found[-1].append(msgspec.Raw(encoded))
    return found
