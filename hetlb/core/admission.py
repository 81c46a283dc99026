"""The bounded queue of requests that no instance has been chosen for yet.

Promise: never more than `max_requests` requests or `max_bytes` bytes; what goes in comes out exactly once.
Who goes next, within a lane: the lowest `priority`; of those the tenant that has been served least for its
weight (start-time fair queueing); of that tenant's the one that waits longest. With one tenant and one
priority that is the order of arrival.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a tenant that begins to wait gets the start tag
max(virtual time, its last finish tag), serving a request of size s moves it on by s / weight, the least tag
goes next, and the virtual time is the tag of who was served last. So two tenants that both wait differ in
what they were served, per weight, by at most one request of each; and nobody saves up by not asking. Tags are
integers, so that equal is equal.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from hetlb.core.types import Request, RequestId
from hetlb.core.values import Value

#: Finish tags of tenants that wait for nothing are looked through when there are so many.
_TAGS_KEPT: Final = 1024
#: Of a tag, for a request of size 1 at weight 1.
_STEP: Final = 1024
#: However small a weight is, a step and a tag have their ends: they stand in eight bytes elsewhere, doubled.
_MOST_STEP: Final = 1 << 40
MOST_TAG: Final = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class QueueLimits(Value):
    """Bounds of the queue. Times in seconds.

    A request waits at most `timeout_s`, and at most `no_instance_timeout_s` while no instance of its
    model is routable. `max_requests` None means no bound (simulation). A tenant may hold `tenant_share` of
    `max_requests` and `max_bytes`; `tenant_weights` are shares of what is served, 1 for who is not named.
    """

    max_requests: int | None = 16_384
    max_bytes: int | None = 256 << 20
    timeout_s: float | None = 300.0
    no_instance_timeout_s: float = 30.0
    tenant_share: float = 1.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Queued:
    """One waiting request, when it arrived, the output predicted then, and its size (see `core.demand`).

    `overtaken` counts those behind it that left the queue while it was the next to go.
    """

    request: Request
    arrived_at: float
    predicted_output: float = 0.0
    size: int = 0
    overtaken: int = 0


#: What shares one line: requests for one name, or for one instance of it; those that are tried again apart.
Lane: TypeAlias = tuple[str, str | None, bool]


class Flow:
    """What one tenant has waiting at one priority of a lane, the longest first. `tag` is its start tag."""

    __slots__ = ("entries", "tag", "tenant", "weight")

    def __init__(self, tenant: str | None, tag: int, weight: float) -> None:
        self.tenant = tenant
        self.tag = tag
        self.weight = weight
        # Ordered: the head of a plain dict that is eaten from the front costs its past length.
        self.entries: OrderedDict[RequestId, Queued] = OrderedDict()

    @property
    def head(self) -> Queued:
        """Which of it has waited longest; there is one as long as the flow is in a queue."""
        return next(iter(self.entries.values()))


def moved_on(tag: int, size: float, weight: float) -> int:
    """The tag of a tenant of this weight after a request of this size."""
    step = max(1, round(min(_MOST_STEP, _STEP * max(1.0, size) / weight)))
    return min(MOST_TAG, tag + step)


class Fair:
    """The flows of one priority of a lane, and the tags that decide whose turn it is."""

    __slots__ = ("_finished", "_heap", "_pushed", "flows", "virtual")

    def __init__(self) -> None:
        self.flows: dict[str | None, Flow] = {}
        self.virtual = 0
        #: (tag, order, flow); those whose flow has another tag by now, or is empty, are stale.
        self._heap: list[tuple[int, int, Flow]] = []
        self._pushed = 0
        #: Finish tags of tenants that wait for nothing, as long as they lie ahead.
        self._finished: dict[str | None, int] = {}

    def flow(self, tenant: str | None, weight: float) -> Flow:
        """The flow of a tenant, begun if it has none. The caller puts something in."""
        flow = self.flows.get(tenant)
        if flow is None:
            tag = max(self.virtual, self._finished.pop(tenant, 0))
            flow = self.flows[tenant] = Flow(tenant, tag, weight)
            self._line_up(flow)
        return flow

    def turn(self) -> Flow:
        """Whose turn it is."""
        if len(self.flows) == 1:
            for flow in self.flows.values():
                return flow
        heap = self._heap
        while True:
            tag, _, flow = heap[0]
            if flow.tag == tag and self.flows.get(flow.tenant) is flow:
                return flow
            heapq.heappop(heap)

    def served(self, tenant: str | None, size: float, weight: float) -> None:
        """A request of a tenant was served, from its flow or past it."""
        flow = self.flows.get(tenant)
        if flow is None:
            tag = max(self.virtual, self._finished.get(tenant, 0))
            self._finished[tenant] = moved_on(tag, size, weight)
            return
        self.virtual = max(self.virtual, flow.tag)
        flow.tag = moved_on(flow.tag, size, flow.weight)
        self._line_up(flow)

    def emptied(self, flow: Flow) -> None:
        """Nothing of a flow waits any more."""
        del self.flows[flow.tenant]
        if flow.tag > self.virtual:
            finished = self._finished
            finished[flow.tenant] = flow.tag
            if len(finished) > _TAGS_KEPT:
                self._finished = {name: tag for name, tag in finished.items() if tag > self.virtual}

    def _line_up(self, flow: Flow) -> None:
        self._pushed += 1
        if len(self.flows) == 1:  # it need not be looked for; the heap would only grow
            self._heap = [(flow.tag, self._pushed, flow)]
        else:
            heapq.heappush(self._heap, (flow.tag, self._pushed, flow))


class Share:
    """How much of the queue one tenant holds."""

    __slots__ = ("bytes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


class Queue:
    """Waiting requests in lanes, bounded by count and bytes over all of them."""

    __slots__ = ("_lanes", "_shares", "_sizes", "bytes", "held", "limits")

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        #: By priority, ascending.
        self._lanes: dict[Lane, dict[int, Fair]] = {}
        #: Who waits, and where. To be read, not written: asked at every event whether it is empty.
        self.held: dict[RequestId, tuple[Lane, int, Flow]] = {}
        self._sizes: dict[str, int] = {}
        self._shares: dict[str | None, Share] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.held

    def __iter__(self) -> Iterator[Queued]:
        """The waiting requests, flow by flow; a snapshot: callers may remove meanwhile."""
        return iter([entry for flow in self.flows() for entry in flow])

    def flows(self) -> list[list[Queued]]:
        """Who waits, in lists that have the longest waiting first: by lane, priority and tenant."""
        return [list(flow.entries.values()) for flow in self._flows()]

    def _flows(self) -> Iterator[Flow]:
        for lane in self._lanes.values():
            for fair in lane.values():
                yield from fair.flows.values()

    @property
    def lanes(self) -> list[Lane]:
        """The lanes in which somebody waits, those of requests that are tried again first."""
        return (
            sorted(self._lanes, key=lambda lane: not lane[2]) if len(self._lanes) > 1 else list(self._lanes)
        )

    def first(self, lane: Lane, count: int) -> list[Queued]:
        """Who goes next in a lane, and those behind it of the same priority and tenant, `count` in all."""
        fair = self.fair(lane)
        return [] if fair is None else list(islice(fair.turn().entries.values(), count))

    def fair(self, lane: Lane) -> Fair | None:
        """Who waits in a lane at the priority whose turn it is, None if nobody does."""
        for fair in self._lanes.get(lane, {}).values():
            return fair
        return None

    def by_model(self) -> dict[str, int]:
        """How many wait, by model."""
        return Counter(entry.request.model for entry in self)

    def oldest_at(self) -> float | None:
        """When the one arrived that waits longest, None if nobody waits."""
        return min((flow[0].arrived_at for flow in self.flows()), default=None)

    def count(self, lane: Lane) -> int:
        """How many wait in a lane."""
        fairs = self._lanes.get(lane, {}).values()
        return sum(len(flow.entries) for fair in fairs for flow in fair.flows.values())

    def waiting(self, model: str) -> int:
        """The sizes of all that wait for a model, added up."""
        return self._sizes.get(model, 0)

    def goes_before(self, request: Request) -> bool:
        """Whether someone waits in a request's lane who has a better priority."""
        by_priority = self._lanes.get((request.model, request.pinned, False))
        return by_priority is not None and next(iter(by_priority)) < request.priority

    # --- bounds ---

    def has_room(self, request: Request) -> bool:
        """Whether one more request with this body stays within the bounds and its tenant's share of them."""
        return self._within(len(self.held), self.bytes, request) and self._within_share(request)

    def _within(self, requests: int, held_bytes: int, request: Request) -> bool:
        limits = self.limits
        if limits.max_requests is not None and requests >= limits.max_requests:
            return False
        return limits.max_bytes is None or held_bytes + request.body_bytes <= limits.max_bytes

    def _within_share(self, request: Request) -> bool:
        limits = self.limits
        if limits.tenant_share >= 1.0:
            return True
        requests, held_bytes = self.held_by(request.tenant)
        if not requests:  # whoever holds nothing may have one
            return True
        if limits.max_requests is not None and requests >= limits.tenant_share * limits.max_requests:
            return False
        most = limits.max_bytes
        return most is None or held_bytes + request.body_bytes <= limits.tenant_share * most

    def held_by(self, tenant: str | None) -> tuple[int, int]:
        """How many requests and bytes a tenant holds."""
        share = self._shares.get(tenant)
        return (0, 0) if share is None else (share.requests, share.bytes)

    def crowding_out(self, request: Request) -> Sequence[RequestId]:
        """Who would have to leave a full queue so that a request has room; nobody if that would not be fair.

        As where many share one buffer: the newest of the tenant that holds most, as long as that one holds
        more than the tenant of the request will.
        """
        if (len(self._shares) < 2 and request.tenant in self._shares) or not self._within_share(request):
            return ()
        limits = self.limits
        by_count = limits.max_requests is not None and len(self.held) >= limits.max_requests
        unit = 0 if by_count else 1
        held = {tenant: self.held_by(tenant)[unit] for tenant in self._shares}
        tenant = max(held, key=held.__getitem__, default=request.tenant)
        if tenant == request.tenant:
            return ()
        gone: list[RequestId] = []
        requests, held_bytes = len(self.held), self.bytes
        theirs = held[tenant]
        after = self.held_by(request.tenant)[unit] + (1 if by_count else request.body_bytes)
        for _, flow in sorted(self._of(tenant), key=lambda item: -item[0]):
            for request_id in reversed(flow.entries):
                entry = flow.entries[request_id]
                theirs -= 1 if by_count else entry.request.body_bytes
                if theirs < after:
                    return ()
                gone.append(request_id)
                requests -= 1
                held_bytes -= entry.request.body_bytes
                if self._within(requests, held_bytes, request):
                    return gone
        return ()

    def _of(self, tenant: str | None) -> Iterator[tuple[int, Flow]]:
        for lane in self._lanes.values():
            for priority, fair in lane.items():
                if (flow := fair.flows.get(tenant)) is not None:
                    yield priority, flow

    # --- in and out ---

    def push(
        self,
        request: Request,
        arrived_at: float,
        predicted_output: float = 0.0,
        size: int = 0,
        again: bool = False,
    ) -> None:
        """Append a request, one that is tried again apart; the caller has asked `has_room`."""
        assert request.id not in self.held, f"request {request.id} is queued already"
        model, tenant, priority = request.model, request.tenant, request.priority
        lane = (model, request.pinned, again)
        by_priority = self._lanes.setdefault(lane, {})
        fair = by_priority.get(priority)
        if fair is None:
            fair = by_priority[priority] = Fair()
            if len(by_priority) > 1:
                self._lanes[lane] = dict(sorted(by_priority.items()))
        flow = fair.flow(tenant, self._weight(tenant))
        flow.entries[request.id] = Queued(request, arrived_at, predicted_output, size)
        self.held[request.id] = (lane, priority, flow)
        self._sizes[model] = self._sizes.get(model, 0) + size
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share()
        share.requests += 1
        share.bytes += request.body_bytes
        self.bytes += request.body_bytes

    def take(self, request_id: RequestId) -> Queued:
        """Take a waiting request out to be served: it counts for its tenant."""
        lane, priority, flow = self.held[request_id]
        fair, entry = self._lanes[lane][priority], flow.entries[request_id]
        fair.served(flow.tenant, entry.size, flow.weight)
        self.remove(request_id)
        return entry

    def passed(self, request: Request, size: float) -> None:
        """A request was served without having waited: where others do wait, it counts for its tenant too."""
        fair = self._lanes.get((request.model, request.pinned, False), {}).get(request.priority)
        if fair is not None:
            fair.served(request.tenant, size, self._weight(request.tenant))

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        found = self.held.pop(request_id, None)
        if found is None:
            return None
        lane, priority, flow = found
        entry = flow.entries.pop(request_id)
        request, model = entry.request, entry.request.model
        if not flow.entries:
            self._emptied(lane, priority, flow)
        self._sizes[model] -= entry.size
        if not flow.entries and not any(other[0] == model for other in self._lanes):
            assert self._sizes.pop(model) == 0, f"sizes waiting for {model} do not add up"
        share = self._shares[request.tenant]
        share.requests -= 1
        share.bytes -= request.body_bytes
        if not share.requests:
            del self._shares[request.tenant]
        self.bytes -= request.body_bytes
        assert self.bytes >= 0, "queued bytes fell below zero"
        return entry

    def _emptied(self, lane: Lane, priority: int, flow: Flow) -> None:
        by_priority = self._lanes[lane]
        fair = by_priority[priority]
        fair.emptied(flow)
        if not fair.flows:  # nobody waits: what was served before is forgotten
            del by_priority[priority]
            if not by_priority:
                del self._lanes[lane]

    def _weight(self, tenant: str | None) -> float:
        weights = self.limits.tenant_weights
        return weights.get(tenant, 1.0) if weights and tenant is not None else 1.0

    def check_integrity(self) -> None:
        """Assert that the counts are those of the entries."""
        entries = list(self)
        assert sum(entry.request.body_bytes for entry in entries) == self.bytes
        assert {entry.request.id for entry in entries} == self.held.keys()
        assert all(flow.entries for flow in self._flows()), "an empty flow was left behind"
        assert all(fair.flows for lane in self._lanes.values() for fair in lane.values()), "an empty priority"
        assert all(self._lanes.values()), "an empty lane was left behind"
        assert all(list(lane) == sorted(lane) for lane in self._lanes.values()), "priorities out of order"
        held: dict[str | None, list[int]] = {}
        for entry in entries:
            of = held.setdefault(entry.request.tenant, [0, 0])
            of[0] += 1
            of[1] += entry.request.body_bytes
        assert held == {name: [share.requests, share.bytes] for name, share in self._shares.items()}
