"""Backlog: requests that wait for an instance, from their place in the queue to a placement or a reject."""

from __future__ import annotations

from itertools import islice
from typing import Final

from hetlb.core import rejections
from hetlb.core.admission import MOST_OVERTAKEN, FairQueue, Flow, Queue, Queued, QueueKey
from hetlb.core.demand import size_of
from hetlb.core.fleet_state import FleetState
from hetlb.core.ledger import Ledger
from hetlb.core.placement import Decision, Placement
from hetlb.core.predictor import Predictor
from hetlb.core.ready import ReadyInstances, least_tokens
from hetlb.core.retries import Retries
from hetlb.core.types import Command, Reject, Request, RequestId

#: So many of those that wait are given a new predicted length whenever an answer has taught one.
_REPREDICTED: Final = 8


class Backlog:
    """The queue, and what becomes of its requests as instances get room and time passes."""

    __slots__ = (
        "_fleet", "_ledger", "_placement", "_predictor", "_retries", "_stale", "queue", "ticked_at",
    )  # fmt: skip

    def __init__(
        self,
        queue: Queue,
        fleet: FleetState,
        placement: Placement,
        ledger: Ledger,
        retries: Retries,
        predictor: Predictor,
        now: float,
    ) -> None:
        self.queue = queue
        self._fleet = fleet
        self._placement = placement
        self._ledger = ledger
        self._retries = retries
        self._predictor = predictor
        #: Waiting requests whose predicted length is older than what was learnt since.
        self._stale: list[RequestId] = []
        #: Time from which the next tick counts: the last one, or when the first began to wait.
        self.ticked_at = now

    def push(self, request: Request, now: float, predicted: float, *, again: bool = False) -> list[Command]:
        """Have a request wait. `again`: it may run for the second time."""
        queue, fleet = self.queue, self._fleet
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
        queue.push(request, now, predicted, size, again, fleet.fit_of(request))
        return commands

    def forget(self, request_id: RequestId) -> None:
        """A request waits no longer, nor is it retried."""
        self.queue.remove(request_id)
        self._retries.forget(request_id)

    def give_up(self, request: Request, *, unsent: bool) -> Reject:
        """A request that no engine answered is tried no more. `unsent`: none can have run it."""
        self.forget(request.id)
        return rejections.not_answered(request.id, unsent=unsent)

    def predict_again(self) -> None:
        """Give the next few that wait the length that is predicted now, in turns."""
        queue, stale = self.queue, self._stale
        if not stale:
            stale = self._stale = list(queue.held)
        for _ in range(min(_REPREDICTED, len(stale))):
            place = queue.held.get(stale.pop())
            if place is not None and place[3].request.generates:
                entry = place[3]
                predicted = self._predictor.predict(entry.request)
                queue.resize(entry, predicted, round(size_of(entry.request, predicted)))

    # --- placement ---

    def flush(self, now: float) -> list[Command]:
        """Place what waits."""
        if not self.queue.held:
            return []
        commands: list[Command] = []
        for key in self.queue.keys:
            while (command := self._place_next(key, now)) is not None:
                commands.append(command)
        return commands

    def _place_next(self, key: QueueKey, now: float) -> Command | None:
        """Place one request of a line: the first that some instance can take now, by fit.

        Where one has been overtaken as often as may be, what it could use is kept for it.
        """
        ready = self._fleet.ready.get(key.model)
        if ready is None:
            return None
        ceiling: int | None = None
        for fair, flow, fit in self.queue.heads(key):
            command = self._place_head(ready, key, fair, flow, fit, ceiling, now)
            if command is not None:
                return command
            if fair.stopping(fit) is not None:
                ceiling = fit if ceiling is None else min(ceiling, fit)
        return None

    def _place_head(
        self,
        ready: ReadyInstances,
        key: QueueKey,
        fair: FairQueue,
        flow: Flow,
        fit: int,
        ceiling: int | None,
        now: float,
    ) -> Command | None:
        """Place the head of a flow, or one close behind that suits the free instance better."""
        queue, placement = self.queue, self._placement
        stopping = fair.stopping(fit)
        waiting = flow.by_fit[fit].values()
        entries = [stopping] if stopping is not None else list(islice(waiting, placement.policy.lookahead))
        head = entries[0]
        request = head.request
        if request.prompt_exact and least_tokens(request) > ready.longest_prompt:
            self.forget(request.id)
            return rejections.too_long(request, ready.instances)
        predicted = self._predictor.predict(request) if request.generates else 0.0
        found = placement.choose(request, ready, now, predicted, head.size, ceiling=ceiling)
        if found is None:
            if key.retry and not placement.able(request, ready, now)[0]:
                return self.give_up(request, unsent=False)
            return None
        if key.retry:
            if not self._retries.allowed(len(self._ledger.leased)):
                return None
            queue.take(request.id, ready.class_of(found.instance))
            placed = placement.book(found)
            self._retries.leases.add(placed.lease.id)
            return placed
        if len(entries) > 1:
            found = self._suited(found, entries, ready, ceiling, now)
        queue.take(found.ctx.request.id, ready.class_of(found.instance))
        return placement.book(found)

    def _suited(
        self, found: Decision, entries: list[Queued], ready: ReadyInstances, ceiling: int | None, now: float
    ) -> Decision:
        """The choice for the head, or for one behind it that suits the same instance better."""
        head, queue, placement = entries[0], self.queue, self._placement
        for index, entry in enumerate(entries):  # none may be overtaken too often
            if queue.overtaken(entry) >= MOST_OVERTAKEN:
                del entries[index + 1 :]
                break
        demand = placement.demand(head.request.model)
        entry = placement.policy.suited(found.instance, entries, demand, ready.instances)
        if entry is head:
            return found
        other = placement.choose(
            entry.request, ready, now, entry.predicted_output, entry.size, ceiling=ceiling
        )
        return other if other is not None and other.instance is found.instance else found

    # --- time ---

    def expire(self, now: float) -> list[Command]:
        """Turn down what has waited for too long."""
        commands: list[Command] = []
        for waiting in self.queue.flows():
            for entry in waiting:
                reject = self._waited(entry, now)
                if reject is None:
                    break  # those behind it have waited for less
                self.forget(entry.request.id)
                commands.append(reject)
        return commands

    def _waited(self, entry: Queued, now: float) -> Reject | None:
        """Rejection of a request that has waited for too long, None if it has not."""
        limits, request, waited_s = self.queue.limits, entry.request, now - entry.arrived_at
        if limits.timeout_s is not None and waited_s >= limits.timeout_s:
            return rejections.expired(request.id, waited_s)
        down_since = self._fleet.down_since.get(request.model)
        if down_since is None or now - max(down_since, entry.arrived_at) < limits.no_instance_timeout_s:
            return None
        return rejections.no_instance(request)
