"""Connections to the engines of a fleet: a pool for each incarnation of an instance.

An idle connection is reused for at most `upstream_idle_s` (uvicorn closes them after 5 s); trouble of this
machine is told apart from the engine's.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from hetlb.addresses import is_literal
from hetlb.balancer.clients.access import PLAIN_ACCESS, EngineAccess
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Lease
from hetlb.balancer.engines.upstream import Carried, EngineConnection, SideCall, Upstream
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.http.connection_states import EngineState
from hetlb.balancer.http.http1 import KnownHeads, ResponseHead, parse_response_head
from hetlb.tasks import end
from hetlb.turns import turns

#: Errors of this machine, not of the engine.
LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
#: Seconds that an engine may take to close a TLS connection.
_TLS_SHUTDOWN_S: Final = 1.0
#: Seconds that the address of a name is used for: later connections resolve the name again.
_RESOLVED_S: Final = 60.0
#: Seconds that a look at an engine's models holds, whatever connections it closes.
_LOOKED_S: Final = 1.0
_IDLE: Final = EngineState.IDLE


def local_trouble(error: OSError) -> bool:
    """Return True if a failed connection is the fault of this machine; an unknown address is not."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_MEMORY
    return error.errno in LOCAL_ERRNOS


class EnginePool(Upstream):
    """The connections to one instance."""

    __slots__ = (
        "_address", "_checks", "_confined", "_connect_timeout_s", "_connecting", "_host", "_host_header",
        "_idle", "_idle_s", "_looked_at", "_loop", "_lost", "_most_age_s", "_now", "_on_reconnect", "_port",
        "_stalled_since", "_tls", "_trip_s", "busy", "closed", "heads", "origin", "own_headers",
        "passthrough", "turns",
    )  # fmt: skip

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        access: EngineAccess,
        table: ProxyTable,
        stalled_since: Callable[[float], bool] = lambda then: False,
        on_reconnect: Callable[[bytes], None] | None = None,
    ) -> None:
        """`stalled_since` returns True if this process stood still since a time: then no engine was slow.

        `on_reconnect` gets the engine's `/v1/models` where it closed connections before: it may be another.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None, f"expected a checked URL, got {url!r}"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._host_header = b"host: " + parts.netloc.encode("ascii")
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._loop = loop
        self._now = loop.time
        self.turns = turns(loop)
        self._stalled_since = stalled_since
        self._on_reconnect = on_reconnect
        #: True if the engine closed or refused a connection since its models were last read here.
        self._lost = False
        self._looked_at = -math.inf
        #: Questions for the engine's models, and when each was asked, by the request that waits.
        self._checks: dict[Carried, tuple[SideCall, float]] = {}
        self.configure(access, table)
        #: The most recently used at the right: the others grow old and are closed.
        self._idle: deque[EngineConnection] = deque()
        self.busy: set[EngineConnection] = set()
        self._connecting: dict[Carried, asyncio.Task[None]] = {}
        #: Round trip of a packet when the newest connection was made, in seconds, 0.0 while unknown.
        self._trip_s = 0.0
        self.closed = False
        self.heads = KnownHeads(lambda raw: parse_response_head(raw, b"POST"))

    def configure(self, access: EngineAccess, table: ProxyTable) -> None:
        """Set key, certificates and times for later requests and connections."""
        self._connect_timeout_s = table.connect_timeout_s
        self._idle_s = table.upstream_idle_s
        self._address = access.address or self._host
        self._confined = access.confined
        self._most_age_s = math.inf if is_literal(self._address) else _RESOLVED_S
        self._tls: dict[str, Any] = {}
        if access.tls is not None:
            self._tls = {
                "ssl": access.tls,
                "server_hostname": self._host,
                "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
            }
        #: The header lines that are ours, and whether a client's own key goes along with them.
        self.own_headers = self._host_header + b"\r\n"
        self.passthrough = access.passthrough and access.authorization is None
        if access.authorization is not None:
            self.own_headers += b"authorization: " + access.authorization + b"\r\n"

    @property
    def open_connections(self) -> int:
        return len(self.busy) + len(self._idle) + len(self._connecting)  # checks are among the busy ones

    def send(self, carried: Carried, *, fresh: bool = False) -> None:
        if not fresh:
            idle, oldest = self._idle, self._now() - self._idle_s
            while idle:
                connection = idle.pop()
                if connection.idle_since > oldest and connection.state is _IDLE:
                    connection.begin(carried)
                    return
                connection.close()
        self._connecting[carried] = self._loop.create_task(self._connect(carried))

    def head(self, request_line: bytes, fields: bytes = b"") -> bytes:
        """Return the head of a request of the proxy's own, with these fields and the engine's."""
        return b"%b HTTP/1.1\r\n%b%b" % (request_line, self.own_headers, fields)

    def cancel(self, carried: Carried) -> None:
        task = self._connecting.pop(carried, None)
        if task is not None:
            end(task)
        if carried in self._checks:
            self._checks.pop(carried)[0].abort()

    def round_trip_s(self) -> float:
        """Return how long a packet and its answer take now, in seconds, 0.0 if that is not known."""
        return self._idle[-1].round_trip_s() if self._idle else self._trip_s

    def lost(self) -> None:
        """Note that the engine closed or refused a connection: another process may answer next."""
        self._lost = True

    @property
    def _unsure(self) -> bool:
        """True if the engine's models are to be read again."""
        return self._lost and self._on_reconnect is not None

    def put_back(self, connection: EngineConnection) -> None:
        """Keep the connection of a cleanly ended answer for a while.

        Not while the engine's models are to be read again: its next connection asks for them.
        """
        now = self._now()
        if self.closed or self._unsure or now - connection.made_at > self._most_age_s:
            connection.close()
            return
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        self.busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close idle connections, and end waits for an engine's models, after their limits."""
        for carried, (check, began) in list(self._checks.items()):
            if now - began > self._connect_timeout_s:
                check.abort()
                try:
                    self._checked(carried, None)
                except Exception as error:
                    carried.fault(error)
        while self._idle and self._idle[0].idle_since <= now - self._idle_s:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close idle connections now and the others as they end."""
        self.closed = True
        while self._idle:
            self._idle.popleft().close()

    async def _connect(self, carried: Carried) -> None:
        end: End | None = None
        detail = ""
        began = self._now()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: EngineConnection(self), self._address, self._port, **self._tls
                )
            connection.made_at = self._now()
            self._trip_s = connection.round_trip_s()
            if self._confined:
                connection.refuse_special_peer()
            if connection.state is EngineState.CLOSED:  # before anything was sent
                end, detail = ends.NOT_ACCEPTED, "the engine closed the connection"
        except asyncio.CancelledError:
            return
        except TimeoutError:
            if self._stalled_since(began) and carried in self._connecting:
                self._connecting[carried] = self._loop.create_task(self._connect(carried))
                return
            end, detail = ends.NOT_ACCEPTED, "the connection was not accepted in time"
        except OSError as error:
            end = ends.LOCAL if local_trouble(error) else ends.NOT_ACCEPTED
            detail = error.strerror or str(error)
            carried.not_connected(error)
        except UnicodeError:
            end, detail = ends.NOT_ACCEPTED, "its host can be no name"
        if self._connecting.pop(carried, None) is None:
            # The client left in the same turn as the connection came.
            if end is None:
                connection.close()
            return
        try:
            if end is not None:
                self._lost = True
                carried.engine_failed(end, detail)
            elif self._unsure and connection.made_at - self._looked_at >= _LOOKED_S:
                self._check(carried, connection)
            else:
                connection.begin(carried)
        except Exception as error:
            carried.fault(error)

    def _check(self, carried: Carried, connection: EngineConnection) -> None:
        """Ask a fresh connection for the engine's models, for a request that waits for the answer."""

        def done(head: ResponseHead, body: bytes) -> None:
            self._checked(carried, body if head.status == 200 else None)

        def failed(end: End, detail: str) -> None:
            if end is ends.JUNK or end is ends.HEAD_CUT:
                self._checked(carried, None)  # the path may not be known there
            elif self._checks.pop(carried, None) is not None:
                carried.engine_failed(ends.NOT_ACCEPTED, detail)

        check = SideCall(self, self.head(b"GET /v1/models"), b"", done, failed, on_fault=carried.fault)
        self._checks[carried] = check, self._now()
        connection.begin(check)

    def _checked(self, carried: Carried, body: bytes | None) -> None:
        """Note that the engine's models were read, or could not be (None); the request goes on."""
        if self._checks.pop(carried, None) is None:
            return
        self._lost, self._looked_at = False, self._now()
        if body is not None and self._on_reconnect is not None:
            self._on_reconnect(body)
        if carried.still_served():
            carried.resent = True  # the engine answered just now: a lost connection is a failure
            self.send(carried)
        else:
            carried.engine_failed(ends.MOVED, "another model is served there")


