"""Files of the dashboard's page, and the fleet's instances by model.

The files are public (a page can send no token before it was loaded) and hold nothing of the fleet.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.pages import asset

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


def files() -> dict[str, Handler]:
    """Handlers of the files by their paths."""
    return {path: _file_handler(*file) for path, file in _FILES.items()}


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
