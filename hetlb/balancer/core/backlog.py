"""Backlog: requests that wait for an instance, from their place in the queue to a placement or a reject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hetlb.balancer.core import rejections
from hetlb.balancer.core.demand import size_of
from hetlb.balancer.core.placement import Placement
from hetlb.balancer.core.queue import Queued, QueueKey
from hetlb.balancer.core.ready import ReadyInstances, least_tokens
from hetlb.balancer.core.types import Command, Reject, RejectReason, Request, RequestId

if TYPE_CHECKING:
    from hetlb.balancer.core.waiting_targets import WaitingTargets

#: Waiting requests whose length and due time are estimated again per completed answer.
_REESTIMATED_REQUESTS: Final = 8


class Backlog:
    """The queue, and the placement of its requests as instances get room and time passes."""

    def __init__(self, placement: Placement, now: float) -> None:
        self._placement = placement
        self.queue, self._fleet = placement.queue, placement.fleet
        self._ledger, self._retries = placement.ledger, placement.retries
        #: Waiting requests with estimates older than the newest answer.
        self._stale: list[RequestId] = []
        #: Latency targets of waiting requests, None before the first request with targets.
        self._targets: WaitingTargets | None = None
        #: Time of the last tick, or when the first request began to wait. The next tick counts from it.
        self.ticked_at = now

    def push(self, request: Request, now: float, predicted: float, *, again: bool = False) -> list[Command]:
        """Queue a request, or reject it if the policy failed on it. `again`: it may run a second time."""
        queue, fleet = self.queue, self._fleet
        if self._placement.take_failed(request.id):
            self._retries.forget(request.id)
            return [rejections.policy_failed(request.id)]
        if request.model in fleet.down_since and queue.limits.no_instance_timeout_s <= 0:
            return [rejections.no_instance(request)]
        commands: list[Command] = []
        if not queue.has_room(request):
            leave = queue.crowding_out(request)
            if not leave:
                return [rejections.queue_full(request.id)]
            for request_id in leave:
                self.forget(request_id)
                commands.append(rejections.queue_full(request_id))
        if not len(queue):
            self.ticked_at = now
        size = round(size_of(request, predicted))
        if request.service.stated and self._targets is None:
            from hetlb.balancer.core.waiting_targets import WaitingTargets

            self._targets = WaitingTargets(fleet)
        due = now + self._placement.patience_s(request)
        if self._targets is not None:
            due = self._targets.due(request, now, predicted)
        kind = self._placement.kind_of(request, predicted)
        queue.push(request, now, size, again, fleet.fit_of(request), due, kind)
        return commands + self.flush(now) if fleet.end_slow_starts(request.model) else commands

    def forget(self, request_id: RequestId) -> None:
        """Forget a request: it waits no longer, nor is it retried."""
        self.queue.remove(request_id)
        self._retries.forget(request_id)

    def give_up(self, request: Request, *, unsent: bool) -> Reject:
        """Reject a request that no engine answered. `unsent`: no engine can have run it."""
        self.forget(request.id)
        return rejections.not_answered(request.id, unsent=unsent)

    def estimate_again(self) -> None:
        """Estimate the size and the due time of the next few waiting requests again.

        The next call continues with later ones. Both figures change while a request waits: predictions learn,
        and a cache takes in or evicts parts of its prompt. Example: after one turn of a conversation was
        read, the next turn takes less time to read.
        """
        queue, stale, placement = self.queue, self._stale, self._placement
        if not stale:
            stale = self._stale = list(queue.held)
        for _ in range(min(_REESTIMATED_REQUESTS, len(stale))):
            entry = queue.held.get(stale.pop())
            if entry is None:
                continue
            request = entry.request
            if request.generates:
                queue.resize(entry, round(size_of(request, placement.predictor.predict(request))))
            if request.prefix_keys and self._targets is None:
                entry.reschedule(entry.arrived_at + placement.patience_s(request))

    # --- placement ---

    def flush(self, now: float) -> list[Command]:
        """Place waiting requests."""
        if not self.queue.held:
            return []
        commands: list[Command] = []
        for key in self.queue.keys:
            if self._targets is not None:
                commands += self._pass_over_late(key, now)
            while (command := self._place_next(key, now)) is not None:
                commands.append(command)
        return commands

    def freed(self, model: str, now: float) -> list[Command]:
        """Place waiting requests after an instance of a model got room.

        If the oldest request for the model waits at another scheduler, leave the room to that scheduler. Its
        next message, or a tick, shows if it does not take the room.
        """
        queue = self.queue
        return self.flush(now) if queue.held and not queue.is_older_elsewhere(model) else []

    def _pass_over_late(self, key: QueueKey, now: float) -> list[Command]:
        """Refuse or demote the requests of a line that can no longer meet their targets."""
        from hetlb.balancer.core.waiting_targets import late

        commands: list[Command] = []
        for entry in late(self.queue, key, now):
            request = entry.request
            if request.service.refuse_hopeless:
                self.forget(request.id)
                name = request.service.name
                text = f"The targets of the class `{name}` can no longer be met for this request."
                commands.append(rejections.later(request.id, RejectReason.QUEUE_EXPIRED, text))
            else:
                self.queue.demote(entry)
        return commands

    def _place_next(self, key: QueueKey, now: float) -> Command | None:
        """Place the first request of a line that can be placed, and return the command; None if none can be.

        A request gets no instance that is kept for an earlier one.
        """
        ready = self._fleet.ready.get(key.model)
        if ready is None:
            return None
        ceiling: int | None = None
        anywhere = not key.retry and key.instance is None
        worth = self._placement.policy.worth if anywhere else None
        suits = None
        heads = self.queue.heads(key)
        if worth is not None and len(heads) > 1 and ready.able:
            suits = worth.suits(heads, ready.able)
        for entry in heads:
            kept: frozenset[str] = frozenset() if suits is None else suits.kept_from(entry)
            if suits is not None and len(kept) >= len(ready.able):
                continue
            command = self._place_head(ready, key, entry, ceiling, kept, now)
            if command is not None:
                return command
            if suits is not None:
                suits.passed(entry)
            elif not entry.flow.background:
                fit = entry.flow.name.fit
                ceiling = fit if ceiling is None else min(ceiling, fit)
        return None

    def _place_head(
        self,
        ready: ReadyInstances,
        key: QueueKey,
        entry: Queued,
        ceiling: int | None,
        kept: frozenset[str],
        now: float,
    ) -> Command | None:
        queue, placement, request = self.queue, self._placement, entry.request
        if request.prompt_exact and least_tokens(request) > ready.longest_prompt:
            self.forget(request.id)
            return rejections.too_long(request, ready.longest_prompt)
        predicted = placement.predictor.predict(request) if request.generates else 0.0
        waited_s = now - entry.arrived_at
        found = placement.choose(
            request, ready, now, predicted, entry.size, ceiling=ceiling, waited_s=waited_s, kept=kept
        )
        if found is None:
            if placement.take_failed(request.id):
                self.forget(request.id)
                return rejections.policy_failed(request.id)
            # Every instance that had the rest of this answer lost it. Like a new request it may go there
            # again.
            known = self._retries.attempts.get(request.id)
            if known is not None and known.tried and not placement.able(request, ready, now).instances:
                if known.may_have_run:
                    waits = waited_s < queue.limits.no_instance_timeout_s
                    waits = waits and placement.may_come(request, ready)
                    return None if waits else self.give_up(request, unsent=False)
                known.tried.clear()
            return None
        if key.retry and not self._retries.allowed(len(self._ledger.leased)):
            return None
        queue.remove(request.id)
        placed = placement.book(found)
        if key.retry:
            self._retries.leases.add(placed.lease.id)
        return placed

    # --- time ---

    def expire(self, now: float) -> list[Command]:
        """Turn down requests that have waited for too long."""
        commands: list[Command] = []
        for flow in self.queue.flows:
            for entry in list(flow.entries.values()):
                reject = self._waited(entry, now)
                if reject is None:
                    break  # entries behind it have waited for less
                self.forget(entry.request.id)
                commands.append(reject)
        return commands

    def _waited(self, entry: Queued, now: float) -> Reject | None:
        """Return the rejection of a request that has waited for too long, None if it has not."""
        limits, request, waited_s = self.queue.limits, entry.request, now - entry.arrived_at
        if limits.timeout_s is not None and waited_s >= limits.timeout_s:
            return rejections.expired(request.id, waited_s)
        down_since = self._fleet.down_since.get(request.model)
        if down_since is None or now - max(down_since, entry.arrived_at) < limits.no_instance_timeout_s:
            return None
        return rejections.no_instance(request)
