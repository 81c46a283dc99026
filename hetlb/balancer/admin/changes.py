"""Handlers of the admin listener that change something: policy, states, notices, registration, reload."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from hetlb.balancer.admin.admin import AdminApi, reply
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.fleet.shared_fleet import (
    MOST_NOTICE_S,
    Register,
    ReloadFile,
    SetPolicy,
    SetState,
    Unregister,
)
from hetlb.errors import NOT_JSON, InputError
from hetlb.inputs.mistakes import one_of, short


async def _body(request: web.Request, only: str | None = None) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(await request.read())
    except NOT_JSON as error:
        raise web.HTTPBadRequest(text="expected a JSON object") from error
    if not isinstance(raw, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    for key in raw:
        if only is not None and key != only:
            raise web.HTTPBadRequest(text=f"{key[:80]!r}: unknown key, expected {only}")
    return raw


def _instance(api: AdminApi, request: web.Request) -> str:
    """Name of the instance in the path. Raises `HTTPNotFound`."""
    name = request.match_info["name"]
    names = [each.name for each in api.control.scheduler.instances]
    if name not in names:
        raise web.HTTPNotFound(text=f"instance: {one_of(name, names)}")
    return name


def _check_registration(api: AdminApi) -> None:
    if not api.control.fleet.file.admin.registration:
        raise web.HTTPForbidden(text="admin.registration is false")


async def set_policy(api: AdminApi, request: web.Request) -> web.Response:
    """Switch the policy."""
    name = (await _body(request, "name")).get("name")
    if not isinstance(name, str) or name not in POLICIES:
        raise InputError(f"name: expected one of {', '.join(POLICIES)}, got {short(name)}")
    await api.control.operate(SetPolicy(name))
    return reply({"policy": name})


async def set_state(api: AdminApi, request: web.Request) -> web.Response:
    """Set the administrative state of an instance."""
    name = _instance(api, request)
    state = (await _body(request, "state")).get("state")
    if state not in tuple(AdminState):
        raise InputError(f"state: expected ready, drain or maint, got {short(state)}")
    await api.control.operate(SetState(name, AdminState(state)))
    return reply({"name": name, "state": state})


async def set_notice(api: AdminApi, request: web.Request) -> web.Response:
    """Note that an instance leaves."""
    name = _instance(api, request)
    deadline_s = (await _body(request, "deadline_s")).get("deadline_s")
    number = type(deadline_s) in (int, float)
    if deadline_s is not None and not (number and 0 <= deadline_s <= MOST_NOTICE_S):
        expected = f"expected seconds from 0 to {MOST_NOTICE_S}, or null"
        raise InputError(f"deadline_s: {expected}, got {short(deadline_s)}")
    return await _noticed(api, name, deadline_s)


async def take_notice_back(api: AdminApi, request: web.Request) -> web.Response:
    """Take the notice of an instance back."""
    return await _noticed(api, _instance(api, request), None)


async def _noticed(api: AdminApi, name: str, deadline_s: float | None) -> web.Response:
    state = api.control.scheduler.fleet.instances[name].admin
    await api.control.operate(SetState(name, state, deadline_s))
    return reply({"name": name, "deadline_s": deadline_s})


async def register(api: AdminApi, request: web.Request) -> web.Response:
    """Add an instance, or renew its registration."""
    _check_registration(api)
    table = await _body(request)
    name, encoded = (
        str(table.get("name") or urlsplit(str(table.get("url"))).netloc),
        msgspec.json.encode(table),
    )
    new = await api.control.operate(Register(name, encoded))
    return reply(await api.whole_fleet(), 201 if new else 200)


async def unregister(api: AdminApi, request: web.Request) -> web.Response:
    """Take an instance out."""
    _check_registration(api)
    name = _instance(api, request)
    await api.control.operate(Unregister(name))
    return reply({"name": name})


async def reload(api: AdminApi, _: web.Request) -> web.Response:
    """Read the fleet file again."""
    return reply({"reloaded": await api.control.operate(ReloadFile())})
