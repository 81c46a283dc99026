"""Readiness of the fleet, and the models that clients may ask for."""

from __future__ import annotations

from typing import Any

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Health
from hetlb.balancer.engines.scrape import EngineWatch


class Availability:
    """State of the fleet for balancers in front and for clients, at both listeners."""

    def __init__(self, scheduler: Scheduler, watch: EngineWatch) -> None:
        self._scheduler = scheduler
        self._watch = watch
        #: True from SIGTERM on: not ready, though requests are still accepted for a while.
        self.stopping = False

    def routable(self) -> bool:
        """Return True if a request can be served."""
        return self.readiness == "ready"

    @property
    def readiness(self) -> str:
        """ "ready", or the reason why no request should come."""
        if self.stopping:
            return "stopping"
        routable = [each for each in self._scheduler.instances if each.routable or each.comes]
        if not routable:
            return "no instance is routable"
        if any(not each.spec.model or each.spec.model in each.models for each in routable):
            return "ready"
        names = dict.fromkeys(each.spec.model for each in routable)
        return f"no instance serves {', '.join(names)}"

    def models(self) -> list[dict[str, Any]]:
        """Return the models that clients may ask for; without an instance they are not `available`."""
        listed: dict[str, dict[str, Any]] = {}
        for instance in self._scheduler.instances:
            if instance.evidence.health.state is Health.EJECTED:
                continue
            entries = self._watch.models.get(instance.name)
            if entries is None and instance.spec.model:
                entries = [{"id": instance.spec.model, "object": "model", "owned_by": "hetlb"}]
            for entry in entries or ():
                known = listed.setdefault(entry["id"], entry)
                longest, mine = known.get("max_model_len"), entry.get("max_model_len")
                if isinstance(mine, int) and (not isinstance(longest, int) or mine > longest):
                    listed[entry["id"]] = entry
        return list(listed.values()) + [
            {"id": name, "object": "model", "owned_by": "hetlb", "available": False}
            for name in self._scheduler.fleet.ready
            if name not in listed
        ]
