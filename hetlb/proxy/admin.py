"""The admin listener: what the fleet is doing, and the switches. aiohttp, apart from the hot path.

Promise: it reads the scheduler's state on the event loop, so that every answer is one consistent moment;
wrong input is a 4xx with one sentence; the listener stays on loopback.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from hetlb.core.instance import Instance
from hetlb.core.policies import POLICIES
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import AdminState, AdminStateSet, Dispatch, InstanceChange
from hetlb.errors import InputError
from hetlb.proxy.metrics import CONTENT_TYPE, MetricsSource, make_registry, render

_MAX_BODY_BYTES = 64 << 10


class Control(MetricsSource, Protocol):
    """What the admin listener may see and do."""

    @property
    def decisions(self) -> Sequence[Dispatch]: ...
    @property
    def registration(self) -> bool: ...
    def change(self, change: InstanceChange) -> None: ...
    def set_policy(self, name: str) -> None: ...
    def register(self, table: Mapping[str, Any]) -> None: ...
    def unregister(self, name: str) -> None: ...
    def reload(self) -> str: ...


def fleet_document(scheduler: Scheduler, now: float) -> dict[str, Any]:
    """The body of `GET /v1/fleet`."""
    pools: dict[str, list[Instance]] = {}
    for instance in scheduler.instances:
        names = [instance.spec.model] if instance.spec.model else list(instance.served or [""])[:1]
        pools.setdefault(names[0], []).append(instance)
    return {
        "policy": scheduler.policy_name,
        "models": [
            {"name": name, "instances": [_instance_document(each, now) for each in instances]}
            for name, instances in pools.items()
        ],
        "queue": {"requests": len(scheduler.queue), "bytes": scheduler.queue.bytes},
    }


def _instance_document(instance: Instance, now: float) -> dict[str, Any]:
    sample = instance.sample
    return {
        "name": instance.name,
        "url": instance.spec.url,
        "state": instance.admin.value,
        "health": instance.health.state.value,
        "in_flight": instance.in_flight,
        # The queue is shared: nothing waits here bound to an instance.
        "queued": 0,
        "workload": instance.work_s,
        "kv_reserved_tokens": instance.kv_tokens,
        "kv_cache_tokens": instance.kv_cache_tokens,
        "kv_reported": None if sample is None else sample.kv_usage,
        "signal_age_s": None if instance.sample_at is None else now - instance.sample_at,
        "running": None if sample is None else sample.running,
        "waiting": None if sample is None else sample.waiting,
        "models": list(instance.served) if instance.served is not None else None,
        "profiled": instance.profiled,
    }


def decision_document(dispatch: Dispatch) -> dict[str, Any]:
    """One entry of `GET /v1/decisions`."""
    lease = dispatch.lease
    return {
        "request_id": dispatch.request_id,
        "policy": dispatch.reason,
        "model": lease.request.model,
        "prompt_tokens": lease.request.prompt_tokens,
        "sequences": lease.request.sequences,
        "predicted_output": lease.predicted_output,
        "dispatched_at_s": lease.dispatched_at,
        "candidates": [candidate.document() for candidate in dispatch.candidates],
        "chosen": lease.instance,
    }


def _reply(document: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    return _reply({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise web.HTTPBadRequest(text="expected a JSON object") from error
    if not isinstance(raw, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    return raw


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except InputError as error:
        return _refuse(400, str(error))
    except web.HTTPException as error:
        return _refuse(error.status, error.text or error.reason)


def make_app(control: Control) -> web.Application:
    """The admin application over `control`."""
    registry = make_registry(control)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        ready = any(instance.routable for instance in control.scheduler.instances)
        return web.Response(
            text="ready\n" if ready else "no instance is routable\n", status=200 if ready else 503
        )

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(registry), headers={"Content-Type": CONTENT_TYPE})

    async def fleet(_: web.Request) -> web.Response:
        return _reply(fleet_document(control.scheduler, control.now()))

    async def decisions(request: web.Request) -> web.Response:
        text = request.query.get("last", "10")
        if not re.fullmatch("[0-9]{1,4}", text) or not 0 < int(text) <= 1000:
            return _refuse(400, f"last: expected a number from 1 to 1000, got {text[:40]!r}")
        recent = list(control.decisions)[-int(text) :]
        return _reply({"decisions": [decision_document(each) for each in recent]})

    async def set_policy(request: web.Request) -> web.Response:
        name = (await _body(request)).get("name")
        if not isinstance(name, str) or name not in POLICIES:
            return _refuse(400, f"name: expected one of {', '.join(POLICIES)}, got {str(name)[:80]!r}")
        control.set_policy(name)
        return _reply({"policy": name})

    def find(name: str) -> Instance | None:
        return next((each for each in control.scheduler.instances if each.name == name), None)

    async def set_state(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if find(name) is None:
            return _refuse(404, f"there is no instance {name[:80]!r}")
        state = (await _body(request)).get("state")
        if state not in tuple(AdminState):
            return _refuse(400, f"state: expected ready, drain or maint, got {str(state)[:80]!r}")
        control.change(AdminStateSet(name, AdminState(state)))
        return _reply({"name": name, "state": state})

    async def register(request: web.Request) -> web.Response:
        if not control.registration:
            return _refuse(403, "admin.registration is false")
        control.register(await _body(request))
        return _reply(fleet_document(control.scheduler, control.now()), 201)

    async def unregister(request: web.Request) -> web.Response:
        if not control.registration:
            return _refuse(403, "admin.registration is false")
        name = request.match_info["name"]
        if find(name) is None:
            return _refuse(404, f"there is no instance {name[:80]!r}")
        control.unregister(name)
        return _reply({"name": name})

    async def reload(_: web.Request) -> web.Response:
        return _reply({"reloaded": control.reload()})

    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
            web.get("/v1/fleet", fleet),
            web.get("/v1/decisions", decisions),
            web.put("/v1/policy", set_policy),
            web.post("/v1/reload", reload),
            web.post("/v1/fleet/instances", register),
            web.delete("/v1/fleet/instances/{name}", unregister),
            web.put("/v1/fleet/instances/{name}/state", set_state),
        ]
    )
    return app
