"""The dashboard's part of the admin listener: the page, its event stream, the status.

The page's files are public (a page can send no token before it was loaded) and hold nothing of the
fleet; everything else stands behind the admin listener's guard like any other path of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.pages import asset
from hetlb.proxy.dashboard.samples import Levels
from hetlb.proxy.telemetry.recent import BIN_S

if TYPE_CHECKING:
    from hetlb.proxy.dashboard.snapshot import Snapshots
    from hetlb.proxy.service import FleetService

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


class Dashboard:
    """The page over `source`; `fleet` gives the body of `GET /v1/fleet`."""

    def __init__(self, source: FleetService, fleet: Callable[[], dict[str, Any]]) -> None:
        self._source = source
        self._fleet = fleet
        self._made: Snapshots | None = None
        self._levels = Levels()
        self._timer: asyncio.TimerHandle | None = None
        files = {path: _file_handler(*file) for path, file in _FILES.items()}
        #: The handlers that ask for no token.
        self.public = tuple(files.values())
        self.routes = [
            *(web.get(path, handler) for path, handler in files.items()),
            web.get("/v1/status", self._get_status),
            web.get("/v1/events", self._events, allow_head=False),
            web.get(r"/v1/decisions/{lease:\d{1,18}}", self._get_decision),
        ]

    async def close(self, _: web.Application) -> None:
        """End the streams and the sampling."""
        if self._made is not None:
            self._made.events.close()
        if self._timer is not None:
            self._timer.cancel()

    async def start(self, _: web.Application) -> None:
        """Begin to sample what the page shows over time, whether a page is open or not."""
        self._sample()

    def _sample(self) -> None:
        source = self._source
        self._timer = asyncio.get_running_loop().call_later(BIN_S, self._sample)
        self._levels.sample(source.scheduler, source.now())

    @property
    def _snapshots(self) -> Snapshots:
        """Maker of what the page shows; imported when one is open."""
        if self._made is None:
            from hetlb.proxy.dashboard.snapshot import Snapshots

            self._made = Snapshots(self._source, self._fleet, self._levels)
        return self._made

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._snapshots.events.serve(request)

    async def _get_status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._snapshots.status())
        return web.Response(body=body, content_type="application/json")

    async def _get_decision(self, request: web.Request) -> web.Response:
        number, decisions = int(request.match_info["lease"]), self._source.scheduling.decisions
        dispatch = next((each for each in reversed(decisions) if each.lease.id == number), None)
        if dispatch is None:
            raise web.HTTPNotFound(text="this decision is not kept any more")
        from hetlb.proxy.dashboard.decisions import decision_document

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
