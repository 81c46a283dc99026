"""Handlers of the admin listener: the state of the fleet, and the switches. aiohttp, apart from the hot path.

With a token, everything but `/healthz`, `/readyz` and the dashboard's files needs it; without one, a page in
a browser on this machine cannot use the listener.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Container
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from hetlb.balancer.admin.beliefs import believed, reported
from hetlb.balancer.admin.fleet_status import lasting, pools, status
from hetlb.balancer.admin.prometheus import CONTENT_TYPE, MetricsPage, usage_document
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Dispatch
from hetlb.balancer.exchange.scheduler_driver import DECISIONS_KEPT
from hetlb.balancer.telemetry.recent import BIN_S
from hetlb.errors import InputError
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.balancer.admin.dashboard.snapshot import Snapshots
    from hetlb.balancer.admin.rare_causes import CauseLog
    from hetlb.balancer.fleet.service import FleetService

MAX_BODY_BYTES = 64 << 10
#: Instances of which the causes are looked for at each sample of the series; of more, at every second one.
_AT_A_SAMPLE = 512
#: Files of the dashboard.
_PAGE_FILES = r"/{file:(?:|(?:dashboard|theme)\.css|(?:charts|dashboard|dom)\.js)}"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _instance_document(instance: Instance, tokens_per_s: float, now: float) -> dict[str, Any]:
    sample = reported(instance, now)
    return {
        "name": instance.name,
        "url": instance.spec.url,
        "role": instance.spec.role.value,
        "state": instance.admin.value,
        "health": instance.evidence.health.state.value,
        "health_reason": instance.evidence.health.reason,
        "sleep": instance.sleep.reason or ("asleep" if instance.asleep else None),
        "sleep_s": now - instance.sleep_at if instance.sleep.reason else None,
        "wake_s": instance.sleep.wake_s,
        "restraint": instance.evidence.less(instance.max_num_seqs, now),
        "in_flight": instance.in_flight,
        "foreign": instance.foreign,
        # The queue is shared: nothing waits here bound to an instance.
        "queued": 0,
        "workload": instance.work_s,
        "kv_reserved_tokens": instance.kv_tokens,
        "kv_held_tokens": instance.held_tokens,
        "kv_cache_tokens": instance.kv_cache_tokens,
        "kv_reported": None if sample is None else sample.kv_usage,
        "kv_reported_max": None if sample is None else sample.kv_usage_max,
        "engines": instance.engines,
        "signal_age_s": None if instance.sample_at is None else now - instance.sample_at,
        "running": None if sample is None else sample.running,
        "waiting": None if sample is None else sample.waiting,
        "preemptions": None if sample is None else sample.preemptions,
        "models": list(instance.served) if instance.served is not None else None,
        "profiled": instance.profiled,
        "gpu": instance.spec.gpu or None,
        "believes": believed(instance, tokens_per_s, now),
        "forecast": instance.errors.document(),
        "kv_events": None if instance.blocks is None else instance.blocks.reason or "live",
    }


def reply(document: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return reply({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def _has_token(request: web.Request, token: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)
    return right and scheme.lower() == "bearer"


def _from_a_page(request: web.Request) -> bool:
    """Return True if a web page sent this: from another origin, or under a name that resolves to here."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return True
    try:
        name = request.url.raw_host or ""
    except ValueError:
        return True  # an invalid Host
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "localhost"
    return False


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except InputError as error:
        return _refuse(400, str(error))
    except web.HTTPException as error:
        text = f"the admin listener has no {request.path[:200]!r}; clients ask the address of `listen`"
        is_unknown = error.status == 404 and error is request.match_info.http_exception
        reply = _refuse(error.status, text if is_unknown else error.text or error.reason)
        if isinstance(error, web.HTTPMethodNotAllowed):
            reply.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return reply


