"""Bounded queue of the requests without an instance yet.

Each tenant has a next request: within its lowest level, the first one due. Levels go by band, then by
priority. Within a priority, requests certain to miss their target come after the others, background requests
last. A priority is the client's own word, so it orders nothing across tenants. Between the tenants' next
requests under one `QueueKey`, the lowest band goes first, background last. Then goes the tenant with the
least service for its weight, running requests counted (`FairShares`). Requests for large instances alone have
a `fit` of their own, so that they do not hold up the others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.types import Request, RequestId

if TYPE_CHECKING:
    from hetlb.balancer.core.fair_shares import FairShares

#: Ranks of the requests of one priority, and their number.
_IN_TIME: Final = 0
_HOPELESS: Final = 1
_BACKGROUND: Final = 2
_RANKS: Final = 3
#: Most requests that have left and still have a place in the order, beyond the number of waiting ones.
_MOST_LEFT: Final = 64


@dataclass(frozen=True, slots=True)
class QueueLimits(PickleByFields):
    """Bounds of the queue. Times in seconds.

    A request waits at most `timeout_s`, and at most `no_instance_timeout_s` while no instance of its
    model is routable. `max_requests` None means no bound (simulation). A tenant may hold `tenant_share` of
    `max_requests` and `max_bytes`. `tenant_weights` are relative shares of the running work, by default 1.
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
    """One waiting request, its arrival, and its size by the predicted output (see `core.demand`).

    `due`: latest dispatch that meets its target. `number`: its place in the order of arrival.
    """

    __slots__ = ("arrived_at", "due", "flow", "number", "request", "size")

    def __init__(
        self, request: Request, number: int, arrived_at: float, size: int, due: float, flow: QueueFlow
    ) -> None:
        self.request = request
        self.number = number
        self.arrived_at = arrived_at
        self.size = size
        self.due = due
        self.flow = flow

    def reschedule(self, due: float) -> None:
        """Set a new due time."""
        if due != self.due:
            self.due = due
            self.flow.enter(self)


class FlowName(NamedTuple):
    """Level, tenant and service class of waiting requests, and the smallest class of instances for them.

    `band` is the operator's level: it comes first.
    """

    level: int
    tenant: str | None
    service_class: str
    fit: int
    kind: int = 0
    band: int = 0

    @property
    def common(self) -> tuple[int, int]:
        """Level across tenants: band, and rank within one priority."""
        return self.band, self.level % _RANKS


class QueueFlow:
    """Waiting requests of one line and name."""

    __slots__ = ("_order", "entries", "key", "name")

    def __init__(self, key: QueueKey, name: FlowName) -> None:
        self.key = key
        self.name = name
        #: Ordered: the head of a plain dict consumed from the front costs its past length.
        self.entries: OrderedDict[RequestId, Queued] = OrderedDict()
        #: The same by due time, with some that have left.
        self._order: list[tuple[float, int, RequestId]] = []

    def enter(self, entry: Queued) -> None:
        """Take in a request."""
        request_id = entry.request.id
        self.entries[request_id] = entry
        heappush(self._order, (entry.due, entry.number, request_id))
        if len(self._order) > 2 * len(self.entries) + _MOST_LEFT:
            self._order = [(each.due, each.number, each.request.id) for each in self.entries.values()]
            heapify(self._order)

    @property
    def oldest_at(self) -> float:
        """Arrival of the one that waits longest."""
        return next(iter(self.entries.values())).arrived_at

    @property
    def first(self) -> Queued:
        """The first one due."""
        while True:
            due, number, request_id = self._order[0]
            entry = self.entries.get(request_id)
            if entry is not None and entry.number == number and entry.due == due:
                return entry
            heappop(self._order)

    @property
    def background(self) -> bool:
        """True for background requests."""
        return self.name.level % _RANKS == _BACKGROUND

    @property
    def in_time(self) -> bool:
        """True if the requests are neither demoted nor in the background."""
        return self.name.level % _RANKS == _IN_TIME


def _level(request: Request) -> int:
    """Return the level of a request that has just come."""
    return request.priority * _RANKS + (_BACKGROUND if request.service.background else _IN_TIME)


@dataclass(frozen=True, slots=True)
class WaitingElsewhere(PickleByFields):
    """Requests that wait at other schedulers of the fleet. The bounds of the queue hold for the sum.

    `oldest_at`: arrival of the oldest one, by model.
    """

    requests: int = 0
    held_bytes: int = 0
    oldest_at: Mapping[str, float] = field(default_factory=dict)


