"""The leader, where one process serves a fleet and the others are ready to: the holder of a Kubernetes Lease.

Each leader has a higher number than the one before (`epoch`). A leader that cannot reach the API server goes
on: no request would be helped if it stopped. It resigns at the first answer that names another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from hetlb.config.discovery import LeaseTable
from hetlb.proxy.discovery.kubernetes import ApiServer
from hetlb.proxy.discovery.source import SourceFailedError
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.shared")

#: A Lease is looked at so often while it lasts.
_LOOKS: Final = 3.0
#: Reasons for which a Lease cannot be read or written now.
_FAILURES: Final = (aiohttp.ClientError, SourceFailedError, TimeoutError, OSError)


class Leader:
    """State of an election by a Lease, as Kubernetes' own components elect theirs (coordination.k8s.io/v1).

    A Lease is another's until it has not changed for its duration by the clock here. It is written with the
    `resourceVersion` that was read: of several that want it one gets it (409 for the others).
    """

    def __init__(self, table: LeaseTable, base: Path, name: str, key: str) -> None:
        """`name` is this process's; `key` names the table in errors. Raises `ConfigError`."""
        self.leads = False
        self.epoch = 0
        self._name = name
        self._api = ApiServer(table, base, key)
        self._table = table
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{self._api.namespace}/leases"
        #: Seconds between two looks; one that takes as long has failed.
        self._every_s = table.duration_s / _LOOKS
        self._version = ""
        self._changed_at = 0.0
        self._failed = ""
        self._http: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; another may lead at once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.leads:
            self.leads = False
            with contextlib.suppress(*_FAILURES):
                lease = await self._get()
                if _spec(lease).get("holderIdentity") == self._name:
                    await self._write(lease, {"holderIdentity": "", "leaseDurationSeconds": 1})
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            failed = ""
            try:
                await self._look(asyncio.get_running_loop().time())
            except _FAILURES as error:
                failed = " ".join(str(error).split())[:200] or type(error).__name__
                await self._disconnect()
            if failed and failed != self._failed:
                role = "leads on" if self.leads else "cannot take over"
                text = "shared state: lease %s: %s: this process %s"
                tell(logger, Event.LEASE, text, self._table.name, failed, role)
            self._failed = failed
            await asyncio.sleep(self._every_s)

    def _won(self, epoch: int) -> None:
        self.leads, self.epoch = True, epoch
        tell(logger, Event.LEADS, "shared state: this process leads (%d)", epoch, epoch=epoch)

    def _resign(self, reason: str) -> None:
        self.leads = False
        tell(
            logger, Event.LEADS_NO_MORE, "shared state: this process leads no more: %s", reason, reason=reason
        )

    async def _disconnect(self) -> None:
        session, self._http = self._http, None
        if session is not None:
            await session.close()

    async def _look(self, now: float) -> None:
        """Renew the Lease, take one that has run out, or see that it is another's."""
        lease = await self._get()
        spec, version = _spec(lease), str(lease["metadata"].get("resourceVersion", ""))
        holder = spec.get("holderIdentity") or ""
        if holder == self._name:
            stays = await self._write(lease, {})
            if stays and not self.leads:
                self._won(_number(spec, "leaseTransitions"))
            return
        if self.leads and version:
            self._resign(f"its lease is held by {holder or 'none'}")
        if version != self._version:
            self._version, self._changed_at = version, now
        lasts_s = _number(spec, "leaseDurationSeconds") or self._table.duration_s
        if not holder or now - self._changed_at > lasts_s:
            epoch = _number(spec, "leaseTransitions") + 1
            fields = {"holderIdentity": self._name, "leaseTransitions": epoch, "acquireTime": _now()}
            if await self._write(lease, fields):
                self._won(epoch)

    async def _ask(self, method: str, name: str = "", lease: object = None) -> tuple[int, bytes]:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=self._every_s)
            connector = aiohttp.TCPConnector(ssl=self._api.tls())
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        url = f"{self._api.url}{self._path}{name}"
        async with self._http.request(method, url, json=lease, headers=self._api.headers()) as reply:
            return reply.status, await reply.read()

    async def _get(self) -> dict[str, Any]:
        """The Lease as it is; one without a version where there is none yet. Raises `SourceFailedError`."""
        status, body = await self._ask("GET", f"/{self._table.name}")
        if status == 404:
            metadata = {"name": self._table.name, "namespace": self._api.namespace}
            return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        if status != 200:
            raise SourceFailedError(f"the API server answers {status}")
        try:
            return msgspec.convert(msgspec.json.decode(body), dict[str, Any])
        except msgspec.MsgspecError as error:
            raise SourceFailedError(f"expected a Lease: {error}") from error

    async def _write(self, lease: dict[str, Any], fields: dict[str, Any]) -> bool:
        """Write a Lease that was read; False where it has changed since. Raises `SourceFailedError`."""
        spec = {**_spec(lease), "leaseDurationSeconds": self._table.duration_s, "renewTime": _now(), **fields}
        there = "resourceVersion" in lease["metadata"]
        method, name = ("PUT", f"/{self._table.name}") if there else ("POST", "")
        status, _ = await self._ask(method, name, {**lease, "spec": spec})
        if status not in (200, 201, 409):
            raise SourceFailedError(f"the API server answers {status}")
        return status != 409


def _spec(lease: dict[str, Any]) -> dict[str, Any]:
    spec = lease.get("spec") or {}
    if not isinstance(spec, dict) or not isinstance(lease.get("metadata"), dict):
        raise SourceFailedError("expected a Lease")
    return spec


def _number(spec: dict[str, Any], key: str) -> int:
    value = spec.get(key)
    return value if isinstance(value, int) else 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
