"""Second places of requests placed by a wrong profile: its first prompts showed another speed."""

from __future__ import annotations

from hetlb.balancer.core.backlog import Backlog
from hetlb.balancer.core.failover import Failover, may_move
from hetlb.balancer.core.placement import Placement
from hetlb.balancer.core.types import Command, Lease


class PlacingAgain:
    """Leases to be placed again, and leases that wait until all are looked at."""

    def __init__(self, failover: Failover, placement: Placement, backlog: Backlog) -> None:
        self._failover, self._placement, self._backlog = failover, placement, backlog
        self._taken_back: list[Lease] = []

    def leases(self, model: str) -> list[Lease]:
        """Return the leases of a model without a token, newest first."""
        found = [
            lease
            for instance in self._placement.fleet.instances.values()
            if instance.spec.model == model
            for lease in instance.leases.values()
            if lease.request.sequences and may_move(lease)
        ]
        return sorted(found, key=lambda lease: (-lease.dispatched_at, -lease.id))

    def place(self, lease: Lease, now: float) -> list[Command]:
        """Place a lease again. Without commands it stays, or ends until `wait`."""
        request, placement = lease.request, self._placement
        ready = placement.fleet.ready.get(request.model)
        if ready is None or request.id in placement.retries.attempts:
            return []
        found = placement.choose(request, ready, now, lease.predicted_output)
        if placement.take_failed(request.id) or (found and found.instance.name == lease.instance):
            return []
        self._failover.drop(lease, now)
        if found is None:
            self._taken_back.append(lease)
            return []
        return [placement.book(found)]

    def wait(self, now: float) -> list[Command]:
        """Queue the requests taken back by `place`, in the order of their arrival."""
        commands: list[Command] = []
        while self._taken_back:
            lease = self._taken_back.pop()
            commands += self._backlog.push(lease.request, lease.dispatched_at, lease.predicted_output)
        return commands + self._backlog.flush(now)
