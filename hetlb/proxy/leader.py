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
    """State of an election: `leads` says whether this process does, `epoch` is its number as a leader.

    The election is by a Lease, as Kubernetes' own components elect theirs (coordination.k8s.io/v1). A Lease
    is another's until it has not changed for its duration by the clock here: times in it are not compared,
    since clocks differ. It is written with the `resourceVersion` that was read, so that of several
    that want it one gets it (409 for the others). `leaseTransitions` is the leader's number.
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
        """Begin to lead, or to wait for it."""
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
                lease = await self._get(self._session())
                if lease is not None and _spec(lease).get("holderIdentity") == self._name:
                    await self._put(self._session(), lease, {"holderIdentity": "", "leaseDurationSeconds": 1})
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            failed = ""
            try:
                await self._look(self._session(), asyncio.get_running_loop().time())
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

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=self._every_s)
            connector = aiohttp.TCPConnector(ssl=self._api.tls())
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self._http

    async def _disconnect(self) -> None:
        session, self._http = self._http, None
        if session is not None:
            await session.close()

    async def _look(self, session: aiohttp.ClientSession, now: float) -> None:
        """Renew the Lease, take one that has run out, or see that it is another's."""
        lease = await self._get(session)
        if lease is None:
            if await self._create(session):
                self._won(1)
            return
        spec, version = _spec(lease), str(lease["metadata"].get("resourceVersion", ""))
        holder = spec.get("holderIdentity") or ""
        if holder == self._name:
            stays = await self._put(session, lease, {})
            if stays and not self.leads:
                self._won(_number(spec, "leaseTransitions"))
            return
        if self.leads:
            self._resign(f"its lease is held by {holder or 'none'}")
        if version != self._version:
            self._version, self._changed_at = version, now
        lasts_s = _number(spec, "leaseDurationSeconds") or self._table.duration_s
        if not holder or now - self._changed_at > lasts_s:
            epoch = _number(spec, "leaseTransitions") + 1
            fields = {"holderIdentity": self._name, "leaseTransitions": epoch, "acquireTime": _now()}
            if await self._put(session, lease, fields):
                self._won(epoch)

    async def _get(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        """The Lease as it is, None where there is none yet. Raises `SourceFailedError`."""
        url = f"{self._api.url}{self._path}/{self._table.name}"
        async with session.get(url, headers=self._api.headers()) as reply:
            body = await reply.read()
            if reply.status == 404:
                return None
            if reply.status != 200:
                raise SourceFailedError(f"the API server answers {reply.status}")
        try:
            return msgspec.convert(msgspec.json.decode(body), dict[str, Any])
        except msgspec.MsgspecError as error:
            raise SourceFailedError(f"expected a Lease: {error}") from error

    async def _create(self, session: aiohttp.ClientSession) -> bool:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._table.name, "namespace": self._api.namespace},
            "spec": {
                "holderIdentity": self._name,
                "leaseDurationSeconds": self._table.duration_s,
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseTransitions": 1,
            },
        }
        url = f"{self._api.url}{self._path}"
        async with session.post(url, json=lease, headers=self._api.headers()) as reply:
            return self._written(reply.status, 201)

    async def _put(
        self, session: aiohttp.ClientSession, lease: dict[str, Any], fields: dict[str, Any]
    ) -> bool:
        """Write a Lease that was read; False where it has changed since. Raises `SourceFailedError`."""
        spec = {**_spec(lease), "leaseDurationSeconds": self._table.duration_s, "renewTime": _now(), **fields}
        url = f"{self._api.url}{self._path}/{self._table.name}"
        document = {**lease, "spec": spec}
        async with session.put(url, json=document, headers=self._api.headers()) as reply:
            return self._written(reply.status, 200)

    @staticmethod
    def _written(status: int, good: int) -> bool:
        if status not in (good, 409):
            raise SourceFailedError(f"the API server answers {status}")
        return status == good


def _spec(lease: dict[str, Any]) -> dict[str, Any]:
    """`spec` of a Lease. Raises `SourceFailedError`."""
    spec = lease.get("spec") or {}
    if not isinstance(spec, dict) or not isinstance(lease.get("metadata"), dict):
        raise SourceFailedError("expected a Lease")
    return spec


def _number(spec: dict[str, Any], key: str) -> int:
    value = spec.get(key)
    return value if isinstance(value, int) else 0


def _now() -> str:
    """The time as Kubernetes writes it (MicroTime)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
