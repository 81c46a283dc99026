"""Targets of waiting requests: when each is due, and which can meet theirs no more."""

from __future__ import annotations

import math

from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.queue import Queue, Queued, QueueKey
from hetlb.balancer.core.types import Request


class WaitingTargets:
    """Due times of waiting requests."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        #: Longest target of a first token by model.
        self._patience_s: dict[str, float] = {}

    def due(self, request: Request, now: float, predicted: float) -> float:
        """Return the latest dispatch at which a request that comes now still meets its targets.

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
