"""The bounded queue of requests that no instance has been chosen for yet.

It never holds more than `max_requests` requests or `max_bytes` bytes; what goes in comes out exactly once.
Next to go, under one `QueueKey`: the lowest level (priority; of one priority background requests come last,
before them those that cannot meet their target any more); then the tenant that was served least for its
weight, what runs counted (`TenantService`); then the request that is due first. Requests that only large
instances can take are kept apart by `fit`, so that they hold up none that others can take.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.types import Request, RequestId

#: Ranks of the requests of one priority, and their number.
_IN_TIME: Final = 0
_HOPELESS: Final = 1
_BACKGROUND: Final = 2
_RANKS: Final = 3
#: Tenants that ask for nothing are forgotten, if they were served no more than others, beyond so many.
_TENANTS_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class QueueLimits(PickleByFields):
    """Bounds of the queue. Times in seconds.

    A request waits at most `timeout_s`, and at most `no_instance_timeout_s` while no instance of its
    model is routable. `max_requests` None means no bound (simulation). A tenant may hold `tenant_share` of
    `max_requests` and `max_bytes`; `tenant_weights` are shares of what runs, 1 for a tenant without one.
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

    `due`: until when it is to be dispatched to meet its target. `fit` is the smallest class of instances that
    can take it.
    """

    __slots__ = ("arrived_at", "due", "fit", "predicted_output", "request", "size")

    def __init__(
        self, request: Request, arrived_at: float, predicted_output: float, size: int, fit: int, due: float
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.predicted_output = predicted_output
        self.size = size
        self.fit = fit
        self.due = due


#: Ordered: the head of a plain dict that is eaten from the front costs its past length.
Entries = OrderedDict[RequestId, Queued]


class TenantFlow:
    """The waiting requests of one tenant and service class at one level, oldest first, by `fit`."""

    __slots__ = ("by_fit", "service", "tenant")

    def __init__(self, tenant: str | None, service: str) -> None:
        self.tenant = tenant
        self.service = service
        self.by_fit: dict[int, Entries] = {}

    def first(self, fit: int) -> Queued:
        """The oldest request of a fit."""
        return next(iter(self.by_fit[fit].values()))


#: Flows of one level, by tenant and service class.
Flows = dict[tuple[str | None, str], TenantFlow]


def _level(request: Request) -> int:
    """The level of a request that has just come."""
    return request.priority * _RANKS + (_BACKGROUND if request.service.background else _IN_TIME)


def _due(entries: Entries, now: float) -> list[Queued]:
    """The first of some entries, as long as they were due before now."""
    found: list[Queued] = []
    for entry in entries.values():
        if entry.due >= now or not entry.request.service.stated:
            break
        found.append(entry)
    return found


class TenantService:
    """Tokens that each tenant was served, over its weight: the one with the least is next.

    A virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024) that counts
    running work: a tenant that comes starts level with the least that another had beyond what runs for it,
    so that it gets as much as runs for others before they get more, and saves nothing up by not asking.
    """

    __slots__ = ("_floor", "_served", "_weights", "running")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        #: Tokens of leases that have not ended, by tenant.
        self.running: dict[str | None, int] = {}
        self._served: dict[str | None, float] = {}
        self._floor = 0.0

    def weight(self, tenant: str | None) -> float:
        """Share of a tenant: 1 unless another is stated."""
        return self._weights.get(tenant, 1.0) if self._weights and tenant is not None else 1.0

    def come(self, tenant: str | None, waiting: Iterable[str | None]) -> None:
        """A tenant for which nothing ran or waited asks for something; those in `waiting` wait."""
        active = self.running.keys() | set(waiting)
        levels = [
            self._served[t] - self.running.get(t, 0) / self.weight(t) for t in active if t in self._served
        ]
        self._floor = max(self._floor, min(levels, default=self._floor))
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        if len(self._served) > _TENANTS_KEPT:
            self._served = {
                name: served
                for name, served in self._served.items()
                if served > self._floor or name in active or name == tenant
            }

    def booked(self, tenant: str | None, tokens: int, waiting: Iterable[str | None]) -> None:
        """A lease of a tenant began."""
        running = self.running
        known = running.get(tenant)
        if known is None:
            if tenant not in waiting:
                self.come(tenant, waiting)
            known = 0
        running[tenant] = known + tokens
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens / self.weight(tenant)

    def ended(self, tenant: str | None, tokens: int) -> None:
        """A lease of a tenant ended."""
        left = self.running.get(tenant, 0) - tokens
        if left > 0:
            self.running[tenant] = left
        else:
            self.running.pop(tenant, None)

    def served(self, tenant: str | None) -> float:
        """Tokens that a tenant was served, over its weight."""
        return self._served.get(tenant, self._floor)


class TenantShare:
    """Part of the queue that one tenant holds."""

    __slots__ = ("bytes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0


@mypyc_attr(acyclic=True)
class Head:
    """The next request of one level and `fit`; `background`: it takes only what others leave over."""

    __slots__ = ("background", "entry", "level")

    def __init__(self, level: int, entry: Queued) -> None:
        self.level = level
        self.entry = entry
        self.background = level % _RANKS == _BACKGROUND


class Queue:
    """Waiting requests, bounded by count and bytes over all of them."""

    __slots__ = ("_keys", "_lines", "_shares", "_sizes", "bytes", "held", "limits", "service")

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        #: By level, ascending.
        self._lines: dict[QueueKey, dict[int, Flows]] = {}
        #: Keys of the lines that are open to every instance of a model, by model: making one costs more than
        #: to find it.
        self._keys: dict[str, QueueKey] = {}
        #: The waiting requests and their slots. To be read: asked at every event whether it is empty.
        self.held: dict[RequestId, tuple[QueueKey, int, TenantFlow, Queued]] = {}
        self._sizes: dict[str, int] = {}
        self._shares: dict[str | None, TenantShare] = {}
        self.bytes = 0
        #: Service that each tenant has had; kept by the ledger.
        self.service = TenantService(limits.tenant_weights)

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.held

    def __iter__(self) -> Iterator[Queued]:
        """The waiting requests; a snapshot: callers may remove meanwhile."""
        return iter([place[3] for place in self.held.values()])

    def flows(self) -> list[list[Queued]]:
        """The waiting requests in lists, each oldest first: by key, level, tenant, class and fit."""
        return [
            list(entries.values())
            for by_level in self._lines.values()
            for flows in by_level.values()
            for flow in flows.values()
            for entries in flow.by_fit.values()
        ]

    @property
    def keys(self) -> list[QueueKey]:
        """The lines in which something waits, those of retries first."""
        lines = self._lines
        return sorted(lines, key=lambda key: not key.retry) if len(lines) > 1 else list(lines)

    def heads(self, key: QueueKey) -> list[Head]:
        """The next of a line for each `fit`, background apart: by level, then as their turn comes."""
        found: list[tuple[int, float, float, Head]] = []
        seen: set[tuple[int, bool]] = set()
        for level, flows in self._lines.get(key, {}).items():
            background = level % _RANKS == _BACKGROUND
            best: dict[int, tuple[float, float, Queued]] = {}
            for flow in flows.values():
                used = self.service.served(flow.tenant)
                for fit in flow.by_fit:
                    if (fit, background) not in seen:
                        first = flow.first(fit)
                        known = best.get(fit)
                        if known is None or (used, first.due) < (known[0], known[1]):
                            best[fit] = used, first.due, first
            for fit, (used, due, first) in best.items():
                seen.add((fit, background))
                found.append((level, used, due, Head(level, first)))
        if len(found) > 1:
            found.sort(key=lambda each: each[:3])
        return [head for _, _, _, head in found]

    def ahead(self, request: Request) -> bool:
        """True if requests wait in the line of one that has just come, and not only behind it."""
        by_level = self._lines.get(self._key(request, False))
        return by_level is not None and min(by_level) <= _level(request)

    def demote(self, entry: Queued) -> None:
        """Serve a request after those of its priority that can still meet their targets."""
        key, level, flow, _ = self.held[entry.request.id]
        assert level % _RANKS == _IN_TIME, f"{entry.request.id} is demoted twice"
        self._withdraw(key, level, flow, entry)
        self._enter(key, level + _HOPELESS, entry)

    def late(self, key: QueueKey, now: float) -> list[Queued]:
        """Requests of a line that were due before now and are neither demoted nor in the background."""
        return [
            entry
            for level, flows in self._lines.get(key, {}).items()
            if level % _RANKS == _IN_TIME
            for flow in flows.values()
            for entries in flow.by_fit.values()
            for entry in _due(entries, now)
        ]

    def by_model(self) -> dict[str, int]:
        """Number of waiting requests, by model."""
        return Counter(entry.request.model for entry in self)

    def oldest_at(self) -> float | None:
        """Arrival of the request that waits longest, None if none waits."""
        return min((flow[0].arrived_at for flow in self.flows()), default=None)

    def waiting(self, model: str) -> int:
        """The sizes of all that wait for a model, added up."""
        return self._sizes.get(model, 0)

    def waiting_sizes(self) -> dict[str, int]:
        """The sizes of all that wait, added up, of each model for which something does."""
        return {model: size for model, size in self._sizes.items() if size}

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
        for by_level in self._lines.values():
            for level, flows in by_level.items():
                for flow in flows.values():
                    if flow.tenant == tenant:
                        for entries in flow.by_fit.values():
                            yield level, entries

    # --- in and out ---

    def push(
        self,
        request: Request,
        arrived_at: float,
        predicted_output: float = 0.0,
        size: int = 0,
        retry: bool = False,
        fit: int = 0,
        due: float = math.inf,
    ) -> None:
        """Append a request; the caller has asked `has_room`."""
        assert request.id not in self.held, f"request {request.id} is queued already"
        key = self._key(request, retry)
        entry = Queued(request, arrived_at, predicted_output, size, fit, due)
        self._enter(key, _level(request), entry)
        self._sizes[request.model] = self._sizes.get(request.model, 0) + size
        share = self._shares.get(request.tenant)
        if share is None:
            if request.tenant not in self.service.running:
                self.service.come(request.tenant, self._shares)
            share = self._shares[request.tenant] = TenantShare()
        share.requests += 1
        share.bytes += request.body_bytes
        self.bytes += request.body_bytes

    def _enter(self, key: QueueKey, level: int, entry: Queued) -> None:
        request = entry.request
        by_level = self._lines.get(key)
        if by_level is None:
            by_level = self._lines[key] = {}
            if key.instance is None and not key.retry:
                self._keys[key.model] = key
        flows = by_level.get(level)
        if flows is None:
            flows = by_level[level] = {}
            if len(by_level) > 1:
                self._lines[key] = dict(sorted(by_level.items()))
        name = (request.tenant, request.service.name)
        flow = flows.get(name)
        if flow is None:
            flow = flows[name] = TenantFlow(request.tenant, request.service.name)
        entries = flow.by_fit.get(entry.fit)
        if entries is None:
            entries = flow.by_fit[entry.fit] = OrderedDict()
        entries[request.id] = entry
        self.held[request.id] = (key, level, flow, entry)

    def _withdraw(self, key: QueueKey, level: int, flow: TenantFlow, entry: Queued) -> None:
        """Take an entry out of its flow, and what is empty then out of the line."""
        entries = flow.by_fit[entry.fit]
        del entries[entry.request.id]
        if entries:
            return
        del flow.by_fit[entry.fit]
        if flow.by_fit:
            return
        by_level = self._lines[key]
        del by_level[level][flow.tenant, flow.service]
        if not by_level[level]:
            del by_level[level]
            if not by_level:
                del self._lines[key]
                if key.instance is None and not key.retry:
                    del self._keys[key.model]

    def remove(self, request_id: RequestId) -> Queued | None:
        """Take a request out, None if it is not waiting."""
        place = self.held.pop(request_id, None)
        if place is None:
            return None
        key, level, flow, entry = place
        request, model = entry.request, entry.request.model
        self._withdraw(key, level, flow, entry)
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
        """Sort the waiting requests anew: the instances have changed. Their order stays."""
        places = list(self.held.values())
        if all(entry.fit == fit_of(entry.request) for _, _, _, entry in places):
            return
        for key, level, flow, entry in places:
            self._withdraw(key, level, flow, entry)
        for key, level, _, entry in places:
            entry.fit = fit_of(entry.request)
            self._enter(key, level, entry)

    def _key(self, request: Request, retry: bool) -> QueueKey:
        """The line of a request."""
        restriction = request.restriction
        if restriction is None and not retry:
            key = self._keys.get(request.model)
            if key is not None:
                return key
        return QueueKey(request.model, restriction, retry)

    def booked(self, tenant: str | None, tokens: int) -> None:
        """A lease of a tenant began, for so many tokens."""
        self.service.booked(tenant, tokens, self._shares)

    def check_integrity(self) -> None:
        """Assert that the counts are those of the entries."""
        entries = [entry for waiting in self.flows() for entry in waiting]
        assert sum(entry.request.body_bytes for entry in entries) == self.bytes
        assert {entry.request.id for entry in entries} == self.held.keys()
        assert all(self.flows()), "an empty flow was left behind"
        assert all(self._lines.values()), "an empty line was left behind"
        assert all(list(line) == sorted(line) for line in self._lines.values()), "levels out of order"
        held: dict[str | None, list[int]] = {}
        for entry in entries:
            of = held.setdefault(entry.request.tenant, [0, 0])
            of[0] += 1
            of[1] += entry.request.body_bytes
        keys = {key.model: key for key in self._lines if key.instance is None and not key.retry}
        assert self._keys == keys, "keys of lines"
        assert held == {name: [share.requests, share.bytes] for name, share in self._shares.items()}
