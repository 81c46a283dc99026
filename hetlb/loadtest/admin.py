"""The admin listener of a running proxy, as a load test needs it: which policy, who is busy.

Promise: whatever ends a test, the policy is afterwards what it was before, or a `HetlbError` says that it
is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from hetlb.errors import HetlbError

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_IDLE_TIMEOUT_S = 20.0
_POLL_S = 0.05


class FleetAdmin:
    """One proxy's admin listener."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        #: Whether a policy was put in force here.
        self.changed = False

    async def policy(self) -> str:
        """The name of the policy in force."""
        return str((await self._fleet())["policy"])

    async def instances(self) -> list[str]:
        """The names of all instances."""
        return [each["name"] for model in (await self._fleet())["models"] for each in model["instances"]]

    async def set_policy(self, name: str) -> None:
        """Put a policy in force."""
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
            raise HetlbError(f"{self._url}{path}: no answer of a hetlb proxy: {why(error)}") from error


@contextlib.asynccontextmanager
async def fleet_admin(url: str) -> AsyncIterator[FleetAdmin]:
    """The admin listener at `url`; the policy found there is in force again when the block ends.

    Where that asks for a token, it is taken from the variable `HETLB_ADMIN_TOKEN`.
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


def why(error: Exception) -> str:
    """Why there is no answer, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or "timeout"


def busy_figures(fleet: Mapping[str, Any]) -> list[str]:
    """What keeps a fleet from being idle and ready, in words; empty if nothing."""
    found = [f"{key} in the queue: {value}" for key, value in fleet["queue"].items() if value != 0]
    for instance in (each for model in fleet["models"] for each in model["instances"]):
        found += [
            f"{instance['name']}.{key}: {instance[key]}"
            for key in ("in_flight", "queued", "workload", "kv_reserved_tokens")
            if instance[key] != 0
        ]
        if instance["health"] != "up":
            found.append(f"{instance['name']} is {instance['health']}")
    return found
