"""A server's application of OpenAI's endpoints: every error has a body in the form that the server speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetlb.tools.openai.requests import ApiError

ErrorBody: TypeAlias = Callable[[web.Request, ApiError], bytes]


def application(
    routes: Sequence[web.RouteDef], most_bytes: int, error_body: ErrorBody = lambda _, error: error.body()
) -> web.Application:
    """Return the application of these routes; bodies have at most `most_bytes` bytes (0: any number).

    `error_body` is the JSON of an error of a handler, or of a path or method that there is not.
    """

    @web.middleware
    async def errors(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        headers = None
        try:
            return await handler(request)
        except ApiError as caught:
            error = caught
        except web.HTTPException as caught:
            headers = {"allow": caught.headers["allow"]} if "allow" in caught.headers else None
            error = ApiError(caught.status, f"{caught.reason}: {request.method} {request.path[:200]}")
        body = error_body(request, error)
        return web.Response(body=body, status=error.status, headers=headers, content_type="application/json")

    app = web.Application(client_max_size=most_bytes, middlewares=[errors])
    app.add_routes(routes)
    return app


#: Labels of one series, and its value.
Series = Iterable[tuple[Mapping[str, str], float]]


def gauge(name: str, text: str, series: Series) -> Metric:
    return _filled(GaugeMetricFamily(name, text), series)


def counter(name: str, text: str, series: Series) -> Metric:
    """Return a counter; `_total` is added to its name."""
    return _filled(CounterMetricFamily(name, text), series, "_total")


def _filled(family: Metric, series: Series, suffix: str = "") -> Metric:
    for labels, value in series:
        family.add_sample(family.name + suffix, dict(labels), value)
    return family


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def page(families: Iterable[Metric]) -> bytes:
    return generate_latest(_Families(families))  # type: ignore[arg-type, unused-ignore]
