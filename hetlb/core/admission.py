"""The bounded queue of requests that no instance has been chosen for yet.

Promise: first in, first out; never more than `max_requests` requests or `max_bytes` bytes of bodies;
what goes in comes out exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetlb.core.types import Request, RequestId


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue. Times in seconds.

    A request waits at most `timeout_s`, and at most `no_instance_timeout_s` while no instance of its
    model is routable. `max_requests` None means no bound (simulation).
    """

    max_requests: int | None = 16_384
    max_bytes: int | None = 256 << 20
    timeout_s: float | None = 300.0
    no_instance_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Queued:
    """One waiting request and when it arrived."""

    request: Request
    arrived_at: float


class Queue:
    """FIFO of waiting requests, bounded by count and bytes."""

    __slots__ = ("_entries", "bytes", "limits")

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._entries: dict[RequestId, Queued] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Queued]:
        """The waiting requests, oldest first; a snapshot, so that callers may remove while iterating."""
        return iter(tuple(self._entries.values()))

    def has_room(self, request: Request) -> bool:
        """Whether one more request with this body stays within both bounds."""
        limits = self.limits
        if limits.max_requests is not None and len(self._entries) >= limits.max_requests:
            return False
        return limits.max_bytes is None or self.bytes + request.body_bytes <= limits.max_bytes

    def push(self, request: Request, arrived_at: float) -> None:
        """Append a request; the caller has asked `has_room`."""
        assert request.id not in self._entries, f"request {request.id} is queued already"
        self._entries[request.id] = Queued(request, arrived_at)
        self.bytes += request.body_bytes

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.bytes -= entry.request.body_bytes
            assert self.bytes >= 0, "queued bytes fell below zero"
        return entry

    def check_integrity(self) -> None:
        """Assert that the byte count is the sum over the entries."""
        total = sum(entry.request.body_bytes for entry in self._entries.values())
        assert total == self.bytes, f"queue counts {self.bytes} bytes, its entries hold {total}"
