"""A proxy over scripted upstreams; when a test is over nothing may be left in it."""

from __future__ import annotations

import asyncio
import inspect
from asyncio.selector_events import _SelectorSocketTransport
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import uvloop
from helpers import HANG_S, make_scheduler, spec, turns_until
from proxy.services import Engine

from hetlb.balancer.clients.server import ProxyServer
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.sim.integrity import check_scheduler

#: Modules whose tests run on the standard library's loop too: what transports say, and when, is their matter.
ON_BOTH_LOOPS = frozenset(
    {"test_connection_states", "test_proxying", "test_realtime", "test_tls", "test_waiting"}
)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of `hetlb serve`, and for tests of connections the standard library's."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    both = WRITELINES_PAUSES and item.path.stem in ON_BOTH_LOOPS
    return loops | {"asyncio": asyncio.new_event_loop} if both else loops


#: False where the standard library's loop cannot be trusted: its `writelines` does not pause a protocol whose
#: peer does not read (Python 3.12, and 3.13 before 3.13.2). `hetlb serve` runs on uvloop.
WRITELINES_PAUSES = "writelines" not in vars(_SelectorSocketTransport) or (
    "_maybe_pause_protocol" in inspect.getsource(_SelectorSocketTransport.writelines)
)


def pytest_report_header() -> list[str]:
    """Say where the standard library's loop is left out, and why."""
    if WRITELINES_PAUSES:
        return []
    return ["tests/proxy: uvloop alone, the writelines of this Python's asyncio does not pause (3.13.2 does)"]


class View:
    """What `/v1/models` and `/health` say."""

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "object": "model"}]

    def routable(self) -> bool:
        return True


class Proxy:
    """A running proxy and a record of how its requests ended."""

    def __init__(self, scheduler: Scheduler, table: ProxyTable) -> None:
        self._exchanges: list[RequestRecord] = []
        loop = asyncio.get_running_loop()
        self.driver = Driver(table, TokenEstimator(), loop, {}, OPTIONS.splits)
        self.driver.on_ended = self._exchanges.extend
        self.scheduling = self.driver.drive(scheduler)
        self.server = ProxyServer(self.driver, View(), OPTIONS)
        self.scheduler = scheduler
        self.port = 0
        self.changed = asyncio.Condition()

    @property
    def exchanges(self) -> list[RequestRecord]:
        """The exchanges that ended, in order."""
        self.driver.settle()
        return self._exchanges

    @property
    def ended(self) -> list[tuple[str, str, int]]:
        """Outcome, phase and status of the exchanges that ended."""
        return [(str(each.outcome), each.ended_in.value, each.status) for each in self.exchanges]

    async def settled(self) -> None:
        """Wait until no request is open, then check that nothing of one is left."""
        async with asyncio.timeout(HANG_S):
            while self.driver.exchanges:
                await self.driver.drain(HANG_S)
        scheduler = self.scheduler
        check_scheduler(scheduler)
        assert scheduler.in_flight == 0
        assert len(scheduler.queue) == 0
        for instance in scheduler.instances:
            assert not instance.leases
        assert not any(pool.busy or pool._connecting for pool in self.driver.pools.all())


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Start a proxy over these URLs; `table` overrides settings of the data plane."""
    before = asyncio.all_tasks()
    proxies: list[Proxy] = []

    async def start_proxy(
        *urls: str, limits: QueueLimits | None = None, policy: str = "rr", **table: Any
    ) -> Proxy:
        specs = [spec(f"i{n}", url=url, kv=None) for n, url in enumerate(urls)]
        scheduler = make_scheduler(specs, policy, limits=limits)
        proxy = Proxy(scheduler, msgspec.structs.replace(ProxyTable(), **table))
        proxies.append(proxy)
        _, proxy.port = await proxy.server.start("127.0.0.1", 0)
        return proxy

    yield start_proxy
    for proxy in proxies:
        await proxy.settled()
        proxy.server.stop_accepting()
        await proxy.server.close()
        proxy.driver.close()
        await turns_until(lambda p=proxy: not p.driver.pools.open_connections and not p.server.connections)
    # The fixture's own task is a new one after the test.
    await turns_until(lambda: not (asyncio.all_tasks() - before - {asyncio.current_task()}))


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Eight engines."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Engine()) for _ in range(8)]  # type: ignore[misc]