class Queue:
    """Waiting requests, bounded by count and bytes over all of them."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._lines: dict[QueueKey, dict[FlowName, QueueFlow]] = defaultdict(dict)
        #: Keys of unrestricted lines by model: a look-up is cheaper than a new key.
        self._keys: dict[str, QueueKey] = {}
        #: The waiting requests, read-only for others: each event asks whether it is empty.
        self.held: dict[RequestId, Queued] = {}
        self._sizes: dict[str, int] = {}
        self.bytes = 0
        #: Requests that wait at other schedulers of the fleet.
        self.elsewhere = WaitingElsewhere()
        self._pushed = 0
        #: Tenants and tokens of the live leases; set by their ledger.
        self.running: Callable[[], Iterable[tuple[str | None, int]]] = tuple
        #: Shares of the tenants, None before they are needed.
        self.tenants: FairShares | None = None
        #: True once the option has been asked for them: without its folder all tenants are alike.
        self._asked_shares = False
        self._shared(None)

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.held

    def __iter__(self) -> Iterator[Queued]:
        """Yield the waiting requests from a snapshot: callers may remove some meanwhile."""
        return iter(list(self.held.values()))

    @property
    def flows(self) -> list[QueueFlow]:
        """The flows of all lines, by key and level."""
        return [
            flow
            for line in self._lines.values()
            for flow in sorted(line.values(), key=lambda each: (each.name.band, each.name.level))
        ]

    @property
    def keys(self) -> list[QueueKey]:
        """The lines with waiting requests, retries first."""
        lines = self._lines
        return sorted(lines, key=lambda key: not key.retry) if len(lines) > 1 else list(lines)

    def line(self, key: QueueKey) -> list[QueueFlow]:
        """Return the flows of a line."""
        return list(self._lines.get(key, {}).values())

    def heads(self, key: QueueKey) -> list[Queued]:
        """Return the next requests of a line, in the order of their turns.

        There is one for each `fit` and kind, and another one of each for background requests.
        """
        line = self._lines.get(key)
        if line is None:
            return []
        if len(line) == 1:
            return [flow.first for flow in line.values()]
        tenants = self.tenants
        nexts: dict[str | None, tuple[tuple[int, int, float, int], QueueFlow]] = {}
        ranks: list[tuple[str | None, tuple[int, int, float, int], QueueFlow]] = []
        for name, flow in line.items():
            first = flow.first
            rank = (name.band, name.level, first.due, first.number)
            ranks.append((name.tenant, rank, flow))
            known = nexts.get(name.tenant)
            if known is None or rank < known[0]:
                nexts[name.tenant] = rank, flow
        turns = {
            tenant: (flow.name.common, 0.0 if tenants is None else tenants.served(tenant), rank[2:])
            for tenant, (rank, flow) in nexts.items()
        }
        ranks.sort(key=lambda each: (turns[each[0]], each[1]))
        best: dict[tuple[int, int, bool], Queued] = {}
        for _, _, flow in ranks:
            best.setdefault((flow.name.fit, flow.name.kind, flow.background), flow.first)
        return list(best.values())

    def ahead(self, request: Request) -> bool:
        """Return True if a waiting request of the same line goes before a new one."""
        line = self._lines.get(self._key(request, False))
        if line is None:
            return False
        own = FlowName(_level(request), request.tenant, "", 0, band=request.band)
        for name in line:
            if name.tenant == own.tenant:
                if (name.band, name.level) <= (own.band, own.level):
                    return True
            elif name.common <= own.common:
                return True
        return False

    def demote(self, entry: Queued) -> None:
        """Serve a request after the requests of its priority with a target still in reach."""
        flow = entry.flow
        assert flow.in_time, f"{entry.request.id} is demoted twice"
        self._withdraw(entry)
        self._enter(flow.key, flow.name._replace(level=flow.name.level + _HOPELESS), entry)

    def by_model(self) -> dict[str, int]:
        """Return the number of waiting requests, by model."""
        return Counter(entry.request.model for entry in self)

    def oldest_at(self) -> float | None:
        """Return the arrival of the oldest waiting request, None if none waits."""
        return min((flow.oldest_at for flow in self.flows), default=None)

    def oldest_by_model(self) -> dict[str, float]:
        """Return the arrival of the oldest waiting request, by model."""
        found: dict[str, float] = {}
        for flow in self.flows if self.held else ():
            model, arrived_at = flow.key.model, flow.oldest_at
            found[model] = min(arrived_at, found.get(model, arrived_at))
        return found

    def is_older_elsewhere(self, model: str) -> bool:
        """Return True if the oldest request for a model waits at another scheduler."""
        there = self.elsewhere.oldest_at.get(model)
        return there is not None and there < self.oldest_by_model().get(model, there)

    def waiting(self, model: str) -> int:
        """Return the sum of the sizes of a model's waiting requests."""
        return self._sizes.get(model, 0)

    def waiting_sizes(self) -> dict[str, int]:
        """Return the sum of the sizes of the waiting requests, by model."""
        return {model: size for model, size in self._sizes.items() if size}

    # --- bounds ---

    def has_room(self, request: Request) -> bool:
        """Return True if one more request stays within the bounds and its tenant's share of them."""
        tenants = self.tenants
        may_wait = tenants is None or tenants.may_wait(request)
        there = self.elsewhere
        requests, held_bytes = len(self.held) + there.requests, self.bytes + there.held_bytes
        return may_wait and self.within(requests, held_bytes, request)

    def within(self, requests: int, held_bytes: int, request: Request) -> bool:
        """Return True if the bounds allow one request more than these."""
        limits = self.limits
        if limits.max_requests is not None and requests >= limits.max_requests:
            return False
        return limits.max_bytes is None or held_bytes + request.body_bytes <= limits.max_bytes

    def crowding_out(self, request: Request) -> Sequence[RequestId]:
        """Return the requests to drop from a full queue for this one; none if that is unfair."""
        tenants = self._shared(request.tenant)
        return () if tenants is None else tenants.crowding_out(request)

    # --- in and out ---

    def push(
        self,
        request: Request,
        arrived_at: float,
        size: int = 0,
        retry: bool = False,
        fit: int = 0,
        due: float = math.inf,
        kind: int = 0,
    ) -> None:
        """Append a request. The caller has checked `has_room`."""
        assert request.id not in self.held, f"request {request.id} is queued already"
        tenants = self._shared(request.tenant)
        key = self._key(request, retry)
        name = FlowName(_level(request), request.tenant, request.service.name, fit, kind, request.band)
        flow = self._flow(key, name)
        self._pushed += 1
        entry = Queued(request, self._pushed, arrived_at, size, due, flow)
        self.held[request.id] = entry
        flow.enter(entry)
        self._sizes[request.model] = self._sizes.get(request.model, 0) + size
        self.bytes += request.body_bytes
        if tenants is not None:
            tenants.waits(request)

    def _flow(self, key: QueueKey, name: FlowName) -> QueueFlow:
        """Return a flow, made if missing."""
        line = self._lines[key]
        flow = line.get(name)
        if flow is None:
            flow = line[name] = QueueFlow(key, name)
        return flow

    def _enter(self, key: QueueKey, name: FlowName, entry: Queued) -> None:
        entry.flow = self._flow(key, name)
        entry.flow.enter(entry)

    def _withdraw(self, entry: Queued) -> None:
        """Take an entry out of its flow, and empty flows out of the line."""
        flow = entry.flow
        del flow.entries[entry.request.id]
        if not flow.entries:
            line = self._lines[flow.key]
            del line[flow.name]
            if not line:
                del self._lines[flow.key]

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        entry = self.held.pop(request_id, None)
        if entry is None:
            return None
        request, model = entry.request, entry.request.model
        self._withdraw(entry)
        self._sizes[model] -= entry.size
        if not any(other.model == model for other in self._lines):
            assert self._sizes.pop(model) == 0, f"sizes waiting for {model} do not add up"
        if self.tenants is not None:
            self.tenants.left(request)
        self.bytes -= request.body_bytes
        assert self.bytes >= 0, "queued bytes fell below zero"
        return entry

    def resize(self, entry: Queued, size: int) -> None:
        """Set a new size of a waiting request."""
        self._sizes[entry.request.model] += size - entry.size
        entry.size = size

    def refit(self, fit_of: Callable[[Request], int]) -> None:
        """Sort the waiting requests again after a change of the instances. Their order stays."""
        entries = list(self.held.values())
        if all(entry.flow.name.fit == fit_of(entry.request) for entry in entries):
            return
        for entry in entries:
            self._withdraw(entry)
        for entry in entries:
            flow = entry.flow
            self._enter(flow.key, flow.name._replace(fit=fit_of(entry.request)), entry)

    def _key(self, request: Request, retry: bool) -> QueueKey:
        """Return the line of a request."""
        restriction = request.restriction
        if restriction is not None or retry:
            return QueueKey(request.model, restriction, retry)
        key = self._keys.get(request.model)
        if key is None:
            key = self._keys[request.model] = QueueKey(request.model, None, False)
        return key

    def _shared(self, tenant: str | None) -> FairShares | None:
        """Return the shares of tenants, made at a tenant's first request."""
        if not self._asked_shares and (tenant is not None or self.limits.tenant_share < 1.0):
            self._asked_shares = True
            from hetlb.balancer.core.fair_shares import FairShares

            self.tenants = FairShares(self)
        return self.tenants

    def booked(self, tenant: str | None, tokens: int) -> None:
        """Note that a lease of a tenant begins, for `tokens` tokens."""
        tenants = self.tenants if tenant is None else self._shared(tenant)
        if tenants is not None:
            tenants.booked(tenant, tokens)

    def ended(self, tenant: str | None, tokens: int) -> None:
        """Note that a lease of a tenant ended."""
        if self.tenants is not None:
            self.tenants.ended(tenant, tokens)
