"""Second places of requests: after the first prompts of a wrong profile, and of rests of answers."""

from __future__ import annotations

from hetlb.balancer.core.backlog import Backlog
from hetlb.balancer.core.failover import Failover, may_move, predicted_rest
from hetlb.balancer.core.placement import Placement
from hetlb.balancer.core.types import Command, Lease, Outcome, Request


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
        """Place a request elsewhere and return the commands.

        None: its lease stays (no instance is better), or has ended without a new place (`wait` queues it).
        """
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

    def go_on(self, lease: Lease, rest: Request, now: float) -> list[Command]:
        """Place the rest of an answer after its engine was lost. It takes from the budget of retries."""
        placement, request_id = self._placement, rest.id
        retries = placement.retries
        retries.forget(request_id)
        predicted = predicted_rest(lease, rest)
        ready = placement.fleet.ready.get(rest.model)
        if ready is not None and retries.allowed(self._failover.slots_taken):
            retries.attempts[request_id].tried.append(lease.instance)
            placed = placement.place(rest, ready, now, predicted)
            if placed is not None:
                retries.leases.add(placed.lease.id)
                return [placed]
            retries.forget(request_id)
        return self._backlog.push(rest, now, predicted, again=True)

    def move_away(self, lease: Lease, generated: int, now: float) -> list[Command]:
        """Move a lease away from a working instance that will leave.

        The commands hold the dispatch of its rest, behind `generated` tokens, and the lease is over. Without
        commands it stays.
        """
        ready = self._placement.fleet.ready.get(lease.request.model)
        if ready is None or lease.decode is not None:
            return []
        found = self._failover.elsewhere(lease, lease.request.goes_on(generated), ready, now, with_room=False)
        if found is None:
            return []
        placed = self._placement.book(found)
        lease.outcome, lease.ended_at = Outcome.CLIENT_GONE, now
        self._failover.drop(lease, now)
        return [placed, *self._backlog.flush(now)]
