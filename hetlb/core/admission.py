"""The bounded queue of requests that no instance has been chosen for yet.

It never holds more than `max_requests` requests or `max_bytes` bytes; what goes in comes out exactly once.
Next to go, under one `QueueKey`: the lowest `priority`; of those the tenant that was served least for its
weight (start-time fair queueing); of that tenant's the oldest. Requests that only large instances can take
are kept apart by `fit`, so that they hold up none that others can take; tenants are served fairly over all.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a tenant that begins to wait gets the start tag
max(virtual time, its last finish tag), serving a request of size s moves it on by s / weight, the least tag
goes next, and the virtual time is the tag of the request served last. So two tenants that both wait differ in
what they were served, per weight, by at most one request of each; and no tenant saves up by not asking. Tags
are integers, so that equal ones are equal.

A request is overtaken when one that came later, of the same priority (and, if that waited too, tenant), is
dispatched before it to an instance that could take both. At `MOST_OVERTAKEN` nothing may pass any more.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.types import Request, RequestId

#: Finish tags of tenants that wait for nothing are looked through when there are so many.
_TAGS_KEPT: Final = 1024
#: Of a tag, for a request of size 1 at weight 1.
_STEP: Final = 1024
#: However small a weight is, a step has its end.
_MOST_STEP: Final = 1 << 40
#: A waiting request is overtaken so many times at most.
MOST_OVERTAKEN: Final = 128


@dataclass(frozen=True, slots=True)
class QueueLimits(PickleByFields):
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


class QueueKey(NamedTuple):
    """One line of waiting requests: for a model, or for one instance of it; retries apart."""

    model: str
    instance: str | None
    retry: bool


class Queued:
    """One waiting request, when it arrived, the output predicted then, and its size (see `core.demand`).

    `fit` is the smallest class of instances that can take it. At `credit` passes of its line it has been
    overtaken `MOST_OVERTAKEN` times.
    """

    __slots__ = ("arrived_at", "credit", "fit", "predicted_output", "request", "size")

    def __init__(
        self, request: Request, arrived_at: float, predicted_output: float, size: int, fit: int
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.predicted_output = predicted_output
        self.size = size
        self.fit = fit
        self.credit = 0


#: Ordered: the head of a plain dict that is eaten from the front costs its past length.
Entries = OrderedDict[RequestId, Queued]


class Flow:
    """The waiting requests of one tenant at one priority, oldest first, by `fit`. `tag` is its start tag."""

    __slots__ = ("by_fit", "tag", "tenant", "weight")

    def __init__(self, tenant: str | None, tag: int, weight: float) -> None:
        self.tenant = tenant
        self.tag = tag
        self.weight = weight
        self.by_fit: dict[int, Entries] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self.by_fit.values())


def _advanced(tag: int, size: float, weight: float) -> int:
    """The tag of a tenant of this weight after a request of this size."""
    return tag + max(1, round(min(_MOST_STEP, _STEP * max(1.0, size) / weight)))


class Line:
    """The flows of one priority with requests of one `fit`.

    `passes` counts requests that were served past them. `bound`: up to so many passes none of them
    has been overtaken too often; `stopping` is the entry that lets nothing pass until it is served.
    `in_order`: in each flow the oldest has the least credit, as long as nothing was sorted anew.
    """

    __slots__ = ("bound", "heap", "in_order", "passes", "stopping")

    def __init__(self) -> None:
        #: (tag, order, flow); stale where the flow has another tag by now, or nothing waits in it.
        self.heap: list[tuple[int, int, Flow]] = []
        self.passes = 0
        self.bound = MOST_OVERTAKEN
        self.in_order = True
        self.stopping: Queued | None = None


class FairQueue:
    """The flows of one priority, and the tags that decide whose turn it is."""

    __slots__ = ("_finished", "_pushed", "flows", "lines", "virtual")

    def __init__(self) -> None:
        self.flows: dict[str | None, Flow] = {}
        #: By fit.
        self.lines: dict[int, Line] = {}
        self.virtual = 0
        self._pushed = 0
        #: Finish tags of tenants that wait for nothing, as long as they lie ahead.
        self._finished: dict[str | None, int] = {}

    def push(self, tenant: str | None, weight: float, entry: Queued) -> Flow:
        """Append an entry to its tenant's flow, which begins with it if there is none."""
        flow = self.flows.get(tenant)
        if flow is None:
            tag = max(self.virtual, self._finished.pop(tenant, 0))
            flow = self.flows[tenant] = Flow(tenant, tag, weight)
        self.enter(flow, entry)
        entry.credit = self.lines[entry.fit].passes + MOST_OVERTAKEN
        return flow

    def enter(self, flow: Flow, entry: Queued) -> None:
        """Append an entry to a flow."""
        entries = flow.by_fit.get(entry.fit)
        if entries is None:
            entries = flow.by_fit[entry.fit] = OrderedDict()
            self._line_up(flow, entry.fit)
        entries[entry.request.id] = entry

    def turn(self, fit: int) -> Flow:
        """The flow whose turn it is among those with a waiting request of this fit."""
        if len(self.flows) == 1:
            for flow in self.flows.values():
                return flow
        heap = self.lines[fit].heap
        while True:
            tag, _, flow = heap[0]
            if flow.tag == tag and fit in flow.by_fit and self.flows.get(flow.tenant) is flow:
                return flow
            heapq.heappop(heap)

    def served(self, tenant: str | None, size: float, weight: float) -> None:
        """A request of a tenant was served, from its flow or past it."""
        flow = self.flows.get(tenant)
        if flow is None:
            tag = max(self.virtual, self._finished.get(tenant, 0))
            self._finished[tenant] = _advanced(tag, size, weight)
            return
        self.virtual = max(self.virtual, flow.tag)
        flow.tag = _advanced(flow.tag, size, flow.weight)
        for fit in flow.by_fit:
            self._line_up(flow, fit)

    def pass_by(self, fit: int) -> None:
        """A request that came later was served, where requests of `fit` and below could have been."""
        for own, line in self.lines.items():
            if own <= fit:
                line.passes += 1

    def overtake(self, older: Queued) -> None:
        """One behind it in its flow was served before an entry."""
        older.credit -= 1
        line = self.lines[older.fit]
        if older.credit < line.bound:
            line.bound = older.credit

    def stopping(self, fit: int) -> Queued | None:
        """An entry of a line that has been overtaken as often as may be, None if there is none."""
        line = self.lines[fit]
        if line.passes < line.bound:
            return None
        if line.stopping is None:
            least = self._least_credit(fit, line.in_order)
            line.bound = least.credit
            if line.passes >= least.credit:
                line.stopping = least
        return line.stopping

    def _least_credit(self, fit: int, in_order: bool) -> Queued:
        """The entry of a line that may be overtaken least often, the first of several."""
        least: Queued | None = None
        for flow in self.flows.values():
            entries = flow.by_fit.get(fit)
            if entries is not None:
                for entry in entries.values():
                    if least is None or entry.credit < least.credit:
                        least = entry
                    if in_order:
                        break
        assert least is not None, f"nothing waits in the line of fit {fit}"
        return least

    def remove(self, flow: Flow, entry: Queued) -> None:
        """Take an entry out; a flow in which nothing waits any more ends."""
        self.withdraw(flow, entry)
        if not flow.by_fit:
            del self.flows[flow.tenant]
            if flow.tag > self.virtual:
                finished = self._finished
                finished[flow.tenant] = flow.tag
                if len(finished) > _TAGS_KEPT:
                    self._finished = {name: tag for name, tag in finished.items() if tag > self.virtual}

    def withdraw(self, flow: Flow, entry: Queued) -> None:
        """Take an entry out of a flow, which stays."""
        fit = entry.fit
        line = self.lines[fit]
        if line.stopping is entry:
            line.stopping = None
        entries = flow.by_fit[fit]
        del entries[entry.request.id]
        if not entries:
            del flow.by_fit[fit]
            if not any(fit in other.by_fit for other in self.flows.values()):
                del self.lines[fit]

    def _line_up(self, flow: Flow, fit: int) -> None:
        self._pushed += 1
        line = self.lines.get(fit)
        if line is None:
            line = self.lines[fit] = Line()
        if len(self.flows) == 1:  # it need not be looked for; the heap would only grow
            line.heap = [(flow.tag, self._pushed, flow)]
        else:
            heapq.heappush(line.heap, (flow.tag, self._pushed, flow))


