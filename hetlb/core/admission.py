"""The bounded queue of requests that no instance has been chosen for yet.

Promise: in the order of arrival within a lane; never more than `max_requests` requests or `max_bytes` bytes;
what goes in comes out exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

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


@dataclass(slots=True)
class Queued:
    """One waiting request, when it arrived, the output predicted then, and its size (see `core.demand`).

    `overtaken` counts those behind it that left the queue while it was the head of its lane.
    """

    request: Request
    arrived_at: float
    predicted_output: float = 0.0
    size: int = 0
    overtaken: int = 0


#: What shares one line: requests for one name, or for one instance of it.
Lane: TypeAlias = tuple[str, str | None]


class Queue:
    """FIFO of waiting requests in lanes, bounded by count and bytes over all of them."""

    __slots__ = ("_lane_of", "_lanes", "_sizes", "bytes", "limits")

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        # Ordered: the head of a plain dict that is eaten from the front costs its past length.
        self._lanes: dict[Lane, OrderedDict[RequestId, Queued]] = {}
        self._lane_of: dict[RequestId, Lane] = {}
        self._sizes: dict[str, int] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._lane_of

    def __iter__(self) -> Iterator[Queued]:
        """The waiting requests, lane by lane, oldest first; a snapshot: callers may remove meanwhile."""
        return iter([entry for lane in self._lanes.values() for entry in lane.values()])

    @property
    def lanes(self) -> list[Lane]:
        """The lanes in which somebody waits."""
        return list(self._lanes)

    def first(self, lane: Lane, count: int) -> list[Queued]:
        """The `count` who wait longest in a lane, the longest first."""
        entries = self._lanes.get(lane)
        return list(islice(entries.values(), count)) if entries else []

    def waiting(self, model: str) -> int:
        """The sizes of all that wait for a model, added up."""
        return self._sizes.get(model, 0)

    def has_room(self, request: Request) -> bool:
        """Whether one more request with this body stays within both bounds."""
        limits = self.limits
        if limits.max_requests is not None and len(self._lane_of) >= limits.max_requests:
            return False
        return limits.max_bytes is None or self.bytes + request.body_bytes <= limits.max_bytes

    def push(self, request: Request, arrived_at: float, predicted_output: float = 0.0, size: int = 0) -> None:
        """Append a request; the caller has asked `has_room`."""
        assert request.id not in self._lane_of, f"request {request.id} is queued already"
        lane = (request.model, request.pinned)
        entry = Queued(request, arrived_at, predicted_output, size)
        self._lanes.setdefault(lane, OrderedDict())[request.id] = entry
        self._sizes[request.model] = self._sizes.get(request.model, 0) + size
        self._lane_of[request.id] = lane
        self.bytes += request.body_bytes

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        lane = self._lane_of.pop(request_id, None)
        if lane is None:
            return None
        entries = self._lanes[lane]
        entry = entries.pop(request_id)
        if not entries:
            del self._lanes[lane]
        model = entry.request.model
        self._sizes[model] -= entry.size
        if not entries and not any(other[0] == model for other in self._lanes):
            assert self._sizes.pop(model) == 0, f"sizes waiting for {model} do not add up"
        self.bytes -= entry.request.body_bytes
        assert self.bytes >= 0, "queued bytes fell below zero"
        return entry

    def check_integrity(self) -> None:
        """Assert that the counts are those of the entries."""
        entries = list(self)
        assert sum(entry.request.body_bytes for entry in entries) == self.bytes
        assert {entry.request.id for entry in entries} == self._lane_of.keys()
        assert all(self._lanes.values()), "an empty lane was left behind"
