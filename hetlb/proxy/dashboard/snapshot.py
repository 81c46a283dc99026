"""Events of the page's stream: all that the page shows, at one moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

import hetlb
from hetlb.core.policies.registry import POLICIES
from hetlb.proxy.dashboard import balance
from hetlb.proxy.dashboard.decisions import newest
from hetlb.proxy.dashboard.event_stream import EventStream
from hetlb.proxy.dashboard.figures import accuracy, series
from hetlb.proxy.dashboard.routes import pools
from hetlb.proxy.dashboard.samples import Levels
from hetlb.proxy.fleet_status import status

if TYPE_CHECKING:
    from hetlb.proxy.service import FleetService

#: Decisions listed on the page.
DECISIONS_SHOWN: Final = 25


class Snapshots:
    """Maker of events and of the status over `source`; `fleet` gives the body of `GET /v1/fleet`."""

    def __init__(
        self,
        source: FleetService,
        fleet: Callable[[], dict[str, Any]],
        levels: Levels,
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._levels = levels
        self.events = EventStream(lambda: msgspec.json.encode(self.event()))

    def status(self) -> dict[str, Any]:
        """The body of `GET /v1/status`."""
        source = self._source
        recent = source.totals.recent
        return status(source.scheduler, pools(source.scheduler), recent, self._levels, source.now())

    def event(self) -> dict[str, Any]:
        """One event of the stream: all that the page shows, at one moment."""
        source = self._source
        scheduler, now, totals = source.scheduler, source.now(), source.totals
        fleet = self._fleet()
        for model in fleet["models"]:
            for instance in model["instances"]:
                counted = totals.instances.get(instance["name"])
                instance["model_factors"] = None if counted is None else counted.model_factors()
        oldest_at = scheduler.queue.oldest_at()
        fleet["queue"]["models"] = scheduler.queue.by_model()
        fleet["queue"]["oldest_s"] = None if oldest_at is None else now - oldest_at
        return {
            "version": hetlb.__version__,
            "clock_s": now,
            "policies": list(POLICIES),
            "registration": source.fleet.file.admin.registration,
            "decisions": {
                "total": totals.decisions,
                "last": newest(source.scheduling.decisions, DECISIONS_SHOWN, source.tokens_so_far),
            },
            "fleet": fleet,
            "status": self.status(),
            "balance": balance.documents(scheduler, totals.recent, pools(scheduler), now),
            "series": {**series(totals.recent, now), **self._levels.document(now)},
            "accuracy": accuracy(totals.recent),
        }
