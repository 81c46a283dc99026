"""The dashboard's part of the admin listener: the page, its event stream, the what-if.

The page's files are public (a page can send no token before it was loaded) and hold nothing of the
fleet; everything else stands behind the admin listener's guard like any other path of it.
"""

from __future__ import annotations

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
from hetlb.proxy.dashboard import balance, whatif
from hetlb.proxy.dashboard.decisions import decision_document, newest
from hetlb.proxy.dashboard.events import EventStream
from hetlb.proxy.dashboard.figures import Accuracy, Series
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


class Source(whatif.Source, MetricsSource, Protocol):
    """Interface of the service for the page."""

    @property
    def decisions(self) -> Reversible[Dispatch]: ...
    async def decision(self, lease: int) -> Dispatch | None: ...
    def tokens_so_far(self, lease: Lease) -> int: ...


class _Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/what-if`."""

    policy: str
    model: str | None = None


class Dashboard:
    """The page over `source`; `fleet` gives the body of `GET /v1/fleet`."""

    def __init__(self, source: Source, fleet: Callable[[], dict[str, Any]]) -> None:
        self._source = source
        self._fleet = fleet
        self._series = Series(source.history)
        self._accuracy = Accuracy(source.history)
        self._what_if = whatif.WhatIf(source)
        self.events = EventStream(lambda: msgspec.json.encode(self.snapshot()))
        files = {path: _file_handler(*file) for path, file in _FILES.items()}
        #: The handlers that ask for no token.
        self.public = tuple(files.values())
        self.routes = [
            *(web.get(path, handler) for path, handler in files.items()),
            web.get("/v1/events", self.events.serve, allow_head=False),
            web.get(r"/v1/decisions/{lease:\d{1,18}}", self._get_decision),
            web.get("/v1/what-if", self._get_what_if),
            web.post("/v1/what-if", self._post_what_if),
            web.delete("/v1/what-if", self._delete_what_if),
        ]

    async def close(self, _: web.Application) -> None:
        """End the streams and the simulation."""
        self.events.close()
        await self._what_if.cancel()

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
            "decisions": {
                "total": source.totals.decisions,
                "last": newest(source.decisions, DECISIONS_SHOWN, source.tokens_so_far),
            },
            "fleet": fleet,
            "balance": balance.documents(scheduler, source.history, _pools(scheduler), now),
            "series": self._series.document(now),
            "accuracy": self._accuracy.document(),
            "what_if": {
                **self._what_if.document(),
                "obstacles": self._what_if.obstacles([model["name"] for model in fleet["models"]]),
            },
        }

    async def _get_decision(self, request: web.Request) -> web.Response:
        dispatch = await self._source.decision(int(request.match_info["lease"]))
        if dispatch is None:
            raise web.HTTPNotFound(text="this decision is not kept any more")
        body = msgspec.json.encode(decision_document(dispatch, self._source.tokens_so_far))
        return web.Response(body=body, content_type="application/json")

    def _what_if_reply(self, status: int = 200) -> web.Response:
        body = msgspec.json.encode(self._what_if.document())
        return web.Response(body=body, status=status, content_type="application/json")

    async def _get_what_if(self, _: web.Request) -> web.Response:
        return self._what_if_reply()

    async def _post_what_if(self, request: web.Request) -> web.Response:
        try:
            question = msgspec.json.decode(await request.read(), type=_Question)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise web.HTTPBadRequest(text='expected a JSON object {"policy", "model"}') from error
        self._what_if.start(question.model, question.policy)
        return self._what_if_reply(202)

    async def _delete_what_if(self, _: web.Request) -> web.Response:
        await self._what_if.cancel()
        return self._what_if_reply()


def _pools(scheduler: Scheduler) -> dict[str, list[Instance]]:
    """The instances by model, as the fleet's document has them."""
    pools: dict[str, list[Instance]] = {}
    for instance in scheduler.instances:
        pools.setdefault(whatif.pool_of(instance), []).append(instance)
    return pools


def _file_handler(package: str, name: str, content_type: str) -> Handler:
    body = asset(name, package).encode()

    async def file(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return file