class Share:
    """Part of the queue that one tenant holds."""

    __slots__ = ("bytes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


class Queue:
    """Waiting requests, bounded by count and bytes over all of them."""

    __slots__ = ("_keys", "_lines", "_shares", "_sizes", "bytes", "held", "limits")

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        #: By priority, ascending.
        self._lines: dict[QueueKey, dict[int, FairQueue]] = {}
        #: Keys of the lines that are open to every instance of a model, by model: making one costs more than
        #: to find it.
        self._keys: dict[str, QueueKey] = {}
        #: The waiting requests and their places. To be read: asked at every event whether it is empty.
        self.held: dict[RequestId, tuple[QueueKey, int, Flow, Queued]] = {}
        self._sizes: dict[str, int] = {}
        self._shares: dict[str | None, Share] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.held

    def __iter__(self) -> Iterator[Queued]:
        """The waiting requests; a snapshot: callers may remove meanwhile."""
        return iter([place[3] for place in self.held.values()])

    def flows(self) -> list[list[Queued]]:
        """The waiting requests in lists, each oldest first: by key, priority, tenant and fit."""
        return [list(entries.values()) for entries in self._entries()]

    def _fair_queues(self) -> Iterator[FairQueue]:
        for by_priority in self._lines.values():
            yield from by_priority.values()

    def _entries(self) -> Iterator[Entries]:
        for fair in self._fair_queues():
            for flow in fair.flows.values():
                yield from flow.by_fit.values()

    @property
    def keys(self) -> list[QueueKey]:
        """The lines in which something waits, those of retries first."""
        lines = self._lines
        return sorted(lines, key=lambda key: not key.retry) if len(lines) > 1 else list(lines)

    def heads(self, key: QueueKey) -> list[tuple[FairQueue, Flow, int]]:
        """The next of a line for each `fit`, in their order: its flow holds it first, and those behind it.

        Of one priority those that let nothing pass come first, by arrival.
        """
        by_priority = self._lines.get(key)
        if by_priority is None:
            return []
        found: list[tuple[int, int, float, FairQueue, Flow, int]] = []
        seen: list[int] = []
        for priority, fair in by_priority.items():
            for fit in fair.lines:
                if fit not in seen:
                    seen.append(fit)
                    flow = fair.turn(fit)
                    stopping = fair.stopping(fit)
                    tag = flow.tag if stopping is None else -1
                    first = next(iter(flow.by_fit[fit].values())) if stopping is None else stopping
                    found.append((priority, tag, first.arrived_at, fair, flow, fit))
        if len(found) > 1:
            found.sort(key=lambda each: each[:3])
        return [(fair, flow, fit) for _, _, _, fair, flow, fit in found]

    def by_model(self) -> dict[str, int]:
        """Number of waiting requests, by model."""
        return Counter(entry.request.model for entry in self)

    def oldest_at(self) -> float | None:
        """Arrival of the request that waits longest, None if none waits."""
        return min((flow[0].arrived_at for flow in self.flows()), default=None)

    def count(self, key: QueueKey) -> int:
        """Number of requests that wait in a line."""
        return sum(len(flow) for fair in self._lines.get(key, {}).values() for flow in fair.flows.values())

    def waiting(self, model: str) -> int:
        """The sizes of all that wait for a model, added up."""
        return self._sizes.get(model, 0)

    def waiting_sizes(self) -> dict[str, int]:
        """The sizes of all that wait, added up, of each model for which something does."""
        return {model: size for model, size in self._sizes.items() if size}

    def overtaken(self, entry: Queued) -> int:
        """Number of later requests that went before a waiting one."""
        key, priority, _, _ = self.held[entry.request.id]
        return MOST_OVERTAKEN - entry.credit + self._lines[key][priority].lines[entry.fit].passes

    def may_pass(self, request: Request) -> bool:
        """True if a request that has just come may be served before those that wait in its line."""
        by_priority = self._lines.get(self._key(request, False))
        if by_priority is None:
            return True
        for priority, fair in by_priority.items():
            if priority < request.priority:
                return False
            if priority == request.priority:
                for fit in fair.lines:
                    if fair.stopping(fit) is not None:
                        return False
        return True

    # --- bounds ---

    def has_room(self, request: Request) -> bool:
        """True if one more request with this body stays within the bounds and its tenant's share of them."""
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
        if not requests:  # one is always allowed
            return True
        if limits.max_requests is not None and requests >= limits.tenant_share * limits.max_requests:
            return False
        most = limits.max_bytes
        return most is None or held_bytes + request.body_bytes <= limits.tenant_share * most

    def held_by(self, tenant: str | None) -> tuple[int, int]:
        """Requests and bytes that a tenant holds."""
        share = self._shares.get(tenant)
        return (0, 0) if share is None else (share.requests, share.bytes)

    def crowding_out(self, request: Request) -> Sequence[RequestId]:
        """The requests that leave a full queue so that this one has room; none if that would not be fair.

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
        for _, entries in sorted(self._of(tenant), key=lambda item: -item[0]):
            for request_id, entry in reversed(entries.items()):
                theirs -= 1 if by_count else entry.request.body_bytes
                if theirs < after:
                    return ()
                gone.append(request_id)
                requests -= 1
                held_bytes -= entry.request.body_bytes
                if self._within(requests, held_bytes, request):
                    return gone
        return ()

    def _of(self, tenant: str | None) -> Iterator[tuple[int, Entries]]:
        for by_priority in self._lines.values():
            for priority, fair in by_priority.items():
                if (flow := fair.flows.get(tenant)) is not None:
                    for entries in flow.by_fit.values():
                        yield priority, entries

    # --- in and out ---

    def push(
        self,
        request: Request,
        arrived_at: float,
        predicted_output: float = 0.0,
        size: int = 0,
        retry: bool = False,
        fit: int = 0,
    ) -> None:
        """Append a request; the caller has asked `has_room`."""
        assert request.id not in self.held, f"request {request.id} is queued already"
        model, tenant, priority = request.model, request.tenant, request.priority
        key = self._key(request, retry)
        by_priority = self._lines.get(key)
        if by_priority is None:
            by_priority = self._lines[key] = {}
            if key.instance is None and not key.retry:
                self._keys[model] = key
        fair = by_priority.get(priority)
        if fair is None:
            fair = by_priority[priority] = FairQueue()
            if len(by_priority) > 1:
                self._lines[key] = dict(sorted(by_priority.items()))
        entry = Queued(request, arrived_at, predicted_output, size, fit)
        flow = fair.push(tenant, self._weight(tenant), entry)
        self.held[request.id] = (key, priority, flow, entry)
        self._sizes[model] = self._sizes.get(model, 0) + size
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share()
        share.requests += 1
        share.bytes += request.body_bytes
        self.bytes += request.body_bytes

    def take(self, request_id: RequestId, fit: int) -> Queued:
        """Take a waiting request out, to be served by an instance of class `fit`.

        It counts for its tenant, and overtakes those that came before it and could be served there.
        """
        key, priority, flow, entry = self.held[request_id]
        fair = self._lines[key][priority]
        fair.served(flow.tenant, entry.size, flow.weight)
        for older in flow.by_fit[entry.fit].values():
            if older is entry:
                break
            fair.overtake(older)
        for other, entries in flow.by_fit.items():
            if other != entry.fit and other <= fit:
                for older in islice(entries.values(), MOST_OVERTAKEN):
                    if older.arrived_at >= entry.arrived_at:
                        break
                    fair.overtake(older)
        self.remove(request_id)
        return entry

    def passed(self, request: Request, size: float, fit: int) -> None:
        """A request was served by an instance of class `fit` without having waited.

        Where others wait, it counts for its tenant too, and has overtaken those that could be served there.
        """
        by_priority = self._lines.get(self._key(request, False))
        fair = None if by_priority is None else by_priority.get(request.priority)
        if fair is not None:
            fair.served(request.tenant, size, self._weight(request.tenant))
            fair.pass_by(fit)

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        place = self.held.pop(request_id, None)
        if place is None:
            return None
        key, priority, flow, entry = place
        request, model = entry.request, entry.request.model
        by_priority = self._lines[key]
        fair = by_priority[priority]
        fair.remove(flow, entry)
        if not fair.flows:  # nothing waits: what was served before is forgotten
            del by_priority[priority]
            if not by_priority:
                del self._lines[key]
                if key.instance is None and not key.retry:
                    del self._keys[model]
        self._sizes[model] -= entry.size
        if not any(other.model == model for other in self._lines):
            assert self._sizes.pop(model) == 0, f"sizes waiting for {model} do not add up"
        share = self._shares[request.tenant]
        share.requests -= 1
        share.bytes -= request.body_bytes
        if not share.requests:
            del self._shares[request.tenant]
        self.bytes -= request.body_bytes
        assert self.bytes >= 0, "queued bytes fell below zero"
        return entry

    def resize(self, entry: Queued, predicted_output: float, size: int) -> None:
        """Take over a new prediction for a waiting request."""
        self._sizes[entry.request.model] += size - entry.size
        entry.predicted_output, entry.size = predicted_output, size

    def refit(self, fit_of: Callable[[Request], int]) -> None:
        """Sort the waiting requests anew: the instances have changed. Their order and counts stay."""
        places = list(self.held.values())
        if all(entry.fit == fit_of(entry.request) for _, _, _, entry in places):
            return
        overtaken = [self.overtaken(entry) for _, _, _, entry in places]
        for key, priority, flow, entry in places:
            self._lines[key][priority].withdraw(flow, entry)
        for key, priority, flow, entry in places:
            entry.fit = fit_of(entry.request)
            self._lines[key][priority].enter(flow, entry)
        for (key, priority, _, entry), count in zip(places, overtaken, strict=True):
            line = self._lines[key][priority].lines[entry.fit]
            entry.credit = line.passes + MOST_OVERTAKEN - count
            line.bound, line.in_order = 0, False

    def _key(self, request: Request, retry: bool) -> QueueKey:
        """The line of a request."""
        restriction = request.restriction
        if restriction is None and not retry:
            key = self._keys.get(request.model)
            if key is not None:
                return key
        return QueueKey(request.model, restriction, retry)

    def _weight(self, tenant: str | None) -> float:
        weights = self.limits.tenant_weights
        return weights.get(tenant, 1.0) if weights and tenant is not None else 1.0

    def check_integrity(self) -> None:
        """Assert that the counts are those of the entries."""
        entries = [entry for waiting in self._entries() for entry in waiting.values()]
        assert sum(entry.request.body_bytes for entry in entries) == self.bytes
        assert {entry.request.id for entry in entries} == self.held.keys()
        assert all(self._entries()), "an empty flow was left behind"
        assert all(fair.flows for fair in self._fair_queues()), "an empty priority"
        assert all(self._lines.values()), "an empty line was left behind"
        assert all(list(line) == sorted(line) for line in self._lines.values()), "priorities out of order"
        for fair in self._fair_queues():
            assert fair.lines.keys() == {fit for flow in fair.flows.values() for fit in flow.by_fit}, "fits"
            for flow in fair.flows.values():
                for fit, waiting in flow.by_fit.items():
                    left = [entry.credit for entry in waiting.values()]
                    assert left == sorted(left) or not fair.lines[fit].in_order, "credits out of order"
        assert all(self.overtaken(entry) <= MOST_OVERTAKEN for entry in entries), "overtaken too often"
        held: dict[str | None, list[int]] = {}
        for entry in entries:
            of = held.setdefault(entry.request.tenant, [0, 0])
            of[0] += 1
            of[1] += entry.request.body_bytes
        keys = {key.model: key for key in self._lines if key.instance is None and not key.retry}
        assert self._keys == keys, "keys of lines"
        assert held == {name: [share.requests, share.bytes] for name, share in self._shares.items()}
