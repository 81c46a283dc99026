"""Targets of waiting requests: when each is due, and the end of the ones that can meet theirs no more."""

from __future__ import annotations

import math

from hetlb.balancer.core import rejections
from hetlb.balancer.core.backlog import Backlog
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.queue import Queue, Queued, QueueKey
from hetlb.balancer.core.types import Command, RejectReason, Request


class WaitingTargets:
    """Due times of the requests of one backlog, and the ones that are late."""

    def __init__(self, backlog: Backlog, fleet: FleetState) -> None:
        self._backlog = backlog
        self._fleet = fleet
        #: Longest target of a first token by model.
        self._patience_s: dict[str, float] = {}

    def due(self, request: Request, now: float, predicted: float) -> float:
        """Return the latest time of the dispatch of a request that came now, for its targets to be met.

        A request without targets is due as late as any of its model.
        """
        service, ready = request.service, self._fleet.ready.get(request.model)
        if ready is None or not service.stated:
            return now + self._patience_s.get(request.model, 0.0)
        if service.ttft_s < math.inf:
            self._patience_s[request.model] = max(service.ttft_s, self._patience_s.get(request.model, 0.0))
        fastest_s = min([each.latency.prefill_s(request.prompt_tokens) for each in ready.able], default=0.0)
        due = now + service.ttft_s - fastest_s
        if service.e2e_s < math.inf:
            steps_s = [each.latency.answer_s(request.prompt_tokens, predicted) for each in ready.able]
            due = min(due, now + service.e2e_s - fastest_s - min(steps_s, default=0.0))
        return due

    def late(self, key: QueueKey, now: float) -> list[Command]:
        """Refuse requests of a line that can meet their targets no more, or serve them after the others."""
        backlog = self._backlog
        commands: list[Command] = []
        for entry in late(backlog.queue, key, now):
            request = entry.request
            if request.service.refuse_hopeless:
                backlog.forget(request.id)
                name = request.service.name
                text = f"The targets of the class `{name}` can no longer be met for this request."
                commands.append(rejections.later(request.id, RejectReason.QUEUE_EXPIRED, text))
            else:
                backlog.queue.demote(entry)
        return commands


def late(queue: Queue, key: QueueKey, now: float) -> list[Queued]:
    """Return requests of a line that are late and neither demoted nor in the background."""
    found: list[Queued] = []
    for flow in queue.line(key):
        if flow.in_time:
            for entry in flow.entries.values():
                if entry.due >= now or not entry.request.service.stated:
                    break
                found.append(entry)
    return found
