"""A whole service over scripted engines, and an operator's client for its admin listener."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from helpers import HANG_S, turns_until
from proxy.upstreams import PLAIN_BODY, Upstream, Visit, plain

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Health
from hetlb.balancer.fleet.service import Service
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.sim.integrity import check_scheduler

METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


class Engine(Upstream):
    """An engine that is healthy, serves the model `m` and answers requests with `answer`.

    While `held` is set, requests wait for it to be cleared; `asked` holds their visits, `seen` every head
    that came, probes and all.
    """

    def __init__(self, answer: bytes | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(self._route, tls=tls)
        self.reply = plain() if answer is None else answer
        self.asked: list[Visit] = []
        self.probes = 0
        self.released = asyncio.Event()
        self.released.set()
        #: With a key, everything under /v1 answers 401 without it, as `vllm serve --api-key` does.
        self.key: str | None = None
        self.key_status = b"401 Unauthorized"
        #: "": it lists no model. None: it keeps the list to itself.
        self.served: str | None = "m"

    def hold(self) -> None:
        """Answer no request until `released` is set."""
        self.released.clear()

    async def _route(self, visit: Visit) -> None:
        path = visit.head.split()[1].decode()
        bearer = b"authorization: bearer " + (self.key or "").encode().lower() + b"\r\n"
        if path == "/health":
            self.probes += 1
            visit.send(plain(b""))
        elif path == "/metrics":
            visit.send(plain(METRICS))
        elif path == "/version":
            visit.send(plain(b'{"version":"0.32.0"}'))
        elif self.key is not None and bearer not in visit.head.lower():
            visit.send(plain(b'{"error":"Unauthorized"}', self.key_status))
        elif path == "/v1/models" and self.served is None:
            visit.send(plain(b'{"error":"Forbidden"}', b"403 Forbidden"))
        elif path == "/v1/models":
            listed = [{"id": self.served, "object": "model"}] if self.served else []
            models = {"object": "list", "data": listed}
            visit.send(plain(msgspec.json.encode(models)))
        else:
            self.asked.append(visit)
            async with self.arrived:
                self.arrived.notify_all()
            await self.released.wait()
            visit.send(self.reply)

    async def asked_for(self, number: int = 1) -> Visit:
        """The n-th request that is no probe, when it has come."""
        async with asyncio.timeout(HANG_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= number)
        return self.asked[number - 1]


class PatientService(Service):
    """A service whose first look at its fleet ends when it has seen all of it, on a busy machine too."""

    async def _first_look(self, most_s: float = HANG_S) -> None:
        await super()._first_look(most_s)


class Reply:
    """What the admin listener answered."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def message(self) -> str:
        """The one sentence of a refusal."""
        text: str = self.json["error"]["message"]
        assert "\n" not in text
        return text


class Running:
    """A service, its fleet file, and ways to ask both of its listeners."""

    def __init__(self, service: Service, path: Path, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.path = path
        self.port = service.address[1]
        self.scheduler = service.scheduler
        self._session = session
        #: Whom to trust where the admin listener speaks TLS.
        self.admin_tls: ssl.SSLContext | None = None

    async def admin(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, **headers: str
    ) -> Reply:
        """Ask the admin listener; `headers` are names with `_` for `-`."""
        data = raw if raw is not None else (None if body is None else msgspec.json.encode(body))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        scheme = "http" if self.admin_tls is None else "https"
        url = f"{scheme}://127.0.0.1:{self.service.admin.address[1]}{path}"
        tls = self.admin_tls or True
        async with self._session.request(method, url, data=data, headers=named, ssl=tls) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def ask(self, **headers: str) -> Reply:
        """One completion through the main listener."""
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = b'{"model":"m","prompt":"hello","max_tokens":5}'
        async with self._session.post(url, data=body, headers=named) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    def instance(self, name: str) -> Instance:
        return next(each for each in self.scheduler.instances if each.name == name)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.scheduler.instances]

    async def up(self, name: str) -> None:
        """Wait until the watcher found an instance to be up."""
        await turns_until(
            lambda: name in self.names and self.instance(name).evidence.health.state is Health.UP
        )

    async def settled(self) -> None:
        """Wait until no request is open, then check that nothing of one is left."""
        await turns_until(lambda: not self.service.driver.exchanges)
        check_scheduler(self.scheduler)
        sharing = self.service.sharing
        # Leases of a peer end with its messages, which may still be under way.
        assert self.scheduler.in_flight == (0 if sharing is None else sharing.view.peer_leases)
        assert self.scheduler.queue.bytes == 0

    def rewrite(self, document: dict[str, Any]) -> None:
        """Put another fleet in the file."""
        self.path.write_text(yaml.safe_dump(document))


def document(*engines: Upstream, **tables: Any) -> dict[str, Any]:
    """A fleet of these engines, named i0, i1, …, on free ports; `tables` are merged in."""
    instances = [{"name": f"i{n}", "url": engine.url} for n, engine in enumerate(engines)]
    base: dict[str, Any] = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policy": {"name": "rr"},
        # A test that rewrites the file says itself when it is read.
        "watch": False,
        # An answer to a probe is late where a test says so.
        "scrape": {"interval_s": 0.05, "timeout_s": HANG_S},
        "models": [{"name": "m", "instances": instances}],
    }
    for name, table in tables.items():
        base[name] = {**base[name], **table} if isinstance(base.get(name), dict) else table
    return base


@contextlib.asynccontextmanager
async def serving(
    folder: Path, fleet: dict[str, Any], *, policy: str | None = None
) -> AsyncIterator[Running]:
    """The service of a fleet file, with a policy as a flag gives it; in the end nothing may be left of it."""
    before = asyncio.all_tasks()
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    loaded = load_fleet(path)
    if policy is not None:
        loaded = loaded.with_tables(policy=msgspec.structs.replace(loaded.file.policy, name=policy))
    service = PatientService(loaded, OPTIONS)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S)) as session:
            await service.start()
            running = Running(service, path, session)
            yield running
            await running.settled()
    finally:
        await service.stop(0.0)
    driver = service.driver
    await turns_until(lambda: not driver.pools.open_connections and not service.server.connections)
    await turns_until(lambda: not (asyncio.all_tasks() - before - {asyncio.current_task()}))


def said(records: list[logging.LogRecord], part: str) -> list[str]:
    """The log lines that hold `part`; each must be one line."""
    lines = [record.getMessage() for record in records if part in record.getMessage()]
    assert not any("\n" in line for line in lines)
    return lines


__all__ = ["PLAIN_BODY", "Engine", "PatientService", "Reply", "Running", "document", "said", "serving"]
