"""Fair shares of tenants: of a full queue, and of service by weight: the one that had least is next."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.queue import Queue
from hetlb.balancer.core.types import Request, RequestId

#: Most kept tenants without requests. Beyond it the tenant idle for longest is forgotten.
_IDLE_TENANTS: Final = 1024
#: Most entries of the heap of levels, beyond two for each known tenant.
_MOST_LEFT: Final = 64
#: Requests and bytes of a tenant without any.
_NO_SHARE: Final = [0, 0]


@mypyc_attr(acyclic=True)
class _Tenant:
    """Tokens of a tenant's leases that have not ended, and tokens that it was served over its weight."""

    __slots__ = ("running", "served", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.running = 0
        self.served = 0.0


class FairShares:
    """Requests of each tenant in a queue, and tokens that it was served, over its weight.

    A virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024) that counts
    running work, too. A tenant's level is what it was served, less what runs for it. A new tenant starts at
    the least level of the others. So it gets as much as runs for others before they get more, and saves
    nothing up by not asking. The time of a call does not grow with the number of tenants.
    """

    def __init__(self, queue: Queue) -> None:
        """Begin with what runs and waits."""
        self._queue = queue
        self._limits = queue.limits
        self._known: dict[str | None, _Tenant] = {}
        #: Tenants without requests, the one idle for longest first.
        self._idle: dict[str | None, _Tenant] = {}
        #: Heap of tenants with their levels. It may hold tenants that ask no more. An entry's level is at
        #: most the tenant's own, as levels do not fall while a tenant asks.
        self._levels: list[tuple[float, int, str | None]] = []
        self._pushed = 0
        self._floor = 0.0
        #: Requests and bytes that wait, by tenant.
        self.waiting: dict[str | None, list[int]] = {}
        for tenant, tokens in queue.running():
            self.booked(tenant, tokens)
        for entry in queue:
            self.waits(entry.request)

    # --- service ---

    def _weight(self, tenant: str | None) -> float:
        """Return the stated share of a tenant, else 1."""
        return 1.0 if tenant is None else self._limits.tenant_weights.get(tenant, 1.0)

    def _asks(self, tenant: str | None, found: _Tenant) -> bool:
        return found.running > 0 or tenant in self.waiting

    def _come(self, tenant: str | None) -> _Tenant:
        """Return a tenant with a request. A new one starts level with the others that have requests."""
        found = self._known.get(tenant)
        if found is not None and found.running > 0:
            return found
        self._raise_floor()
        if found is None:
            found = self._idle.pop(tenant, None) or _Tenant(self._weight(tenant))
            self._known[tenant] = found
        found.served = max(found.served, self._floor)
        self._pushed += 1
        heappush(self._levels, (found.served, self._pushed, tenant))
        return found

    def _raise_floor(self) -> None:
        """Raise the floor to the least level of the tenants that ask."""
        levels, known = self._levels, self._known
        if len(levels) > 2 * len(known) + _MOST_LEFT:
            self._levels = levels = [
                (each.served - each.running / each.weight, number, name)
                for number, (name, each) in enumerate(known.items())
                if self._asks(name, each)
            ]
            heapify(levels)
        while levels:
            level, number, name = levels[0]
            each = known.get(name)
            if each is None or not self._asks(name, each):
                heappop(levels)
                continue
            own = each.served - each.running / each.weight
            if own <= level:
                self._floor = max(self._floor, own)
                return
            heapreplace(levels, (own, number, name))

    def _rest(self, tenant: str | None) -> None:
        """Move a tenant without requests to the idle ones, of which the last `_IDLE_TENANTS` are kept."""
        found = self._known.get(tenant)
        if found is None or self._asks(tenant, found):
            return
        idle = self._idle
        idle[tenant] = found
        del self._known[tenant]
        if len(idle) > _IDLE_TENANTS:
            del idle[next(iter(idle))]

    def booked(self, tenant: str | None, tokens: int) -> None:
        """Note that a lease of a tenant began."""
        found = self._known.get(tenant)
        if found is None or (found.running <= 0 and tenant not in self.waiting):
            found = self._come(tenant)
        found.running += tokens
        found.served += tokens / found.weight

    def ended(self, tenant: str | None, tokens: int) -> None:
        """Note that a lease of a tenant ended."""
        found = self._known.get(tenant)
        if found is not None:
            found.running = max(0, found.running - tokens)
            if not found.running:
                self._rest(tenant)

    def served(self, tenant: str | None) -> float:
        """Return the tokens that a tenant was served, over its weight."""
        found = self._known.get(tenant) or self._idle.get(tenant)
        return self._floor if found is None else found.served

    # --- the queue ---

    def waits(self, request: Request) -> None:
        """Note that a request waits."""
        share = self.waiting.get(request.tenant)
        if share is None:
            self._come(request.tenant)
            share = self.waiting[request.tenant] = [0, 0]
        share[0] += 1
        share[1] += request.body_bytes

    def left(self, request: Request) -> None:
        """Note that a request waits no longer."""
        share = self.waiting[request.tenant]
        share[0] -= 1
        share[1] -= request.body_bytes
        if not share[0]:
            del self.waiting[request.tenant]
            self._rest(request.tenant)

    def may_wait(self, request: Request) -> bool:
        """Return True if one more request stays within its tenant's share of the bounds."""
        limits = self._limits
        if limits.tenant_share >= 1.0:
            return True
        requests, held_bytes = self.waiting.get(request.tenant, _NO_SHARE)
        if not requests:  # one is always allowed
            return True
        if limits.max_requests is not None and requests >= limits.tenant_share * limits.max_requests:
            return False
        most = limits.max_bytes
        return most is None or held_bytes + request.body_bytes <= limits.tenant_share * most

    def crowding_out(self, request: Request) -> Sequence[RequestId]:
        """Return the requests that leave a full queue so that this one has room; none if unfair.

        They are the newest requests of the tenant that holds most. It would be unfair if that tenant then
        held less than the requester.
        """
        waiting, queue, limits = self.waiting, self._queue, self._limits
        if (len(waiting) < 2 and request.tenant in waiting) or not self.may_wait(request):
            return ()
        by_count = limits.max_requests is not None and len(queue) >= limits.max_requests
        unit = 0 if by_count else 1
        held = {tenant: share[unit] for tenant, share in waiting.items()}
        tenant = max(held, key=held.__getitem__, default=request.tenant)
        if tenant == request.tenant:
            return ()
        gone: list[RequestId] = []
        requests, held_bytes = len(queue), queue.bytes
        theirs = held[tenant]
        after = held.get(request.tenant, 0) + (1 if by_count else request.body_bytes)
        flows = [flow for flow in queue.flows if flow.name.tenant == tenant]
        for flow in sorted(flows, key=lambda each: -each.name.level):
            for request_id, entry in reversed(flow.entries.items()):
                theirs -= 1 if by_count else entry.request.body_bytes
                if theirs < after:
                    return ()
                gone.append(request_id)
                requests -= 1
                held_bytes -= entry.request.body_bytes
                if queue.within(requests, held_bytes, request):
                    return gone
        return ()
