"""`hetlb pick`, whole: the service of a process that serves alone, with gateways in the place of clients."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from hetlb.config.fleet import Fleet, Listen
from hetlb.core.types import InstanceSpec
from hetlb.pick.driver import PickDriver
from hetlb.pick.server import PickServer, gateway_context
from hetlb.pick.sharing import Sharing, shared_url
from hetlb.proxy.access import EngineAccess
from hetlb.proxy.service import Service
from hetlb.proxy.systemd import NO_LISTENERS, Listeners
from hetlb.proxy.takeover import Takeover

#: Names of instances are resolved again this often.
_RESOLVE_S: Final = 5.0


class PickService(Service):
    """An endpoint picker. Raises `ConfigError` where it cannot be one."""

    driver: PickDriver
    server: PickServer
    _make_driver = PickDriver
    _hands_over = False  # gRPC's listener cannot be given to another process

    def __init__(self, fleet: Fleet, event_log: Path | None = None) -> None:
        pick = fleet.pick
        super().__init__(
            msgspec.structs.replace(fleet, listen=Listen(host=pick.host, port=pick.port)), event_log
        )
        self._resolver: asyncio.Task[None] | None = None
        #: What other pickers of the fleet have, None where this one is alone.
        self.sharing: Sharing | None = None
        if pick.shared is not None:
            url = shared_url(pick.shared, fleet.where)
            self.sharing = Sharing(pick.shared, url, self.scheduler, self.driver.carry_out)
            self.driver.share(self.sharing.view, self.sharing.changed)

    def _make_server(self) -> PickServer:
        return PickServer(self.driver, self, self.fleet, self._serves)

    def _serves(self) -> bool:
        """True if gateways should send requests here."""
        return self.routable() and (self.sharing is None or self.sharing.serves)

    async def start(self, listeners: Listeners = NO_LISTENERS, takeover: Takeover | None = None) -> None:
        """Know the addresses of the instances, then start as any service."""
        await self._resolve()
        self._resolver = asyncio.create_task(self._resolve_for_ever())
        if self.sharing is not None:
            self.sharing.start()
        await super().start(listeners, takeover)

    async def close(self) -> None:
        """Close everything now."""
        task, self._resolver = self._resolver, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.sharing is not None:
            await self.sharing.close()
        await super().close()

    def _add(self, spec: InstanceSpec, access: EngineAccess) -> None:
        if (address := _literal(spec.url)) is not None:
            self.server.state.set_addresses({**self.server.state.addresses, spec.name: address})
        super()._add(spec, access)

    async def _resolve_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Find the `ip:port` of every instance; one whose name does not resolve now keeps what it had."""
        state, found = self.server.state, {}
        for instance in self.scheduler.instances:
            known = state.addresses.get(instance.name)
            address = _literal(instance.spec.url) or await _looked_up(instance.spec.url) or known
            if address is not None:
                found[instance.name] = address
        if found != state.addresses:
            state.set_addresses(found)


def check_pick(fleet: Fleet) -> None:
    """Raise `ConfigError` unless all that the section `pick` names is there."""
    gateway_context(fleet)
    if fleet.pick.shared is not None:
        shared_url(fleet.pick.shared, fleet.where)


def _parts(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None, f"expected a checked URL, got {url!r}"
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _literal(url: str) -> str | None:
    """`ip:port` of a URL with an address in it, None of one with a name."""
    host, port = _parts(url)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return _endpoint(host, port)


async def _looked_up(url: str) -> str | None:
    """`ip:port` of a URL with a name in it, None where it does not resolve."""
    host, port = _parts(url)
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return None
    return _endpoint(str(found[0][4][0]), port)
