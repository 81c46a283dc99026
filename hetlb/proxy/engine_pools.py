"""Connections to the engines of a fleet: a pool for each incarnation of an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hetlb.config.fleet_tables import ProxyTable
from hetlb.core.types import Lease
from hetlb.proxy.access import PLAIN_ACCESS, EngineAccess
from hetlb.proxy.upstream import EnginePool


class Target(NamedTuple):
    """One incarnation of an instance, as its connections need it."""

    name: str
    incarnation: int
    url: str
    #: Time at which it is gone, None without a notice.
    leaves_at: float | None = None


class EnginePools:
    """Pools by incarnation, and those to bootstrap servers of KV transfers by URL."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: ProxyTable,
        access: Mapping[str, EngineAccess],
        stalled_since: Callable[[float], bool],
    ) -> None:
        self._loop = loop
        self._table = table
        self._access = access
        self._stalled_since = stalled_since
        self._pools: dict[int, EnginePool] = {}
        self._bootstraps: dict[str, EnginePool] = {}
        #: Called with an instance's name and its `/v1/models` after its engine closed connections.
        self.on_reconnect: Callable[[str, bytes], None] | None = None

    def of(self, lease: Lease) -> EnginePool:
        """The connections to the incarnation a lease is tied to."""
        return self._pools[lease.incarnation]

    def all(self) -> list[EnginePool]:
        """Every pool of an engine."""
        return list(self._pools.values())

    def open(self, incarnation: int, name: str, url: str) -> EnginePool:
        """The pool of an instance, made for its first request."""
        pool = self._pools.get(incarnation)
        if pool is None:
            table, read = self._table, self.on_reconnect
            pool = self._pools[incarnation] = EnginePool(
                url,
                self._loop,
                self._access.get(name, PLAIN_ACCESS),
                connect_timeout_s=table.connect_timeout_s,
                idle_s=table.upstream_idle_s,
                stalled_since=self._stalled_since,
                on_reconnect=None if read is None else lambda body: read(name, body),
            )
        return pool

    def bootstrap(self, name: str) -> EnginePool | None:
        """Connections to the bootstrap server of an instance, None where none is known."""
        url = self._access.get(name, PLAIN_ACCESS).kv_bootstrap
        if url is None:
            return None
        if url not in self._bootstraps:
            self._bootstraps[url] = EnginePool(
                url,
                self._loop,
                PLAIN_ACCESS,
                connect_timeout_s=self._table.connect_timeout_s,
                idle_s=self._table.upstream_idle_s,
            )
        return self._bootstraps[url]

    def configure(self, table: ProxyTable, targets: Iterable[Target]) -> None:
        """New times and keys, for what begins from now on."""
        self._table = table
        for bootstrap in self._bootstraps.values():
            bootstrap.configure(
                PLAIN_ACCESS, connect_timeout_s=table.connect_timeout_s, idle_s=table.upstream_idle_s
            )
        for target in targets:
            if (pool := self._pools.get(target.incarnation)) is not None:
                pool.configure(
                    self._access.get(target.name, PLAIN_ACCESS),
                    connect_timeout_s=table.connect_timeout_s,
                    idle_s=table.upstream_idle_s,
                )

    @property
    def open_connections(self) -> int:
        """Connections to engines and bootstrap servers, in use or idle."""
        return sum(pool.open_connections for pool in self._every())

    def drop_unused(self, live: set[int]) -> None:
        """Close the connections to all other incarnations, as soon as they carry nothing.

        Those to a bootstrap server that no instance has any more end when they have been idle for long.
        """
        for incarnation, pool in list(self._pools.items()):
            if incarnation not in live:
                pool.close()
                if not pool.open_connections:
                    del self._pools[incarnation]
        if self._bootstraps:
            known = {each.kv_bootstrap for each in self._access.values()}
            for url, pool in list(self._bootstraps.items()):
                if url not in known and not pool.open_connections:
                    del self._bootstraps[url]

    def sweep(self, now: float) -> None:
        """Close connections that were idle for too long."""
        for pool in self._every():
            pool.sweep(now)

    def close(self) -> None:
        """Close idle connections, and the others when their request ends."""
        for pool in self._every():
            pool.close()

    def _every(self) -> list[EnginePool]:
        return [*self._pools.values(), *self._bootstraps.values()]
