"""`hetlb pick`, whole: the service of a process that serves alone, with gateways in the place of clients."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hetlb.addresses import is_special
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import Listen
from hetlb.balancer.core.types import InstanceSpec
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.fleet.service import Service
from hetlb.balancer.fleet.source import Source
from hetlb.balancer.option_record import Options, Predecessor
from hetlb.inputs.urls import bracketed, origin
from hetlb.options.pick.pick_driver import PickDriver
from hetlb.options.pick.pick_server import PickServer, gateway_certificates
from hetlb.systemd import NO_LISTENERS, Listeners
from hetlb.tasks import ended

#: Seconds between two resolutions of the names of instances.
_RESOLVE_S: Final = 5.0
#: Concurrent look-ups of names: a dead name server holds up a start by 5 s for every 32 names.
_LOOKUPS: Final = 32


class PickService(Service):
    """An endpoint picker. Raises `ConfigError` if the fleet file does not fit one."""

    driver: PickDriver
    server: PickServer

    def __init__(self, fleet: Fleet, options: Options, event_log: Path | None = None) -> None:
        pick = fleet.file.pick
        listen = Listen(host=pick.host, port=pick.port)
        super().__init__(fleet.with_tables(listen=listen), options, event_log)
        self._resolver: asyncio.Task[None] | None = None
        self.roster.on_coming = self._coming

    def _drive(self) -> SchedulerDriver:
        fleet = self.fleet
        estimator = TokenEstimator(fleet.token_counters)
        loop = asyncio.get_running_loop()
        self.driver = PickDriver(
            self.scheduler, fleet.file.proxy, estimator, loop, self._engines, self.options.splits
        )
        return self.driver.picking

    def _make_server(self) -> PickServer:
        return PickServer(self.driver, self.availability, self.fleet, self.options)

    @property
    def ready_line(self) -> str:
        return super().ready_line.replace("hetlb ready", "hetlb pick ready", 1)

    async def start(self, listeners: Listeners = NO_LISTENERS, takeover: Predecessor | None = None) -> None:
        """Know the addresses of the instances, then start as any service."""
        await self._resolve()
        self._resolver = asyncio.create_task(self._resolve_for_ever())
        await super().start(listeners, takeover)

    async def close(self) -> None:
        """Close everything now."""
        task, self._resolver = self._resolver, None
        if task is not None:
            await ended(task)
        await super().close()

    def _coming(self, spec: InstanceSpec) -> None:
        """Know the address of an instance before its first request, unless its name must be resolved."""
        if (address := _literal(spec.url)) is not None:
            self.server.state.set_address(spec.name, address)

    def _discovery_sources(self) -> Sequence[Source]:
        fleet, table = self.fleet, self.fleet.file.discovery
        if table is None or not table.kubernetes:
            return super()._discovery_sources()
        objectives = self.options.objectives(fleet, table, self.server.state.set_objectives)
        return [*super()._discovery_sources(), *objectives]

    async def _resolve_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Resolve the `ip:port` of every instance; after a failed look-up an instance keeps its last one."""
        state, found, lookups = self.server.state, {}, asyncio.Semaphore(_LOOKUPS)
        urls = {each.name: each.spec.url for each in self.scheduler.instances}
        named = {url for url in urls.values() if _literal(url) is None}
        looked_up = dict(
            zip(named, await asyncio.gather(*(_look_up(each, lookups) for each in named)), strict=True)
        )
        for name, url in urls.items():
            address = _literal(url) or looked_up[url] or state.addresses.get(name)
            if address is not None:
                found[name] = address
        if found != state.addresses:
            state.set_addresses(found)


def check_pick(fleet: Fleet) -> None:
    """Raise `ConfigError` unless all that the section `pick` names is there."""
    gateway_certificates(fleet)


def _literal(url: str) -> str | None:
    """Return the `ip:port` of a URL with an address in it, None for a URL with a name."""
    _, host, port = origin(url)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return f"{bracketed(host)}:{port}"


async def _look_up(url: str, lookups: asyncio.Semaphore) -> str | None:
    """Return the `ip:port` of a URL with a name in it, IPv4 first; None if nothing is found.

    Addresses that no engine can have do not count: gateways would send requests, with the engine's key,
    there.
    """
    _, host, port = origin(url)
    try:
        async with lookups, asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return None
    found = [each for each in found if not is_special(str(each[4][0]))]
    first = min(found, key=lambda each: each[0] != socket.AF_INET, default=None)
    return None if first is None else f"{bracketed(str(first[4][0]))}:{port}"