class EnginePools:
    """Pools by incarnation, and pools to bootstrap servers of KV transfers by URL."""

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
        self._pools: dict[int | str, EnginePool] = {}
        #: Called with an instance's name and its `/v1/models` after its engine closed connections.
        self.on_reconnect: Callable[[str, bytes], None] | None = None

    def of(self, lease: Lease) -> EnginePool:
        """Return the connections to the incarnation that a lease is tied to."""
        return self._pools[lease.incarnation]

    def find(self, lease: Lease) -> EnginePool | None:
        """Return the pool of an instance, None if it was removed."""
        return self._pools.get(lease.incarnation)

    def all(self) -> list[EnginePool]:
        return list(self._pools.values())

    def open(self, incarnation: int, name: str, url: str) -> EnginePool:
        """Return the pool of an instance, made for its first request."""
        pool = self._pools.get(incarnation)
        if pool is None:
            read = self.on_reconnect
            pool = self._pools[incarnation] = EnginePool(
                url,
                self._loop,
                self._access.get(name, PLAIN_ACCESS),
                self._table,
                self._stalled_since,
                None if read is None else lambda body: read(name, body),
            )
        return pool

    def beside(self, url: str) -> EnginePool:
        """Return connections to a server that is asked about requests and answers none."""
        if url not in self._pools:
            self._pools[url] = EnginePool(url, self._loop, PLAIN_ACCESS, self._table)
        return self._pools[url]

    def configure(self, table: ProxyTable, instances: Iterable[Instance]) -> None:
        self._table = table
        names = {each.incarnation: each.name for each in instances}
        for key, pool in self._pools.items():
            if isinstance(key, str):
                pool.configure(PLAIN_ACCESS, table)
            elif key in names:
                pool.configure(self._access.get(names[key], PLAIN_ACCESS), table)

    def drop(self, carried: Carried) -> None:
        """Drop every connection, made or in the making, that carries a request."""
        for pool in self.all():
            pool.cancel(carried)
            for connection in [each for each in pool.busy if each.carried is carried]:
                connection.abort()

    @property
    def open_connections(self) -> int:
        return sum(pool.open_connections for pool in self.all())

    def drop_unused(self, live: set[int]) -> None:
        """Close connections to other incarnations, and forget servers without any."""
        for key, pool in list(self._pools.items()):
            if isinstance(key, int) and key not in live:
                pool.close()
            if key not in live and not pool.open_connections:
                del self._pools[key]

    def sweep(self, now: float) -> None:
        for pool in self.all():
            pool.sweep(now)

    def close(self) -> None:
        for pool in self.all():
            pool.close()