class AdminApi:
    """Handlers of the admin listener: state to read, and changes of an operator."""

    def __init__(self, control: FleetService, *, alone: bool = False) -> None:
        """`alone`: the listener is for the other workers, and asks none of them."""
        self.control = control
        self._alone = alone
        self._page = MetricsPage(control)
        self._sampler: asyncio.TimerHandle | None = None
        self._samples = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, self._guard])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/v1/fleet", self._get_fleet),
                web.get("/v1/usage", self._usage),
                web.get("/v1/decisions", self._decisions),
                web.put("/v1/policy", self._change("set_policy")),
                web.post("/v1/reload", self._change("reload")),
                web.post("/v1/fleet/instances", self._change("register")),
                web.delete("/v1/fleet/instances/{name}", self._change("unregister")),
                web.put("/v1/fleet/instances/{name}/state", self._change("set_state")),
                web.put("/v1/fleet/instances/{name}/notice", self._change("set_notice")),
                web.delete("/v1/fleet/instances/{name}/notice", self._change("take_notice_back")),
                web.get("/v1/status", self._get_status),
                web.get("/v1/events", self._events, allow_head=False),
                web.get(r"/v1/decisions/{lease:\d{1,18}}", self._get_decision),
                web.get(_PAGE_FILES, self._page_file),
            ]
        )
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._close)
        return app

    async def _start(self, _: web.Application) -> None:
        """Begin to sample the page's series, whether a page is open or not."""
        if not self._alone:
            self._sample()

    async def _close(self, _: web.Application) -> None:
        if "_dashboard" in vars(self):
            self._dashboard.close()
        if self._sampler is not None:
            self._sampler.cancel()

    def _sample(self) -> None:
        self._sampler = asyncio.get_running_loop().call_later(BIN_S, self._sample)
        now = self.control.now()
        self.control.driver.counted.recent.sample(self.control.scheduler, now)
        control, self._samples = self.control, self._samples + 1
        if not control.tells or self._samples % (1 + len(control.scheduler.fleet.instances) // _AT_A_SAMPLE):
            return
        causes = lasting(control.scheduler, control.recent, now, control.reload_refused)
        if causes or "_cause_log" in vars(self):
            self._cause_log.look(causes, now)

    @cached_property
    def _cause_log(self) -> CauseLog:
        """The causes that last; imported with the first one."""
        from hetlb.balancer.admin.rare_causes import CauseLog

        return CauseLog()

    @cached_property
    def _dashboard(self) -> Snapshots:
        """The page; imported when one is asked for."""
        from hetlb.balancer.admin.dashboard.snapshot import Snapshots

        return Snapshots(self.control, self)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # By the route, not by the spelling of the path.
        if request.match_info.handler in (self._healthz, self._readyz, self._page_file):
            return await handler(request)
        token = self.control.access.admin_token
        if token is not None and not _has_token(request, token):
            reply = _refuse(401, "expected the admin token: Authorization: Bearer TOKEN")
            reply.headers["WWW-Authenticate"] = "Bearer"
            return reply
        if token is None and _from_a_page(request):
            return _refuse(
                403,
                "expected an IP address or localhost as Host and no foreign Origin: no admin token is set",
            )
        return await handler(request)

    # --- documents, for the handlers and the dashboard ---

    def fleet(self, shown: Container[str] | None) -> dict[str, Any]:
        """Return the body of `GET /v1/fleet`, of a large fleet with the `shown` instances alone."""
        scheduler, now = self.control.scheduler, self.control.now()
        waiting, waiting_bytes = self.control.waiting_elsewhere
        models: list[dict[str, Any]] = []
        for name, instances in self.pools().items():
            found = [each for each in instances if shown is None or each.name in shown]
            models.append({"name": name, "instances": [self._instance(name, each, now) for each in found]})
        queue = {
            "requests": len(scheduler.queue) + sum(waiting.values()),
            "bytes": scheduler.queue.bytes + waiting_bytes,
        }
        return {"policy": scheduler.placement.policy_name, "models": models, "queue": queue}

    async def whole_fleet(self) -> dict[str, Any]:
        """Return the body of `GET /v1/fleet`, made in turns: of a thousand instances it takes a while."""
        document, now, share = self.fleet(()), self.control.now(), Share()
        for model, instances in zip(document["models"], self.pools().values(), strict=True):
            for each in instances:
                model["instances"].append(self._instance(model["name"], each, now))
                await share.spent()
        return document

    def _instance(self, model: str, instance: Instance, now: float) -> dict[str, Any]:
        speeds = self.control.scheduler.placement.speeds(model, [instance])
        return _instance_document(instance, speeds[instance.name], now)

    def status(self) -> dict[str, Any]:
        control = self.control
        scheduler, now = control.scheduler, control.now()
        canaries = {
            model.name: f"{table.instance or table.name} gets {100 * table.share:g} %"
            for model in control.fleet.file.models
            if (table := model.canary) is not None
        }
        return status(scheduler, self.pools(), control.recent, now, control.reload_refused, canaries)

    def pools(self) -> dict[str, list[Instance]]:
        return pools(self.control.scheduler)

    def decision(self, dispatch: Dispatch) -> dict[str, Any]:
        from hetlb.balancer.admin.decisions import decision_summary

        return decision_summary(dispatch, self.control.driver.tokens_so_far)

    def _change(self, name: str) -> Handler:
        """Return the handler of a change, by its name in `changes.py`, imported for the first one."""

        async def handler(request: web.Request) -> web.StreamResponse:
            from hetlb.balancer.admin import changes

            changed: web.Response = await getattr(changes, name)(self, request)
            return changed

        return handler

    # --- state ---

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        readiness = self.control.availability.readiness
        return web.Response(text=f"{readiness}\n", status=200 if readiness == "ready" else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._page.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _page_file(self, request: web.Request) -> web.Response:
        return self._dashboard.file(request.path)

    async def _get_fleet(self, _: web.Request) -> web.Response:
        return reply(await self.whole_fleet())

    async def _usage(self, _: web.Request) -> web.Response:
        return reply({"usage": usage_document(self.control.totals)})

    async def _decisions(self, request: web.Request) -> web.Response:
        from hetlb.balancer.admin.decisions import Wanted, decision_document

        control, query = self.control, request.query
        text = query.get("last", "10")
        if not re.fullmatch("[0-9]{1,4}", text) or not 0 < int(text) <= 1000:
            raise InputError(f"last: expected a number from 1 to 1000, got {text[:40]!r}")
        longer = query.get("longer_s", "0")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", longer):
            raise InputError(f"longer_s: expected seconds, got {longer[:40]!r}")
        wanted = Wanted(
            query.get("request_id", ""), query.get("instance", ""), query.get("model", ""),
            query.get("outcome", ""), float(longer),
        )  # fmt: skip
        filtered = wanted != Wanted()
        count = DECISIONS_KEPT if filtered else int(text)
        recent = list(control.scheduling.decisions)[-count:]
        if filtered:
            recent = [each for each in recent if wanted.fits(each, control.now())]
            recent = recent if wanted.request and "last" not in query else recent[-int(text) :]
        documents = []
        for each in recent:
            # One at a time: the candidates of many decisions on a large fleet are long to make.
            documents.append(decision_document(each, control.driver.tokens_so_far))
            await asyncio.sleep(0)
        if not self._alone:
            for other in await control.elsewhere(request.path_qs):
                documents += other["decisions"]
            if len(documents) > len(recent):
                documents.sort(key=lambda each: each["dispatched_at_s"])
                documents = documents if wanted.request and "last" not in query else documents[-int(text) :]
        return reply({"decisions": documents, "clock_s": control.now()})

    async def _get_decision(self, request: web.Request) -> web.Response:
        from hetlb.balancer.admin.decisions import decision_document

        number, decisions = int(request.match_info["lease"]), self.control.scheduling.decisions
        dispatch = next((each for each in reversed(decisions) if each.lease.id == number), None)
        if dispatch is None:
            for other in () if self._alone else await self.control.elsewhere(request.path_qs):
                return reply(other)
            raise web.HTTPNotFound(text="this decision is not kept any more")
        return reply(decision_document(dispatch, self.control.driver.tokens_so_far))

    async def _get_status(self, _: web.Request) -> web.Response:
        return reply(self.status())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._dashboard.serve(request)


def make_app(control: FleetService, *, alone: bool = False) -> web.Application:
    return AdminApi(control, alone=alone).app()
