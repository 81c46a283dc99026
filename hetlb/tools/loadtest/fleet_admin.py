"""The admin listener of a running proxy, as a load test needs it: which policy, which instances are busy.

Whatever ends a test, the policy is afterwards what it was before, or a `HetlbError` says that it
is not. What is read of the engines during a run fails no run: what could not be read is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from hetlb.balancer.engines.engine_mistakes import no_answer_at
from hetlb.errors import HetlbError
from hetlb.tasks import ended
from hetlb.tools.workload.records import Counted

_TIMEOUT = aiohttp.ClientTimeout(total=30)
_IDLE_TIMEOUT_S = 60.0
_POLL_S = 0.05
#: Seconds between looks at the fleet during a run.
_LOOK_S = 0.5
#: Seconds to wait, before and after a run, for a new report of every engine (the proxy asks once a second).
_REPORT_TIMEOUT_S = 5.0


class FleetAdmin:
    """One proxy's admin listener."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        #: True if a policy was put in force here.
        self.changed = False

    async def policy(self) -> str:
        return str((await self._fleet())["policy"])

    async def instances(self) -> list[str]:
        return [each["name"] for each in _instances(await self._fleet())]

    async def set_policy(self, name: str) -> None:
        self.changed = True
        await self._ask("PUT", "/v1/policy", {"name": name})

    async def idle(self) -> None:
        """Return once nothing is in flight or queued and every instance is up."""
        deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
        while busy := busy_figures(await self._fleet()):
            if time.monotonic() > deadline_s:
                raise HetlbError(
                    f"{self._url}: the fleet is not idle after {_IDLE_TIMEOUT_S:.0f} s: {', '.join(busy)}"
                )
            await asyncio.sleep(_POLL_S)

    @contextlib.asynccontextmanager
    async def reported(self) -> AsyncIterator[Counted]:
        """Figures that engines report during the block, complete after it; others are left out.

        `preemptions` counts the block; `kv_peak` is the largest share (0 to 1) of the KV cache in use
        that was seen, one look a second: a shorter peak may be higher.
        """
        found: Counted = {}
        before = {each["name"]: each.get("preemptions") for each in await self._new_reports()}
        looking = asyncio.create_task(self._look(found))
        try:
            yield found
        finally:
            await ended(looking)
        after = await self._new_reports()
        _note_kv(found, after)
        for each in after:
            first, last = before.get(each["name"]), each.get("preemptions")
            # A counter that went back is of an engine that was started anew.
            if first is not None and last is not None and last >= first:
                found.setdefault(each["name"], {})["preemptions"] = last - first

    async def _look(self, found: Counted) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(HetlbError):
                _note_kv(found, _instances(await self._fleet()))

    async def _new_reports(self) -> list[dict[str, Any]]:
        """Return the instances with engine reports newer than this call."""
        since_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            try:
                instances = _instances(await self._fleet())
            except HetlbError:
                return []
            read = [each for each in instances if each["signal_age_s"] is not None]
            # From before the question was sent: the report is at least as new as its stated age.
            new = [each for each in read if each["signal_age_s"] < asked_s - since_s]
            if len(new) == len(read) or time.monotonic() > since_s + _REPORT_TIMEOUT_S:
                return new
            await asyncio.sleep(_POLL_S)

    async def _fleet(self) -> dict[str, Any]:
        document = await self._ask("GET", "/v1/fleet")
        if not isinstance(document, dict) or not {"policy", "models", "queue"} <= document.keys():
            raise HetlbError(f"{self._url}/v1/fleet: expected the fleet of a hetlb proxy, got something else")
        return document

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as reply:
                if reply.status != 200:
                    raise HetlbError(f"{self._url}{path}: status {reply.status}: {await reply.text()}")
                return await reply.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise HetlbError(
                f"{self._url}{path}: no answer of a hetlb proxy: {no_answer_at(error)}"
            ) from error


@contextlib.asynccontextmanager
async def fleet_admin(url: str) -> AsyncIterator[FleetAdmin]:
    """Yield the admin listener at `url`; the policy found there is in force again when the block ends.

    If the listener asks for a token, it is taken from the variable `HETLB_ADMIN_TOKEN`.
    """
    token = os.environ.get("HETLB_ADMIN_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as session:
        admin = FleetAdmin(session, url)
        before = await admin.policy()
        try:
            yield admin
        finally:
            if admin.changed:
                try:
                    await admin.set_policy(before)
                except HetlbError as error:
                    raise HetlbError(f"the policy {before} could not be put back: {error}") from error


def _instances(fleet: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for model in fleet["models"] for each in model["instances"]]


def _note_kv(found: Counted, instances: list[dict[str, Any]]) -> None:
    for each in instances:
        if each["kv_reported"] is not None:
            own = found.setdefault(each["name"], {})
            own["kv_peak"] = max(own.get("kv_peak", 0.0), each["kv_reported"])


def busy_figures(fleet: Mapping[str, Any]) -> list[str]:
    """Return the figures that show a fleet is not idle and ready, in words; empty if it is."""
    found = [f"{key} in the queue: {value}" for key, value in fleet["queue"].items() if value != 0]
    for instance in _instances(fleet):
        found += [
            f"{instance['name']}.{key}: {instance[key]}"
            for key in ("in_flight", "queued", "workload", "kv_reserved_tokens")
            if instance[key] != 0
        ]
        if instance["health"] != "up":
            found.append(f"{instance['name']} is {instance['health']}")
    return found
