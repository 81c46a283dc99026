"""The dashboard's part of the admin listener: the page, its event stream, the status.

The page's files are public (a page can send no token before it was loaded) and hold nothing of the
fleet; everything else stands behind the admin listener's guard like any other path of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Reversible
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

import hetlb
from hetlb.core.instance import Instance
from hetlb.core.policies.registry import POLICIES
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Dispatch, Lease
from hetlb.pages import asset
from hetlb.proxy.dashboard import balance
from hetlb.proxy.dashboard.decisions import decision_document, newest
from hetlb.proxy.dashboard.event_stream import EventStream
from hetlb.proxy.dashboard.figures import BIN_S, Accuracy, Levels, Series
from hetlb.proxy.fleet_status import QueueMemory, status
from hetlb.proxy.telemetry.history import History
from hetlb.proxy.telemetry.prometheus import MetricsSource

_OWN, _SHARED = "hetlb.proxy.dashboard", "hetlb.pages"
#: Path -> package of the file, its name, its type.
_FILES = {
    "/": (_OWN, "dashboard.html", "text/html"),
    "/dashboard.css": (_OWN, "dashboard.css", "text/css"),
    "/dashboard.js": (_OWN, "dashboard.js", "text/javascript"),
    "/theme.css": (_SHARED, "theme.css", "text/css"),
    "/charts.js": (_SHARED, "charts.js", "text/javascript"),
    "/dom.js": (_SHARED, "dom.js", "text/javascript"),
}
#: Nothing from elsewhere, nothing inline, no frame around it.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


#: Decisions listed on the page.
DECISIONS_SHOWN = 25


class DashboardSource(MetricsSource, Protocol):
    """Interface of the service for the page."""

    @property
    def history(self) -> History: ...
    @property
    def registration(self) -> bool: ...
    @property
    def decisions(self) -> Reversible[Dispatch]: ...
    async def decision(self, lease: int) -> Dispatch | None: ...
    def tokens_so_far(self, lease: Lease) -> int: ...


class Dashboard:
    """The page over `source`; `fleet` gives the body of `GET /v1/fleet`."""

    def __init__(self, source: DashboardSource, fleet: Callable[[], dict[str, Any]]) -> None:
        self._source = source
        self._fleet = fleet
        self._series = Series(source.history)
        self._accuracy = Accuracy(source.history)
        self._levels = Levels()
        self._queues = QueueMemory()
        self._timer: asyncio.TimerHandle | None = None
        self.events = EventStream(lambda: msgspec.json.encode(self.snapshot()))
        files = {path: _file_handler(*file) for path, file in _FILES.items()}
        #: The handlers that ask for no token.
        self.public = tuple(files.values())
        self.routes = [
            *(web.get(path, handler) for path, handler in files.items()),
            web.get("/v1/status", self._get_status),
            web.get("/v1/events", self.events.serve, allow_head=False),
            web.get(r"/v1/decisions/{lease:\d{1,18}}", self._get_decision),
        ]

    async def close(self, _: web.Application) -> None:
        """End the streams and the sampling."""
        self.events.close()
        if self._timer is not None:
            self._timer.cancel()

    async def start(self, _: web.Application) -> None:
        """Begin to sample what the page shows over time, whether a page is open or not."""
        self._sample()

    def _sample(self) -> None:
        source = self._source
        now = source.now()
        self._timer = asyncio.get_running_loop().call_later(BIN_S, self._sample)
        self._levels.sample(source.scheduler, now)
        self._queues.look(source.scheduler.queue.by_model(), now)

    def status(self) -> dict[str, Any]:
        """The body of `GET /v1/status`."""
        source = self._source
        return status(source.scheduler, pools(source.scheduler), source.history, self._queues, source.now())

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.status()), content_type="application/json")

    def snapshot(self) -> dict[str, Any]:
        """One event of the stream: all that the page shows, at one moment."""
        source = self._source
        scheduler, now = source.scheduler, source.now()
        fleet = self._fleet()
        for model in fleet["models"]:
            for instance in model["instances"]:
                counted = source.totals.instances.get(instance["name"])
                instance["model_factors"] = None if counted is None else counted.model_factors()
        oldest_at = scheduler.queue.oldest_at()
        fleet["queue"]["models"] = scheduler.queue.by_model()
        fleet["queue"]["oldest_s"] = None if oldest_at is None else now - oldest_at
        return {
            "version": hetlb.__version__,
            "clock_s": now,
            "policies": list(POLICIES),
            "registration": source.registration,
            "decisions": {
                "total": source.totals.decisions,
                "last": newest(source.decisions, DECISIONS_SHOWN, source.tokens_so_far),
            },
            "fleet": fleet,
            "status": self.status(),
            "balance": balance.documents(scheduler, source.history, pools(scheduler), now),
            "series": {**self._series.document(now), **self._levels.document(now)},
            "accuracy": self._accuracy.document(),
        }

    async def _get_decision(self, request: web.Request) -> web.Response:
        dispatch = await self._source.decision(int(request.match_info["lease"]))
        if dispatch is None:
            raise web.HTTPNotFound(text="this decision is not kept any more")
        body = msgspec.json.encode(decision_document(dispatch, self._source.tokens_so_far))
        return web.Response(body=body, content_type="application/json")


def pools(scheduler: Scheduler) -> dict[str, list[Instance]]:
    """The instances by model, as the fleet's document has them."""
    found: dict[str, list[Instance]] = {}
    for instance in scheduler.instances:
        name = instance.spec.model or (instance.served or ("",))[0]
        found.setdefault(name, []).append(instance)
    return found


def _file_handler(package: str, name: str, content_type: str) -> Handler:
    body = asset(name, package).encode()

    async def file(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return file
